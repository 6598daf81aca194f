"""Looks at a receiver: what it holds, and whether that is the base of a chain of deltas, its target, or neither.

Changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Reader, Shard, check_folder, open_checkpoint
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.delta.chain import is_removed
from dcr_cli.delta.manifest import Manifest, RemovedFile
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import WrongBaseError
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.layout.layout import Form
from dcr_cli.receiver.base import Base
from dcr_cli.receiver.file_plan import lacks_weight_map, match_files
from dcr_cli.receiver.job import Job, Sums, Target, content_of, sums_of, wrong_base
from dcr_cli.receiver.plan import check_tensors
from dcr_cli.receiver.record import Record, find_record
from dcr_cli.receiver.view import View, layout_blake3, open_laid


@dataclass(frozen=True, slots=True)
class Survey:
    """What a receiver holds, seen from a chain of deltas.

    `files` are all, foreign ones too.
    `is_base`: its files are the base's (foreign ones aside), byte for byte what a full copy of the base has.
    `is_target`: its files are the target's, or those of its own shards' beside the target's sidecars. Only the bits
    of its tensors are not known, unless `known`, from a record that counts, has their digests. `has_target_files`: its
    files are the target's byte for byte.
    """

    checkpoint: Checkpoint
    files: tuple[FileDigest, ...]
    base: Base
    known: Sums | None
    is_base: bool
    is_target: bool
    has_target_files: bool
    foreign: tuple[str, ...]

    def files_at_target(self, manifest: Manifest) -> list[FileDigest]:
        """The files of a receiver that is at the target: the target's, or all of those beside its own shards."""
        if not self.has_target_files:
            return list(self.base.files)
        paths = {row.path for row in manifest.files}
        return [file for file in self.base.files if file.path in paths]


def open_root(path: str | os.PathLike[str]) -> Folder:
    """Open the folder of a receiver; NotFoundError if there is none."""
    check_folder(Path(path), "checkpoint")
    return open_folder(path)


def look_at(root: Folder, target: Target, view: View, *, what: str | None = None) -> tuple[Survey, Job]:
    """Look at the checkpoint in `root` as `view` says, leaving out what the base's publisher left out, too.

    `what` it is called in messages, if not by its path.
    """
    patterns = (*target.chain.manifest.skipped, *view.skip)
    forms = {row.name: Form(row.dtype, row.shape) for row in target.rows}
    laid = open_laid(root, view, patterns, forms)
    checkpoint = laid or open_checkpoint(root.path, skip=patterns, allow_strangers=True)
    with checkpoint.reader() as reader:
        found = (
            survey_laid(root, reader, laid, target) if laid is not None else survey(root, reader, checkpoint, target)
        )
    identities = {file.path: checkpoint.identities[file.path] for file in found.base.files}
    job = Job(target, found.base, root.path, identities, found.known)
    job.what = what or job.what
    return found, job


def survey(root: Folder, reader: Reader, checkpoint: Checkpoint, target: Target) -> Survey:
    """Look at the checkpoint in `root`, which `reader` reads."""
    chain, manifest = target.chain, target.chain.manifest
    files = checkpoint.files_digest(reader)
    record = find_record(root)
    known = _known(record, checkpoint.shards, checkpoint, None)
    target_paths = {row.path for row in manifest.files}
    left = files_left(files, manifest.removed_files)
    recorded = [{file.path for file in record.files}] if record is not None else []
    base_files = match_files(files, chain.base.files, [*_candidates(chain.first), *recorded])
    target_files = match_files(files, chain.target.files, [*_candidates(manifest), *recorded])
    if base_files is not None and target_files is not None:
        # Where the one leaves files out as foreign that the other has, the other is meant.
        counts = len(base_files), len(target_files)
        base_files = base_files if counts[0] >= counts[1] else None
        target_files = target_files if counts[1] >= counts[0] else None
    is_target = target_files is not None
    if base_files is None and not is_target:
        is_target = not (left or _lacking(files, manifest, checkpoint.skipped))
    if base_files is not None:
        own = {file.path for file in base_files}
    elif is_target:
        own = target_paths
    else:
        own = target_paths.union(left)
    foreign = [file.path for file in files if file.kind == SIDECAR and file.path not in own]
    foreign = sorted([*foreign, *checkpoint.strangers])
    base = Base(
        checkpoint.shards,
        checkpoint.by_name,
        tuple(files if base_files is None else base_files),
        frozenset(shard.path for shard in checkpoint.shards if _is_alone(root.status(shard.path))),
    )
    is_base, has_target_files = base_files is not None, target_files is not None
    return Survey(checkpoint, tuple(files), base, known, is_base, is_target, has_target_files, tuple(foreign))


def survey_laid(root: Folder, reader: Reader, laid: LaidCheckpoint, target: Target) -> Survey:
    """Look at a receiver that stores its tensors through a layout; its files are never those of a version."""
    manifest = target.chain.manifest
    files = tuple(laid.local_files_digest(reader))
    known = _known(find_record(root), laid.local, laid, layout_blake3(laid.layout))
    alone = frozenset(shard.path for shard in laid.local if _is_alone(root.status(shard.path)))
    base = Base(laid.local, laid.by_name, files, alone, laid)
    left = files_left(files, manifest.removed_files)
    is_target = not (left or _lacking(files, manifest, laid.skipped, is_laid=True))
    own = {row.path for row in manifest.files}.union(() if is_target else left)
    foreign = [file.path for file in files if file.kind == SIDECAR and file.path not in own]
    return Survey(laid, files, base, known, False, is_target, False, tuple(sorted([*foreign, *laid.strangers])))


def _candidates(manifest: Manifest) -> list[set[str]]:
    """Which files may be those of a delta's base or target, where there are others too."""
    target_paths = {row.path for row in manifest.files}
    return [target_paths, target_paths.union(file.path for file in manifest.removed_files)]


def is_there_already(found: Survey, job: Job) -> bool:
    """Whether the receiver is at the target already; WrongBaseError if it surely is neither there nor at the base.

    False means the base, or that only reading it while it is changed can tell. If this had to read all of it,
    `job.known` has its digests.
    """
    try:
        chain = job.target.chain
        check_tensors(found.base, chain.first_rows, chain.first.removed, job.what)
    except WrongBaseError:
        if not has_tensors_of_target(found, job):
            raise
    else:
        if job.known is None and not looks_like_target(found, job):
            return False
    if job.known is None:
        job.known = job.digest(range(len(job.tensors)), "check")
    return judge(found, job, job.known)


def judge(found: Survey, job: Job, sums: Sums) -> bool:
    """Whether a receiver whose tensors have these digests is at the target; WrongBaseError if not at the base
    either."""
    content = content_of(job.tensors, sums)
    chain = job.target.chain
    if content == chain.target.content and found.is_target:
        return True
    if content == chain.base.content:
        return False
    if content == chain.target.content:
        facts, hint = "holds the tensors of this delta's target, but not its files", None
        manifest = chain.manifest
        if lacking := _lacking(
            found.base.files, manifest, found.checkpoint.skipped, is_laid=found.base.laid is not None
        ):
            facts, hint = f"{facts}, {shown(lacking[0])} is missing or was changed", "put the target's file there"
        elif left := files_left(found.base.files, manifest.removed_files):
            facts, hint = f"{facts}, the delta removes {shown(left[0])}", "move it away"
        raise WrongBaseError(job.what, facts, hint=hint or "start again from a full copy of the target")
    raise wrong_base(job, sums)


def _lacking(
    files: Sequence[FileDigest], manifest: Manifest, skip: Sequence[str], *, is_laid: bool = False
) -> list[str]:
    """The target's sidecars that are not among some files as they should be, whether or not the delta carries them, and
    its weight map, if there are several shards without one and without a layout.

    What `skip` leaves out is not looked for.
    """
    held = {file.path: file.blake3 for file in files if file.kind == SIDECAR}
    skipped = Patterns(skip)
    wanted = [row for row in manifest.files if row.kind == SIDECAR and not skipped.match(row.path)]
    lacking = [row.path for row in wanted if held.get(row.path) != row.blake3]
    weight_map = lacks_weight_map(files, manifest) if not is_laid else None
    return [weight_map, *lacking] if weight_map is not None else lacking


def files_left(files: Sequence[FileDigest], removed_files: Sequence[RemovedFile]) -> list[str]:
    """The base's sidecars that the deltas remove and that are still among some files."""
    removed = {file.path: file.blake3 for file in removed_files}
    return [file.path for file in files if file.kind == SIDECAR and is_removed(removed, file.path, file.blake3)]


def has_tensors_of_target(found: Survey, job: Job) -> bool:
    """Whether the receiver's tensors are the target's by name, dtype and shape."""
    rows = job.target.rows
    return len(rows) == len(job.tensors) and all(
        (row.name, row.dtype, row.shape) == (tensor.name, tensor.dtype.name, tensor.shape)
        for row, tensor in zip(rows, job.tensors, strict=True)
    )


def looks_like_target(found: Survey, job: Job) -> bool:
    """Guess from the files and the smallest changed tensor; a wrong guess costs time and nothing else."""
    if not found.is_target or not has_tensors_of_target(found, job):
        return False
    changed = [number for number, row in enumerate(job.target.rows) if row.pieces]
    if not changed:
        return True
    smallest = min(changed, key=lambda number: job.tensors[number].bytes)
    return bool((job.digest([smallest], "check")[smallest] == job.target.sums[smallest]).all())


def _known(record: Record | None, local: Sequence[Shard], checkpoint: Checkpoint, layout: bytes | None) -> Sums | None:
    """The digests of a checkpoint's tensors, if the record of its shards, `local`, read through a layout, counts."""
    if record is None or record.layout != layout or not record.is_current(checkpoint.identities):
        return None
    shards = {file.path for file in record.files if file.kind not in (SIDECAR,)}
    paths = {shard.path for shard in local} | {s.path for s in checkpoint.sidecars if s.kind != SIDECAR}
    forms = [(row.name, row.dtype, row.shape) for row in record.tensors]
    if shards != paths or forms != [(t.name, t.dtype.name, t.shape) for t in checkpoint.tensors]:
        return None
    return sums_of(row.digest for row in record.tensors)


def _is_alone(status: os.stat_result | None) -> bool:
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and bool(status.st_mode & stat.S_IWUSR)
        and os.geteuid() in (0, status.st_uid)
    )
