"""Cuts the comparing of two checkpoints into shares of about equal bytes, one for each of several ranks (pure).

Everybody who sees the same headers cuts the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor
from dcr_cli.delta.manifest import Box
from dcr_cli.delta.manifest_rules import BOX_RANK_LIMIT


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive elements of a tensor, at the same place on both sides; a side that is none of it is None.

    `box` is there if they are not all of the target's.
    """

    base: Tensor | None
    target: Tensor | None
    start: int
    elements: int
    box: Box | None = None

    @property
    def tensor(self) -> Tensor:
        tensor = self.target or self.base
        assert tensor is not None
        return tensor


def cut(base: Checkpoint, target: Checkpoint, ranks: int) -> list[tuple[Slice, ...]]:
    """The share of each rank, in canonical order.

    A tensor is compared with the base's of its name where dtype and size are the same, else read on its own. One of
    more than half a share is cut between two indices of its first axis, if it can have boxes.
    """
    items = list(_items(base, target))
    total = sum(item.tensor.bytes for item in items)
    bounds = [rank * total // ranks for rank in range(ranks + 1)]
    shares: list[list[Slice]] = [[] for _ in range(ranks)]
    at = rank = 0
    for item in items:
        for each in _pieces(item, at, bounds, total // (2 * ranks)):
            width = each.tensor.dtype.width
            twice_middle = 2 * at + (2 * each.start + each.elements) * width
            while rank < ranks - 1 and twice_middle >= 2 * bounds[rank + 1]:
                rank += 1
            shares[rank].append(each)
        at += item.tensor.bytes
    return [tuple(share) for share in shares]


def _items(base: Checkpoint, target: Checkpoint) -> Iterator[Slice]:
    """Whole tensors, by name."""
    for name in sorted(base.by_name.keys() | target.by_name.keys()):
        old, new = base.by_name.get(name), target.by_name.get(name)
        if old is not None and new is not None and (old.dtype, old.bytes) == (new.dtype, new.bytes):
            yield Slice(old, new, 0, new.elements)
            continue
        if old is not None:
            yield Slice(old, None, 0, old.elements)
        if new is not None:
            yield Slice(None, new, 0, new.elements)


def _pieces(item: Slice, at: int, bounds: Sequence[int], large_bytes: int) -> Iterator[Slice]:
    """A tensor that begins at byte `at` of all, cut at the bounds that lie in it, if it is large and can be cut."""
    tensor = item.tensor
    if tensor.bytes <= large_bytes or not _can_be_cut(item):
        yield item
        return
    row_elements = math.prod(tensor.shape[1:])
    row_bytes = row_elements * tensor.dtype.width
    inner = (bound - at for bound in bounds if at < bound < at + tensor.bytes)
    rows = sorted({0, tensor.shape[0], *((bound + row_bytes // 2) // row_bytes for bound in inner)})
    if len(rows) == 2:
        yield item
        return
    for first, last in pairwise(rows):
        starts = (first, *(0 for _ in tensor.shape[1:]))
        box = Box(starts, tuple(1 for _ in tensor.shape), (last - first, *tensor.shape[1:]))
        yield Slice(item.base, item.target, first * row_elements, (last - first) * row_elements, box)


def _can_be_cut(item: Slice) -> bool:
    """Whether pieces of a tensor may have boxes, which say the same of both sides."""
    tensor = item.tensor
    is_alike = item.base is None or item.target is None or item.base.shape == item.target.shape
    return is_alike and 0 < len(tensor.shape) <= BOX_RANK_LIMIT and not tensor.dtype.is_packed and tensor.bytes > 0
