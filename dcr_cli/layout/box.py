"""Strided boxes: the one shape of which every placement that preserves bits is made (FORMAT 14.1). Pure.

Whose elements they are, and where their bytes lie, is layout.py's and gather.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels

Indices = NDArray[np.int64]
# More axes than any tensor of a model has.
MAX_AXES = 32
# Boxes of one layout are compared in no more steps than this, and so many more for each of them: those whose strides
# divide each other take few, others may take one for each element. So a short document takes no longer than a second
# or two.
_MOST_STEPS = 1 << 17
_STEPS_OF_BOX = 16


class Axis(NamedTuple):
    """`steps` elements, each `canonical` elements further in the canonical tensor and `local` in the local one."""

    steps: int
    canonical: int
    local: int


class Rectangle(NamedTuple):
    """A part of a box that is a product of ranges: its counts along the box's axes, and where its first element is."""

    counts: tuple[int, ...]
    canonical: int
    local: int

    @property
    def elements(self) -> int:
        return prod(self.counts)


class Box(NamedTuple):
    """Some elements of a canonical tensor and of a local one, which are the same ones.

    Element i of the box, one digit for each axis, is number `canonical` + sum(i * axis.canonical) of the one and number
    `local` + sum(i * axis.local) of the other, both counted row by row. Axes have at least two steps, lie in the order
    of their canonical strides, the longest first, and none of them continues the next one on both sides: two equal
    placements are equal boxes. So the elements of a box, in its own order, ascend in the canonical tensor.
    """

    axes: tuple[Axis, ...]
    canonical: int
    local: int

    @classmethod
    def make(cls, axes: Sequence[tuple[int, int, int]], canonical: int, local: int) -> Self:
        """Bring a box of (count, canonical stride, local stride) into its form.

        ValueError if it is none: empty, of negative numbers, or with an element that would lie in two places.
        """
        if canonical < 0 or local < 0 or len(axes) > MAX_AXES:
            raise ValueError("offsets are not negative, and axes not more than 32")
        taken = [Axis(*axis) for axis in axes if axis[0] != 1]
        if any(axis.steps < 1 or axis.canonical < 1 or axis.local < 1 for axis in taken):
            raise ValueError("counts and strides are positive")
        for side in (1, 2):
            reach = 1
            for axis in sorted(taken, key=lambda axis: axis[side]):
                if axis[side] < reach:
                    raise ValueError("two of its elements would be one")
                reach += (axis.steps - 1) * axis[side]
        taken.sort(key=lambda axis: -axis.canonical)
        joined: list[Axis] = []
        for axis in taken:
            if joined:
                outer = joined[-1]
                if (outer.canonical, outer.local) == (axis.steps * axis.canonical, axis.steps * axis.local):
                    joined[-1] = Axis(outer.steps * axis.steps, axis.canonical, axis.local)
                    continue
            joined.append(axis)
        return cls(tuple(joined), canonical, local)

    @property
    def elements(self) -> int:
        return prod(axis.steps for axis in self.axes)

    @property
    def canonical_end(self) -> int:
        """One past its last element in the canonical tensor."""
        return self.canonical + sum((axis.steps - 1) * axis.canonical for axis in self.axes) + 1

    @property
    def local_end(self) -> int:
        """One past its last element in the local tensor."""
        return self.local + sum((axis.steps - 1) * axis.local for axis in self.axes) + 1

    @property
    def whole(self) -> Rectangle:
        return Rectangle(tuple(axis.steps for axis in self.axes), self.canonical, self.local)

    @property
    def footprint(self) -> Box:
        """Its elements in the canonical tensor alone: however they lie in the local one, equal ones are equal."""
        return Box.make(
            [(axis.steps, axis.canonical, axis.canonical) for axis in self.axes], self.canonical, self.canonical
        )

    def inverse(self) -> Box:
        """The same placement with the roles of both tensors exchanged."""
        return Box.make([(axis.steps, axis.local, axis.canonical) for axis in self.axes], self.local, self.canonical)

    def rank(self, canonical: int) -> int:
        """How many of its elements lie before element `canonical` of the canonical tensor."""
        left = canonical - self.canonical
        if left <= 0:
            return 0
        rank, below = 0, self.elements
        for axis in self.axes:
            below //= axis.steps
            digit, left = divmod(left, axis.canonical)
            if digit >= axis.steps:
                return rank + axis.steps * below
            rank += digit * below
        return rank + (left > 0)

    def rectangles(self, start: int, stop: int) -> Iterator[Rectangle]:
        """The elements number `start` to `stop` of the box, in its own order, cut into rectangles, at most two for
        each axis."""
        return self._rectangles(0, start, stop, (), self.canonical, self.local)

    def _rectangles(
        self, depth: int, start: int, stop: int, fixed: tuple[int, ...], canonical: int, local: int
    ) -> Iterator[Rectangle]:
        if start >= stop:
            return
        rest = tuple(axis.steps for axis in self.axes[depth:])
        if not rest:
            yield Rectangle(fixed, canonical, local)
            return
        below = prod(rest[1:])
        axis = self.axes[depth]
        first, skipped = divmod(start, below)
        last, taken = divmod(stop, below)

        def row(number: int, begin: int, end: int) -> Iterator[Rectangle]:
            at = canonical + number * axis.canonical, local + number * axis.local
            return self._rectangles(depth + 1, begin, end, (*fixed, 1), *at)

        if first == last:
            yield from row(first, skipped, taken)
            return
        if skipped:
            yield from row(first, skipped, below)
            first += 1
        if first < last:
            at = canonical + first * axis.canonical, local + first * axis.local
            yield Rectangle((*fixed, last - first, *rest[1:]), *at)
        yield from row(last, 0, taken)

    def find(self, canonical: Indices) -> tuple[Indices, Indices]:
        """Which of some elements of the canonical tensor are in the box, by their places in `canonical`, and which
        elements of the local tensor they are."""
        left = canonical - self.canonical
        inside = left >= 0
        local = np.full(len(canonical), self.local, np.int64)
        for axis in self.axes:
            digits, left = np.divmod(left, axis.canonical)
            inside &= digits < axis.steps
            local += digits * axis.local
        inside &= left == 0
        found = np.flatnonzero(inside)
        return found, local[found]

    def span(self, part: Rectangle) -> int:
        """How many elements of the local tensor lie from the first to the last one of a rectangle."""
        return 1 + sum((count - 1) * axis.local for count, axis in zip(part.counts, self.axes, strict=True))

    def slabs(self, part: Rectangle, thickness: int = 1) -> Iterator[Rectangle]:
        """Cut a rectangle along the axis with the longest local stride into parts of `thickness` steps, the last one of
        what is left."""
        number = self._longest(part)
        axis = self.axes[number]
        for step in range(0, part.counts[number], thickness):
            steps = min(thickness, part.counts[number] - step)
            counts = (*part.counts[:number], steps, *part.counts[number + 1 :])
            yield Rectangle(counts, part.canonical + step * axis.canonical, part.local + step * axis.local)

    def slabs_of(self, part: Rectangle) -> tuple[int, int]:
        """How many slabs a rectangle has, and how far apart in the local tensor they begin."""
        number = self._longest(part)
        return part.counts[number], self.axes[number].local

    def _longest(self, part: Rectangle) -> int:
        """The axis of a rectangle with the longest local stride."""
        axes = (number for number, count in enumerate(part.counts) if count > 1)
        return max(axes, key=lambda number: self.axes[number].local, default=0)

    def canonical_view(self, data: NDArray[Any], first: int, part: Rectangle) -> NDArray[Any]:
        """The elements of a rectangle within `data`, elements of the canonical tensor from number `first` on."""
        return _view(data, part.canonical - first, part.counts, [axis.canonical for axis in self.axes])

    def copy(self, part: Rectangle, local: NDArray[Any], begin: int, out: NDArray[Any], first: int) -> None:
        """Copy the elements of a rectangle from `local`, elements of the local tensor from number `begin` on, to `out`,
        elements of the canonical one from number `first` on."""
        steps = [axis.local for axis in self.axes]
        self._copy(part, local, (steps, part.local - begin), out, first)

    def copy_stacked(
        self, part: Rectangle, stack: NDArray[Any], slab_elements: int, out: NDArray[Any], first: int
    ) -> None:
        """The same from `stack`, where the slabs of a rectangle lie so many elements apart, each from its first to its
        last element of the local tensor."""
        steps = [axis.local for axis in self.axes]
        steps[self._longest(part)] = slab_elements
        self._copy(part, stack, (steps, 0), out, first)

    def _copy(
        self, part: Rectangle, local: NDArray[Any], place: tuple[list[int], int], out: NDArray[Any], first: int
    ) -> None:
        steps, begin = place
        counted = zip(part.counts, self.axes, steps, strict=True)
        axes = [(count, axis.canonical, step) for count, axis, step in counted if count > 1]
        kernels.copy_box(out, local, axes, part.canonical - first, begin)

    def local_view(self, data: NDArray[Any], first: int, part: Rectangle) -> NDArray[Any]:
        """The elements of a rectangle within `data`, elements of the local tensor from number `first` on."""
        return _view(data, part.local - first, part.counts, [axis.local for axis in self.axes])


def whole_box(elements: int) -> Box:
    """The box that places all of a tensor as it is."""
    return Box.make([(elements, 1, 1)], 0, 0)


def slice_box(canonical_shape: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of a local tensor of `shape` that is the part of the canonical tensor that begins at `starts`."""
    strides, local = row_strides(canonical_shape), row_strides(shape)
    offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return Box.make(list(zip(shape, strides, local, strict=True)), offset, 0)


def row_strides(shape: Sequence[int]) -> list[int]:
    """How far, in elements, a step along each axis of a tensor leads."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def index_of(element: int, shape: Sequence[int]) -> list[int]:
    """The index along each axis of element number `element` of a tensor."""
    return [element // stride % count for stride, count in zip(row_strides(shape), shape, strict=True)]


class Meeting(NamedTuple):
    """Elements of one tensor that two boxes place: `axes` are (count, local stride of the one, of the other), and
    where their first element is in the tensor and in both local ones."""

    axes: tuple[tuple[int, int, int], ...]
    canonical: int
    local: int
    other_local: int

    @property
    def elements(self) -> int:
        return prod(count for count, _, _ in self.axes)


class Patience:
    """How many steps comparing so many boxes may still take."""

    def __init__(self, boxes: int = 0) -> None:
        self._left = _MOST_STEPS + _STEPS_OF_BOX * boxes

    def spend(self, steps: int = 1) -> None:
        """Take some steps; ValueError if there are not so many left."""
        self._left -= steps
        if self._left < 0:
            raise ValueError("boxes have strides that do not divide each other, and take too long to compare")


def meetings(one: Box, other: Box, patience: Patience | None = None) -> Iterator[Meeting]:
    """Find all elements of the canonical tensor that are in both of two boxes, each of them once.

    ValueError when `patience`, by default one of their own, has come to its end.
    """
    if one.canonical < other.canonical_end and other.canonical < one.canonical_end:
        yield from _meet(one, other, patience or Patience())


def compose(first: Box, second: Box, patience: Patience | None = None) -> list[Box]:
    """The boxes that lead where `first` and then `second` lead: the local tensor of `first` is the canonical one of
    `second`. ValueError as of meetings."""
    found = meetings(first.inverse(), second, patience)
    return [Box.make(list(each.axes), each.local, each.other_local) for each in found]


def _meet(one: Box, other: Box, patience: Patience) -> Iterator[Meeting]:
    patience.spend()
    stride = max((box.axes[0].canonical for box in (one, other) if box.axes), default=0)
    if not stride:
        if one.canonical == other.canonical:
            yield Meeting((), one.canonical, one.local, other.local)
        return
    for left, left_rest in _by_steps_of(one, stride):
        for right, right_rest in _by_steps_of(other, stride):
            patience.spend()
            for here, there, count in _steps_together((left, left_rest), (right, right_rest), stride):
                for found in meetings(here, there, patience):
                    axes = ((count, left.local, right.local), *found.axes) if count > 1 else found.axes
                    yield found._replace(axes=axes)


def _by_steps_of(box: Box, stride: int) -> Iterator[tuple[Axis, Box]]:
    """Cut a box into parts that are each some steps of `stride`, and what is in the first of them.

    What is in a step reaches less than `stride` far.
    """
    if not box.axes or box.canonical_end - box.canonical <= stride:
        yield Axis(1, stride, 0), box
        return
    outer, rest = box.axes[0], box.axes[1:]
    if outer.canonical == stride:
        yield outer, Box(rest, box.canonical, box.local)
        return
    # A box of shorter steps that reaches further: so many of them as fill a stride are one step.
    together = stride // outer.canonical if stride % outer.canonical == 0 else 1
    if together == 1:
        for number in range(outer.steps):
            yield Axis(1, stride, 0), _step(box, number)
        return
    full, left = divmod(outer.steps, together)
    inner = Axis(together, outer.canonical, outer.local)
    if full:
        yield Axis(full, stride, together * outer.local), Box((inner, *rest), box.canonical, box.local)
    if left:
        axes = (Axis(left, outer.canonical, outer.local), *rest) if left > 1 else rest
        at = full * together
        tail = Box(axes, box.canonical + at * outer.canonical, box.local + at * outer.local)
        yield Axis(1, stride, 0), tail


def _step(box: Box, number: int) -> Box:
    axis = box.axes[0]
    return Box(box.axes[1:], box.canonical + number * axis.canonical, box.local + number * axis.local)


def _steps_together(one: tuple[Axis, Box], other: tuple[Axis, Box], stride: int) -> Iterator[tuple[Box, Box, int]]:
    """Find the steps of one stride in which two boxes may share elements, as what both have in the first of `count`
    steps: step i of the one can only meet step i + d of the other one, for at most two d."""
    (left, left_rest), (right, right_rest) = one, other
    apart = left_rest.canonical - right_rest.canonical
    for ahead in range(-((stride - 1 - apart) // stride), (apart + stride - 1) // stride + 1):
        first = max(0, -ahead)
        count = min(left.steps, right.steps - ahead) - first
        if count < 1:
            continue
        here = Box(left_rest.axes, left_rest.canonical + first * stride, left_rest.local + first * left.local)
        there = Box(
            right_rest.axes,
            right_rest.canonical + (first + ahead) * stride,
            right_rest.local + (first + ahead) * right.local,
        )
        yield here, there, count


def _view(data: NDArray[Any], offset: int, counts: Sequence[int], strides: Sequence[int]) -> NDArray[Any]:
    width = data.itemsize
    reach = 1 + sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True))
    if offset < 0 or offset + reach > len(data):
        raise ValueError("a rectangle lies outside of the elements that are given")
    return np.lib.stride_tricks.as_strided(data[offset:], counts, [stride * width for stride in strides])
