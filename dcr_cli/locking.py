"""A lock file that says who holds it and that the kernel unlocks when its process ends, however it ends.

What the lock protects is its user's business.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dcr_cli.durable import NEW_FOLDER_MODE, File, Folder
from dcr_cli.errors import ConflictError, DcrError, LocalError
from dcr_cli.holder import MAX_HOLDER_BYTES, Holder, decode_holder, encode_holder, this_process


class Lock:
    """A lock that the kernel ends with the process that holds it; a context manager.

    It ends, too, when nobody knows of it any more: an interrupt may come before whoever asked for it has it.
    """

    # The one that has it; none until all else is there.
    _process: int | None = None

    def __init__(self, file: File) -> None:
        self._file = file
        self._is_taken = False
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def __del__(self) -> None:
        # In a process that was forked meanwhile it is still the other one's.
        if self._process == os.getpid():
            with suppress(DcrError, OSError):
                self.end()

    def take(self, folder: Folder, name: str) -> bool:
        """Take the lock whose file was opened as `name`; False if that was removed meanwhile. ConflictError says who
        has it."""
        _flock(self._file)
        # Between our opening it and locking it, the holder before us may have removed it.
        if not _is_at(folder, name, self._file.fd):
            return False
        _check_no_other(self._file)
        self._is_taken = True
        text = encode_holder(this_process())
        self._file.write_at(0, text)
        self._file.resize(len(text))
        return True

    def end(self) -> None:
        """Let others have it, if it is not ended already."""
        if self._file.fd < 0:
            return
        try:
            # Empty, because who held it may live on, and counts as a holder where a lock is granted twice.
            if self._is_taken:
                self._file.resize(0)
        finally:
            self._file.close()


def lock(folder: Folder, name: str) -> Lock:
    """Take the lock file `name`, or raise ConflictError that says who has it; never waits.

    A file that was made for it is removed again if it cannot be locked, unless somebody else has it.
    """
    while True:
        is_new = folder.status(name) is None
        file = folder.open_or_create(name)
        taken = Lock(file)
        try:
            if taken.take(folder, name):
                return taken
            taken.end()
        except BaseException as error:
            # What went wrong before is the cause to report, not that tidying up failed after it.
            with suppress(DcrError, OSError), taken:
                if is_new and not isinstance(error, ConflictError) and _is_at(folder, name, file.fd):
                    folder.remove(name)
            raise


@dataclass(frozen=True, slots=True)
class LockedFolder:
    """A folder, open, and the lock that is held in it; `was_made`: by whoever locked it."""

    folder: Folder
    lock: Lock
    was_made: bool


def lock_folder(parent: Folder, name: str, lock_name: str, mode: int = NEW_FOLDER_MODE) -> LockedFolder:
    """Open the folder `name`, made if it is not there, and take the lock file `lock_name` in it, as `lock` does.

    What was made for it is removed again if the lock cannot be had, unless somebody else has it.
    """
    while True:
        was_made = parent.make_folder(name, mode, exist_ok=True)
        folder = parent.find_folder(name)
        if folder is None:
            # Who had nothing to keep there has removed it.
            continue
        try:
            return LockedFolder(folder, lock(folder, lock_name), was_made)
        except BaseException as error:
            with folder:
                is_there = _is_at(parent, name, folder.fd)
            if was_made and is_there and not isinstance(error, ConflictError):
                with suppress(DcrError):
                    parent.remove_folder(name, used_ok=True)
            if is_there or not isinstance(error, LocalError):
                raise


def _is_at(folder: Folder, name: str, fd: int) -> bool:
    """Whether what has the name is what is open."""
    status, own = folder.status(name), os.fstat(fd)
    return status is not None and (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)


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
