"""Gathers the bytes of wanted files: finds the ranges that are there already, copies those, fetches the others.

A range counts only when it has its blake3; one that the disk does not give is not there. What is gathered lies in
staged files, which may hold wrong ranges until all of theirs are right; giving them a name is here.py's matter.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.checkpoint.digest import ObjectHasher
from dcr_cli.checkpoint.folder import READ_AT_ONCE_BYTES, Files, Identity
from dcr_cli.durable import File
from dcr_cli.errors import LocalError
from dcr_cli.pool import run_all
from dcr_cli.receiver.install.wanted import FetchedError, Fetcher, Part, Wanted, parts_of

Progress = Callable[[str, int, int], None]
Range = tuple[int, int]
_TRIES = 2
# What the system says of bytes that are lost, by a disk or a file system that checks them.
_DISK_FAILS = frozenset((errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EREMOTEIO))
_SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How many threads work, and who is told how far they are."""

    jobs: int
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Shelf:
    """Files below `root` that may hold bytes of wanted ones: by number, their paths there and what they are."""

    root: Path
    paths: Mapping[int, str] = field(default_factory=dict)
    identities: Mapping[str, Identity] = field(default_factory=dict)

    def size(self, file: int) -> int | None:
        """How many bytes the file has that may be the wanted one of this number; None if there is none."""
        return self.identities[self.paths[file]].size if file in self.paths else None

    def reader(self) -> Files:
        return Files(self.root, self.identities)


@dataclass(frozen=True, slots=True)
class Found:
    """A shelf, and which ranges of wanted files are right on it. Of `unreadable` files, by number, the disk did not
    give all."""

    shelf: Shelf
    right: frozenset[Range]
    unreadable: frozenset[int] = frozenset()

    def is_whole(self, wanted: Wanted, file: int) -> bool:
        """Whether a file is the wanted one."""
        row = wanted.files[file]
        return self.shelf.size(file) == row.size and all((file, at) in self.right for at in range(len(row.ranges)))


@dataclass(frozen=True, slots=True)
class Supply:
    """Where every part of the files to be staged comes from: they are staged already, copied from a shelf, or
    fetched."""

    files: tuple[int, ...]
    copied: tuple[tuple[Shelf, tuple[Part, ...]], ...]
    fetched: tuple[Part, ...]

    @property
    def fetched_bytes(self) -> int:
        return sum(part.size for part in self.fetched)

    @property
    def written_bytes(self) -> int:
        return self.fetched_bytes + sum(part.size for _, parts in self.copied for part in parts)


def supply_of(wanted: Wanted, files: Iterable[int], staged: Found, others: Sequence[Found]) -> Supply:
    """Say where the parts of some files, given by number, come from; what is earlier in `others` comes first."""
    numbers = tuple(files)
    copied: list[list[Part]] = [[] for _ in others]
    fetched: list[Part] = []
    for number in numbers:
        for part in parts_of(number, wanted.files[number]):
            key = part.file, part.number
            if key in staged.right:
                continue
            at = next((at for at, found in enumerate(others) if key in found.right), None)
            (fetched if at is None else copied[at]).append(part)
    shelves = [(found.shelf, tuple(parts)) for found, parts in zip(others, copied, strict=True) if parts]
    return Supply(numbers, tuple(shelves), tuple(fetched))


class _Count:
    """Bytes that several threads have done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def add(self, count_bytes: int) -> None:
        with self._lock:
            self.bytes += count_bytes


def find_right(wanted: Wanted, shelf: Shelf, files: Iterable[int], effort: Effort) -> Found:
    """Read, once, those of some files that are on a shelf, and find which of their ranges are right."""
    parts = []
    for number in files:
        size = shelf.size(number)
        if size is not None:
            parts += [part for part in parts_of(number, wanted.files[number]) if part.begin + part.size <= size]
    right: set[Range] = set()
    unreadable: set[int] = set()
    done = _Count()
    with shelf.reader() as reader:

        def make_worker() -> Callable[[Part], None]:
            buffer = memoryview(bytearray(READ_AT_ONCE_BYTES))

            def work(part: Part) -> None:
                hasher = ObjectHasher()
                try:
                    for _, data in _read(reader, shelf.paths[part.file], part, buffer):
                        hasher.update(data)
                        done.add(len(data))
                except _UnreadableError:
                    unreadable.add(part.file)
                    return
                if hasher.digest() == part.blake3:
                    right.add((part.file, part.number))

            return work

        _run(parts, make_worker, effort, "check", done)
    return Found(shelf, frozenset(right), frozenset(unreadable))


class Gatherer:
    """Writes the parts of staged files, which `open_staged` opens by number, and knows how many bytes it fetched."""

    def __init__(self, wanted: Wanted, fetcher: Fetcher, open_staged: Callable[[int], File], effort: Effort) -> None:
        self._wanted = wanted
        self._fetcher = fetcher
        self._open_staged = open_staged
        self._effort = effort
        self._fetched = _Count()

    @property
    def fetched_bytes(self) -> int:
        return self._fetched.bytes

    def copy(self, shelf: Shelf, parts: Sequence[Part]) -> list[Part]:
        """Copy parts from a shelf: those that are not there any more as they were found, or cannot be read any more."""
        wrong: list[Part] = []
        done = _Count()
        with shelf.reader() as reader:

            def make_worker() -> Callable[[Part], None]:
                buffer = memoryview(bytearray(READ_AT_ONCE_BYTES))

                def work(part: Part) -> None:
                    hasher = ObjectHasher()
                    with self._open_staged(part.file) as file, suppress(_UnreadableError):
                        for offset, data in _read(reader, shelf.paths[part.file], part, buffer):
                            hasher.update(data)
                            file.write_at(offset, data)
                            done.add(len(data))
                    if hasher.digest() != part.blake3:
                        wrong.append(part)

                return work

            _run(parts, make_worker, self._effort, "copy", done)
        return wrong

    def fetch(self, parts: Sequence[Part]) -> None:
        """Fetch parts; FetchedError if one is wrong twice."""
        done = _Count()

        def make_worker() -> Callable[[Part], None]:
            def work(part: Part) -> None:
                with self._open_staged(part.file) as file:
                    found = b""
                    for _ in range(_TRIES):
                        found = self._fetch(part, file)
                        if found == part.blake3:
                            break
                    else:
                        raise self._wrong(part, found)
                done.add(part.size)

            return work

        _run(parts, make_worker, self._effort, "fetch", done)

    def _fetch(self, part: Part, file: File) -> bytes:
        """Fetch a part and write it, never more than its bytes: the blake3 of what came."""
        hasher, at = ObjectHasher(), 0
        for data in self._fetcher.fetch(self._wanted.files[part.file].path, part.begin, part.size):
            self._fetched.add(len(data))
            hasher.update(data)
            file.write_at(part.begin + at, memoryview(data)[: part.size - at])
            at += len(data)
            if at > part.size:
                break
        return hasher.digest()

    def _wrong(self, part: Part, found: bytes) -> FetchedError:
        facts = f"its bytes {part.begin} to {part.begin + part.size} were fetched {_TRIES} times and are other ones: "
        facts += f"expected blake3:{part.blake3.hex()[:_SHOWN_DIGITS]}, found blake3:{found.hex()[:_SHOWN_DIGITS]}"
        return FetchedError(self._wanted.files[part.file].path, facts)


class _UnreadableError(Exception):
    """The disk fails where a part of a file lies: that is no reason to do without what can be fetched."""


def _read(reader: Files, path: str, part: Part, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Read a part of a file piece by piece: where each is, and its bytes, valid until the next is asked for."""
    for offset in range(part.begin, part.begin + part.size, len(buffer)):
        view = buffer[: part.begin + part.size - offset]
        try:
            reader.read_path_into(path, offset, view)
        except LocalError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK_FAILS):
                raise
            raise _UnreadableError from error
        yield offset, view


def _run(
    parts: Sequence[Part], make_worker: Callable[[], Callable[[Part], None]], effort: Effort, stage: str, done: _Count
) -> None:
    total = sum(part.size for part in parts)

    def tick() -> None:
        if effort.progress is not None:
            effort.progress(stage, done.bytes, total)

    run_all(parts, make_worker, effort.jobs, tick)
