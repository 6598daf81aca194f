"""An open folder in which files and folders are made, moved and removed."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.durable.file import PRIVATE_FILE_MODE, File, give_mode, set_mode
from dcr_cli.durable.looking import FILE_FLAGS, FOLDER_FLAGS, OpenFolder
from dcr_cli.durable.steps import NOT_HERE, step, translated, translating
from dcr_cli.errors import DamagedError, UnsupportedError

NEW_FILE_MODE = 0o644
NEW_FOLDER_MODE = 0o755
PRIVATE_FOLDER_MODE = 0o700
# Where no file can have a second name.
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_RENAME_NOREPLACE = 1


class Folder(OpenFolder):
    """An open folder, changed; a context manager. Names are relative paths; none of their components may be a link."""

    def open_file(self, name: str) -> File:
        """Open an existing file to change it where it lies."""
        with translating(self.path / name, "cannot be opened for writing"):
            return File(self._open(name, os.O_RDWR), self.path / name)

    def create_file(self, name: str, mode: int = NEW_FILE_MODE) -> File:
        """Create a file that must not exist."""
        with translating(self.path / name, "cannot be created"), self._parent(name) as (fd, last):
            step("create", self.path / name)
            return File(
                os.open(last, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE_FLAGS, mode, dir_fd=fd), self.path / name
            )

    def open_or_create(self, name: str) -> File:
        """Open a private file to change it, creating it if it is not there."""
        with translating(self.path / name, "cannot be opened"):
            step("create", self.path / name)
            return File(self._open(name, os.O_RDWR | os.O_CREAT), self.path / name)

    def write_file(self, name: str, data: bytes, mode: int = NEW_FILE_MODE) -> None:
        """Create a file, write all of `data` and sync it. Its name is durable after `sync`."""
        with self.create_file(name, mode) as file:
            file.write_at(0, data)
            file.sync()

    def replace_file(self, name: str, data: bytes, mode: int = PRIVATE_FILE_MODE) -> None:
        """Write a file so that it holds, whatever happens, its old bytes or the new ones; durable on return.

        It has the mode whatever the umask is.
        """
        new = f"{name}.new"
        self.remove(new, missing_ok=True)
        with self.create_file(new, mode) as file:
            file.set_mode(mode)
            file.write_at(0, data)
            file.sync()
        self.rename(new, self, name)
        self.sync(name.rpartition("/")[0])

    def take_mode(self, name: str, status: os.stat_result, *, with_owner: bool = True) -> None:
        """Give a file mode and owner of another one, durably; LocalError if this process may not."""
        with translating(self.path / name, f"cannot be given owner {status.st_uid}:{status.st_gid} and mode"):
            file = File(self._open(name, os.O_RDONLY), self.path / name)
            with file:
                if give_mode(file.fd, file.path, status, with_owner=with_owner):
                    file.sync()

    def take_folder_mode(self, name: str, status: os.stat_result, *, with_owner: bool = True) -> None:
        """Give the folder `name` below this one, or this one itself, mode and owner of another, durably."""
        path = self.path / name if name else self.path
        with (
            translating(path, f"cannot be given owner {status.st_uid}:{status.st_gid} and mode"),
            self.open_folder(name) if name else _borrowed(self) as folder,
        ):
            if give_mode(folder.fd, path, status, with_owner=with_owner):
                folder.sync()

    def make_private(self) -> None:
        """Let nobody but its owner use the folder, and the owner change what is in it."""
        self.set_mode(PRIVATE_FOLDER_MODE)

    def set_mode(self, mode: int) -> None:
        """Give the folder a mode, whatever the umask is."""
        set_mode(self.fd, self.path, mode)

    def make_changeable(self) -> None:
        """Let this process change what is in a folder that is to be removed, if it does not have the right already."""
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.fd, effective_ids=True):
            self.make_private()

    def rename(self, name: str, to: Folder, new_name: str) -> None:
        """Move `name`, in one step, over whatever has the new name."""
        old, new = self.path / name, to.path / new_name
        with (
            translating(new, f"cannot take the place of what is there, from {old}"),
            self._parent(name) as (fd, last),
            to._parent(new_name) as (new_fd, new_last),
        ):
            step("rename", old, new)
            os.rename(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd)

    def link_file(self, source: Folder, source_name: str, name: str) -> bool:
        """Give a file of `source` a second name here; False where that cannot be."""
        try:
            step("link", self.path / name, source.path / source_name)
            with source._parent(source_name) as (fd, last), self._parent(name) as (new_fd, new_last):
                os.link(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in NOT_HERE:
                return False
            raise translated(error, self.path / name, "cannot be linked") from error
        return True

    def rename_if_free(self, name: str, new_name: str) -> bool:
        """Move a file of this folder to a new name, in one step, unless something has that; False if something has.

        UnsupportedError where the file system has neither hard links nor such a rename.
        """
        old, new = self.path / name, self.path / new_name
        step("link", new, old)
        try:
            with self._parent(name) as (fd, last), self._parent(new_name) as (new_fd, new_last):
                os.link(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)
        except FileExistsError:
            # A file server may have done it, and its answer been lost.
            if not self._is_one_file(name, new_name):
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise translated(error, new, f"cannot be made, from {old}") from error
            return self._rename_if_free(name, new_name)
        self.remove(name)
        return True

    def make_link(self, text: str, name: str) -> None:
        """Create a symbolic link."""
        with translating(self.path / name, "cannot be made a link"), self._parent(name) as (fd, last):
            step("symlink", self.path / name, text)
            os.symlink(text, last, dir_fd=fd)

    def make_folder(self, name: str, mode: int = NEW_FOLDER_MODE, *, exist_ok: bool = False) -> bool:
        """Create a folder; False if it was there. Its name is durable after its parent's `sync`."""
        if exist_ok and (status := self.status(name)) is not None:
            if not stat.S_ISDIR(status.st_mode):
                raise DamagedError(str(self.path / name), f"is {file_kind(status.st_mode)}, not a folder")
            return False
        with translating(self.path / name, "cannot be created"), self._parent(name) as (fd, last):
            step("mkdir", self.path / name)
            try:
                os.mkdir(last, mode, dir_fd=fd)
            except FileExistsError:
                if not exist_ok:
                    raise
                # Another process was faster.
                return self.make_folder(name, mode, exist_ok=True)
        return True

    def make_parents(self, name: str) -> None:
        """Create the folders above `name` that are not there, durably."""
        parts = name.split("/")[:-1]
        for count in range(1, len(parts) + 1):
            above = "/".join(parts[:count])
            if self.make_folder(above, exist_ok=True):
                self.sync(above)
                self.sync("/".join(parts[: count - 1]))

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a file or link."""
        if missing_ok and self.status(name) is None:
            return
        with translating(self.path / name, "cannot be removed"), self._parent(name) as (fd, last):
            step("unlink", self.path / name)
            os.unlink(last, dir_fd=fd)

    def remove_folder(self, name: str, *, used_ok: bool = False) -> None:
        """Remove an empty folder; with `used_ok`, one that is not empty, is a mount or is gone is let be."""
        with translating(self.path / name, "cannot be removed"), self._parent(name) as (fd, last):
            step("rmdir", self.path / name)
            try:
                os.rmdir(last, dir_fd=fd)
            except OSError as error:
                if not (used_ok and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOENT)):
                    raise

    def remove_tree(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a folder and all in it, or a file; links are removed and not followed."""
        status = self.status(name)
        if status is None and missing_ok:
            return
        if status is None or not stat.S_ISDIR(status.st_mode):
            self.remove(name)
            return
        with self.open_folder(name) as folder:
            inners = folder.names()
            if inners:
                folder.make_changeable()
            for inner in inners:
                folder.remove_tree(inner, missing_ok=True)
        self.remove_folder(name)

    def sync(self, name: str = "") -> None:
        """Make the names in the folder, or in the folder `name` below it, durable."""
        path = self.path / name if name else self.path
        with self.open_folder(name) if name else _borrowed(self) as folder:
            try:
                step("sync-folder", path)
                os.fsync(folder.fd)
            except OSError as error:
                # Some network and FUSE file systems cannot sync folders and say so; what they promise is all there is.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
                    raise translated(error, path, "cannot be synced") from error

    def _rename_if_free(self, name: str, new_name: str) -> bool:
        """The same where there are no hard links."""
        old, new = self.path / name, self.path / new_name
        step("rename", old, new)
        try:
            with self._parent(name) as (fd, last), self._parent(new_name) as (new_fd, new_last):
                _rename_no_replace(fd, last, new_fd, new_last)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UnsupportedError(
                    str(new), "its file system can create no file only if none is there", hint="choose another disk"
                ) from error
            raise translated(error, new, f"cannot be made, from {old}") from error
        return True


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Open the folder at `path`, itself perhaps behind a link."""
    with translating(Path(path), "cannot be opened"):
        return Folder(os.open(path, FOLDER_FLAGS), Path(path))


def _rename_no_replace(fd: int, name: str, new_fd: int, new_name: str) -> None:
    """Call renameat2, which Python does not know."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(fd, os.fsencode(name), new_fd, os.fsencode(new_name), _RENAME_NOREPLACE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextmanager
def _borrowed(folder: Folder) -> Iterator[Folder]:
    yield folder
