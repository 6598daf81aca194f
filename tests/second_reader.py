"""A second reader of deltas, written from FORMAT.md alone: plain Python and NumPy, nothing of dcr_cli or dcr_kernels.

It reads for comparison, not for speed. The numbers in brackets are those of the rules of FORMAT.md, section 9.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import blake3
import numpy as np
import numpy.typing as npt
import zstandard

Elements = npt.NDArray[np.unsignedinteger[Any]]
Indices = npt.NDArray[np.int64]

MEBIBYTE = 1 << 20
BLOCK_BYTES = 524288
WHOLE, GAP_XOR, GAP_OVERWRITE, CONTEXT = 1, 2, 3, 4
SHARD, SIDECAR, WEIGHT_MAP = 1, 2, 3


class MalformedError(ValueError):
    """The delta, or the base under it, breaks a rule of the format."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise MalformedError(what)


class Dtype(NamedTuple):
    """A row of the table in section 2; bits are those of one member of a shape, which F4 and F6 tensors pack."""

    code: int
    name: str
    width: int
    bits: int
    exponent_bits: int = 0
    exponent_shift: int = 0


ONE_BYTE = "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2"
WIDTHS = {1: ONE_BYTE, 2: "I16 U16 F16 BF16", 4: "I32 U32 F32", 8: "C64 F64 I64 U64"}
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
EXPONENTS = {"F8_E5M2": (5, 2), "F8_E4M3": (4, 3), "F8_E4M3FNUZ": (4, 3), "F8_E5M2FNUZ": (5, 2)}
EXPONENTS |= {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}
NAMES = [(name, width) for width, names in WIDTHS.items() for name in names.split()]
DTYPES = [
    Dtype(code, name, width, PACKED_BITS.get(name, 8 * width), *EXPONENTS.get(name, (0, 0)))
    for code, (name, width) in enumerate(NAMES, start=1)
]
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_CODE = {dtype.code: dtype for dtype in DTYPES}


class Tensor(NamedTuple):
    """A tensor of a safetensors file: the dtype's name, the shape, and the bytes as they lie there."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one piece or file: the bytes that hold them, and the head of their payload."""

    data: bytes
    block_count: int
    states: dict[int, list[list[int]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that was coded together; box holds starts, steps and counts, or is None for all of it."""

    encoding: int
    changed_elements: int
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    element_count: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """How a tensor of the target is made: from which tensor of the base, by which pieces, to which digest."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    source: str | None
    pieces: tuple[Piece, ...]
    digest: bytes

    @property
    def element_count(self) -> int:
        return count_elements(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TargetFile:
    """How a file of the target is made, of a shard the 8 length bytes and the header."""

    path: str
    kind: int
    size_bytes: int
    blake3: bytes
    runs: tuple[Run, ...]


class State(NamedTuple):
    """What a checkpoint is: its content digest and its files digest, as the commit writes them."""

    content: str
    files: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose documents and payloads have been read and agree with each other; no block is decoded yet."""

    base: State
    target: State
    tensors: tuple[TargetTensor, ...]
    files: tuple[TargetFile, ...]
    removed: tuple[str, ...]
    removed_files: dict[str, bytes]


# Section 1: JSON, safetensors files, zstd frames, bit streams.


def parse_json(text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(pairs)) == len(pairs), "a key twice in JSON [2]")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise MalformedError(f"{constant} in JSON [2]")

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    try:
        require(not text.startswith(b"\xef\xbb\xbf"), "a byte-order mark [2]")
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # A lone surrogate does not encode.
    except (RecursionError, UnicodeError, ValueError) as error:
        raise MalformedError(f"not JSON: {error} [2]") from error
    require(depth(value) <= 16, "JSON too deep [2]")
    return value


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def parse_header(header: bytes) -> tuple[dict[str, str], dict[str, tuple[Dtype, tuple[int, ...], int, int]], int]:
    """Parse a header: its metadata, each tensor's dtype, shape, begin and end, and how many bytes they tile."""
    fields = parse_json(header)
    require(isinstance(fields, dict), "a header is an object [2]")
    metadata = fields.pop("__metadata__", None) or {}
    require(isinstance(metadata, dict) and all(type(value) is str for value in metadata.values()), "metadata [2]")
    tensors = {}
    for name, entry in fields.items():
        require(isinstance(entry, dict) and entry.keys() >= {"dtype", "shape", "data_offsets"}, f"{name} [2]")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        require(type(dtype) is str and dtype in BY_NAME, f"dtype of {name} [4]")
        require(type(shape) is list and type(offsets) is list and len(offsets) == 2, f"entry of {name} [4]")
        require(all(type(value) is int and 0 <= value < 1 << 64 for value in shape + offsets), f"numbers of {name} [4]")
        begin, end = offsets
        require(math.prod(shape) * BY_NAME[dtype].bits == 8 * (end - begin), f"bytes of {name} [4]")
        tensors[name] = BY_NAME[dtype], tuple(shape), begin, end
    position = 0
    for begin, end in sorted((begin, end) for _, _, begin, end in tensors.values()):
        require(begin == position, "tensors do not tile the data [3]")
        position = end
    return metadata, tensors, position


def split_header(data: bytes, limit: int = 100_000_000) -> tuple[bytes, bytes]:
    """Split a file into its 8 length bytes with the header, and the data."""
    length = int.from_bytes(data[:8], "little")
    require(len(data) >= 8 and length <= min(limit, len(data) - 8), "header length [1]")
    return data[: 8 + length], data[8 + length :]


def parse_safetensors(data: bytes, limit: int = 100_000_000) -> tuple[dict[str, str], dict[str, Tensor], bytes]:
    """Parse a whole file: metadata, tensors, and the header with its length."""
    header, body = split_header(data, limit)
    metadata, entries, size = parse_header(header[8:])
    require(size == len(body), "tensors do not tile the data [3]")
    tensors = {name: Tensor(dtype.name, shape, body[a:b]) for name, (dtype, shape, a, b) in entries.items()}
    return metadata, tensors, header


def decompress(frame: bytes, window_bytes: int, content_bytes: int) -> bytes:
    """Decode exactly one zstd frame of at most the given window and content."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        require(frame[:4] == b"\x28\xb5\x2f\xfd", "no zstd frame [5, 64]")
        require(parameters.content_size <= content_bytes, "the frame states no size, or a larger one [6, 64]")
        require(parameters.window_size <= window_bytes, "the frame's window is too large [7, 64]")
        decoder = zstandard.ZstdDecompressor().decompressobj()
        content = decoder.decompress(frame)
    except zstandard.ZstdError as error:
        raise MalformedError(f"zstd: {error} [5, 64]") from error
    require(decoder.eof and not decoder.unused_data, "not exactly one zstd frame [5, 64]")
    require(len(content) == parameters.content_size, "the frame states another size [6, 64]")
    return content


class Bits:
    """A bit stream, least significant bit first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tobytes()

    def field(self, width: int) -> int:
        if width == 0:
            return 0
        end = self.position + width
        require(end <= len(self.bits), "a field ends after its stream [62]")
        value = int.from_bytes(self.data[self.position >> 3 : (end + 7) >> 3], "little") >> (self.position & 7)
        self.position = end
        return value & ((1 << width) - 1)

    def fixed(self, count: int) -> bytes:
        """Read count bits, a byte for each."""
        self.position += count
        require(self.position <= len(self.bits), "a field ends after its stream [62]")
        return self.bits[self.position - count : self.position]

    def unary(self) -> int:
        """Count the zeros before the next one, and pass it."""
        end = self.bits.find(1, self.position)
        require(end >= 0, "a code ends after its stream [62]")
        zeros = end - self.position
        self.position = end + 1
        return zeros

    def gamma(self) -> int:
        low_bits = self.unary()
        require(low_bits < 64, "a gamma code of 2^64 or more [62]")
        return 1 << low_bits | self.field(low_bits)

    def align(self) -> int:
        """Pass the zero bits to the byte boundary, and return the bytes read."""
        require(self.field(-self.position % 8) == 0, "the bits that fill the last byte are not 0 [62]")
        return self.position // 8


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        require(position < len(data), "a varint ends after its run or block [60]")
        byte = data[position]
        position += 1
        value |= (byte & 127) << 7 * index
        if byte < 128:
            require((byte or index == 0) and value < 1 << 64, "a varint is not in its shortest form [61]")
            return value, position
    raise MalformedError("a varint of more than 10 bytes [61]")


# Sections 2 and 3: elements and digests.


def count_elements(dtype: Dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.bits // (8 * dtype.width)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def digest_tensor(data: bytes) -> bytes:
    units = np.frombuffer(data + bytes(-len(data) % 8192), "<i2").astype(np.int64).reshape(-1, 4096)
    sums = []
    for q in range(4):
        column_numbers = np.arange(4096, dtype=np.uint64) + np.uint64(2**62 + 4096 * q)
        columns = (mix(column_numbers).astype(np.uint16) | np.uint16(1)).view(np.int16).astype(np.int64)
        row_numbers = np.arange(len(units), dtype=np.uint64) + np.uint64(2**60 * q)
        rows = mix(row_numbers) & np.uint64(0xFFFFFFFF) | np.uint64(1)
        # Arrays of u64 wrap at 2^64, which keeps sums right modulo 2^32.
        sums.append(int(((units @ columns).astype(np.uint64) * rows).sum()) % 2**32)
    return b"".join(part.to_bytes(4, "little") for part in sums)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def named_blake3(data: bytes) -> str:
    return "blake3:" + blake3.blake3(data).hexdigest()


def digest_content(tensors: Iterable[tuple[str, Dtype, tuple[int, ...], bytes]]) -> str:
    """Digest the records of tensors: name, dtype, shape and digest of each."""
    records = b""
    for name, dtype, shape, digest in sorted(tensors, key=lambda tensor: tensor[0].encode()):
        records += u32(len(name.encode())) + name.encode() + bytes([dtype.code]) + u32(len(shape))
        records += b"".join(dimension.to_bytes(8, "little") for dimension in shape) + digest
    return named_blake3(records)


def digest_files(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Digest the records of files: path, kind and blake3 of each."""
    records = b""
    for path, kind, digest in sorted(files, key=lambda file: file[0].encode()):
        records += u32(len(path.encode())) + path.encode() + bytes([1 if kind == SHARD else 2]) + digest
    return named_blake3(records)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, bytes]]]:
    """Read a checkpoint: its tensors, and of each file the kind and the bytes, of a shard those of the header."""
    tensors: dict[str, Tensor] = {}
    files = {}
    weight_maps = [path.name for path in folder.glob("*.safetensors.index.json")]
    if "model.safetensors.index.json" in weight_maps:
        weight_maps = ["model.safetensors.index.json"]
    mapped = {path for name in weight_maps for path in parse_json((folder / name).read_bytes())["weight_map"].values()}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if name in mapped or ("/" not in name and name.endswith(".safetensors")):
            _, found, header = parse_safetensors(path.read_bytes())
            require(not tensors.keys() & found.keys(), f"{name}: a tensor is in two shards")
            tensors.update(found)
            files[name] = SHARD, header
        else:
            files[name] = WEIGHT_MAP if weight_maps == [name] else SIDECAR, path.read_bytes()
    return tensors, files


# Sections 7, 8 and 6: the documents, and the payloads they name.


def is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("blake3:[0-9a-f]{64}", value) is not None


def parse_line(text: bytes, limit: int = 65536) -> dict[str, Any]:
    """Parse a document that is one line of JSON."""
    require(len(text) <= limit, "the document is too large [8]")
    document: dict[str, Any] = parse_json(text)
    require(isinstance(document, dict), "the document is no object [8]")
    require(text.endswith(b"\n") and text.count(b"\n") == 1, "the document is not one line [9]")
    require(json.dumps(document) == json.dumps(document, sort_keys=True), "keys are not sorted [9]")
    require(document.get("format") == "dcr-1", "format [10]")
    require(document.get("requires") == [], "requires [11]")
    return document


def check_commit(commit: dict[str, Any]) -> None:
    """Check the members of the commit of a delta."""
    members = {"base": "content files", "target": "content files", "digests": "blake3 bytes"}
    members |= {"manifest": "blake3 bytes decoded", "payloads": "bytes count"}
    for member, fields in members.items():
        value = commit.get(member)
        require(isinstance(value, dict) and value.keys() >= set(fields.split()), f"{member} [12]")
        for field in fields.split():
            is_right = is_count if field in ("bytes", "count") else is_digest
            require(is_right(commit[member][field]), f"{member}.{field} [13, 14]")
    require(all(isinstance(commit.get(member), str) for member in ("created", "publisher")), "created [12]")
    require(commit["payloads"]["count"] <= 1_000_000, "more than 1 000 000 payloads [14]")


def read_document(path: Path, named: dict[str, Any], kind: str) -> tuple[dict[str, Tensor], bytes]:
    """Read manifest.zst or digests.zst: its columns, and the decoded frame."""
    data = path.read_bytes()
    require(len(data) == named["bytes"], f"{path.name} has another size [15, 16]")
    require(named_blake3(data) == named["blake3"], f"{path.name} has another blake3 [15, 16]")
    decoded = decompress(data, 128 * MEBIBYTE, 256 * MEBIBYTE)
    metadata, columns, _ = parse_safetensors(decoded, limit=65536)
    require(metadata.get("format") == "dcr-1" and metadata.get("kind") == kind, f"{path.name}: metadata [18, 19]")
    require(parse_json(metadata.get("requires", "").encode()) == [], f"{path.name}: requires [20]")
    return columns, decoded


class Columns:
    """The columns of the manifest, each by its name, with the dtype and row count that section 7 says."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def column(self, name: str, dtype: str, rank: int) -> Tensor:
        require(name in self.tensors, f"{name} is missing [21]")
        column = self.tensors[name]
        require(column.dtype == dtype and len(column.shape) == rank, f"dtype or rank of {name} [21]")
        return column

    def numbers(self, name: str, dtype: str, rows: int | None = None) -> list[int]:
        column = self.column(name, dtype, 1)
        require(rows is None or column.shape == (rows,), f"{name} has another number of rows [22]")
        return [int(value) for value in np.frombuffer(column.data, f"<u{BY_NAME[dtype].width}")]

    def digests(self, name: str, width: int, rows: int) -> list[bytes]:
        column = self.column(name, "U8", 2)
        require(column.shape == (rows, width), f"{name} has another number of rows [22, 26]")
        return [column.data[width * row : width * (row + 1)] for row in range(rows)]

    def texts(self, name: str) -> list[str]:
        lengths = self.numbers(f"{name}.lengths", "U32")
        data = bytes(self.numbers(f"{name}.bytes", "U8", sum(lengths)))
        require(max(lengths, default=0) <= 65536, f"{name} has a text of more than 65 536 bytes [25]")
        ends = np.cumsum(lengths, dtype=np.int64)
        try:
            return [data[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]
        except UnicodeDecodeError as error:
            raise MalformedError(f"{name} is not UTF-8 [24]") from error


def is_canonical(names: list[str]) -> bool:
    encoded = [name.encode() for name in names]
    return encoded == sorted(set(encoded))


def is_safe(path: str) -> bool:
    parts = path.split("/")
    return (
        len(path.encode()) <= 4096
        and all(0 < len(part.encode()) <= 255 and not part.startswith(".") for part in parts)
        and re.search(r"[\x00-\x1f\x7f-\x9f\\]|^[A-Za-z]:", path) is None
    )


def read_delta(folder: str | Path) -> Delta:
    """Read a delta's documents and payloads, and check all that can be said before a block is decoded.

    Raises MalformedError.
    """
    return read_delta_of(parse_line((Path(folder) / "commit.json").read_bytes()), Path(folder))


def read_delta_of(commit: dict[str, Any], folder: Path) -> Delta:
    """Read the delta of a commit, wherever that lies."""
    check_commit(commit)
    tensors, decoded = read_document(folder / "manifest.zst", commit["manifest"], "manifest")
    require(named_blake3(decoded) == commit["manifest"]["decoded"], "manifest.decoded [15]")
    columns = Columns(tensors)
    other_digests = Columns(read_document(folder / "digests.zst", commit["digests"], "digests")[0])
    sizes = columns.numbers("payload.bytes", "U64")
    require(len(sizes) == commit["payloads"]["count"], "number of payloads [17]")
    require(sum(sizes) == commit["payloads"]["bytes"], "size of payloads [17]")
    digests = columns.digests("payload.blake3", 32, len(sizes))
    runs = read_runs(
        columns, sizes, [read_payload(folder, *item) for item in enumerate(zip(sizes, digests, strict=True))]
    )
    target_tensors = read_tensors(columns, other_digests, runs)
    files = read_files(columns, runs)
    require(next(runs, None) is None, "runs of no piece and no file [49]")
    removed = columns.texts("removed")
    require(is_canonical(removed), "order of removed [32]")
    require(not {tensor.name for tensor in target_tensors} & set(removed), "removed and in the target [32]")
    base, target = (State(commit[side]["content"], commit[side]["files"]) for side in ("base", "target"))
    skipped = columns.texts("skipped")
    require(all(skipped) and sum(len(text.encode()) for text in skipped) <= 16384, "patterns of skipped [25]")
    removed_files = read_removed_files(columns, [file.path for file in files])
    for paths in ([file.path for file in files], removed_files):
        require(not skipped or sum(len(path.encode()) for path in paths) <= 16 * MEBIBYTE, "paths and skipped [25]")
    for path in [*(file.path for file in files), *removed_files]:
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        names = [path, *above, *(folder + "/" for folder in above)]
        require(not any(fnmatchcase(name, text) for name in names for text in skipped), f"{path} is skipped [25]")
    return Delta(base, target, target_tensors, files, tuple(removed), removed_files)


def read_payload(folder: Path, index: int, named: tuple[int, bytes]) -> tuple[dict[int, list[list[int]]], bytes]:
    """Read a payload: the starting states of its head, and the data after it."""
    path = folder / "payloads" / f"{index:06d}.safetensors"
    require(path.is_file(), f"{path.name} is missing [54]")
    size, digest = named
    require(9 <= size <= 64 * MEBIBYTE + 65536 + 8, f"size of {path.name} [53]")
    data = path.read_bytes()
    require((len(data), blake3.blake3(data).digest()) == (size, digest), f"{path.name}: size or blake3 [54]")
    metadata, tensors, _ = parse_safetensors(data, limit=65536)
    require(metadata.get("format") == "dcr-1" and metadata.get("kind") == "payload", f"{path.name}: metadata [55]")
    require(metadata.get("index") == str(index), f"{path.name}: index [55]")
    require(tensors.keys() == {"blocks"}, f"{path.name}: tensors [56]")
    dtype, shape, blocks = tensors["blocks"]
    require(dtype == "U8" and len(shape) == 1 and len(blocks) <= 64 * MEBIBYTE, f"{path.name}: blocks [56]")
    require(metadata.get("blake3") == blake3.blake3(blocks).hexdigest(), f"{path.name}: blake3 of the data [57]")
    states, head_bytes = read_head(blocks)
    return states, blocks[head_bytes:]


def read_head(data: bytes) -> tuple[dict[int, list[list[int]]], int]:
    """Read the starting states (6.1) of each width and class, and return them with the head's size in bytes."""
    bits = Bits(data[:4096])  # The longest head has less than 2200 bytes.
    states = {}
    for width in (1, 2, 4, 8):
        states[width] = [[32768] * 32 for _ in range(16)]
        for row in states[width] if bits.field(1) else ():
            given = bits.gamma() - 1
            require(given <= 32, "a class has more than 32 states [58]")
            row[:given] = [256 * bits.field(8) + 128 for _ in range(given)]
    return states, bits.align()


def read_runs(
    columns: Columns, sizes: list[int], payloads: list[tuple[dict[int, list[list[int]]], bytes]]
) -> Iterator[Run]:
    payload_numbers = columns.numbers("run.payload", "U32")
    offsets, lengths, counts = (
        columns.numbers(name, "U32", len(payload_numbers)) for name in ("run.offset", "run.bytes", "run.blocks")
    )
    for payload, offset, length, count in zip(payload_numbers, offsets, lengths, counts, strict=True):
        require(payload < len(payloads), "a run in no payload [50]")
        require(1 <= count <= length, "blocks of a run [51]")
        states, data = payloads[payload]
        require(offset + length <= min(64 * MEBIBYTE, sizes[payload], len(data)), "a run ends too late [52, 59]")
        yield Run(data[offset : offset + length], count, states)


def take_runs(runs: Iterator[Run], count: int, block_count: int) -> tuple[Run, ...]:
    taken = tuple(islice(runs, count))
    require(len(taken) == count, "too few runs [49]")
    require(sum(run.block_count for run in taken) == block_count, "blocks of runs [42, 48]")
    return taken


def read_tensors(columns: Columns, other_digests: Columns, runs: Iterator[Run]) -> tuple[TargetTensor, ...]:
    names = columns.texts("tensor.name")
    require(is_canonical(names), "order of names [27]")
    codes = columns.numbers("tensor.dtype", "U8", len(names))
    require(set(codes) <= BY_CODE.keys(), "dtype [28]")
    ranks, source_numbers, piece_counts = (
        columns.numbers(f"tensor.{name}", "U32", len(names)) for name in ("rank", "source", "pieces")
    )
    dimensions = iter(columns.numbers("tensor.shape", "U64", sum(ranks)))
    decoded_count = sum(count > 0 for count in piece_counts)
    decoded = iter(columns.digests("tensor.digest", 16, decoded_count))
    others = iter(other_digests.digests("digest", 16, len(names) - decoded_count))
    sources = columns.texts("source")
    require(is_canonical(sources), "order of source [31]")
    require(set(range(2, len(sources) + 2)) <= set(source_numbers), "a source of no tensor [31]")
    encodings, has_box = (columns.numbers(f"piece.{name}", "U8", sum(piece_counts)) for name in ("encoding", "box"))
    changed = columns.numbers("piece.changed", "U64", sum(piece_counts))
    run_counts = columns.numbers("piece.runs", "U32", sum(piece_counts))
    pieces = zip(encodings, changed, has_box, run_counts, strict=True)
    boxes = iter(columns.numbers("box", "U64"))
    tensors = []
    for name, code, rank, number, count in zip(names, codes, ranks, source_numbers, piece_counts, strict=True):
        require(number < len(sources) + 2, f"source of {name} [30]")
        source = None if number == 0 else name if number == 1 else sources[number - 2]
        dtype, shape = BY_CODE[code], tuple(next(dimensions) for _ in range(rank))
        require(math.prod(shape) * dtype.bits < 2**64, f"{name} is too large [29]")
        require(math.prod(shape) * dtype.bits % 8 == 0, f"{name} does not fill bytes [29]")
        own = tuple(read_piece(next(pieces), boxes, dtype, shape, runs) for _ in range(count))
        digest = next(decoded if own else others)
        tensor = TargetTensor(name, dtype, shape, source, own, digest)
        require(not own or tensor.element_count, f"{name} has pieces but no elements [33]")
        require(len(own) <= 65536, f"{name} has too many pieces [39]")
        require(len(own) <= 1 or all(piece.box for piece in own), f"{name} has a piece beside its whole [36]")
        if source is None:
            require(own or not tensor.element_count, f"{name} has neither source nor pieces [34]")
            require(all(piece.encoding == WHOLE for piece in own), f"{name} has no source [34]")
            covered = sum(piece.element_count for piece in own)
            require(covered == tensor.element_count, f"{name} is not covered [34]")
        tensors.append(tensor)
    require(next(boxes, None) is None, "too many numbers of boxes [22]")
    return tuple(tensors)


def read_piece(
    row: tuple[int, int, int, int], boxes: Iterator[int], dtype: Dtype, shape: tuple[int, ...], runs: Iterator[Run]
) -> Piece:
    encoding, changed_elements, has_box, run_count = row
    require(encoding in (WHOLE, GAP_XOR, GAP_OVERWRITE, CONTEXT), "encoding [35]")
    require(has_box in (0, 1), "piece.box [36]")
    element_count, box = count_elements(dtype, shape), None
    if has_box:
        require(1 <= len(shape) <= 64 and dtype.bits >= 8, "a box of such a tensor [37]")
        numbers = tuple(islice(boxes, 3 * len(shape)))
        require(len(numbers) == 3 * len(shape), "too few numbers of boxes [22]")
        starts, steps, counts = box = numbers[0 : len(shape)], numbers[len(shape) : -len(shape)], numbers[-len(shape) :]
        for dimension, start, step, count in zip(shape, starts, steps, counts, strict=True):
            require(step >= 1 and count >= 1 and start + (count - 1) * step < dimension, "box [38]")
        element_count = math.prod(counts)
    least = element_count if encoding == WHOLE else 1
    require(least <= changed_elements <= element_count, "piece.changed [41]")
    require(run_count >= 1, "piece.runs [49]")
    own = take_runs(runs, run_count, -(-element_count // (BLOCK_BYTES // dtype.width)))
    return Piece(encoding, changed_elements, box, element_count, own)


def read_files(columns: Columns, runs: Iterator[Run]) -> tuple[TargetFile, ...]:
    paths = columns.texts("file.path")
    require(all(map(is_safe, paths)), "a path is not safe [43]")
    require(is_canonical(paths), "order of paths [44]")
    folders = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    require(not folders & set(paths), "a path is the folder of another [44]")
    kinds = columns.numbers("file.kind", "U8", len(paths))
    sizes = columns.numbers("file.size", "U64", len(paths))
    digests = columns.digests("file.blake3", 32, len(paths))
    run_counts = columns.numbers("file.runs", "U32", len(paths))
    require(kinds.count(WEIGHT_MAP) <= 1, "two weight maps [46]")
    require(1 <= kinds.count(SHARD) <= 2**20, "number of shards [47]")
    sidecar_bytes = sum(size for kind, size in zip(kinds, sizes, strict=True) if kind == SIDECAR)
    require(sidecar_bytes <= 1024 * MEBIBYTE, "sidecars are too large [47]")
    check_names(dict(zip(paths, kinds, strict=True)))
    limits = {SHARD: (9, 100_000_008), SIDECAR: (0, 64 * MEBIBYTE), WEIGHT_MAP: (0, 100_000_000)}
    files = []
    for path, kind, size, digest, count in zip(paths, kinds, sizes, digests, run_counts, strict=True):
        require(kind in limits, f"kind of {path} [45]")
        least, most = limits[kind]
        require(least <= size <= most, f"size of {path} [47]")
        own = take_runs(runs, count, max(1, -(-size // BLOCK_BYTES)) if count else 0)
        files.append(TargetFile(path, kind, size, digest, own))
    return tuple(files)


def check_names(kinds: dict[str, int]) -> None:
    """Check that files of these paths and kinds can be those of one checkpoint (section 2)."""
    shards = [path for path, kind in kinds.items() if kind == SHARD]
    for path, kind in kinds.items():
        is_top = "/" not in path
        require(path.endswith(".safetensors") or kind != SHARD, f"kind of {path} [45]")
        require(kind == SHARD or not (is_top and path.endswith(".safetensors")), f"kind of {path} [45]")
        is_map = is_top and path.endswith(".safetensors.index.json")
        require(is_map == (kind == WEIGHT_MAP), f"kind of {path} [46]")
        is_copy = re.match(r"consolidated|original/", path) or re.search(r"\.(bin|pt|pth|gguf)$", path)
        require(kind != SIDECAR or not is_copy, f"{path} is a second copy of the weights [45]")
    if WEIGHT_MAP not in kinds.values():
        require(not any("/" in path for path in shards), "a shard that no weight map names [46]")
        others = [path.startswith("consolidated") for path in shards]
        require(all(others) or not any(others), "consolidated shards beside others [46]")
    sets: dict[tuple[str, int], list[int]] = {}
    for path in shards:
        number = re.fullmatch(r"(?s)(.*)-([0-9]+)-of-([0-9]+)\.safetensors", path)
        if number:
            sets.setdefault((number[1], int(number[3])), []).append(int(number[2]))
    for (_, count), numbers in sets.items():
        require(len(numbers) == count, "numbers of shards [47]")
        require(sorted(numbers) in ([*range(count)], [*range(1, count + 1)]), "numbers of shards [47]")


def check_weight_map(data: bytes, shard_of: dict[str, str], shards: set[str]) -> None:
    document = parse_json(data)
    require(isinstance(document, dict) and document.get("weight_map") == shard_of, "weight map [84]")
    require(shards == set(shard_of.values()), "a shard that the weight map does not name [84]")


def read_removed_files(columns: Columns, paths: list[str]) -> dict[str, bytes]:
    """Read which sidecars of the base the target has not, each with its blake3."""
    removed = columns.texts("removed.file")
    digests = columns.digests("removed.blake3", 32, len(removed))
    require(all(map(is_safe, removed)), "a removed path is not safe [43]")
    require(is_canonical(removed) and not set(removed) & set(paths), "removed.file [44]")
    suffixes = (".safetensors", ".safetensors.index.json")
    require(not any(path.endswith(suffixes) for path in removed if "/" not in path), "removed.file [44]")
    return dict(zip(removed, digests, strict=True))


# Section 5: blocks.


def decode_whole(data: bytes, width: int, count: int) -> bytes:
    """Decode a whole form (5.1) to the block's bytes."""
    require(data and data[0] >> width == 0, "mask [63]")
    position = 1
    planes = np.empty((width, count), np.uint8)
    for plane in range(width):
        size = count
        if data[0] >> plane & 1:
            size, position = read_varint(data, position)
        require(position + size <= len(data), "a plane ends after its block [63]")
        stored = data[position : position + size]
        if data[0] >> plane & 1:
            stored = decompress(stored, 8 * MEBIBYTE, count)
            require(len(stored) == count, "the content size of a plane [64]")
        planes[plane] = np.frombuffer(stored, np.uint8)
        position += size
    require(position == len(data), "bytes after the whole form [63]")
    return planes.T.tobytes()


def read_positions(bits: Bits, changed_count: int, members: Indices) -> Indices:
    """Read a position code (5.3): which members changed."""
    count = len(members)
    codes_unchanged = 2 * changed_count > count
    coded_count = count - changed_count if codes_unchanged else changed_count
    is_coded = np.zeros(count, bool)
    if coded_count:
        low_bits = (123 * (2 * (count - coded_count) + coded_count) // (512 * coded_count)).bit_length()
        position = -1
        for _ in range(coded_count):
            position += 1 + (bits.unary() << low_bits | bits.field(low_bits))
            require(position < count, "a position after the last member [67]")
            is_coded[position] = True
    return members[is_coded ^ codes_unchanged]


class RangeDecoder:
    """The adaptive binary decoder (5.4)."""

    def __init__(self, section: bytes) -> None:
        require(not section.endswith(b"\0"), "the section ends with a zero byte [72]")
        self.section = section
        self.range = 2**32 - 1
        self.code = int.from_bytes(section[:4].ljust(4, b"\0"), "big")
        self.position = 4

    def refill(self) -> None:
        while self.range < 1 << 24:
            self.range <<= 8
            self.code = self.code << 8 | (self.section[self.position] if self.position < len(self.section) else 0)
            self.position += 1

    def bit(self, states: list[int], index: int) -> int:
        state = states[index]
        bound = (self.range >> 16) * state
        bit = int(self.code >= bound)
        if bit:
            self.code -= bound
            self.range -= bound
            states[index] -= state >> 5
        else:
            self.range = bound
            states[index] += 65536 - state >> 5
        self.refill()
        return bit

    def plain_bit(self) -> int:
        self.range >>= 1
        bit = int(self.code >= self.range)
        self.code -= bit * self.range
        self.refill()
        return bit

    def magnitude(self, states: list[int], element_bits: int) -> int:
        exponent = 0
        while self.bit(states, min(exponent, 31)):
            exponent += 1
            require(exponent < element_bits, "a magnitude of 2^w or more [71]")
        value = 1
        for _ in range(exponent):
            value = value << 1 | self.plain_bit()
        return value


def decode_context(bits: Bits, dtype: Dtype, base: Elements, states: list[list[int]]) -> tuple[Elements, int]:
    """Decode a block after its head bit (5.5): its elements, and how many changed."""
    classes = np.zeros(len(base), np.int64)
    if dtype.exponent_bits:
        top = bits.field(dtype.exponent_bits)
        exponents = (base.astype(np.uint64) >> np.uint64(dtype.exponent_shift)).astype(np.int64)
        exponents &= (1 << dtype.exponent_bits) - 1
        require(256 * np.count_nonzero(exponents > top) <= len(base), "top is too small [70]")
        require(top == 0 or 256 * np.count_nonzero(exponents > top - 1) > len(base), "top is not the smallest [70]")
        classes = np.clip(top - exponents, 0, 15)
    members = [np.flatnonzero(classes == number) for number in range(16 if dtype.exponent_bits else 1)]
    changed_counts = [bits.gamma() - 1 for _ in members]
    require(any(changed_counts), "nothing changed [69]")
    for count, own in zip(changed_counts, members, strict=True):
        require(count <= len(own), "more changed elements than elements [69]")
    changed = [
        read_positions(bits, count, own) if count else own[:0]
        for count, own in zip(changed_counts, members, strict=True)
    ]
    indices = np.concatenate(changed)
    signs = bits.fixed(len(indices))
    decoder = RangeDecoder(bits.data[bits.align() :])
    element_bits = 8 * dtype.width
    magnitudes = [
        decoder.magnitude(row, element_bits)
        for own, row in zip(changed, map(list, states), strict=False)
        for _ in range(len(own))
    ]
    most = 1 << element_bits - 1
    require(all(size < most + sign for size, sign in zip(magnitudes, signs, strict=True)), "magnitude [71]")
    changes = [(-size if sign else size) % (2 * most) for size, sign in zip(magnitudes, signs, strict=True)]
    target = base.copy()
    target[indices] += np.array(changes, base.dtype)
    require(decoder.position >= len(decoder.section), "bytes that the decoder does not read [72]")
    return target, len(indices)


@dataclass(frozen=True, slots=True)
class HuffmanTable:
    """A code table (5.7): from the bits of each code to its symbol, or to None for the escape."""

    codes: dict[bytes, int | None]
    lengths: tuple[int, ...]

    def read(self, bits: Bits, element_bits: int) -> int:
        for length in self.lengths:
            code = bits.bits[bits.position : bits.position + length]
            if code in self.codes:
                bits.position += length
                symbol = self.codes[code]
                return bits.field(element_bits) if symbol is None else symbol
        raise MalformedError("a code ends after its stream [62]")


def read_huffman_table(data: bytes, element_bits: int) -> tuple[HuffmanTable, int]:
    """Read the table at the beginning of a run, and return it with its size in bytes."""
    # 2048 symbols of at most 63 bits fit, and what precedes them.
    bits = Bits(data[:32768])
    count = bits.gamma() - 1
    has_escape = bits.field(1)
    require(count <= 2048 and count + has_escape, "entries [75]")
    escape_length, counts = 0, [count]
    if count + has_escape > 1:
        escape_length = bits.field(4) if has_escape else 0
        require(not has_escape or 1 <= escape_length <= 12, "length of the escape [76]")
        counts = [0]
        while sum(counts) < count:
            require(len(counts) <= 12, "lengths do not add up [76]")
            counts.append(bits.gamma() - 1)
        require(sum(counts) == count, "lengths do not add up [76]")
    entries: list[tuple[int, int | None]] = []
    for length, own in enumerate(counts):
        symbol = -1
        for _ in range(own):
            symbol += bits.gamma()
            require(symbol < min(1 << element_bits, 1 << 32), "a symbol is too large [77]")
            entries.append((length, symbol))
    require(len({symbol for _, symbol in entries}) == count, "a symbol has two codes [77]")
    if has_escape:
        entries.append((escape_length, None))
    entries.sort(key=lambda entry: entry[0])  # Stable: symbols ascending, the escape after those of its length.
    require(sum(4096 >> length for length, _ in entries) == 4096, "the sum of 2^-length is not 1 [76]")
    codes, code, last = {}, 0, 0
    for length, entry in entries:
        code <<= length - last
        codes[bytes(code >> shift & 1 for shift in reversed(range(length)))] = entry
        code, last = code + 1, length
    return HuffmanTable(codes, tuple(sorted({length for length, _ in entries}))), bits.align()


def decode_gap(bits: Bits, dtype: Dtype, base: Elements, table: HuffmanTable, is_xor: bool) -> tuple[Elements, int]:
    """Decode a block after its head bit (5.6): its elements, and how many changed."""
    count = bits.gamma()
    target = base.copy()
    require(count <= len(base), "more changed elements than elements [68]")
    for index in read_positions(bits, count, np.arange(len(base))):
        symbol = table.read(bits, 8 * dtype.width)
        require(symbol or not is_xor, "a xor symbol is 0 [74]")
        target[index] = int(base[index]) ^ symbol if is_xor else symbol
    require(bits.align() == len(bits.data), "bytes after the block [73]")
    return target, count


def split_blocks(data: bytes, count: int) -> list[bytes]:
    """Split what follows the table of a run into its blocks (6.2)."""
    sizes, position = [], 0
    for _ in range(count):
        size, position = read_varint(data, position)
        sizes.append(size)
    require(position + sum(sizes) == len(data), "the blocks do not end with the run [60]")
    ends = np.cumsum(sizes, dtype=np.int64)
    return [data[position + end - size : position + end] for end, size in zip(ends, sizes, strict=True)]


def decode_block(
    data: bytes, piece: Piece, dtype: Dtype, base: Elements, run: Run, table: HuffmanTable | None
) -> tuple[Elements, int]:
    """Decode a block of a piece: its elements, and how many changed."""
    if not data:
        require(piece.encoding != WHOLE, "a whole block of size 0 [65]")
        return base, 0
    if piece.encoding == WHOLE:
        return np.frombuffer(decode_whole(data, dtype.width, len(base)), base.dtype), len(base)
    if data[0] & 1:
        require(data[0] == 1, "bits after the head bit are not 0 [66]")
        target = np.frombuffer(decode_whole(data[1:], dtype.width, len(base)), base.dtype)
        return target, int(np.count_nonzero(target != base))
    bits = Bits(data)
    bits.field(1)  # The head bit, 0.
    if piece.encoding == CONTEXT:
        return decode_context(bits, dtype, base, run.states[dtype.width])
    assert table is not None
    return decode_gap(bits, dtype, base, table, piece.encoding == GAP_XOR)


# Section 4 and what a receiver does.


def locate(piece: Piece, shape: tuple[int, ...], begin: int, end: int) -> slice | Indices:
    """Give the flat indices in the tensor of elements begin to end of a piece's enumeration."""
    if piece.box is None:
        return slice(begin, end)
    numbers = np.arange(begin, end)
    indices = np.zeros(len(numbers), np.int64)
    axes = zip(*piece.box, np.unravel_index(numbers, piece.box[2]), shape, strict=True)
    for start, step, _, coordinate, dimension in axes:
        indices = indices * dimension + start + step * coordinate
    return indices


def apply_piece(piece: Piece, tensor: TargetTensor, target: Elements, is_written: npt.NDArray[np.bool_]) -> None:
    """Decode a piece into target, which holds the source's elements, and mark what the piece has."""
    block_elements = BLOCK_BYTES // tensor.dtype.width
    begin = changed_elements = 0
    for run in piece.runs:
        table, table_bytes = None, 0
        if piece.encoding in (GAP_XOR, GAP_OVERWRITE):
            table, table_bytes = read_huffman_table(run.data, 8 * tensor.dtype.width)
        for data in split_blocks(run.data[table_bytes:], run.block_count):
            end = min(begin + block_elements, piece.element_count)
            where = locate(piece, tensor.shape, begin, end)
            require(not is_written[where].any(), f"pieces of {tensor.name} overlap [39]")
            is_written[where] = True
            target[where], changed = decode_block(data, piece, tensor.dtype, target[where], run, table)
            begin, changed_elements = end, changed_elements + changed
    require(changed_elements == piece.changed_elements, f"changed elements of {tensor.name} [82]")


def apply_tensor(tensor: TargetTensor, base: dict[str, Tensor]) -> bytes:
    source = bytes(tensor.element_count * tensor.dtype.width)
    if tensor.source is not None:
        require(tensor.source in base, f"the source of {tensor.name} is not in the base [79]")
        dtype, shape, source = base[tensor.source]
        require(dtype == tensor.dtype.name, f"the source of {tensor.name} has another dtype [79]")
        require(count_elements(BY_NAME[dtype], shape) == tensor.element_count, f"elements of {tensor.name} [79]")
    target = np.frombuffer(source, f"<u{tensor.dtype.width}").copy()
    is_written = np.zeros(len(target), bool)
    for piece in tensor.pieces:
        apply_piece(piece, tensor, target, is_written)
    data = target.tobytes()
    require(digest_tensor(data) == tensor.digest, f"digest of {tensor.name} [85]")
    return data


def apply_file(file: TargetFile, base: dict[str, tuple[int, bytes]]) -> bytes:
    if not file.runs:
        require(file.path in base and base[file.path][0] == file.kind, f"{file.path} is not in the base [81]")
        data = base[file.path][1]
    else:
        blocks = [block for run in file.runs for block in split_blocks(run.data, run.block_count)]
        sizes = [min(BLOCK_BYTES, file.size_bytes - BLOCK_BYTES * number) for number in range(len(blocks))]
        data = b"".join(decode_whole(block, 1, size) for block, size in zip(blocks, sizes, strict=True))
    require(len(data) == file.size_bytes, f"size of {file.path} [81, 83]")
    require(blake3.blake3(data).digest() == file.blake3, f"blake3 of {file.path} [81, 83]")
    return data


def apply_delta(
    delta: Delta, base_folder: str | Path
) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, bytes]]:
    """Make the target from the base: each tensor's dtype, shape and bytes, and each file's bytes.

    Of a shard the bytes are its 8 length bytes and its header. Raises MalformedError.
    """
    base, base_files = read_checkpoint(Path(base_folder))
    base_records = [
        (name, BY_NAME[tensor.dtype], tensor.shape, digest_tensor(tensor.data)) for name, tensor in base.items()
    ]
    base_file_records = [(path, kind, blake3.blake3(data).digest()) for path, (kind, data) in base_files.items()]
    require(State(digest_content(base_records), digest_files(base_file_records)) == delta.base, "the base [78]")
    names = {tensor.name for tensor in delta.tensors}
    require(base.keys() - names == set(delta.removed), "removed [80]")
    paths = {file.path for file in delta.files}
    gone = {path: data for path, (kind, data) in base_files.items() if kind == SIDECAR and path not in paths}
    digests = {path: blake3.blake3(data).digest() for path, data in gone.items()}
    require(digests == delta.removed_files, "removed.file and removed.blake3 [81]")
    tensors = {tensor.name: (tensor.dtype.name, tensor.shape, apply_tensor(tensor, base)) for tensor in delta.tensors}
    files = {file.path: apply_file(file, base_files) for file in delta.files}

    found: list[tuple[str, str, tuple[int, ...]]] = []
    shard_of: dict[str, str] = {}
    for file in delta.files:
        if file.kind == SHARD:
            header, rest = split_header(files[file.path])
            require(not rest, f"bytes after the header of {file.path} [83]")
            entries = parse_header(header[8:])[1]
            found += [(name, dtype.name, shape) for name, (dtype, shape, _, _) in entries.items()]
            shard_of |= dict.fromkeys(entries, file.path)
    require(sorted(found) == sorted((name, *tensors[name][:2]) for name in tensors), "tensors of the headers [84]")
    for file in delta.files:
        if file.kind == WEIGHT_MAP:
            check_weight_map(files[file.path], shard_of, {other.path for other in delta.files if other.kind == SHARD})
    content = digest_content((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in delta.tensors)
    digest = digest_files((file.path, file.kind, file.blake3) for file in delta.files)
    require(State(content, digest) == delta.target, "the target [86]")
    return tensors, files
