"""Every change to local disk: create, write, sync, rename, link, remove. No other module changes it.

Before each change the functions in `hooks` are called; a test that stops or records there sees every step there is,
and what the system could refuse is refused there in the same words.
What is changed, and in which order, is the callers' business. Paths inside a folder are opened without following
links, so nothing is ever written outside it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_cli.checkpoint.header import file_kind
from dcr_cli.errors import ConflictError, DamagedError, LocalError, UnsupportedError, hint_of

# Called before each step with what is about to happen and to which path; "rename", "link" and "clone" have a second
# path.
hooks: list[Callable[[str, str, str], None]] = []

NEW_FILE_MODE = 0o644
NEW_FOLDER_MODE = 0o755
PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER_MODE = 0o700
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_COPY_BYTES = 1 << 20
# Where a file cannot share another one's bytes, or have a second name; what is asked for can be had by copying.
_NOT_HERE = frozenset(
    (
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.EINVAL,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
    )
)
# Where no file can have a second name.
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_RENAME_NOREPLACE = 1
_FICLONE = 0x40049409
_GET_FLAGS = 0x80086601
_FIXED_FLAGS = 0x30
_FIXED_STATUS_FLAGS = stat.UF_IMMUTABLE | stat.UF_APPEND | stat.SF_IMMUTABLE | stat.SF_APPEND
_RETRY_SECONDS = 0.001
_RETRIES = 10_000


class NoRoomError(LocalError):
    """The disk or a quota is full."""


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
                _step("write", self.path)
                count = os.pwrite(self.fd, view, offset)
            except BlockingIOError as error:
                retries += 1
                if retries > _RETRIES:
                    raise _translated(error, self.path, "cannot be written") from error
                time.sleep(_RETRY_SECONDS)
                continue
            except OSError as error:
                raise _translated(error, self.path, "cannot be written") from error
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

    def resize(self, size: int) -> None:
        """Cut the file to `size` bytes, or let it grow by a hole."""
        with translating(self.path, "cannot be given its size"):
            _step("resize", self.path)
            os.ftruncate(self.fd, size)

    def clone_from(self, source: File) -> bool:
        """Share the bytes of another file where the file system can do that; False where it cannot."""
        try:
            _step("clone", self.path, source.path)
            fcntl.ioctl(self.fd, _FICLONE, source.fd)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise _translated(error, self.path, "cannot be cloned") from error
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
        _set_mode(self.fd, self.path, mode)

    def sync(self) -> None:
        """Make the file's bytes durable. If it fails, nothing may be assumed of what the file holds."""
        with translating(self.path, "cannot be synced"):
            _step("sync", self.path)
            os.fsync(self.fd)

    def close(self) -> None:
        """Close it; some file systems report only here that a write found no room."""
        try:
            # With nothing in between, so that no signal leaves it open and forgotten.
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)
        except OSError as error:
            raise _translated(error, self.path, "cannot be closed") from error


class Folder:
    """An open folder; a context manager. Names are relative paths; none of their components may be a link."""

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

    # Looking

    def status(self, name: str) -> os.stat_result | None:
        """What is at `name`, links not followed; None if nothing is."""
        try:
            with self._parent(name) as (fd, last):
                return os.stat(last, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _translated(error, self.path / name, "cannot be looked at") from error

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
            size = os.fstat(file.fd).st_size
            if size > limit:
                raise DamagedError(str(file.path), f"has {size} bytes, at most {limit} expected")
            data = bytearray(size)
            file.read_into(0, memoryview(data))
            return bytes(data)

    def open_to_read(self, name: str) -> File | None:
        """Open a file to read it; None if it is not there."""
        try:
            return File(self._open(name, os.O_RDONLY), self.path / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _translated(error, self.path / name, "cannot be read") from error

    def open_folder(self, name: str) -> Folder:
        with translating(self.path / name, "cannot be opened"), self._parent(name) as (fd, last):
            return Folder(os.open(last, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd), self.path / name)

    def find_folder(self, name: str) -> Folder | None:
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
            return File(os.open(last, os.O_RDONLY | (_FILE_FLAGS & ~os.O_NOFOLLOW), dir_fd=fd), self.path / name)

    def link_text(self, name: str) -> str:
        """What a link says."""
        with translating(self.path / name, "cannot be read"), self._parent(name) as (fd, last):
            return os.readlink(last, dir_fd=fd)

    def is_fixed(self, name: str = "") -> bool:
        """Whether a file, or a folder, this one itself too, has the attribute `immutable` or `append only`, which stops
        root too."""
        try:
            with self._parent(name or ".") as (fd, last):
                opened = os.open(last, os.O_RDONLY | _FILE_FLAGS, dir_fd=fd)
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

    # Changing

    def open_file(self, name: str) -> File:
        """Open an existing file to change it where it lies."""
        with translating(self.path / name, "cannot be opened for writing"):
            return File(self._open(name, os.O_RDWR), self.path / name)

    def create_file(self, name: str, mode: int = NEW_FILE_MODE) -> File:
        """Create a file that must not exist."""
        with translating(self.path / name, "cannot be created"), self._parent(name) as (fd, last):
            _step("create", self.path / name)
            return File(
                os.open(last, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, mode, dir_fd=fd), self.path / name
            )

    def open_or_create(self, name: str) -> File:
        """Open a private file to change it, creating it if it is not there."""
        with translating(self.path / name, "cannot be opened"):
            _step("create", self.path / name)
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
                if _give_mode(file.fd, file.path, status, with_owner=with_owner):
                    file.sync()

    def take_folder_mode(self, name: str, status: os.stat_result, *, with_owner: bool = True) -> None:
        """Give the folder `name` below this one, or this one itself, mode and owner of another, durably."""
        path = self.path / name if name else self.path
        with (
            translating(path, f"cannot be given owner {status.st_uid}:{status.st_gid} and mode"),
            self.open_folder(name) if name else _borrowed(self) as folder,
        ):
            if _give_mode(folder.fd, path, status, with_owner=with_owner):
                folder.sync()

    def make_private(self) -> None:
        """Let nobody but its owner use the folder, and the owner change what is in it."""
        self.set_mode(PRIVATE_FOLDER_MODE)

    def set_mode(self, mode: int) -> None:
        """Give the folder a mode, whatever the umask is."""
        _set_mode(self.fd, self.path, mode)

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
            _step("rename", old, new)
            os.rename(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd)

    def link_file(self, source: Folder, source_name: str, name: str) -> bool:
        """Give a file of `source` a second name here; False where that cannot be."""
        try:
            _step("link", self.path / name, source.path / source_name)
            with source._parent(source_name) as (fd, last), self._parent(name) as (new_fd, new_last):
                os.link(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise _translated(error, self.path / name, "cannot be linked") from error
        return True

    def rename_if_free(self, name: str, new_name: str) -> bool:
        """Move a file of this folder to a new name, in one step, unless something has that; False if something has.

        UnsupportedError where the file system has neither hard links nor such a rename.
        """
        old, new = self.path / name, self.path / new_name
        _step("link", new, old)
        try:
            with self._parent(name) as (fd, last), self._parent(new_name) as (new_fd, new_last):
                os.link(last, new_last, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)
        except FileExistsError:
            # A file server may have done it, and its answer been lost.
            if not self._is_one_file(name, new_name):
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise _translated(error, new, f"cannot be made, from {old}") from error
            return self._rename_if_free(name, new_name)
        self.remove(name)
        return True

    def make_link(self, text: str, name: str) -> None:
        """Create a symbolic link."""
        with translating(self.path / name, "cannot be made a link"), self._parent(name) as (fd, last):
            _step("symlink", self.path / name, text)
            os.symlink(text, last, dir_fd=fd)

    def make_folder(self, name: str, mode: int = NEW_FOLDER_MODE, *, exist_ok: bool = False) -> bool:
        """Create a folder; False if it was there. Its name is durable after its parent's `sync`."""
        if exist_ok and (status := self.status(name)) is not None:
            if not stat.S_ISDIR(status.st_mode):
                raise DamagedError(str(self.path / name), f"is {file_kind(status.st_mode)}, not a folder")
            return False
        with translating(self.path / name, "cannot be created"), self._parent(name) as (fd, last):
            _step("mkdir", self.path / name)
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
            _step("unlink", self.path / name)
            os.unlink(last, dir_fd=fd)

    def remove_folder(self, name: str, *, used_ok: bool = False) -> None:
        """Remove an empty folder; with `used_ok`, one that is not empty, is a mount or is gone is let be."""
        with translating(self.path / name, "cannot be removed"), self._parent(name) as (fd, last):
            _step("rmdir", self.path / name)
            try:
                os.rmdir(last, dir_fd=fd)
            except OSError as error:
                if not (used_ok and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOENT)):
                    raise

    def is_empty(self, name: str) -> bool:
        """Whether nothing is in the folder `name`."""
        with self.open_folder(name) as folder:
            return not folder.names()

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
                _step("sync-folder", path)
                os.fsync(folder.fd)
            except OSError as error:
                # Some network and FUSE file systems cannot sync folders and say so; what they promise is all there is.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
                    raise _translated(error, path, "cannot be synced") from error

    def _open(self, name: str, flags: int) -> int:
        with self._parent(name) as (fd, last):
            opened = os.open(last, flags | _FILE_FLAGS, PRIVATE_FILE_MODE, dir_fd=fd)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise DamagedError(str(self.path / name), "is not a regular file")
        return opened

    def _is_one_file(self, name: str, other: str) -> bool:
        statuses = [self.status(each) for each in (name, other)]
        return len({(each.st_dev, each.st_ino) if each else None for each in statuses}) == 1

    def _rename_if_free(self, name: str, new_name: str) -> bool:
        """The same where there are no hard links."""
        old, new = self.path / name, self.path / new_name
        _step("rename", old, new)
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
            raise _translated(error, new, f"cannot be made, from {old}") from error
        return True

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Lend a descriptor of the folder that `name` lies in, and its last component."""
        *above, last = name.split("/")
        fd = self.fd
        try:
            for part in above:
                inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
                # The other way round, a signal in between would have it closed twice.
                outer, fd = fd, inner
                if outer != self.fd:
                    os.close(outer)
            yield fd, last
        finally:
            if fd != self.fd:
                os.close(fd)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Open the folder at `path`, itself perhaps behind a link."""
    with translating(Path(path), "cannot be opened"):
        return Folder(os.open(path, _FOLDER_FLAGS), Path(path))


@contextmanager
def translating(path: Path, facts: str) -> Iterator[None]:
    """Turn what the system refuses into an error that names `path`."""
    try:
        yield
    except OSError as error:
        raise _translated(error, path, facts) from error


def _translated(error: OSError, path: Path, facts: str) -> LocalError | DamagedError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return DamagedError(str(path), f"{facts}: it is, or is below, a link or a file where a folder should be")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        do = "raise the limit on file sizes, see ulimit -f," if error.errno == errno.EFBIG else "make room"
        return NoRoomError(str(path), f"{facts}: {error.strerror}", hint=f"{do} and run the same command again")
    return LocalError(str(path), f"{facts}: {error.strerror}", hint=hint_of(error))


def _rename_no_replace(fd: int, name: str, new_fd: int, new_name: str) -> None:
    """Call renameat2, which Python does not know."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(fd, os.fsencode(name), new_fd, os.fsencode(new_name), _RENAME_NOREPLACE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


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


def may_give_owner(status: os.stat_result) -> bool:
    """Whether this process may give what it makes the owner that `status` tells of."""
    groups = {os.getegid(), *os.getgroups()}
    return os.geteuid() == 0 or (status.st_uid == os.geteuid() and status.st_gid in groups)


def _set_mode(fd: int, path: Path, mode: int) -> None:
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o777 != mode:
        with translating(path, "cannot be given its mode"):
            _step("chmod", path)
            os.fchmod(fd, mode)


def _give_mode(fd: int, path: Path, status: os.stat_result, *, with_owner: bool) -> bool:
    """Give what is open mode and, if asked to, owner; whether that changed anything."""
    own = os.fstat(fd)
    is_owner_new = with_owner and (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid)
    is_mode_new = stat.S_IMODE(own.st_mode) != stat.S_IMODE(status.st_mode)
    if is_owner_new:
        _step("chown", path)
        os.fchown(fd, status.st_uid, status.st_gid)
    if is_mode_new:
        _step("chmod", path)
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
    return is_owner_new or is_mode_new


@contextmanager
def _borrowed(folder: Folder) -> Iterator[Folder]:
    yield folder


def _step(kind: str, path: Path, other: Path | str = "") -> None:
    for hook in hooks:
        hook(kind, str(path), str(other))
