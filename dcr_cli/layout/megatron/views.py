"""Tensors that are a part of a stored one, such as an expert's weight in a tensor of all experts. Pure.

A mapping takes them for tensors of their own; here its boxes become boxes of the stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from dcr_cli.layout.box import Box, compose, row_strides
from dcr_cli.layout.megatron.mappings import Mapping, Part, Shape


class View(NamedTuple):
    """A tensor of `shape` whose elements the box finds in a stored one."""

    shape: Shape
    box: Box


# What a stored tensor of the shape is seen as, for one expert by its number.
Seen = Callable[[Shape, int], Sequence[View]]


def seen(mapping: Mapping, seen_as: Seen, expert: int = 0) -> Mapping:
    """The mapping of what a stored tensor is seen as, in boxes of the stored one."""
    return partial(_seen, mapping, seen_as, expert)


def _seen(mapping: Mapping, seen_as: Seen, expert: int, shapes: Sequence[Shape], rank: int, size: int) -> Part:
    (shape,) = shapes
    views = seen_as(shape, expert)
    part = mapping([view.shape for view in views], rank, size)
    boxes = [(0, box) for number, each in part.boxes for box in compose(views[number].box, each)]
    return Part(part.shape, tuple(boxes))


def rows_of(counts: Sequence[int]) -> Seen:
    """Tensors that are concatenated by rows, of so many rows each."""

    def see(shape: Shape, expert: int) -> Sequence[View]:
        if sum(counts) != shape[0]:
            raise ValueError(f"has {shape[0]} rows, not the {sum(counts)} of its parts {list(counts)}")
        width = prod(shape[1:])
        starts = [sum(counts[:number]) for number in range(len(counts))]
        return [
            View((count, *shape[1:]), Box.make([(count * width, 1, 1)], start * width, 0))
            for count, start in zip(counts, starts, strict=True)
        ]

    return see


def of_expert(shape: Shape, expert: int, *, rows: int) -> Sequence[View]:
    """An expert's tensor, of so many rows, in one of all experts."""
    _check(shape, 1, rows)
    return [_slab(shape, expert, (0,) * (len(shape) - 1), shape[1:], range(len(shape) - 1))]


def of_expert_transposed(shape: Shape, expert: int, *, rows: int) -> Sequence[View]:
    """An expert's weight, of so many rows, in a tensor that has those of all experts transposed."""
    _check(shape, 2, rows)
    return [_slab(shape, expert, (0, 0), (shape[2], shape[1]), (1, 0))]


def gate_and_up(shape: Shape, expert: int, *, columns: int) -> Sequence[View]:
    """An expert's gate and up weights, the one above the other."""
    _check(shape, 2, columns)
    half = _half(shape[1])
    return [_slab(shape, expert, (start, 0), (half, columns), (0, 1)) for start in (0, half)]


def gate_and_up_alternating(shape: Shape, expert: int, *, columns: int) -> Sequence[View]:
    """An expert's gate and up weights, transposed, whose columns alternate there."""
    _check(shape, 1, columns)
    half = _half(shape[2])
    start = expert * columns * shape[2]
    axes = [(half, 2, columns), (columns, 2 * half, 1)]
    return [View((half, columns), Box.make(axes, start + which, 0)) for which in (0, 1)]


def biases_alternating(shape: Shape, expert: int) -> Sequence[View]:
    """An expert's gate and up biases, whose elements alternate."""
    half = _half(shape[1])
    start = expert * shape[1]
    return [View((half,), Box.make([(half, 2, 1)], start + which, 0)) for which in (0, 1)]


def _slab(shape: Shape, expert: int, starts: Sequence[int], local: Shape, order: Sequence[int]) -> View:
    """A slice of an expert's tensor, its axis number order[i] being axis i of the view."""
    strides = row_strides(shape)
    offset = expert * strides[0] + sum(start * stride for start, stride in zip(starts, strides[1:], strict=True))
    steps = [strides[1:][axis] for axis in order]
    return View(local, Box.make(list(zip(local, steps, row_strides(local), strict=True)), offset, 0))


def _check(shape: Shape, axis: int, count: int) -> None:
    if len(shape) <= axis or shape[axis] != count:
        raise ValueError(f"has shape {list(shape)}, of which number {axis + 1} is not {count}")


def _half(count: int) -> int:
    half, left = divmod(count, 2)
    if left:
        raise ValueError(f"gate and up cannot both have half of {count}")
    return half
