"""A lock file that says who holds it and that the kernel unlocks when its process ends, however it ends.

What the lock protects is its user's business.
"""

from __future__ import annotations

import fcntl
import os
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.in_progress import Holder, decode_holder, encode_holder, this_process
from dcr_cli.durable import File, Folder
from dcr_cli.errors import ConflictError, LocalError


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


def _flock(file: File) -> None:
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConflictError(str(file.path), f"another dcr holds it: {_holder(file)}", hint="try again later") from error
    except OSError as error:
        facts = f"the file system mounted there gives no locks: {error.strerror}"
        raise LocalError(
            str(file.path), facts, hint="mount it with locks, or keep the checkpoint on a local disk"
        ) from error


def _holder(file: File) -> str:
    holder = _last_holder(file)
    return f"process {holder.pid} on {holder.host}" if holder is not None else "its name is not known yet"


def _check_no_other(file: File) -> None:
    """Some network mounts grant a lock twice. On one host that is seen: the last holder wrote who it is, and lives."""
    holder = _last_holder(file)
    if holder is not None and holder.is_alive and int(holder.pid) != os.getpid():
        raise ConflictError(str(file.path), f"another dcr holds it: {_holder(file)}", hint="try again later")


def _last_holder(file: File) -> Holder | None:
    return decode_holder(os.pread(file.fd, 1024, 0))
