"""Shares of ranks that hold their own shards: each has the elements of canonical tensors that its shards own, or own
what they are made of. Pure.

Everybody who has the same layout cuts the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.boxes import EntangledError, find_overlap
from dcr_cli.delta.manifest import Box
from dcr_cli.delta.manifest_rules import BOX_RANK_LIMIT, PIECES_LIMIT
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout import box as layout_box
from dcr_cli.layout.box import row_strides
from dcr_cli.layout.coverage import Coverage, local_name
from dcr_cli.layout.layout import Form, Layout, Placed
from dcr_cli.layout.residual.rules import Conversion, conversion_of
from dcr_cli.publisher.box_cutting import TooManyError, cut_box
from dcr_cli.publisher.rule_boxes import DividedError, made_box, needs_whole
from dcr_cli.publisher.shares import Slice

_NO_PARTS = "push without --part: one process reads all shards"


def shards_of(layout: Layout, rank: int, ranks: int) -> list[str]:
    """The shards of a layout, in its order, that are those of a rank: as many consecutive ones for each as there are,
    or one more or less."""
    paths = list(layout.shards)
    return [path for number, path in enumerate(paths) if number * ranks // len(paths) == rank]


def cut_by_layout(base: Checkpoint, layout: Layout, ranks: int) -> list[tuple[Slice, ...]]:
    """The share of each rank: boxes of tensors that its shards own, or of what rules make of these, in canonical order
    of their names.

    Replicas are nobody's. What no shard holds, as it does not change, or has no elements, goes around. DamagedError if
    some element is owned by no shard or by two, UnsupportedError if what a shard owns is not made of boxes, or divides
    what a rule needs as a whole.
    """
    cutter = _Cutter(layout, ranks)
    shares: list[list[Slice]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(base.tensors):
        if tensor.name in layout.skipped or not tensor.elements:
            shares[number % ranks].append(_slice(tensor, None))
            continue
        for rank, each in cutter.slices(number, tensor):
            shares[rank].append(each)
    return [tuple(share) for share in shares]


def _slice(tensor: Tensor, box: Box | None) -> Slice:
    if box is None:
        return Slice(tensor, tensor, 0, tensor.elements)
    strides = row_strides(tensor.shape)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    return Slice(tensor, tensor, first, int(np.prod(box.counts)), box)


class _Cutter:
    """Cuts what owners have into boxes; tensors that lie alike, as in all layers of a model, are looked at once."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        self._layout = layout
        self._coverage = Coverage(layout)
        self._forms, self._placed = layout.forms(), layout.placed()
        self._rank_of = {path: rank for rank in range(ranks) for path in shards_of(layout, rank, ranks)}
        self._ranks = ranks
        self._known: dict[tuple[tuple[int, ...], tuple[layout_box.Box, ...]], list[list[Box | None]]] = {}

    def slices(self, number: int, tensor: Tensor) -> Iterator[tuple[int, Slice]]:
        """The slices of tensor `number`, each with its rank."""
        layout = self._layout
        name = layout.boxed(tensor.name)
        form, placed = self._forms[name], self._placed[name]
        owners = [placed[owner] for owner in self._coverage.owners_of(name, form, placed).owners]
        conversion = conversion_of(tensor.name, layout) if tensor.name in layout.rules else None
        if needs_whole(conversion):
            ranks = {self._rank_of[owner.path] for owner in owners}
            if len(ranks) <= 1:
                # What a function makes of nothing is anybody's.
                yield (ranks.pop() if ranks else number % self._ranks), _slice(tensor, None)
                return
        for owner, boxes in zip(owners, self._cut(name, form, [owner.box for owner in owners]), strict=True):
            for box in boxes:
                yield self._rank_of[owner.path], _slice(tensor, self._made(tensor.name, box, conversion, owner))

    def _made(self, name: str, box: Box | None, conversion: Conversion | None, owner: Placed) -> Box | None:
        stored = self._layout.boxed(name)
        try:
            return made_box(box, conversion, self._forms[stored])
        except DividedError as error:
            kind = self._layout.rules[name].kind
            facts = f"is made of {error} of {shown(stored)}, by rule {kind}, of which {local_name(owner)} has a part"
            raise UnsupportedError(f"tensor {shown(name)}", facts, hint=_NO_PARTS) from error

    def _cut(self, name: str, form: Form, owned: Sequence[layout_box.Box]) -> list[list[Box | None]]:
        """The boxes of each owner; None stands for all of a tensor."""
        if len(owned) == 1:
            return [[None]]
        what = f"tensor {shown(name)}"
        if DTYPES[form.dtype].is_packed or not 0 < len(form.shape) <= BOX_RANK_LIMIT:
            raise UnsupportedError(what, f"is owned by several shards, and as {form} has no pieces", hint=_NO_PARTS)
        geometry = form.shape, tuple(owned)
        known = self._known.get(geometry)
        if known is None:
            try:
                cut: list[list[Box]] = [cut_box(box, form.shape) for box in owned]
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
