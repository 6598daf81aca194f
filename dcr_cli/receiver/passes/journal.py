"""The journal of changes: new bits at absolute places, so that writing them twice is the same as writing them once.

A journal is a file of chunks, each of entries for one file. It is local to a receiver and never sent (FORMAT 12).
Making it durable, and keeping the list of its chunks, is the caller's business.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.delta.encoding import BLOCK_BYTES, uint_dtype
from dcr_cli.durable import File
from dcr_cli.errors import DamagedError

CHUNK_BYTES = 2 << 20
# Element width, whether all elements are given, elements of the span, elements given, first byte of the span in its
# file.
_HEAD = struct.Struct("<BBxxIIxxxxQ")
_ALIGNMENT = 8


class Chunk(NamedTuple):
    """Where a chunk is, and which file it is for.

    `is_alone`: others are for the same spans; one at a time is written.
    """

    file: int
    offset: int
    size: int
    blake3: bytes
    is_alone: bool


class Entry(NamedTuple):
    """New bits in a span of `elements` from byte `begin` of a file: `values` at `positions` in it, or all of it."""

    begin: int
    elements: int
    positions: NDArray[np.uint32] | None
    values: NDArray[Any]


class JournalWriter:
    """Collects entries into chunks of a file, which is created when the first is full; for any number of threads."""

    def __init__(self, create: Callable[[], File]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, bool], list[bytes]] = {}
        self._bytes: dict[tuple[int, bool], int] = {}
        self._end = 0
        self.file: File | None = None
        self.chunks: list[Chunk] = []

    def add(self, file: int, entry: Entry, *, is_alone: bool) -> None:
        """Take an entry for file number `file`."""
        parts = _encode(entry)
        key = (file, is_alone)
        with self._lock:
            self._parts.setdefault(key, []).extend(parts)
            self._bytes[key] = self._bytes.get(key, 0) + sum(map(len, parts))
            is_full = self._bytes[key] >= CHUNK_BYTES
        if is_full:
            self._flush(key)

    def flush(self, file: int) -> None:
        """Write what is left for file number `file`."""
        for is_alone in (False, True):
            self._flush((file, is_alone))

    def _flush(self, key: tuple[int, bool]) -> None:
        with self._lock:
            data = b"".join(self._parts.pop(key, []))
            self._bytes.pop(key, None)
            if not data:
                return
            if self.file is None:
                self.file = self._create()
            file, offset = self.file, self._end
            self._end += len(data)
            self.chunks.append(Chunk(key[0], offset, len(data), object_digest(data), key[1]))
        file.write_at(offset, data)


def _encode(entry: Entry) -> list[bytes]:
    is_full = entry.positions is None
    head = _HEAD.pack(entry.values.dtype.itemsize, is_full, entry.elements, len(entry.values), entry.begin)
    positions = b"" if entry.positions is None else entry.positions.astype("<u4", copy=False).tobytes()
    values = entry.values.tobytes()
    # Values begin where they are aligned, and so does the next entry.
    return [head, positions, bytes(-len(positions) % _ALIGNMENT), values, bytes(-len(values) % _ALIGNMENT)]


def read_chunk(journal: File, chunk: Chunk) -> Iterator[Entry]:
    """Read a chunk's entries; DamagedError if it is not what was written."""
    data = bytearray(chunk.size)
    journal.read_into(chunk.offset, memoryview(data))
    if object_digest(data) != chunk.blake3:
        raise DamagedError(str(journal.path), f"its bytes from {chunk.offset} on are not what was written")
    at = 0
    while at < len(data):
        width, is_full, elements, given, begin = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        positions = None
        if not is_full:
            positions = np.frombuffer(data, "<u4", given, at)
            at += _padded(4 * given)
        values = np.frombuffer(data, uint_dtype(width), given, at)
        at += _padded(width * given)
        yield Entry(begin, elements, positions, values)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


class ChunkPlacer:
    """Writes chunks of a journal into the files they are for; one for each thread."""

    def __init__(self, journal: File) -> None:
        self._journal = journal
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def place(self, chunk: Chunk, target: File) -> int:
        """Write a chunk; what it does not name in its spans stays. How many bytes were written."""
        written = 0
        for entry in read_chunk(self._journal, chunk):
            written += entry.elements * entry.values.dtype.itemsize
            if entry.positions is None:
                target.write_at(entry.begin, entry.values)
                continue
            view = self._buffer[: entry.elements * entry.values.dtype.itemsize]
            target.read_into(entry.begin, view.data)
            kernels.patch(view.view(entry.values.dtype), entry.positions, entry.values)
            target.write_at(entry.begin, view)
        return written
