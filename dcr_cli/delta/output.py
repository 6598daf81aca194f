"""The folder that a new delta is written to: payloads while they come, then manifest and digests, then the commit.

What is in them is not its business. Without a folder the same documents are made, counted and dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.delta.commit import Commit, encode_commit
from dcr_cli.delta.manifest import Manifest, encode_digests, encode_manifest
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.durable import NEW_FILE_MODE, Folder, open_folder
from dcr_cli.errors import ConflictError, UsageError

MANIFEST_NAME, DIGESTS_NAME, COMMIT_NAME, PAYLOADS_NAME = "manifest.zst", "digests.zst", "commit.json", "payloads"
_NAMES = {MANIFEST_NAME, DIGESTS_NAME, COMMIT_NAME, PAYLOADS_NAME, f"{COMMIT_NAME}.new"}
# What a payload is called; nothing else is removed from a folder of payloads.
_PAYLOAD = re.compile(r"[0-9]{6,}\.safetensors")


class DeltaOutput:
    """A delta that is being written; a context manager.

    Complete once `finish` returns. If it is left before, by an error, what it wrote is removed; if the process is
    killed, the folder has no commit, reads as incomplete, and the next delta may take its name.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, outside: Sequence[Path]) -> None:
        self.name = str(folder) if folder is not None else None
        self.folder = Path(os.path.abspath(folder)) if folder is not None else None
        self.bytes = 0
        self.writer = PayloadWriter(self._emit)
        self._outside = outside
        self._open: Folder | None = None
        self._made_folder = False

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._check_place(self.folder)
            with _parent(self.folder) as parent:
                self._made_folder = parent.make_folder(self.folder.name, exist_ok=True)
                parent.sync()
            self._open = open_folder(self.folder)
            try:
                self._clear(self._open)
                self._open.make_folder(PAYLOADS_NAME)
            except BaseException:
                self._open.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open is None or self.folder is None:
            return
        try:
            if kind is not None:
                for name in sorted(_NAMES):
                    self._open.remove_tree(name, missing_ok=True)
                if self._made_folder:
                    with _parent(self.folder) as parent:
                        parent.remove_folder(self.folder.name)
        finally:
            self._open.close()

    def finish(self, manifest: Manifest, digests: Sequence[bytes], base: State, target: State) -> None:
        """Write the documents, in the order that makes the commit the last thing to become true.

        `digests` are those of all tensors of the manifest, 16 bytes each.
        """
        manifest_object, decoded = encode_manifest(manifest)
        rows = zip(manifest.tensors, digests, strict=True)
        digests_object = encode_digests(digest for row, digest in rows if not row.pieces)
        commit = encode_commit(
            Commit(
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
        )
        self._write(MANIFEST_NAME, manifest_object)
        self._write(DIGESTS_NAME, digests_object)
        if self._open is not None:
            # The commit must not become durable before the names of what it binds.
            self._open.sync(PAYLOADS_NAME)
            self._open.sync()
        self.bytes += len(commit)
        if self._open is not None:
            self._open.replace_file(COMMIT_NAME, commit, NEW_FILE_MODE)

    def _emit(self, name: str, data: bytes) -> None:
        self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        self.bytes += len(data)
        if self._open is not None:
            self._open.write_file(name, data)

    def _check_place(self, folder: Path) -> None:
        place = folder.resolve()
        for checkpoint in self._outside:
            root = checkpoint.resolve()
            if place == root or root in place.parents:
                raise UsageError(str(folder), f"a delta cannot lie inside the checkpoint {checkpoint}")
            if place in root.parents:
                raise UsageError(str(folder), f"a delta cannot be written around the checkpoint {checkpoint}")

    def _clear(self, opened: Folder) -> None:
        """Remove what a stopped run left; refuse anything else that is there."""
        names = opened.names()
        is_left_over = COMMIT_NAME not in names and set(names) <= _NAMES
        if is_left_over and PAYLOADS_NAME in names:
            with opened.open_folder(PAYLOADS_NAME) as payloads:
                is_left_over = all(_PAYLOAD.fullmatch(name) for name in payloads.names())
        if not is_left_over:
            raise ConflictError(
                str(self.folder),
                "exists and is not empty",
                hint="choose another name for the delta, or remove this folder",
            )
        for name in names:
            opened.remove_tree(name)


def _parent(folder: Path) -> Folder:
    return open_folder(folder.parent)
