"""Decides what becomes of a receiver's files beside its shards; pure functions from what is there.

How they are written and removed is placement.py's matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from dcr_cli.checkpoint.checkpoint import FileDigest
from dcr_cli.checkpoint.digest import files_digest
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.chain import ANY_BLAKE3, is_removed
from dcr_cli.delta.manifest import FileRow, Manifest
from dcr_cli.errors import DamagedError, WrongBaseError
from dcr_cli.receiver.base import Base


def match_files(
    files: Sequence[FileDigest], wanted: bytes, candidates: Iterable[Collection[str]]
) -> list[FileDigest] | None:
    """Find the files whose files digest is `wanted`: all, or those of all that are among one of `candidates`."""
    for names in (None, *candidates):
        chosen = [file for file in files if names is None or file.kind == SHARD or file.path in names]
        if files_digest((file.path, file.kind, file.blake3) for file in chosen) == wanted:
            return chosen
    return None


def check_files(base: Base, manifest: Manifest, what: str) -> None:
    """Raise WrongBaseError if the files beside a receiver's own shards cannot become the target's.

    What the delta does not carry has to be there, what it removes has to be the base's, and several shards need the
    weight map that says what is in which.
    """
    held = _held(base)
    if base.laid is None:
        _check_has_weight_map(base, manifest, what)
    own_shards = {shard.path for shard in base.shards}
    for row in _other_files(base, manifest, is_exact=False):
        if not row.runs:
            facts = "is another than the base's" if row.path in held else "is in the base, but not here"
            hint = "put the base's file there; the delta does not carry it, since it did not change"
            raise WrongBaseError(what, f"file {shown(row.path)} {facts}", hint=hint)
        if row.path in own_shards:
            facts = f"file {shown(row.path)} is a file beside the shards in the target, but a shard here"
            raise WrongBaseError(what, facts, hint="start again from a full copy of the target")
    sidecars = {file.path: file.blake3 for file in base.files if file.kind == SIDECAR}
    removed = {file.path: file.blake3 for file in manifest.removed_files}
    for file in manifest.removed_files:
        if file.path in sidecars and not is_removed(removed, file.path, sidecars[file.path]):
            hint = "move it away to keep it; the delta removes the base's file of this name"
            raise WrongBaseError(what, f"file {shown(file.path)} is another than the base's", hint=hint)


def lacks_weight_map(files: Iterable[FileDigest], manifest: Manifest) -> str | None:
    """The path of the target's weight map if there are several shards among some files, and no weight map."""
    kinds = Counter(file.kind for file in files)
    if kinds[SHARD] < 2 or kinds[WEIGHT_MAP]:
        return None
    return next((row.path for row in manifest.files if row.kind == WEIGHT_MAP), None)


def _check_has_weight_map(base: Base, manifest: Manifest, what: str) -> None:
    path = lacks_weight_map(base.files, manifest)
    if path is not None:
        facts = f"has {len(base.shards)} shards and no weight map {shown(path)} that says what is in which"
        raise WrongBaseError(what, facts, hint="put the base's weight map there")


def _held(base: Base) -> dict[str, tuple[bytes, int]]:
    """The files of a receiver that are no shards: path -> blake3 and size."""
    return {file.path: (file.blake3, file.size) for file in base.files if file.kind != SHARD}


def _other_files(base: Base, manifest: Manifest, *, is_exact: bool) -> list[FileRow]:
    """The target's files beside the shards that the receiver has not, or has otherwise."""
    held = _held(base)
    rows = [row for row in manifest.files if row.kind == SIDECAR or (is_exact and row.kind != SHARD)]
    return [row for row in rows if held.get(row.path) != (row.blake3, row.size)]


def plan_files(base: Base, manifest: Manifest, *, is_exact: bool) -> tuple[tuple[FileRow, ...], tuple[str, ...]]:
    """Say which files beside the shards are written and which are removed."""
    others = _other_files(base, manifest, is_exact=is_exact)
    lacking = [row.path for row in others if not row.runs]
    if is_exact and lacking:
        raise DamagedError("manifest", f"says that {shown(lacking[0])} is the base's, but it is not")
    return tuple(row for row in others if row.runs), _removed_files(base, manifest, is_exact=is_exact)


def _removed_files(base: Base, manifest: Manifest, *, is_exact: bool) -> tuple[str, ...]:
    """Say which files beside the shards go: of a receiver with shards of its own, which may have files of its own too,
    only those that the delta names."""
    named = {file.path: file.blake3 for file in manifest.removed_files}
    sidecars = {file.path: file.blake3 for file in base.files if file.kind == SIDECAR}
    if is_exact:
        kept = {row.path for row in manifest.files}
        gone = {path: blake3 for path, blake3 in sidecars.items() if path not in kept}
        lacking = (path for path, blake3 in named.items() if path not in gone and blake3 != ANY_BLAKE3)
        if any(lacking) or not all(is_removed(named, path, blake3) for path, blake3 in gone.items()):
            raise DamagedError("manifest", "does not name the files of the base that the target has not")
        return tuple(file.path for file in base.files if file.kind != SHARD and file.path not in kept)
    return tuple(path for path in sidecars if path in named)
