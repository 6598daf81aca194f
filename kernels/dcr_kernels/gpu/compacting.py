"""The second pass over two sides of a piece, in Triton: what changed, written without gaps and in order.

`compact` works on tiles, whose changes begin where a prefix sum over the first pass's counts says, and on runs of 32
elements, of which it says how many members of each class come before them in the tile. `gather` looks at the changes
alone, and at the runs that they lie in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcr_kernels.gpu.measuring import count_of, counters_of, distances, load_tile, widened


@triton.jit
def compact(
    base: tl.tensor,
    target: tl.tensor,
    block_elements: tl.tensor,
    starts: tl.tensor,
    tops: tl.tensor,
    positions: tl.tensor,
    run_members: tl.tensor,
    tile_members: tl.tensor,
    tile_elements: tl.constexpr,
    exponent_bits: tl.constexpr,
    exponent_shift: tl.constexpr,
) -> None:
    """Write the positions, in the block of 64 tiles, of the changes of a tile of `tile_elements`, from number
    starts[tile] on.

    If there are exponents, run_members[run, 4] says how many members of each class the tile has before a run, and
    tile_members[tile, 4] how many it has: packed, each of classes i, i + 4, i + 8 and i + 12, in 16 bits a class. Of a
    tile that its block lacks nothing is written.
    """
    tile = tl.program_id(0).to(tl.int64)
    count = count_of(block_elements, tile, tile_elements)
    if count == 0:
        return
    run = tl.arange(0, tile_elements // 32)
    places = run[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    old = load_tile(base, count, tile, places, tile_elements)
    new = load_tile(target, count, tile, places, tile_elements)
    is_changed = old != new
    ones = is_changed.to(tl.int32)
    of_eight = tl.sum(ones, 2)
    of_run = tl.sum(of_eight, 1)
    before = (tl.cumsum(of_run, 0) - of_run)[:, None] + tl.cumsum(of_eight, 1) - of_eight
    at = before[:, :, None] + tl.cumsum(ones, 2) - ones
    tl.store(
        positions + tl.load(starts + tile) + at, (tile % 64).to(tl.int32) * tile_elements + places, mask=is_changed
    )
    if exponent_bits:
        mask = places < count
        counters = tl.sum(
            counters_of(distances(old, tl.load(tops + tile // 64), exponent_bits, exponent_shift), mask), 2
        )
        # A run has at most 32 members of a class, which four bits do not hold, but eight do.
        even = tl.sum(counters & 0x0F0F0F0F0F0F0F0F, 1)[:, None]
        odd = tl.sum((counters >> 4) & 0x0F0F0F0F0F0F0F0F, 1)[:, None]
        four = tl.arange(0, 4)[None, :]
        members = (tl.where(four % 2 == 0, even, odd) >> (four // 2 * 8).to(tl.uint64)) & 0x00FF00FF00FF00FF
        tl.store(
            run_members + (tile * (tile_elements // 32) + run)[:, None] * 4 + four, tl.cumsum(members, 0) - members
        )
        tl.store(tile_members + tile * 4 + tl.arange(0, 4), tl.sum(members, 0))


@triton.jit
def gather(
    base: tl.tensor,
    target: tl.tensor,
    starts: tl.tensor,
    tops: tl.tensor,
    positions: tl.tensor,
    old_bits: tl.tensor,
    new_bits: tl.tensor,
    tile_members: tl.tensor,
    run_members: tl.tensor,
    ranks: tl.tensor,
    chunk: tl.constexpr,
    tile_elements: tl.constexpr,
    exponent_bits: tl.constexpr,
    exponent_shift: tl.constexpr,
) -> None:
    """Write the old and new bits of a tile's changes, numbers starts[tile] to starts[tile + 1], and if there are
    exponents, how many members of its class come before each in the block.

    tile_members[tile, class] are those before the tile, run_members[run, 16] what `compact` says of runs.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + tile)
    count = (tl.load(starts + tile + 1) - start).to(tl.int32)
    for first in range(0, count, chunk):
        number = first + tl.arange(0, chunk)
        mask = number < count
        place = tl.load(positions + start + number, mask=mask, other=0) % tile_elements
        old = tl.load(base + tile * tile_elements + place, mask=mask, other=0)
        tl.store(old_bits + start + number, old, mask=mask)
        tl.store(
            new_bits + start + number, tl.load(target + tile * tile_elements + place, mask=mask, other=0), mask=mask
        )
        if exponent_bits:
            top = tl.load(tops + tile // 64)
            its_class = distances(widened(old), top, exponent_bits, exponent_shift)
            run = place // 32
            in_run = tl.arange(0, 32)[None, :]
            is_before = mask[:, None] & (in_run < (place % 32)[:, None])
            others = tl.load(base + tile * tile_elements + (run * 32)[:, None] + in_run, mask=is_before, other=0)
            is_member = is_before & (
                distances(widened(others), top, exponent_bits, exponent_shift) == its_class[:, None]
            )
            rank = tl.sum(is_member.to(tl.int32), 1)
            rank += tl.load(tile_members + tile * 16 + its_class, mask=mask, other=0)
            packed = (tile * (tile_elements // 32) + run) * 16 + its_class % 4 * 4 + its_class // 4
            rank += tl.load(run_members + packed, mask=mask, other=0).to(tl.int32)
            tl.store(ranks + start + number, rank, mask=mask)
