"""Reads again what lies in a receiver's places, and refuses what is not what it was to become or to stay.

What was checked is told by identities, so that a later change can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcr_cli.checkpoint.checkpoint import FileDigest, Shard
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.folder import Files, Identity
from dcr_cli.checkpoint.header import parse_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.durable import Folder
from dcr_cli.errors import ConflictError, DamagedError
from dcr_cli.receiver.job import Target, digest_tensors
from dcr_cli.receiver.plan import NewShard
from dcr_cli.receiver.receiver import tensors_of
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
