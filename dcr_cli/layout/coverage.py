"""Is every element of a canonical tensor owned exactly once? Pure: values in, owners or an error out.

An element may be in several boxes, as tensors are that every rank holds; then the first box in order owns it, and the
others are replicas, which are read to see that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Box, index_of, meetings
from dcr_cli.layout.layout import Form, Layout, Placed

# A gap is looked for in so many elements at a time.
_AT_ONCE = 1 << 22

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


def find_owners(elements: int, boxes: Sequence[Box]) -> Owners:
    """Say which boxes own the elements of a tensor and which are replicas. OverlapError, GapError, and ValueError where
    a box reaches beyond the tensor."""
    owners: list[int] = []
    replicas: list[int] = []
    covered = 0
    for number, box in enumerate(boxes):
        if box.canonical_end > elements:
            raise ValueError(f"a box ends at element {box.canonical_end} of {elements}")
        shared, first = 0, None
        for owner in owners:
            for meeting in meetings(boxes[owner], box):
                shared += meeting.elements
                if first is None or meeting.canonical < first[1]:
                    first = owner, meeting.canonical
        if first is None:
            owners.append(number)
            covered += box.elements
        elif shared == box.elements:
            replicas.append(number)
        else:
            raise OverlapError(first[0], number, first[1])
    if covered < elements:
        raise GapError(_first_gap(elements, [boxes[owner] for owner in owners]))
    return Owners(tuple(owners), tuple(replicas))


def _first_gap(elements: int, boxes: Sequence[Box]) -> int:
    """The first element that is in no box."""
    for first in range(0, elements, _AT_ONCE):
        is_covered = np.zeros(min(_AT_ONCE, elements - first), np.bool_)
        for box in boxes:
            for part in box.rectangles(box.rank(first), box.rank(first + len(is_covered))):
                box.canonical_view(is_covered, first, part)[...] = True
        if not is_covered.all():
            return first + int(np.argmin(is_covered))
    raise AssertionError("every element is in a box")


class Coverage:
    """Finds the owners of a layout's tensors. Those that lie alike, as in all layers of a model, are looked at once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Geometry, Owners] = {}

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
            return find_owners(form.elements, boxes)
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


def check_locals(layout: Layout) -> None:
    """Raise DamagedError if an element of a local tensor is in two boxes: it could not hold both."""
    known: set[tuple[Box, ...]] = set()
    for path, tensors in layout.shards.items():
        for name, tensor in tensors.items():
            boxes = tuple(placement.box for placement in tensor.placements)
            if len(boxes) < 2 or boxes in known:
                continue
            element = _first_shared([box.inverse() for box in boxes])
            if element is not None:
                where = coordinate(element, tensor.form)
                raise DamagedError(f"{layout.what}: {shown(name)} of {shown(path)}", f"element {where} is in two boxes")
            known.add(boxes)


def _first_shared(boxes: Sequence[Box]) -> int | None:
    """An element of the canonical tensor that is in two of some boxes."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.canonical):
        open_boxes = [other for other in open_boxes if other.canonical_end > box.canonical]
        for other in open_boxes:
            for meeting in meetings(other, box):
                return meeting.canonical
        open_boxes.append(box)
    return None


def coordinate(element: int, form: Form) -> str:
    """Where an element is, for people."""
    index = index_of(element, form.shape)
    return str(index) if len(index) > 1 else str(element)


def local_name(placed: Placed) -> str:
    """Name a local tensor, for people."""
    return f"{shown(placed.name)} of {shown(placed.path)}"
