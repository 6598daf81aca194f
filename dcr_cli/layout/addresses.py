"""Values that say where they come from: what a probe writes into each element, and what it makes of what comes back.

All elements of one dtype are numbered, through all canonical tensors: that number is an element's address. Its digits
are written as bit patterns of that dtype, one digit for each load. Two more loads tell whether a loader only moves what
it reads: one of the first digit reversed, and one of drawn numbers. Files and loaders are not this module's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES, Dtype
from dcr_cli.layout.box import Indices
from dcr_cli.layout.layout import Form

Elements = NDArray[Any]
Flags = NDArray[np.bool_]

# More of a dtype's bit patterns are not used as digits.
_MOST_SYMBOLS = 1 << 14
# The digits of a wide float are spread over so many of its exponents, so that a cast to a shorter one tells them apart.
_EXPONENTS = 16
# By how many eighths of an exponent the digits of a float lie above the middle of its numbers: not as much as those of
# another one, or a cast could turn a digit of one into the same digit of the other, and its reverse into the reverse.
_EIGHTHS = {"F16": 3, "F32": 5, "F64": 7, "C64": 5}
# One of so many elements that are drawn is a zero.
_ZEROS_IN = 16
# No address is as high.
_NO_ADDRESS = 1 << 62
# The address of an element that no canonical one is the source of.
NOWHERE = -1


class Alphabet(NamedTuple):
    """The bit patterns that are digits: `symbols`, an even number, from `first` on, each `step` above the one before,
    so that a digit and its reverse are never one. None of them is zero, but for BOOL's, and all floats are normal
    numbers. A step that is not one is odd: digits differ in high bits, which a cast leaves, and in low ones, which it
    takes away."""

    first: int
    symbols: int
    step: int = 1

    def bits(self, digits: Indices) -> Elements:
        """The bit patterns of digits."""
        bits: Elements = self.first + digits * self.step
        return bits

    def digits(self, bits: Elements) -> tuple[Indices, Flags]:
        """The digits that bit patterns are, and which of them are any; the others are nobody's digits."""
        above = bits.astype(np.uint64) - np.uint64(self.first)
        digits = above // np.uint64(self.step)
        is_digit = (digits < self.symbols) & (above % np.uint64(self.step) == 0)
        return np.where(is_digit, digits, 0).astype(np.int64), is_digit


def alphabet_of(dtype: Dtype) -> Alphabet:
    """The digits of a dtype."""
    numbers = normal_numbers(dtype)
    if numbers is None:
        if dtype.name == "BOOL":
            return Alphabet(0, 2)
        top = 1 << (7 if dtype.name == "I8" else 8 * dtype.width)
        return Alphabet(1, min(_MOST_SYMBOLS, top - 2))
    first, count = numbers
    symbols = min(_MOST_SYMBOLS, count)
    shift = real_of(dtype).exponent_shift
    step = max(min(_EXPONENTS << shift, count) // symbols, 1)
    step -= step > 1
    above = (_EIGHTHS.get(dtype.name, 0) << shift) // 8
    return Alphabet(first + (count - symbols * step) // 2 + above, symbols, step)


def normal_numbers(dtype: Dtype) -> tuple[int, int] | None:
    """The bit patterns of a float's positive normal numbers, by the first and their count, None for what is no float.

    A complex number counts as the real one that it then is.
    """
    dtype = real_of(dtype)
    if not dtype.exponent_bits:
        return None
    return 1 << dtype.exponent_shift, ((1 << dtype.exponent_bits) - 2) << dtype.exponent_shift


def real_of(dtype: Dtype) -> Dtype:
    """The dtype of the low half of a complex number; of all others itself."""
    return DTYPES["F32"] if dtype.name == "C64" else dtype


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of all elements: how many there are of each dtype, and where those of each tensor begin."""

    totals: Mapping[str, int]
    begins: Mapping[str, int]
    _of_dtype: Mapping[str, list[str]]

    @property
    def digits(self) -> int:
        """How many digits the longest address has."""
        return max((_digits(total, alphabet_of(DTYPES[name])) for name, total in self.totals.items()), default=1)

    def by_tensor(self, dtype: str, addresses: Indices) -> Iterator[tuple[str, Indices]]:
        """The tensors that have some of the elements at `addresses`, and which of these, by their places there."""
        names = self._of_dtype.get(dtype, [])
        numbers = np.searchsorted([self.begins[name] for name in names], addresses, side="right") - 1
        if len(numbers) and numbers[0] == numbers.min() == numbers.max():
            yield names[numbers[0]], np.arange(len(numbers))
            return
        order = np.argsort(numbers, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(places):
                yield names[numbers[places[0]]], places


def give_addresses(forms: Mapping[str, Form]) -> Addresses:
    """Number the elements of tensors."""
    totals: dict[str, int] = {}
    begins: dict[str, int] = {}
    of_dtype: dict[str, list[str]] = {}
    for name, form in forms.items():
        begins[name] = totals.get(form.dtype, 0)
        if form.elements:
            of_dtype.setdefault(form.dtype, []).append(name)
            totals[form.dtype] = begins[name] + form.elements
    return Addresses(totals, begins, of_dtype)


def _digits(total: int, alphabet: Alphabet) -> int:
    digits = 1
    while alphabet.symbols**digits < total:
        digits += 1
    return digits


class WritesBits(Protocol):
    """Says what is written into the elements at some addresses: unsigned integers as wide as the dtype's elements."""

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements: ...


class Digit(NamedTuple):
    """A load whose elements are digit `number` of their addresses, the lowest being 0; or its reverse."""

    number: int
    is_reversed: bool = False

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        alphabet = alphabet_of(dtype)
        digits: Indices = addresses // min(alphabet.symbols**self.number, _NO_ADDRESS) % alphabet.symbols
        bits = alphabet.bits(alphabet.symbols - 1 - digits if self.is_reversed else digits)
        return bits.astype(f"<u{dtype.width}")


class Drawn(NamedTuple):
    """A load whose elements are drawn at random from all numbers, normal ones where they are floats, and zeros, so that
    what tells zeros from others, as a mask of them, is seen."""

    seed: int

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        drawn = mixed(addresses.astype(np.uint64) + np.uint64(self.seed))
        numbers = normal_numbers(dtype)
        bits = AnyBits(self.seed).bits(dtype, addresses)
        if numbers is not None:
            first, count = numbers
            sign = mixed(drawn) & np.uint64(1 << (8 * dtype.width - 1))
            bits = ((np.uint64(first) + drawn % np.uint64(count)) | sign).astype(bits.dtype)
        bits[mixed(~drawn) % np.uint64(_ZEROS_IN) == 0] = 0
        return bits


class AnyBits(NamedTuple):
    """A load whose elements are drawn at random from all bit patterns: NaNs, both zeros, all there are."""

    seed: int

    def bits(self, dtype: Dtype, addresses: Indices) -> Elements:
        """What is written into the elements at `addresses`: unsigned integers as wide as the dtype's elements."""
        drawn = mixed(addresses.astype(np.uint64) + np.uint64(self.seed))
        return (drawn & np.uint64(1 if dtype.name == "BOOL" else (1 << 8 * dtype.width) - 1)).astype(f"<u{dtype.width}")


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Other numbers, different for different ones, of which each bit depends on all bits of the first."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


class Found(NamedTuple):
    """What the loads tell of local elements: the address each has its value from, NOWHERE where it has it from none,
    and which of those change from load to load all the same."""

    addresses: Indices
    is_made: Flags


def read_addresses(dtype: Dtype, total: int, digits: Sequence[Elements], is_reversed: Elements) -> Found:
    """Find where elements come from that were read back from a load for each digit, the lowest first, and from the
    one of the first digit reversed. `total` elements of the dtype have an address."""
    alphabet = alphabet_of(dtype)
    length = _digits(total, alphabet)
    addresses = np.zeros(len(is_reversed), np.int64)
    is_found = np.full(len(is_reversed), total > 0)
    is_constant = is_reversed == digits[0]
    for number, bits in enumerate(digits):
        digit, is_digit = alphabet.digits(bits)
        is_found &= is_digit & ((digit == 0) | (number < length))
        is_constant &= bits == digits[0]
        if number < length:
            addresses += digit * alphabet.symbols**number
    is_found &= addresses < total
    is_found &= is_reversed == Digit(0, is_reversed=True).bits(dtype, addresses)
    addresses[~is_found] = NOWHERE
    return Found(addresses, ~is_found & ~is_constant)
