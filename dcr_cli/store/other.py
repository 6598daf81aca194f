"""Any other protocol that fsspec has a file system for, as a backend.

What such file systems do with a condition, and how they fail, differs and is not told: none counts as able to create
exclusively, and only what Python has a kind of error for is taken for absence, refusal or a broken connection. Where
a file system writes in place, a reader may see a part of what is being written, which its size or digest tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from dcr_cli.errors import DcrError, UnsupportedError, UsageError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    FaultError,
    PermanentError,
    Readable,
    Status,
    TransientError,
    parts,
)
from dcr_cli.store.location import Location

T = TypeVar("T")

_PART_BYTES = 8 << 20
MOST_WHOLE_BYTES = 64 << 20


class OtherBackend:
    """The objects below a path of an fsspec file system, opened without caches of listings."""

    can_create = False

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        self._files = _open(location, options)
        place = f"{location.host}:{location.port}" if location.port is not None else location.host
        self._root: str = self._files._strip_protocol(f"{location.protocol}://{place}{location.path}").rstrip("/")

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        status = self.status(key)
        if status is None:
            raise AbsentError
        end = status.size if size is None else min(begin + size, status.size)
        first = self._part(key, begin, min(begin + _PART_BYTES, end))
        if len(first) == status.size != end - begin:
            # The range was ignored.
            return Answer(0, status.size, status.size, iter((first,)))
        return Answer(begin, max(end - begin, 0), status.size, self._chunks(key, first, begin, end))

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        path = self._path(key)
        _asked(lambda: self._files.makedirs(path.rpartition("/")[0], exist_ok=True))
        if size <= MOST_WHOLE_BYTES:
            whole = b"".join(parts(data))
            _asked(lambda: self._files.pipe_file(path, whole))
            return
        _asked(lambda: self._write_parts(path, data))

    def create(self, key: str, data: bytes) -> bool:
        raise UnsupportedError(key, "cannot be created only if it is not there")

    def status(self, key: str) -> Status | None:
        try:
            known = _asked(lambda: self._files.info(self._path(key)))
        except AbsentError:
            return None
        if known.get("type") != "file" or known.get("size") is None:
            return None
        return Status(int(known["size"]), _modified(known))

    def entries(self, prefix: str) -> Iterator[Entry]:
        # `find` would leave out what it cannot look into, and say nothing.
        folders = [self._path(prefix).rstrip("/") or "/"]
        while folders:
            folder = folders.pop()
            for known in self._listed(folder):
                path = str(known["name"]).rstrip("/")
                if known.get("type") == "directory":
                    # Some list a folder in itself.
                    if len(path) > len(folder):
                        folders.append(path)
                elif known.get("type") == "file":
                    key = path.removeprefix(self._root).lstrip("/")
                    if not key.startswith(prefix):
                        continue
                    yield Entry(key, int(known.get("size") or 0), _modified(known))

    def _listed(self, folder: str) -> Sequence[Mapping[str, Any]]:
        try:
            return list(_asked(lambda: self._files.ls(folder, detail=True)))
        except AbsentError:
            return ()

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        return iter(())

    def remove(self, key: str) -> None:
        # Folders that this empties stay: some file systems remove a folder with all that has come into it.
        _asked(lambda: self._files.rm_file(self._path(key)))

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _part(self, key: str, begin: int, end: int) -> bytes:
        return (
            bytes(_asked(lambda: self._files.cat_file(self._path(key), start=begin, end=end))) if begin < end else b""
        )

    def _chunks(self, key: str, first: bytes, begin: int, end: int) -> Iterator[bytes]:
        yield first
        for at in range(begin + _PART_BYTES, end, _PART_BYTES):
            yield self._part(key, at, min(at + _PART_BYTES, end))

    def _write_parts(self, path: str, data: Readable | bytes) -> None:
        # Where it is known what that means, nothing is there until it is said.
        file = self._files.open(path, "wb", autocommit=False)
        try:
            for part in parts(data, _PART_BYTES):
                file.write(part)
        except BaseException:
            with suppress(Exception):
                file.discard()
            try:
                # Closing it, which Python would do, could publish the part that was written.
                file.closed = True
            except AttributeError:
                file.close()
            raise
        file.close()
        if hasattr(file, "commit"):
            file.commit()


def _open(location: Location, options: Mapping[str, object]) -> Any:
    user = {"username": location.user, "password": location.password}
    chosen = {name: value for name, value in user.items() if value is not None} | dict(options)
    if location.port is not None:
        chosen = {"port": location.port} | chosen
    try:
        kind = fsspec.get_filesystem_class(location.protocol)
    except ValueError:
        kind = None
    if kind is None:
        facts, hint = (
            f"no package that is known serves {location.protocol}://",
            "file, s3, gs, az, sftp, http, https are",
        )
        raise UnsupportedError(location.shown, facts, hint=f"{hint} served by dcr itself")
    if "host" not in chosen and location.host and location.user is not None:
        chosen["host"] = location.host
    try:
        return kind(use_listings_cache=False, skip_instance_cache=True, **chosen)
    except ImportError:
        raise
    except Exception as error:
        name = type(error).__name__
    raise UsageError(
        location.shown, f"cannot be opened with storage options {', '.join(sorted(options)) or 'none'}: {name}"
    )


def _asked(call: Callable[[], T]) -> T:
    """Return what the file system answers; its error becomes a fault without any of its text."""
    try:
        return call()
    except (FaultError, DcrError):
        raise
    except Exception as error:
        fault = _fault_of(error)
    raise fault


def _fault_of(error: Exception) -> FaultError:
    if isinstance(error, FileNotFoundError):
        return AbsentError()
    if isinstance(error, PermissionError):
        return DeniedError("the remote does not permit it")
    if isinstance(error, NotImplementedError):
        return PermanentError("its file system cannot do this")
    if isinstance(error, TimeoutError | ConnectionError | EOFError):
        return TransientError("the connection broke or timed out")
    if isinstance(error, OSError) and error.strerror:
        return PermanentError(
            error.strerror if str(error.strerror).isascii() and len(error.strerror) < 60 else "refuses"
        )
    return PermanentError(f"its file system fails with {type(error).__name__}")


def _modified(known: Mapping[str, Any]) -> float | None:
    for name in ("mtime", "LastModified", "last_modified", "modified", "created"):
        value = known.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return None
