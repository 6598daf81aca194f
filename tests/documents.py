"""A small valid delta for tests that break it, and zstd frames made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.checkpoint.header import write_safetensors
from dcr_cli.delta.commit import Commit, encode_commit
from dcr_cli.delta.document import Columns
from dcr_cli.delta.frame import encode_frame
from dcr_cli.delta.manifest import (
    Box,
    FileRow,
    Manifest,
    PayloadRow,
    Piece,
    RemovedFile,
    Run,
    TensorRow,
    encode_digests,
    encode_manifest,
    manifest_columns,
)

METADATA = {"format": "dcr-1", "kind": "manifest", "requires": "[]"}
DIGEST, BLAKE3 = bytes(range(16)), bytes(range(32))
WHOLE, GAP_XOR, GAP_OVERWRITE, CONTEXT = 1, 2, 3, 4


def run(offset: int, blocks: int = 1, size: int = 10) -> Run:
    return Run(0, offset, size, blocks)


# One of everything: a piece of several blocks in two runs, boxes side by side and interleaved, a tensor without
# elements, a packed and new one, a renamed one, a scalar, files that are written and files that are kept.
MANIFEST = Manifest(
    tensors=(
        TensorRow("a", "BF16", (1024, 600), "a", (Piece(CONTEXT, 7, None, (run(0, 1), run(10, 2))),), DIGEST),
        TensorRow(
            "b",
            "F32",
            (4, 6),
            "b",
            (
                Piece(GAP_XOR, 3, Box((0, 0), (1, 1), (2, 6)), (run(20),)),
                Piece(GAP_OVERWRITE, 1, Box((2, 0), (1, 2), (2, 3)), (run(30),)),
                Piece(GAP_OVERWRITE, 6, Box((2, 1), (1, 2), (2, 3)), (run(30),)),
            ),
            DIGEST,
        ),
        TensorRow("c", "U8", (0,), None, (), None),
        TensorRow("d", "F4", (4,), None, (Piece(WHOLE, 2, None, (run(40),)),), DIGEST),
        TensorRow("e\n\u00e9", "F32", (2,), "old", (), None),
        TensorRow("f", "U8", (), "f", (), None),
    ),
    removed=("gone", "old"),
    files=(
        FileRow("config.json", 2, 524_289, BLAKE3, (run(50, 2),)),
        FileRow("model.safetensors", 1, 200, BLAKE3, ()),
        FileRow("model.safetensors.index.json", 3, 0, BLAKE3, (run(60),)),
        FileRow("sub/empty", 2, 0, BLAKE3, ()),
    ),
    removed_files=(RemovedFile("old/notes.txt", BLAKE3), RemovedFile("vocab.txt", BLAKE3)),
    payloads=(PayloadRow(1000, BLAKE3), PayloadRow(64 << 20, BLAKE3)),
    skipped=("*.bin", "original/"),
)
DIGESTS = [DIGEST] * 3


def columns(manifest: Manifest = MANIFEST) -> Columns:
    """The columns of a manifest, to be changed."""
    return {name: column.copy() for name, column in manifest_columns(manifest).items()}


def document(columns: Columns, metadata: dict[str, str] | None = None) -> bytes:
    """A document of any columns and metadata."""
    dtypes = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
    tensors = {
        name: (dtypes[column.itemsize], column.shape, np.ascontiguousarray(column).data)
        for name, column in columns.items()
    }
    return encode_frame(write_safetensors(tensors, METADATA if metadata is None else metadata), 3)


def raw_frame(content: bytes, *, window_log: int = 20, stated: int | None = None) -> bytes:
    """A frame of raw blocks, with any window and any stated size."""
    head = b"\x28\xb5\x2f\xfd\x80" + bytes([window_log - 10 << 3])
    head += (len(content) if stated is None else stated).to_bytes(4, "little")
    blocks = [content[start : start + 65536] for start in range(0, max(len(content), 1), 65536)]
    parts = [
        (len(block) << 3 | (number == len(blocks) - 1)).to_bytes(3, "little") + block
        for number, block in enumerate(blocks)
    ]
    return head + b"".join(parts)


def commit(**members: Any) -> Commit:
    """A commit of the manifest and digests above."""
    encoded, decoded_blake3 = encode_manifest(MANIFEST)
    digests = encode_digests(DIGESTS)
    facts: dict[str, Any] = {
        "base": State(b"\1" * 32, b"\2" * 32),
        "target": State(b"\3" * 32, b"\4" * 32),
        "manifest_blake3": object_digest(encoded),
        "manifest_decoded_blake3": decoded_blake3,
        "manifest_bytes": len(encoded),
        "digests_blake3": object_digest(digests),
        "digests_bytes": len(digests),
        "payload_count": 2,
        "payload_bytes": 1000 + (64 << 20),
        "created": "2031-02-03T04:05:06Z",
        "publisher": "dcr \u00e9",
    }
    return Commit(**facts | members)


def commit_members() -> dict[str, Any]:
    """The JSON of that commit, to be changed."""
    members: dict[str, Any] = json.loads(encode_commit(commit()))
    return members


def commit_line(members: dict[str, Any]) -> bytes:
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode() + b"\n"
