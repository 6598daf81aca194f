"""Copying boxes of strided elements: the compiled kernels at every level, and the reference, against plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dcr_kernels import reference

try:
    from dcr_kernels import native

    LEVELS = tuple(native.levels())
except ImportError:
    LEVELS = ()

Copy = Callable[..., None]
Axes = list[tuple[int, int, int]]
WIDTHS = (1, 2, 4, 8)


@pytest.fixture(params=["reference", *LEVELS])
def copy(request: pytest.FixtureRequest) -> Iterator[Copy]:
    if request.param == "reference":
        yield reference.copy_box
        return
    level = native.level()
    native.set_level(request.param)
    yield native.copy_box
    native.set_level(level)


def by_loops(out: NDArray[Any], source: NDArray[Any], axes: Axes, out_begin: int, source_begin: int) -> None:
    for place in product(*(range(count) for count, _, _ in axes)):
        to = out_begin + sum(step * axis[1] for step, axis in zip(place, axes, strict=True))
        out[to] = source[source_begin + sum(step * axis[2] for step, axis in zip(place, axes, strict=True))]


@st.composite
def boxes(draw: st.DrawFn) -> Axes:
    """Axes whose elements are apart on both sides, in any order, with gaps; few of them, or larger than a tile."""
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 5, 16, 31, 33, 64, 70]), max_size=4))
    while np.prod(counts, dtype=float) > 6000:
        counts.pop()
    steps = []
    for _ in range(2):
        reach, found = 1, [0] * len(counts)
        for axis in draw(st.permutations(range(len(counts)))):
            found[axis] = reach * draw(st.sampled_from([1, 1, 2]))
            reach = found[axis] * counts[axis]
        steps.append(found)
    return list(zip(counts, *steps, strict=True))


@given(boxes(), st.integers(0, 3), st.integers(0, 3))
def test_every_level_copies_what_loops_copy(axes: Axes, out_begin: int, source_begin: int) -> None:
    sizes = [
        begin + 1 + sum((axis[0] - 1) * axis[side] for axis in axes)
        for side, begin in ((1, out_begin), (2, source_begin))
    ]
    numbers = np.random.default_rng(len(axes)).integers(0, 1 << 63, sizes[1] + 2, np.uint64)
    level = native.level() if LEVELS else None
    for width in WIDTHS:
        source = numbers.astype(f"<u{width}")
        expected = np.arange(sizes[0] + 2).astype(f"<u{width}")
        found = [expected.copy() for _ in range(1 + len(LEVELS))]
        by_loops(expected, source, axes, out_begin, source_begin)
        reference.copy_box(found[0], source, axes, out_begin, source_begin)
        for out, name in zip(found[1:], LEVELS, strict=True):
            native.set_level(name)
            native.copy_box(out, source, axes, out_begin, source_begin)
        assert all(out.tobytes() == expected.tobytes() for out in found)
    if level is not None:
        native.set_level(level)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (131, 150), (150, 17)])
def test_a_matrix_of_many_tiles_is_turned(copy: Copy, shape: tuple[int, int], width: int) -> None:
    rows, columns = shape
    source = np.random.default_rng(width).integers(0, 1 << 63, rows * columns, np.uint64).astype(f"<u{width}")
    out = np.zeros_like(source)
    copy(out, source, [(rows, 1, columns), (columns, rows, 1)])
    assert out.tobytes() == source.reshape(shape).T.tobytes()


def test_elements_at_odd_addresses(copy: Copy) -> None:
    data = np.zeros(8 * 100 + 1, np.uint8)
    source = np.arange(100, dtype="<u8")
    out = data[1:].view("<u8")
    copy(out, source, [(10, 1, 10), (10, 10, 1)])
    assert out.reshape(10, 10).tolist() == source.reshape(10, 10).T.tolist()


@pytest.mark.parametrize(
    ("axes", "out_begin", "source_begin", "message"),
    [
        ([(4, 1, 1)], 1, 0, "at axis 0"),
        ([(4, 1, 1)], 0, 1, "at axis 0"),
        ([(2, 1, 1), (2, 3, 1)], 0, 0, "at axis 1"),
        ([(0, 1, 1)], 0, 0, "at axis 0"),
        ([(2, -1, 1)], 3, 0, "at axis 0"),
        ([(1 << 62, 1 << 62, 1)], 0, 0, "at axis 0"),
        ([], 4, 0, "at the first one"),
        ([], 0, 4, "at the first one"),
    ],
)
def test_what_reaches_outside_changes_nothing(
    copy: Copy, axes: Axes, out_begin: int, source_begin: int, message: str
) -> None:
    out, source = np.zeros(4, np.uint16), np.ones(4, np.uint16)
    with pytest.raises(ValueError, match=f"outside of the elements that are given: {message}"):
        copy(out, source, axes, out_begin, source_begin)
    assert not out.any()


def test_elements_have_one_width(copy: Copy) -> None:
    with pytest.raises(ValueError, match="not elements of one width"):
        copy(np.zeros(4, np.uint16), np.ones(4, np.uint32), [])
