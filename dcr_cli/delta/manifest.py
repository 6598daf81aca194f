"""The manifest of a delta and the digests beside it (FORMAT 7): their types, encode and decode.

What makes a manifest valid is in manifest_rules.py; the payloads that it points into are payload.py's, the commit that
binds all of them is commit.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import BLAKE3_BYTES, DIGEST_BYTES, object_digest
from dcr_cli.checkpoint.header import DTYPES, DTYPES_BY_CODE
from dcr_cli.delta.document import Column, Columns, decode_document, encode_document, encode_texts, take_column
from dcr_cli.delta.manifest_rules import check_tables
from dcr_cli.delta.rows import Rows
from dcr_cli.delta.tables import SOURCE_NONE, SOURCE_SAME, SOURCE_TABLE, Tables
from dcr_cli.errors import DamagedError

Item = TypeVar("Item")
Digest = bytes  # where a member is named bytes


@dataclass(frozen=True, slots=True)
class Box:
    """A strided box: per axis the first index, the step, and how many."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one piece or file, in payload `payload`, `offset` bytes after its head."""

    payload: int
    offset: int
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Changes of a tensor that were coded together; without a box, of the whole tensor."""

    encoding: int
    changed: int
    box: Box | None
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor of the target. Without pieces it is a copy of `source`, and its digest stands in the digests object.

    `is_reshaped`: its source has its name and another shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str | None
    pieces: tuple[Piece, ...]
    digest: bytes | None
    is_reshaped: bool = False


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of the target: of a shard the header, of another file all of it. Without runs it is the base's own."""

    path: str
    kind: int
    size: int
    blake3: bytes
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A sidecar of the base that the target has not."""

    path: str
    blake3: bytes


@dataclass(frozen=True, slots=True)
class PayloadRow:
    """Size and blake3 of a whole payload file."""

    bytes: int
    blake3: Digest


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a delta says: the tensors and files of the target, where their changes are, and what of the base goes."""

    tensors: Sequence[TensorRow]
    removed: tuple[str, ...]
    files: Sequence[FileRow]
    removed_files: Sequence[RemovedFile]
    payloads: Sequence[PayloadRow]
    skipped: tuple[str, ...]


def encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    """Encode `manifest`: the object, and the blake3 of what it decodes to. Equal manifests give equal bytes.

    The rows must be in canonical order. DamagedError if a reader would refuse it, by a name that is too long, say.
    """
    columns = manifest_columns(manifest)
    check_tables(columns, "manifest")
    encoded, decoded = encode_document("manifest", columns)
    return encoded, object_digest(decoded)


def decode_manifest(data: bytes, decoded_blake3: bytes | None, what: str) -> Manifest:
    """Decode a manifest and check all rules that need no base. DamagedError, or UnsupportedError, names `what`."""
    tables = check_tables(decode_document("manifest", data, decoded_blake3, what), what)
    return Manifest(
        tensors=Rows(len(tables.names), lambda start, stop: _tensor_rows(tables, start, stop)),
        removed=tuple(tables.removed),
        files=Rows(len(tables.paths), lambda start, stop: _file_rows(tables, start, stop)),
        removed_files=Rows(len(tables.removed_paths), lambda start, stop: _removed_files(tables, start, stop)),
        payloads=Rows(len(tables.columns["payload.bytes"]), lambda start, stop: _payload_rows(tables, start, stop)),
        skipped=tuple(tables.skipped),
    )


def encode_digests(digests: Iterable[bytes]) -> bytes:
    """Encode the digests of the tensors without pieces, in order."""
    return encode_document("digests", {"digest": _digest_column(digests, DIGEST_BYTES)})[0]


def decode_digests(data: bytes, count: int, what: str) -> NDArray[np.uint8]:
    """Decode the digests of `count` tensors: [count, 16]."""
    digests = take_column(decode_document("digests", data, None, what), "digest", "U8", (DIGEST_BYTES,), what)
    if len(digests) != count:
        raise DamagedError(what, f"has {len(digests)} digests, for {count} tensors without pieces")
    return digests


def manifest_columns(manifest: Manifest) -> Columns:
    """The columns of `manifest`, in the order in which they are written, unchecked."""
    tensors, files = list(manifest.tensors), list(manifest.files)
    pieces = [piece for row in tensors for piece in row.pieces]
    boxes = [piece.box for piece in pieces if piece.box is not None]
    runs = [run for piece in pieces for run in piece.runs] + [run for file in files for run in file.runs]
    sources = sorted({row.source for row in tensors if row.source is not None and not _is_same(row)})
    table = {name: SOURCE_TABLE + index for index, name in enumerate(sources)}

    def source(row: TensorRow) -> int:
        if row.source is None:
            return SOURCE_NONE
        return SOURCE_SAME if _is_same(row) else table[row.source]

    return (
        encode_texts("tensor.name", (row.name for row in tensors))
        | encode_texts("source", sources)
        | encode_texts("removed", manifest.removed)
        | encode_texts("file.path", (file.path for file in files))
        | encode_texts("removed.file", (file.path for file in manifest.removed_files))
        | encode_texts("skipped", manifest.skipped)
        | {
            "tensor.dtype": _column(1, (DTYPES[row.dtype].code for row in tensors)),
            "tensor.rank": _column(4, (len(row.shape) for row in tensors)),
            "tensor.shape": _column(8, (dimension for row in tensors for dimension in row.shape)),
            "tensor.source": _column(4, map(source, tensors)),
            "tensor.pieces": _column(4, (len(row.pieces) for row in tensors)),
            "tensor.digest": _digest_column((row.digest or b"" for row in tensors if row.pieces), DIGEST_BYTES),
            "piece.encoding": _column(1, (piece.encoding for piece in pieces)),
            "piece.changed": _column(8, (piece.changed for piece in pieces)),
            "piece.box": _column(1, (piece.box is not None for piece in pieces)),
            "piece.runs": _column(4, (len(piece.runs) for piece in pieces)),
            "box": _column(8, (n for box in boxes for numbers in (box.starts, box.steps, box.counts) for n in numbers)),
            "file.kind": _column(1, (file.kind for file in files)),
            "file.size": _column(8, (file.size for file in files)),
            "file.blake3": _digest_column((file.blake3 for file in files), BLAKE3_BYTES),
            "file.runs": _column(4, (len(file.runs) for file in files)),
            "removed.blake3": _digest_column((file.blake3 for file in manifest.removed_files), BLAKE3_BYTES),
            "run.payload": _column(4, (run.payload for run in runs)),
            "run.offset": _column(4, (run.offset for run in runs)),
            "run.bytes": _column(4, (run.bytes for run in runs)),
            "run.blocks": _column(4, (run.blocks for run in runs)),
            "payload.bytes": _column(8, (payload.bytes for payload in manifest.payloads)),
            "payload.blake3": _digest_column((payload.blake3 for payload in manifest.payloads), BLAKE3_BYTES),
        }
    )


def _is_same(row: TensorRow) -> bool:
    return row.source == row.name and not row.is_reshaped


def _column(width: int, numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, np.dtype(f"<u{width}"))


def _digest_column(digests: Iterable[bytes], size: int) -> Column:
    rows = list(digests)
    if any(len(digest) != size for digest in rows):
        raise ValueError(f"a digest does not have {size} bytes")
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, size)


def _tensor_rows(tables: Tables, start: int, stop: int) -> list[TensorRow]:
    columns = tables.columns
    shape_at, piece_at = tables.shape_at[start : stop + 1], tables.piece_at[start : stop + 1]
    digests = iter(_rows_of_bytes(columns["tensor.digest"][slice(*tables.digest_at[[start, stop]])]))
    return [
        TensorRow(
            name,
            DTYPES_BY_CODE[code].name,
            shape,
            None if source == SOURCE_NONE else name if source == SOURCE_SAME else tables.sources[source - SOURCE_TABLE],
            pieces,
            next(digests) if pieces else None,
            source >= SOURCE_TABLE and tables.sources[source - SOURCE_TABLE] == name,
        )
        for name, code, shape, source, pieces in zip(
            tables.names[start:stop],
            columns["tensor.dtype"][start:stop].tolist(),
            _parts(columns["tensor.shape"][shape_at[0] : shape_at[-1]].tolist(), shape_at),
            columns["tensor.source"][start:stop].tolist(),
            _parts(_pieces(tables, *piece_at[[0, -1]]), piece_at),
            strict=True,
        )
    ]


def _pieces(tables: Tables, start: int, stop: int) -> list[Piece]:
    columns = tables.columns
    box_at, run_at = tables.box_at[start : stop + 1], tables.run_at[start : stop + 1]
    return list(
        map(
            Piece,
            columns["piece.encoding"][start:stop].tolist(),
            columns["piece.changed"][start:stop].tolist(),
            map(_box, _parts(columns["box"][box_at[0] : box_at[-1]].tolist(), box_at)),
            _parts(_runs(tables, *run_at[[0, -1]]), run_at),
        )
    )


def _box(numbers: tuple[int, ...]) -> Box | None:
    rank = len(numbers) // 3
    return Box(numbers[:rank], numbers[rank : 2 * rank], numbers[2 * rank :]) if rank else None


def _runs(tables: Tables, start: int, stop: int) -> list[Run]:
    columns = (tables.columns[f"run.{name}"][start:stop].tolist() for name in ("payload", "offset", "bytes", "blocks"))
    return list(map(Run, *columns))


def _file_rows(tables: Tables, start: int, stop: int) -> list[FileRow]:
    columns = tables.columns
    run_at = tables.run_at[tables.pieces + start : tables.pieces + stop + 1]
    return list(
        map(
            FileRow,
            tables.paths[start:stop],
            columns["file.kind"][start:stop].tolist(),
            columns["file.size"][start:stop].tolist(),
            _rows_of_bytes(columns["file.blake3"][start:stop]),
            _parts(_runs(tables, *run_at[[0, -1]]), run_at),
        )
    )


def _removed_files(tables: Tables, start: int, stop: int) -> list[RemovedFile]:
    digests = _rows_of_bytes(tables.columns["removed.blake3"][start:stop])
    return list(map(RemovedFile, tables.removed_paths[start:stop], digests))


def _payload_rows(tables: Tables, start: int, stop: int) -> list[PayloadRow]:
    columns = tables.columns
    sizes = columns["payload.bytes"][start:stop].tolist()
    return list(map(PayloadRow, sizes, _rows_of_bytes(columns["payload.blake3"][start:stop])))


def _rows_of_bytes(column: Column) -> list[bytes]:
    data, size = column.tobytes(), column.shape[1]
    return [data[start : start + size] for start in range(0, len(data), size)]


def _parts(items: list[Item], at: NDArray[np.int64]) -> list[tuple[Item, ...]]:
    """Cut `items` into the parts that `at` bounds, counted from at[0]."""
    if len(items) == len(at) - 1 and (np.diff(at) == 1).all():
        return list(zip(items, strict=True))
    bounds = (at - at[0]).tolist()
    return [tuple(items[start:end]) for start, end in pairwise(bounds)]
