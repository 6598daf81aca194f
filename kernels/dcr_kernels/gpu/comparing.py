"""Two sides of a piece compared on the device that they lie on: launches, and memory there.

What the kernels do is documented where they are; what the results mean, in reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton

from dcr_kernels.gpu.compacting import compact, gather
from dcr_kernels.gpu.elements import BLOCK_BYTES, OPTIONS, SIGNED, TILE_BYTES, check_elements, on_device_of, tile_warps
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
class Ranks:
    """Of each block, the top exponent and the members of its classes [blocks, classes]; of each change, its rank."""

    tops: torch.Tensor
    members: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Compared:
    """All blocks of a piece, on its device: what the base adds to the four sums of its tensor [blocks, 4], what they
    grow by, where the changes of each block begin and end [blocks + 1]; of each change, in order, its position in the
    block, its old and new bits, and, if they were asked for, the ranks.
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
    _check(data, offset=offset)
    measured = _measure(data.view(SIGNED[data.itemsize]), None, offset, (0, 0))
    return measured.digests[0].sum(0, dtype=torch.int32).view(torch.uint32)


def compare(base: torch.Tensor, target: torch.Tensor, offset: int, exponent: tuple[int, int] | None = None) -> Compared:
    """Compare and digest two sides of a piece, whose first block lies at byte `offset` of the tensor; rank the changes
    in their classes if `exponent`, the bits and the shift of the field, is given.

    `offset` is a multiple of the width. The host waits for the number of changes, once, and allocates what they need.
    """
    width = _check(base, target, offset=offset)
    field = exponent or (0, 0)
    if min(field) < 0 or sum(field) > 8 * width:
        raise ValueError(f"no exponent field: {field[0]} bits at {field[1]} of {8 * width}")
    sides = base.view(SIGNED[width]), target.view(SIGNED[width])
    measured = _measure(sides[0], sides[1], offset, field)
    starts = torch.cat([measured.starts[:-1:_TILES], measured.starts[-1:]])
    digests = measured.digests.view(torch.uint32)
    positions, old, new, ranking = _find_changes(sides, measured, exponent)
    found = positions.view(torch.uint32), old.view(base.dtype), new.view(base.dtype)
    return Compared(digests[0], digests[1], starts, *found, ranking)


def _measure(base: torch.Tensor, target: torch.Tensor | None, offset: int, field: tuple[int, int]) -> _Measured:
    """Make the first pass; a base without a target has no changes."""
    elements, tile = base.numel(), TILE_BYTES // base.itemsize
    tiles = triton.cdiv(elements, tile)
    blocks = triton.cdiv(tiles, _TILES)
    sums = torch.empty(tiles, 16, dtype=torch.int32, device=base.device)
    changed, tops = sums.new_empty(tiles), sums.new_zeros(blocks)
    populations = sums.new_empty(tiles if field[0] else 0, 4, dtype=torch.int64)
    digests = sums.new_empty(2, blocks, 4)
    starts = sums.new_zeros(tiles + 1, dtype=torch.int64)
    if elements:
        first_row, skew = divmod(offset, ROW_BYTES)
        pivot = _likely_top(base, field) + _ABOVE if field[0] else tops
        options = _options(tile, field) | {"is_aligned": skew == 0}
        results = sums, changed, populations
        kind = {"width": base.itemsize, "is_pair": target is not None}
        with on_device_of(base):
            new = base if target is None else target
            measure[(tiles,)](base, new, elements, _keys(base.device), skew, pivot, *results, **kind, **options)
            shares = sums, populations.view(torch.int16)
            settle[(blocks,)](base, elements, first_row, pivot, *shares, digests, tops, **options)
        torch.cumsum(changed, 0, out=starts[1:])
    return _Measured(digests, starts, tops)


def _find_changes(
    sides: tuple[torch.Tensor, torch.Tensor], measured: _Measured, exponent: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ranks | None]:
    """Make the second pass: positions, old and new bits, and the ranks if `exponent` is given and something changed."""
    base, field = sides[0], exponent or (0, 0)
    positions = measured.tops.new_empty(int(measured.starts[-1]))
    old, new = base.new_empty(positions.numel()), base.new_empty(positions.numel())
    if not positions.numel():
        return positions, old, new, None
    tiles, tile, blocks = measured.starts.numel() - 1, TILE_BYTES // base.itemsize, measured.tops.numel()
    is_ranked = bool(field[0])
    run_members = base.new_empty(tiles * tile // _RUN if is_ranked else 0, 4, dtype=torch.int64)
    # Tiles that the last block lacks have no members.
    packed = base.new_zeros(blocks * _TILES if is_ranked else 0, 4, dtype=torch.int64)
    options, known = _options(tile, field), (measured.starts, measured.tops, positions)
    with on_device_of(base):
        compact[(tiles,)](*sides, base.numel(), *known, run_members, packed, **options)
        # In memory are those of classes 0, 4, 8, 12, then 1, 5, ...
        in_order = packed.view(torch.int16).view(-1, _TILES, 4, 4).transpose(2, 3).to(torch.int32)
        members = in_order.reshape(-1, _TILES, CLASSES)
        before = members.cumsum(1, dtype=torch.int32) - members
        ranks = torch.empty_like(positions) if is_ranked else positions
        results = old, new, before, run_members.view(torch.int16), ranks
        gather[(tiles,)](*sides, *known, *results, chunk=CHUNK, **options | {"num_warps": CHUNK_WARPS})
    if exponent is None:
        return positions, old, new, None
    if is_ranked:
        of_blocks = members.sum(1, dtype=torch.int32)
    else:
        # All elements are of one class, in which an element's rank is its position.
        starts = torch.arange(blocks, device=base.device) * (tile * _TILES)
        of_blocks = (base.numel() - starts).clamp(max=tile * _TILES).to(torch.int32)[:, None]
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
    return exponents.kthvalue(len(exponents) - len(exponents) // 256, keepdim=True).values.to(torch.int32)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """K_q[i] as row q, column i."""
    return torch.from_numpy(unit_keys().astype(np.int16)).to(device)


def _check(*sides: torch.Tensor, offset: int) -> int:
    """Return the width of the sides; ValueError if they are no sides of a piece at this byte of a tensor."""
    width = check_elements(*sides)
    if sides[0].numel() != sides[-1].numel():
        sizes = [side.numel() for side in sides]
        raise ValueError(f"sizes differ: {sizes[0]} and {sizes[1]}: at element {min(sizes)}")
    if not 0 <= offset <= 1 << 62 or offset % width:
        raise ValueError(f"no offset of elements of width {width} in a tensor: {offset}")
    return width
