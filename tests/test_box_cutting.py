"""Boxes of a layout cut into boxes of pieces: the same elements, each once, in order, in as few boxes as they need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.strided import box_elements, flat_indices
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.publisher.box_cutting import TooManyError, cut_box, region_of


def elements_of(box: Box) -> list[int]:
    flat = np.array([box.canonical])
    for axis in box.axes:
        flat = (flat[:, None] + np.arange(axis.steps) * axis.canonical).reshape(-1)
    return [int(element) for element in flat]


def check(box: Box, shape: tuple[int, ...]) -> int:
    """How many boxes it is cut into, which together are its elements."""
    found = cut_box(box, shape)
    inside = [flat_indices(each, shape, 0, box_elements(each)).tolist() for each in found]
    assert sorted(element for each in inside for element in each) == sorted(elements_of(box))
    for each, flat in zip(found, inside, strict=True):
        assert all(
            start + (count - 1) * step < size
            for start, step, count, size in zip(each.starts, each.steps, each.counts, shape, strict=True)
        )
        region = region_of(each, shape, len(flat))
        assert region.find(np.arange(len(flat)))[1].tolist() == flat
    return len(found)


@pytest.mark.parametrize(
    ("box", "shape", "count"),
    [
        (whole_box(24), (4, 6), 1),
        (slice_box((4, 6), (1, 0), (2, 6)), (4, 6), 1),
        (slice_box((4, 6), (0, 2), (4, 3)), (4, 6), 1),
        (slice_box((4, 6, 5), (1, 2, 1), (2, 3, 4)), (4, 6, 5), 1),
        (Box.make([(70, 50, 1), (25, 1, 70)], 25, 0), (70, 50), 1),
        # Every other column, and every other row.
        (Box.make([(4, 6, 3), (3, 2, 1)], 1, 0), (4, 6), 1),
        (Box.make([(2, 12, 6), (6, 1, 1)], 6, 0), (4, 6), 1),
        # A flat range: what is left of a row, rows, what is left of another.
        (Box.make([(15, 1, 1)], 4, 0), (4, 6), 3),
        (Box.make([(8, 1, 1)], 4, 0), (4, 6), 2),
        (Box.make([(5, 1, 1)], 3, 0), (2, 2, 2), 2),
        # Groups of rows: a box for each group, or for each of its rows, as one axis cannot have two steps.
        (Box.make([(3, 24, 12), (12, 1, 1)], 0, 0), (12, 6), 2),
        (Box.make([(2, 36, 18), (18, 1, 1)], 0, 0), (12, 6), 2),
        (Box.make([(3, 10, 4), (4, 1, 1)], 0, 0), (30,), 3),
        (Box.make([(4, 10, 1), (2, 1, 4)], 0, 0), (40,), 2),
        # Along a diagonal, one for each step; along rows of another length, one for each turn.
        (Box.make([(4, 5, 1)], 0, 0), (4, 4), 4),
        (Box.make([(5, 3, 1)], 1, 0), (4, 5), 3),
        (whole_box(1), (1, 1), 1),
        (Box.make([(3, 1, 1)], 2, 0), (1, 6, 1), 1),
    ],
)
def test_boxes(box: Box, shape: tuple[int, ...], count: int) -> None:
    assert check(box, shape) == count


@given(st.data())
def test_any_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    total = int(np.prod(shape))
    axes, reach = [], 1
    for _ in range(data.draw(st.integers(0, 3))):
        stride = reach + data.draw(st.integers(0, 3))
        axes.append((data.draw(st.integers(1, 5)), stride, 1))
        reach = stride * axes[-1][0]
    local = 1
    for number, (steps, stride, _) in enumerate(axes):
        axes[number] = (steps, stride, local)
        local *= steps
    box = Box.make(axes, 0, 0)
    if box.canonical_end > total:
        return
    first = data.draw(st.integers(0, total - box.canonical_end))
    check(Box(box.axes, first, 0), shape)


def test_too_many() -> None:
    with pytest.raises(TooManyError):
        cut_box(Box.make([(70_000, 70_001, 1)], 0, 0), (70_000, 70_000))
