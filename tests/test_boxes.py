"""Boxes: overlap is found exactly when an element is in two boxes of one group."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.boxes import EntangledError, find_overlap

Axis = tuple[int, int, int]


def elements(box: list[Axis]) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + step * count, step) for start, step, count in box)))


def arrays(groups: list[int], boxes: list[list[Axis]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(groups, np.int64), np.array(boxes, np.int64).transpose(0, 2, 1)


AXIS = st.tuples(st.integers(0, 12), st.integers(1, 7), st.integers(1, 4))


@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.lists(
            st.tuples(st.integers(0, 1), st.lists(AXIS, min_size=rank, max_size=rank)), min_size=1, max_size=7
        )
    )
)
def test_overlap_is_what_sets_say(rows: list[tuple[int, list[Axis]]]) -> None:
    groups, boxes = [group for group, _ in rows], [box for _, box in rows]
    sets = [elements(box) for box in boxes]
    overlapping = {
        (i, j)
        for i in range(len(rows))
        for j in range(i + 1, len(rows))
        if groups[i] == groups[j] and sets[i] & sets[j]
    }
    found = find_overlap(*arrays(groups, boxes))
    if found is None:
        assert not overlapping
    else:
        assert tuple(sorted(found)) in overlapping


def test_boxes_that_only_a_common_divisor_separates_are_apart() -> None:
    # Residues 1 and 2 modulo 6 and 9 never meet; residues 1 and 4 do.
    assert find_overlap(*arrays([0, 0], [[(1, 6, 20)], [(2, 9, 20)]])) is None
    assert find_overlap(*arrays([0, 0], [[(1, 6, 20)], [(4, 9, 20)]])) == (0, 1)


def test_boxes_that_meet_only_past_the_end_of_one_are_apart() -> None:
    # 5 + 7 i and 1 + 11 j first meet in 12, then in 89.
    assert find_overlap(*arrays([0, 0], [[(19, 7, 11)], [(1, 11, 9)]])) == (0, 1)
    assert find_overlap(*arrays([0, 0], [[(19, 7, 11)], [(1, 11, 8)]])) is None


@pytest.mark.parametrize("across", [True, False])
def test_a_grid_of_interleaved_slices_takes_no_pairs(across: bool) -> None:
    rows, columns = 300, 200
    boxes = [
        [(row, rows, 5), (column, columns, 7) if across else (column * 7, 1, 7)]
        for row in range(rows)
        for column in range(columns)
    ]
    groups = [0] * len(boxes)
    assert find_overlap(*arrays(groups, boxes)) is None
    boxes[-1] = boxes[0]
    assert find_overlap(*arrays(groups, boxes)) == (0, len(boxes) - 1)


def test_many_small_groups() -> None:
    groups = np.repeat(np.arange(50_000), 4)
    boxes = np.zeros((200_000, 3, 2), np.int64)
    boxes[:, 1:] = [[[1, 1], [4, 8]]]
    boxes[:, 0, 0] = np.tile([0, 4, 8, 12], 50_000)
    assert find_overlap(groups, boxes) is None
    boxes[7, 0, 0] = 11
    assert find_overlap(groups, boxes) == (6, 7)


def test_too_many_entangled_boxes_are_an_error_not_a_wait() -> None:
    boxes = [[(i, 3 * 1001 - 2 * i, 2)] for i in range(1001)]
    with pytest.raises(EntangledError, match="262144"):
        find_overlap(*arrays([0] * 1001, boxes))


def test_coordinates_near_2_to_the_63() -> None:
    top = (1 << 63) - 1
    assert find_overlap(*arrays([0, 0], [[(0, top // 2, 3)], [(1, top // 2 - 1, 2)]])) == (0, 1)
    assert find_overlap(*arrays([0, 0], [[(0, 1, top)], [(top, 1, 1)]])) is None


def test_no_boxes() -> None:
    assert find_overlap(np.zeros(0, np.int64), np.zeros((0, 3, 2), np.int64)) is None
