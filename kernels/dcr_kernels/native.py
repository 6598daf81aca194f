"""The compiled kernels behind the signatures of reference.py: the same functions, the same results, bit for bit.

Each thread keeps the scratch memory of its last block, so that a call allocates no more than its results. Importing
this module fails where `_native` was not built. What the functions do is documented in reference.py and FORMAT.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import dcr_kernels._native as _native
from dcr_kernels._native import level, levels, set_level
from dcr_kernels.reference import Comparison, Decoded, Draft, Ranking, whole_join, whole_split

__all__ = [
    "Comparison",
    "Decoded",
    "Draft",
    "Ranking",
    "compare",
    "context_decode",
    "copy_box",
    "digest",
    "digest_changes",
    "digest_spans",
    "draft",
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
# No thread keeps scratch for larger blocks, nor more work memory than blocks of any width need.
BLOCK_KEPT = 1 << 19
WORK_KEPT = 16 << 20

_POSITION = np.dtype("<u4")
_ELEMENTS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_WIDTHS = {dtype: width for width, dtype in _ELEMENTS.items()}


class _Room(NamedTuple):
    """Scratch arrays of at least so many entries: what kernels fill in for a block of some width."""

    size: int
    positions: Positions
    old: Elements
    new: Elements
    magnitudes: Elements


class _Scratch(threading.local):
    """The memory of one thread: for blocks of each width, and one growing piece for all else."""

    def __init__(self) -> None:
        self.rooms: dict[int, _Room] = {}
        self._work = np.empty(1 << 16, np.uint8)

    def room(self, width: int, count: int) -> _Room:
        room = self.rooms.get(width)
        if room is None or room.size < count:
            elements = _ELEMENTS[width]
            count = max(count, 1 << 12)
            room = _Room(count, np.empty(count + SLACK, _POSITION), *(np.empty(count, elements) for _ in range(3)))
            if count * width <= BLOCK_KEPT:
                self.rooms[width] = room
        return room

    def work(self, size: int) -> NDArray[np.uint8]:
        if self._work.size >= size:
            return self._work
        work = np.empty(size, np.uint8)
        if size <= WORK_KEPT:
            self._work = work
        return work


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
    width = _width(base, target)
    out = _scratch.room(width, base.size).positions
    found = _native.scan(width, base, target, out)
    return out[:found].copy()


def gather(elements: Elements, positions: Positions) -> Elements:
    """Return the elements at `positions`."""
    out = np.empty(positions.size, elements.dtype)
    _native.gather(_width(elements), elements, _positions(positions), out)
    return out


def copy_box(
    out: Elements, source: Elements, axes: Sequence[tuple[int, int, int]], out_begin: int = 0, source_begin: int = 0
) -> None:
    """Copy a box of elements of `source`, from number `source_begin` on, to `out`, from number `out_begin` on.

    `axes` are its (count, step in `out`, step in `source`), in elements; no two elements of it are one in `out`.
    ValueError, and nothing is copied, if it reaches outside of either.
    """
    _native.copy_box(_width(out, source), out_begin, source_begin, np.array(axes, "<i8").reshape(-1), source, out)


def patch(out: Elements, positions: Positions, values: Elements) -> None:
    """Write `values` to `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _native.patch(_width(out, values), _positions(positions), values, out)


def patch_xor(out: Elements, positions: Positions, masks: Elements) -> None:
    """Flip the bits `masks` of `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _native.patch_xor(_width(out, masks), _positions(positions), masks, out)


def compare(base: Elements, target: Elements, offset: int, exponent: tuple[int, int] | None = None) -> Comparison:
    """Compare and digest two sides of a block at byte `offset` of its tensor; draft its context form if `exponent`, the
    bits and the shift of the field, is given.
    """
    width, count = _width(base, target), base.size
    sums = np.empty((2, 4), np.uint32)
    _, positions, old, new, magnitudes = _scratch.room(width, count)
    class_counts = np.empty(16, np.uint32)
    changed, stream = _native.compare(
        width,
        exponent[0] if exponent is not None else None,
        exponent[1] if exponent is not None else 0,
        offset,
        base,
        target,
        sums.reshape(-1),
        positions,
        old,
        new,
        class_counts,
        magnitudes,
        _scratch.work(_native.compare_bytes(count)),
    )
    draft = None
    if stream is not None and exponent is not None:
        draft = Draft(stream, class_counts if exponent[0] else class_counts[:1], magnitudes[:changed].copy())
    return Comparison(sums[0], sums[1], positions[:changed].copy(), old[:changed].copy(), new[:changed].copy(), draft)


def draft(ranking: Ranking, old: Elements, new: Elements, exponent: tuple[int, int]) -> Draft:
    """Draft the context form of a block of which the ranks of its changes, at least one, their old and their new bits
    are known, in ascending position.
    """
    width, count, members = _width(old, new), old.size, _positions(ranking.members)
    classes = 16 if exponent[0] else 1
    if members.shape != (classes,):
        raise ValueError(f"no members of {classes} classes: {members.shape}")
    class_counts, magnitudes = np.empty(16, np.uint32), np.empty(count, old.dtype)
    scratch = _scratch.work(_native.draft_bytes(min(int(members.sum(dtype=np.uint64)), (1 << 32) - 1), count))
    known = _positions(ranking.ranks), old, new
    stream = _native.draft(width, *exponent, ranking.top, members, *known, class_counts, magnitudes, scratch)
    return Draft(stream, class_counts[:classes], magnitudes)


def context_decode(
    block: Bytes,
    base: Elements,
    offset: int,
    exponent: tuple[int, int],
    states: NDArray[np.uint16],
    out: Elements | None = None,
) -> Decoded:
    """Decode a context block at byte `offset` of its tensor, whose exponent field has these bits and this shift.

    The target is made in `out`, if it is given; it may be `base` itself. After an error another one may hold anything.
    """
    width = _width(base) if out is None else _width(base, out)
    _, positions, _, values, _ = _scratch.room(width, base.size)
    work = _scratch.work(_native.decode_bytes(base.size))
    sums = np.empty((2, 4), np.uint32)
    count = _native.context_decode(
        width, *exponent, offset, block, base, _states(states), positions, values, work, sums.reshape(-1), out
    )
    return Decoded(sums[0], sums[1], positions[:count].copy(), values[:count].copy())


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
        scratch = _scratch.work(size)
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
        _scratch.work(_native.gap_bytes(n, positions.size, width)),
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
    _, positions, _, symbols, _ = _scratch.room(width, n)
    table = _table(table_symbols, table_lengths)
    count = _native.gap_decode(width, n, escape_length, *table, block, positions, symbols)
    return positions[:count].copy(), symbols[:count].copy()


def position_bits(n: int, positions: Positions) -> int:
    """Return how many bits a gap block spends on the count and the positions of its changes, at least one."""
    return _native.position_bits(n, _positions(positions))


def _width(elements: Elements, others: Elements | None = None) -> int:
    width = _WIDTHS.get(elements.dtype)
    if width is None or (others is not None and others.dtype != elements.dtype):
        dtypes = [str(array.dtype) for array in (elements, others) if array is not None]
        raise ValueError(f"not elements of one width: {dtypes}")
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
