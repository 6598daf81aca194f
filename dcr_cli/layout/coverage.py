"""Is every element of a canonical tensor owned exactly once? Pure: values in, owners or an error out.

An element may be in several boxes, as tensors are that every rank holds; then the first box in order owns it, and the
others are replicas, which are read to see that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Axis, Box, Patience, index_of, meetings
from dcr_cli.layout.layout import Form, Layout, Placed

# A gap is looked for in so many elements at a time.
_AT_ONCE = 1 << 22
# That takes as long as so many steps of comparing boxes, and as one for each box.
_STEPS_AT_ONCE = 256
# Boxes that lie in one another in no order are compared two by two, in no more pairs than this.
_MOST_PAIRS = 1 << 19
_TANGLED = "too many of its boxes lie in one another in no order"

Geometry = tuple[int, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class Owners:
    """By their numbers, the boxes that own the elements of a tensor, and those that hold elements of the others."""

    owners: tuple[int, ...]
    replicas: tuple[int, ...]


class OverlapError(ValueError):
    """Box `other` shares some elements, from `element` on, with box `one`, and has others of its own."""

    def __init__(self, one: int, other: int, element: int) -> None:
        super().__init__(f"boxes {one} and {other} share element {element}")
        self.one, self.other, self.element = one, other, element


class GapError(ValueError):
    """Element `element` is in no box."""

    def __init__(self, element: int) -> None:
        super().__init__(f"element {element} is in no box")
        self.element = element


def find_owners(elements: int, boxes: Sequence[Box], patience: Patience | None = None) -> Owners:
    """Say which boxes own the elements of a tensor and which are replicas. OverlapError, GapError, and ValueError where
    a box reaches beyond the tensor, or where very many lie in one another in no order, or are not compared before
    `patience`, by default one of their own, has come to its end."""
    distinct: dict[Box, int] = {}
    for number, box in enumerate(boxes):
        if box.canonical_end > elements:
            raise ValueError(f"a box ends at element {box.canonical_end} of {elements}")
        distinct.setdefault(box.footprint, number)
    marked = [_Marked(number, box) for box, number in distinct.items()]
    patience = patience or Patience(len(boxes))
    owners = sorted(_owners_of(marked, patience), key=lambda owner: owner.number)
    if sum(owner.box.elements for owner in owners) < elements:
        try:
            gap = _first_gap(0, elements, owners, patience)
        except ValueError as error:
            raise ValueError("some of its elements, far from the first one, are in no box") from error
        assert gap is not None
        raise GapError(gap)
    numbers = tuple(owner.number for owner in owners)
    owning = set(numbers)
    return Owners(numbers, tuple(number for number in range(len(boxes)) if number not in owning))


class _Marked(NamedTuple):
    """A box, or what it has in one of some equal steps, and its number."""

    number: int
    box: Box


def _owners_of(boxes: Sequence[_Marked], patience: Patience) -> Iterator[_Marked]:
    """Those of some boxes that own elements; the others have no element that these have not."""
    for group in _groups(boxes):
        step = _common_step(group)
        if len(group) == 1:
            yield from group
        elif step is not None:
            owning = {owner.number for owner in _owners_of(_one_step(group), patience)}
            yield from (each for each in group if each.number in owning)
        else:
            yield from _owners_among(group, patience)


def _owners_among(group: Sequence[_Marked], patience: Patience) -> list[_Marked]:
    """As _owners_of, box by box, each compared with all owners before it."""
    owners: list[_Marked] = []
    pairs = 0
    for each in sorted(group, key=lambda each: each.number):
        pairs += len(owners)
        if pairs > _MOST_PAIRS:
            raise ValueError(_TANGLED)
        shared, first = 0, None
        for owner in owners:
            for meeting in meetings(owner.box, each.box, patience):
                shared += meeting.elements
                if first is None or meeting.canonical < first[1]:
                    first = owner.number, meeting.canonical
        if first is None:
            owners.append(each)
        elif shared < each.box.elements:
            raise OverlapError(first[0], each.number, first[1])
    return owners


def _groups(boxes: Sequence[_Marked]) -> Iterator[list[_Marked]]:
    """Boxes in order, in groups of which none begins before all of the groups before it have ended."""
    group: list[_Marked] = []
    end = 0
    for each in sorted(boxes, key=lambda each: each.box.canonical):
        if group and each.box.canonical >= end:
            yield group
            group = []
        group.append(each)
        end = max(end, each.box.canonical_end)
    if group:
        yield group


def _common_step(group: Sequence[_Marked]) -> Axis | None:
    """The outermost axis of all boxes of a group, if they have the same one and it leads from what all of them have in
    one step past all of that: then what holds for one step holds for each."""
    axes = {each.box.axes[:1] for each in group}
    if len(axes) > 1 or () in axes:
        return None
    step = group[0].box.axes[0]
    inner = _one_step(group)
    reach = max(each.box.canonical_end for each in inner) - min(each.box.canonical for each in inner)
    return step if reach <= step.canonical else None


def _one_step(group: Sequence[_Marked]) -> list[_Marked]:
    """What the boxes of a group have in the first step of their outermost axis."""
    return [_Marked(number, Box(box.axes[1:], box.canonical, box.local)) for number, box in group]


def _first_gap(begin: int, end: int, owners: Sequence[_Marked], patience: Patience) -> int | None:
    """The first element from `begin` to `end` that is in none of some boxes, of which no two share any. ValueError when
    `patience` has come to its end."""
    for group in _groups(owners):
        if begin < group[0].box.canonical:
            return begin
        stop = max(each.box.canonical_end for each in group)
        if sum(each.box.elements for each in group) < stop - begin:
            step = _common_step(group)
            if step is None:
                return _first_unpainted(begin, stop, group, patience)
            return _first_gap(begin, begin + step.canonical, _one_step(group), patience)
        begin = stop
    return begin if begin < end else None


def _first_unpainted(begin: int, end: int, group: Sequence[_Marked], patience: Patience) -> int | None:
    """As _first_gap, element by element."""
    for first in range(begin, end, _AT_ONCE):
        patience.spend(_STEPS_AT_ONCE + len(group))
        is_covered = np.zeros(min(_AT_ONCE, end - first), np.bool_)
        for _, box in group:
            for part in box.rectangles(box.rank(first), box.rank(first + len(is_covered))):
                box.canonical_view(is_covered, first, part)[...] = True
        if not is_covered.all():
            return first + int(np.argmin(is_covered))
    return None


class Coverage:
    """Finds the owners of a layout's tensors. Those that lie alike, as in all layers of a model, are looked at once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Geometry, Owners] = {}
        self._patience = Patience(layout.boxes)

    def owners_of(self, name: str, form: Form, placed: Sequence[Placed]) -> Owners:
        """As find_owners. DamagedError, with the coordinate, if not every element is owned exactly once."""
        boxes = tuple(each.box for each in placed)
        geometry = form.elements, boxes
        known = self._known.get(geometry)
        if known is None:
            known = self._known[geometry] = self._find(name, form, placed, boxes)
        return known

    def _find(self, name: str, form: Form, placed: Sequence[Placed], boxes: Sequence[Box]) -> Owners:
        what = f"{self._layout.what}: tensor {shown(name)}"
        try:
            return find_owners(form.elements, boxes, self._patience)
        except OverlapError as error:
            where = coordinate(error.element, form)
            one, other = local_name(placed[error.one]), local_name(placed[error.other])
            raise DamagedError(what, f"element {where} is in {one} and in {other}, which overlap in part") from error
        except GapError as error:
            facts = f"element {coordinate(error.element, form)} is in no shard"
            if not boxes:
                facts = "is in no shard"
            raise DamagedError(what, facts, hint=self._layout.hint) from error
        except ValueError as error:
            raise DamagedError(what, f"has shape {list(form.shape)}, but {error}") from error


def tied_tensors(layout: Layout) -> dict[str, str]:
    """The tensors that lie in just the places of one before them, as an output layer that is tied to an embedding: by
    name, that one. They are the same elements, and can only change together."""
    first: dict[tuple[Placed, ...], str] = {}
    found = {}
    for name, placed in layout.placed().items():
        one = first.setdefault(tuple(placed), name) if placed else name
        if one != name:
            found[name] = one
    return found


def check_locals(layout: Layout) -> None:
    """Raise DamagedError if an element of a local tensor is in two boxes, but of tensors that are tied: it could not
    hold both; or where very many of these lie in one another in no order."""
    tied = tied_tensors(layout)
    known: set[tuple[Box, ...]] = set()
    patience = Patience(layout.boxes)
    for path, tensors in layout.shards.items():
        for name, tensor in tensors.items():
            places = {number: place for number, place in enumerate(tensor.placements) if place.tensor not in tied}
            boxes = tuple(place.box for place in places.values())
            if len(boxes) < 2 or boxes in known:
                continue
            what = f"{layout.what}: {shown(name)} of {shown(path)}"
            marked = [_Marked(number, place.box.inverse()) for number, place in places.items()]
            try:
                found = _first_shared(marked, patience)
            except ValueError as error:
                raise DamagedError(what, str(error)) from error
            if found is not None:
                one, other = (f"box {number} of {shown(places[number].tensor)}" for number in (found.one, found.other))
                facts = f"element {coordinate(found.element, tensor.form)} is in {one} and in {other}"
                raise DamagedError(what, facts)
            known.add(boxes)


class _Shared(NamedTuple):
    """An element that two boxes have, and their numbers."""

    element: int
    one: int
    other: int


def _first_shared(boxes: Sequence[_Marked], patience: Patience) -> _Shared | None:
    """An element of the canonical tensor that is in two of some boxes."""
    for group in _groups(boxes):
        step = _common_step(group)
        if len(group) == 1:
            continue
        found = _first_shared(_one_step(group), patience) if step is not None else _first_met(group, patience)
        if found is not None:
            return found
    return None


def _first_met(group: Sequence[_Marked], patience: Patience) -> _Shared | None:
    """As _first_shared, of boxes in order, each compared with those before it that have not ended."""
    open_boxes: list[_Marked] = []
    pairs = 0
    for each in group:
        open_boxes = [other for other in open_boxes if other.box.canonical_end > each.box.canonical]
        pairs += len(open_boxes)
        if pairs > _MOST_PAIRS:
            raise ValueError(_TANGLED)
        for other in open_boxes:
            for meeting in meetings(other.box, each.box, patience):
                return _Shared(meeting.canonical, *sorted((other.number, each.number)))
        open_boxes.append(each)
    return None


def coordinate(element: int, form: Form) -> str:
    """Where an element is, for people; of those that share a byte, the first that has a bit in it."""
    dtype = DTYPES[form.dtype]
    number = element * 8 // dtype.bits if dtype.is_packed else element
    index = index_of(number, form.shape)
    return str(index) if len(index) > 1 else str(number)


def local_name(placed: Placed) -> str:
    """Name a local tensor, for people."""
    return f"{shown(placed.name)} of {shown(placed.path)}"
