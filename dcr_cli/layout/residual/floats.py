"""Floating-point elements as bits: from one dtype to another, and to F8_E4M3 (FORMAT 14). In NumPy alone; pure.

A cast rounds to the nearest value of the canonical dtype, of two that are equally near to the one whose last bit is 0.
What lies beyond the largest finite value by half a unit in its last place or more becomes an infinity; subnormal
numbers and the sign of zero are kept. From F64 to BF16 or F16 it rounds twice, to F32 first, as PyTorch does. A NaN
becomes the quiet NaN without sign and payload: 0x7FC0 in BF16, 0x7E00 in F16, 0x7FC00000 in F32, 0x7FF8000000000000 in
F64; only from BF16 to F32, where every bit has a place, are all bits kept. (PyTorch on a CPU has no one answer: in BF16
it is 0x7FC0 or 0xFFFF, by the processor and by how many elements there are.)

To F8_E4M3 a number becomes the nearest of those between -448 and 448, of two that are equally near the one whose last
bit is 0; what is larger, infinities among them, becomes 448 with its sign. The sign of zero is kept. A NaN becomes
0x7F.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[Any]
Floats = NDArray[np.float32]

FLOATS = ("F64", "F32", "F16", "BF16")
E4M3_LARGEST = 448
_E4M3_NAN = 0x7F
_E4M3_NEGATIVE = 0x80
_LOWER_HALF = np.uint32(0xFFFF)
_NANS = {"F64": 0x7FF8 << 48, "F32": 0x7FC0 << 16, "F16": 0x7E00, "BF16": 0x7FC0}
_NUMPY = {"F64": (np.float64, np.uint64), "F32": (np.float32, np.uint32), "F16": (np.float16, np.uint16)}


def cast(bits: Elements, stored: str, canonical: str) -> Elements:
    """The bits of elements of dtype `stored` in dtype `canonical`."""
    values = to_float32(bits, stored)
    if (stored, canonical) == ("BF16", "F32"):
        return values.view(np.uint32)
    return from_float32(values, canonical)


def to_float32(bits: Elements, dtype: str) -> Floats:
    """The values of elements; those of F64 are rounded. They may be the very memory of `bits`."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return bits.view(_NUMPY[dtype][0]).astype(np.float32, copy=False)


def from_float32(values: Floats, dtype: str) -> Elements:
    """The bits of values, rounded to `dtype`."""
    found: Elements
    if dtype == "BF16":
        bits = values.view(np.uint32)
        # Half a unit less one, and one more where the last bit that stays is set: a tie goes to the even one.
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        found = rounded.astype(np.uint16)
    else:
        number, unsigned = _NUMPY[dtype]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = values.astype(number).view(unsigned)
    is_nan = np.isnan(values)
    if is_nan.any():
        found[is_nan] = _NANS[dtype]
    return found


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """The F8_E4M3 bits of values."""
    bits = values.view(np.uint32)
    # F8_E4M3 ends far above the lower half of an F32: of that it is enough to know whether any bit is set.
    upper = bits & _LOWER_HALF
    upper += _LOWER_HALF
    upper |= bits
    upper >>= np.uint32(16)
    found: NDArray[np.uint8] = _e4m3_table().take(upper, mode="clip")
    return found


@cache
def _e4m3_table() -> NDArray[np.uint8]:
    """The F8_E4M3 bits by the upper half of an F32, whose last bit is set too if the lower half has a bit set."""
    magnitudes = e4m3_values()[:_E4M3_NAN].astype(np.float64)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    with np.errstate(invalid="ignore"):
        values = to_float32(np.arange(1 << 16, dtype=np.uint16), "BF16").astype(np.float64)
    found = np.searchsorted(middles, np.abs(values))
    is_tie = np.isin(np.abs(values), middles)
    found += is_tie & (found % 2 == 1)
    found |= np.where(np.signbit(values), _E4M3_NEGATIVE, 0)
    return np.where(np.isnan(values), _E4M3_NAN, found).astype(np.uint8)


@cache
def e4m3_values() -> Floats:
    """The values of all 256 F8_E4M3 bit patterns."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * 2.0 ** (exponents - 7))
    magnitudes[codes & _E4M3_NAN == _E4M3_NAN] = np.nan
    return np.where(codes & _E4M3_NEGATIVE, -magnitudes, magnitudes).astype(np.float32)
