"""reference: does what FORMAT.md says, by hand-computed bytes, by properties, and rule by rule."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from dcr_kernels import describe, reference, streams
from kernel_cases import RATES, SIZES, SPECS, Elements, Spec, decode, draft as draft_of, pair, unaligned

pytestmark = pytest.mark.filterwarnings("error")

STATES = np.full((16, 32), 32768, np.uint16)
NO_SYMBOLS = np.zeros(0, np.uint64)
NO_LENGTHS = np.zeros(0, np.uint8)
ONE = np.ones(1, np.uint16)
U64 = (1 << 64) - 1
U32 = (1 << 32) - 1


def stream(text: str) -> bytes:
    """Return the bytes of a bit stream written as its bits in order; blanks are for the reader's eye."""
    bits = text.replace(" ", "")
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


def gamma(value: int) -> str:
    """Return the bits of gamma(value)."""
    return "0" * (value.bit_length() - 1) + "1" + f"{value:b}"[1:][::-1]


def specs() -> st.SearchStrategy[Spec]:
    return st.sampled_from(SPECS)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Spec, Elements, Elements]:
    """Base and target that differ in at least one element, of any bits."""
    spec = draw(specs())
    n = draw(st.integers(1, 40))
    values = st.integers(0, (1 << (8 * spec.width)) - 1)
    base = draw(hnp.arrays(spec.dtype, n, elements=values))
    masks = draw(hnp.arrays(spec.dtype, n, elements=values | st.just(0)))
    masks[draw(st.integers(0, n - 1))] |= 1
    return spec, base, base ^ masks


def mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
    return z ^ (z >> 31)


def plain_digest(data: bytes, offset: int) -> list[int]:
    """The definition of FORMAT.md 3.2, byte by byte, in integers without a bound."""
    sums = [0] * 4
    for address, byte in enumerate(data, offset):
        value = 256 * (byte - 256 * (byte > 127)) if address % 2 else byte
        for q in range(4):
            unit_key = (mix(2**62 + 4096 * q + address // 2 % 4096) | 1) & 0xFFFF
            row_key = (mix(2**60 * q + address // 8192) | 1) & U32
            sums[q] += value * (unit_key - 65536 * (unit_key > 32767)) * row_key
    return [total & U32 for total in sums]


def test_digest_of_nothing_is_zero() -> None:
    assert reference.digest(b"").tolist() == [0, 0, 0, 0]
    assert reference.digest(np.zeros(0, np.uint64), 12345).tolist() == [0, 0, 0, 0]


def test_digest_of_known_bytes() -> None:
    assert reference.digest(bytes(range(256)) * 40).tobytes().hex() == "105f8d5588959824a8f0f66b4074f54a"


@given(st.binary(max_size=40), st.integers(0, 2**62) | st.sampled_from([1, 8190, 8191, 8192, 2**62 - 1, 2**62]))
def test_digest_is_the_definition(data: bytes, offset: int) -> None:
    assert reference.digest(data, offset).tolist() == plain_digest(data, offset)


@pytest.mark.parametrize("offset", [0, 1, 8191, 2**40 + 1])
@pytest.mark.parametrize("size", [8191, 8192, 8193, 16385])
def test_digest_over_rows(size: int, offset: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert reference.digest(data, offset).tolist() == plain_digest(data, offset)


@given(st.integers(0, 3 * 8192), st.integers(0, 9000), st.integers(0, 2**20))
def test_digest_is_additive_over_any_cut(size: int, cut: int, offset: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    parts = reference.digest(data[:cut], offset) + reference.digest(data[cut:], offset + min(cut, size))
    assert (parts == reference.digest(data, offset)).all()


def test_digest_of_many_chunks() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * 524288 + 777).astype(np.uint8)
    parts = [reference.digest(data[at : at + 100_001], 5 + at) for at in range(0, data.size, 100_001)]
    assert (sum(parts[1:], parts[0]) == reference.digest(data, 5)).all()


def test_digest_reads_any_buffer() -> None:
    array = np.arange(1000, dtype=np.float64)
    expected = reference.digest(array.tobytes(), 3)
    for data in (array, array.view(np.uint16), array.data, bytearray(array.tobytes()), unaligned(array)):
        assert (reference.digest(data, 3) == expected).all()


@pytest.mark.parametrize("offset", [-1, 2**62 + 1])
def test_digest_refuses_offsets_outside(offset: int) -> None:
    nothing = np.zeros(0, np.uint32)
    with pytest.raises(ValueError, match="offset"):
        reference.digest(b"", offset)
    with pytest.raises(ValueError, match="offset"):
        reference.digest_changes(nothing, nothing, nothing, offset)


@given(changes(), st.integers(0, 2**62) | st.integers(8100, 8200), st.randoms())
def test_digest_changes_is_the_difference(change: tuple[Spec, Elements, Elements], offset: int, random: Any) -> None:
    _, base, target = change
    positions = reference.scan(base, target)
    order = np.array(random.sample(range(positions.size), positions.size), np.int64)
    positions = positions[order]
    grown = reference.digest_changes(positions, base[positions], target[positions], offset)
    assert (reference.digest(base, offset) + grown == reference.digest(target, offset)).all()


def test_digest_changes_at_far_positions() -> None:
    positions = np.array([2**32 - 1], np.uint32)
    old, new = np.zeros(1, np.uint64), np.array([2**64 - 1], np.uint64)
    grown = reference.digest_changes(positions, old, new, 7)
    assert grown.tolist() == plain_digest(bytes([255] * 8), 7 + 8 * (2**32 - 1))


@given(changes())
def test_patch_makes_target_of_base(change: tuple[Spec, Elements, Elements]) -> None:
    _, base, target = change
    positions = reference.scan(base, target)
    assert positions.tolist() == [i for i in range(base.size) if base[i] != target[i]]
    out = base.copy()
    reference.patch(out, positions, target[positions])
    assert out.tobytes() == target.tobytes()
    out = base.copy()
    reference.patch_xor(out, positions, base[positions] ^ target[positions])
    assert out.tobytes() == target.tobytes()


@pytest.mark.parametrize("patch", [reference.patch, reference.patch_xor])
def test_patch_outside_changes_nothing(patch: Callable[..., None]) -> None:
    out = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match=r"at element 1$"):
        patch(out, np.array([0, 4], np.uint32), np.array([1, 1], np.uint16))
    assert not out.any()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes_hold_one_byte_of_every_element(width: int) -> None:
    block = bytes(range(6 * width))
    planes = reference.whole_split(block, width)
    assert planes.shape == (width, 6)
    assert planes[width - 1].tobytes() == bytes(range(width - 1, 6 * width, width))
    assert reference.whole_join(planes, width) == block
    assert reference.whole_join(reference.whole_split(b"", width), width) == b""


def test_planes_of_part_of_an_element_are_refused() -> None:
    with pytest.raises(ValueError, match="at byte 5"):
        reference.whole_split(bytes(5), 2)
    with pytest.raises(ValueError, match="width 2"):
        reference.whole_join(np.zeros((1, 3), np.uint8), 2)


# Eight elements of one class; element 2 grows by 1 and element 5 falls by 3. Head 0, gamma(2 + 1); N 8, M 2: k is
# bitlen(1722 div 1024) = 1, both gaps are 2, "0 1" and the field 0; signs. The coder ends with low 0x517F7C00 and range
# 0x0F800000, in which 0x52000000 is the value with the most zero bytes.
BASE = np.zeros(8, np.uint8)
HEAD = "0" + gamma(3)
GAPS = "010 010"
CONTEXT = stream(HEAD + GAPS + "01") + b"\x52"


def test_context_by_hand() -> None:
    target = np.array([0, 0, 1, 0, 0, 253, 0, 0], np.uint8)
    draft, counts, magnitudes = draft_of(reference, BASE, target, (0, 0))
    assert draft == bytes.fromhex("2c09")
    assert counts.dtype == np.uint32 and counts.tolist() == [2]
    assert magnitudes.dtype == np.uint8 and magnitudes.tolist() == [1, 3]
    assert draft + reference.magnitude_encode(counts, magnitudes, STATES) == CONTEXT == bytes.fromhex("2c0952")
    positions, values = decode(reference, CONTEXT, BASE, (0, 0), STATES)
    assert positions.tolist() == [2, 5] and values.tolist() == [1, 253]


def test_context_orders_by_class() -> None:
    base = np.array([0x3C00, 0x4000, 0x3800] * 100, np.uint16)
    target = base.copy()
    target[[0, 1, 2, 4]] += np.array([1, 2, 3, 4], np.uint16)
    draft, counts, magnitudes = draft_of(reference, base, target, (5, 10))
    assert draft[0] & 0x3F == 16 << 1
    assert counts.tolist() == [2, 1, 1] + [0] * 13
    assert magnitudes.tolist() == [2, 4, 1, 3]
    block = draft + reference.magnitude_encode(counts, magnitudes, STATES)
    decoded, values = decode(reference, block, base, (5, 10), STATES)
    assert decoded.tolist() == [1, 4, 0, 2] and values.tolist() == target[[1, 4, 0, 2]].tolist()


def test_class_15_is_the_last() -> None:
    base = np.array([100, 101, 99, 86, 85, 84, 1, 0], np.uint16) << np.uint16(7)
    target = base ^ np.uint16(1)
    _, counts, _ = draft_of(reference, base, target, (8, 7))
    assert counts.tolist() == [1, 1, 1] + [0] * 12 + [5]


def test_top_leaves_one_in_256_above() -> None:
    base = np.full(512, 10 << 7, np.uint16)
    target = base ^ np.uint16(1)
    for above, top in ((2, 10), (3, 255)):
        base[:above] = target[:above] = 0x7F80
        target[:above] ^= 1
        draft, _, _ = draft_of(reference, base, target, (8, 7))
        assert int.from_bytes(draft[:2], "little") >> 1 & 255 == top


@given(changes(), hnp.arrays(np.uint16, (16, 32), elements=st.integers(1, 65535)))
def test_context_round_trip(change: tuple[Spec, Elements, Elements], states: Any) -> None:
    spec, base, target = change
    kind = (spec.exponent_bits, spec.exponent_shift)
    draft, counts, magnitudes = draft_of(reference, base, target, kind)
    block = draft + reference.magnitude_encode(counts, magnitudes, states)
    positions, values = decode(reference, block, base, kind, states)
    assert positions.dtype == np.uint32 and values.dtype == base.dtype
    out = base.copy()
    reference.patch(out, positions, values)
    assert out.tobytes() == target.tobytes()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_encoding_round_trips(spec: Spec, rate: float) -> None:
    table = (np.array([1, 2, 3, 0xFF], np.uint64), np.array([1, 3, 4, 4], np.uint8), 2)
    for n in SIZES:
        base, target = pair(spec, n, rate)
        positions = reference.scan(base, target)
        if not positions.size:
            continue
        kind = (spec.exponent_bits, spec.exponent_shift)
        draft, counts, magnitudes = draft_of(reference, base, target, kind)
        block = draft + reference.magnitude_encode(counts, magnitudes, STATES)
        decoded, values = decode(reference, block, base, kind, STATES)
        assert sorted(decoded.tolist()) == positions.tolist() and (values == target[decoded]).all()
        masks = base[positions] ^ target[positions]
        block = reference.gap_encode(n, positions, masks, *table)
        decoded, symbols = reference.gap_decode(block, n, spec.width, *table)
        assert (decoded == positions).all() and symbols.tobytes() == masks.tobytes()


# The rules that a block of BASE can break, with what is said of it.
MALFORMED_CONTEXT = {
    "empty": ("past the end", b""),
    "whole form": ("whole form", b"\x01"),
    "whole form with a body": ("whole form", b"\x01" + CONTEXT),
    "no changes": ("without changes", stream("0" + gamma(1))),
    "count of more than 64 bits": ("more than 64 bits", stream("0" + "0" * 64 + "1" + "0" * 64)),
    "count without an end": ("past the end", bytes(40)),
    "more changes than members": ("more changes", stream("0" + gamma(10) + "0" * 9)),
    "count of 2^64 - 1": ("more changes", stream("0" + gamma(2**64 - 1))),
    "position outside": ("position outside", stream(HEAD + "010 0011" + "01")),
    "position far outside": ("position outside", stream(HEAD + "010" + "0" * 1000 + "1 0" + "01")),
    "cut in the positions": ("past the end", stream(HEAD + "01")),
    "padding": ("bits after the end", stream(HEAD + GAPS + "01 0001")),
    "section ends with zero": ("zero byte", CONTEXT + b"\0"),
    "section of zero bytes": ("zero byte", stream(HEAD + GAPS + "01") + bytes(3)),
    "bytes that nothing reads": ("nothing reads", CONTEXT + bytes([0, 0, 0, 1])),
    "magnitude of 9 bits": ("more than 8 bits", stream(HEAD + GAPS + "01") + b"\xff" * 4),
}


@pytest.mark.parametrize("rule", MALFORMED_CONTEXT)
def test_context_refuses(rule: str) -> None:
    message, block = MALFORMED_CONTEXT[rule]
    with pytest.raises(ValueError, match=rf"{message}.*: at byte \d+$"):
        decode(reference, block, BASE, (0, 0), STATES)


@pytest.mark.parametrize("end", range(len(CONTEXT) - 1))
def test_context_refuses_a_cut_stream(end: int) -> None:
    with pytest.raises(ValueError, match=r"at byte \d+$"):
        decode(reference, CONTEXT[:end], BASE, (0, 0), STATES)


def test_context_refuses_another_top() -> None:
    base = np.full(8, 0x3F80, np.uint16)
    draft, counts, magnitudes = draft_of(reference, base, base + np.uint16(1), (8, 7))
    block = draft + reference.magnitude_encode(counts, magnitudes, STATES)
    decode(reference, block, base, (8, 7), STATES)
    with pytest.raises(ValueError, match=r"top exponent .* at byte 1$"):
        decode(reference, block, base + np.uint16(0x80), (8, 7), STATES)


def one_change(sign: int, magnitude: int) -> bytes:
    """The block that changes the first of 8 bytes by any magnitude of up to 8 bits, legal or not."""
    encoder = streams.RangeEncoder()
    streams.write_magnitude(encoder, STATES[0].tolist(), magnitude)
    # N 8, M 1: k is bitlen(1845 div 512) = 2.
    return stream("0" + gamma(2) + "1 00" + str(sign)) + encoder.end()


@pytest.mark.parametrize(("sign", "magnitude"), [(0, 128), (0, 129), (1, 129), (0, 255), (1, 255)])
def test_context_refuses_magnitudes_out_of_range(sign: int, magnitude: int) -> None:
    with pytest.raises(ValueError, match=r"magnitude out of range: at byte \d+$"):
        decode(reference, one_change(sign, magnitude), BASE, (0, 0), STATES)


def test_context_refuses_a_magnitude_of_too_many_bits() -> None:
    with pytest.raises(ValueError, match=r"magnitude of more than 8 bits: at byte \d+$"):
        decode(reference, one_change(0, 256), BASE, (0, 0), STATES)


@pytest.mark.parametrize(
    ("sign", "magnitude", "value"), [(0, 1, 1), (1, 1, 255), (0, 127, 127), (1, 127, 129), (1, 128, 128)]
)
def test_context_takes_the_extreme_magnitudes(sign: int, magnitude: int, value: int) -> None:
    block = one_change(sign, magnitude)
    assert decode(reference, block, BASE, (0, 0), STATES)[1].tolist() == [value]
    target = BASE.copy()
    target[0] = value
    draft, counts, magnitudes = draft_of(reference, BASE, target, (0, 0))
    assert draft + reference.magnitude_encode(counts, magnitudes, STATES) == block


@pytest.mark.parametrize("kind", [(-1, 0), (8, 1), (9, 0), (0, -1)])
def test_context_refuses_an_exponent_outside(kind: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="exponent"):
        decode(reference, CONTEXT, BASE, kind, STATES)


@pytest.mark.parametrize("offset", [0, 3, 8190])
def test_comparing_and_decoding_digest_both_sides(offset: int) -> None:
    base, target = pair(SPECS[5], 5000, 0.05)
    found = reference.compare(base, target, offset, (8, 7))
    assert found.draft is not None
    block = found.draft.stream + reference.magnitude_encode(found.draft.class_counts, found.draft.magnitudes, STATES)
    out = np.zeros_like(base)
    decoded = reference.context_decode(block, base, offset, (8, 7), STATES, out)
    assert out.tobytes() == target.tobytes()
    for sums in (found, decoded):
        assert sums.digest.tolist() == reference.digest(base, offset).tolist()
        assert (sums.digest + sums.growth).tolist() == reference.digest(target, offset).tolist()
    assert reference.compare(base, base, offset, (8, 7)).draft is None
    reference.context_decode(block, base, offset, (8, 7), STATES, base)
    assert base.tobytes() == target.tobytes()


def test_a_state_of_zero_is_refused() -> None:
    states = STATES.copy()
    states[1, 2] = 0
    with pytest.raises(ValueError, match=r"at element 34$"):
        decode(reference, CONTEXT, BASE, (0, 0), states)
    with pytest.raises(ValueError, match=r"at element 34$"):
        reference.magnitude_encode(np.ones(1, np.uint32), np.ones(1, np.uint8), states)


class WideEncoder:
    """The coder of FORMAT.md 5.4 with a low that is never cut, so that nothing has to carry."""

    def __init__(self) -> None:
        self.low, self.range, self.shifts = 0, U32, 0

    def narrow(self, start: int, size: int) -> None:
        self.low += start
        self.range = size
        while self.range < 1 << 24:
            self.low, self.range, self.shifts = self.low << 8, self.range << 8, self.shifts + 1

    def end(self) -> bytes:
        # The value with the most trailing zero bytes; the smallest, if there are several.
        for zeros in range(self.shifts + 4, -1, -1):
            value = -(-self.low >> (8 * zeros)) << (8 * zeros)
            if value < self.low + self.range:
                return value.to_bytes(self.shifts + 4, "big").rstrip(b"\0")
        raise AssertionError


def wide_section(counts: list[int], magnitudes: list[int], states: list[list[int]]) -> bytes:
    encoder = WideEncoder()
    values = iter(magnitudes)
    for row, count in zip(states, counts, strict=False):
        for _ in range(count):
            magnitude = next(values)
            exponent = magnitude.bit_length() - 1
            for index in range(exponent + 1):
                state = row[min(index, 31)]
                bound = (encoder.range >> 16) * state
                if index < exponent:
                    row[min(index, 31)] = state - (state >> 5)
                    encoder.narrow(bound, encoder.range - bound)
                else:
                    row[min(index, 31)] = state + ((65536 - state) >> 5)
                    encoder.narrow(0, bound)
            for character in f"{magnitude:b}"[1:]:
                half = encoder.range >> 1
                encoder.narrow(half * int(character), half)
    return encoder.end()


@given(
    st.lists(st.integers(1, 2**63) | st.integers(1, 4), max_size=30),
    hnp.arrays(np.uint16, (16, 32), elements=st.integers(1, 65535) | st.sampled_from([1, 31, 32, 65535])),
    st.integers(0, 15),
)
def test_section_is_that_of_a_coder_without_carries(magnitudes: list[int], states: Any, cut: int) -> None:
    counts = [len(magnitudes[:cut]), len(magnitudes[cut:])] + [0] * 14
    section = reference.magnitude_encode(np.array(counts, np.uint32), np.array(magnitudes, np.uint64), states)
    assert section == wide_section(counts, magnitudes, states.tolist())


def test_carries_run_through_bytes_of_255() -> None:
    carried = 0
    states = STATES.copy()
    states[:, :] = 65500
    for seed in range(200):
        magnitudes = np.random.default_rng(seed).geometric(0.3, 60).astype(np.uint16)
        section = reference.magnitude_encode(np.array([60], np.uint32), magnitudes, states)
        assert section == wide_section([60], magnitudes.tolist(), states.tolist())
        carried += b"\0" in section
    assert carried


def test_magnitudes_out_of_range_have_no_code() -> None:
    counts = np.array([2], np.uint32)
    for wrong in (0, 129):
        magnitudes = np.array([1, wrong], np.uint8)
        with pytest.raises(ValueError, match=r"at element 1$"):
            reference.magnitude_encode(counts, magnitudes, STATES)
        with pytest.raises(ValueError, match=r"at element 1$"):
            reference.magnitude_bins(counts, magnitudes)
    with pytest.raises(ValueError, match="class counts"):
        reference.magnitude_encode(counts, np.ones(3, np.uint8), STATES)


@given(st.lists(st.integers(1, 2**63) | st.integers(1, 4), min_size=1, max_size=30), st.integers(0, 30))
def test_bins_count_what_the_coder_codes(magnitudes: list[int], cut: int) -> None:
    counts = np.array([len(magnitudes[:cut]), len(magnitudes[cut:])] + [0] * 14, np.uint32)
    expected = np.zeros((16, 32, 2), np.uint64)
    for index, magnitude in enumerate(magnitudes):
        exponent = magnitude.bit_length() - 1
        for bit in range(exponent + 1):
            expected[int(index >= cut), min(bit, 31), int(bit < exponent)] += 1
    bins = reference.magnitude_bins(counts, np.array(magnitudes, np.uint64))
    assert bins.dtype == np.uint64 and (bins == expected).all()


# Eight elements; 2 carries the symbol 7, whose code is 0, and 5 the symbol 9, which is not in the table: the escape,
# whose code is 1, and a field.
TABLE = (np.array([7], np.uint64), np.array([1], np.uint8), 1)
GAP_HEAD = "0" + gamma(2) + GAPS
GAP = stream(GAP_HEAD + "0" + "1 10010000")


def test_gap_by_hand() -> None:
    positions, symbols = np.array([2, 5], np.uint32), np.array([7, 9], np.uint8)
    assert reference.gap_encode(8, positions, symbols, *TABLE) == GAP == bytes.fromhex("249900")
    decoded, values = reference.gap_decode(GAP, 8, 1, *TABLE)
    assert decoded.tolist() == [2, 5] and values.tolist() == [7, 9]


def test_the_unchanged_are_coded_where_most_changed() -> None:
    positions, symbols = np.array([0, 1, 3], np.uint32), np.array([7, 7, 7], np.uint8)
    table = (np.array([7], np.uint64), np.array([0], np.uint8), -1)
    # N 4, M 1, k = bitlen(861 div 512) = 1, gap 2.
    assert reference.gap_encode(4, positions, symbols, *table) == stream("0" + gamma(3) + "010")
    assert reference.gap_decode(stream("0" + gamma(3) + "010"), 4, 1, *table)[0].tolist() == [0, 1, 3]
    everything = np.arange(4, dtype=np.uint32)
    assert reference.gap_encode(4, everything, np.full(4, 7, np.uint8), *table) == stream("0" + gamma(4))
    assert reference.gap_decode(stream("0" + gamma(4)), 4, 1, *table)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("members", "coded", "parameter"),
    [(2, 1, 0), (8, 2, 1), (634, 246, 0), (635, 246, 1), (1024, 1, 9), (2**18, 1, 17), (2**32 - 1, 1, 31)],
)
def test_parameter_by_hand(members: int, coded: int, parameter: int) -> None:
    assert streams.rice_parameter(members, coded) == parameter


def test_codes_are_canonical() -> None:
    symbols = np.array([5, 1, 9, 200], np.uint64)
    lengths, codes = streams.huffman_codes(8, symbols, np.array([1, 3, 3, 3], np.uint8), 3)
    assert lengths.tolist() == [1, 3, 3, 3, 3] and codes.tolist() == [0b0, 0b100, 0b101, 0b110, 0b111]
    symbols = np.array([1, 5, 9, 200], np.uint64)
    lengths, codes = streams.huffman_codes(8, symbols, np.array([2, 2, 3, 3], np.uint8), 2)
    assert lengths.tolist() == [2, 2, 3, 3, 2] and codes.tolist() == [0b00, 0b01, 0b110, 0b111, 0b10]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True).map(sorted), st.integers(1, 500))
def test_position_bits_are_those_of_the_block(positions: list[int], more: int) -> None:
    n = positions[-1] + more
    array = np.array(positions, np.uint32)
    table = (np.array([0], np.uint64), np.array([0], np.uint8), -1)
    bits = reference.position_bits(n, array)
    block = reference.gap_encode(n, array, np.zeros(array.size, np.uint8), *table)
    assert len(block) == (1 + bits + 7) // 8
    assert reference.gap_decode(block, n, 1, *table)[0].tolist() == positions


MALFORMED_GAP = {
    "empty": ("past the end", b""),
    "whole form": ("whole form", b"\x01"),
    "count of more than 64 bits": ("more than 64 bits", stream("0" + "0" * 64 + "1" + "0" * 64)),
    "count without an end": ("past the end", bytes(40)),
    "more changes than elements": ("more changes", stream("0" + gamma(9)) + bytes(9)),
    "position outside": ("position outside", stream("0" + gamma(2) + "010 0011" + "0 0")),
    "position far outside": ("position outside", stream("0" + gamma(2) + "010" + "0" * 400 + "1 0" + "0 0")),
    "cut in the positions": ("past the end", stream("0" + gamma(2) + "01")),
    "cut in a symbol": ("past the end", GAP[:2]),
    "padding": ("bits after the end", stream(GAP_HEAD + "0 1 10010000 001")),
    "bytes that nothing reads": ("nothing reads", GAP + b"\0"),
}


@pytest.mark.parametrize("rule", MALFORMED_GAP)
def test_gap_refuses(rule: str) -> None:
    message, block = MALFORMED_GAP[rule]
    with pytest.raises(ValueError, match=rf"{message}.*: at byte \d+$"):
        reference.gap_decode(block, 8, 1, *TABLE)


def test_gap_refuses_a_cut_code() -> None:
    table = (np.arange(4096 // 2, dtype=np.uint64), np.full(2048, 11, np.uint8), -1)
    block = reference.gap_encode(8, np.array([2, 5], np.uint32), np.array([1, 2047], np.uint16), *table)
    for end in range(len(block)):
        with pytest.raises(ValueError, match=r"at byte \d+$"):
            reference.gap_decode(block[:end], 8, 2, *table)


MALFORMED_TABLES = {
    "no entry": ([], [], -1),
    "not sorted by symbol": ([2, 1], [1, 1], -1),
    "not sorted by length": ([1, 2, 3], [2, 2, 1], -1),
    "symbol twice": ([1, 1], [1, 1], -1),
    "symbol too large": ([1, 256], [1, 1], -1),
    "incomplete": ([1, 2, 3], [2, 2, 2], -1),
    "overfull": ([1, 2, 3], [1, 1, 1], -1),
    "incomplete with escape": ([1], [1], 2),
    "code of 13 bits": (list(range(14)), [*range(1, 14), 13], -1),
    "escape of 13 bits": (list(range(13)), [*range(1, 14)], 13),
    "code of 0 bits beside another": ([1, 2], [0, 1], -1),
    "escape of 0 bits beside another": ([1], [1], 0),
    "single entry with a code": ([1], [1], -1),
    "only an escape with a code": ([], [], 1),
    "sizes differ": ([1, 2], [1], -1),
}


@given(changes())
def test_a_draft_is_made_from_ranks(change: tuple[Spec, Elements, Elements]) -> None:
    """Of each change, the members of its class before it, counted one by one."""
    spec, base, target = change
    exponents = [int(bits) >> spec.exponent_shift & (1 << spec.exponent_bits) - 1 for bits in base]
    top = next(t for t in range(1 << spec.exponent_bits) if 256 * sum(x > t for x in exponents) <= base.size)
    classes = [min(max(top - x, 0), 15) for x in exponents]
    positions = np.flatnonzero(base != target)
    ranks = np.array([classes[:at].count(classes[at]) for at in positions], np.uint32)
    members = np.bincount(classes, minlength=16 if spec.exponent_bits else 1).astype(np.uint32)
    exponent = spec.exponent_bits, spec.exponent_shift
    known = reference.Ranking(top, members, ranks)
    stream, counts, magnitudes = reference.draft(known, base[positions], target[positions], exponent)
    expected = draft_of(reference, base, target, exponent)
    assert (stream, counts.tolist(), magnitudes.tolist()) == (expected[0], expected[1].tolist(), expected[2].tolist())


def test_a_draft_is_not_made_from_other_ranks() -> None:
    elements = np.arange(2, dtype=np.uint16)
    for members, ranks, message in (
        ([2] * 16, [0, 2], "no such member of its class: at element 1"),
        ([2] * 16, [1, 1], "ranks not ascending in a class: at element 1"),
        ([2], [0, 1], "no members of 16 classes"),
        ([2] * 16, [0], "sizes differ"),
    ):
        known = reference.Ranking(0, np.array(members, np.uint32), np.array(ranks, np.uint32))
        with pytest.raises(ValueError, match=message):
            reference.draft(known, elements, elements + np.uint16(1), (8, 7))


@pytest.mark.parametrize("rule", MALFORMED_TABLES)
def test_gap_refuses_the_table(rule: str) -> None:
    symbols, lengths, escape = MALFORMED_TABLES[rule]
    table = (np.array(symbols, np.uint64), np.array(lengths, np.uint8), escape)
    with pytest.raises(ValueError, match="malformed table"):
        reference.gap_decode(GAP, 8, 1, *table)
    with pytest.raises(ValueError, match="malformed table"):
        reference.gap_encode(8, np.ones(1, np.uint32), np.ones(1, np.uint8), *table)


def test_a_table_of_more_than_2048_symbols_is_refused() -> None:
    table = (np.arange(4096, dtype=np.uint64), np.full(4096, 12, np.uint8), -1)
    with pytest.raises(ValueError, match="malformed table"):
        reference.gap_encode(8, np.ones(1, np.uint32), np.ones(1, np.uint16), *table)


def test_a_symbol_in_the_table_is_below_2_to_32() -> None:
    one = np.ones(1, np.uint32)
    table = (np.array([2**32], np.uint64), np.array([1], np.uint8), 1)
    with pytest.raises(ValueError, match=r"at element 0$"):
        reference.gap_encode(8, one, np.array([1], np.uint64), *table)
    block = reference.gap_encode(8, one, np.array([2**64 - 1], np.uint64), *TABLE)
    assert reference.gap_decode(block, 8, 8, *TABLE)[1].tolist() == [2**64 - 1]


def test_a_symbol_without_a_code_is_refused() -> None:
    table = (np.array([7, 9], np.uint64), np.array([1, 1], np.uint8), -1)
    with pytest.raises(ValueError, match=r"symbol without a code: at element 1$"):
        reference.gap_encode(8, np.array([1, 2], np.uint32), np.array([9, 8], np.uint16), *table)


@given(changes(), st.data())
def test_gap_round_trip(change: tuple[Spec, Elements, Elements], data: st.DataObject) -> None:
    spec, base, target = change
    positions = reference.scan(base, target)
    masks = base[positions] ^ target[positions]
    known = sorted({mask for mask in masks.tolist() if mask < 2**32})
    chosen = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=12)) if known else []
    table = (np.array(chosen, np.uint64), np.arange(1, len(chosen) + 1, dtype=np.uint8), len(chosen))
    block = reference.gap_encode(base.size, positions, masks, *table)
    decoded, symbols = reference.gap_decode(block, base.size, spec.width, *table)
    assert (decoded == positions).all() and symbols.tobytes() == masks.tobytes()


def result_of(decode: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any] | str:
    """Return what decode gives, or the message with which it refuses."""
    try:
        return decode()
    except ValueError as error:
        return str(error)


@given(st.binary(max_size=60), specs(), st.integers(0, 200))
def test_any_bytes_decode_or_are_refused(block: bytes, spec: Spec, n: int) -> None:
    base = np.zeros(n, spec.dtype)
    decoders: list[Callable[[], tuple[Any, Any]]] = [
        lambda: decode(reference, block, base, (spec.exponent_bits, spec.exponent_shift), STATES),
        lambda: reference.gap_decode(block, n, spec.width, *TABLE),
    ]
    for decoder in decoders:
        decoded = result_of(decoder)
        if isinstance(decoded, str):
            assert "at byte" in decoded
        else:
            positions, values = decoded
            assert 0 < positions.size == values.size == len(set(positions.tolist())) <= n
            assert positions.max() < n


@pytest.mark.parametrize("count", [2**20, 2**40, 2**64 - 1])
def test_no_memory_for_a_count_that_is_only_claimed(count: int) -> None:
    block = stream("0" + gamma(count)) + bytes(1 << 24)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more changes"):
            reference.gap_decode(block, 1000, 2, *TABLE)
        with pytest.raises(ValueError, match="more changes"):
            decode(reference, block, np.zeros(1000, np.uint16), (0, 0), STATES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    eight, positions = np.zeros(8, np.uint16), np.zeros(1, np.uint32)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("one width", lambda: reference.scan(eight, eight.astype(np.uint32))),
        ("sizes differ", lambda: reference.scan(eight, eight[:7])),
        ("one width", lambda: reference.scan(eight.reshape(2, 4), eight.reshape(2, 4))),
        ("not positions", lambda: reference.patch(eight, positions.view(np.int32), eight[:1])),
        ("sizes differ", lambda: reference.patch(eight, positions, eight)),
        ("not a contiguous", lambda: reference.digest(eight[::2])),
        ("no element width", lambda: reference.gap_decode(GAP, 8, 3, *TABLE)),
        ("no starting states", lambda: reference.magnitude_encode(positions + np.uint32(1), ONE, STATES[0])),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_describe_names_the_set() -> None:
    assert describe().startswith(("native (", "reference (no compiled kernels: "))
