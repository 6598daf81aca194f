"""Whether positions of changes are positions of their tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.changes import positions
from dcr_cli.changes.positions import fault_in

# Above what a float tells apart.
FAR = 2**53


def blocks(*found: list[int], dtype: str = "<u8") -> list[Any]:
    return [np.array(each, dtype) for each in found]


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_blocks_that_are_right(dtype: str) -> None:
    assert fault_in(blocks([0], dtype=dtype), 1) is None
    assert fault_in(blocks([5, 9], [0, 3], [4], dtype=dtype), 10) is None
    assert fault_in(blocks([0, 4, 8], [1, 5, 9], [2, 6], [7], dtype=dtype), 10) is None


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_blocks_that_are_wrong(dtype: str) -> None:
    for found in ([1, 0], [1, 1], [0, 5, 5]):
        assert fault_in(blocks([7], found, dtype=dtype), 10) == "positions of a block do not ascend"
    assert fault_in(blocks([0, 10], dtype=dtype), 10) == "has position 10, and only 10 elements"
    for others in ([[0]], [[4, 8]], [[1, 2, 3, 4]], [[1], [5], [8, 9]]):
        assert fault_in(blocks([0, 4, 8], *others, dtype=dtype), 10) == "two blocks have the same position"


def test_positions_far_away() -> None:
    assert fault_in(blocks([2**64 - 5]), 2**63 - 1) == f"has position {2**64 - 5}, and only {2**63 - 1} elements"
    assert fault_in(blocks([0, FAR, FAR + 2], [1, FAR + 1]), 2**62) is None
    assert fault_in(blocks([0, FAR, FAR + 1], [1, FAR + 1]), 2**62) == "two blocks have the same position"
    # No window between them is looked at.
    assert fault_in(blocks([0, 2**61], [1, 2**61 + 1]), 2**62) is None


@given(st.lists(st.sets(st.integers(0, 60), min_size=1), min_size=1, max_size=6), st.sampled_from((1, 4, 7, 1 << 22)))
def test_any_blocks(sets: list[set[int]], window: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(positions, "_WINDOW_ELEMENTS", window)
        found = fault_in(blocks(*map(sorted, sets)), 61)
    assert (found is None) == (len(set().union(*sets)) == sum(map(len, sets)))
