"""Two sides of a piece compared on the device that they lie on: launches, and memory there.

What the kernels do is documented where they are; what the results mean, in reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton

from dcr_kernels.gpu.compacting import compact, gather
from dcr_kernels.gpu.elements import BLOCK_BYTES, OPTIONS, SIGNED, TILE_BYTES, check_elements, launching, tile_warps
from dcr_kernels.gpu.measuring import measure, settle
from dcr_kernels.reference import CLASSES, ROW_BYTES, unit_keys

_TILES = BLOCK_BYTES // TILE_BYTES
# So many elements of a piece say where its exponents mostly end.
_SAMPLE = 4096
# How far above it populations are counted: 7 of the 14 exponents that have one of their own.
_ABOVE = 7
# Elements of a run, and changes of a tile that are looked at together.
_RUN = 32
CHUNK = 64
CHUNK_WARPS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a tensor that follow each other, the first at byte `offset` of it."""

    elements: int
    offset: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of each block, the top exponent and the members of its classes [blocks, classes]; of each change, its rank."""

    tops: torch.Tensor
    members: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Compared:
    """All blocks of a piece, or of several, on their device: what the base adds to the four sums of its tensor
    [blocks, 4], what they grow by, where the changes of each block begin and end [blocks + 1]; of each change, in
    order, its position in the block, its old and new bits, and, if they were asked for, the ranks.
    """

    digests: torch.Tensor
    growths: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    ranking: Ranks | None


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the first pass says: digests [side, block, 4], where the changes of each tile begin and end, tops."""

    digests: torch.Tensor
    starts: torch.Tensor
    tops: torch.Tensor


def digest(data: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return what the elements `data`, at byte `offset` of their tensor, add to its four sums."""
    blocks = _blocks_of(data, [Run(data.numel(), offset)])
    measured = _measure(data.view(SIGNED[data.itemsize]), None, blocks, (0, 0))
    return measured.digests[0].sum(0, dtype=torch.int32).view(torch.uint32)


def compare(base: torch.Tensor, target: torch.Tensor, offset: int, exponent: tuple[int, int] | None = None) -> Compared:
    """Compare and digest two sides of a piece, whose first block lies at byte `offset` of the tensor; rank the changes
    in their classes if `exponent`, the bits and the shift of the field, is given.

    `offset` is a multiple of the width. The host waits for the number of changes, once, and allocates what they need.
    """
    return compare_runs(base, target, [Run(base.numel(), offset)], exponent)


def compare_runs(
    base: torch.Tensor, target: torch.Tensor, runs: Sequence[Run], exponent: tuple[int, int] | None = None
) -> Compared:
    """Compare several pieces at once, as `compare` does one: what is found are the blocks of all, in order.

    Each begins at the first multiple of a block's bytes after the one before. What lies between is not looked at. Their
    offsets are equally far into a row of the digest.
    """
    width = check_elements(base, target)
    if base.numel() != target.numel():
        sizes = base.numel(), target.numel()
        raise ValueError(f"sizes differ: {sizes[0]} and {sizes[1]}: at element {min(sizes)}")
    field = exponent or (0, 0)
    if min(field) < 0 or sum(field) > 8 * width:
        raise ValueError(f"no exponent field: {field[0]} bits at {field[1]} of {8 * width}")
    blocks = _blocks_of(base, runs)
    sides = base.view(SIGNED[width]), target.view(SIGNED[width])
    measured = _measure(sides[0], sides[1], blocks, field)
    starts = torch.cat([measured.starts[:-1:_TILES], measured.starts[-1:]])
    digests = measured.digests.view(torch.uint32)
    positions, old, new, ranking = _find_changes(sides, measured, blocks, exponent)
    found = positions.view(torch.uint32), old.view(base.dtype), new.view(base.dtype)
    return Compared(digests[0], digests[1], starts, *found, ranking)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of each block, on the device, its elements, and the row of the digest in which it begins; how far into that; and
    the tiles up to the last one that has elements.
    """

    elements: torch.Tensor
    first_rows: torch.Tensor
    skew: int
    tiles: int


def _blocks_of(data: torch.Tensor, runs: Sequence[Run]) -> _Blocks:
    """The blocks of runs; ValueError if they are none of this side."""
    width = check_elements(data)
    size, skew = BLOCK_BYTES // width, runs[0].offset % ROW_BYTES if runs else 0
    counts: list[int] = []
    rows: list[int] = []
    for run in runs:
        if not 0 <= run.offset <= 1 << 62 or run.offset % width:
            raise ValueError(f"no offset of elements of width {width} in a tensor: {run.offset}")
        if run.offset % ROW_BYTES != skew:
            raise ValueError(f"offsets not equally far into a row: {runs[0].offset} and {run.offset}")
        end = len(counts) * size + run.elements
        if end > data.numel():
            raise ValueError(f"runs of {end} elements, and there are {data.numel()}")
        rows += range(
            run.offset // ROW_BYTES, run.offset // ROW_BYTES + _TILES * triton.cdiv(run.elements, size), _TILES
        )
        counts += [min(size, run.elements - begin) for begin in range(0, run.elements, size)]
    tiles = (len(counts) - 1) * _TILES + triton.cdiv(counts[-1] * width, TILE_BYTES) if counts else 0
    # Tensors of their own, which begin at addresses that kernels are compiled for once.
    elements, first_rows = (torch.tensor(each, dtype=torch.int64).to(data.device) for each in (counts, rows))
    return _Blocks(elements, first_rows, skew, tiles)


def _measure(base: torch.Tensor, target: torch.Tensor | None, blocks: _Blocks, field: tuple[int, int]) -> _Measured:
    """Make the first pass; a base without a target has no changes."""
    tile, tiles, count = TILE_BYTES // base.itemsize, blocks.tiles, blocks.elements.numel()
    sums = torch.empty(tiles, 16, dtype=torch.int32, device=base.device)
    # Tiles that a block lacks have no changes.
    changed, tops = sums.new_zeros(tiles), sums.new_zeros(count)
    populations = sums.new_empty(tiles if field[0] else 0, 4, dtype=torch.int64)
    digests = sums.new_empty(2, count, 4)
    starts = sums.new_zeros(tiles + 1, dtype=torch.int64)
    if tiles:
        pivot = _likely_top(base, field) + _ABOVE if field[0] else tops
        options = _options(tile, field) | {"is_aligned": blocks.skew == 0}
        kind = {"width": base.itemsize, "is_pair": target is not None}
        with launching(base):
            sides = base, base if target is None else target
            results = sums, changed, populations
            measure[(tiles,)](
                *sides, blocks.elements, _keys(base.device), blocks.skew, pivot, *results, **kind, **options
            )
            shares = sums, populations.view(torch.int16)
            settle[(count,)](base, blocks.elements, blocks.first_rows, pivot, *shares, digests, tops, **options)
        torch.cumsum(changed, 0, out=starts[1:])
    return _Measured(digests, starts, tops)


def _find_changes(
    sides: tuple[torch.Tensor, torch.Tensor], measured: _Measured, blocks: _Blocks, exponent: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ranks | None]:
    """Make the second pass: positions, old and new bits, and the ranks if `exponent` is given and something changed."""
    base, field = sides[0], exponent or (0, 0)
    positions = measured.tops.new_empty(int(measured.starts[-1]))
    old, new = base.new_empty(positions.numel()), base.new_empty(positions.numel())
    if not positions.numel():
        return positions, old, new, None
    tiles, tile, count = blocks.tiles, TILE_BYTES // base.itemsize, blocks.elements.numel()
    is_ranked = bool(field[0])
    run_members = base.new_empty(tiles * tile // _RUN if is_ranked else 0, 4, dtype=torch.int64)
    # Tiles that a block lacks have no members.
    packed = base.new_zeros(count * _TILES if is_ranked else 0, 4, dtype=torch.int64)
    options, known = _options(tile, field), (measured.starts, measured.tops, positions)
    with launching(base):
        compact[(tiles,)](*sides, blocks.elements, *known, run_members, packed, **options)
        # In memory are those of classes 0, 4, 8, 12, then 1, 5, ...
        in_order = packed.view(torch.int16).view(-1, _TILES, 4, 4).transpose(2, 3).to(torch.int32)
        members = in_order.reshape(-1, _TILES, CLASSES)
        before = members.cumsum(1, dtype=torch.int32) - members
        ranks = torch.empty_like(positions) if is_ranked else positions
        results = old, new, before, run_members.view(torch.int16), ranks
        gather[(tiles,)](*sides, *known, *results, chunk=CHUNK, **options | {"num_warps": CHUNK_WARPS})
    if exponent is None:
        return positions, old, new, None
    # Without a field all elements are of one class, in which an element's rank is its position.
    of_blocks = members.sum(1, dtype=torch.int32) if is_ranked else blocks.elements.to(torch.int32)[:, None]
    return positions, old, new, Ranks(measured.tops, of_blocks.view(torch.uint32), ranks.view(torch.uint32))


def _options(tile: int, field: tuple[int, int]) -> dict[str, int | bool]:
    """What all kernels are compiled for."""
    known = {"tile_elements": tile, "exponent_bits": field[0], "exponent_shift": field[1]}
    return {**known, "num_warps": tile_warps(tile), **OPTIONS}


def _likely_top(base: torch.Tensor, field: tuple[int, int]) -> torch.Tensor:
    """The top exponent of some elements of a piece, as if they were a block; it stays on the device."""
    some = base[:: max(1, base.numel() // _SAMPLE)].to(torch.int64)
    exponents = some >> field[1] & (1 << field[0]) - 1
    # As many as may lie above it are left out, and it is the largest of the others.
    last = len(exponents) - len(exponents) // 256
    # Torch's kthvalue refuses on CUDA if a process wants its algorithms to be deterministic.
    return exponents.sort().values[last - 1 : last].to(torch.int32)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """K_q[i] as row q, column i."""
    return torch.from_numpy(unit_keys().astype(np.int16)).to(device)
