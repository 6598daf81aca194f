"""A folder of the local disk, or of a mounted file server, as a backend.

A file is written beside its place under a name that starts with a dot, synced, and then given its name: by a rename,
or by one that fails if something has it. No link below the root is followed, so nothing outside is read or changed.
A process that is killed leaves such a file, which `leftovers` shows and `entries` does not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcr_cli.durable import File, Folder, open_folder
from dcr_cli.errors import LocalError
from dcr_cli.store.backend import (
    CHUNK_BYTES,
    AbsentError,
    Answer,
    Entry,
    OutsideError,
    Readable,
    Status,
    is_leftover,
    new_name,
    parts,
)


class LocalBackend:
    """The files below a folder, which is made by the first write."""

    can_create = True

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        with self._opened() as folder:
            file = None if folder is None else folder.open_to_read(key)
        if file is None:
            raise AbsentError
        status = os.fstat(file.fd)
        if begin > status.st_size:
            file.close()
            raise OutsideError(f"has {status.st_size} bytes, at least {begin} expected")
        end = status.st_size if size is None else min(begin + size, status.st_size)
        tag = f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"
        return Answer(begin, end - begin, status.st_size, _chunks(file, begin, end), tag, file.close)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        self._publish(key, data, lambda folder, new: folder.rename(new, folder, key))

    def create(self, key: str, data: bytes) -> bool:
        is_ours = False

        def take(folder: Folder, new: str) -> None:
            nonlocal is_ours
            is_ours = folder.rename_if_free(new, key)
            if not is_ours:
                folder.remove(new)

        self._publish(key, data, take)
        return is_ours

    def status(self, key: str) -> Status | None:
        with self._opened() as folder:
            status = None if folder is None else folder.status(key)
        return None if status is None or not stat.S_ISREG(status.st_mode) else _status(status)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return (entry for entry in self._files(prefix) if not entry.key.rpartition("/")[2].startswith("."))

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        return (entry for entry in self._files(prefix) if is_leftover(entry.key))

    def remove(self, key: str) -> None:
        with self._opened() as folder:
            if folder is None or folder.status(key) is None:
                return
            try:
                folder.remove(key)
                folder.sync(key.rpartition("/")[0])
            except LocalError as error:
                # Somebody else was faster.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            _remove_emptied(folder, key)

    def close(self) -> None:
        pass

    @contextmanager
    def _opened(self) -> Iterator[Folder | None]:
        """Lend the root; None if it is not there."""
        if not os.path.lexists(self._root):
            yield None
            return
        with open_folder(self._root) as folder:
            yield folder

    def _files(self, prefix: str) -> Iterator[Entry]:
        with self._opened() as root:
            if root is not None and (not prefix or _is_folder(root.status(prefix.rstrip("/")))):
                yield from _walk(root, prefix)

    def _publish(self, key: str, data: bytes | Readable, put_in_place: Callable[[Folder, str], None]) -> None:
        """Write a file of its own, durably, and give it its place; it is gone if that fails."""
        new = new_name(key)
        self._make_root()
        with open_folder(self._root) as folder:
            try:
                folder.make_parents(key)
                with folder.create_file(new) as file:
                    at = 0
                    for part in parts(data):
                        file.write_at(at, part)
                        at += len(part)
                    file.sync()
                put_in_place(folder, new)
            except BaseException as error:
                folder.remove(new, missing_ok=True)
                if isinstance(error.__cause__, FileNotFoundError):
                    # Its folder was empty, and has just been removed with what was in it before.
                    raise AbsentError from error
                raise
            folder.sync(key.rpartition("/")[0])

    def _make_root(self) -> None:
        if self._root.is_dir():
            return
        above = self._root
        while not os.path.lexists(above):
            above = above.parent
        with open_folder(above) as folder:
            folder.make_parents(f"{self._root.relative_to(above)}/.")


def _chunks(file: File, begin: int, end: int) -> Iterator[bytes]:
    for at in range(begin, end, CHUNK_BYTES):
        chunk = bytearray(min(CHUNK_BYTES, end - at))
        file.read_into(at, memoryview(chunk))
        yield bytes(chunk)


def _walk(root: Folder, prefix: str) -> Iterator[Entry]:
    """All files but those in folders that start with a dot; what goes away meanwhile may be among them or not."""
    opened = root.find_folder(prefix.rstrip("/") or ".")
    if opened is None:
        return
    with opened:
        names = opened.names()
    for name in names:
        status = root.status(prefix + name)
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            if not name.startswith("."):
                yield from _walk(root, f"{prefix}{name}/")
        elif stat.S_ISREG(status.st_mode):
            known = _status(status)
            yield Entry(prefix + name, known.size, known.modified)


def _remove_emptied(root: Folder, key: str) -> None:
    """Remove the folders above what was removed that hold nothing more, as far as that may be; those in the root itself
    stay."""
    above = key.rpartition("/")[0]
    with suppress(LocalError):
        while "/" in above:
            root.remove_folder(above, used_ok=True)
            above = above.rpartition("/")[0]


def _is_folder(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(status: os.stat_result) -> Status:
    return Status(status.st_size, status.st_mtime)
