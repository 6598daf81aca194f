"""Projects changes of canonical tensors onto the files of a receiver that stores them through a layout.

An element goes to every box that has it, an owner's or a replica's. What comes is the journal of one canonical shard,
what goes is a journal of the receiver's files; how these get into place is staging.py's matter.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.layout.gather import Held, Sources
from dcr_cli.receiver.passes.journal import Entry, JournalWriter

Indices = NDArray[np.int64]
Values = NDArray[Any]

# Changes of about so many bytes are held, so that those for one place of a file are journalled together: where a layout
# transposes, each block has some for every place.
_HELD_BYTES = 16 << 20
_PLACE_BYTES = 8


class ProjectingSink:
    """Takes changes of the thought-of shard that `tensors` lie in, for any number of threads.

    `sources` say where each tensor lies; one that they lack is tied to another, with which it changes. `numbers` say
    which files are meant by their paths; into other files nothing goes.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        sources: Mapping[str, Sources],
        numbers: Mapping[str, int],
        journal: JournalWriter,
    ) -> None:
        self._tensors = sorted((each for each in tensors.values() if each.bytes), key=lambda each: each.begin)
        self._begins = [each.begin for each in self._tensors]
        self._sources = sources
        self._numbers = numbers
        self._journal = journal
        self._lock = threading.Lock()
        self._holders = 0
        self._held_bytes = 0
        # By file and by the bytes of a value: places, as bytes of the file, and values.
        self._held: dict[tuple[int, int], list[tuple[Indices, Values]]] = {}

    def write(self, offset: int, data: memoryview) -> None:
        """Take all bytes from `offset` of the thought-of shard on, changed or not."""
        values = np.frombuffer(bytes(data), np.uint8)
        self.journal(Entry(offset, len(values), None, values), is_alone=True)

    def journal(self, entry: Entry, *, is_alone: bool) -> None:
        """Take new bits of the thought-of shard."""
        found = [
            (number, places, values)
            for tensor, positions, given in self._by_tensor(entry)
            for number, places, values in self._project(tensor, positions, given)
        ]
        with self._lock:
            for number, places, values in found:
                self._held.setdefault((number, values.itemsize), []).append((places, values))
                self._held_bytes += len(places) * (_PLACE_BYTES + values.itemsize)
            if self._held_bytes >= _HELD_BYTES:
                self._flush()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._flush()

    def _by_tensor(self, entry: Entry) -> Iterator[tuple[Tensor, Indices, Values]]:
        """Cut an entry into what is of one tensor each: positions, in units of the width of the values, and values."""
        width = entry.values.itemsize
        first = bisect_right(self._begins, entry.begin) - 1
        tensor = self._tensors[first]
        positions = (
            np.arange(entry.elements, dtype=np.int64) if entry.positions is None else entry.positions.astype(np.int64)
        )
        if entry.begin + entry.elements * width <= tensor.begin + tensor.bytes:
            yield tensor, positions + (entry.begin - tensor.begin) // width, entry.values
            return
        # Small tensors that lie back to back are changed byte by byte.
        positions += entry.begin
        for tensor in self._tensors[first:]:
            if tensor.begin >= entry.begin + entry.elements:
                return
            inside = np.flatnonzero((positions >= tensor.begin) & (positions < tensor.begin + tensor.bytes))
            if len(inside):
                yield tensor, positions[inside] - tensor.begin, entry.values[inside]

    def _project(self, tensor: Tensor, positions: Indices, values: Values) -> Iterator[tuple[int, Indices, Values]]:
        """Where in which files some changes of a tensor go: the number of the file, bytes in it, and new values."""
        sources = self._sources.get(tensor.name)
        if sources is None or not len(positions):
            return
        width = tensor.dtype.width
        parts = width // values.itemsize
        elements, part = np.divmod(positions, parts) if parts > 1 else (positions, None)
        low, high = int(elements.min()), int(elements.max()) + 1
        for boxes in (sources.owners, sources.replicas):
            for held in boxes.within(low, high):
                number = self._numbers.get(held.placed.path)
                if number is not None:
                    yield from _project_box(held, number, width, (elements, part, values))

    def _flush(self) -> None:
        """Journal all that is held, place after place, file after file; the lock is held."""
        held, self._held, self._held_bytes = self._held, {}, 0
        for (number, width), found in sorted(held.items()):
            places = np.concatenate([places for places, _ in found])
            values = np.concatenate([values for _, values in found])
            order = np.argsort(places, kind="stable")
            for entry in _entries(places[order], values[order], width):
                self._journal.add(number, entry, is_alone=True)
            self._journal.flush(number)


def _project_box(
    held: Held, number: int, width: int, changes: tuple[Indices, Indices | None, Values]
) -> Iterator[tuple[int, Indices, Values]]:
    elements, part, values = changes
    found, local = held.box.find(elements)
    if len(found):
        places = held.begin + local * width
        if part is not None:
            places += part[found] * values.itemsize
        yield number, places, values[found]


def _entries(places: Indices, values: Values, width: int) -> Iterator[Entry]:
    """Entries of at most a block each, from ascending places."""
    for remainder in np.unique(places % width).tolist():
        chosen = np.flatnonzero(places % width == remainder)
        some, new = places[chosen], values[chosen]
        cuts = np.flatnonzero(np.diff(some // BLOCK_BYTES)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(some)], strict=True):
            first = int(some[begin])
            inside = ((some[begin:end] - first) // width).astype(np.uint32)
            elements = int(inside[-1]) + 1
            yield Entry(first, elements, inside if elements > len(inside) else None, new[begin:end])
