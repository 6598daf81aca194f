"""Shares of ranks that hold their own shards: each has the elements of canonical tensors that its shards own. Pure.

Everybody who has the same layout cuts the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.boxes import EntangledError, find_overlap
from dcr_cli.delta.manifest import Box
from dcr_cli.delta.manifest_rules import BOX_RANK_LIMIT, PIECES_LIMIT
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout import box as layout_box
from dcr_cli.layout.box import row_strides
from dcr_cli.layout.coverage import Coverage
from dcr_cli.layout.layout import Layout
from dcr_cli.publisher.box_cutting import TooManyError, cut_box
from dcr_cli.publisher.shares import Slice

_NO_PARTS = "push without --part: one process reads all shards"


def shards_of(layout: Layout, rank: int, ranks: int) -> list[str]:
    """The shards of a layout, in its order, that are those of a rank: as many consecutive ones for each as there are,
    or one more or less."""
    paths = list(layout.shards)
    return [path for number, path in enumerate(paths) if number * ranks // len(paths) == rank]


def cut_by_layout(base: Checkpoint, layout: Layout, ranks: int) -> list[tuple[Slice, ...]]:
    """The share of each rank: boxes of tensors that its shards own, in canonical order of their names.

    Replicas are nobody's. What no shard holds, as it does not change, or has no elements, goes around. DamagedError if
    some element is owned by no shard or by two, UnsupportedError if what a shard owns is not made of boxes.
    """
    rank_of = {path: rank for rank in range(ranks) for path in shards_of(layout, rank, ranks)}
    coverage, cutter = Coverage(layout), _Cutter()
    placed = layout.placed()
    shares: list[list[Slice]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(base.tensors):
        if tensor.name in layout.skipped or not tensor.elements:
            shares[number % ranks].append(Slice(tensor, tensor, 0, tensor.elements))
            continue
        boxes = placed[tensor.name]
        owners = coverage.owners_of(tensor.name, layout.tensors[tensor.name], boxes).owners
        cut = cutter.cut(tensor, [boxes[owner].box for owner in owners])
        for owner, pieces in zip(owners, cut, strict=True):
            shares[rank_of[boxes[owner].path]] += [_slice(tensor, piece) for piece in pieces]
    return [tuple(share) for share in shares]


def _slice(tensor: Tensor, box: Box | None) -> Slice:
    if box is None:
        return Slice(tensor, tensor, 0, tensor.elements)
    strides = row_strides(tensor.shape)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    return Slice(tensor, tensor, first, int(np.prod(box.counts)), box)


class _Cutter:
    """Cuts what owners have into boxes; tensors that lie alike, as in all layers of a model, are looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], tuple[layout_box.Box, ...]], list[list[Box | None]]] = {}

    def cut(self, tensor: Tensor, owned: Sequence[layout_box.Box]) -> list[list[Box | None]]:
        """The boxes of each owner; None stands for all of a tensor."""
        if len(owned) == 1:
            return [[None]]
        what = f"tensor {shown(tensor.name)}"
        if tensor.dtype.is_packed or not 0 < len(tensor.shape) <= BOX_RANK_LIMIT:
            facts = f"is owned by several shards, and as {tensor.dtype.name} {list(tensor.shape)} has no pieces"
            raise UnsupportedError(what, facts, hint=_NO_PARTS)
        geometry = tensor.shape, tuple(owned)
        known = self._known.get(geometry)
        if known is None:
            try:
                cut: list[list[Box]] = [cut_box(box, tensor.shape) for box in owned]
                _check_apart([box for boxes in cut for box in boxes])
            except (TooManyError, EntangledError) as error:
                facts = "what its shards own lies too scattered for pieces of a delta"
                raise UnsupportedError(what, facts, hint=_NO_PARTS) from error
            known = self._known[geometry] = [list(boxes) for boxes in cut]
        return known


def _check_apart(boxes: Sequence[Box]) -> None:
    """Raise TooManyError or EntangledError if no reader would take so many boxes of one tensor."""
    if len(boxes) > PIECES_LIMIT:
        raise TooManyError(f"more than {PIECES_LIMIT} boxes")
    rows = np.array([(box.starts, box.steps, box.counts) for box in boxes], np.int64)
    overlap = find_overlap(np.zeros(len(boxes), np.int64), rows)
    assert overlap is None, "owners share no element"
