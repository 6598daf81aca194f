"""Cuts the boxes of a layout into boxes of pieces (FORMAT 4): what is a product of ranges of a tensor's axes. Pure.

Which box is whose is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcr_cli.delta import manifest
from dcr_cli.delta.manifest_rules import PIECES_LIMIT
from dcr_cli.layout import box as layout
from dcr_cli.layout.box import Axis, index_of, row_strides

_Axes = tuple[Axis, ...]


class TooManyError(ValueError):
    """More boxes than a tensor may have."""


def cut_box(box: layout.Box, shape: Sequence[int]) -> list[manifest.Box]:
    """Boxes along the axes of a tensor of `shape`, which has some, that together are the elements of `box`.

    An axis of the layout's box that leads from one index of the tensor's axes to another is cut there, and one that
    leads along no axis into its steps. TooManyError if a tensor may not have so many.
    """
    found: list[manifest.Box] = []
    left: list[tuple[int, _Axes]] = [(box.canonical, box.axes)]
    strides = row_strides(shape)
    while left:
        first, axes = left.pop()
        cut = _first_cut(first, axes, shape, strides)
        if cut is None:
            found.append(_box(first, axes, shape, strides))
        else:
            left += reversed(cut)
        if len(found) + len(left) > PIECES_LIMIT:
            raise TooManyError(f"more than {PIECES_LIMIT} boxes")
    return found


def region_of(box: manifest.Box | None, shape: Sequence[int], elements: int) -> layout.Box:
    """The elements of a piece, in its own order, as elements of its tensor: the piece is the box's canonical side."""
    if box is None:
        return layout.whole_box(elements)
    strides = row_strides(shape)
    own = row_strides(box.counts)
    axes = [
        (count, stride, step * width)
        for count, stride, step, width in zip(box.counts, own, box.steps, strides, strict=True)
    ]
    return layout.Box.make(axes, 0, sum(start * width for start, width in zip(box.starts, strides, strict=True)))


def _axis_of(stride: int, shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The axis of a tensor along which a stride leads, if there is one."""
    for axis, (count, width) in enumerate(zip(shape, strides, strict=True)):
        if width <= stride < count * width:
            return axis if stride % width == 0 else None
    return None


def _first_cut(first: int, axes: _Axes, shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, _Axes]] | None:
    """The parts that some elements have to be cut into first; None if they are one box."""
    start = index_of(first, shape)
    taken: dict[int, int] = {}
    for number, each in enumerate(axes):

        def part(at: int, *own: Axis, number: int = number) -> tuple[int, _Axes]:
            return first + at, (*axes[:number], *(axis for axis in own if axis.steps > 1), *axes[number + 1 :])

        axis = _axis_of(each.canonical, shape, strides)
        if axis is None or axis in taken:
            # Of two that lead along one axis, the one with fewer steps.
            rival = taken[axis] if axis is not None else number
            fewer = min((rival, number), key=lambda one: axes[one].steps)
            return [part(step * axes[fewer].canonical, number=fewer) for step in range(axes[fewer].steps)]
        taken[axis] = number
        step = each.canonical // strides[axis]
        room = (shape[axis] - 1 - start[axis]) // step + 1
        if each.steps <= room:
            continue
        along, rest = divmod(each.steps, shape[axis] // step)
        if start[axis] < step and shape[axis] % step == 0 and along > 1:
            # Whole turns of the axis are steps of the one before it.
            turn = shape[axis] // step
            cut = [part(0, Axis(along, turn * each.canonical, 0), Axis(turn, each.canonical, 0))]
            return cut + ([part(along * turn * each.canonical, Axis(rest, each.canonical, 0))] if rest else [])
        return [
            part(0, Axis(room, each.canonical, 0)),
            part(room * each.canonical, Axis(each.steps - room, each.canonical, 0)),
        ]
    return None


def _box(first: int, axes: _Axes, shape: Sequence[int], strides: Sequence[int]) -> manifest.Box:
    steps, counts = [1] * len(shape), [1] * len(shape)
    for each in axes:
        axis = _axis_of(each.canonical, shape, strides)
        assert axis is not None
        steps[axis], counts[axis] = each.canonical // strides[axis], each.steps
    return manifest.Box(tuple(index_of(first, shape)), tuple(steps), tuple(counts))
