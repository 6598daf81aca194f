"""native: at every level this processor has, it equals the reference bit for bit and refuses what that refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dcr_kernels import reference
from kernel_cases import (
    BLOCK_BYTES,
    RATES,
    SIZES,
    SPECS,
    Elements,
    Spec,
    decode,
    draft as draft_of,
    pair,
    ranking,
    unaligned,
    weights,
)

try:
    import dcr_kernels.native as native
    from dcr_kernels.native import level as chosen_level, levels, set_level
except ImportError as error:
    LEVELS: list[Any] = [pytest.param(None, marks=pytest.mark.skip(reason=f"no compiled kernels: {error}"), id="none")]
else:
    LEVELS = levels()

pytestmark = pytest.mark.filterwarnings("error")
every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)

Table = tuple[np.ndarray[Any, np.dtype[np.uint64]], np.ndarray[Any, np.dtype[np.uint8]], int]

NO_SYMBOLS = np.zeros(0, np.uint64)
NO_LENGTHS = np.zeros(0, np.uint8)
ONLY_ESCAPE: Table = (NO_SYMBOLS, NO_LENGTHS, 0)


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with the kernels of one level, and put back the one that was chosen."""
    chosen = chosen_level()
    set_level(request.param)
    assert chosen_level() == request.param
    yield request.param
    set_level(chosen)


def states(seed: int) -> Any:
    """Return the starting states that a payload's head can give, some of them extreme."""
    rng = np.random.default_rng(seed)
    return (256 * rng.integers(0, 256, (16, 32)) + 128).astype(np.uint16)


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a kernel gives in a form that compares bit for bit, or "refused"."""
    try:
        return exact(call())
    except ValueError:
        return "refused"


def exact(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(exact(part) for part in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    assert value is None or type(value) in (bytes, int)
    return value


def kind(spec: Spec) -> tuple[int, int]:
    return spec.exponent_bits, spec.exponent_shift


def table_of(symbols: Elements, entries: int) -> Table:
    """Return a complete code for the smallest of the values that occur, up to `entries`, and for an escape."""
    known = np.unique(symbols).astype(np.uint64)
    known = known[known < 2**32][:entries]
    return known, np.arange(1, len(known) + 1, dtype=np.uint8), len(known)


@lru_cache(maxsize=2)
def expected(spec: Spec, n: int, rate: float) -> dict[str, Any]:
    """Return everything the reference makes of one pair; kept while the levels are compared with it."""
    base, target = pair(spec, n, rate)
    positions = reference.scan(base, target)
    result: dict[str, Any] = {
        "base": base,
        "target": target,
        "positions": positions,
        "digest": reference.digest(target),
    }
    if positions.size:
        start = states(n)
        draft, counts, magnitudes = draft_of(reference, base, target, kind(spec))
        masks = base[positions] ^ target[positions]
        tables = [table_of(masks, 12), ONLY_ESCAPE]
        section = reference.magnitude_encode(counts, magnitudes, start)
        result |= {
            "states": start,
            "draft": (draft, counts, magnitudes),
            "ranking": ranking(base, positions, spec),
            "bins": reference.magnitude_bins(counts, magnitudes),
            "section": section,
            "context": decode(reference, draft + section, base, kind(spec), start),
            "changes": reference.digest_changes(positions, base[positions], target[positions], 0),
            "masks": masks,
            "tables": tables,
            "gap": [reference.gap_encode(n, positions, masks, *table) for table in tables],
            "bits": reference.position_bits(n, positions),
        }
    return result


def check(spec: Spec, n: int, rate: float) -> None:
    """Compare every function on one pair, whose arrays lie at odd addresses every other time."""
    want = expected(spec, n, rate)
    place = unaligned if n % 2 else np.copy
    base, target = place(want["base"]), place(want["target"])
    positions = native.scan(base, target)
    assert exact(positions) == exact(want["positions"])
    assert exact(native.digest(target)) == exact(want["digest"])
    if not positions.size:
        return
    start = want["states"]
    draft, counts, magnitudes = draft_of(native, base, target, kind(spec))
    assert exact((draft, counts, magnitudes)) == exact(want["draft"])
    top, members, ranks = want["ranking"]
    known = reference.Ranking(top, place(members), place(ranks))
    drafted = native.draft(known, place(base[positions]), place(target[positions]), kind(spec))
    assert exact(tuple(drafted)) == exact(want["draft"])
    assert exact(native.magnitude_bins(counts, magnitudes)) == exact(want["bins"])
    assert native.magnitude_encode(counts, magnitudes, start) == want["section"]
    decoded = decode(native, draft + want["section"], base, kind(spec), start)
    assert exact(decoded) == exact(want["context"])
    out = place(want["base"])
    native.patch(out, *decoded)
    assert out.tobytes() == target.tobytes()
    assert exact(native.gather(place(base), place(positions))) == exact(base[positions])
    changes = native.digest_changes(place(positions), place(base[positions]), place(target[positions]), 0)
    assert exact(changes) == exact(want["changes"])
    assert exact(native.position_bits(n, positions)) == exact(want["bits"])
    for table, block in zip(want["tables"], want["gap"], strict=True):
        assert native.gap_encode(n, place(positions), place(want["masks"]), *table) == block
        gaps = native.gap_decode(block, n, spec.width, *table)
        assert exact(gaps) == exact((want["positions"], want["masks"]))
        out = place(want["base"])
        native.patch_xor(out, *gaps)
        assert out.tobytes() == target.tobytes()


@every_level
@pytest.mark.parametrize("rate", RATES)
@every_spec
def test_small_blocks(spec: Spec, rate: float, level: str) -> None:
    for n in (0, *SIZES):
        check(spec, n, rate)


@every_level
@pytest.mark.parametrize("rate", [1e-4, 0.01])
@every_spec
def test_whole_blocks(spec: Spec, rate: float, level: str) -> None:
    check(spec, BLOCK_BYTES // spec.width, rate)


@every_level
@pytest.mark.parametrize("rate", [0.5, 1.0])
@pytest.mark.parametrize("spec", [Spec(1, 4, 3), Spec(2, 8, 7), Spec(8, 11, 52)], ids=str)
def test_blocks_one_short_with_many_changes(spec: Spec, rate: float, level: str) -> None:
    """The last vector of the block is not full."""
    check(spec, BLOCK_BYTES // spec.width - 1, rate)


@every_level
def test_digests_of_many_tensors_at_once(level: str) -> None:
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 40_000).astype(np.uint8)
    begins = rng.integers(0, 40_000, 300).astype(np.uint64)
    ends = np.minimum(begins + rng.integers(0, 20_000, 300).astype(np.uint64), np.uint64(40_000))
    assert exact(native.digest_spans(data, begins, ends)) == exact(reference.digest_spans(data, begins, ends))
    for begin, end in ((5, 4), (0, 40_001), (2**64 - 1, 2**64 - 1)):
        spans = np.array([0, begin], np.uint64), np.array([1, end], np.uint64)
        for kernels in (native, reference):
            with pytest.raises(ValueError, match="at element 1"):
                kernels.digest_spans(data, *spans)


@every_level
def test_digest_at_any_offset(level: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 70_001).astype(np.uint8)
    for size in (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 4095, 8191, 8192, 8193, 16384, 16385, 70_000):
        for offset in (0, 1, 2, 63, 8190, 8191, 8192, 8193, 12_345_679, 2**40 + 1, 2**62 - 1, 2**62):
            for shift in (0, 1):
                part = data[shift : shift + size]
                assert exact(native.digest(part, offset)) == exact(reference.digest(part, offset)), (
                    size,
                    offset,
                    shift,
                )


@every_level
def test_digest_of_extreme_units(level: str) -> None:
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        for data in (bytes([byte]) * 300_001, bytes([0xFF, byte]) * 150_000, bytes([0x00, byte]) * 150_000):
            for offset in (0, 1):
                assert exact(native.digest(data, offset)) == exact(reference.digest(data, offset))


@every_level
def test_digest_reads_any_buffer(level: str) -> None:
    array = np.random.default_rng(0).standard_normal(1000)
    want = exact(reference.digest(array, 3))
    for data in (array, array.tobytes(), array.data, bytearray(array), array.view(np.uint16), unaligned(array)):
        assert exact(native.digest(data, 3)) == want
    assert exact(native.digest(np.zeros(0, np.uint32), 1)) == exact(reference.digest(b"", 1))


@every_level
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_digest_changes_at_any_offset(width: int, level: str) -> None:
    rng = np.random.default_rng(width)
    for size in (0, 1, 7, 8, 9, 100, 5000):
        positions = rng.permutation(np.unique(rng.integers(0, 2**32, size, dtype=np.uint32)))
        old, new = (rng.integers(0, 2**64, positions.size, dtype=np.uint64).astype(f"<u{width}") for _ in range(2))
        for offset in (0, 1, 2, 3, 8191, 524288, 2**40 + 5, 2**62 - 1, 2**62):
            want = reference.digest_changes(positions, old, new, offset)
            assert exact(native.digest_changes(positions, old, new, offset)) == exact(want), (size, offset)
            moved = native.digest_changes(unaligned(positions), unaligned(old), unaligned(new), offset)
            assert exact(moved) == exact(want), (size, offset)


@every_level
@pytest.mark.parametrize("offset", [-1, 2**62 + 1, 2**70])
def test_offsets_outside_are_refused(offset: int, level: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        native.digest(b"", offset)


@every_level
@every_spec
def test_patches_write_nothing_else(spec: Spec, level: str) -> None:
    rng = np.random.default_rng(0)
    for n in SIZES:
        room = np.full(n * spec.width + 256, 0xA5, np.uint8)
        out = room[127 : 127 + n * spec.width].view(spec.dtype)
        count = int(rng.integers(0, n + 1))
        positions = rng.permutation(n)[:count].astype(np.uint32)
        values = weights(spec, count, rng)
        for name in ("patch", "patch_xor"):
            want = out.copy()
            getattr(reference, name)(want, positions, values)
            getattr(native, name)(out, positions, values)
            assert out.tobytes() == want.tobytes()
            assert (room[:127] == 0xA5).all()
            assert (room[127 + n * spec.width :] == 0xA5).all()


@every_level
@pytest.mark.parametrize("name", ["patch", "patch_xor"])
@every_spec
def test_patches_outside_change_nothing(spec: Spec, name: str, level: str) -> None:
    for n in (0, 1, 64, 1000):
        for wrong in (n, n + 1, 2**31, 2**32 - 1):
            out = np.zeros(n, spec.dtype)
            positions = np.append(np.arange(n, dtype=np.uint32), np.uint32(wrong)).astype(np.uint32)
            with pytest.raises(ValueError, match=rf"at element {n}$"):
                getattr(native, name)(out, positions, np.ones(n + 1, spec.dtype))
            assert not out.any()
    frozen = np.zeros(4, spec.dtype)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, TypeError, BufferError)):
        getattr(native, name)(frozen, np.zeros(1, np.uint32), np.ones(1, spec.dtype))
    assert not frozen.any()


@every_level
def test_scan_finds_a_difference_in_every_bit(level: str) -> None:
    for width in (1, 2, 4, 8):
        base = np.zeros(200, f"<u{width}")
        for bit in range(8 * width):
            target = base.copy()
            target[bit::67] = 1 << bit
            assert native.scan(base, target).tolist() == list(range(bit, 200, 67))


@every_level
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes(width: int, level: str) -> None:
    for n in (0, *SIZES):
        block = np.random.default_rng(n).bytes(n * width)
        planes = native.whole_split(block, width)
        assert exact(planes) == exact(reference.whole_split(block, width))
        assert native.whole_join(planes, width) == block


@every_level
def test_every_class_and_top(level: str) -> None:
    rng = np.random.default_rng(0)
    start = states(0)
    for spec in SPECS:
        if not spec.exponent_bits:
            continue
        ones = (1 << spec.exponent_bits) - 1
        for top in sorted({0, 1, 14, 15, 16, ones // 2, ones - 1, ones} & set(range(ones + 1))):
            for above in (0, 3, 4):
                n = 1000
                exponents = np.clip(top - rng.integers(0, 20, n), 0, ones).astype(np.uint64)
                exponents[:4] = top
                exponents[4 : 4 + above] = ones
                base = (exponents << np.uint64(spec.exponent_shift)).astype(spec.dtype)
                base |= rng.integers(0, 1 << spec.exponent_shift, n).astype(spec.dtype)
                target = (base ^ (rng.random(n) < 0.2)).astype(spec.dtype)
                want = draft_of(reference, base, target, kind(spec))
                assert exact(draft_of(native, base, target, kind(spec))) == exact(want)
                block = want[0] + reference.magnitude_encode(*want[1:], start)
                decoded = decode(reference, block, base, kind(spec), start)
                assert exact(decode(native, block, base, kind(spec), start)) == exact(decoded)


@every_level
def test_a_draft_is_not_made_from_other_ranks(level: str) -> None:
    """Whatever is wrong with them: both sets of kernels say the same."""
    elements = np.arange(3, dtype=np.uint16)
    sixteen = [3] * 16
    for top, members, ranks, message in (
        (0, sixteen, [0, 3, 1], "no such member of its class: at element 1"),
        (0, sixteen, [0, 2, 2], "ranks not ascending in a class: at element 2"),
        (0, [3], [0, 1, 2], "no members of 16 classes"),
        (0, sixteen, [0, 1], "sizes differ"),
        (256, sixteen, [0, 1, 2], None),
        (-1, sixteen, [0, 1, 2], None),
    ):
        known = reference.Ranking(top, np.array(members, np.uint32), np.array(ranks, np.uint32))
        for kernels in (native, reference):
            with pytest.raises(ValueError, match=message):
                kernels.draft(known, elements, elements + np.uint16(1), (8, 7))
    many = reference.Ranking(0, np.full(16, 2**32 - 1, np.uint32), np.array([0, 1, 2], np.uint32))
    with pytest.raises(ValueError, match="members of all classes"):
        native.draft(many, elements, elements + np.uint16(1), (8, 7))


@every_level
def test_every_rate_of_change(level: str) -> None:
    """The gap's parameter changes with the rate, and the coded set at one half."""
    n = 4500
    base = np.zeros(n, np.uint8)
    for count in [*range(1, 40), *range(40, n, 97), 2249, 2250, 2251, n - 2, n - 1, n]:
        positions = np.sort(np.random.default_rng(count).permutation(n)[:count]).astype(np.uint32)
        target = base.copy()
        target[positions] = 1
        assert exact(draft_of(native, base, target, (0, 0))) == exact(draft_of(reference, base, target, (0, 0)))
        block = reference.gap_encode(n, positions, target[positions], *ONLY_ESCAPE)
        assert native.gap_encode(n, positions, target[positions], *ONLY_ESCAPE) == block
        assert exact(native.gap_decode(block, n, 1, *ONLY_ESCAPE)) == exact((positions, target[positions]))
        assert native.position_bits(n, positions) == reference.position_bits(n, positions)


@every_level
def test_long_gaps(level: str) -> None:
    """One change at the far end of a block, or bunched so that a gap is coded with a parameter far too small."""
    n = BLOCK_BYTES
    for positions in ([n - 1], [0], [0, n - 1], [*range(5000), n - 1], [*range(n - 5000, n)], [*range(1, n)]):
        array = np.array(positions, np.uint32)
        symbols = np.ones(array.size, np.uint8)
        table = (np.ones(1, np.uint64), np.zeros(1, np.uint8), -1)
        block = reference.gap_encode(n, array, symbols, *table)
        assert native.gap_encode(n, array, symbols, *table) == block
        assert exact(native.gap_decode(block, n, 1, *table)) == exact((array, symbols))


@every_level
def test_sizes_beyond_a_block(level: str) -> None:
    """The number of elements is the caller's, up to 2^32; here one whose position code needs long fields."""
    n = 2**32 - 1
    array = np.array([0, 5, 2**31, n - 1], np.uint32)
    symbols = np.array([1, 2, 3, 4], np.uint64)
    block = reference.gap_encode(n, array, symbols, *ONLY_ESCAPE)
    assert native.gap_encode(n, array, symbols, *ONLY_ESCAPE) == block
    assert native.position_bits(n, array) == reference.position_bits(n, array)


@every_level
@every_spec
def test_tables(spec: Spec, level: str) -> None:
    """Codes of every length, with and without an escape, and the three tables with a single entry or none."""
    rng = np.random.default_rng(spec.width)
    n = 3000
    positions = np.sort(rng.permutation(n)[:1500]).astype(np.uint32)
    most = 256 if spec.width == 1 else 2048
    few = np.arange(12, dtype=np.uint64)
    tables: list[Table] = [
        ONLY_ESCAPE,
        (np.array([7], np.uint64), np.zeros(1, np.uint8), -1),
        (np.arange(most, dtype=np.uint64), np.full(most, most.bit_length() - 1, np.uint8), -1),
        (np.arange(most // 2, dtype=np.uint64), np.full(most // 2, most.bit_length() - 1, np.uint8), 1),
        (few, np.arange(1, 13, dtype=np.uint8), 12),
        (few[:4], np.array([2, 2, 3, 3], np.uint8), 2),
        (few[:1], np.array([1], np.uint8), 1),
    ]
    for table in tables:
        if table[2] == -1:
            symbols = rng.choice(table[0], positions.size).astype(spec.dtype)
        else:
            symbols = np.concatenate([weights(spec, 750, rng), rng.integers(0, 14, 750).astype(spec.dtype)])
        block = reference.gap_encode(n, positions, symbols, *table)
        assert native.gap_encode(n, positions, symbols, *table) == block
        assert exact(native.gap_decode(block, n, spec.width, *table)) == exact((positions, symbols))


BAD_TABLES: dict[str, tuple[list[int], list[int], int]] = {
    "no entry": ([], [], -1),
    "not sorted by symbol": ([2, 1], [1, 1], -1),
    "not sorted by length": ([1, 2, 3], [2, 2, 1], -1),
    "symbol twice": ([1, 1], [1, 1], -1),
    "symbol too large": ([1, 256], [1, 1], -1),
    "incomplete": ([1, 2, 3], [2, 2, 2], -1),
    "overfull": ([1, 2, 3], [1, 1, 1], -1),
    "incomplete with escape": ([1], [1], 2),
    "code of 13 bits": (list(range(14)), [*range(1, 14), 13], -1),
    "code of 64 bits": (list(range(3)), [1, 64, 64], -1),
    "code of 255 bits": (list(range(3)), [1, 255, 255], -1),
    "escape of 13 bits": (list(range(13)), [*range(1, 14)], 13),
    "escape of -2 bits": ([1], [1], -2),
    "escape of 2^31 bits": ([1], [1], 2**31 - 1),
    "code of 0 bits beside another": ([1, 2], [0, 1], -1),
    "escape of 0 bits beside another": ([1], [1], 0),
    "single entry with a code": ([1], [1], -1),
    "only an escape with a code": ([], [], 1),
    "sizes differ": ([1, 2], [1], -1),
    "too many": (list(range(4096)), [12] * 4096, -1),
}


@every_level
@pytest.mark.parametrize("rule", BAD_TABLES)
def test_bad_tables_are_refused(rule: str, level: str) -> None:
    symbols, lengths, escape = BAD_TABLES[rule]
    table = (np.array(symbols, np.uint64), np.array(lengths, np.uint8), escape)
    width = 2 if rule == "too many" else 1
    two = np.array([2], np.uint32)
    block = reference.gap_encode(8, two, np.array([1], np.uint8), *ONLY_ESCAPE)
    for module in (reference, native):
        assert outcome(lambda: module.gap_decode(block, 8, width, *table)) == "refused"  # noqa: B023
        assert outcome(lambda: module.gap_encode(8, two, np.ones(1, f"<u{width}"), *table)) == "refused"  # noqa: B023


def damaged(block: bytes, rng: np.random.Generator) -> bytes:
    """Return a block with bits flipped, bytes replaced, cut off, or added."""
    data = bytearray(block)
    what = int(rng.integers(6))
    if what <= 1:
        for _ in range(1 if what else int(rng.integers(1, 6))):
            bit = int(rng.integers(8 * len(data)))
            data[bit // 8] ^= 1 << bit % 8
    elif what == 2:
        data = data[: int(rng.integers(len(data) + 1))]
    elif what == 3:
        data += rng.bytes(int(rng.integers(1, 12)))
    elif what == 4:
        at = int(rng.integers(len(data)))
        data[at : at + 12] = bytes([int(rng.choice([0, 1, 128, 255]))] * int(rng.integers(1, 40)))
    else:
        data = bytearray(rng.bytes(int(rng.integers(60))))
        if data and rng.random() < 0.9:
            data[0] &= 0xFE
    return bytes(data)


@lru_cache(maxsize=2)
def damaged_blocks(spec: Spec, n: int, rate: float) -> list[tuple[bytes, Any, bytes, Any, Table]]:
    """Return damaged context and gap blocks with what the reference makes of each."""
    rng = np.random.default_rng([n, spec.width, spec.exponent_bits])
    want = expected(spec, n, rate)
    context = want["draft"][0] + want["section"]
    result = []
    for index in range(150):
        table, gap = want["tables"][index % 2], want["gap"][index % 2]
        first, second = damaged(context, rng), damaged(gap, rng)
        result.append(
            (
                first,
                outcome(lambda: decode(reference, first, want["base"], kind(spec), want["states"])),  # noqa: B023
                second,
                outcome(lambda: reference.gap_decode(second, n, spec.width, *table)),  # noqa: B023
                table,
            )
        )
    return result


@every_level
@pytest.mark.parametrize(("n", "rate"), [(1, 1.0), (9, 0.5), (70, 0.3), (300, 0.01), (200, 0.97)])
@every_spec
def test_damaged_blocks(spec: Spec, n: int, rate: float, level: str) -> None:
    want = expected(spec, n, rate)
    for context, context_want, gap, gap_want, table in damaged_blocks(spec, n, rate):
        for block in (context, unaligned(np.frombuffer(context, np.uint8))):
            got = outcome(lambda: decode(native, block, want["base"], kind(spec), want["states"]))  # noqa: B023
            assert got == context_want, (context.hex(), got)
        for block in (gap, unaligned(np.frombuffer(gap, np.uint8))):
            got = outcome(lambda: native.gap_decode(block, n, spec.width, *table))  # noqa: B023
            assert got == gap_want, (gap.hex(), got)


@every_level
@every_spec
def test_another_base(spec: Spec, level: str) -> None:
    """A block on a base it was not made for is refused or decoded alike, inside the base."""
    want = expected(spec, 1000, 0.3)
    block = want["draft"][0] + want["section"]
    for seed in range(20):
        n = (1000, 999, 1001, 64)[seed % 4]
        base = weights(spec, n, np.random.default_rng(seed))
        arguments = (block, base, kind(spec), want["states"])
        assert outcome(lambda: decode(native, *arguments)) == outcome(  # noqa: B023
            lambda: decode(reference, *arguments)  # noqa: B023
        )


@every_level
@pytest.mark.parametrize("offset", [0, 8192, 3 * 8192 + 2, 2**40 + 64, 1, 8191])
@pytest.mark.parametrize(
    ("n", "rate"), [(1, 1.0), (1000, 0.3), (16384, 0.01), (16385, 0.03), (70001, 0.0), (70001, 0.001)]
)
@every_spec
def test_both_sides_at_once(spec: Spec, n: int, rate: float, offset: int, level: str) -> None:
    """Comparing and decoding do in one pass what the single functions do, wherever a block lies in its tensor."""
    base, target = pair(spec, n, rate, 7)
    for exponent in (None, kind(spec)):
        found, want = native.compare(base, target, offset, exponent), reference.compare(base, target, offset, exponent)
        assert exact(tuple(found[:5])) == exact(tuple(want[:5]))
        assert (found.draft is None) == (want.draft is None) == (exponent is None or not len(want.positions))
        if want.draft is not None:
            assert found.draft is not None and exact(tuple(found.draft)) == exact(tuple(want.draft))
    if want.draft is None:
        return
    assert exact(found.digest + found.growth) == exact(reference.digest(target, offset))
    start = states(n)
    block = want.draft.stream + reference.magnitude_encode(want.draft.class_counts, want.draft.magnitudes, start)
    for place in (np.copy, unaligned):
        source = place(base)
        other = place(np.full_like(base, 0x55))
        for out in (None, other, source):
            got = native.context_decode(block, source, offset, kind(spec), start, out)
            assert exact(tuple(got)) == exact(tuple(reference.context_decode(block, base, offset, kind(spec), start)))
            assert source.tobytes() == (target if out is source else base).tobytes()
        assert other.tobytes() == target.tobytes()


@every_level
def test_changes_that_begin_late(level: str) -> None:
    """Classes are counted only from the first change on; those of the groups before it count too."""
    spec = SPECS[5]
    for first in (0, 16383, 16384, 100000, 2**18 - 1):
        base = weights(spec, 2**18, np.random.default_rng(first))
        target = base.copy()
        target[first] += np.uint16(3)
        assert exact(draft_of(native, base, target, kind(spec))) == exact(draft_of(reference, base, target, kind(spec)))


@every_level
def test_a_refused_block_changes_nothing_in_place(level: str) -> None:
    spec = SPECS[5]
    base, target = pair(spec, 5000, 0.1)
    stream, counts, magnitudes = draft_of(reference, base, target, kind(spec))
    start = states(1)
    block = stream + reference.magnitude_encode(counts, magnitudes, start)
    for bad in (b"", block[: len(stream) // 2], block + b"\0", block + b"\1" * 8):
        place = base.copy()
        with pytest.raises(ValueError, match=r"at byte \d+$"):
            native.context_decode(bad, place, 0, kind(spec), start, place)
        assert place.tobytes() == base.tobytes()


@every_level
def test_arrays_that_overlap_are_refused(level: str) -> None:
    """But for a block that is decoded into itself."""
    spec = SPECS[5]
    base, target = pair(spec, 1000, 0.1)
    stream, counts, magnitudes = draft_of(reference, base, target, kind(spec))
    block = stream + reference.magnitude_encode(counts, magnitudes, states(1))
    room = np.zeros(1001, base.dtype)
    for shift in (0, 1):
        room[shift : shift + 1000] = base
        with pytest.raises(ValueError, match="overlap"):
            native.context_decode(block, room[shift : shift + 1000], 0, kind(spec), states(1), room[1 - shift :][:1000])
    native.context_decode(block, room[1:], 0, kind(spec), states(1), room[1:])
    assert room[1:].tobytes() == target.tobytes()


@every_level
def test_refusals_say_where(level: str) -> None:
    base = np.zeros(64, np.uint16)
    start = states(1)
    for block in (b"", b"\x01", b"\x00", bytes(9), b"\x02", b"\xfe" * 40, b"\x04" + b"\xff" * 50):
        with pytest.raises(ValueError, match=r"at byte \d+$"):
            decode(native, block, base, (8, 7), start)
        with pytest.raises(ValueError, match=r"at byte \d+$"):
            native.gap_decode(block, 64, 2, *ONLY_ESCAPE)


@every_level
def test_wrong_arguments_are_refused(level: str) -> None:
    rng = np.random.default_rng(0)
    base = weights(SPECS[5], 64, rng)
    target = base ^ np.uint16(1)
    start = states(1)
    zero_state = start.copy()
    zero_state[15, 31] = 0
    ones = np.ones(2, np.uint16)
    two = np.array([2], np.uint32)
    stream, counts, magnitudes = draft_of(reference, base, target, (8, 7))
    block = stream + reference.magnitude_encode(counts, magnitudes, start)

    def positions(*values: int) -> Any:
        return np.array(values, np.uint32)

    def calls(module: Any) -> list[Callable[[], Any]]:
        return [
            lambda: module.scan(base, target[:63]),
            lambda: module.compare(base, target[:63], 0),
            lambda: module.compare(base, target.view(np.uint8), 0),
            lambda: module.compare(base, target, -1),
            lambda: module.compare(base, target, 0, (9, 8)),
            lambda: module.compare(base, target, 0, (-1, 0)),
            lambda: module.compare(base, target, 0, (8, -1)),
            lambda: module.compare(base, target, 0, (17, 0)),
            lambda: module.context_decode(b"\0", base, 0, (17, 0), start),
            lambda: module.context_decode(b"\0", base, 0, (8, 7), start[:15]),
            lambda: module.context_decode(b"\0", base, 0, (8, 7), zero_state),
            lambda: module.context_decode(block, base, -1, (8, 7), start),
            lambda: module.context_decode(block, base, 0, (8, 7), start, base[:63].copy()),
            lambda: module.context_decode(block, base, 0, (8, 7), start, base.view(np.uint8).copy()),
            lambda: module.magnitude_encode(two, ones, zero_state),
            lambda: module.magnitude_encode(two, ones[:1], start),
            lambda: module.magnitude_encode(positions(1, 1), ones, start),
            lambda: module.magnitude_encode(two, ones - np.uint16(1), start),
            lambda: module.magnitude_encode(two, ones + np.uint16(2**15), start),
            lambda: module.magnitude_bins(two, ones - np.uint16(1)),
            lambda: module.magnitude_bins(two, ones[:1]),
            lambda: module.magnitude_bins(two, ones + np.uint16(2**15)),
            lambda: module.position_bits(8, positions()),
            lambda: module.position_bits(8, positions(8)),
            lambda: module.position_bits(8, positions(3, 2)),
            lambda: module.gap_encode(8, positions(), ones[:0], *ONLY_ESCAPE),
            lambda: module.gap_encode(8, positions(8), ones[:1], *ONLY_ESCAPE),
            lambda: module.gap_encode(8, positions(3, 2), ones, *ONLY_ESCAPE),
            lambda: module.gap_encode(8, positions(3), ones, *ONLY_ESCAPE),
            lambda: module.gap_encode(
                8, positions(3), ones[:1], positions(2).astype(np.uint64), np.zeros(1, np.uint8), -1
            ),
            lambda: module.gap_decode(b"\x02", 8, 3, *ONLY_ESCAPE),
            lambda: module.whole_split(b"abc", 2),
            lambda: module.gather(ones, positions(len(ones))),
            lambda: module.digest_changes(positions(1), ones, ones, 0),
            lambda: module.digest_changes(positions(1), ones[:1], ones[:1], -1),
        ]

    accepted = [
        (name, index)
        for name, module in (("reference", reference), ("native", native))
        for index, call in enumerate(calls(module))
        if outcome(call) != "refused"
    ]
    assert not accepted


@every_level
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from(SPECS), st.integers(1, 200), st.integers(0, 2**32), st.data())
def test_any_bits(level: str, spec: Spec, n: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2**64, n, dtype=np.uint64).astype(spec.dtype)
    if data.draw(st.booleans()):
        base = weights(spec, n, rng)
    target = base ^ data.draw(hnp.arrays(spec.dtype, n, fill=st.just(0)))
    positions = reference.scan(base, target)
    assert exact(native.scan(base, target)) == exact(positions)
    if not positions.size:
        return
    start = np.clip(rng.integers(0, 65536, (16, 32)), 1, None).astype(np.uint16)
    want = draft_of(reference, base, target, kind(spec))
    assert exact(draft_of(native, base, target, kind(spec))) == exact(want)
    section = reference.magnitude_encode(*want[1:], start)
    assert native.magnitude_encode(*want[1:], start) == section
    decoded = decode(reference, want[0] + section, base, kind(spec), start)
    assert exact(decode(native, want[0] + section, base, kind(spec), start)) == exact(decoded)


@every_level
def test_carries(level: str) -> None:
    """Bits coded against their odds make the coder carry, through bytes of 255 as well."""
    start = np.full((16, 32), 65500, np.uint16)
    for seed in range(100):
        magnitudes = np.random.default_rng(seed).geometric(0.3, 200).astype(np.uint16)
        counts = np.array([200], np.uint32)
        assert native.magnitude_encode(counts, magnitudes, start) == reference.magnitude_encode(
            counts, magnitudes, start
        )


@every_level
def test_many_threads(level: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for spec in (SPECS[5], SPECS[7]):
            expected(spec, 4097, 0.3)
            list(pool.map(lambda _: check(spec, 4097, 0.3), range(16)))  # noqa: B023


def test_the_fastest_level_is_chosen() -> None:
    levels = [level for level in LEVELS if isinstance(level, str)]
    if not levels:
        pytest.skip("no compiled kernels")
    assert chosen_level() == levels[-1]
    with pytest.raises(ValueError, match="no such level"):
        set_level("no such level")
    assert chosen_level() == levels[-1]
