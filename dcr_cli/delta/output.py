"""The folder that a new delta is written to: payloads while they come, then manifest and digests, then the commit.

What is in them is not its business. Without a folder the same documents are made, counted and dropped.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from dcr_cli.arguments import check_path, is_loop
from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.commit import Commit, encode_commit
from dcr_cli.delta.manifest import Manifest, encode_digests, encode_manifest
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.durable import Folder, check_mounted_to_write, open_folder
from dcr_cli.errors import ConflictError, DcrError, LocalError, UsageError
from dcr_cli.locking import LockedFolder, lock_folder

MANIFEST_NAME, DIGESTS_NAME, COMMIT_NAME, PAYLOADS_NAME = "manifest.zst", "digests.zst", "commit.json", "payloads"
_NEW_COMMIT, _LOCK = f"{COMMIT_NAME}.new", ".dcr-lock"
_ELSEWHERE, _OTHER_NAME = "choose another place for the delta", "choose another name for the delta"
# What a stopped run may have left beside its payloads, and what these are called; nothing else is ever removed.
_LEFT_OVER = frozenset((MANIFEST_NAME, DIGESTS_NAME, _NEW_COMMIT, _LOCK))
Digest = bytes  # where a member is named bytes
_PAYLOAD = re.compile(r"[0-9]{6,}\.safetensors")


class Sink(Protocol):
    """What a delta is written to: payloads while they come, then the documents.

    `bytes` is how much came, `name` where it is, if it has a place.
    """

    writer: PayloadWriter
    bytes: int
    name: str | None
    dry_run: bool

    def finish(self, manifest: Manifest, digests: Sequence[Digest], base: State, target: State) -> None:
        """Write the documents; `digests` are those of all tensors of the manifest, 16 bytes each."""


class DeltaOutput:
    """A delta that is being written, in a folder that is locked meanwhile; a context manager.

    Complete once `finish` returns. If it is left before, by an error, what it wrote is removed; if the process is
    killed, the folder has no commit, reads as incomplete, and the next delta may take its name. A dry run checks that
    the folder can be had, and writes nothing. Raises UsageError, ConflictError (another one is being written there, or
    something else is there) or LocalError when it is entered.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, *, outside: Sequence[Path], dry_run: bool = False
    ) -> None:
        if folder is not None:
            check_path(folder, "output")
        self.name = str(folder) if folder is not None else None
        self.folder = Path(os.path.realpath(folder)) if folder is not None else None
        self.dry_run = dry_run
        self.bytes = 0
        self.writer = PayloadWriter(self._emit)
        self._outside = outside
        self._locked: LockedFolder | None = None
        self._written: list[str] = []
        self._has_payloads = False

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._check_place(self.folder)
            with open_folder(self.folder.parent) as parent:
                # Looked at before it is locked, because the lock is a file, which no other folder should get.
                _check_free(parent, self.folder)
                if self.dry_run:
                    return self
                self._locked = lock_folder(parent, self.folder.name, _LOCK)
                try:
                    parent.sync()
                    _check_free(parent, self.folder)
                    _clear(self._locked.folder)
                    self._has_payloads = self._locked.folder.make_folder(PAYLOADS_NAME)
                except BaseException as error:
                    self._leave(self._locked, self.folder, error)
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._locked is not None and self.folder is not None:
            self._leave(self._locked, self.folder, error)

    def _leave(self, locked: LockedFolder, place: Path, error: BaseException | None) -> None:
        """Unlock the folder; after an error, remove what was written, and the folder too if it was made for it."""
        # What went wrong before is the cause to report, not that tidying up failed after it.
        with suppress(DcrError) if error is not None else nullcontext(), locked.lock, locked.folder as folder:
            if error is not None:
                # The commit first: without it, the rest is no delta.
                for name in reversed(self._written):
                    folder.remove(name, missing_ok=True)
                if self._has_payloads:
                    folder.remove_folder(PAYLOADS_NAME, used_ok=True)
            folder.remove(_LOCK)
            if error is not None and locked.was_made:
                with open_folder(place.parent) as parent:
                    parent.remove_folder(place.name, used_ok=True)

    def finish(self, manifest: Manifest, digests: Sequence[bytes], base: State, target: State) -> None:
        """Write the documents, in the order that makes the commit the last thing to become true.

        `digests` are those of all tensors of the manifest, 16 bytes each.
        """
        documents = encode_documents(manifest, digests, base, target)
        commit = encode_commit(documents.commit)
        self._write(MANIFEST_NAME, documents.manifest)
        self._write(DIGESTS_NAME, documents.digests)
        if self._locked is not None:
            # The commit must not become durable before the names of what it binds.
            self._locked.folder.sync(PAYLOADS_NAME)
            self._locked.folder.sync()
        self.bytes += len(commit)
        if self._locked is not None:
            self._written += (_NEW_COMMIT, COMMIT_NAME)
            self._locked.folder.write_file(_NEW_COMMIT, commit)
            self._locked.folder.rename(_NEW_COMMIT, self._locked.folder, COMMIT_NAME)
            self._locked.folder.sync()

    def _emit(self, name: str, data: bytes) -> None:
        self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        self.bytes += len(data)
        if self._locked is not None:
            self._written.append(name)
            self._locked.folder.write_file(name, data)

    def _check_place(self, place: Path) -> None:
        if is_loop(place):
            raise UsageError(str(self.name), "is a link that leads in a circle", hint=_OTHER_NAME)
        for checkpoint in self._outside:
            root = Path(os.path.realpath(checkpoint))
            if place == root or root in place.parents:
                raise UsageError(
                    str(self.name), f"a delta cannot lie inside the checkpoint {checkpoint}", hint=_ELSEWHERE
                )
            if place in root.parents:
                raise UsageError(
                    str(self.name), f"a delta cannot be written around the checkpoint {checkpoint}", hint=_ELSEWHERE
                )
        for path in (place, place.parent):
            if path.exists() and not path.is_dir():
                facts = f"{shown(str(path))} is {file_kind(path.stat().st_mode)}; a delta is a folder"
                raise UsageError(str(self.name), facts, hint=_OTHER_NAME)
        if not place.parent.exists():
            hint = f"mkdir -p {shlex.quote(str(place.parent))}"
            raise LocalError(str(self.name), f"there is no folder {shown(str(place.parent))}", hint=hint)
        changed = place if place.exists() else place.parent
        # Whoever was writing there may just have removed it; then it is made anew.
        if not os.access(changed, os.W_OK | os.X_OK, effective_ids=True) and changed.exists():
            check_mounted_to_write(changed, "cannot be written into")
            facts = f"this process may not write into {shown(str(changed))}"
            raise LocalError(str(self.name), facts, hint=_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a delta, encoded, and the commit that binds them."""

    manifest: bytes
    digests: bytes
    commit: Commit


def encode_documents(manifest: Manifest, digests: Sequence[bytes], base: State, target: State) -> Documents:
    """Encode the documents of a delta; `digests` are those of all tensors of the manifest, 16 bytes each."""
    manifest_object, decoded = encode_manifest(manifest)
    rows = zip(manifest.tensors, digests, strict=True)
    digests_object = encode_digests(digest for row, digest in rows if not row.pieces)
    commit = Commit(
        base=base,
        target=target,
        manifest_blake3=object_digest(manifest_object),
        manifest_decoded_blake3=decoded,
        manifest_bytes=len(manifest_object),
        digests_blake3=object_digest(digests_object),
        digests_bytes=len(digests_object),
        payload_count=len(manifest.payloads),
        payload_bytes=sum(payload.bytes for payload in manifest.payloads),
        created="",
        publisher="",
    )
    return Documents(manifest_object, digests_object, commit)


def _check_free(parent: Folder, place: Path) -> None:
    """Raise ConflictError if something else lies in the folder than what a stopped run may have left there."""
    folder = parent.find_folder(place.name)
    if folder is None:
        return
    with folder:
        names = {name: status for name in folder.names() if (status := folder.status(name)) is not None}
        payloads = names.pop(PAYLOADS_NAME, None)
        is_free = all(name in _LEFT_OVER and stat.S_ISREG(status.st_mode) for name, status in names.items())
        if is_free and payloads is not None:
            is_free = stat.S_ISDIR(payloads.st_mode) and all(map(_PAYLOAD.fullmatch, _payloads(folder)))
    if not is_free:
        raise ConflictError(
            str(place), "exists and is not empty", hint="choose another name for the delta, or remove this folder"
        )


def _clear(folder: Folder) -> None:
    """Remove what a stopped run left."""
    for name in sorted(_LEFT_OVER - {_LOCK}):
        folder.remove(name, missing_ok=True)
    if folder.status(PAYLOADS_NAME) is not None:
        for name in _payloads(folder):
            folder.remove(f"{PAYLOADS_NAME}/{name}")
        folder.remove_folder(PAYLOADS_NAME)


def _payloads(folder: Folder) -> list[str]:
    payloads = folder.find_folder(PAYLOADS_NAME)
    if payloads is None:
        # Whoever was writing there has just removed it.
        return []
    with payloads:
        return payloads.names()
