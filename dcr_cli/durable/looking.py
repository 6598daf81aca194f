"""An open folder, and what is in it. It changes nothing."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.durable.file import PRIVATE_FILE_MODE, File
from dcr_cli.durable.steps import translated, translating
from dcr_cli.errors import DamagedError, LocalError

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_GET_FLAGS = 0x80086601
_FIXED_FLAGS = 0x30
_FIXED_STATUS_FLAGS = stat.UF_IMMUTABLE | stat.UF_APPEND | stat.SF_IMMUTABLE | stat.SF_APPEND


class OpenFolder:
    """An open folder, only looked at; a context manager. Names are relative paths, and no component may be a link."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def status(self, name: str) -> os.stat_result | None:
        """What is at `name`, links not followed; None if nothing is."""
        try:
            with self._parent(name) as (fd, last):
                return os.stat(last, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise translated(error, self.path / name, "cannot be looked at") from error

    def names(self) -> list[str]:
        with translating(self.path, "cannot be listed"):
            return sorted(os.listdir(self.fd))

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file of at most `limit` bytes, None if it is not there; anything else is
        DamagedError."""
        file = self.open_to_read(name)
        if file is None:
            return None
        with file:
            return file.read_all(limit)

    def open_to_read(self, name: str) -> File | None:
        """Open a file to read it; None if it is not there."""
        try:
            return File(self._open(name, os.O_RDONLY), self.path / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translated(error, self.path / name, "cannot be read") from error

    def open_folder(self, name: str) -> Self:
        with translating(self.path / name, "cannot be opened"), self._parent(name) as (fd, last):
            return type(self)(os.open(last, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd), self.path / name)

    def find_folder(self, name: str) -> Self | None:
        """Open a folder; None if nothing is there."""
        try:
            return self.open_folder(name)
        except LocalError as error:
            # By what the call itself found: a look at the name afterwards may find what another process has made since.
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def open_linked(self, name: str) -> File:
        """Open a file to read it, also where its name is a link."""
        with translating(self.path / name, "cannot be opened"), self._parent(name) as (fd, last):
            return File(os.open(last, os.O_RDONLY | (FILE_FLAGS & ~os.O_NOFOLLOW), dir_fd=fd), self.path / name)

    def link_text(self, name: str) -> str:
        """What a link says."""
        with translating(self.path / name, "cannot be read"), self._parent(name) as (fd, last):
            return os.readlink(last, dir_fd=fd)

    def is_fixed(self, name: str = "") -> bool:
        """Whether a file, or a folder, this one itself too, has the attribute `immutable` or `append only`, which stops
        root too."""
        try:
            with self._parent(name or ".") as (fd, last):
                opened = os.open(last, os.O_RDONLY | FILE_FLAGS, dir_fd=fd)
        except OSError:
            return False
        try:
            flags = fcntl.ioctl(opened, _GET_FLAGS, bytes(8))
        except OSError:
            # Where attributes are another system's, they are part of the status.
            return bool(getattr(os.fstat(opened), "st_flags", 0) & _FIXED_STATUS_FLAGS)
        finally:
            os.close(opened)
        return bool(int.from_bytes(flags[:4], "little") & _FIXED_FLAGS)

    def mount_of(self, name: str = "") -> tuple[int, int]:
        """Which mount and device a name that is there, or this folder itself, lies on: a rename stays within both.

        Where the system does not tell mounts apart, a mount is its device, and no file is one of its own.
        """
        path = self.path / name
        with translating(path, "cannot be looked at"), self._parent(name or ".") as (fd, last):
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            # A layered file system has devices of its own for files.
            device = (status if stat.S_ISDIR(status.st_mode) else os.fstat(fd)).st_dev
            return _mount_id(last, fd), device

    def is_empty(self, name: str) -> bool:
        """Whether nothing is in the folder `name`."""
        with self.open_folder(name) as folder:
            return not folder.names()

    def _open(self, name: str, flags: int) -> int:
        with self._parent(name) as (fd, last):
            opened = os.open(last, flags | FILE_FLAGS, PRIVATE_FILE_MODE, dir_fd=fd)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise DamagedError(str(self.path / name), "is not a regular file")
        return opened

    def _is_one_file(self, name: str, other: str) -> bool:
        statuses = [self.status(each) for each in (name, other)]
        return len({(each.st_dev, each.st_ino) if each else None for each in statuses}) == 1

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Lend a descriptor of the folder that `name` lies in, and its last component."""
        *above, last = name.split("/")
        fd = self.fd
        try:
            for part in above:
                inner = os.open(part, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
                # The other way round, a signal in between would have it closed twice.
                outer, fd = fd, inner
                if outer != self.fd:
                    os.close(outer)
            yield fd, last
        finally:
            if fd != self.fd:
                os.close(fd)


def _mount_id(name: str, folder: int) -> int:
    """The number of the mount on which `name` in an open folder lies; 0 where the system does not tell."""
    if not hasattr(os, "O_PATH"):
        return 0
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return 0
    finally:
        os.close(fd)
    return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), 0)
