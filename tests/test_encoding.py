"""Blocks to bytes and back, in every encoding, and the refusal of what no encoder writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import dcr_kernels as kernels
from dcr_cli.checkpoint.header import DTYPES, Dtype
from dcr_cli.delta.choice import (
    ALLOWED,
    SAMPLE_BLOCKS,
    Allowed,
    Choice,
    StatesSample,
    _log2_times,
    _symbol_counts,
    choose,
)
from dcr_cli.delta.encoder import PieceEncoder
from dcr_cli.delta.encoding import Changed, Elements, Encoding, compare_block, decode_block, encode_block
from dcr_cli.delta.huffman import HuffmanTable, build_table
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.delta.whole import decode_whole, encode_whole

SIZES = (1, 2, 63, 64, 65, 1000, 5000)


def pair(seed: int, elements: int, width: int, rate: float, spread: int) -> tuple[Elements, Elements]:
    """A base and a target of random bits, of which a share `rate` moved by up to `spread` units."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 1 << 8 * width - 1, elements, dtype=np.uint64) * 2
    step = rng.integers(1, spread + 1, elements, dtype=np.uint64)
    moved = rng.random(elements) < rate
    moved[rng.integers(elements)] = True
    target = np.where(moved, base + step, base)
    return base.astype(f"<u{width}"), target.astype(f"<u{width}")


def round_trip(base: Elements, target: Elements, dtype: Dtype, allowed: Allowed, encoding: Encoding | None) -> bytes:
    """Encode one block as the encoder does, decode it, compare; gives the block."""
    draft = compare_block(base, target, 0, dtype, context=allowed.context, gap=allowed.gap).draft
    assert draft is not None

    def load() -> tuple[Elements, Elements]:
        return base, target

    if encoding in (Encoding.GAP_XOR, Encoding.GAP_OVERWRITE):
        symbols = base ^ target if encoding is Encoding.GAP_XOR else target
        values, counts = np.unique(symbols[base != target], return_counts=True)
        table: HuffmanTable | None = build_table(
            dict(zip(values.tolist(), counts.tolist(), strict=True)), dtype.width, complete=True
        )
        choice = Choice(encoding, table)
    else:
        choice = choose([(draft, load)], dtype, allowed, complete=True)
    states = {}
    if choice.encoding is Encoding.CONTEXT:
        sample = StatesSample()
        sample.add(draft)
        states[dtype.width] = sample.states()
    block = encode_block(draft, choice.encoding, dtype.width, states, choice.table, load)
    decoded = decode_block(memoryview(block), base, dtype, len(base), choice.encoding, states, choice.table)
    result = base.copy()
    if isinstance(decoded, Changed):
        kernels.patch(result, decoded.positions, decoded.values)
    else:
        result = decoded
    assert result.tobytes() == target.tobytes()
    return block


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: str(dtype.name))
@pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.6, 1.0])
def test_a_block_comes_back(dtype: Dtype, encoding: str, rate: float) -> None:
    for seed, elements in enumerate(SIZES):
        base, target = pair(seed, elements, dtype.width, rate, 1 if seed % 2 else 255)
        round_trip(base, target, dtype, ALLOWED[encoding], None)


@pytest.mark.parametrize("encoding", [Encoding.GAP_XOR, Encoding.GAP_OVERWRITE])
def test_both_gap_operations_come_back(encoding: Encoding) -> None:
    for width, name in ((1, "U8"), (2, "BF16"), (4, "F32"), (8, "F64")):
        base, target = pair(width, 3000, width, 0.02, 7)
        round_trip(base, target, DTYPES[name], ALLOWED["gap"], encoding)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(DTYPES)), st.integers(1, 300), st.floats(0, 1))
def test_any_block_comes_back(seed: int, name: str, elements: int, rate: float) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, elements * dtype.width, dtype=np.uint8).view(f"<u{dtype.width}")
    other = rng.integers(0, 256, elements * dtype.width, dtype=np.uint8).view(f"<u{dtype.width}")
    target = np.where(rng.random(elements) < rate, other, base)
    if np.array_equal(base, target):
        target[0] ^= 1
    round_trip(base, target, dtype, ALLOWED["auto"], None)


def test_a_block_that_does_not_pay_is_stored_whole() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 4096, dtype=np.uint16)
    block = round_trip(base, np.zeros_like(base), DTYPES["BF16"], ALLOWED["context"], None)
    assert block[0] == 1
    assert len(block) < 100


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("elements", [0, 1, 15, 16, 1000])
def test_the_whole_form_comes_back(width: int, elements: int) -> None:
    for data in (np.zeros(elements * width, np.uint8), np.arange(elements * width, dtype=np.uint8)):
        block: Any = data.view(f"<u{width}")
        form = encode_whole(block)
        assert len(form) <= 1 + elements * width
        assert decode_whole(memoryview(form), elements, width).tobytes() == block.tobytes()


@pytest.mark.parametrize("change", ["cut", "append", "mask", "planes", "empty"])
def test_a_damaged_whole_form_is_refused(change: str) -> None:
    form = encode_whole(np.zeros(1000, "<u2"))
    damaged = {
        "cut": form[:-1],
        "append": form + b"\0",
        "mask": bytes([form[0] | 4]) + form[1:],
        "planes": bytes([0]) + form[1:],
        "empty": b"",
    }[change]
    with pytest.raises(ValueError, match=r"byte|zstd"):
        decode_whole(memoryview(damaged), 1000, 2)


def test_bits_beside_the_head_bit_are_refused() -> None:
    form = b"\x03" + encode_whole(np.zeros(4, "<u2"))
    with pytest.raises(ValueError, match="head bit"):
        decode_block(memoryview(form), np.zeros(4, "<u2"), DTYPES["BF16"], 4, Encoding.CONTEXT, {}, None)


def test_the_choice_is_the_smallest() -> None:
    """A tensor whose few changes set one bit is smaller as masks; one that steps by units is smaller in context."""
    rng = np.random.default_rng(3)
    base = rng.integers(0, 1 << 62, 20000, dtype=np.uint64)
    flipped = base.copy()
    flipped[rng.choice(20000, 400, replace=False)] ^= np.uint64(1 << 20)
    load = lambda: (base, flipped)  # noqa: E731
    draft = compare_block(base, flipped, 0, DTYPES["I64"], context=True, gap=True).draft
    assert draft is not None
    assert choose([(draft, load)], DTYPES["I64"], ALLOWED["auto"], complete=True).encoding is Encoding.GAP_XOR


def test_a_piece_with_no_change_in_its_first_blocks_is_context() -> None:
    assert choose([], DTYPES["BF16"], ALLOWED["auto"], complete=False) == Choice(Encoding.CONTEXT, None)


@pytest.mark.parametrize("few", [0, 1 << 20])
def test_few_symbols_are_counted_as_many_are(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_cli.delta.choice.FEW_SYMBOLS", few)
    base, target = np.arange(60, dtype="<u2"), np.arange(60, dtype="<u2")
    target[[3, 20, 21]] ^= np.array([1, 1, 6], "<u2")
    draft = compare_block(base, target, 0, DTYPES["U16"], context=True, gap=True).draft
    assert draft is not None
    assert _symbol_counts([(draft, lambda: (base, target))] * 2, Encoding.GAP_XOR) == {1: 4, 6: 2}


def test_nothing_is_counted_for_a_block_of_no_sample() -> None:
    base, target = pair(2, 1000, 2, 0.05, 3)
    dtype = DTYPES["BF16"]
    drafts = [
        compare_block(base, target, 0, dtype, context=True, gap=True, is_sample=is_sample).draft
        for is_sample in (True, False)
    ]
    sampled, other = (draft for draft in drafts if draft is not None and draft.context is not None)
    assert sampled.context is not None and other.context is not None
    assert sampled.context.bins is not None and sampled.gap_position_bits > 0
    assert other.context.bins is None and other.gap_position_bits == 0
    # Whoever asks nevertheless gets the same.
    assert np.array_equal(other.context.count_bins(), sampled.context.bins)


def test_blocks_are_part_of_a_sample_until_all_is_chosen() -> None:
    base, target = pair(2, 1000, 2, 0.05, 3)
    dtype = DTYPES["BF16"]
    draft = compare_block(base, target, 0, dtype, context=True, gap=True).draft
    with ThreadPoolExecutor(1) as pool:
        encoder = PieceEncoder(pool, PayloadWriter(lambda name, data: None), ALLOWED["context"], tasks=1)
        assert not encoder.has_chosen
        encoder.begin(dtype, None)
        for number in range(SAMPLE_BLOCKS):
            assert not encoder.has_chosen, number
            encoder.add(draft, lambda: (base, target))
        assert encoder.has_chosen
        # Its starting states are those of all pieces of its width.
        encoder.begin(dtype, None)
        assert not encoder.has_chosen
        encoder.begin(dtype, Choice(Encoding.CONTEXT, None))
        assert encoder.has_chosen
        encoder.begin(DTYPES["F32"], Choice(Encoding.CONTEXT, None))
        assert not encoder.has_chosen
        encoder.begin(DTYPES["F32"], Choice(Encoding.WHOLE, None))
        assert encoder.has_chosen


@pytest.mark.parametrize("elements", [17, 40, 300])
def test_a_block_that_nothing_makes_smaller_is_whole(elements: int) -> None:
    """In a piece of its own, where `whole` needs neither table nor head."""
    base, target = pair(1, elements, 1, 1.0, 120)
    draft = compare_block(base, target, 0, DTYPES["U8"], context=True, gap=True).draft
    assert draft is not None
    sample = [(draft, lambda: (base, target))]
    choices = [choose(sample, DTYPES["U8"], ALLOWED["auto"], complete=True, alone=alone) for alone in (False, True)]
    assert choices[0].encoding is not Encoding.WHOLE
    assert choices[1].encoding is Encoding.WHOLE


def test_entropies_are_those_of_every_machine() -> None:
    for x in (*range(2000), 2**31 - 1, 2**40 + 12345, 2**63):
        exact = x * np.log2(np.float64(x)) * 256 if x else 0.0
        assert 0 <= exact - _log2_times(x) <= 2.5 * x + exact * 2**-50
