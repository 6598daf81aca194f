"""A folder behind SFTP as a backend, through paramiko.

A file is written beside its place under a name that starts with a dot. SFTP's own rename fails if something has the
new name: that is the exclusive create. Servers that have it get a rename over what is there for plain writes.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import paramiko

from dcr_cli.store.backend import (
    Answer,
    Entry,
    OutsideError,
    PermanentError,
    Readable,
    Status,
    TransientError,
    is_leftover,
    new_name,
    parts,
)
from dcr_cli.store.location import Location
from dcr_cli.store.ssh import Sessions

# How much is read before the session is let go, as another thread may need one.
_PART_BYTES = 8 << 20


class SftpBackend:
    """The files below a folder of an SFTP server, which is made by the first write. Options: see `Sessions`."""

    can_create = True

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        self._root = location.path or "/"
        self._sessions = Sessions(location, options)

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        with self._sessions.lent() as session, session.open(self._path(key), "rb") as file:
            known = file.stat()
            if known.st_size is None:
                raise PermanentError("the server does not tell sizes")
            total: int = known.st_size
            if begin > total:
                raise OutsideError(f"has {total} bytes, at least {begin} expected")
            end = total if size is None else min(begin + size, total)
            first = _part(file, begin, min(begin + _PART_BYTES, end))
        return Answer(begin, end - begin, total, self._chunks(key, first, begin, end), str(known.st_mtime))

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        with self._sessions.lent() as session, self._written(session, key, data, size) as new:
            _replace(session, new, self._path(key))

    def create(self, key: str, data: bytes) -> bool:
        with self._sessions.lent() as session, self._written(session, key, data, len(data)) as new:
            try:
                session.rename(new, self._path(key))
            except OSError:
                # The protocol has no word for "taken".
                if _status(session, self._path(key)) is None:
                    raise
                with suppress(OSError):
                    session.remove(new)
                return False
            return True

    def status(self, key: str) -> Status | None:
        with self._sessions.lent() as session:
            known = _status(session, self._path(key))
        if known is None or not stat.S_ISREG(known.st_mode or 0):
            return None
        return Status(known.st_size or 0, _modified(known))

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._sessions.lent() as session:
            found = [entry for entry in _walk(session, self._root, prefix) if not _has_dot(entry.key)]
        return iter(found)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        with self._sessions.lent() as session:
            found = [entry for entry in _walk(session, self._root, prefix) if is_leftover(entry.key)]
        return iter(found)

    def remove(self, key: str) -> None:
        with self._sessions.lent() as session:
            session.remove(self._path(key))
            _remove_emptied(session, self._root, key)

    def close(self) -> None:
        self._sessions.close()

    def _path(self, key: str) -> str:
        return posixpath.join(self._root, key)

    def _chunks(self, key: str, first: bytes, begin: int, end: int) -> Iterator[bytes]:
        yield first
        for at in range(begin + len(first), end, _PART_BYTES):
            size = min(_PART_BYTES, end - at)
            with self._sessions.lent() as session, session.open(self._path(key), "rb") as file:
                part = _part(file, at, at + size)
            yield part
            if len(part) < size:
                return

    @contextmanager
    def _written(self, session: paramiko.SFTPClient, key: str, data: bytes | Readable, size: int) -> Iterator[str]:
        """Write a file of its own beside the place of `key`; it is removed if anything goes wrong with it."""
        new = self._path(new_name(key))
        _make_folders(session, posixpath.dirname(new))
        try:
            with session.open(new, "wxb") as file:
                file.set_pipelined(True)
                for part in parts(data):
                    file.write(part)
                file.flush()
                _settle(session, file)
                _sync(session, file)
            if (has := session.stat(new).st_size) != size:
                raise TransientError(f"holds {has} bytes after {size} were written")
            yield new
        except BaseException:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.remove(new)
            raise


def _make_folders(session: paramiko.SFTPClient, path: str) -> None:
    if path in ("", "/") or _status(session, path) is not None:
        return
    _make_folders(session, posixpath.dirname(path))
    try:
        session.mkdir(path)
    except OSError:
        # Another publisher was faster, or it cannot be made.
        if _status(session, path) is None:
            raise


def _remove_emptied(session: paramiko.SFTPClient, root: str, key: str) -> None:
    """Remove the folders above what was removed that hold nothing more, as far as that may be; those in the root itself
    stay. Where something is written meanwhile, its writer makes its folder again."""
    above = posixpath.dirname(key)
    with suppress(OSError):
        while "/" in above:
            session.rmdir(posixpath.join(root, above))
            above = posixpath.dirname(above)


def _replace(session: paramiko.SFTPClient, new: str, path: str) -> None:
    try:
        session.posix_rename(new, path)
    except OSError as error:
        if "unsupported" not in str(error).lower():
            raise
        # A server without the extension: for a moment nothing has the name.
        if _status(session, path) is not None:
            session.remove(path)
        session.rename(new, path)


def _part(file: paramiko.SFTPFile, begin: int, end: int) -> bytes:
    # Asks for all of it before the first of it has come.
    return b"".join(file.readv([(begin, end - begin)])) if begin < end else b""


def _settle(session: paramiko.SFTPClient, file: paramiko.SFTPFile) -> None:
    """Hear what became of each write: of a refusal that comes while another answer is waited for, paramiko tells
    nothing."""
    while file._reqs:
        session._read_response(file._reqs.popleft())


def _sync(session: paramiko.SFTPClient, file: paramiko.SFTPFile) -> None:
    """Make a file durable where the server can be asked to: paramiko knows the request, not this use of it."""
    try:
        session._request(paramiko.sftp.CMD_EXTENDED, "fsync@openssh.com", file.handle)
    except OSError as error:
        if "unsupported" not in str(error).lower():
            raise


def _status(session: paramiko.SFTPClient, path: str) -> paramiko.SFTPAttributes | None:
    try:
        return session.stat(path)
    except FileNotFoundError:
        return None


def _walk(session: paramiko.SFTPClient, root: str, prefix: str) -> Iterator[Entry]:
    try:
        found = session.listdir_attr(posixpath.join(root, prefix).rstrip("/") or "/")
    except FileNotFoundError:
        return
    for each in found:
        if stat.S_ISDIR(each.st_mode or 0):
            if not each.filename.startswith("."):
                yield from _walk(session, root, f"{prefix}{each.filename}/")
        elif stat.S_ISREG(each.st_mode or 0):
            yield Entry(prefix + each.filename, each.st_size or 0, _modified(each))


def _has_dot(key: str) -> bool:
    return posixpath.basename(key).startswith(".")


def _modified(known: paramiko.SFTPAttributes) -> float | None:
    return None if known.st_mtime is None else float(known.st_mtime)
