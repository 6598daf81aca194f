"""Shares of ranks that hold their own shards: each has elements of canonical tensors that its shards hold, or hold what
they are made of. Pure.

Everybody who has the same layout cuts the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from dcr_cli.layout.coverage import Coverage, Owners, local_name
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
    """The share of each rank: boxes of tensors that its shards hold, or of what rules make of these, in canonical order
    of their names.

    What shards of several ranks hold alike goes to one of them, so that all have about as much. What no shard holds, as
    it does not change, or has no elements, goes around. DamagedError if some element is owned by no shard or by two,
    UnsupportedError if what a shard owns is not made of boxes, or divides what a rule needs as a whole.
    """
    units: list[_Unit] = []
    made: dict[str, list[_Numbered]] = {}
    for number, tensor in enumerate(base.tensors):
        if tensor.name in layout.skipped or not tensor.elements:
            units.append(_Unit([(number, _slice(tensor, None))], (number % ranks,)))
        else:
            made.setdefault(layout.boxed(tensor.name), []).append(_Numbered(number, tensor))
    cutter = _Cutter(layout, ranks)
    for stored, tensors in made.items():
        units += cutter.units(stored, tensors)
    shares: list[list[tuple[int, Slice]]] = [[] for _ in range(ranks)]
    for unit, rank in zip(units, _spread(units, ranks), strict=True):
        shares[rank] += unit.slices
    return [tuple(each for _, each in sorted(share, key=lambda numbered: numbered[0])) for share in shares]


class _Numbered(NamedTuple):
    """A tensor, and its number in canonical order."""

    number: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Unit:
    """Slices that one rank has together, each with the number of its tensor, and which of the ranks can."""

    slices: Sequence[tuple[int, Slice]]
    ranks: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(each.elements * each.tensor.dtype.width for _, each in self.slices)


def _spread(units: Sequence[_Unit], ranks: int) -> list[int]:
    """The rank of each unit: where several can have it, the one with the fewest bytes by then, large units first."""
    found = [unit.ranks[0] for unit in units]
    loads = [0] * ranks
    for unit in units:
        if len(unit.ranks) == 1:
            loads[unit.ranks[0]] += unit.bytes
    free = (number for number, unit in enumerate(units) if len(unit.ranks) > 1)
    for number in sorted(free, key=lambda number: -units[number].bytes):
        found[number] = min(units[number].ranks, key=lambda rank: (loads[rank], rank))
        loads[found[number]] += units[number].bytes
    return found


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

    def units(self, name: str, made: Sequence[_Numbered]) -> Iterator[_Unit]:
        """What the owners of a tensor that boxes lead to have, of all canonical tensors that are made of it."""
        form, placed = self._forms[name], self._placed[name]
        found = self._coverage.owners_of(name, form, placed)
        owners, holders = [placed[owner] for owner in found.owners], self._holders(placed, found)
        rules = {each.tensor.name for each in made} & self._layout.rules.keys()
        conversions = {rule: conversion_of(rule, self._layout) for rule in sorted(rules)}
        all_of_it = set(range(self._ranks)).intersection(*holders)
        if all_of_it and any(map(needs_whole, conversions.values())):
            yield _Unit([(number, _slice(tensor, None)) for number, tensor in made], tuple(sorted(all_of_it)))
            return
        cut = self._cut(name, form, [owner.box for owner in owners])
        for owner, ranks, boxes in zip(owners, holders, cut, strict=True):
            slices = [
                (number, _slice(tensor, self._made(tensor.name, box, conversions.get(tensor.name), owner)))
                for number, tensor in made
                for box in boxes
            ]
            yield _Unit(slices, ranks)

    def _holders(self, placed: Sequence[Placed], found: Owners) -> list[tuple[int, ...]]:
        """Of each owner the ranks that have its elements in one box: its own, and those of such replicas."""
        if not found.replicas:
            return [(self._rank_of[placed[owner].path],) for owner in found.owners]
        ranks: dict[layout_box.Box, set[int]] = {}
        for each in placed:
            ranks.setdefault(each.box.footprint, set()).add(self._rank_of[each.path])
        return [tuple(sorted(ranks[placed[owner].box.footprint])) for owner in found.owners]

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
