from typing import Any, TypeAlias

from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]

def digest(data: Buffer, offset: int, sums: Buffer, /) -> None: ...
def digest_spans(data: Buffer, begins: Buffer, ends: Buffer, sums: Buffer, /) -> None: ...
def digest_changes(width: int, offset: int, positions: Buffer, old: Buffer, new: Buffer, sums: Buffer, /) -> None: ...
def scan(width: int, base: Buffer, target: Buffer, positions: Buffer, /) -> int: ...
def gather(width: int, elements: Buffer, positions: Buffer, out: Buffer, /) -> None: ...
def patch(width: int, positions: Buffer, values: Buffer, out: Buffer, /) -> None: ...
def copy_box(width: int, out_begin: int, source_begin: int, axes: Buffer, source: Buffer, out: Buffer, /) -> None: ...
def patch_xor(width: int, positions: Buffer, masks: Buffer, out: Buffer, /) -> None: ...
def compare(
    width: int,
    exponent_bits: int | None,
    exponent_shift: int,
    offset: int,
    base: Buffer,
    target: Buffer,
    sums: Buffer,
    positions: Buffer,
    old: Buffer,
    new: Buffer,
    class_counts: Buffer,
    magnitudes: Buffer,
    scratch: Buffer,
    /,
) -> tuple[int, bytes | None]: ...
def draft(
    width: int,
    exponent_bits: int,
    exponent_shift: int,
    top: int,
    members: Buffer,
    ranks: Buffer,
    old: Buffer,
    new: Buffer,
    class_counts: Buffer,
    magnitudes: Buffer,
    scratch: Buffer,
    /,
) -> bytes: ...
def context_decode(
    width: int,
    exponent_bits: int,
    exponent_shift: int,
    offset: int,
    stream: Buffer,
    base: Buffer,
    states: Buffer,
    positions: Buffer,
    values: Buffer,
    scratch: Buffer,
    sums: Buffer,
    out: Buffer | None,
    /,
) -> int: ...
def magnitude_bins(width: int, class_counts: Buffer, magnitudes: Buffer, bins: Buffer, /) -> None: ...
def magnitude_encode(
    width: int, class_counts: Buffer, magnitudes: Buffer, states: Buffer, scratch: Buffer, /
) -> bytes | None: ...
def position_bits(members: int, positions: Buffer, /) -> int: ...
def gap_encode(
    width: int,
    members: int,
    escape_length: int,
    table_symbols: Buffer,
    table_lengths: Buffer,
    positions: Buffer,
    symbols: Buffer,
    scratch: Buffer,
    /,
) -> bytes: ...
def gap_decode(
    width: int,
    members: int,
    escape_length: int,
    table_symbols: Buffer,
    table_lengths: Buffer,
    stream: Buffer,
    positions: Buffer,
    symbols: Buffer,
    /,
) -> int: ...
def compare_bytes(members: int, /) -> int: ...
def draft_bytes(members: int, changed: int, /) -> int: ...
def decode_bytes(members: int, /) -> int: ...
def gap_bytes(members: int, changed: int, width: int, /) -> int: ...
def levels() -> list[str]: ...
def level() -> str: ...
def set_level(name: str, /) -> None: ...
