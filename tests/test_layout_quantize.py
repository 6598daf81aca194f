"""Weights and scales of blocks, against PyTorch's arithmetic written down plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dcr_cli.layout.residual.floats import to_e4m3
from dcr_cli.layout.residual.quantize import FORMULAS, Largest, Recipe, scale_bits, scales_of, weights_of

SHAPES = [(1, 1), (128, 128), (130, 257), (300, 100), (5, 1000)]
BLOCKS = [(128, 128), (1, 128), (64, 32)]


def matrix(shape: tuple[int, int], seed: int = 0) -> NDArray[np.float32]:
    """Numbers of very different sizes, and a row of blocks that is zeros at the end."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 2.0 ** random.integers(-30, 10, shape)
    values[256:] = 0
    return values.astype(np.float32)


def plainly(values: NDArray[np.float32], recipe: Recipe) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Weights and scales, block by block."""
    (rows, columns), (height, width) = values.shape, recipe.block
    weights = np.empty((rows, columns), np.uint8)
    scales = np.empty((-(-rows // height), -(-columns // width)), np.float32)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            block = torch.from_numpy(values[row : row + height, column : column + width].copy())
            largest = block.abs().amax().clamp(min=recipe.least_amax)
            if largest / 448 < 2.0**-126:
                largest = torch.tensor(448.0)
            scale = largest / 448
            if recipe.is_power_of_two:
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            made = {
                "x / s": block / scale,
                "x * (1 / s)": block * (1 / scale),
                "x * (448 / a)": block * (448 / largest),
            }
            rounded = made[recipe.formula].clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            weights[row : row + height, column : column + width] = rounded.numpy()
            scales[row // height, column // width] = scale.item()
    return weights, scales


def largest_of(bits: NDArray[Any], recipe: Recipe) -> NDArray[np.float32]:
    """`a` of all blocks of a matrix, some rows of which are seen after others that come after them."""
    rows, columns = bits.shape
    found = Largest(-(-rows // recipe.block[0]), columns, recipe)
    half = rows // 3
    found.see(bits[half:], half)
    found.see(bits[:half], 0)
    return found.result()


def check(values: NDArray[np.float32], recipe: Recipe) -> None:
    bits = values.view(np.uint32)
    largest = largest_of(bits, recipe)
    weights, scales = plainly(values, recipe)
    assert np.array_equal(scales_of(largest, recipe).view(np.uint32), scales.view(np.uint32))
    assert np.array_equal(weights_of(bits, largest, recipe), weights)
    for first in (1, len(bits) // 2):
        block, below = divmod(first, recipe.block[0])
        assert np.array_equal(weights_of(bits[first:], largest[block:], recipe, below), weights[first:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_with_ragged_edges(shape: tuple[int, int], block: tuple[int, int]) -> None:
    check(matrix(shape), Recipe("F32", None, block))


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("is_power_of_two", [False, True])
@pytest.mark.parametrize("least_amax", [0, 1e-4, 300.5])
def test_recipes(formula: str, is_power_of_two: bool, least_amax: float) -> None:
    recipe = Recipe("F32", None, (128, 128), formula, least_amax, is_power_of_two)
    check(matrix((300, 300), 1), recipe)


def test_channels() -> None:
    check(matrix((300, 777)), Recipe("F32", None, (1, 777)))


def test_many_strips_are_one_matrix() -> None:
    check(matrix((130, 9_000)), Recipe("F32", None, (128, 128)))
    check(matrix((3, 70_000)), Recipe("F32", None, (1, 70_000)))


def test_bfloat16_and_what_goes_through_it() -> None:
    values = torch.from_numpy(matrix((140, 200)))
    rounded = values.to(torch.bfloat16)
    expected = plainly(rounded.float().numpy(), Recipe("F32", None, (128, 128)))
    for recipe, bits in (
        (Recipe("BF16", None, (128, 128)), rounded.view(torch.int16).numpy().view(np.uint16)),
        (Recipe("F32", "BF16", (128, 128)), values.numpy().view(np.uint32)),
    ):
        largest = largest_of(bits, recipe)
        assert np.array_equal(scales_of(largest, recipe), expected[1])
        assert np.array_equal(weights_of(bits, largest, recipe), expected[0])


def test_zeros_and_the_smallest_numbers_have_scale_one() -> None:
    values = np.array([[0.0, -0.0, 2.0**-149, -(2.0**-120)]], np.float32)
    recipe = Recipe("F32", None, (128, 128))
    largest = largest_of(values.view(np.uint32), recipe)
    assert scales_of(largest, recipe).tolist() == [[1.0]]
    assert weights_of(values.view(np.uint32), largest, recipe).tolist() == [[0, 0x80, 0, 0x80]]
    check(np.array([[448 * 2.0**-126, 0]], np.float32), recipe)


@pytest.mark.parametrize(("bad", "scale"), [(np.nan, 0x7FC00000), (np.inf, 0x7F800000)])
@pytest.mark.parametrize("is_power_of_two", [False, True])
def test_what_is_not_finite_stays_in_its_block(bad: float, scale: int, is_power_of_two: bool) -> None:
    values = np.ones((2, 4), np.float32)
    values[1, 0] = bad
    recipe = Recipe("F32", None, (2, 2), is_power_of_two=is_power_of_two)
    largest = largest_of(values.view(np.uint32), recipe)
    scales = scales_of(largest, recipe)
    assert scale_bits(scales, "F32")[0, 0] == scale and np.isfinite(scales[0, 1])
    found = weights_of(values.view(np.uint32), largest, recipe)
    assert found[1, 0] == 0x7F and found[0, 0] == (0x7F if np.isnan(bad) else 0)
    assert found[:, 2:].tolist() == [[int(to_e4m3(np.float32(1) / scales[:, 1])[0])] * 2] * 2
    if is_power_of_two:
        assert scale_bits(scales, "F8_E8M0")[0, 0] == 0xFF


def test_powers_of_two_are_not_less_than_the_scale() -> None:
    recipe = Recipe("F32", None, (1, 1), is_power_of_two=True)
    values = np.array([[448.0, np.nextafter(np.float32(448), np.float32(449)), 447.0]], np.float32).T
    scales = scales_of(largest_of(values.view(np.uint32), recipe), recipe)
    assert scales[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert scale_bits(scales, "F8_E8M0")[:, 0].tolist() == [127, 128, 127]
    assert scale_bits(scales, "BF16")[:, 0].tolist() == [0x3F80, 0x4000, 0x3F80]
    assert scale_bits(scales, "F8_E8M0").dtype == np.uint8
