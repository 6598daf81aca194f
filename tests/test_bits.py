"""bits: what is written is read back, and nothing but the one valid form is read."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.bits import BitReader, BitWriter, read_varint, write_varint

FIELDS = st.integers(0, 64).flatmap(lambda bits: st.tuples(st.integers(0, (1 << bits) - 1), st.just(bits)))
U64 = st.integers(0, (1 << 64) - 1) | st.integers(0, 300)


@given(st.lists(FIELDS | U64.filter(bool)), st.integers(0, 3))
def test_bit_stream_round_trip(items: list[tuple[int, int] | int], start: int) -> None:
    writer = BitWriter()
    for item in items:
        if isinstance(item, int):
            writer.gamma(item)
        else:
            writer.field(*item)
    data = bytes(start) + writer.to_bytes()
    reader = BitReader(memoryview(data), start)
    for item in items:
        if isinstance(item, int):
            assert reader.gamma() == item
        else:
            assert reader.field(item[1]) == item[0]
    assert reader.align() == len(data)


def test_bits_are_least_significant_first() -> None:
    writer = BitWriter()
    writer.field(0b1, 1)
    writer.field(0b011, 3)
    writer.gamma(5)
    assert writer.to_bytes() == bytes([0b11_00_0_11_1, 0])  # 1, 3, then of gamma(5): 00, 1, and 1 0


def test_gamma_is_zeros_one_and_low_bits() -> None:
    writer = BitWriter()
    writer.gamma(1)
    assert writer.to_bytes() == b"\x01"
    writer = BitWriter()
    writer.gamma(6)
    assert writer.to_bytes() == bytes([0b10100])


@pytest.mark.parametrize("cut", range(1, 16))
def test_a_cut_stream_is_refused(cut: int) -> None:
    writer = BitWriter()
    writer.gamma((1 << 64) - 1)
    data = writer.to_bytes()
    with pytest.raises(ValueError, match="at bit 0"):
        BitReader(data[: len(data) - cut]).gamma()


def test_gamma_of_2_to_the_64_is_refused() -> None:
    with pytest.raises(ValueError, match="no gamma code: at bit 0"):
        BitReader(bytes(8) + b"\x01" + bytes(16)).gamma()


def test_a_field_past_the_end_is_refused() -> None:
    reader = BitReader(b"\xff")
    assert reader.field(5) == 31
    with pytest.raises(ValueError, match="at bit 5"):
        reader.field(4)


def test_padding_must_be_zero() -> None:
    reader = BitReader(b"\x82")
    reader.field(3)
    with pytest.raises(ValueError, match="padding"):
        reader.align()


def test_values_that_do_not_fit_are_not_written() -> None:
    writer = BitWriter()
    for value, bits in ((2, 1), (-1, 3), (1, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            writer.field(value, bits)
    for value in (0, 1 << 64):
        with pytest.raises(ValueError, match="gamma"):
            writer.gamma(value)
    for value in (-1, 1 << 64):
        with pytest.raises(ValueError, match="no varint"):
            write_varint(value)


@given(U64, st.binary(max_size=3))
def test_varint_round_trip(value: int, after: bytes) -> None:
    data = b"\x80" + write_varint(value) + after
    assert read_varint(data, 1) == (value, len(data) - len(after))


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b"", "does not end"),
        (b"\x80", "does not end"),
        (b"\xff" * 10 + b"\x01", "does not end"),
        (b"\x80\x00", "shortest"),
        (b"\xff\x80\x00", "shortest"),
        (b"\xff" * 9 + b"\x02", "2\\^64"),
    ],
)
def test_other_varints_are_refused(data: bytes, facts: str) -> None:
    with pytest.raises(ValueError, match=facts + ".*at byte 0"):
        read_varint(data, 0)
