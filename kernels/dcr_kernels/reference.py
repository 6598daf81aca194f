"""The kernels in NumPy: the definition of what is right, and the fall-back where no compiled kernels are.

It is written to be read beside FORMAT.md, whose section numbers it names, not to be fast. All arrays are 1-d,
C-contiguous, aligned or not; elements are unsigned integers of 1, 2, 4 or 8 bytes. Encoded input is never trusted: a
stream that FORMAT.md calls malformed is a ValueError that ends in "at byte N", and no stream makes a function use
more memory than a small multiple of the elements that the caller has. Wrong arrays are a ValueError as well, with "at
element N" where one element is at fault.

Not here: the whole form's compression, the bytes of Huffman tables and of heads, the choice of an encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dcr_kernels.streams import (
    LONGEST_CODE,
    STATES,
    BitReader,
    BitWriter,
    Indices,
    RangeDecoder,
    RangeEncoder,
    huffman_codes,
    position_code,
    read_magnitude,
    read_position_code,
    rice_gaps,
    write_magnitude,
)

Bytes: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
Positions: TypeAlias = NDArray[np.uint32]
Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]

CLASSES = 16

ROW_UNITS = 4096
ROW_BYTES = 2 * ROW_UNITS
ROWS_AT_ONCE = 64


def digest(data: Bytes, offset: int = 0) -> NDArray[np.uint32]:
    """Return what the bytes `data`, at byte `offset` of their tensor, add to its four sums (FORMAT.md 3.2)."""
    _check_offset(offset)
    source = _bytes_of(data)
    total = np.zeros(4, np.uint32)
    row, skip = divmod(offset, ROW_BYTES)
    at = 0
    while at < source.size:
        part = source[at : at + ROWS_AT_ONCE * ROW_BYTES - skip]
        rows = -(-(skip + part.size) // ROW_BYTES)
        # Bytes that are not ours count as 0, so a unit of which we hold one byte gets that byte's share.
        padded = np.zeros(rows * ROW_BYTES, np.uint8)
        padded[skip : skip + part.size] = part
        units = padded.view("<i2").astype(np.int32).view(np.uint32).reshape(rows, ROW_UNITS)
        sums = np.einsum("ri,qi->rq", units, unit_keys())
        total += (sums * _row_keys(np.arange(row, row + rows, dtype=np.uint64))).sum(axis=0, dtype=np.uint32)
        at, row, skip = at + part.size, row + rows, 0
    return total


def digest_spans(data: Bytes, begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the digests [spans, 4] of whole tensors that lie at bytes begins[i] .. ends[i] of `data`."""
    source = _bytes_of(data)
    if len(begins) != len(ends):
        raise ValueError(f"{len(begins)} spans begin and {len(ends)} end")
    sums = np.empty((len(begins), 4), np.uint32)
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if not begin <= end <= source.size:
            raise ValueError(f"span is not within the data: at element {i}")
        sums[i] = digest(source[begin:end])
    return sums


def digest_changes(positions: Positions, old: Elements, new: Elements, offset: int) -> NDArray[np.uint32]:
    """Return what the four sums grow by when the element at byte `offset + position * width` goes from old to new.

    The positions are in any order and distinct; `offset` is of any parity.
    """
    _check_offset(offset)
    width = _width(old, new)
    _check_uint32(positions)
    _check_sizes(positions, old, new)
    total = np.zeros(4, np.uint32)
    first = np.uint64(offset) + positions.astype(np.uint64) * np.uint64(width)
    for byte in range(width):
        address = first + np.uint64(byte)
        high = (address & np.uint64(1)).astype(bool)
        change = _byte_values(new, byte, high) - _byte_values(old, byte, high)
        unit = address >> np.uint64(1)
        row, column = np.divmod(unit, np.uint64(ROW_UNITS))
        keys = unit_keys()[:, column.astype(np.int64)].T * _row_keys(row)
        total += (change.view(np.uint32)[:, None] * keys).sum(axis=0, dtype=np.uint32)
    return total


def _byte_values(elements: Elements, byte: int, high: NDArray[np.bool_]) -> NDArray[np.int32]:
    value = ((elements >> (8 * byte)) & 255).astype(np.int32)
    return np.where(high, 256 * value.astype(np.int8).astype(np.int32), value)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def unit_keys() -> NDArray[np.uint32]:
    """K_q[i] as row q, column i, each an i16 taken modulo 2^32."""
    mixed = _mix(np.arange(4 * ROW_UNITS, dtype=np.uint64) + np.uint64(2**62))
    keys = (mixed.astype(np.uint16) | np.uint16(1)).view(np.int16).astype(np.int32).view(np.uint32)
    keys = keys.reshape(4, ROW_UNITS)
    keys.flags.writeable = False
    return keys


def _row_keys(rows: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """R_q(j) of every j in `rows`, a row each."""
    quarters = np.arange(4, dtype=np.uint64) << np.uint64(60)
    return _mix(quarters + rows[:, None]).astype(np.uint32) | np.uint32(1)


def scan(base: Elements, target: Elements) -> Positions:
    """Return the ascending positions at which the bits of base and target differ."""
    _width(base, target)
    _check_sizes(base, target)
    return np.flatnonzero(base != target).astype(np.uint32)


def gather(elements: Elements, positions: Positions) -> Elements:
    """Return the elements at `positions`."""
    _width(elements)
    _check_uint32(positions)
    _check_within(elements, positions)
    return elements[positions]


def patch(out: Elements, positions: Positions, values: Elements) -> None:
    """Write `values` to `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _check_patch(out, positions, values)
    out[positions] = values


def patch_xor(out: Elements, positions: Positions, masks: Elements) -> None:
    """Flip the bits `masks` of `out` at `positions`, which are distinct; `out` is unchanged on an error."""
    _check_patch(out, positions, masks)
    out[positions] ^= masks


def copy_box(
    out: Elements, source: Elements, axes: Sequence[tuple[int, int, int]], out_begin: int = 0, source_begin: int = 0
) -> None:
    """Copy a box of elements of `source`, from number `source_begin` on, to `out`, from number `out_begin` on.

    `axes` are its (count, step in `out`, step in `source`), in elements; no two elements of it are one in `out`.
    ValueError, and nothing is copied, if it reaches outside of either.
    """
    width = _width(out, source)
    views = []
    for side, elements, begin in ((1, out, out_begin), (2, source, source_begin)):
        end = begin + 1
        for number, axis in enumerate(axes):
            end += (axis[0] - 1) * axis[side]
            if axis[0] < 1 or axis[side] < 0 or end > elements.size:
                raise ValueError(f"outside of the elements that are given: at axis {number}")
        if begin < 0 or end > elements.size:
            raise ValueError("outside of the elements that are given: at the first one")
        counts, steps = [axis[0] for axis in axes], [axis[side] * width for axis in axes]
        views.append(np.lib.stride_tricks.as_strided(elements[begin:], counts, steps))
    views[0][...] = views[1]


def _check_patch(out: Elements, positions: Positions, values: Elements) -> None:
    _width(out, values)
    _check_uint32(positions)
    _check_sizes(positions, values)
    _check_within(out, positions)


def _check_within(elements: Elements, positions: Positions) -> None:
    outside = positions >= elements.size
    if outside.any():
        raise ValueError(f"position outside of {elements.size} elements: at element {int(np.argmax(outside))}")


def whole_split(block: Bytes, width: int) -> NDArray[np.uint8]:
    """Return the byte planes of a block of elements, plane p as row p (FORMAT.md 5.1)."""
    source = _bytes_of(block)
    if source.size % width:
        raise ValueError(f"{source.size} bytes are no multiple of the width {width}: at byte {source.size}")
    return np.ascontiguousarray(source.reshape(-1, width).T)


def whole_join(planes: NDArray[np.uint8], width: int) -> bytes:
    """Return the block that has these byte planes."""
    if planes.ndim != 2 or planes.shape[0] != width or planes.dtype != np.uint8:
        raise ValueError(f"no byte planes of width {width}: {planes.dtype} of shape {planes.shape}")
    return planes.T.tobytes()


class Draft(NamedTuple):
    """A context block up to its magnitudes: steps 1 to 4 of FORMAT.md 5.5, the number of changes per class, and the
    magnitudes in coding order.

    The block is the stream followed by what `magnitude_encode` makes of the other two, which has to wait until the
    starting states are chosen.
    """

    stream: bytes
    class_counts: NDArray[np.uint32]
    magnitudes: Elements


class Ranking(NamedTuple):
    """A block's top exponent, the number of members of each class, and of each change, in ascending position, how many
    members of its class come before it (FORMAT.md 5.5).
    """

    top: int
    members: NDArray[np.uint32]
    ranks: NDArray[np.uint32]


class Comparison(NamedTuple):
    """Two sides of a block: what the base adds to the four sums of its tensor, what they grow by when it becomes the
    target, the ascending positions of the changes, their old and new bits, and their draft, where one was asked for and
    something changed.
    """

    digest: NDArray[np.uint32]
    growth: NDArray[np.uint32]
    positions: Positions
    old: Elements
    new: Elements
    draft: Draft | None


def compare(base: Elements, target: Elements, offset: int, exponent: tuple[int, int] | None = None) -> Comparison:
    """Compare and digest two sides of a block at byte `offset` of its tensor; draft its context form if `exponent` is
    given, the bits and the shift of the exponent field.
    """
    positions = scan(base, target)
    old, new = gather(base, positions), gather(target, positions)
    growth = digest_changes(positions, old, new, offset)
    draft = _draft(base, positions, new - old, *exponent) if exponent is not None and len(positions) else None
    return Comparison(digest(base, offset), growth, positions, old, new, draft)


def _draft(
    base: Elements, positions: Positions, difference: Elements, exponent_bits: int, exponent_shift: int
) -> Draft:
    top, classes = _classes(base, exponent_bits, exponent_shift)
    changed = classes[positions]
    members = np.bincount(classes, minlength=_class_count(exponent_bits)).astype(np.uint32)
    ranks = np.empty(positions.size, np.uint32)
    for index in np.unique(changed):
        ranks[changed == index] = np.searchsorted(np.flatnonzero(classes == index), positions[changed == index])
    return _write_draft(Ranking(top, members, ranks), changed, difference, exponent_bits)


def draft(ranking: Ranking, old: Elements, new: Elements, exponent: tuple[int, int]) -> Draft:
    """Draft the context form of a block of which the ranks of its changes, at least one, their old and their new bits
    are known, in ascending position; as `compare` does from all elements.
    """
    _width(old, new)
    _check_uint32(ranking.ranks)
    _check_sizes(ranking.ranks, old, new)
    if not 0 <= ranking.top < 1 << max(exponent[0], 0):
        raise ValueError(f"no top of an exponent of {exponent[0]} bits: {ranking.top}")
    classes = _classes_below(ranking.top, old, *exponent)
    if ranking.members.shape != (_class_count(exponent[0]),):
        raise ValueError(f"no members of {_class_count(exponent[0])} classes: {ranking.members.shape}")
    _check_ranks(ranking, classes)
    return _write_draft(ranking, classes, new - old, exponent[0])


def _check_ranks(ranking: Ranking, classes: NDArray[np.uint8]) -> None:
    least = [0] * ranking.members.size
    for at, (index, rank) in enumerate(zip(classes.tolist(), ranking.ranks.tolist(), strict=True)):
        if rank >= ranking.members[index]:
            raise ValueError(f"no such member of its class: at element {at}")
        if rank < least[index]:
            raise ValueError(f"ranks not ascending in a class: at element {at}")
        least[index] = rank + 1


def _write_draft(ranking: Ranking, classes: NDArray[np.uint8], difference: Elements, exponent_bits: int) -> Draft:
    width = _width(difference)
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=_class_count(exponent_bits)).astype(np.uint32)
    negative = difference >> (8 * width - 1)
    magnitudes = np.where(negative == 1, np.zeros_like(difference) - difference, difference)

    writer = BitWriter()
    writer.field(0, 1)
    writer.field(ranking.top, exponent_bits)
    for count in counts.tolist():
        writer.gamma(count + 1)
    for index in np.flatnonzero(counts):
        changed = ranking.ranks[classes == index].astype(np.int64)
        writer.bits(position_code(int(ranking.members[index]), changed))
    writer.bits(negative[order].astype(np.uint8))
    return Draft(writer.to_bytes(), counts, magnitudes[order])


class Decoded(NamedTuple):
    """A decoded context block: what the base adds to the four sums of its tensor, what they grow by when it becomes the
    target, the changed positions, class after class, and their new bits.
    """

    digest: NDArray[np.uint32]
    growth: NDArray[np.uint32]
    positions: Positions
    values: Elements


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
    if out is not None:
        _width(base, out)
        _check_sizes(base, out)
    positions, values = _decode(block, base, *exponent, states)
    sums, growth = digest(base, offset), digest_changes(positions, base[positions], values, offset)
    if out is not None:
        out[:] = base
        patch(out, positions, values)
    return Decoded(sums, growth, positions, values)


def _decode(
    block: Bytes, base: Elements, exponent_bits: int, exponent_shift: int, states: NDArray[np.uint16]
) -> tuple[Positions, Elements]:
    width = _width(base)
    top, classes = _classes(base, exponent_bits, exponent_shift)
    class_states = _states(states)
    source = _bytes_of(block)
    # Head, counts, at most 3 bits a member in position codes and one bit for each sign: FORMAT.md 5.3 and 5.5.
    reader = BitReader(source, limit=256 + base.size)
    reader.head()
    if exponent_bits and reader.field(exponent_bits) != top:
        raise reader.malformed("the top exponent is not that of the base")
    class_members = [np.flatnonzero(classes == index) for index in range(_class_count(exponent_bits))]
    counts = []
    for members in class_members:
        counts.append(reader.gamma() - 1)
        if counts[-1] > members.size:
            raise reader.malformed("more changes than the class has members")
    if not any(counts):
        raise reader.malformed("a block without changes")
    changed = [
        members[read_position_code(reader, members.size, count)]
        for members, count in zip(class_members, counts, strict=True)
        if count
    ]
    negative = [reader.field(1) for _ in range(sum(counts))]
    start = reader.end()

    decoder = RangeDecoder(source[start:].tobytes(), start)
    changes: list[int] = []
    for row, count in zip(class_states, counts, strict=False):
        for _ in range(count):
            magnitude = read_magnitude(decoder, row, 8 * width)
            sign = negative[len(changes)]
            if magnitude + 1 - sign > 1 << (8 * width - 1):
                raise decoder.malformed("a magnitude out of range")
            changes.append(((1 << (8 * width)) - magnitude) % (1 << (8 * width)) if sign else magnitude)
    decoder.end()
    positions = np.concatenate(changed)
    return positions.astype(np.uint32), base[positions] + np.array(changes, base.dtype)


def magnitude_bins(class_counts: NDArray[np.uint32], magnitudes: Elements) -> NDArray[np.uint64]:
    """Return how often each state P[c][i] codes bit 0 and bit 1 for these magnitudes, which are in coding order."""
    _check_magnitudes(class_counts, magnitudes)
    bins = np.zeros((CLASSES, STATES, 2), np.uint64)
    lengths = _bit_lengths(magnitudes) - 1
    starts = np.cumsum(class_counts, dtype=np.int64) - class_counts
    for index, start in enumerate(starts.tolist()):
        length = lengths[start : start + int(class_counts[index])]
        for bit in range(8 * magnitudes.itemsize):
            state = min(bit, STATES - 1)
            bins[index, state, 0] += np.uint64(np.count_nonzero(length == bit))
            bins[index, state, 1] += np.uint64(np.count_nonzero(length > bit))
    return bins


def magnitude_encode(class_counts: NDArray[np.uint32], magnitudes: Elements, states: NDArray[np.uint16]) -> bytes:
    """Return the adaptive coder's section for these magnitudes, which are in coding order (FORMAT.md 5.5, step 5)."""
    _check_magnitudes(class_counts, magnitudes)
    encoder = RangeEncoder()
    values = iter(magnitudes.tolist())
    for row, count in zip(_states(states), class_counts.tolist(), strict=False):
        for _ in range(count):
            write_magnitude(encoder, row, next(values))
    return encoder.end()


def _class_count(exponent_bits: int) -> int:
    return CLASSES if exponent_bits else 1


def _classes(base: Elements, exponent_bits: int, exponent_shift: int) -> tuple[int, NDArray[np.uint8]]:
    """Return the top exponent of a block and the class of each element."""
    exponents = _exponents(base, exponent_bits, exponent_shift)
    above = base.size - np.cumsum(np.bincount(exponents, minlength=1 << exponent_bits))
    top = int(np.argmax(256 * above <= base.size))
    return top, _classes_below(top, base, exponent_bits, exponent_shift)


def _classes_below(top: int, elements: Elements, exponent_bits: int, exponent_shift: int) -> NDArray[np.uint8]:
    exponents = _exponents(elements, exponent_bits, exponent_shift)
    return np.clip(top - exponents, 0, CLASSES - 1).astype(np.uint8)


def _exponents(elements: Elements, exponent_bits: int, exponent_shift: int) -> Indices:
    if exponent_bits < 0 or exponent_shift < 0 or exponent_bits + exponent_shift > 8 * elements.itemsize:
        raise ValueError(f"no exponent field: {exponent_bits} bits at {exponent_shift} of {8 * elements.itemsize}")
    if exponent_bits == 0:
        return np.zeros(elements.size, np.int64)
    return ((elements >> exponent_shift) & ((1 << exponent_bits) - 1)).astype(np.int64)


def _states(states: NDArray[np.uint16]) -> list[list[int]]:
    if states.shape != (CLASSES, STATES) or states.dtype != np.uint16:
        raise ValueError(f"no starting states: {states.dtype} of shape {states.shape}")
    if not states.all():
        # A bit of probability 0 would leave the coder a range of 0, from which it never returns.
        raise ValueError(f"starting state 0: at element {int(np.argmin(states))}")
    rows: list[list[int]] = states.tolist()
    return rows


def _check_magnitudes(class_counts: NDArray[np.uint32], magnitudes: Elements) -> None:
    width = _width(magnitudes)
    if class_counts.size not in (1, CLASSES) or int(class_counts.sum(dtype=np.uint64)) != magnitudes.size:
        raise ValueError(f"class counts {class_counts.tolist()} for {magnitudes.size} magnitudes")
    wrong = (magnitudes == 0) | (magnitudes > 1 << (8 * width - 1))
    if wrong.any():
        raise ValueError(f"magnitude out of range: at element {int(np.argmax(wrong))}")


def _bit_lengths(values: Elements) -> Indices:
    powers = np.uint64(1) << np.arange(8 * values.itemsize, dtype=np.uint64)
    return np.searchsorted(powers, values.astype(np.uint64), side="right")


def gap_encode(
    n: int,
    positions: Positions,
    symbols: Elements,
    table_symbols: NDArray[np.uint64],
    table_lengths: NDArray[np.uint8],
    escape_length: int,
) -> bytes:
    """Return the gap block of n elements whose changes at `positions`, ascending, at least one, carry `symbols`.

    The table's entries are sorted by length, then symbol (FORMAT.md 5.6, 5.7). `escape_length` is -1 in a table
    without an escape, and 0 in one that has nothing else.
    """
    bits = 8 * _width(symbols)
    _check_positions(n, positions)
    _check_sizes(positions, symbols)
    lengths, codes = huffman_codes(bits, table_symbols, table_lengths, escape_length)
    entries = _table_entries(symbols, table_symbols, escape_length)
    escaped = entries == table_symbols.size
    starts = np.cumsum(lengths[entries] + bits * escaped)
    symbol_bits = np.zeros(int(starts[-1]), np.uint8)
    starts -= lengths[entries] + bits * escaped
    for bit in range(LONGEST_CODE):
        has = lengths[entries] > bit
        shift = lengths[entries[has]] - 1 - bit
        symbol_bits[starts[has] + bit] = codes[entries[has]] >> shift & 1
    for bit in range(bits):
        symbol_bits[starts[escaped] + lengths[-1] + bit] = symbols[escaped] >> bit & 1

    writer = BitWriter()
    writer.field(0, 1)
    writer.gamma(positions.size)
    writer.bits(position_code(n, positions.astype(np.int64)))
    writer.bits(symbol_bits)
    return writer.to_bytes()


def gap_decode(
    block: Bytes,
    n: int,
    width: int,
    table_symbols: NDArray[np.uint64],
    table_lengths: NDArray[np.uint8],
    escape_length: int,
) -> tuple[Positions, Elements]:
    """Return the ascending positions that a gap block of n elements changes, and their symbols (FORMAT.md 5.6).

    A symbol of 0 is returned like any other: whether it is malformed depends on the operation, which is not known here.
    """
    if width not in (1, 2, 4, 8):
        raise ValueError(f"no element width: {width}")
    lengths, codes = huffman_codes(8 * width, table_symbols, table_lengths, escape_length)
    entry_of = {
        f"{code:0{length}b}" if length else "": entry
        for entry, (length, code) in enumerate(zip(lengths.tolist(), codes.tolist(), strict=True))
    }
    code_lengths = sorted(set(lengths.tolist()))
    known = table_symbols.tolist()
    # Head, count, at most 3 bits a member in the position code, and a code and a field for each symbol.
    reader = BitReader(_bytes_of(block), limit=64 + n * (2 + width))
    reader.head()
    count = reader.gamma()
    if count > n:
        raise reader.malformed("more changes than elements")
    positions = read_position_code(reader, n, count)
    symbols = []
    for _ in range(count):
        entry = reader.code(entry_of, code_lengths)
        symbols.append(known[entry] if entry < len(known) else reader.field(8 * width))
    end = reader.end()
    if end != len(reader):
        raise ValueError(f"malformed block: bytes that nothing reads: at byte {end}")
    return positions.astype(np.uint32), np.array(symbols, f"<u{width}")


def position_bits(n: int, positions: Positions) -> int:
    """Return how many bits a gap block spends on the count and the positions of its changes, at least one."""
    _check_positions(n, positions)
    gaps, parameter = rice_gaps(n, positions.astype(np.int64))
    return 2 * int(positions.size).bit_length() - 1 + int((gaps >> parameter).sum()) + gaps.size * (1 + parameter)


def _table_entries(symbols: Elements, table_symbols: NDArray[np.uint64], escape_length: int) -> Indices:
    """Return the entry of each symbol in the table, the table's size for the escape."""
    order = np.argsort(table_symbols, kind="stable")
    ranks = np.searchsorted(table_symbols[order], symbols.astype(np.uint64))
    entries = np.append(order, table_symbols.size)[ranks]
    entries[np.append(table_symbols, np.uint64(0))[entries] != symbols] = table_symbols.size
    missing = entries == table_symbols.size
    if escape_length == -1 and missing.any():
        raise ValueError(f"symbol without a code: at element {int(np.argmax(missing))}")
    return entries


def _bytes_of(data: Bytes) -> NDArray[np.uint8]:
    if isinstance(data, np.ndarray):
        if data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError(f"not a contiguous array of rank 1: shape {data.shape}")
        return data.view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _width(*arrays: Elements) -> int:
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind != "u" or array.dtype != arrays[0].dtype:
            raise ValueError(f"not elements of one width: {array.dtype} of shape {array.shape}")
    return arrays[0].itemsize


def _check_uint32(positions: Positions) -> None:
    if positions.ndim != 1 or positions.dtype != np.uint32:
        raise ValueError(f"not positions: {positions.dtype} of shape {positions.shape}")


def _check_sizes(*arrays: NDArray[Any]) -> None:
    for array in arrays:
        if array.size != arrays[0].size:
            raise ValueError(
                f"sizes differ: {arrays[0].size} and {array.size}: at element {min(arrays[0].size, array.size)}"
            )


def _check_offset(offset: int) -> None:
    if not 0 <= offset <= 1 << 62:
        raise ValueError(f"no offset in a tensor: {offset}")


def _check_positions(n: int, positions: Positions) -> None:
    _check_uint32(positions)
    if not positions.size:
        raise ValueError("no positions")
    descending = positions[1:] <= positions[:-1]
    if descending.any():
        raise ValueError(f"positions not ascending: at element {int(np.argmax(descending)) + 1}")
    if int(positions[-1]) >= n:
        raise ValueError(f"position outside of {n} elements: at element {int(np.searchsorted(positions, n))}")
