"""The folder of what a relay keeps: bodies and documents that were right when they came, up to a limit of bytes.

A file's name says which object it is and its blake3. Nothing is synced: what a stop, a crash or a bad disk left is
found out, since after a start each file is hashed before it counts. What is new lies apart until all of it is right.
What an object has to be is not known here.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from dcr_cli.checkpoint.digest import ObjectHasher, object_digest
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder, NoRoomError, open_folder
from dcr_cli.errors import DcrError, LocalError
from dcr_cli.locking import lock
from dcr_cli.remote.keys import HISTORY_KEY

_KEPT, _NEW, _LOCK = "kept", "new", "lock"
_NAME = re.compile(r"([0-9]{10})-([0-9a-f]{32})-([0-9a-f]{64})")
_PART_BYTES = 1 << 20
# Documents are of this size: letting go of them makes no room.
_SMALL_BYTES = 64 << 10
# All that the disk has no room for has at most so many bytes.
MOST_LENT_BYTES = 512 << 20
# What was read stays open for whoever asks next, but no more than so many files.
_MOST_OPEN = 64
# The names of so many labels are remembered.
_MOST_NAMES = 1024


class Label(NamedTuple):
    """What a file holds: an object by its key, or one range of it, and the version that it belongs to, 0 if to none."""

    key: str
    part: int
    version: int

    def name_in(self, history: str | None) -> str:
        """What a file of it is called, but for its blake3, where objects are of a history; dcr.json is of none."""
        return _name_of(self, history)


@lru_cache(_MOST_NAMES)
def _name_of(label: Label, history: str | None) -> str:
    text = f"{history if label.key != HISTORY_KEY else None} {label.part} {label.key}"
    return f"{label.version:010d}-{object_digest(text.encode())[:16].hex()}"


@dataclass(slots=True)
class Kept:
    """A file that is kept. `is_checked` says that it has been hashed, or written, since the start; `used` counts on;
    `file` is it while it is open."""

    name: str
    version: int
    size: int
    blake3: bytes
    is_checked: bool
    used: int = 0
    readers: int = 0
    file: File | None = None

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.blake3.hex()}"


@dataclass(frozen=True, slots=True)
class Holding:
    """How much a spool holds."""

    objects: int
    bytes: int
    limit: int


class FullError(Exception):
    """Nothing more can be let go of, and there is no room."""


@dataclass(slots=True)
class Draft:
    """A file that is being written, of at most `room` bytes, which are set aside for it."""

    file: File
    name: str
    room: int


@dataclass(slots=True)
class Spool:
    """What is kept below one folder, made if it is not there, which one process at a time has; a context manager.

    Any number of threads may use it. ConflictError if another process has it, LocalError where it cannot be used.
    """

    path: Path
    limit: int
    # Objects of other histories are not found.
    history: str | None = None
    # Versions from this one on are needed by somebody: they go last.
    needed_from: int = 0
    # Why the disk does not keep what it should, if it does not.
    fault: str | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: dict[str, Kept] = field(default_factory=dict)
    # What is open and nobody reads, that which was read last at the end.
    _idle: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    _home: Folder | None = None
    _bytes: int = 0
    _clock: int = 0
    _drafts: int = 0
    _lent: int = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._home = stack.enter_context(_made(self.path))
            stack.enter_context(lock(self._home, _LOCK))
            self._home.remove_tree(_NEW, missing_ok=True)
            for name in (_NEW, _KEPT):
                self._home.make_folder(name, PRIVATE_FOLDER_MODE, exist_ok=True)
            stack.callback(self._shut_all)
            self._take_up()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def holding(self) -> Holding:
        with self._lock:
            return Holding(len(self._kept), self._bytes, self.limit)

    def find(self, label: Label) -> Kept | None:
        """What is kept of an object; it may not have been checked yet."""
        with self._lock:
            kept = self._kept.get(label.name_in(self.history))
            if kept is not None:
                self._clock += 1
                kept.used = self._clock
            return kept

    def versions(self) -> list[int]:
        """The versions of which something is kept, the newest first."""
        with self._lock:
            return sorted({kept.version for kept in self._kept.values() if kept.version}, reverse=True)

    def unchecked(self) -> list[Kept]:
        """What nobody has looked at since the start."""
        with self._lock:
            return [kept for kept in self._kept.values() if not kept.is_checked]

    def check(self, kept: Kept) -> bool:
        """Hash what is kept, unless that was done: whether it is what it was. If not, it is gone."""
        if kept.is_checked:
            return True
        try:
            with self._open(kept) as file:
                kept.is_checked = _blake3(file, kept.size) == kept.blake3
        except DcrError as error:
            if _is_for_lack_of_files(error):
                return False
        if not kept.is_checked:
            self.forget(kept)
        return kept.is_checked

    def forget(self, kept: Kept) -> None:
        """Let go of what is kept."""
        with self._lock:
            dropped = [self._take_out(kept)] if self._kept.get(kept.name) is kept else []
        self._remove(dropped)

    def open(self, kept: Kept) -> File | None:
        """What is kept, open to be read until `close`; None if it has gone."""
        with self._lock:
            if self._kept.get(kept.name) is not kept:
                return None
            kept.readers += 1
            self._idle.pop(kept.name, None)
            file = kept.file
        try:
            if file is not None:
                _check_there(file, kept)
                return file
            file = self._open(kept)
        except DcrError as error:
            if not _is_for_lack_of_files(error):
                self.forget(kept)
            self.close(kept)
            return None
        with self._lock:
            # Somebody else may have opened it meanwhile.
            unused = file if kept.file is not None else None
            kept.file = kept.file or file
        if unused is not None:
            unused.close()
        return kept.file

    def close(self, kept: Kept) -> None:
        """End reading what `open` opened."""
        with self._lock:
            kept.readers -= 1
            if kept.readers or kept.file is None:
                return
            if self._kept.get(kept.name) is not kept:
                _shut(kept)
                return
            self._idle[kept.name] = kept
            if len(self._idle) > _MOST_OPEN:
                _shut(self._idle.popitem(last=False)[1])

    def read(self, label: Label) -> bytes | None:
        """All bytes of a document that is kept, hashed again; None if it is not there, or not what it was."""
        kept = self.find(label)
        file = self.open(kept) if kept is not None else None
        if kept is None or file is None:
            return None
        data = bytearray(kept.size)
        try:
            file.read_into(0, memoryview(data))
        except DcrError:
            data.clear()
        finally:
            self.close(kept)
        if object_digest(data) != kept.blake3:
            self.forget(kept)
            return None
        return bytes(data)

    def write(self, label: Label, data: bytes) -> None:
        """Keep a document, if there is room."""
        try:
            draft = self.begin(len(data))
        except (FullError, LocalError):
            return
        try:
            draft.file.write_at(0, data)
            self.keep(draft, label, len(data), object_digest(data))
        except LocalError:
            self.drop(draft)
        draft.file.close()

    def begin(self, room: int) -> Draft:
        """Set `room` bytes aside for a new file, none for one that is not kept, and let go of what is needed least.
        FullError if there is no room."""
        with self._lock:
            dropped = self._make_room(room)
            self._drafts += 1
            name = f"{_NEW}/{self._drafts:d}"
            self._bytes += room
        self._remove(dropped)
        try:
            return Draft(self._folder.create_file(name, 0o600), name, room)
        except BaseException as error:
            with self._lock:
                self._bytes -= room
            self._note(error)
            raise

    def keep(self, draft: Draft, label: Label, size: int, blake3: bytes) -> Kept:
        """Keep what was written, in place of what was kept of the object before."""
        kept = Kept(label.name_in(self.history), label.version, size, blake3, is_checked=True)
        with self._lock:
            before = self._kept.get(kept.name)
            # Of the same bytes it has the same name.
            dropped = [self._take_out(before)] if before is not None else []
            dropped = [each for each in dropped if each.blake3 != blake3]
            self._folder.rename(draft.name, self._folder, f"{_KEPT}/{kept.file_name}")
            self._bytes += size - draft.room
            draft.room = 0
            self._clock += 1
            kept.used = self._clock
            self._kept[kept.name] = kept
        self._remove(dropped)
        return kept

    def drop(self, draft: Draft) -> None:
        """Let go of what was begun; its file stays open."""
        with self._lock:
            self._bytes -= draft.room
            draft.room = 0
        with suppress(LocalError):
            self._folder.remove(draft.name, missing_ok=True)

    def relieve(self) -> bool:
        """Let go of something, because the disk is full before the limit is reached: whether there was anything."""
        with self._lock:
            free = [kept for kept in self._kept.values() if not kept.readers]
            dropped = [self._take_out(min(free, key=self._worth))] if free else []
        self._remove(dropped)
        return bool(dropped)

    def lend_memory(self, size: int) -> None:
        """Set so much memory aside for what the disk has no room for, or, below 0, take it back. FullError if that
        would be too much."""
        with self._lock:
            if size > 0 and self._lent + size > MOST_LENT_BYTES:
                raise FullError
            self._lent += size

    @property
    def _folder(self) -> Folder:
        assert self._home is not None
        return self._home

    def _take_up(self) -> None:
        """Find what an earlier run has kept."""
        with self._folder.open_folder(_KEPT) as folder:
            for name in folder.names():
                status, match = folder.status(name), _NAME.fullmatch(name)
                key = name.rpartition("-")[0]
                is_file = status is not None and stat.S_ISREG(status.st_mode)
                if match is None or status is None or not is_file or key in self._kept:
                    folder.remove_tree(name, missing_ok=True)
                    continue
                kept = Kept(key, int(match[1]), status.st_size, bytes.fromhex(match[3]), is_checked=False)
                self._kept[key] = kept
                self._bytes += kept.size
        with suppress(FullError):
            self._remove(self._make_room(0))

    def _make_room(self, room: int) -> list[Kept]:
        """Let go of what is needed least, until there is room: what has to be removed then. FullError, and nothing has,
        if there is none."""
        short = self._bytes + room - self.limit
        if short <= 0:
            return []
        dropped: list[Kept] = []
        for kept in sorted((kept for kept in self._kept.values() if not kept.readers), key=self._worth):
            dropped.append(kept)
            short -= kept.size
            if short <= 0:
                return [self._take_out(each) for each in dropped]
        raise FullError

    def _worth(self, kept: Kept) -> tuple[bool, bool, int, int]:
        """What goes first: what is large enough to make room, of versions that all are past, the oldest; then what was
        used longest ago."""
        is_needed = kept.version >= self.needed_from or not kept.version
        return kept.size <= _SMALL_BYTES, is_needed, 0 if is_needed else kept.version, kept.used

    def _take_out(self, kept: Kept) -> Kept:
        del self._kept[kept.name]
        if not kept.readers:
            self._idle.pop(kept.name, None)
            _shut(kept)
        self._bytes -= kept.size
        return kept

    def _shut_all(self) -> None:
        for kept in self._kept.values():
            _shut(kept)

    def _remove(self, dropped: list[Kept]) -> None:
        # What cannot be removed now is found, and counted, at the next start.
        for kept in dropped:
            with suppress(LocalError):
                self._folder.remove(f"{_KEPT}/{kept.file_name}", missing_ok=True)

    def _note(self, error: BaseException) -> None:
        """Remember what is wrong with the disk, other than that it is full."""
        if isinstance(error, LocalError) and not isinstance(error, NoRoomError):
            self.fault = error.facts

    def _open(self, kept: Kept) -> File:
        file = self._folder.open_to_read(f"{_KEPT}/{kept.file_name}")
        if file is None:
            raise LocalError(kept.name, "is not there any more")
        try:
            _check_there(file, kept)
        except LocalError:
            file.close()
            raise
        return file


def _check_there(file: File, kept: Kept) -> None:
    """Raise LocalError unless a file that is open still has its name, and its size."""
    status = os.fstat(file.fd)
    if not status.st_nlink:
        raise LocalError(kept.name, "is not there any more")
    if status.st_size != kept.size:
        raise LocalError(kept.name, "has another size than it had")


def _shut(kept: Kept) -> None:
    """Close what is kept, if it is open."""
    file, kept.file = kept.file, None
    if file is not None:
        with suppress(LocalError):
            file.close()


def _is_for_lack_of_files(error: DcrError) -> bool:
    """Whether this process has too many files open, which says nothing of the one that it opens."""
    return getattr(error.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE)


def _made(path: Path) -> Folder:
    """Open a folder, made if the one above it is there."""
    with open_folder(path.parent) as above:
        above.make_folder(path.name, PRIVATE_FOLDER_MODE, exist_ok=True)
    return open_folder(path)


def _blake3(file: File, size: int) -> bytes:
    hasher = ObjectHasher()
    for part in _parts(file, size):
        hasher.update(part)
    return hasher.digest()


def _parts(file: File, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _PART_BYTES)))
    for begin in range(0, size, _PART_BYTES):
        part = buffer[: min(_PART_BYTES, size - begin)]
        file.read_into(begin, part)
        yield part
