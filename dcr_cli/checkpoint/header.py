"""The safetensors container: a strict reader of headers, a writer, and the dtypes.

It is at least as strict as the reference implementation: whatever is accepted here, that one accepts too. It refuses
more in these points only: a key that stands twice, an integer that does not fit 64 bits, more than 16 levels of JSON,
and tensors or dtypes that are not written in their plain form (an object; a string). Whose files these are is not this
module's business.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.file_kinds import check_no_other_file, file_kind
from dcr_cli.checkpoint.json_text import MAX_U64, check_levels, load_json, plain_object
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import ConflictError, DamagedError, LocalError, hint_of

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
# What helps when a file is not as it was written.
COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of FORMAT.md section 2. `bits` is the size of an element as shapes count it: 4 or 6 when packed."""

    name: str
    code: int
    width: int
    exponent_bits: int
    exponent_shift: int
    bits: int

    @property
    def is_packed(self) -> bool:
        return self.bits < 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a header; its bytes are `begin` to `end`, counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header. `raw` is the 8 length bytes and the header, as in the file; tensors are in data order."""

    raw: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    data_bytes: int


def _dtype(name: str, code: int, bits: int, exponent_bits: int = 0, exponent_shift: int = 0) -> Dtype:
    return Dtype(name, code, max(bits // 8, 1), exponent_bits, exponent_shift, bits)


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        _dtype("BOOL", 1, 8),
        _dtype("U8", 2, 8),
        _dtype("I8", 3, 8),
        _dtype("F8_E5M2", 4, 8, 5, 2),
        _dtype("F8_E4M3", 5, 8, 4, 3),
        _dtype("F8_E8M0", 6, 8),
        _dtype("F8_E4M3FNUZ", 7, 8, 4, 3),
        _dtype("F8_E5M2FNUZ", 8, 8, 5, 2),
        _dtype("F4", 9, 4),
        _dtype("F6_E2M3", 10, 6),
        _dtype("F6_E3M2", 11, 6),
        _dtype("I16", 12, 16),
        _dtype("U16", 13, 16),
        _dtype("F16", 14, 16, 5, 10),
        _dtype("BF16", 15, 16, 8, 7),
        _dtype("I32", 16, 32),
        _dtype("U32", 17, 32),
        _dtype("F32", 18, 32, 8, 23),
        _dtype("C64", 19, 64),
        _dtype("F64", 20, 64, 11, 52),
        _dtype("I64", 21, 64),
        _dtype("U64", 22, 64),
    )
}
DTYPES_BY_CODE: dict[int, Dtype] = {dtype.code: dtype for dtype in DTYPES.values()}


def stored_elements(dtype: Dtype, shape: Sequence[int]) -> int:
    """Count the elements of a tensor as dcr codes them: bytes when the dtype is packed, else the shape's product."""
    elements = math.prod(shape)
    return elements * dtype.bits // 8 if dtype.is_packed else elements


# Reading


def read_header(fd: int, what: str) -> Header:
    """Read and check the header of the file behind `fd`; DamagedError names the kind of a file that is another one.

    Memory goes with the header, never with a length that the file merely claims.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(what, f"is {file_kind(status.st_mode)}, not a safetensors file")
    start = _pread(fd, min(status.st_size, 64), 0, what)
    length = header_bytes(start, status.st_size, what)
    return parse_header(_pread(fd, LENGTH_BYTES + length, 0, what), status.st_size, what)


def read_safetensors(
    data: bytes | memoryview, what: str, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[Header, memoryview]:
    """Split a safetensors file in memory into its header and a view of its data; the inverse of write_safetensors."""
    view = memoryview(data).cast("B")
    end = LENGTH_BYTES + header_bytes(bytes(view[:64]), len(view), what, max_header_bytes=max_header_bytes)
    return parse_header(bytes(view[:end]), len(view), what), view[end:]


def header_bytes(start: bytes, total_bytes: int, what: str, *, max_header_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return the length of the header that follows the 8 length bytes, from the first bytes of a file (64 are best)."""
    if not total_bytes:
        raise DamagedError(what, "is empty, not a safetensors file", hint=COPY_AGAIN)
    check_no_other_file(start, what, "a safetensors file")
    if total_bytes < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise DamagedError(what, f"has {total_bytes} bytes, too few for a safetensors file", hint=COPY_AGAIN)
    length: int = struct.unpack_from("<Q", start)[0]
    if length > max_header_bytes:
        raise DamagedError(what, f"states a header of {length} bytes, more than the {max_header_bytes} allowed")
    if length > total_bytes - LENGTH_BYTES:
        raise DamagedError(
            what,
            f"has {total_bytes} bytes, but its header alone should have {length}; is it cut short?",
            hint=COPY_AGAIN,
        )
    return length


def parse_header(raw: bytes, total_bytes: int | None, what: str) -> Header:
    """Check the 8 length bytes and header of a file of `total_bytes` bytes, of which nothing else is needed.

    None, where there is no file yet, stands for as many bytes as the tensors need.
    """
    if len(raw) != LENGTH_BYTES + header_bytes(raw[:64], len(raw) if total_bytes is None else total_bytes, what):
        raise DamagedError(what, f"has {len(raw) - LENGTH_BYTES} bytes of header, not as many as it states")
    members = load_json(raw[LENGTH_BYTES:], what, _header_object)
    if not isinstance(members, dict):
        raise DamagedError(what, "its header is not a JSON object of tensors")
    check_levels(members, what)
    metadata = _metadata(members.pop("__metadata__", None), what)
    tensors = [_entry(name, member, what) for name, member in members.items()]
    tensors.sort(key=_data_order)
    if total_bytes is None:
        total_bytes = len(raw) + (tensors[-1].end if tensors else 0)
    data_bytes = total_bytes - len(raw)
    _check_tiling(tensors, data_bytes, total_bytes, what)
    return Header(raw, metadata, tuple(tensors), data_bytes)


# A header of half a million tensors should not also be half a million dicts, so an object that looks like a tensor
# becomes this tuple as soon as it is parsed. Anything else stays a dict, for _entry to judge.
_Plain = tuple[str, tuple[int, ...], int, int]


def _header_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Plain:
    members = plain_object(pairs)
    return (_plain(members) or members) if len(members) == 3 else members


def _plain(members: dict[str, Any]) -> _Plain | None:
    dtype, shape, offsets = members.get("dtype"), members.get("shape"), members.get("data_offsets")
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        return None
    for number in (*shape, *offsets):
        if type(number) is not int or number < 0:
            return None
    return DTYPES[dtype].name if dtype in DTYPES else dtype, tuple(shape), offsets[0], offsets[1]


def _entry(name: str, member: Any, what: str) -> TensorEntry:
    plain = member if type(member) is tuple else _plain(member) if type(member) is dict else None
    if plain is None:
        raise DamagedError(what, f"tensor {shown(name)}: {_form_fault(member)}")
    dtype_name, shape, begin, end = plain
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise DamagedError(what, f"tensor {shown(name)}: unknown dtype {shown(dtype_name)}")
    if begin > end:
        raise DamagedError(what, f"tensor {shown(name)}: begins at byte {begin}, after its end at {end}")
    elements = 1
    for dimension in shape:
        elements *= dimension
        if elements > MAX_U64:
            break
    bits = elements * dtype.bits
    if bits > MAX_U64:
        raise DamagedError(what, f"tensor {shown(name)}: its shape has more elements than 64 bits can count")
    if bits % 8:
        raise DamagedError(what, f"tensor {shown(name)}: {elements} elements of {dtype.name} do not fill whole bytes")
    if bits != 8 * (end - begin):
        facts = f"its shape and dtype {dtype.name} make {bits // 8} bytes, its offsets {end - begin}"
        raise DamagedError(what, f"tensor {shown(name)}: {facts}")
    return TensorEntry(name, dtype_name, shape, begin, end)


def _form_fault(member: Any) -> str:
    if type(member) is not dict:
        return "it is not described by an object"
    for key in ("dtype", "shape", "data_offsets"):
        if key not in member:
            return f"{key} is missing"
    if type(member["dtype"]) is not str:
        return "dtype is not a string"
    if type(member["shape"]) is not list or not all(type(number) is int and number >= 0 for number in member["shape"]):
        return "shape is not a list of integers from 0 on"
    return "data_offsets is not two integers from 0 on"


def _data_order(entry: TensorEntry) -> tuple[int, int]:
    return entry.begin, entry.end


def _check_tiling(tensors: list[TensorEntry], data_bytes: int, total_bytes: int, what: str) -> None:
    position, before = 0, ""
    for entry in tensors:
        if entry.begin < position:
            facts = f"begins at byte {entry.begin}, but tensor {shown(before)} ends at {position}: they overlap"
            raise DamagedError(what, f"tensor {shown(entry.name)}: {facts}")
        if entry.begin > position:
            facts = f"begins at byte {entry.begin}, leaving a gap from {position} that belongs to no tensor"
            raise DamagedError(what, f"tensor {shown(entry.name)}: {facts}")
        position, before = entry.end, entry.name
    if position > data_bytes:
        expected = total_bytes - data_bytes + position
        raise DamagedError(
            what,
            f"has {total_bytes} bytes, but its tensors, up to {shown(before)}, need {expected}; it is cut short",
            hint=COPY_AGAIN,
        )
    if position < data_bytes:
        expected = total_bytes - data_bytes + position
        raise DamagedError(
            what, f"has {total_bytes} bytes, {data_bytes - position} more than its tensors need ({expected})"
        )


def _metadata(value: Any, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise DamagedError(what, "__metadata__ is not an object of strings")
    return value


# Writing


def write_safetensors(columns: Mapping[str, tuple[str, Sequence[int], Any]], metadata: Mapping[str, str]) -> bytes:
    """Build a safetensors file from {name: (dtype, shape, bytes-like)}. Equal arguments give equal bytes.

    Wide dtypes come first, and the data starts at a multiple of 8, so that every column is aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[bytes | memoryview] = []
    position = 0
    for name, (dtype, shape, data) in sorted(columns.items(), key=lambda column: -DTYPES[column[1][0]].width):
        view = bytes_view(data)
        if 8 * view.nbytes != math.prod(shape) * DTYPES[dtype].bits:
            raise ValueError(f"column {name}: {view.nbytes} bytes do not have shape {list(shape)} of {dtype}")
        end = position + view.nbytes
        header[name] = {
            "dtype": dtype,
            "shape": [int(dimension) for dimension in shape],
            "data_offsets": [position, end],
        }
        parts.append(view)
        position = end
    return b"".join([_encode_header(header), *parts])


def write_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Build the header of a file of tensors that lie in this order, from {name: (dtype, shape)}, without their data."""
    header = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * DTYPES[dtype].bits // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return _encode_header(header)


def _encode_header(members: Mapping[str, Any]) -> bytes:
    """The 8 length bytes and the header; what follows is at a multiple of 8."""
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_view(buffer: Any) -> memoryview:
    """Return the bytes of a C-contiguous bytes-like object, of whatever shape, without a copy."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


# Files that are no safetensors files


def _pread(fd: int, size: int, offset: int, what: str) -> bytes:
    parts: list[bytes] = []
    try:
        while size:
            part = os.pread(fd, size, offset)
            if not part:
                raise ConflictError(
                    what, "changed while reading: it became shorter", hint="try again when nothing writes there"
                )
            parts.append(part)
            size -= len(part)
            offset += len(part)
    except OSError as error:
        raise LocalError(what, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)
