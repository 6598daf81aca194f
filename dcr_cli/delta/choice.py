"""What an encoder chooses: the encoding of a piece, its Huffman table, the starting states of a delta (FORMAT 5.8).

Integers only, so that every machine chooses the same. It codes nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import Dtype
from dcr_cli.delta.encoding import ContextDraft, Draft, Elements, Encoding, LoadBlock, changes_of
from dcr_cli.delta.huffman import HuffmanTable, build_table, table_bits
from dcr_cli.delta.payload import CLASSES, DEFAULT_STATE, STATES_PER_CLASS

SAMPLE_BLOCKS = 64
# Of so many, counting one after the other takes less time than sorting them.
FEW_SYMBOLS = 256
# What the ends of a block's bit stream and section take, about.
END_BITS = 16
# floor(256 * log2((256 + i) / 256)), from exact integer powers.
_LOG2_FRACTION: list[int] = [((256 + i) ** 256).bit_length() - 1 - 2048 for i in range(256)]

Sample = Sequence[tuple[Draft, LoadBlock]]


@dataclass(frozen=True, slots=True)
class Choice:
    """How the blocks of a piece are coded; `table` is there for `gap` alone."""

    encoding: Encoding
    table: HuffmanTable | None


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which encodings the caller admits for tensors that have a base."""

    whole: bool
    gap: bool
    context: bool


ALLOWED = {
    "auto": Allowed(whole=False, gap=True, context=True),
    "context": Allowed(whole=False, gap=False, context=True),
    "gap": Allowed(whole=False, gap=True, context=False),
    "whole": Allowed(whole=True, gap=False, context=False),
}


def choose(sample: Sample, dtype: Dtype, allowed: Allowed, *, complete: bool, alone: bool = False) -> Choice:
    """Choose for a piece whose first changed blocks are `sample`; `complete` says that these are all that changed, and
    `alone` that the piece is this one block."""
    coded_bits, choice = _choose_coded(sample, dtype, allowed, complete=complete)
    if alone and allowed.context and allowed.gap:
        # Plain planes are an upper bound of what `whole` takes: zstd, whose versions differ, decides nothing.
        whole_bits = 8 * (1 + sample[0][0].elements * dtype.width)
        if whole_bits <= coded_bits + END_BITS:
            return Choice(Encoding.WHOLE, None)
    return choice


def _choose_coded(sample: Sample, dtype: Dtype, allowed: Allowed, *, complete: bool) -> tuple[int, Choice]:
    """The smaller of `context` and `gap`, and the bits that it takes where there was a choice."""
    if allowed.whole:
        return 0, Choice(Encoding.WHOLE, None)
    if not allowed.gap:
        return 0, Choice(Encoding.CONTEXT, None)
    context_bits = _context_bits([draft.context for draft, _ in sample]) if allowed.context else None
    # Positions alone are a lower bound of what `gap` takes: mostly it is enough to see that `context` is smaller.
    if context_bits is not None and context_bits <= sum(draft.gap_position_bits for draft, _ in sample):
        return context_bits, Choice(Encoding.CONTEXT, None)
    best: tuple[int, Choice] | None = None
    for encoding in (Encoding.GAP_XOR, Encoding.GAP_OVERWRITE):
        counts = _symbol_counts(sample, encoding)
        table = build_table(counts, dtype.width, complete=complete)
        bits = table_bits(table, counts, dtype.width) + sum(draft.gap_position_bits for draft, _ in sample)
        if best is None or bits < best[0]:
            best = bits, Choice(encoding, table)
    assert best is not None
    if context_bits is not None and context_bits <= best[0]:
        return context_bits, Choice(Encoding.CONTEXT, None)
    return best


@dataclass(slots=True)
class StatesSample:
    """Collects what the first changed `context` blocks of one width coded."""

    blocks: int = 0
    bins: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((CLASSES, STATES_PER_CLASS, 2), np.uint64))

    def add(self, draft: Draft) -> None:
        """Count one block."""
        assert draft.context is not None
        self.blocks += 1
        self.bins += draft.context.count_bins()

    @property
    def is_full(self) -> bool:
        """Whether later blocks no longer count."""
        return self.blocks >= SAMPLE_BLOCKS

    def states(self) -> NDArray[np.uint16]:
        """Starting states [16, 32] in the steps that a payload's head can write; DEFAULT_STATE where nothing was seen.

        The states below the last one seen in a class are always given, since a head lists a class without holes.
        """
        zeros, ones = (self.bins[..., bit].astype(np.int64) for bit in (0, 1))
        seen = zeros + ones
        step = np.minimum(256 * (5 * zeros + 2) // (5 * seen + 4), 255)
        in_use = np.flip(np.maximum.accumulate(np.flip(seen, 1), 1), 1) > 0
        return np.where(in_use, 256 * step + 128, DEFAULT_STATE).astype(np.uint16)


def _symbol_counts(sample: Sample, encoding: Encoding) -> Counter[int]:
    counts: Counter[int] = Counter()
    for draft, load in sample:
        symbols: Elements = changes_of(draft, encoding, load)[1]
        if len(symbols) <= FEW_SYMBOLS:
            counts.update(symbols.tolist())
        else:
            values, seen = np.unique(symbols, return_counts=True)
            counts.update(dict(zip(values.tolist(), seen.tolist(), strict=True)))
    return counts


def _context_bits(drafts: Sequence[ContextDraft | None]) -> int:
    """Bits of context blocks: their streams, and the entropy of what their states code, plain bits included."""
    bins = np.zeros((CLASSES, STATES_PER_CLASS, 2), np.uint64)
    stream_bytes = 0
    for draft in drafts:
        assert draft is not None
        stream_bytes += len(draft.stream)
        bins += draft.count_bins()
    # Of most states nothing was coded.
    pairs = bins.reshape(-1, 2)
    seen: list[tuple[int, int]] = pairs[(pairs[:, 0] | pairs[:, 1]) > 0].tolist()
    entropy = sum(_log2_times(zeros + ones) - _log2_times(zeros) - _log2_times(ones) for zeros, ones in seen)
    return 8 * stream_bytes + entropy // 256 + sum(ones for _, ones in seen)


def _log2_times(x: int) -> int:
    """floor(256 * log2(x)) * x, 0 for 0, to eight bits of x."""
    bits = x.bit_length() - 1
    if bits < 0:
        return 0
    mantissa: int = (x >> bits - 8 if bits > 8 else x << 8 - bits) - 256
    return (256 * bits + _LOG2_FRACTION[mantissa]) * x
