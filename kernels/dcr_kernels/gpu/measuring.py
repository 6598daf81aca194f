"""The first pass over the sides of a piece, in Triton: changes counted, both digests, and where exponents lie.

`measure` works on tiles, `settle` makes of their sums and counts what is known of blocks. What changed is written by
compacting.py; comparing.py launches all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    side: tl.tensor, count: tl.tensor, tile: tl.tensor, places: tl.tensor, tile_elements: tl.constexpr
) -> tl.tensor:
    """The `count` elements of a tile, widened to at least 32 bits, zeros behind the last one."""
    at = side + tile * tile_elements + places
    # A mask would keep the loads of whole tiles from being vectors.
    if count == tile_elements:
        values = tl.load(at)
    else:
        mask = places < count
        values = tl.load(at, mask=mask, other=0)
    return widened(values)


@triton.jit
def count_of(block_elements: tl.tensor, tile: tl.tensor, tile_elements: tl.constexpr) -> tl.tensor:
    """How many elements a tile has: none, if it is one that its block lacks."""
    left = tl.load(block_elements + tile // 64) - (tile % 64).to(tl.int32) * tile_elements
    return tl.minimum(tl.maximum(left, 0), tile_elements)


@triton.jit
def widened(elements: tl.tensor) -> tl.tensor:
    """Signed elements of at least 32 bits."""
    if elements.dtype.primitive_bitwidth < 32:
        elements = elements.to(tl.int32)
    return elements


@triton.jit
def distances(
    elements: tl.tensor, top: tl.tensor, exponent_bits: tl.constexpr, exponent_shift: tl.constexpr
) -> tl.tensor:
    """How far exponents lie below `top`, from 0 to 15: if it is a block's top exponent, the classes of its elements."""
    exponents = ((elements >> exponent_shift) & ((1 << exponent_bits) - 1)).to(tl.int32)
    return tl.minimum(tl.maximum(top - exponents, 0), 15)


@triton.jit
def counters_of(numbers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Sixteen counters of four bits each, of which the one with the number of the element is 1."""
    return mask.to(tl.uint64) << (4 * numbers).to(tl.uint64)


@triton.jit
def unit_values(elements: tl.tensor, byte: tl.tensor, part: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """What the bytes 2 * part and the next of each element, the first of which has number `byte` in its row, count in a
    digest (FORMAT.md 3.2)."""
    values = elements
    if width == 1:
        values = tl.where((byte & 1) == 1, elements * 256, elements & 255)
    elif width > 2:
        values = (elements >> (16 * part)).to(tl.int16).to(tl.int32)
    return values


@triton.jit(do_not_specialize=["skew"])
def measure(
    base: tl.tensor,
    target: tl.tensor,
    block_elements: tl.tensor,
    keys: tl.tensor,
    skew: tl.tensor,
    pivot: tl.tensor,
    sums: tl.tensor,
    changed: tl.tensor,
    populations: tl.tensor,
    width: tl.constexpr,
    tile_elements: tl.constexpr,
    exponent_bits: tl.constexpr,
    exponent_shift: tl.constexpr,
    is_pair: tl.constexpr,
    is_aligned: tl.constexpr,
) -> None:
    """Measure a tile of `tile_elements`, whose first byte is number `skew` of a row of the digest.

    To sums[tile, row, side, q] go the sums of units times K_q over the part of the tile in that row and in the next
    one, for the base and for what the target adds; to changed[tile] the number of changes; if there are exponents, to
    populations[tile, 4] how many of them lie at each distance below *pivot, packed: distances i, i + 4, i + 8 and
    i + 12 in 16 bits each. An aligned tile has no sums of a next row, and a base that is no pair has no changes. Of a
    tile that its block lacks nothing is written.
    """
    tile = tl.program_id(0).to(tl.int64)
    count = count_of(block_elements, tile, tile_elements)
    if count == 0:
        return
    places = tl.arange(0, tile_elements // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    old = load_tile(base, count, tile, places, tile_elements)
    new = old
    if is_pair:
        new = load_tile(target, count, tile, places, tile_elements)
    tl.store(changed + tile, tl.sum((old != new).to(tl.int32)))
    if exponent_bits:
        mask = places < count
        counters = tl.sum(counters_of(distances(old, tl.load(pivot), exponent_bits, exponent_shift), mask), 1)
        four = tl.arange(0, 4)
        widened_counters = (counters[:, None] >> (4 * four)[None, :].to(tl.uint64)) & 0x000F000F000F000F
        tl.store(populations + tile * 4 + four, tl.sum(widened_counters, 0))
    for q in tl.static_range(4):
        of_base = tl.zeros([tile_elements // 8, 8], tl.int32)
        growth = tl.zeros([tile_elements // 8, 8], tl.int32)
        next_of_base = tl.zeros([tile_elements // 8, 8], tl.int32)
        next_growth = tl.zeros([tile_elements // 8, 8], tl.int32)
        for part in tl.static_range((width + 1) // 2):
            byte = places * width + 2 * part
            column = places
            if not is_aligned:
                byte += skew
                column = (byte >> 1) & 4095
            elif width != 2:
                column = byte >> 1
            key = tl.load(keys + q * 4096 + column).to(tl.int32)
            before = unit_values(old, byte, part, width)
            grown = (unit_values(new, byte, part, width) - before) * key
            before *= key
            if not is_aligned:
                is_next = byte >= 8192
                next_of_base += tl.where(is_next, before, 0)
                next_growth += tl.where(is_next, grown, 0)
                before = tl.where(is_next, 0, before)
                grown = tl.where(is_next, 0, grown)
            of_base += before
            growth += grown
        out = sums + tile * 16 + q
        tl.store(out, tl.sum(of_base))
        tl.store(out + 4, tl.sum(growth))
        if not is_aligned:
            tl.store(out + 8, tl.sum(next_of_base))
            tl.store(out + 12, tl.sum(next_growth))


@triton.jit
def row_key(q: tl.constexpr, rows: tl.tensor) -> tl.tensor:
    """R_q of rows of the digest (FORMAT.md 3.1), as signed integers."""
    z = rows + ((q << 60) + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)).to(tl.int32) | 1


@triton.jit
def count_above(
    base: tl.tensor,
    count: tl.tensor,
    exponent: tl.tensor,
    tile_elements: tl.constexpr,
    exponent_bits: tl.constexpr,
    exponent_shift: tl.constexpr,
) -> tl.tensor:
    """How many of `count` elements have an exponent above this one."""
    above = tl.zeros([tile_elements], tl.int32)
    for first in range(0, count, tile_elements):
        places = first + tl.arange(0, tile_elements)
        elements = widened(tl.load(base + places, mask=places < count, other=0))
        # Only what is above it is at a distance of 0 from the exponent after it.
        above += ((distances(elements, exponent + 1, exponent_bits, exponent_shift) == 0) & (places < count)).to(
            tl.int32
        )
    return tl.sum(above, 0)


@triton.jit
def settle(
    base: tl.tensor,
    block_elements: tl.tensor,
    first_rows: tl.tensor,
    pivot: tl.tensor,
    sums: tl.tensor,
    populations: tl.tensor,
    digests: tl.tensor,
    tops: tl.tensor,
    tile_elements: tl.constexpr,
    exponent_bits: tl.constexpr,
    exponent_shift: tl.constexpr,
    is_aligned: tl.constexpr,
) -> None:
    """Make what is known of a block of 64 tiles, tile i of which begins in row first_rows[block] + i of the digest.

    To digests[side, block, q] go the digest of the base and what it grows by; if there are exponents, to tops[block]
    the top one: from the populations, or, where they do not reach that far, by halves.
    """
    block = tl.program_id(0).to(tl.int64)
    tiles = block * 64 + tl.arange(0, 64)
    count = tl.load(block_elements + block)
    is_there = tl.arange(0, 64) * tile_elements < count
    rows = (tl.load(first_rows + block) + tl.arange(0, 64)).to(tl.uint64)
    for q in tl.static_range(4):
        for side in tl.static_range(2):
            at = sums + tiles * 16 + side * 4 + q
            values = tl.load(at, mask=is_there, other=0) * row_key(q, rows)
            if not is_aligned:
                values += tl.load(at + 8, mask=is_there, other=0) * row_key(q, rows + 1)
            tl.store(digests + (side * tl.num_programs(0) + block) * 4 + q, tl.sum(values, 0))
    if exponent_bits:
        start = block * 64 * tile_elements
        number = tl.arange(0, 16)
        # In memory a tile's populations are those of numbers 0, 4, 8, 12, 1, 5, ... in 16 bits each.
        at = tiles[:, None] * 16 + (number % 4 * 4 + number // 4)[None, :]
        population = tl.sum(tl.load(populations + at, mask=is_there[:, None], other=0).to(tl.int32), 0)
        # Up to number i they are the exponents above pivot - 1 - i; the last one has all that are lower still.
        is_enough = (tl.cumsum(population, 0) * 256 <= count) & (number < 15)
        found = tl.sum(is_enough.to(tl.int32), 0)
        top = tl.load(pivot) - found
        if (found == 0) | ((found == 15) & (top > 0)):
            low = tl.full([], 0, tl.int32)
            top = tl.full([], (1 << exponent_bits) - 1, tl.int32)
            for _ in range(exponent_bits):
                middle = (low + top) // 2
                reaches = (
                    count_above(base + start, count, middle, tile_elements, exponent_bits, exponent_shift) * 256
                    <= count
                )
                low = tl.where(reaches, low, middle + 1)
                top = tl.where(reaches, middle, top)
        tl.store(tops + block, top)
