"""What a receiver holds before a change, and how it is written down so that the change can be finished (FORMAT 12).

Whether its bits are those of a delta's base, nothing here can know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import FileDigest, Shard, Tensor
from dcr_cli.checkpoint.digest import DIGEST_BYTES
from dcr_cli.checkpoint.header import DTYPES, parse_header
from dcr_cli.layout.document import decode_layout, encode_layout
from dcr_cli.layout.laid import LaidCheckpoint, lay
from dcr_cli.layout.shards import RankShards

Digests = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Base:
    """What a receiver holds.

    `alone` are shards that may be written where they lie: regular, writable, with one name. `laid` is there if it
    stores its tensors through a layout; then `by_name` lie in the shard that it thinks of.
    """

    shards: tuple[Shard, ...]
    by_name: Mapping[str, Tensor]
    files: tuple[FileDigest, ...]
    alone: frozenset[str]
    laid: LaidCheckpoint | None = None


def encode_base(base: Base, digests: Digests) -> bytes:
    """Write what a receiver holds, and the digests of its tensors in canonical order."""
    head = {
        "shards": [[shard.path, shard.size, len(shard.header.raw), shard.path in base.alone] for shard in base.shards],
        "files": [[file.path, file.kind, file.size, file.blake3.hex()] for file in base.files],
        "tensors": len(digests),
    }
    layout = encode_layout(base.laid.layout) if base.laid is not None else b""
    if layout:
        head["layout"] = len(layout)
    return b"".join(
        [
            json.dumps(head).encode() + b"\n",
            *(shard.header.raw for shard in base.shards),
            layout,
            np.ascontiguousarray(digests).tobytes(),
        ]
    )


def decode_base(data: bytes, root: Path, what: str) -> tuple[Base, Digests]:
    """The inverse of encode_base, for bytes that are known to be its own, of the receiver in `root`."""
    line, _, _ = data.partition(b"\n")
    head = json.loads(line)
    at = len(line) + 1
    shards, alone = [], set()
    for path, size, header_bytes, is_alone in head["shards"]:
        shards.append(Shard(path, parse_header(data[at : at + header_bytes], size, what), size))
        at += header_bytes
        if is_alone:
            alone.add(path)
    files = tuple(FileDigest(path, kind, size, bytes.fromhex(digest)) for path, kind, size, digest in head["files"])
    laid = None
    if "layout" in head:
        layout = decode_layout(data[at : at + head["layout"]], what)
        at += head["layout"]
        laid = lay(RankShards(root, {shard.path: shard for shard in shards}, {}, ()), layout, None)
    digests = np.frombuffer(data, np.uint8, head["tensors"] * DIGEST_BYTES, at).reshape(-1, DIGEST_BYTES)
    by_name = laid.by_name if laid is not None else tensors_of(shards)
    return Base(tuple(shards), by_name, files, frozenset(alone), laid), digests


def tensors_of(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The tensors of `shards` by name."""
    return {
        entry.name: Tensor(
            entry.name,
            DTYPES[entry.dtype],
            entry.shape,
            number,
            len(shard.header.raw) + entry.begin,
            entry.end - entry.begin,
        )
        for number, shard in enumerate(shards)
        for entry in shard.header.tensors
    }
