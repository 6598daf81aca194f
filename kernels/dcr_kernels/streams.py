"""The bit streams and codes that the reference kernels read and write, one piece of state each.

Section numbers are those of FORMAT.md. What a stream means is the business of `reference`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]

STATES = 32
LONGEST_CODE = 12
MOST_SYMBOLS = 2048

MASK_32 = 0xFFFFFFFF


class BitWriter:
    """Writes a bit stream (FORMAT.md 1)."""

    def __init__(self) -> None:
        self._parts: list[Bits] = []

    def bits(self, bits: Bits) -> None:
        self._parts.append(bits)

    def field(self, value: int, count: int) -> None:
        self.bits(np.array([value >> bit & 1 for bit in range(count)], np.uint8))

    def gamma(self, value: int) -> None:
        low_bits = value.bit_length() - 1
        self.field(0, low_bits)
        self.field(1, 1)
        self.field(value, low_bits)

    def to_bytes(self) -> bytes:
        return np.packbits(np.concatenate(self._parts), bitorder="little").tobytes()


class BitReader:
    """Reads a bit stream (FORMAT.md 1), of which no more than `limit` bytes are unpacked.

    No valid stream is longer than that, and what an invalid one holds behind them does not matter.
    """

    def __init__(self, source: NDArray[np.uint8], limit: int) -> None:
        self._size = source.size
        # One character a bit, in stream order: find() then counts zeros, and int() reads a field.
        self._text = (np.unpackbits(source[:limit], bitorder="little") + ord("0")).tobytes().decode("ascii")
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def malformed(self, facts: str) -> ValueError:
        return ValueError(f"malformed block: {facts}: at byte {self._at // 8}")

    def head(self) -> None:
        """Read the head bit (FORMAT.md 5.2), which must be 0."""
        if self.field(1):
            raise self.malformed("the block is in its whole form")

    def field(self, count: int) -> int:
        if count == 0:
            return 0
        text = self._text[self._at : self._at + count]
        if len(text) < count:
            raise self.malformed("the bit stream runs past the end")
        self._at += count
        return int(text[::-1], 2)

    def zeros(self) -> int:
        """Count the zero bits before the next 1 bit, and read that too."""
        one = self._text.find("1", self._at)
        if one < 0:
            raise self.malformed("the bit stream runs past the end")
        count = one - self._at
        self._at = one + 1
        return count

    def gamma(self) -> int:
        low_bits = self.zeros()
        if low_bits > 63:
            raise self.malformed("a number of more than 64 bits")
        return 1 << low_bits | self.field(low_bits)

    def rice(self, parameter: int) -> int:
        return self.zeros() << parameter | self.field(parameter)

    def code(self, entry_of: dict[str, int], lengths: Sequence[int]) -> int:
        """Read one code of a prefix code whose code lengths are `lengths`, ascending."""
        for length in lengths:
            entry = entry_of.get(self._text[self._at : self._at + length])
            if entry is not None:
                self._at += length
                return entry
        raise self.malformed("the bit stream runs past the end")

    def end(self) -> int:
        """Read the zero bits up to the byte boundary; return the number of bytes read."""
        if self.field(-self._at % 8):
            raise self.malformed("bits after the end")
        return self._at // 8


def rice_parameter(members: int, coded: int) -> int:
    """Return k of FORMAT.md 5.3 for `coded` > 0 of `members`."""
    return ((123 * (2 * (members - coded) + coded)) // (512 * coded)).bit_length()


def rice_gaps(members: int, changed: Indices) -> tuple[Indices, int]:
    """Return the gaps of the coded set, and the parameter they are written with."""
    coded = np.delete(np.arange(members), changed) if 2 * changed.size > members else changed
    if not coded.size:
        return coded, 0
    return np.diff(coded, prepend=-1) - 1, rice_parameter(members, coded.size)


def position_code(members: int, changed: Indices) -> Bits:
    """Return the position code (FORMAT.md 5.3) of the ascending `changed` among `members`."""
    gaps, parameter = rice_gaps(members, changed)
    ends = np.cumsum((gaps >> parameter) + 1 + parameter)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    ones = ends - parameter - 1
    bits[ones] = 1
    for bit in range(parameter):
        bits[ones + 1 + bit] = gaps >> bit & 1
    return bits


def read_position_code(reader: BitReader, members: int, count: int) -> Indices:
    """Read which `count` of `members` changed, ascending."""
    coded_count = members - count if 2 * count > members else count
    coded = []
    at = -1
    for _ in range(coded_count):
        at += 1 + reader.rice(rice_parameter(members, coded_count))
        if at >= members:
            raise reader.malformed("a position outside")
        coded.append(at)
    found = np.array(coded, np.int64)
    return np.delete(np.arange(members), found) if 2 * count > members else found


def adapted(state: int, bit: int) -> int:
    """Return what a state becomes when it has coded `bit`."""
    return state - (state >> 5) if bit else state + ((65536 - state) >> 5)


class RangeDecoder:
    """Reads the adaptive coder's section (FORMAT.md 5.4), which lies at byte `start` of its block."""

    def __init__(self, section: bytes, start: int) -> None:
        self._section = section
        self._start = start
        if section.endswith(b"\0"):
            raise ValueError(
                f"malformed block: the coder's section ends with a zero byte: at byte {start + len(section) - 1}"
            )
        self._range = MASK_32
        self._code = int.from_bytes(section[:4].ljust(4, b"\0"), "big")
        self._at = 4

    def bit(self, states: list[int], index: int) -> int:
        state = states[index]
        bound = (self._range >> 16) * state
        if self._code < bound:
            bit = 0
            self._range = bound
        else:
            bit = 1
            self._code -= bound
            self._range -= bound
        states[index] = adapted(state, bit)
        self._renormalise()
        return bit

    def plain(self) -> int:
        self._range >>= 1
        bit = int(self._code >= self._range)
        self._code -= bit * self._range
        self._renormalise()
        return bit

    def _renormalise(self) -> None:
        while self._range < 1 << 24:
            byte = self._section[self._at] if self._at < len(self._section) else 0
            self._range <<= 8
            self._code = (self._code << 8 | byte) & MASK_32
            self._at += 1

    def malformed(self, facts: str) -> ValueError:
        return ValueError(f"malformed block: {facts}: at byte {self._start + min(self._at, len(self._section))}")

    def end(self) -> None:
        if self._at < len(self._section):
            raise self.malformed("bytes that nothing reads")


class RangeEncoder:
    """Writes the adaptive coder's section (FORMAT.md 5.4)."""

    def __init__(self) -> None:
        self._low = 0
        self._range = MASK_32
        self._bytes = bytearray()

    def bit(self, states: list[int], index: int, bit: int) -> None:
        state = states[index]
        bound = (self._range >> 16) * state
        self._add(bound if bit else 0)
        self._range = self._range - bound if bit else bound
        states[index] = adapted(state, bit)
        self._renormalise()

    def plain(self, bit: int) -> None:
        self._range >>= 1
        self._add(self._range if bit else 0)
        self._renormalise()

    def _add(self, amount: int) -> None:
        self._low += amount
        if self._low > MASK_32:
            self._low &= MASK_32
            at = len(self._bytes) - 1
            while self._bytes[at] == 255:
                self._bytes[at] = 0
                at -= 1
            self._bytes[at] += 1

    def _renormalise(self) -> None:
        while self._range < 1 << 24:
            self._bytes.append(self._low >> 24)
            self._low = self._low << 8 & MASK_32
            self._range <<= 8

    def end(self) -> bytes:
        # The range is at least 2^24, so one of the first two units has a multiple in it.
        for unit in (1 << 32, 1 << 24):
            chosen = -(-self._low // unit) * unit
            if chosen < self._low + self._range:
                break
        self._add(chosen - self._low)
        return (bytes(self._bytes) + self._low.to_bytes(4, "big")).rstrip(b"\0")


def read_magnitude(decoder: RangeDecoder, states: list[int], bits: int) -> int:
    """Read a magnitude of at most `bits` bits with, and adapting, the states of its class (FORMAT.md 5.5)."""
    exponent = 0
    while decoder.bit(states, min(exponent, STATES - 1)):
        exponent += 1
        if exponent == bits:
            raise decoder.malformed(f"a magnitude of more than {bits} bits")
    magnitude = 1
    for _ in range(exponent):
        magnitude = magnitude << 1 | decoder.plain()
    return magnitude


def write_magnitude(encoder: RangeEncoder, states: list[int], magnitude: int) -> None:
    """Write a magnitude with, and adapting, the states of its class (FORMAT.md 5.5)."""
    exponent = magnitude.bit_length() - 1
    for index in range(exponent):
        encoder.bit(states, min(index, STATES - 1), 1)
    encoder.bit(states, min(exponent, STATES - 1), 0)
    for shift in range(exponent - 1, -1, -1):
        encoder.plain(magnitude >> shift & 1)


def huffman_codes(
    bits: int, table_symbols: NDArray[np.uint64], table_lengths: NDArray[np.uint8], escape_length: int
) -> tuple[Indices, Indices]:
    """Return length and canonical code of each entry of a table for fields of `bits` bits, the escape last (5.7)."""
    if table_symbols.size != table_lengths.size or table_symbols.size > MOST_SYMBOLS:
        raise ValueError(f"malformed table: {table_symbols.size} symbols, {table_lengths.size} lengths")
    entries = list(zip(table_lengths.tolist(), table_symbols.tolist(), strict=True))
    for index, (entry, after) in enumerate(itertools.pairwise(entries)):
        if entry >= after:
            raise ValueError(f"malformed table: not sorted by length and symbol: at element {index + 1}")
    for index, (_, symbol) in enumerate(entries):
        if symbol >= 1 << min(bits, 32):
            raise ValueError(f"malformed table: symbol out of range: at element {index}")
    if escape_length != -1:
        entries.append((escape_length, 1 << bits))
    lengths = np.array([length for length, _ in entries], np.int64)
    codes = np.zeros(lengths.size, np.int64)
    if len(entries) == 1:
        if lengths[0]:
            raise ValueError("malformed table: the code of a single entry is empty: at element 0")
        return lengths, codes
    for index, length in enumerate(lengths.tolist()):
        if not 1 <= length <= LONGEST_CODE:
            raise ValueError(f"malformed table: code length {length}: at element {index}")
    if sum(1 << (LONGEST_CODE - length) for length in lengths.tolist()) != 1 << LONGEST_CODE:
        raise ValueError(f"malformed table: not a complete code: at element {len(entries)}")
    code = previous = 0
    for index in sorted(range(len(entries)), key=entries.__getitem__):
        code <<= int(lengths[index]) - previous
        codes[index] = code
        code, previous = code + 1, int(lengths[index])
    return lengths, codes
