"""One block of a piece to bytes and back: whole, gap and context (FORMAT 5).

Which encoding a piece gets is choice.py's matter; where blocks lie is payload.py's. What the kernels and zstd say about
malformed input passes through as ValueError; the caller, who knows tensor and payload, names them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.header import Dtype
from dcr_cli.delta.huffman import HuffmanTable
from dcr_cli.delta.whole import decode_whole, encode_whole

BLOCK_BYTES = 524_288
WHOLE_FORM = b"\x01"
# A coded block of at most this share of the block's bytes is kept without trying its whole form.
WHOLE_TRIAL_SHARE = 8
# Where at most this share of a block changed, its changes are kept until they are coded.
KEPT_SHARE = 8

Elements = NDArray[Any]
States = dict[int, NDArray[np.uint16]]


class Encoding(IntEnum):
    """The codes of FORMAT 5."""

    WHOLE = 1
    GAP_XOR = 2
    GAP_OVERWRITE = 3
    CONTEXT = 4

    @property
    def is_gap(self) -> bool:
        """Whether runs of this encoding begin with a Huffman table."""
        return self in (Encoding.GAP_XOR, Encoding.GAP_OVERWRITE)

    @property
    def label(self) -> str:
        """The word that people type and read."""
        return {1: "whole", 2: "gap", 3: "gap", 4: "context"}[int(self)]


@dataclass(frozen=True, slots=True)
class Changed:
    """Elements of a block that change: positions within the block, each once, and their new bits."""

    positions: NDArray[np.uint32]
    values: Elements


@dataclass(frozen=True, slots=True)
class Changes:
    """What a scan found: ascending positions, and the old and new bits there."""

    positions: NDArray[np.uint32]
    old: Elements
    new: Elements


@dataclass(frozen=True, slots=True)
class ContextDraft:
    """A block coded `context` but for its magnitudes, whose starting states are not known yet."""

    stream: bytes
    class_counts: NDArray[np.uint32]
    magnitudes: Elements
    bins: NDArray[np.uint64] | None

    def count_bins(self) -> NDArray[np.uint64]:
        """How often each state codes bit 0 and bit 1."""
        return self.bins if self.bins is not None else kernels.magnitude_bins(self.class_counts, self.magnitudes)


@dataclass(frozen=True, slots=True)
class Draft:
    """What is kept of a scanned block until its piece has an encoding.

    `changes` are None where they would take much memory; then the block is read again. `gap_position_bits` are counted
    for the sample of a choice alone. `copied_bytes` is what is kept besides where it could not be.
    """

    changed: int
    elements: int
    context: ContextDraft | None
    gap_position_bits: int
    changes: Changes | None
    copied_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, roughly."""
        held = self.copied_bytes
        if self.context is not None:
            held = len(self.context.stream) + self.context.magnitudes.nbytes
            held += self.context.bins.nbytes if self.context.bins is not None else 0
        return held + (self.changes.positions.nbytes + 2 * self.changes.old.nbytes if self.changes else 0)


LoadBlock = Callable[[], tuple[Elements, Elements]]


_UINT_DTYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def uint_dtype(width: int) -> np.dtype[Any]:
    """The NumPy type that holds an element's bits."""
    return _UINT_DTYPES[width]


def block_elements(width: int) -> int:
    """Elements of a full block."""
    return BLOCK_BYTES // width


def find_changes(base: Elements, target: Elements) -> Changes:
    """Compare two blocks bit for bit."""
    positions = kernels.scan(base, target)
    return Changes(positions, kernels.gather(base, positions), kernels.gather(target, positions))


@dataclass(frozen=True, slots=True)
class Compared:
    """Two sides of a block: what the base adds to its tensor's digest, what that grows by, and the draft if they
    differ."""

    digest: NDArray[np.uint32]
    growth: NDArray[np.uint32]
    draft: Draft | None


def compare_block(
    base: Elements, target: Elements, offset: int, dtype: Dtype, *, context: bool, gap: bool, is_sample: bool = True
) -> Compared:
    """Compare two sides of a block at byte `offset` of its tensor, and do all the work on its changes that does not
    depend on the piece's encoding, for those that may be chosen. What the choice is made from is counted if the block
    may be part of its sample."""
    found = kernels.compare(base, target, offset, (dtype.exponent_bits, dtype.exponent_shift) if context else None)
    return compared_of(found, len(base), gap=gap, is_sample=is_sample)


def compared_of(found: kernels.Comparison, elements: int, *, gap: bool, is_sample: bool = True) -> Compared:
    """What is made of a block of so many elements, whoever has compared it; as `compare_block`."""
    changed = len(found.positions)
    if not changed:
        return Compared(found.digest, found.growth, None)
    context_draft = None
    if found.draft is not None:
        # Where there is a choice, it will be asked for by the one thread that chooses.
        is_asked = gap and is_sample
        bins = kernels.magnitude_bins(found.draft.class_counts, found.draft.magnitudes) if is_asked else None
        context_draft = ContextDraft(*found.draft, bins)
    draft = Draft(
        changed=changed,
        elements=elements,
        context=context_draft,
        gap_position_bits=kernels.position_bits(elements, found.positions) if gap and is_sample else 0,
        changes=Changes(found.positions, found.old, found.new) if gap and changed * KEPT_SHARE <= elements else None,
    )
    return Compared(found.digest, found.growth, draft)


def encode_block(
    draft: Draft, encoding: Encoding, width: int, states: States, table: HuffmanTable | None, load: LoadBlock
) -> bytes:
    """Encode a changed block; `load` gives its base and target elements again where they are needed."""
    if encoding is Encoding.WHOLE:
        return encode_whole(load()[1])
    if encoding is Encoding.CONTEXT:
        assert draft.context is not None
        coded = draft.context.stream + kernels.magnitude_encode(
            draft.context.class_counts, draft.context.magnitudes, states[width]
        )
    else:
        assert table is not None
        positions, symbols = changes_of(draft, encoding, load)
        coded = kernels.gap_encode(
            draft.elements, positions, symbols, table.symbols, table.lengths, table.escape_length
        )
    if len(coded) * WHOLE_TRIAL_SHARE > draft.elements * width:
        whole = WHOLE_FORM + encode_whole(load()[1])
        if len(whole) < len(coded):
            return whole
    return coded


def changes_of(draft: Draft, encoding: Encoding, load: LoadBlock) -> tuple[NDArray[np.uint32], Elements]:
    """Positions and gap symbols of a block."""
    changes = draft.changes if draft.changes is not None else find_changes(*load())
    return changes.positions, (changes.old ^ changes.new if encoding is Encoding.GAP_XOR else changes.new)


def decode_block(
    block: memoryview,
    base: Elements | None,
    dtype: Dtype,
    elements: int,
    encoding: Encoding,
    states: States,
    table: HuffmanTable | None,
) -> Changed | Elements:
    """Decode a block that is not empty: what changes, or all its new elements. ValueError if malformed.

    `base` are the block's elements in the source; only `whole` and `gap` overwrite decode without them.
    """
    if is_whole(block, encoding):
        return _decode_whole(block, dtype, elements, encoding)
    if encoding is Encoding.CONTEXT:
        if base is None:
            raise ValueError("a context block cannot be decoded without its base")
        exponent = dtype.exponent_bits, dtype.exponent_shift
        found = kernels.context_decode(block, base, 0, exponent, states[dtype.width])
        return Changed(found.positions, found.values)
    changed = decode_gap(block, dtype, elements, encoding, table)
    if encoding is Encoding.GAP_XOR:
        if base is None:
            raise ValueError("xor masks cannot be placed without their base")
        return Changed(changed.positions, base[changed.positions] ^ changed.values)
    return changed


def is_whole(block: memoryview, encoding: Encoding) -> bool:
    """Whether a block that is not empty holds all its new elements, whatever its piece's encoding is."""
    return encoding is Encoding.WHOLE or bool(block[0] & 1)


def decode_gap(
    block: memoryview, dtype: Dtype, elements: int, encoding: Encoding, table: HuffmanTable | None
) -> Changed:
    """Decode a `gap` block that is not whole: where it changes elements, and their new bits, or for xor their masks.
    ValueError if malformed."""
    assert table is not None
    positions, symbols = kernels.gap_decode(
        block, elements, dtype.width, table.symbols, table.lengths, table.escape_length
    )
    if encoding is Encoding.GAP_XOR and not symbols.all():
        raise ValueError("a xor mask is 0")
    return Changed(positions, symbols)


def _decode_whole(block: memoryview, dtype: Dtype, elements: int, encoding: Encoding) -> Elements:
    if encoding is Encoding.WHOLE:
        return decode_whole(block, elements, dtype.width)
    if block[:1] != WHOLE_FORM:
        raise ValueError("bits beside the head bit of a whole form: at byte 0")
    return decode_whole(block[1:], elements, dtype.width)


@dataclass(frozen=True, slots=True)
class Patched:
    """A decoded block that has a base: what was decoded, how many elements that changes, what the digests of both sides
    add to those of their tensors."""

    found: Changed | Elements
    changed: int
    old: NDArray[np.uint32]
    new: NDArray[np.uint32]


def patch_block(
    block: memoryview,
    base: Elements,
    offset: int,
    dtype: Dtype,
    encoding: Encoding,
    states: States,
    table: HuffmanTable | None,
    *,
    in_place: bool,
) -> Patched:
    """Decode a block at byte `offset` of its tensor and digest both sides; with `in_place`, `base` becomes the target.

    ValueError, with `base` as it was, if the block is malformed.
    """
    if encoding is Encoding.CONTEXT and len(block) and not block[0] & 1:
        exponent = dtype.exponent_bits, dtype.exponent_shift
        # One pass of one kernel instead of four: this is what nearly all of an apply's time goes to.
        fused = kernels.context_decode(block, base, offset, exponent, states[dtype.width], base if in_place else None)
        changes = Changed(fused.positions, fused.values)
        return Patched(changes, len(fused.positions), fused.digest, fused.digest + fused.growth)
    old = kernels.digest(base, offset)
    found = decode_block(block, base, dtype, len(base), encoding, states, table)
    changed = changed_elements(encoding, base, found)
    if isinstance(found, Changed):
        before = kernels.gather(base, found.positions)
        new = old + kernels.digest_changes(found.positions, before, found.values, offset)
        if in_place:
            kernels.patch(base, found.positions, found.values)
    else:
        new = kernels.digest(found, offset)
        if in_place:
            base[:] = found
    return Patched(found, changed, old, new)


def changed_elements(encoding: Encoding, base: Elements | None, found: Changed | Elements) -> int:
    """How many elements a block changes, as `piece.changed` counts them (FORMAT 5)."""
    if isinstance(found, Changed):
        return len(found.positions)
    if base is None or encoding is Encoding.WHOLE:
        return len(found)
    return int(np.count_nonzero(base != found))
