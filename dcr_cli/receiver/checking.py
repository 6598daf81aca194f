"""Reads again what lies in a receiver's places, and refuses what is not what it was to become or to stay.

What was checked is told by identities, so that a later change can be seen.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dcr_cli.checkpoint.checkpoint import FileDigest, Shard
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.folder import Files, Identity
from dcr_cli.checkpoint.header import parse_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, SIDECAR
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import ConflictError, DamagedError, DcrError, WrongBaseError
from dcr_cli.receiver.base import tensors_of
from dcr_cli.receiver.job import Job, Target, digest_tensors
from dcr_cli.receiver.laid.files import LaidFiles
from dcr_cli.receiver.places import CONFIG, check_places
from dcr_cli.receiver.plan import NewShard, Plan
from dcr_cli.receiver.receiver import HELD_CONFIG, Receiver
from dcr_cli.receiver.sidecars import identity_below

_REPAIR = "start again from a full copy of the target"


def check_shards(root: Folder, new: Sequence[NewShard], target: Target) -> dict[str, Identity]:
    """Read shards and raise DamagedError if one is not the target's; what they were then."""
    shards = [Shard(shard.path, parse_header(shard.header, shard.size, shard.path), shard.size) for shard in new]
    identities = {shard.path: identity_below(root, shard.path) for shard in shards}
    with Files(root.path, identities) as files:
        for shard in shards:
            header = bytearray(len(shard.header.raw))
            if identities[shard.path].size == shard.size:
                files.read_path_into(shard.path, 0, header)
            if header != shard.header.raw:
                raise DamagedError(str(root.path / shard.path), "is not the file that it was to become", hint=_REPAIR)
        tensors = list(tensors_of(shards).values())
        sums = digest_tensors(files, [shard.path for shard in shards], tensors, target, "check")
    number_of = {row.name: number for number, row in enumerate(target.rows)}
    for tensor, found in zip(tensors, sums, strict=True):
        if (target.sums[number_of[tensor.name]] != found).any():
            what = f"{root.path / shards[tensor.shard].path}: tensor {shown(tensor.name)}"
            raise DamagedError(what, "is not what it was to become", hint=_REPAIR)
    return identities


def check_laid(job: Job) -> dict[str, Identity]:
    """Read a receiver that stores its tensors through a layout, all of it, and raise DamagedError if it is not the
    target's, or if elements that it has more than once differ; what its shards were then."""
    laid, target = job.base.laid, job.target
    assert laid is not None
    with open_folder(job.root) as root:
        identities = {shard.path: identity_below(root, shard.path) for shard in laid.local}
    tensors = [laid.by_name[row.name] for row in target.rows]
    with Files(job.root, identities) as headers:
        for shard in laid.local:
            header = bytearray(len(shard.header.raw))
            if identities[shard.path].size == shard.size:
                headers.read_path_into(shard.path, 0, header)
            if header != shard.header.raw:
                raise DamagedError(str(job.root / shard.path), "is not the file that it was to become", hint=_REPAIR)
    with LaidFiles(laid, identities) as files:
        sums = digest_tensors(files, [shard.path for shard in laid.shards], tensors, target, "check")
    wrong = (sums != target.sums).any(axis=1)
    if wrong.any():
        what = f"{job.root}: tensor {shown(tensors[int(np.argmax(wrong))].name)}"
        raise DamagedError(what, "is not what it was to become", hint=_REPAIR)
    return identities


def check_sidecars(root: Folder, files: Sequence[FileDigest]) -> dict[str, Identity]:
    """Read those of some files that are no shards and raise ConflictError if one is not as it was; what they were
    then."""
    sidecars = [file for file in files if file.kind != SHARD]
    identities = {file.path: identity_below(root, file.path) for file in sidecars}
    with Files(root.path, identities) as reader:
        for file in sidecars:
            if object_digest(reader.read_file(file.path)) != file.blake3:
                what = str(root.path / file.path)
                raise ConflictError(what, "was changed since the change began", hint="put it back as it was")
    return identities


def others(root: Folder, paths: Iterable[str], known: Iterable[FileDigest]) -> list[str]:
    """Those of some paths at which a file lies, or a link, that is none of the known ones; a shard's header tells."""
    records: dict[str, list[FileDigest]] = {}
    for record in known:
        records.setdefault(record.path, []).append(record)
    present = [path for path in paths if (found := root.status(path)) is not None and not stat.S_ISDIR(found.st_mode)]
    return [path for path in present if not any(_is_one(root, record) for record in records.get(path, ()))]


def _is_one(root: Folder, record: FileDigest) -> bool:
    try:
        identity = identity_below(root, record.path)
        if identity.size < record.size or (record.kind != SHARD and identity.size != record.size):
            return False
        content = bytearray(record.size)
        with Files(root.path, {record.path: identity}) as reader:
            reader.read_path_into(record.path, 0, content)
    except DcrError:
        # What cannot be read is not known.
        return False
    return object_digest(content) == record.blake3


def check_unhindered(receiver: Receiver, plan: Plan, paths: Collection[str], known: Sequence[FileDigest]) -> None:
    """Raise WrongBaseError or ConflictError, before a stopped change goes on, if what lies at one of `paths`, which it
    replaces or removes, is none of the known files, the base's and the target's, or stands in the way.

    Where it only removes a file beside the shards, another one stays.
    """
    root, removed = receiver.root, {*plan.removed_files, *(path for part in plan.components for path in part.removed)}
    sidecars = {record.path for record in known if record.kind == SIDECAR}
    strange = set(others(root, {CONFIG, *paths}, known))
    is_held = receiver.home.status(HELD_CONFIG) is not None
    if CONFIG in strange and not is_held:
        if CONFIG in sidecars:
            raise ConflictError(
                str(root.path / CONFIG), "was changed since the change began", hint="put it back as it was"
            )
        # It was not the base's before either, and is put back.
        strange.remove(CONFIG)
    for path in sorted(strange):
        if path not in removed:
            facts = "was put there since the change began, where the target has a file"
            raise WrongBaseError(str(root.path / path), facts, hint="move it away")
        if path not in sidecars:
            facts = "was put there since the change began, which removes the base's file of this name"
            raise WrongBaseError(str(root.path / path), facts, hint="move it away to keep it")
    check_places(root, [path for path in paths if path not in removed], removed - strange)
