"""Strided boxes: every operation against the same one on explicit lists of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from box_cases import boxes, places
from dcr_cli.layout import box as geometry
from dcr_cli.layout.box import Box, Patience, compose, index_of, meetings, slice_box, whole_box


@given(boxes())
def test_elements_ascend_and_end_where_it_says(box: Box) -> None:
    found = places(box)
    assert list(found) == sorted(found) and len(found) == box.elements
    assert (box.canonical_end, box.local_end) == (max(found) + 1, max(found.values()) + 1)


@given(boxes())
def test_rank_counts_the_elements_before(box: Box) -> None:
    found = places(box)
    for element in range(box.canonical_end + 2):
        assert box.rank(element) == sum(each < element for each in found)


@given(boxes(), st.data())
def test_rectangles_are_a_range_of_the_box_in_order(box: Box, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.elements))
    stop = data.draw(st.integers(start, box.elements))
    parts = list(box.rectangles(start, stop))
    found = [item for part in parts for item in places(rebox(box, part.counts, part.canonical, part.local)).items()]
    assert found == list(places(box).items())[start:stop]
    assert len(parts) <= max(1, 2 * len(box.axes))


@given(boxes(), st.data())
def test_slabs_are_a_rectangle_cut_up(box: Box, data: st.DataObject) -> None:
    whole = box.whole
    if whole.elements == 1:
        return
    found: dict[int, int] = {}
    for part in box.slabs(whole, data.draw(st.integers(1, 6))):
        found.update(places(rebox(box, part.counts, part.canonical, part.local)))
        assert box.span(part) <= box.span(whole)
    assert found == places(box)


def rebox(box: Box, counts: tuple[int, ...], canonical: int, local: int) -> Box:
    axes = [(count, axis.canonical, axis.local) for count, axis in zip(counts, box.axes, strict=True)]
    return Box.make(axes, canonical, local)


@given(boxes())
def test_the_inverse_leads_back(box: Box) -> None:
    assert places(box.inverse()) == {local: canonical for canonical, local in places(box).items()}
    assert box.inverse().inverse() == box


@given(boxes())
def test_positions_are_found_or_are_outside(box: Box) -> None:
    asked = np.arange(box.canonical_end + 3)
    which, local = box.find(asked)
    assert dict(zip(asked[which].tolist(), local.tolist(), strict=True)) == places(box)


@given(boxes(), boxes())
def test_meetings_are_what_both_have_each_once(one: Box, other: Box) -> None:
    found: list[tuple[int, int]] = []
    for meeting in meetings(one, other):
        pairs = list(itertools.product(*[range(count) for count, _, _ in meeting.axes]))
        assert len(pairs) == meeting.elements
        for digits in pairs:
            here = meeting.local + sum(d * axis[1] for d, axis in zip(digits, meeting.axes, strict=True))
            there = meeting.other_local + sum(d * axis[2] for d, axis in zip(digits, meeting.axes, strict=True))
            found.append((here, there))
    left, right = places(one), places(other)
    assert sorted(found) == sorted((left[each], right[each]) for each in left if each in right)


@given(boxes(), boxes())
def test_composing_is_one_after_the_other(first: Box, second: Box) -> None:
    found: dict[int, int] = {}
    for box in compose(first, second):
        found.update(places(box))
    after = places(second)
    assert found == {start: after[middle] for start, middle in places(first).items() if middle in after}


def test_equal_placements_are_equal_boxes() -> None:
    assert Box.make([(4, 10, 10), (10, 1, 1)], 5, 0) == Box.make([(40, 1, 1)], 5, 0)
    assert Box.make([(3, 1, 4), (1, 9, 9), (4, 3, 1)], 0, 0) == Box.make([(4, 3, 1), (3, 1, 4)], 0, 0)


def test_a_slice_is_a_box() -> None:
    box = slice_box([6, 4], [2, 1], [3, 2])
    assert places(box) == {4 * (2 + i) + 1 + j: 2 * i + j for i in range(3) for j in range(2)}
    assert slice_box([], [], []) == Box((), 0, 0) == whole_box(1)
    assert slice_box([6, 4], [2, 0], [3, 4]) == Box.make([(12, 1, 1)], 8, 0)


def test_row_parallel_meets_column_parallel_in_one_box() -> None:
    """No step is taken one by one where the strides of one tensor divide those of the other."""
    rows = Box.make([(50_000 * 64, 1, 1)], 10 * 64, 0)
    columns = Box.make([(100_000, 64, 16), (16, 1, 1)], 32, 0)
    (meeting,) = meetings(rows, columns)
    assert meeting.elements == 50_000 * 16


def test_elements_have_indices() -> None:
    assert index_of(7, [2, 5]) == [1, 2]
    assert index_of(0, []) == []


@pytest.mark.parametrize(
    ("axes", "canonical", "local"),
    [
        ([(2, 1, 1), (2, 1, 2)], 0, 0),
        ([(2, 4, 1), (2, 1, 1)], 0, 0),
        ([(3, 1, 1), (2, 2, 3)], 0, 0),
        ([(0, 1, 1)], 0, 0),
        ([(2, 0, 1)], 0, 0),
        ([(2, 1, -1)], 0, 0),
        ([(2, 1, 1)], -1, 0),
        ([(2, 1, 1)], 0, -1),
        ([(1, 1, 1)] * 33, 0, 0),
    ],
)
def test_what_is_no_box_is_refused(axes: list[tuple[int, int, int]], canonical: int, local: int) -> None:
    with pytest.raises(ValueError, match=r"offsets|counts|two of its elements"):
        Box.make(axes, canonical, local)


def test_a_view_outside_of_what_is_given_is_refused() -> None:
    box = whole_box(4)
    with pytest.raises(ValueError, match="outside"):
        box.local_view(np.zeros(3, np.uint8), 0, box.whole)


def test_boxes_that_take_too_long_to_compare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third element and every fifth: where these meet, only a look at each of them tells."""
    thirds, fifths = Box.make([(60, 3, 1)], 0, 0), Box.make([(36, 5, 1)], 1, 0)
    assert sum(each.elements for each in meetings(thirds, fifths)) == 12
    monkeypatch.setattr(geometry, "_MOST_STEPS", 60)
    with pytest.raises(ValueError, match="strides that do not divide each other"):
        list(meetings(thirds, fifths, Patience()))
    patience = Patience(3)
    list(meetings(thirds, fifths, patience))
    with pytest.raises(ValueError, match="take too long to compare"):
        list(meetings(thirds, fifths, patience))
