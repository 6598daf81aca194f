"""Huffman tables: built for the shortest result, written and read back, refused when malformed."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.bits import BitWriter
from dcr_cli.delta.huffman import HuffmanTable, build_table, read_table, table_bits, write_table

WIDTHS = (1, 2, 4, 8)


@st.composite
def symbol_counts(draw: st.DrawFn) -> tuple[int, dict[int, int]]:
    width = draw(st.sampled_from(WIDTHS))
    symbols = st.integers(0, 2 ** (8 * width) - 1) | st.integers(0, 255)
    return width, draw(st.dictionaries(symbols, st.integers(1, 1 << 40), min_size=1, max_size=80))


def same(one: HuffmanTable, two: HuffmanTable) -> bool:
    return (
        np.array_equal(one.symbols, two.symbols)
        and np.array_equal(one.lengths, two.lengths)
        and one.escape_length == two.escape_length
    )


@given(symbol_counts(), st.booleans())
def test_a_table_is_read_as_it_was_written(case: tuple[int, dict[int, int]], complete: bool) -> None:
    width, counts = case
    table = build_table(counts, width, complete=complete)
    written = write_table(table)
    read, taken = read_table(written + b"\xff", width)
    assert taken == len(written)
    assert same(table, read)


@given(symbol_counts())
def test_every_counted_symbol_can_be_coded(case: tuple[int, dict[int, int]]) -> None:
    width, counts = case
    table = build_table(counts, width, complete=True)
    assert table.escape_length >= 0 or set(counts) <= set(table.symbols.tolist())
    assert build_table(counts, width, complete=False).escape_length >= 0


def test_skewed_counts_stay_within_twelve_bits() -> None:
    table = build_table({1 + i: 1 << (3 * i) for i in range(20)}, 2, complete=True)
    assert max(table.lengths.tolist()) <= 12


def by_a_heap(weights: Mapping[int, int]) -> dict[int, int]:
    """Huffman's own way: the two lightest are joined until one is left; of equal ones, those that came first."""
    heap = [(weight, order, [symbol]) for order, (symbol, weight) in enumerate(weights.items())]
    heapq.heapify(heap)
    lengths = dict.fromkeys(weights, 0)
    for order in range(len(heap), 2 * len(heap) - 1):
        one, two = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in one[2] + two[2]:
            lengths[symbol] += 1
        heapq.heappush(heap, (one[0] + two[0], order, one[2] + two[2]))
    return lengths


@given(st.dictionaries(st.integers(0, 255), st.integers(1, 12), min_size=2, max_size=60))
def test_code_lengths_are_those_of_huffmans_tree(counts: dict[int, int]) -> None:
    """Symbols of eight bytes, each of which is worth a place in the table."""
    table = build_table(counts, 8, complete=True)
    expected = by_a_heap(dict(sorted(counts.items())))
    assert dict(zip(table.symbols.tolist(), table.lengths.tolist(), strict=True)) == expected


@given(symbol_counts(), st.booleans())
def test_the_cost_of_a_table_is_what_it_takes(case: tuple[int, dict[int, int]], complete: bool) -> None:
    width, counts = case
    table = build_table(counts, width, complete=complete)
    lengths = dict(zip(table.symbols.tolist(), table.lengths.tolist(), strict=True))
    escaped = table.escape_length + 8 * width
    coded = sum(count * lengths.get(symbol, escaped) for symbol, count in counts.items())
    assert table_bits(table, counts, width) == coded + 8 * len(write_table(table))


def test_of_too_many_symbols_the_most_frequent_stay() -> None:
    counts = {symbol: 100 + symbol % 7 for symbol in range(2100)}
    table = build_table(counts, 4, complete=True)
    ordered = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    assert set(table.symbols.tolist()) == set(ordered[:2048]) and table.escape_length > 0


def test_xor_masks_of_a_small_tensor_take_a_few_bytes() -> None:
    table = build_table({1: 60, 3: 30, 7: 15, 15: 7, 31: 3, 63: 1}, 2, complete=True)
    assert len(write_table(table)) <= 10


def test_cost_counts_codes_escapes_and_the_table() -> None:
    counts = Counter({1: 4, 3: 2, 40000: 1})
    table = build_table(counts, 2, complete=True)
    lengths = dict(zip(table.symbols.tolist(), table.lengths.tolist(), strict=True))
    assert 40000 not in lengths
    expected = 4 * lengths[1] + 2 * lengths[3] + table.escape_length + 16 + 8 * len(write_table(table))
    assert table_bits(table, counts, 2) == expected


def write(*fields: tuple[str, int] | tuple[str, int, int]) -> bytes:
    bits = BitWriter()
    for kind, *arguments in fields:
        getattr(bits, kind)(*arguments)
    return bits.to_bytes()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "gamma"),
        (write(("gamma", 1), ("field", 0, 1)), "without an entry"),
        (write(("gamma", 2050), ("field", 0, 1)), "at most 2048"),
        (write(("gamma", 2), ("field", 1, 1), ("field", 0, 4)), "escape of length 0"),
        (write(("gamma", 2), ("field", 1, 1), ("field", 13, 4)), "escape of length 13"),
        (write(("gamma", 3), ("field", 0, 1), ("gamma", 4)), "more than its 2"),
        (write(("gamma", 3), ("field", 0, 1), ("gamma", 2), *[("gamma", 1)] * 11), "1 of 2 symbols have no length"),
        (write(("gamma", 3), ("field", 0, 1), ("gamma", 1), ("gamma", 3), ("gamma", 1), ("gamma", 1)), "code space"),
        (write(("gamma", 3), ("field", 0, 1), ("gamma", 3), ("gamma", 1), ("gamma", 256)), "symbol 256"),
        (write(("gamma", 2), ("field", 1, 1), ("field", 1, 4), ("gamma", 2), ("gamma", 1), ("field", 3, 2)), "padding"),
        (
            write(
                ("gamma", 4), ("field", 0, 1), ("gamma", 2), ("gamma", 3),
                ("gamma", 8), ("gamma", 8), ("gamma", 1),
            ),
            "two codes",
        ),
    ],
)  # fmt: skip
def test_a_malformed_table_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_table(data, 1)
