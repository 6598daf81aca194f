"""F8_E4M3 weights and their scales, of blocks of a matrix (FORMAT 14). In NumPy alone; pure.

All of it is arithmetic of F32, each step rounded to the nearest even. Stored elements are first brought to F32, and if
the recipe says `through` a dtype, are cast to that one before. For each block of the matrix:

    a = the largest magnitude in it, or least_amax if that is larger
    a = 448 if a / 448 is less than 2^-126 (a block of zeros is one such)
    s = a / 448; if scales are powers of two, the least of them that is not less than s
    scale = s, cast to the dtype of the scales; in F8_E8M0 the exponent of s, and 0xFF if it is not finite
    weight = the F8_E4M3 of `x / s`, `x * (1 / s)` or `x * (448 / a)`, by the recipe's formula

A NaN in a block makes its a and s a NaN, and an infinity makes them infinite; weights follow by the formula. A weight
is made with s itself, whatever the dtype of the scales. Blocks begin at the first row and column; the last ones are cut
off by the matrix's edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_cli.layout.residual.floats import (
    E4M3_LARGEST,
    Elements,
    Floats,
    cast,
    from_float32,
    to_e4m3,
    to_float32,
)

QUOTIENT, RECIPROCAL, RATIO = FORMULAS = ("x / s", "x * (1 / s)", "x * (448 / a)")
# So many elements are converted at a time: they stay in the processor's cache.
_AT_ONCE = 1 << 16
_LEAST_SCALE = np.float32(2.0**-126)
_INFINITY = 0x7F800000
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_E8M0_NAN = 0xFF


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a matrix of elements of dtype `stored` is quantized. A block that is one row high and as wide as the matrix
    is a channel."""

    stored: str
    through: str | None
    block: tuple[int, int]
    formula: str = QUOTIENT
    least_amax: float = 0
    is_power_of_two: bool = False

    def values(self, bits: Elements) -> Floats:
        """Stored elements as numbers."""
        return values_of(bits, self.stored, self.through)


def values_of(bits: Elements, stored: str, through: str | None) -> Floats:
    """Elements of dtype `stored` as numbers, cast to dtype `through` first if there is one."""
    if through is not None:
        return to_float32(cast(bits, stored, through), through)
    return to_float32(bits, stored)


class Largest:
    """Finds `a` of every block of some rows of blocks, whose rows are seen in any order."""

    def __init__(self, rows_of_blocks: int, columns: int, recipe: Recipe) -> None:
        self._recipe = recipe
        self._starts = np.arange(0, columns, recipe.block[1])
        # As integers, magnitudes are in the same order, and NaNs are above all.
        self._found = np.zeros((rows_of_blocks, len(self._starts)), np.uint32)

    def see(self, bits: Elements, top: int) -> None:
        """Rows from number `top` on of those that the blocks are of."""
        height, _ = self._recipe.block
        for strip, blocks in _strips(bits.shape, height, top):
            magnitudes = self._recipe.values(bits[strip]).view(np.uint32) & _MAGNITUDE
            if height > 1:
                magnitudes = magnitudes.max(axis=0, keepdims=True)
            found = self._found[blocks]
            np.maximum(found, np.maximum.reduceat(magnitudes, self._starts, axis=1), out=found)

    def result(self) -> Floats:
        with np.errstate(under="ignore", invalid="ignore"):
            largest = np.maximum(self._found.view(np.float32), np.float32(self._recipe.least_amax))
            is_tiny = largest / np.float32(E4M3_LARGEST) < _LEAST_SCALE
        return np.where(is_tiny, np.float32(E4M3_LARGEST), largest)


def scales_of(largest: Floats, recipe: Recipe) -> Floats:
    """`s` of blocks, from their `a`."""
    scales: Floats = largest / np.float32(E4M3_LARGEST)
    if not recipe.is_power_of_two:
        return scales
    up = (scales.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(_INFINITY)
    return np.where(np.isfinite(scales), up.view(np.float32), scales)


def scale_bits(scales: Floats, dtype: str) -> Elements:
    """Scales as they are written."""
    if dtype == "F8_E8M0":
        exponents = (scales.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
        return np.where(np.isfinite(scales), exponents, np.uint8(_E8M0_NAN))
    return from_float32(scales, dtype)


def weights_of(bits: Elements, largest: Floats, recipe: Recipe, below: int = 0) -> NDArray[np.uint8]:
    """The weights of some rows of a matrix, given `a` of the blocks that they are of; `below` rows of the first of
    these are not among them."""
    columns = bits.shape[1]
    height, width = recipe.block
    found = np.empty(bits.shape, np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        factors = scales_of(largest, recipe)
        if recipe.formula == RECIPROCAL:
            factors = np.float32(1) / factors
        elif recipe.formula == RATIO:
            factors = np.float32(E4M3_LARGEST) / largest
        for strip, blocks in _strips(bits.shape, height, below):
            values, each = recipe.values(bits[strip]), factors[blocks]
            if each.shape[1] > 1:
                each = np.repeat(each, width, axis=1)[:, :columns]
            found[strip] = to_e4m3(values / each if recipe.formula == QUOTIENT else values * each)
    return found


def _strips(shape: tuple[int, ...], height: int, top: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows, the first of which is number `top` of those of some rows of blocks, into strips of few elements, each
    within one row of blocks where these are higher than one row; with each the rows of blocks that it is of."""
    rows, columns = shape
    most = max(1, _AT_ONCE // columns)
    row = 0
    while row < rows:
        block = (top + row) // height
        left = min(rows, (block + 1) * height - top) - row if height > 1 else rows - row
        taken = min(most, left)
        yield slice(row, row + taken), slice(block, block + (1 if height > 1 else taken))
        row += taken
