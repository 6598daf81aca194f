"""An open file that is changed. How it is found or made is a folder's matter."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_cli.durable.steps import NOT_HERE, step, translated, translating
from dcr_cli.errors import ConflictError, DamagedError, LocalError

PRIVATE_FILE_MODE = 0o600
_COPY_BYTES = 1 << 20
_FICLONE = 0x40049409
_RETRY_SECONDS = 0.001
_RETRIES = 10_000


class File:
    """An open file that is written at given offsets, by any number of threads; a context manager."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write_at(self, offset: int, data: Any) -> None:
        """Write all of a bytes-like object, however many calls that takes."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        retries = 0
        while view:
            try:
                step("write", self.path)
                count = os.pwrite(self.fd, view, offset)
            except BlockingIOError as error:
                retries += 1
                if retries > _RETRIES:
                    raise translated(error, self.path, "cannot be written") from error
                time.sleep(_RETRY_SECONDS)
                continue
            except OSError as error:
                raise translated(error, self.path, "cannot be written") from error
            if not count:
                raise LocalError(str(self.path), "cannot be written: the system took no byte of it")
            view = view[count:]
            offset += count

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer`."""
        while buffer:
            with translating(self.path, "cannot be read"):
                count = os.preadv(self.fd, [buffer], offset)
            if not count:
                raise ConflictError(str(self.path), "became shorter while it was changed")
            buffer = buffer[count:]
            offset += count

    def read_all(self, limit: int) -> bytes:
        """Return all bytes of the file; DamagedError if they are more than `limit`."""
        size = os.fstat(self.fd).st_size
        if size > limit:
            raise DamagedError(str(self.path), f"has {size} bytes, at most {limit} expected")
        data = bytearray(size)
        self.read_into(0, memoryview(data))
        return bytes(data)

    def resize(self, size: int) -> None:
        """Cut the file to `size` bytes, or let it grow by a hole."""
        with translating(self.path, "cannot be given its size"):
            step("resize", self.path)
            os.ftruncate(self.fd, size)

    def clone_from(self, source: File) -> bool:
        """Share the bytes of another file where the file system can do that; False where it cannot."""
        try:
            step("clone", self.path, source.path)
            fcntl.ioctl(self.fd, _FICLONE, source.fd)
        except OSError as error:
            if error.errno in NOT_HERE:
                return False
            raise translated(error, self.path, "cannot be cloned") from error
        return True

    def copy_from(self, source: File) -> int:
        """Copy all bytes of another file: how many."""
        buffer = memoryview(bytearray(_COPY_BYTES))
        offset = 0
        while True:
            with translating(source.path, "cannot be read"):
                count = os.preadv(source.fd, [buffer], offset)
            if not count:
                return offset
            self.write_at(offset, buffer[:count])
            offset += count

    def set_mode(self, mode: int) -> None:
        """Give the file a mode, whatever the umask is."""
        set_mode(self.fd, self.path, mode)

    def sync(self) -> None:
        """Make the file's bytes durable. If it fails, nothing may be assumed of what the file holds."""
        with translating(self.path, "cannot be synced"):
            step("sync", self.path)
            os.fsync(self.fd)

    def close(self) -> None:
        """Close it; some file systems report only here that a write found no room."""
        try:
            # With nothing in between, so that no signal leaves it open and forgotten.
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)
        except OSError as error:
            raise translated(error, self.path, "cannot be closed") from error


def may_give_owner(status: os.stat_result) -> bool:
    """Whether this process may give what it makes the owner that `status` tells of."""
    groups = {os.getegid(), *os.getgroups()}
    return os.geteuid() == 0 or (status.st_uid == os.geteuid() and status.st_gid in groups)


def set_mode(fd: int, path: Path, mode: int) -> None:
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o777 != mode:
        with translating(path, "cannot be given its mode"):
            step("chmod", path)
            os.fchmod(fd, mode)


def give_mode(fd: int, path: Path, status: os.stat_result, *, with_owner: bool) -> bool:
    """Give what is open mode and, if asked to, owner; whether that changed anything."""
    own = os.fstat(fd)
    is_owner_new = with_owner and (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid)
    is_mode_new = stat.S_IMODE(own.st_mode) != stat.S_IMODE(status.st_mode)
    if is_owner_new:
        step("chown", path)
        os.fchown(fd, status.st_uid, status.st_gid)
    if is_mode_new:
        step("chmod", path)
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
    return is_owner_new or is_mode_new
