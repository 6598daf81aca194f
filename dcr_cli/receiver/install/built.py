"""Reads a checkpoint whose files are complete and have not got their names yet, and refuses what is not the wanted one.

Its ranges have been checked; here it is seen that they make up a checkpoint, and one of the wanted content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Shard
from dcr_cli.checkpoint.digest import ObjectHasher, content_digest, digest_bytes, object_digest
from dcr_cli.checkpoint.folder import Files, Identity
from dcr_cli.checkpoint.header import read_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, WEIGHT_MAP
from dcr_cli.checkpoint.weight_map import check_agreement, check_sets_complete, parse_weight_map
from dcr_cli.content import Side, Workers, in_file_order, tensor_digests, tensor_of_part
from dcr_cli.errors import DamagedError
from dcr_cli.layout.document import decode_layout
from dcr_cli.layout.laid import LaidCheckpoint, lay
from dcr_cli.layout.layout import Layout
from dcr_cli.layout.shards import RankShards
from dcr_cli.receiver.base import tensors_of
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.record import TensorRecord

_SHOWN_DIGITS = 16


def read_built(
    root: Path, places: Sequence[str], identities: Mapping[str, Identity], wanted: Wanted, effort: Effort
) -> tuple[list[TensorRecord], list[FileDigest]]:
    """Read the files of a wanted state, which lie at `places` below `root`: its tensors and its files.

    DamagedError if they are no checkpoint, or not the one of that state.
    """
    checkpoint = open_built(root, places, identities, wanted)
    ordered = in_file_order(checkpoint.tensors)
    with Workers(effort.jobs, "verify", effort.progress) as workers, checkpoint.reader() as reader:
        digests = tensor_digests(workers, Side(checkpoint, reader, tensor_of_part), ordered)
    by_name = {tensor.name: digest_bytes(digest) for tensor, digest in zip(ordered, digests, strict=True)}
    rows = [TensorRecord(t.name, t.dtype.name, t.shape, by_name[t.name]) for t in checkpoint.tensors]
    content = content_digest((row.name, row.dtype, row.shape, row.digest) for row in rows)
    if content != wanted.state.content:
        facts = "its files, as they are wanted, have another content than their state: expected "
        facts += f"blake3:{wanted.state.content.hex()[:_SHOWN_DIGITS]}, found blake3:{content.hex()[:_SHOWN_DIGITS]}"
        raise DamagedError(str(root), facts)
    shards = checkpoint.local if isinstance(checkpoint, LaidCheckpoint) else checkpoint.shards
    header_bytes = {shard.path: len(shard.header.raw) for shard in shards}
    return rows, [
        FileDigest(file.path, file.kind, header_bytes.get(place, file.size), file.blake3)
        for place, file in zip(places, wanted.files, strict=True)
    ]


def open_built(root: Path, places: Sequence[str], identities: Mapping[str, Identity], wanted: Wanted) -> Checkpoint:
    """Open the checkpoint that the files of a wanted state make up, which lie at `places` below `root`.

    DamagedError if they are none; what its tensors hold is not looked at.
    """
    with Files(root, identities) as files:
        shards = _read_shards(files, places, wanted)
        _check_files(files, places, wanted)
        if wanted.layout is not None:
            return _lay_built(root, places, identities, shards, decode_layout(wanted.layout, str(root)))
        tensors = tensors_of(list(shards.values()))
        if len(tensors) != sum(len(shard.header.tensors) for shard in shards.values()):
            raise DamagedError(str(root), "its files, as they are wanted, have a tensor twice")
        _check_weight_map(files, places, wanted, shards)
    placed = tuple(Shard(places[number], shard.header, shard.size) for number, shard in shards.items())
    canonical = tuple(tensors[name] for name in sorted(tensors))
    return Checkpoint(root, placed, (), canonical, tensors, (), dict(identities), ())


def _lay_built(
    root: Path,
    places: Sequence[str],
    identities: Mapping[str, Identity],
    shards: Mapping[int, Shard],
    layout: Layout,
) -> LaidCheckpoint:
    """See shards where they lie now through the layout that is of them where they belong."""
    placed = {places[number]: Shard(places[number], shard.header, shard.size) for number, shard in shards.items()}
    place_of = {shard.path: places[number] for number, shard in shards.items()}
    moved = {place_of.get(path, path): tensors for path, tensors in layout.shards.items()}
    ranks = RankShards(root, placed, {place: identities[place] for place in placed}, ())
    return lay(ranks, replace(layout, shards=moved), None)


def _read_shards(files: Files, places: Sequence[str], wanted: Wanted) -> dict[int, Shard]:
    """The shards, by their number among the files, under the paths that they are to have."""
    shards = {}
    for number, file in enumerate(wanted.files):
        if file.kind == SHARD:
            with files.opened(places[number]) as fd:
                header = read_header(fd, f"shard {shown(file.path)}")
                size = os.fstat(fd).st_size
            if object_digest(header.raw) != file.blake3:
                raise DamagedError(f"shard {shown(file.path)}", "its ranges are right, but its header is another one")
            shards[number] = Shard(file.path, header, size)
    return shards


def _check_files(files: Files, places: Sequence[str], wanted: Wanted) -> None:
    """Of a file of one range, its blake3 is that of the range; the others are read."""
    for number, file in enumerate(wanted.files):
        if file.kind != SHARD and len(file.ranges) > 1:
            hasher = ObjectHasher()
            for part in files.parts_of(places[number]):
                hasher.update(part)
            if hasher.digest() != file.blake3:
                raise DamagedError(f"file {shown(file.path)}", "its ranges are right, but its blake3 is another one")


def _check_weight_map(files: Files, places: Sequence[str], wanted: Wanted, shards: Mapping[int, Shard]) -> None:
    paths = {shard.path for shard in shards.values()}
    check_sets_complete(paths, "the wanted state")
    for number, file in enumerate(wanted.files):
        if file.kind == WEIGHT_MAP:
            what = f"file {shown(file.path)}"
            weight_map = parse_weight_map(files.read_file(places[number]), what)
            shard_of = {entry.name: shard.path for shard in shards.values() for entry in shard.header.tensors}
            check_agreement(weight_map, shard_of, what)
            if unnamed := paths.difference(weight_map.values()):
                raise DamagedError(what, f"does not name shard {shown(min(unnamed))}")
