"""Values by which is told what a loader makes of tensors: no addresses, but numbers that lean one way, so that whatever
can be seen of a tensor is seen in some pair of them.

A cast, a scale or a sum shows any other value; a largest or a smallest one, a bound or a mask only one that is larger
or smaller than all others, of the other sign, or zero. Which loads they are for is probing.py's and attribution.py's.
Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from dcr_cli.checkpoint.header import Dtype
from dcr_cli.layout.addresses import AnyBits, Drawn, Elements, WritesBits, mixed, real_of
from dcr_cli.layout.box import Indices

# Draws of different seeds are nowhere near each other in the row of all that can be drawn.
_APART = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


class Lean(Enum):
    """Numbers near one, of either sign, or the same with the other one; or larger ones, all above zero, or below."""

    NEAR = "near"
    TURNED = "turned"
    HIGH = "high"
    LOW = "low"


class Leaning(NamedTuple):
    """A load whose elements are drawn from numbers that lean one way. All of them are small enough for a cast to eight
    bits; integers are from the middle of their range, of either sign, from its top, and from below zero, or near it,
    instead."""

    lean: Lean
    seed: int

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        drawn = mixed(addresses.astype(np.uint64) + np.uint64(self.seed * _APART & _U64))
        real = real_of(dtype)
        bits = self._number(real, drawn)
        if real is not dtype:
            bits |= self._number(real, mixed(drawn)) << np.uint64(8 * real.width)
        return bits.astype(f"<u{dtype.width}")

    def _number(self, dtype: Dtype, drawn: Elements) -> Elements:
        if dtype.name == "BOOL":
            bits = (drawn ^ np.uint64(self.lean is Lean.TURNED)) & np.uint64(1)
            return bits if self._is_near else np.full_like(bits, self.lean is Lean.HIGH)
        first, count = self._range(dtype)
        bits = np.uint64(first) + drawn % np.uint64(count)
        has_sign = dtype.exponent_bits or (self._is_near and dtype.name.startswith("I"))
        sign = np.uint64(1 << (8 * dtype.width - 1) if has_sign else 0)
        if self._is_near:
            signs = mixed(drawn)
            bits |= (~signs if self.lean is Lean.TURNED else signs) & sign
        return bits | sign if self.lean is Lean.LOW else bits

    @property
    def _is_near(self) -> bool:
        return self.lean in (Lean.NEAR, Lean.TURNED)

    def _range(self, dtype: Dtype) -> tuple[int, int]:
        """The bit patterns to draw from, without a sign, by the first and their count."""
        if dtype.exponent_bits:
            exponent = (1 << (dtype.exponent_bits - 1)) - 1
            begin, end = (exponent - 2, exponent + 2) if self._is_near else (exponent + 3, exponent + 5)
            return begin << dtype.exponent_shift, (end - begin) << dtype.exponent_shift
        if dtype.name == "F8_E8M0":
            return (125, 4) if self._is_near else {Lean.HIGH: (130, 3), Lean.LOW: (119, 3)}[self.lean]
        bits = 8 * dtype.width
        eighth = 1 << ((bits - 1 if dtype.name.startswith("I") else bits) - 3)
        if self.lean is Lean.LOW:
            return (8 * eighth, 8 * eighth) if dtype.name.startswith("I") else (0, eighth)
        return (2 * eighth, 2 * eighth) if self._is_near else (6 * eighth, 2 * eighth)


class Below(NamedTuple):
    """A load whose elements are drawn from all numbers below zero, normal ones where they are floats; of a dtype that
    has none, from all bit patterns."""

    seed: int

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        bits = Drawn(self.seed).bits(dtype, addresses)
        real = real_of(dtype)
        has_sign = real.exponent_bits or dtype.name.startswith("I")
        return bits | bits.dtype.type(1 << (8 * real.width - 1)) if has_sign else bits


class Zeros(NamedTuple):
    """A load of zeros, of both signs where there are two."""

    seed: int

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        has_two = real_of(dtype).exponent_bits and not dtype.name.endswith("FNUZ")
        sign = np.uint64(1 << (8 * dtype.width - 1) if has_two else 0)
        drawn = mixed(addresses.astype(np.uint64) + np.uint64(self.seed * _APART & _U64))
        return (drawn & sign).astype(f"<u{dtype.width}")


class Pair(NamedTuple):
    """What tensors have while they are left alone, and what they have when they are changed."""

    left: WritesBits
    changed: WritesBits


# What the first one does not show, as it is the lesser of two, masked, or rounded to the same, a later one does; what
# only large numbers or NaNs bring about, the last two, which have what the contrasts of probing.py have.
PAIRS = (
    Pair(Leaning(Lean.NEAR, 1), Leaning(Lean.HIGH, 2)),
    Pair(Leaning(Lean.HIGH, 3), Leaning(Lean.LOW, 4)),
    Pair(Leaning(Lean.LOW, 5), Leaning(Lean.HIGH, 6)),
    Pair(Leaning(Lean.NEAR, 7), Zeros(8)),
    Pair(Zeros(9), Leaning(Lean.NEAR, 10)),
    Pair(Leaning(Lean.NEAR, 11), Leaning(Lean.NEAR, 12)),
    Pair(Leaning(Lean.NEAR, 21), AnyBits(22)),
    Pair(Below(23), Drawn(24)),
)
MOST_PAIRS = 32


def pair_of(number: int) -> Pair:
    """Pair of values `number`; those after PAIRS are all drawn from numbers near one."""
    if number < len(PAIRS):
        return PAIRS[number]
    return Pair(Leaning(Lean.NEAR, 2 * number + 1), Leaning(Lean.NEAR, 2 * number + 2))
