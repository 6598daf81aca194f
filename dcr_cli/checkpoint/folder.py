"""The files of a folder: finding them, leaving some out, and reading them while seeing that they stay what they were.

It knows names, sizes and identities; what the files mean is not its business.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.header import bytes_view
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.errors import ConflictError, DamagedError, LocalError, hint_of

if TYPE_CHECKING:
    import numpy.typing as npt

# Two open checkpoints, the standard streams and an output fit into 64 descriptors.
MAX_OPEN_FILES = 16
READ_AT_ONCE_BYTES = 1 << 20
# What helps when a file changed while it was read.
AT_REST = "try again when nothing writes there"
_MOST_PATTERNS = 10


class Identity(NamedTuple):
    """What is compared to see that a file is still the one it was, with the same bytes."""

    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def scan(
    root: Path,
    *,
    skip: Sequence[str] = (),
    must_be_files: tuple[str, ...] = (),
    strangers: list[str] | None = None,
) -> dict[str, Identity]:
    """Find every regular file below `root`: relative path -> identity, in canonical order.

    Left out are paths with a component that starts with a dot, what `skip` matches, and what is neither file, folder
    nor link. Links to files count as files. Refused (DamagedError) are links to folders, links to nothing, and anything
    but a file whose name ends in one of `must_be_files`. With `strangers`, these links are added to it instead, with
    what is left out for its kind.
    """
    found: dict[str, Identity] = {}
    skipped = Patterns(skip)
    folders = [""]
    while folders:
        prefix = folders.pop()
        for entry in _list(root / prefix):
            path = prefix + entry.name
            if entry.name.startswith(".") or skipped.match(path):
                continue
            try:
                status = _status_of(entry, path)
            except DamagedError:
                if strangers is None or path.endswith(must_be_files):
                    raise
                strangers.append(path)
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            if stat.S_ISREG(status.st_mode):
                found[path] = identity_of(status)
            elif path.endswith(must_be_files):
                raise DamagedError(
                    entry.path, f"is {file_kind(status.st_mode)}, not a file", hint=skip_hint(pattern_of(path))
                )
            elif strangers is not None and (not is_folder or entry.is_symlink()):
                strangers.append(path)
            elif is_folder and entry.is_symlink():
                raise DamagedError(
                    entry.path, "is a link to a folder; links to files alone are read", hint=skip_hint(pattern_of(path))
                )
            elif is_folder and not skipped.match(path + "/"):
                folders.append(path + "/")
    return dict(sorted(found.items()))


def idle_patterns(roots: Sequence[Path], skip: Sequence[str]) -> list[str]:
    """The patterns of `skip` that match nothing that there is below one of `roots`."""
    left = {pattern: Patterns([pattern]) for pattern in skip}
    for root in roots:
        for where, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in (*folders, *files):
                path = os.path.relpath(os.path.join(where, name), root)
                left = {pattern: one for pattern, one in left.items() if not one.match(path)}
            if not left:
                return []
    return list(left)


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError as error:
        raise ConflictError(str(folder), "changed while reading: it is gone", hint=AT_REST) from error
    except OSError as error:
        raise LocalError(str(folder), f"cannot be listed: {error.strerror}", hint=hint_of(error)) from error


def _status_of(entry: os.DirEntry[str], path: str) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as error:
        if entry.is_symlink():
            hint = f"put the file there that it leads to, or {skip_hint(pattern_of(path))}"
            raise DamagedError(entry.path, f"is a link that leads to no file: {error.strerror}", hint=hint) from error
        if isinstance(error, FileNotFoundError):
            raise ConflictError(entry.path, "changed while reading: it is gone", hint=AT_REST) from error
        raise LocalError(entry.path, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error


def skip_hint(*patterns: str) -> str:
    """Say how to leave out what the patterns match, each of them once, and not more than a line holds."""
    different = list(dict.fromkeys(patterns))
    quoted = " ".join(f"--skip {_quoted(pattern)}" for pattern in different[:_MOST_PATTERNS])
    more = f" and {len(different) - _MOST_PATTERNS} more" if len(different) > _MOST_PATTERNS else ""
    return f"leave it out with {quoted}{more}"


def pattern_of(path: str) -> str:
    """Return a pattern that matches `path` and can be typed."""
    return "".join(c if c.isprintable() and c not in "*?[" else "?" for c in path)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


@dataclass(slots=True)
class _Handle:
    fd: int
    users: int


class _Loan:
    """A descriptor that is lent: what `Files.opened` gives. A class of its own, for this is done for every block."""

    __slots__ = ("_files", "_handle", "_path")

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path

    def __enter__(self) -> int:
        self._handle = self._files._borrow(self._path)
        return self._handle.fd

    def __exit__(self, *_: object) -> None:
        self._files._give_back(self._path, self._handle)


class Files:
    """Reads the files of `identities` below `root`; a context manager, for any number of threads.

    It holds at most MAX_OPEN_FILES descriptors. A file that is not the one of its identity, or ends early, is
    ConflictError.
    """

    def __init__(self, root: Path, identities: Mapping[str, Identity]) -> None:
        self.root = root
        self._identities = identities
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()
        self._has_one = threading.Condition(self._lock)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is not lent. What is lent is closed when it comes back: until then its number stays taken."""
        with self._lock:
            self._is_closed = True
            for path in [path for path, handle in self._handles.items() if not handle.users]:
                os.close(self._handles.pop(path).fd)
            self._has_one.notify_all()

    def read_path_into(self, path: str, offset: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Fill the whole of `buffer` with the bytes of file `path` from `offset` on."""
        view = bytes_view(buffer)
        with self.opened(path) as fd:
            while view:
                try:
                    count = os.preadv(fd, [view], offset)
                except OSError as error:
                    raise LocalError(
                        str(self.root / path), f"cannot be read: {error.strerror}", hint=hint_of(error)
                    ) from error
                if not count:
                    raise self._changed(path, "it became shorter")
                view = view[count:]
                offset += count

    def read_file(self, path: str) -> bytes:
        """Return all bytes of the file `path`; for files whose size was checked."""
        content = bytearray(self._identities[path].size)
        self.read_path_into(path, 0, content)
        return bytes(content)

    def parts_of(self, path: str) -> Iterator[memoryview]:
        """Read the file `path` in parts; each is valid until the next one is asked for."""
        size = self._identities[path].size
        buffer = memoryview(bytearray(min(size, READ_AT_ONCE_BYTES)))
        for offset in range(0, size, READ_AT_ONCE_BYTES):
            part = buffer[: size - offset]
            self.read_path_into(path, offset, part)
            yield part

    def opened(self, path: str) -> _Loan:
        """Lend a descriptor of the file `path`. With all descriptors lent, this waits for one to come back."""
        return _Loan(self, path)

    def _borrow(self, path: str) -> _Handle:
        with self._lock:
            handle = self._handles.get(path)
            while handle is None or self._is_closed:
                if self._is_closed:
                    raise ValueError("these files are closed")
                if len(self._handles) < MAX_OPEN_FILES or self._close_idle():
                    handle = self._handles[path] = _Handle(self._open(path), 0)
                else:
                    self._has_one.wait()
                    handle = self._handles.get(path)
            self._handles.move_to_end(path)
            handle.users += 1
            return handle

    def _give_back(self, path: str, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if not handle.users:
                if self._is_closed:
                    os.close(self._handles.pop(path).fd)
                self._has_one.notify_all()

    def _close_idle(self) -> bool:
        """Close the descriptor that was not lent for the longest time, if any is not lent."""
        path = next((path for path, handle in self._handles.items() if not handle.users), None)
        if path is not None:
            os.close(self._handles.pop(path).fd)
        return path is not None

    def _open(self, path: str) -> int:
        # Without O_NONBLOCK, a FIFO that took the file's place would hang us before its identity can be looked at.
        try:
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._changed(path, "it is gone") from error
        except OSError as error:
            raise LocalError(
                str(self.root / path), f"cannot be opened: {error.strerror}", hint=hint_of(error)
            ) from error
        if identity_of(os.fstat(fd)) != self._identities[path]:
            os.close(fd)
            raise self._changed(path, "its size, inode or times are other ones")
        return fd

    def _changed(self, path: str, how: str) -> ConflictError:
        return ConflictError(str(self.root / path), f"changed while reading: {how}", hint=AT_REST)


def check_same(root: Path, before: Mapping[str, Identity], now: Mapping[str, Identity]) -> None:
    """Raise ConflictError if two scans of `root` differ, naming the first file that does."""
    if before == now:
        return
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            how = "it is gone" if path not in now else "it is new" if path not in before else "its identity is another"
            raise ConflictError(str(root / path), f"changed while reading: {how}", hint=AT_REST)
