"""Bit streams and varints (FORMAT 1), strictly read.

It does not know what the numbers mean. Errors are ValueError with the bit or byte at which the input went wrong; the
owner of a document names the document.
"""

from __future__ import annotations

VARINT_BYTES = 10


class BitWriter:
    """Collects fields, least significant bit first."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._word = 0
        self._bits = 0

    def field(self, value: int, bits: int) -> None:
        """Append `value` as a field of `bits` bits."""
        if value < 0 or value >> bits:
            raise ValueError(f"{value} does not fit a field of {bits} bits")
        self._word |= value << self._bits
        self._bits += bits
        whole = self._bits >> 3
        if whole:
            self._done += (self._word & ((1 << 8 * whole) - 1)).to_bytes(whole, "little")
            self._word >>= 8 * whole
            self._bits &= 7

    def gamma(self, value: int) -> None:
        """Append gamma(`value`), 1 <= value < 2^64."""
        if not 0 < value < 1 << 64:
            raise ValueError(f"gamma of {value} is not defined")
        low_bits = value.bit_length() - 1
        self.field(1 << low_bits, low_bits + 1)
        self.field(value - (1 << low_bits), low_bits)

    def to_bytes(self) -> bytes:
        """The stream so far, filled with 0 bits to the byte boundary."""
        return bytes(self._done) + (bytes([self._word]) if self._bits else b"")


class BitReader:
    """Reads fields from `data`, beginning at byte `start`; bits are counted from there.

    It never holds more than a few bytes at a time, so `data` may be a view of something large.
    """

    def __init__(self, data: bytes | bytearray | memoryview, start: int = 0) -> None:
        self._data = data
        self._start = start
        self._end_bits = 8 * max(0, len(data) - start)
        self.position = 0

    def field(self, bits: int) -> int:
        """Read a field of `bits` bits."""
        if bits > self._end_bits - self.position:
            raise ValueError(f"ends inside a field of {bits} bits: at bit {self.position}")
        value = self._peek(bits)
        self.position += bits
        return value

    def gamma(self) -> int:
        """Read one gamma code."""
        window = self._peek(64)
        if not window:
            raise ValueError(f"no gamma code: at bit {self.position}")
        low_bits = (window & -window).bit_length() - 1
        if 2 * low_bits + 1 > self._end_bits - self.position:
            raise ValueError(f"ends inside a gamma code: at bit {self.position}")
        self.position += low_bits + 1
        return 1 << low_bits | self.field(low_bits)

    def align(self) -> int:
        """Skip to the byte boundary, over 0 bits only, and give the index in `data` of the next byte."""
        if self.field(-self.position & 7):
            raise ValueError(f"padding is not zero: before bit {self.position}")
        return self._start + (self.position >> 3)

    def _peek(self, bits: int) -> int:
        """The next `bits` bits; those past the end read as 0."""
        first = self._start + (self.position >> 3)
        last = self._start + (self.position + bits + 7 >> 3)
        window = int.from_bytes(self._data[first:last], "little")
        return window >> (self.position & 7) & ((1 << bits) - 1)


def write_varint(value: int) -> bytes:
    """Encode `value`, 0 <= value < 2^64."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is no varint")
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes | bytearray | memoryview, start: int) -> tuple[int, int]:
    """Decode the varint at byte `start` of `data`: the value, and the index of the byte after it."""
    value = 0
    for index in range(start, min(start + VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << 7 * (index - start)
        if byte < 0x80:
            if byte == 0 and index > start:
                raise ValueError(f"varint is not in its shortest form: at byte {start}")
            if value >> 64:
                raise ValueError(f"varint is 2^64 or more: at byte {start}")
            return value, index + 1
    raise ValueError(f"varint does not end: at byte {start}")
