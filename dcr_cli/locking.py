"""A lock file that says who holds it and that the kernel unlocks when its process ends, however it ends.

What the lock protects is its user's business.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dcr_cli.durable import NEW_FOLDER_MODE, File, Folder
from dcr_cli.errors import ConflictError, LocalError
from dcr_cli.holder import MAX_HOLDER_BYTES, Holder, decode_holder, encode_holder, this_process


class Lock:
    """A lock that the kernel ends with the process that holds it; a context manager."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Empty, because who held it may live on, and counts as a holder where a lock is granted twice.
        try:
            self._file.resize(0)
        finally:
            self._file.close()


def lock(folder: Folder, name: str) -> Lock:
    """Take the lock file `name`, or raise ConflictError that says who has it; never waits."""
    while True:
        file = folder.open_or_create(name)
        try:
            _flock(file)
            # Between our opening it and locking it, the holder before us may have removed it.
            status, own = folder.status(name), os.fstat(file.fd)
            if status is None or (status.st_dev, status.st_ino) != (own.st_dev, own.st_ino):
                file.close()
                continue
            _check_no_other(file)
            text = encode_holder(this_process())
            file.write_at(0, text)
            file.resize(len(text))
        except BaseException:
            file.close()
            raise
        return Lock(file)


@dataclass(frozen=True, slots=True)
class LockedFolder:
    """A folder, open, and the lock that is held in it; `was_made`: by whoever locked it."""

    folder: Folder
    lock: Lock
    was_made: bool


def lock_folder(parent: Folder, name: str, lock_name: str, mode: int = NEW_FOLDER_MODE) -> LockedFolder:
    """Open the folder `name`, made if it is not there, and take the lock file `lock_name` in it, as `lock` does."""
    while True:
        was_made = parent.make_folder(name, mode, exist_ok=True)
        try:
            folder = parent.open_folder(name)
        except LocalError:
            if parent.status(name) is not None:
                raise
            # Who had nothing to keep there has removed it.
            continue
        try:
            return LockedFolder(folder, lock(folder, lock_name), was_made)
        except BaseException as error:
            status, own = parent.status(name), os.fstat(folder.fd)
            folder.close()
            is_there = status is not None and (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)
            if is_there or not isinstance(error, LocalError):
                raise


def _flock(file: File) -> None:
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConflictError(str(file.path), f"another dcr holds it: {_holder(file)}", hint="try again later") from error
    except OSError as error:
        facts = f"the file system mounted there gives no locks: {error.strerror}"
        hint = "mount it with locks, or use a folder on a local disk"
        raise LocalError(str(file.path), facts, hint=hint) from error


def _holder(file: File) -> str:
    holder = _last_holder(file)
    return f"process {holder.pid} on {holder.host}" if holder is not None else "its name is not known yet"


def _check_no_other(file: File) -> None:
    """Some network mounts grant a lock twice. On one host that is seen: the last holder wrote who it is, and lives."""
    holder = _last_holder(file)
    if holder is not None and holder.is_alive and int(holder.pid) != os.getpid():
        raise ConflictError(str(file.path), f"another dcr holds it: {_holder(file)}", hint="try again later")


def _last_holder(file: File) -> Holder | None:
    return decode_holder(os.pread(file.fd, MAX_HOLDER_BYTES, 0))
