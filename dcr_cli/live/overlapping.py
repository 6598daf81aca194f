"""Places of one module that hold some of the same elements, and others besides: whether their bits are the same there.

Places of just the same elements are compared by their digests, in shares.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Axis, Box, Meeting, Rectangle, meetings
from dcr_cli.layout.layout import Placed
from dcr_cli.live.memory import Memory


def compare_overlaps(memory: Memory, tensor: str, places: Sequence[Placed]) -> bool:
    """Compare what places of a tensor hold that share some of their elements with others: whether there are any.

    DamagedError where their bits differ, UnsupportedError where it takes too long to tell what they share.
    """
    footprints = [place.box.footprint for place in places]
    has_any = False
    for (one, left), (other, right) in combinations(zip(places, footprints, strict=True), 2):
        if left == right:
            continue
        for meeting in _meetings(one.box, other.box, tensor):
            has_any = True
            ours = [local for _, local, _ in meeting.axes]
            theirs = [local for _, _, local in meeting.axes]
            here = _read(memory, one, meeting, (ours, meeting.local))
            if not np.array_equal(here, _read(memory, other, meeting, (theirs, meeting.other_local))):
                raise differing(memory, tensor)
    return has_any


def differing(memory: Memory, tensor: str) -> DamagedError:
    """Two places differ."""
    facts = f"two places of {memory.what} that should hold the same bits differ"
    return DamagedError(f"tensor {shown(tensor)}", facts, hint="load the module anew")


def within_others(footprints: Collection[Box], tensor: str) -> set[Box]:
    """Those all of whose elements are in larger ones that are left."""
    found: set[Box] = set()
    left: list[Box] = []
    are_disjoint = True
    for box in sorted(footprints, key=lambda box: (-box.elements, box)):
        shared = [sum(meeting.elements for meeting in _meetings(box, other, tensor)) for other in left]
        if box.elements in shared or (are_disjoint and sum(shared) == box.elements):
            found.add(box)
        else:
            are_disjoint &= not any(shared)
            left.append(box)
    return found


def _meetings(one: Box, other: Box, tensor: str) -> Iterator[Meeting]:
    try:
        yield from meetings(one, other)
    except ValueError as error:
        hint = "use --engine: its parts lie in one another in no order"
        raise UnsupportedError(
            f"tensor {shown(tensor)}", f"cannot be compared in two places: {error}", hint=hint
        ) from error


def _read(memory: Memory, place: Placed, meeting: Meeting, local: tuple[Sequence[int], int]) -> NDArray[Any]:
    strides, first = local
    counts = tuple(count for count, _, _ in meeting.axes)
    axes = tuple(Axis(count, stride, stride) for count, stride in zip(counts, strides, strict=True))
    return memory.stretches[place.name].bits.view(Box(axes, first, first), Rectangle(counts, first, first))
