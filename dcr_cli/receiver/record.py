"""The record that a receiver keeps of the state it was brought to (FORMAT 12): what it should hold, and by which files.

It is a note for speed and for `verify`, never trusted over the bytes: it counts only while every shard is the one it
was. Files beside the shards are always read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_cli.checkpoint.checkpoint import FileDigest
from dcr_cli.checkpoint.digest import (
    BLAKE3_BYTES,
    DIGEST_BYTES,
    State,
    blake3_text,
    content_digest,
    files_digest,
    object_digest,
    parse_blake3,
)
from dcr_cli.checkpoint.folder import Identity
from dcr_cli.checkpoint.header import DTYPES, DTYPES_BY_CODE
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.delta.document import (
    CONTENT_LIMIT,
    Columns,
    decode_document,
    decode_texts,
    encode_document,
    encode_texts,
    take_column,
)
from dcr_cli.durable import NEW_FILE_MODE, PRIVATE_FILE_MODE, Folder
from dcr_cli.errors import DamagedError, DcrError, LocalError

RECORD_FORMAT = 1
STATE_NAME = "state.json"
TABLE_NAME = "state.zst"
# Time stamps of some file systems have two seconds between them; a change within them could go unseen.
SETTLE_NS = 2_000_000_000
_STATE_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorRecord:
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A state, its tensors and files in canonical order, and what its files were at `time_ns` by their own clock.

    `layout` is the blake3 of the layout through which the tensors were read, if they were.
    """

    state: State
    tensors: Sequence[TensorRecord]
    files: Sequence[FileDigest]
    identities: Mapping[str, Identity]
    skipped: tuple[str, ...]
    time_ns: int
    layout: bytes | None = None

    def is_current(self, identities: Mapping[str, Identity]) -> bool:
        """Whether the recorded shards are among these, each surely unchanged since."""
        shards = {file.path: self.identities[file.path] for file in self.files if file.kind == SHARD}
        return all(
            identities.get(path) == known and known.ctime_ns + SETTLE_NS <= self.time_ns
            for path, known in shards.items()
        )


def write_record(
    home: Folder,
    content: bytes,
    tensors: Sequence[TensorRecord],
    files: Sequence[FileDigest],
    identities: Mapping[str, Identity],
    skipped: Sequence[str],
    *,
    mode: int,
    layout: bytes | None = None,
) -> None:
    """Write the record of a state, whose content digest is `content`, into `home`, a receiver's state folder."""
    files_blake3 = files_digest((file.path, file.kind, file.blake3) for file in files)
    table, _ = encode_document("record", _columns(tensors, files))
    home.replace_file(TABLE_NAME, table, mode)
    status = home.status(TABLE_NAME)
    assert status is not None
    document: dict[str, object] = {
        "format": RECORD_FORMAT,
        "content": blake3_text(content),
        "files": blake3_text(files_blake3),
        "table": blake3_text(object_digest(table)),
        "identities": {path: list(identity) for path, identity in identities.items()},
        "skipped": list(skipped),
        "time_ns": status.st_mtime_ns,
    }
    if layout is not None:
        document["layout"] = blake3_text(layout)
    home.replace_file(STATE_NAME, json.dumps(document, ensure_ascii=False).encode() + b"\n", mode)


def mode_of_record(root: Folder, paths: Iterable[str]) -> int:
    """Let those read the record of the checkpoint in `root` who may read all of the files that it tells of."""
    mode = NEW_FILE_MODE
    for path in paths:
        with suppress(OSError):
            mode &= os.stat(path, dir_fd=root.fd).st_mode
    return mode | PRIVATE_FILE_MODE


def renew_record(
    root: Folder, home: Folder, content: bytes, files: Sequence[FileDigest], identities: Mapping[str, Identity]
) -> None:
    """Write the record anew after all it tells of was read again: `content`, and `files`, which may be more of them.

    Without a record of just that, nothing is written.
    """
    record = read_record(home)
    if record is None or record.state.content != content or not set(record.files) <= set(files):
        return
    now = {file.path: identities[file.path] for file in record.files}
    # A record that cannot be written is a loss of time alone; the one before is still there.
    with suppress(LocalError):
        mode = mode_of_record(root, now)
        write_record(home, content, record.tensors, record.files, now, record.skipped, mode=mode, layout=record.layout)


def read_record(home: Folder) -> Record | None:
    """Read the record in a receiver's state folder; None if there is none, or if it is torn or of another version."""
    try:
        text, table = home.read(STATE_NAME, _STATE_LIMIT), home.read(TABLE_NAME, 2 * CONTENT_LIMIT)
        if text is None or table is None:
            return None
        return _decode(strict_json(text, STATE_NAME), table)
    except (DcrError, ValueError, TypeError, KeyError, AttributeError):
        # Whatever is wrong with it, the answer is to read the bytes.
        return None


def find_record(root: Folder) -> Record | None:
    """Read the record of the checkpoint in `root`, if it has one that can be read."""
    try:
        home = record_folder(root)
    except DamagedError:
        return None
    if home is None:
        return None
    with home:
        return read_record(home)


def read_recorded_state(home: Folder) -> State | None:
    """Read only which state the record in a receiver's state folder tells of; None as for `read_record`."""
    try:
        text = home.read(STATE_NAME, _STATE_LIMIT)
        document: Any = strict_json(text, STATE_NAME) if text is not None else {}
        return State(parse_blake3(document["content"], STATE_NAME), parse_blake3(document["files"], STATE_NAME))
    except (DcrError, ValueError, TypeError, KeyError, AttributeError):
        return None


def record_folder(root: Folder) -> Folder | None:
    """Open the state folder of the checkpoint in `root` to read; None if it has none."""
    return root.open_folder(STATE_FOLDER) if root.status(STATE_FOLDER) is not None else None


def _decode(document: Any, table: bytes) -> Record | None:
    if document["format"] != RECORD_FORMAT or parse_blake3(document["table"], STATE_NAME) != object_digest(table):
        return None
    columns = decode_document("record", table, None, TABLE_NAME)
    tensors, files = _tensors(columns), _files(columns)
    state = State(parse_blake3(document["content"], STATE_NAME), parse_blake3(document["files"], STATE_NAME))
    if content_digest((row.name, row.dtype, row.shape, row.digest) for row in tensors) != state.content:
        return None
    if files_digest((file.path, file.kind, file.blake3) for file in files) != state.files:
        return None
    identities = {path: Identity(*map(int, numbers)) for path, numbers in document["identities"].items()}
    if identities.keys() != {file.path for file in files}:
        return None
    layout = parse_blake3(document["layout"], STATE_NAME) if "layout" in document else None
    skipped = tuple(map(str, document["skipped"]))
    return Record(state, tensors, files, identities, skipped, int(document["time_ns"]), layout)


def _columns(tensors: Sequence[TensorRecord], files: Sequence[FileDigest]) -> Columns:
    shapes = [dimension for row in tensors for dimension in row.shape]
    return (
        encode_texts("name", (row.name for row in tensors))
        | encode_texts("path", (file.path for file in files))
        | {
            "dtype": np.array([DTYPES[row.dtype].code for row in tensors], "<u1"),
            "rank": np.array([len(row.shape) for row in tensors], "<u4"),
            "shape": np.array(shapes, "<u8"),
            "digest": np.frombuffer(b"".join(row.digest for row in tensors), np.uint8).reshape(-1, DIGEST_BYTES),
            "kind": np.array([file.kind for file in files], "<u1"),
            "size": np.array([file.size for file in files], "<u8"),
            "blake3": np.frombuffer(b"".join(file.blake3 for file in files), np.uint8).reshape(-1, BLAKE3_BYTES),
        }
    )


def _tensors(columns: Columns) -> list[TensorRecord]:
    names = decode_texts(columns, "name", TABLE_NAME)
    dtypes, ranks = (
        take_column(columns, name, form, (), TABLE_NAME).tolist() for name, form in (("dtype", "U8"), ("rank", "U32"))
    )
    shape = take_column(columns, "shape", "U64", (), TABLE_NAME).tolist()
    digests = take_column(columns, "digest", "U8", (DIGEST_BYTES,), TABLE_NAME).tobytes()
    rows, at = [], 0
    for number, (name, dtype, rank) in enumerate(zip(names, dtypes, ranks, strict=True)):
        digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        rows.append(TensorRecord(name, DTYPES_BY_CODE[dtype].name, tuple(shape[at : at + rank]), digest))
        at += rank
    return rows


def _files(columns: Columns) -> list[FileDigest]:
    paths = decode_texts(columns, "path", TABLE_NAME)
    kinds, sizes = (
        take_column(columns, name, form, (), TABLE_NAME).tolist() for name, form in (("kind", "U8"), ("size", "U64"))
    )
    digests = take_column(columns, "blake3", "U8", (BLAKE3_BYTES,), TABLE_NAME).tobytes()
    return [
        FileDigest(path, kind, size, digests[number * BLAKE3_BYTES : (number + 1) * BLAKE3_BYTES])
        for number, (path, kind, size) in enumerate(zip(paths, kinds, sizes, strict=True))
    ]
