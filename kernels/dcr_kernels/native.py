"""The compiled kernels behind the signatures of reference.py: the same functions, the same results, bit for bit.

Each thread keeps the scratch memory of its last block, so that a call allocates no more than its results. Importing
this module fails where `_native` was not built. What the functions do is documented in reference.py and FORMAT.md.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import dcr_kernels._native as _native
from dcr_kernels._native import level, levels, set_level
from dcr_kernels.reference import whole_join, whole_split

__all__ = [
    "context_decode",
    "context_draft",
    "digest",
    "digest_changes",
    "digest_spans",
    "gap_decode",
    "gap_encode",
    "gather",
    "level",
    "levels",
    "magnitude_bins",
    "magnitude_encode",
    "patch",
    "patch_xor",
    "position_bits",
    "scan",
    "set_level",
    "whole_join",
    "whole_split",
]

Bytes: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
Positions: TypeAlias = NDArray[np.uint32]
Elements: TypeAlias = NDArray[Any]

# What scan's output needs past its last entry.
SLACK = 64
# No thread keeps more scratch than this, which is enough for blocks of any width.
SCRATCH_KEPT = 8 << 20

_POSITION = np.dtype("<u4")
_ELEMENTS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_WIDTHS = {dtype: width for width, dtype in _ELEMENTS.items()}


class _Scratch(threading.local):
    """One growing piece of memory for each use and thread."""

    def __init__(self) -> None:
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def take(self, use: str, size: int) -> NDArray[np.uint8]:
        kept = self._kept.get(use)
        if kept is None or kept.size < size:
            kept = np.empty(max(size, 1 << 16), np.uint8)
            if size <= SCRATCH_KEPT:
                self._kept[use] = kept
        return kept

    def array(self, use: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return self.take(use, count * dtype.itemsize)[: count * dtype.itemsize].view(dtype)


_scratch = _Scratch()


def digest(data: Bytes, offset: int = 0) -> NDArray[np.uint32]:
    """Return what the bytes `data`, which lie at byte `offset` of their tensor, add to its four sums."""
    sums = np.empty(4, np.uint32)
    _native.digest(data, offset, sums)
    return sums


def digest_spans(data: Bytes, begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the digests [spans, 4] of whole tensors that lie at bytes begins[i] .. ends[i] of `data`."""
    sums = np.empty((len(begins), 4), np.uint32)
    _native.digest_spans(data, begins, ends, sums.reshape(-1))
    return sums


def digest_changes(positions: Positions, old: Elements, new: Elements, offset: int) -> NDArray[np.uint32]:
    """Return what the four sums grow by when the element at byte `offset + position * width` goes from old to new."""
    sums = np.empty(4, np.uint32)
    _native.digest_changes(_width(old, new), offset, _positions(positions), old, new, sums)
    return sums


def scan(base: Elements, target: Elements) -> Positions:
    """Return the ascending positions at which the bits of base and target differ."""
    out = _scratch.array("positions", base.size + SLACK, _POSITION)
    found = _native.scan(_width(base, target), base, target, out)
    return out[:found].copy()


def gather(elements: Elements, positions: Positions) -> Elements:
    """Return the elements at `positions`."""
    out = np.empty(positions.size, elements.dtype)
    _native.gather(_width(elements), elements, _positions(positions), out)
    return out


def patch(out: Elements, positions: Positions, values: Elements) -> None:
    """Write `values` to `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _native.patch(_width(out, values), _positions(positions), values, out)


def patch_xor(out: Elements, positions: Positions, masks: Elements) -> None:
    """Flip the bits `masks` of `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _native.patch_xor(_width(out, masks), _positions(positions), masks, out)


def context_draft(
    base: Elements, target: Elements, positions: Positions, exponent_bits: int, exponent_shift: int
) -> tuple[bytes, NDArray[np.uint32], Elements]:
    """Return the bit stream of a context block, the number of changes per class and the magnitudes in coding order."""
    width = _width(base, target)
    class_counts = np.empty(16 if exponent_bits else 1, np.uint32)
    magnitudes = np.empty(positions.size, _ELEMENTS[width])
    stream = _native.context_draft(
        width,
        exponent_bits,
        exponent_shift,
        base,
        target,
        _positions(positions),
        class_counts,
        magnitudes,
        _scratch.take("work", _native.draft_bytes(base.size, positions.size)),
    )
    return stream, class_counts, magnitudes


def context_decode(
    block: Bytes, base: Elements, exponent_bits: int, exponent_shift: int, states: NDArray[np.uint16]
) -> tuple[Positions, Elements]:
    """Return the positions that a context block changes, class after class, and their new bits."""
    width = _width(base)
    positions = _scratch.array("positions", base.size, _POSITION)
    values = _scratch.array("values", base.size, _ELEMENTS[width])
    work = _scratch.take("work", _native.decode_bytes(base.size))
    count = _native.context_decode(
        width, exponent_bits, exponent_shift, block, base, _states(states), positions, values, work
    )
    return positions[:count].copy(), values[:count].copy()


def magnitude_bins(class_counts: NDArray[np.uint32], magnitudes: Elements) -> NDArray[np.uint64]:
    """Return how often each state codes bit 0 and bit 1 for these magnitudes."""
    bins = np.empty((16, 32, 2), np.uint64)
    _native.magnitude_bins(_width(magnitudes), _positions(class_counts), magnitudes, bins)
    return bins


def magnitude_encode(class_counts: NDArray[np.uint32], magnitudes: Elements, states: NDArray[np.uint16]) -> bytes:
    """Return the section of the adaptive coder for these magnitudes, which are in coding order."""
    width = _width(magnitudes)
    size = 4096 + 2 * magnitudes.nbytes
    while True:
        scratch = _scratch.take("work", size)
        section = _native.magnitude_encode(width, _positions(class_counts), magnitudes, _states(states), scratch)
        if section is not None:
            return section
        size = 2 * scratch.size


def gap_encode(
    n: int,
    positions: Positions,
    symbols: Elements,
    table_symbols: NDArray[np.uint64],
    table_lengths: NDArray[np.uint8],
    escape_length: int,
) -> bytes:
    """Return a gap block of n elements."""
    width = _width(symbols)
    return _native.gap_encode(
        width,
        n,
        escape_length,
        *_table(table_symbols, table_lengths),
        _positions(positions),
        symbols,
        _scratch.take("work", _native.gap_bytes(n, positions.size, width)),
    )


def gap_decode(
    block: Bytes,
    n: int,
    width: int,
    table_symbols: NDArray[np.uint64],
    table_lengths: NDArray[np.uint8],
    escape_length: int,
) -> tuple[Positions, Elements]:
    """Return the ascending positions that a gap block of n elements changes, and their symbols."""
    if width not in _ELEMENTS:
        raise ValueError(f"no element width: {width}")
    positions = _scratch.array("positions", n, _POSITION)
    symbols = _scratch.array("values", n, _ELEMENTS[width])
    table = _table(table_symbols, table_lengths)
    count = _native.gap_decode(width, n, escape_length, *table, block, positions, symbols)
    return positions[:count].copy(), symbols[:count].copy()


def position_bits(n: int, positions: Positions) -> int:
    """Return how many bits a gap block spends on the count and the positions of its changes, at least one."""
    return _native.position_bits(n, _positions(positions))


def _width(*arrays: Elements) -> int:
    width = _WIDTHS.get(arrays[0].dtype)
    if width is None or any(array.dtype != arrays[0].dtype for array in arrays):
        raise ValueError(f"not elements of one width: {[str(array.dtype) for array in arrays]}")
    return width


def _positions(positions: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if positions.dtype != _POSITION:
        raise ValueError(f"not an array of uint32: {positions.dtype}")
    return positions


def _states(states: NDArray[np.uint16]) -> NDArray[np.uint16]:
    if states.shape != (16, 32) or states.dtype != np.uint16:
        raise ValueError(f"no starting states: {states.dtype} of shape {states.shape}")
    return states


def _table(symbols: NDArray[np.uint64], lengths: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    if symbols.dtype != np.uint64 or lengths.dtype != np.uint8:
        raise ValueError(f"no table: {symbols.dtype} and {lengths.dtype}")
    return symbols, lengths
