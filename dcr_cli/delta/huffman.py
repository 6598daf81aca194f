"""The Huffman table of a `gap` piece: built from counts, written, read and checked (FORMAT 5.7).

It does not code changes; the kernels do, with the table's entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_cli.delta.bits import BitReader, BitWriter

MAX_SYMBOLS = 2048
MAX_LENGTH = 12
SYMBOL_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class HuffmanTable:
    """Code lengths in canonical order, by (length, symbol).

    `escape_length` is -1 without an escape and 0 where the escape is the only entry; a single symbol has length 0.
    """

    symbols: NDArray[np.uint64]
    lengths: NDArray[np.uint8]
    escape_length: int


def build_table(counts: Mapping[int, int], width: int, *, complete: bool) -> HuffmanTable:
    """Make a good table for symbols of `width` bytes that were seen `counts` times.

    A symbol that is cheaper as an escape is left out. `complete` says that no other symbol will have to be coded, so
    that the escape may be left out too. The same counts give the same table on every machine.
    """
    total = sum(counts.values())
    kept = [
        (symbol, count)
        for symbol, count in counts.items()
        if 8 * width * count > 2 * (symbol + 1).bit_length() + count * (total // count).bit_length()
        and symbol < SYMBOL_LIMIT
    ]
    if len(kept) > MAX_SYMBOLS:
        kept = sorted(kept, key=lambda item: (-item[1], item[0]))[:MAX_SYMBOLS]
    weights: dict[int, int] = dict(sorted(kept))
    escaped = total - sum(weights.values())
    escape = -1
    if escaped or not complete or not kept:
        weights[escape] = max(escaped, 1)
    lengths = _code_lengths(weights)
    escape_length = lengths.pop(escape, -1)
    order = sorted(lengths, key=lambda symbol: (lengths[symbol], symbol))
    return HuffmanTable(
        symbols=np.array(order, np.uint64),
        lengths=np.array([lengths[symbol] for symbol in order], np.uint8),
        escape_length=escape_length,
    )


def table_bits(table: HuffmanTable, counts: Mapping[int, int], width: int) -> int:
    """Bits that coding `counts` with `table` takes, the table itself included."""
    lengths = dict(zip(table.symbols.tolist(), table.lengths.tolist(), strict=True))
    escaped_bits = table.escape_length + 8 * width
    coded: int = sum(count * lengths.get(symbol, escaped_bits) for symbol, count in counts.items())
    gammas = (len(lengths) + 1, *(count + 1 for count in _lengths_used(table)), *_steps(table))
    listed = 1 + 4 * (table.escape_length > 0) + sum(2 * value.bit_length() - 1 for value in gammas)
    return coded + (listed + 7) // 8 * 8


def write_table(table: HuffmanTable) -> bytes:
    """Encode `table`; `table_bits` counts the same fields."""
    bits = BitWriter()
    bits.gamma(len(table.symbols) + 1)
    bits.field(int(table.escape_length >= 0), 1)
    # An escape that is the only entry has length 0.
    if table.escape_length > 0:
        bits.field(table.escape_length, 4)
    for count in _lengths_used(table):
        bits.gamma(count + 1)
    for step in _steps(table):
        bits.gamma(step)
    return bits.to_bytes()


def _lengths_used(table: HuffmanTable) -> list[int]:
    """How many symbols have length 1, 2, ... up to the longest; nothing for a single entry."""
    used: list[int] = np.bincount(table.lengths).tolist()
    return used[1:]


def _steps(table: HuffmanTable) -> list[int]:
    """What each symbol is above the one before of its length; the first above -1."""
    steps = []
    previous, previous_length = -1, 0
    for symbol, length in zip(table.symbols.tolist(), table.lengths.tolist(), strict=True):
        if length != previous_length:
            previous, previous_length = -1, length
        steps.append(symbol - previous)
        previous = symbol
    return steps


def read_table(data: bytes | memoryview, width: int) -> tuple[HuffmanTable, int]:
    """Decode the table at the beginning of `data`: the table, and how many bytes it takes. ValueError if malformed."""
    bits = BitReader(data)
    count = bits.gamma() - 1
    if count > MAX_SYMBOLS:
        raise ValueError(f"table of {count} symbols, at most {MAX_SYMBOLS}")
    has_escape = bits.field(1)
    if not count and not has_escape:
        raise ValueError("table without an entry")
    escape_length = 0 if has_escape else -1
    per_length: list[tuple[int, int]] = [(0, count)]
    if count + has_escape > 1:
        if has_escape:
            escape_length = bits.field(4)
            if not 1 <= escape_length <= MAX_LENGTH:
                raise ValueError(f"escape of length {escape_length}, 1 to {MAX_LENGTH} are possible")
        per_length, left = [], count
        for length in range(1, MAX_LENGTH + 1):
            if not left:
                break
            here = bits.gamma() - 1
            if here > left:
                raise ValueError(f"table lists more than its {count} symbols")
            per_length.append((length, here))
            left -= here
        if left:
            raise ValueError(f"{left} of {count} symbols have no length")
        used = sum(here << MAX_LENGTH - length for length, here in per_length)
        used += (1 << MAX_LENGTH - escape_length) if has_escape else 0
        if used != 1 << MAX_LENGTH:
            raise ValueError("code lengths do not fill the code space")
    limit = min(SYMBOL_LIMIT, 1 << 8 * width)
    symbols: list[int] = []
    for _, here in per_length:
        previous = -1
        for _ in range(here):
            previous += bits.gamma()
            if previous >= limit:
                raise ValueError(f"symbol {previous}, less than {limit} is possible")
            symbols.append(previous)
    if len(set(symbols)) != count:
        raise ValueError("a symbol has two codes")
    lengths = [length for length, here in per_length for _ in range(here)]
    table = HuffmanTable(np.array(symbols, np.uint64), np.array(lengths, np.uint8), escape_length)
    return table, bits.align()


def _code_lengths(weights: Mapping[int, int]) -> dict[int, int]:
    """Huffman code lengths, at most MAX_LENGTH; a single entry has length 0."""
    if len(weights) == 1:
        return dict.fromkeys(weights, 0)
    current = dict(weights)
    while True:
        # Of equal weights the one that stands first goes first.
        order = sorted(current, key=current.__getitem__)
        lengths = _depths([current[symbol] for symbol in order])
        if max(lengths) <= MAX_LENGTH:
            return dict(zip(order, lengths, strict=True))
        # Flatter weights give shorter longest codes; with all weights equal, 2049 entries need 12 bits at most.
        current = {symbol: (weight + 1) // 2 for symbol, weight in current.items()}


def _depths(weights: Sequence[int]) -> list[int]:
    """How deep each of several ascending weights lies in their Huffman tree.

    Joined nodes come about in the order of their weights, so that the two lightest of all are always at the heads of
    two queues; of equal ones, a weight goes before a joined node.
    """
    count = len(weights)
    # Numbers of nodes: the weights, then the joined ones.
    parents = [0] * (2 * count - 1)
    joined: list[int] = []
    leaf = inner = 0
    for parent in range(count, 2 * count - 1):
        total = 0
        for _ in range(2):
            if leaf < count and (inner == len(joined) or weights[leaf] <= joined[inner]):
                total += weights[leaf]
                parents[leaf] = parent
                leaf += 1
            else:
                total += joined[inner]
                parents[count + inner] = parent
                inner += 1
        joined.append(total)
    depths = [0] * (2 * count - 1)
    for node in range(2 * count - 3, -1, -1):
        depths[node] = depths[parents[node]] + 1
    return depths[:count]
