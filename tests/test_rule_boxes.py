"""What rules make of boxes: blocks stay whole, and the way back leads to where it came from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.manifest import Box
from dcr_cli.layout.layout import Form
from dcr_cli.layout.residual.quantize import QUOTIENT, Recipe
from dcr_cli.layout.residual.rules import SCALE, WEIGHT, Elementwise, Named, Quantized
from dcr_cli.publisher.rule_boxes import DividedError, made_box, needs_whole, stored_box

CAST = Elementwise("F32", "BF16")
ODD = Box((1, 3), (2, 1), (4, 5))


def quantized(part: str, block: tuple[int, int]) -> Quantized:
    return Quantized(part, "F32", Recipe("F32", None, block, QUOTIENT, 0.0, False))


def test_elements_are_where_they_were() -> None:
    form = Form("F32", (12, 12))
    for conversion in (None, CAST):
        assert made_box(ODD, conversion, form) == stored_box(ODD, conversion, form) == ODD
        assert not needs_whole(conversion)


def test_all_is_made_of_all() -> None:
    form = Form("F32", (12, 12))
    for conversion in (Named("m:f"), quantized(WEIGHT, (4, 4)), quantized(SCALE, (4, 4))):
        assert made_box(None, conversion, form) is None and stored_box(None, conversion, form) is None
        assert needs_whole(conversion)


def test_a_function_needs_all() -> None:
    for way in (made_box, stored_box):
        with pytest.raises(DividedError, match="all"):
            way(Box((0, 0), (1, 1), (12, 12)), Named("m:f"), Form("F32", (12, 12)))


@pytest.mark.parametrize(
    "box",
    [
        Box((2, 0), (1, 1), (4, 12)),
        Box((0, 2), (1, 1), (12, 4)),
        Box((0, 0), (1, 1), (6, 12)),
        Box((0, 0), (1, 1), (12, 6)),
        Box((0, 0), (2, 1), (5, 10)),
        Box((0, 0), (1, 2), (10, 5)),
    ],
)
def test_a_block_that_is_divided(box: Box) -> None:
    form = Form("F32", (10, 11))
    for part in (WEIGHT, SCALE):
        with pytest.raises(DividedError, match=r"whole blocks of \[4, 4\]"):
            made_box(box, quantized(part, (4, 4)), form)
    with pytest.raises(DividedError):
        stored_box(box, quantized(WEIGHT, (4, 4)), form)


@given(data=st.data())
def test_scales_of_whole_blocks(data: st.DataObject) -> None:
    """Scales in a box are those of the blocks that it has elements of, and are made of these alone."""
    experts, rows, columns = (data.draw(st.integers(1, 9)) for _ in range(3))
    height, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    form = Form("F32", (experts, rows, columns))
    shape = experts, -(-rows // height), -(-columns // width)
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    counts = tuple(data.draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True))
    scales = Box(starts, (1, 1, 1), counts)
    stored = stored_box(scales, quantized(SCALE, (height, width)), form)
    assert stored is not None
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    spread = numbers.repeat(height, 1).repeat(width, 2)[:, :rows, :columns]
    inside = spread[_index(stored)]
    assert set(inside.reshape(-1)) == set(numbers[_index(scales)].reshape(-1))
    assert inside.size == np.isin(spread, inside).sum()
    assert made_box(stored, quantized(SCALE, (height, width)), form) == scales
    weight = quantized(WEIGHT, (height, width))
    assert made_box(stored, weight, form) == stored_box(stored, weight, form) == stored


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + step * count, step)
        for start, step, count in zip(box.starts, box.steps, box.counts, strict=True)
    )
