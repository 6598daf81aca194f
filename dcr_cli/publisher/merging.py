"""Makes one delta of the parts of all ranks: its rows, digests and states (pure).

Getting the parts and putting what is made of them is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Tensor
from dcr_cli.checkpoint.digest import (
    State,
    TensorDigest,
    add,
    content_digest,
    digest_bytes,
    digest_from_bytes,
    files_digest,
    no_digest,
    object_digest,
)
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import FileRow, Manifest, PayloadRow, Piece, RemovedFile, TensorRow
from dcr_cli.delta.payload import encode_payload, payload_name, write_head
from dcr_cli.errors import DamagedError
from dcr_cli.publisher.part_making import side_of
from dcr_cli.publisher.shares import Slice
from dcr_cli.remote.part import Attempt, PartTable, SliceRow


@dataclass(frozen=True, slots=True)
class Sides:
    """The checkpoints that all ranks compare, and their files."""

    base: Checkpoint
    target: Checkpoint
    base_files: Sequence[FileDigest]
    target_files: Sequence[FileDigest]


@dataclass(frozen=True, slots=True)
class Merged:
    """A delta of several parts: its manifest, the digests of all of the target's tensors, its states, and the payloads
    that no rank has put, by name."""

    manifest: Manifest
    digests: tuple[bytes, ...]
    base: State
    target: State
    fillers: dict[str, bytes]
    changed_tensors: int
    changed_elements: int


def merge(attempt: Attempt, sides: Sides, shares: Sequence[tuple[Slice, ...]], tables: Sequence[PartTable]) -> Merged:
    """Put the parts of all ranks together. DamagedError if one does not cover its share."""
    rows = [pair for rank, share in enumerate(shares) for pair in _pairs(rank, share, tables[rank], sides)]
    base_digests: dict[str, TensorDigest] = {tensor.name: no_digest() for tensor in sides.base.tensors}
    target_digests: dict[str, TensorDigest] = {tensor.name: no_digest() for tensor in sides.target.tensors}
    of_target: dict[str, list[tuple[Slice, SliceRow]]] = {tensor.name: [] for tensor in sides.target.tensors}
    for each, row in rows:
        name = each.tensor.name
        if each.base is not None:
            base_digests[name] = add(base_digests[name], digest_from_bytes(row.base_digest))
        if each.target is not None:
            target_digests[name] = add(target_digests[name], digest_from_bytes(row.target_digest))
            of_target[name].append((each, row))
    digests = {name: digest_bytes(total) for name, total in target_digests.items()}
    tensors = [_tensor_row(tensor, of_target[tensor.name], digests[tensor.name]) for tensor in sides.target.tensors]
    payloads, fillers = _payloads(attempt, tables)
    manifest = Manifest(
        tuple(tensors),
        tuple(tensor.name for tensor in sides.base.tensors if tensor.name not in sides.target.by_name),
        tuple(_file_rows(sides, tables[0])),
        tuple(_removed_files(sides)),
        payloads,
        sides.target.skipped,
    )
    old = {name: digest_bytes(total) for name, total in base_digests.items()}
    changed = [sum(_changed(each, row) for each, row in of_target[tensor.name]) for tensor in sides.target.tensors]
    return Merged(
        manifest,
        tuple(digests[tensor.name] for tensor in sides.target.tensors),
        State(_content(sides.base, old), _files(sides.base_files)),
        State(_content(sides.target, digests), _files(sides.target_files)),
        fillers,
        sum(map(bool, changed)),
        sum(changed),
    )


def _pairs(rank: int, share: tuple[Slice, ...], table: PartTable, sides: Sides) -> list[tuple[Slice, SliceRow]]:
    """The slices of a share, each with its row."""
    numbers = {
        name: index for index, name in enumerate(sorted(sides.base.by_name.keys() | sides.target.by_name.keys()))
    }
    expected = [(numbers[each.tensor.name], side_of(each), each.start, each.elements) for each in share]
    if [(row.tensor, row.side, row.start, row.elements) for row in table.slices] != expected:
        raise DamagedError(f"the part of rank {rank}", "does not cover its share: another base or checkpoint was read")
    return list(zip(share, table.slices, strict=True))


def _tensor_row(tensor: Tensor, rows: Sequence[tuple[Slice, SliceRow]], digest: bytes) -> TensorRow:
    pieces = tuple(_piece(each, row) for each, row in rows if row.encoding)
    base = rows[0][0].base
    is_reshaped = base is not None and base.shape != tensor.shape
    source = base.name if base is not None else None
    return TensorRow(
        tensor.name, tensor.dtype.name, tensor.shape, source, pieces, digest if pieces else None, is_reshaped
    )


def _piece(each: Slice, row: SliceRow) -> Piece:
    changed = each.elements if row.encoding == Encoding.WHOLE else row.changed
    return Piece(row.encoding, changed, each.box, row.runs)


def _changed(each: Slice, row: SliceRow) -> int:
    """The elements that changed, of a tensor that was there before."""
    return row.changed if each.base is not None and row.encoding else 0


def _payloads(attempt: Attempt, tables: Sequence[PartTable]) -> tuple[tuple[PayloadRow, ...], dict[str, bytes]]:
    """All payloads, without a gap: where a rank has none, one without runs is made."""
    rows = {
        rank + attempt.ranks * turn: row for rank, table in enumerate(tables) for turn, row in enumerate(table.payloads)
    }
    place = attempt.place
    identity = {"history": attempt.history, "version": str(place.version), "id": place.id}
    fillers = {}
    for index in range(max(rows, default=-1) + 1):
        if index not in rows:
            data = encode_payload(index, write_head({}), identity)
            rows[index] = PayloadRow(len(data), object_digest(data))
            fillers[payload_name(index)] = data
    return tuple(rows[index] for index in sorted(rows)), fillers


def _file_rows(sides: Sides, table: PartTable) -> list[FileRow]:
    if len(table.file_runs) != len(sides.target_files):
        facts = f"has runs of {len(table.file_runs)} files, the checkpoint has {len(sides.target_files)}"
        raise DamagedError("the part of rank 0", facts)
    known = {(file.path, file.kind): file.blake3 for file in sides.base_files}
    rows = []
    for file, runs in zip(sides.target_files, table.file_runs, strict=True):
        if bool(runs) == (known.get((file.path, file.kind)) == file.blake3):
            raise DamagedError("the part of rank 0", f"says another thing of file {shown(file.path)} than is there")
        rows.append(FileRow(file.path, file.kind, file.size, file.blake3, runs))
    return rows


def _removed_files(sides: Sides) -> list[RemovedFile]:
    kept = {file.path for file in sides.target_files}
    return [
        RemovedFile(file.path, file.blake3)
        for file in sides.base_files
        if file.kind == SIDECAR and file.path not in kept
    ]


def _content(checkpoint: Checkpoint, digests: dict[str, bytes]) -> bytes:
    return content_digest((t.name, t.dtype.name, t.shape, digests[t.name]) for t in checkpoint.tensors)


def _files(files: Sequence[FileDigest]) -> bytes:
    return files_digest((file.path, file.kind, file.blake3) for file in files)
