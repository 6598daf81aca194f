"""The files beside the shards: which are written anew, and the state that a receiver's files make up in the end.

Shards are staging.py's matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dcr_cli.checkpoint.checkpoint import FileDigest
from dcr_cli.checkpoint.digest import State, files_digest, object_digest
from dcr_cli.checkpoint.folder import Identity, identity_of
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.manifest import FileRow
from dcr_cli.durable import Folder
from dcr_cli.errors import DamagedError, LocalError
from dcr_cli.receiver.job import Job
from dcr_cli.receiver.marker import Marker
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import TensorRecord, mode_of_record, read_record, renew_record, write_record
from dcr_cli.receiver.reshard import rewrite_weight_map
from dcr_cli.receiver.view import layout_blake3, note_layout

_REPAIR = "start again from a full copy of the target"


@dataclass(frozen=True, slots=True)
class NewFiles:
    """What is written beside the shards: files that the delta carries, and perhaps a receiver's own weight map.

    `weight_map`, its path and its text as it will be, is there whenever the receiver has one of its own.
    """

    rows: tuple[FileRow, ...]
    weight_map: tuple[str, bytes] | None
    is_map_new: bool

    @property
    def paths(self) -> list[str]:
        paths = [row.path for row in self.rows]
        if self.weight_map is not None and self.is_map_new:
            paths.append(self.weight_map[0])
        return paths

    def contents(self, job: Job) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of each that is written, decoded one at a time."""
        for row in self.rows:
            yield row.path, job.target.file_bytes(row)
        if self.weight_map is not None and self.is_map_new:
            yield self.weight_map


def new_files(job: Job, plan: Plan) -> NewFiles:
    """Find what is to be written; a receiver's own weight map is read for it."""
    own_map = next((file.path for file in job.base.files if file.kind == WEIGHT_MAP), None)
    if plan.is_exact or own_map is None:
        return NewFiles(plan.written_files, None, is_map_new=False)
    text = job.read_file(own_map)
    if object_digest(text) != next(file.blake3 for file in job.base.files if file.path == own_map):
        # A change that was stopped has written it already; what it has grown by is in it.
        if rewrite_weight_map(text, plan.map_steps[-1].shard_of, 0, own_map) is not None:
            facts = "is neither what it was nor what it was to become"
            raise DamagedError(str(job.root / own_map), facts, hint=_REPAIR)
        return NewFiles(plan.written_files, (own_map, text), is_map_new=False)
    rewritten = text
    for step in plan.map_steps:
        rewritten = rewrite_weight_map(rewritten, step.shard_of, step.grown_bytes, own_map) or rewritten
    return NewFiles(plan.written_files, (own_map, rewritten), is_map_new=rewritten != text)


def final_files(job: Job, plan: Plan, files: NewFiles) -> list[FileDigest]:
    """The files of the receiver when the plan is carried out, in canonical order."""
    if plan.is_exact:
        return [FileDigest(row.path, row.kind, row.size, row.blake3) for row in job.target.chain.manifest.files]
    gone = set(plan.removed_files)
    final = {file.path: file for file in job.base.files if file.kind != SHARD and file.path not in gone}
    final |= {row.path: FileDigest(row.path, SIDECAR, row.size, row.blake3) for row in files.rows}
    if files.weight_map is not None:
        path, text = files.weight_map
        final[path] = FileDigest(path, WEIGHT_MAP, len(text), object_digest(text))
    for shard in plan.shards:
        final[shard.path] = FileDigest(shard.path, SHARD, len(shard.header), object_digest(shard.header))
    return sorted(final.values(), key=lambda file: file.path)


def marker_of(job: Job, mode: str, *, is_exact: bool, base_blake3: bytes) -> Marker:
    """The marker of a change to the target of a job."""
    target, chain = job.target, job.target.chain
    folders = tuple(str(delta.folder.absolute()) for delta in chain.deltas)
    return Marker(
        chain.commits,
        folders,
        chain.base,
        chain.target,
        mode,
        is_exact,
        base_blake3,
        target.remote,
        job.base.laid is not None,
    )


def record_target(
    receiver: Receiver, job: Job, files: Sequence[FileDigest], identities: Mapping[str, Identity] | None = None
) -> None:
    """Write the record of a receiver that is at the target now and has these files, with the identities they had when
    they were checked; without, those they have now. Its layout is noted, if it has one."""
    target, laid = job.target, job.base.laid
    if laid is not None:
        note_layout(receiver.home, laid.layout)
    write_record(
        receiver.home,
        target.chain.target.content,
        [TensorRecord(row.name, row.dtype, row.shape, d) for row, d in zip(target.rows, target.digests, strict=True)],
        files,
        identities or {file.path: identity_below(receiver.root, file.path) for file in files},
        target.chain.manifest.skipped,
        mode=mode_of_record(receiver.root, (file.path for file in files)),
        layout=layout_blake3(laid.layout) if laid is not None else None,
    )
    receiver.keeps_home = True


def leave_record(receiver: Receiver, job: Job, files: Sequence[FileDigest], *, is_trusted: bool) -> None:
    """See that a receiver that was found at the target, all of it read, has a record that counts.

    `is_trusted`: the one that it has counts, if it is of this state. A record that cannot be written is missing, and
    nothing else.
    """
    chain, record = job.target.chain, read_record(receiver.home)
    state = State(chain.target.content, files_digest((file.path, file.kind, file.blake3) for file in files))
    layout = layout_blake3(job.base.laid.layout) if job.base.laid is not None else None
    is_of_state = record is not None and record.state == state and record.layout == layout
    if not is_of_state and layout is None and state.files != chain.target.files and record is not None:
        is_of_state = record.state.content == state.content and set(record.files) <= set(files)
    if is_of_state and not is_trusted:
        renew_record(receiver.root, receiver.home, state.content, files, job.identities)
    elif not is_of_state:
        with suppress(LocalError):
            record_target(receiver, job, files, {file.path: job.identities[file.path] for file in files})


def identities_now(root: Folder, paths: Iterable[str]) -> dict[str, Identity]:
    """The identities of those files that are there."""
    found = {}
    for path in paths:
        with suppress(OSError):
            found[path] = identity_of(os.stat(path, dir_fd=root.fd))
    return found


def identity_below(root: Folder, path: str) -> Identity:
    """The identity of a file that has to be there."""
    try:
        return identity_of(os.stat(path, dir_fd=root.fd))
    except OSError as error:
        raise DamagedError(str(root.path / path), f"is not there at the end: {error.strerror}") from error
