"""One pass over tensors: read, digest, decode, patch, and hand the new bytes on, in threads and in bounded memory.

Where new bytes go is told by the caller, who also judges the digests that come out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint import Tensor
from dcr_cli.encoding import BLOCK_BYTES, Changed, Encoding, decode_block, uint_dtype
from dcr_cli.header import DTYPES, Dtype
from dcr_cli.journal import Entry
from dcr_cli.manifest import TensorRow
from dcr_cli.pool import run_all
from dcr_cli.strided import flat_indices, spans
from dcr_cli.tasks import (
    STRETCH_BYTES,
    BoxBlock,
    Coded,
    Part,
    ShardWork,
    Source,
    Stretch,
    Task,
    digest_tasks,
    interleave,
    shard_tasks,
)

# So many files are worked on side by side, because threads that write to one file wait for each other.
STREAMS = 4

Elements = NDArray[Any]
Sum = NDArray[np.uint32]

_NOTHING = np.zeros(4, np.uint32)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first block that could not be decoded."""

    row: int
    payload: int
    facts: str


class Digests:
    """What a pass found out: per row the digests of its source and of its target, per base tensor its own."""

    def __init__(self, rows: int, bases: int) -> None:
        self.source = np.zeros((rows, 4), np.uint32)
        self.target = np.zeros((rows, 4), np.uint32)
        self.base = np.zeros((bases, 4), np.uint32)
        self.failure: Failure | None = None
        self.bytes_done = 0
        self._lock = threading.Lock()

    def add(self, tally: Tally) -> None:
        with self._lock:
            for sums, numbers, found in (
                (self.source, tally.rows, tally.sources),
                (self.target, tally.rows, tally.targets),
                (self.base, tally.bases, tally.base_sums),
            ):
                if numbers:
                    np.add.at(sums, numbers, np.array(found, np.uint32))
            self.bytes_done += tally.bytes

    def fail(self, row: int, payload: int, error: ValueError) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = Failure(row, payload, str(error))


class Tally:
    """What one task adds to the digests."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.sources: list[Sum] = []
        self.targets: list[Sum] = []
        self.bases: list[int] = []
        self.base_sums: list[Sum] = []
        self.bytes = 0


def run_pass(
    source: Source,
    works: Iterable[ShardWork],
    leftover: Sequence[tuple[int, Tensor]],
    digests: Digests,
    *,
    jobs: int,
    tick: Callable[[], None],
) -> None:
    """Go over the shards `works`, and over `leftover` base tensors, given with their numbers, which are only digested.

    Blocks that cannot be decoded do not end it: the digests name the first, and what comes of its tensor is not right.
    """
    streams = [shard_tasks(source, work, digests.fail) for work in works]
    streams.append(digest_tasks(source, leftover))
    tasks = interleave(streams, min(jobs, STREAMS))
    run_all(tasks, lambda: _Worker(source, digests).work, jobs, tick)


class _Worker:
    """Does tasks in one thread, with a buffer of its own."""

    def __init__(self, source: Source, digests: Digests) -> None:
        self._from = source
        self._digests = digests
        self._buffer = np.empty(STRETCH_BYTES, np.uint8)

    def work(self, task: Task) -> None:
        tally = Tally()
        for item in task.items:
            if isinstance(item, Stretch):
                self._go_over(item, task, tally)
            else:
                try:
                    self._go_over_box(item, task, tally)
                except ValueError as error:
                    self._digests.fail(item.row, item.coded.run.payload, error)
        self._digests.add(tally)
        if task.sink is not None:
            task.sink.release()

    def _go_over(self, stretch: Stretch, task: Task, tally: Tally) -> None:
        buffer = self._buffer[: stretch.size]
        has_source = stretch.source is not None
        if stretch.source is not None:
            self._from.files.read_path_into(*stretch.source, buffer)
        begin = 0
        for part in stretch.parts:
            view = buffer[begin : begin + part.size]
            old = kernels.digest(view, part.at) if has_source else _NOTHING
            if part.row < 0:
                tally.bases.append(part.base)
                tally.base_sums.append(old)
            else:
                new = old
                if part.coded is not None:
                    new = self._decode(part, part.coded, view, begin, old if has_source else None, task, stretch)
                tally.rows.append(part.row)
                tally.sources.append(old)
                tally.targets.append(new)
            begin += part.size
        tally.bytes += stretch.size
        if task.sink is not None and not task.is_patch:
            task.sink.write(stretch.begin, buffer.data)

    def _decode(
        self,
        part: Part,
        coded: Coded,
        view: NDArray[np.uint8],
        begin: int,
        old: Sum | None,
        task: Task,
        stretch: Stretch,
    ) -> Sum:
        """Bring one block to its target bits, in `view` or in the journal; the digest of these bits.

        `view` lies at byte `begin` of the buffer; `old` is the digest of what is in it, None if there is nothing in it.
        """
        dtype = DTYPES[self._from.rows[part.row].dtype]
        elements = part.size // dtype.width
        base = _elements(view, begin, dtype.width) if old is not None else None
        try:
            found = self._decode_block(coded, base, dtype, elements)
            if not isinstance(found, Changed):
                if not task.is_patch:
                    view[:] = found.view(np.uint8)
                elif task.sink is not None:
                    task.sink.journal(Entry(stretch.begin + begin, elements, None, found), is_alone=False)
                whole: Sum = kernels.digest(found.view(np.uint8), part.at)
                return whole
            if base is None or old is None:
                raise ValueError("changes, where there is nothing to change")
            grown = kernels.digest_changes(found.positions, base[found.positions], found.values, part.at)
        except ValueError as error:
            self._digests.fail(part.row, coded.run.payload, error)
            return _NOTHING
        if not task.is_patch:
            kernels.patch(base, found.positions, found.values)
            if begin % dtype.width:
                view[:] = base.view(np.uint8)
        elif task.sink is not None:
            entry = Entry(stretch.begin + begin, elements, found.positions, found.values)
            task.sink.journal(entry, is_alone=False)
        total: Sum = old + grown
        return total

    def _decode_block(self, coded: Coded, base: Elements | None, dtype: Dtype, elements: int) -> Changed | Elements:
        block = coded.block
        if block is None:
            block = self._from.payloads.run_bytes(coded.run, coded.begin, coded.end)
        encoding = Encoding(coded.piece.encoding)
        return decode_block(block, base, dtype, elements, encoding, coded.states, coded.table)

    def _go_over_box(self, item: BoxBlock, task: Task, tally: Tally) -> None:
        """Decode a block of a box; its changes go to the journal, span by span, since other boxes change the same
        spans."""
        row = self._from.rows[item.row]
        dtype = DTYPES[row.dtype]
        box = item.coded.piece.box
        assert box is not None
        flat = flat_indices(box, row.shape, item.start, item.elements)
        base = self._gather(row, dtype.width, flat) if row.source is not None else None
        found = self._decode_block(item.coded, base, dtype, item.elements)
        if isinstance(found, Changed):
            if base is None:
                raise ValueError("changes, where there is nothing to change")
            order = np.argsort(found.positions)
            positions, values = found.positions[order], found.values[order]
            flat, old = flat[positions], base[positions]
        else:
            values, old = found, base if base is not None else np.zeros_like(found)
        span = BLOCK_BYTES // dtype.width
        for number, begin, end in spans(flat, span):
            first = number * span
            inside = (flat[begin:end] - first).astype(np.uint32)
            grown = kernels.digest_changes(inside, old[begin:end], values[begin:end], first * dtype.width)
            tally.rows.append(item.row)
            tally.sources.append(_NOTHING)
            tally.targets.append(grown)
            if task.sink is not None:
                elements = min(span, item.place.size // dtype.width - first)
                entry = Entry(item.place.begin + first * dtype.width, elements, inside, values[begin:end])
                task.sink.journal(entry, is_alone=True)

    def _gather(self, row: TensorRow, width: int, flat: NDArray[np.int64]) -> Elements:
        """Read the source's elements at ascending flat indices."""
        assert row.source is not None
        tensor = self._from.tensor(row.source)
        path = self._from.shards[tensor.shard]
        gathered: Elements = np.empty(len(flat), uint_dtype(width))
        for _, begin, end in spans(flat, BLOCK_BYTES // width):
            low, high = int(flat[begin]), int(flat[end - 1])
            view = self._buffer[: (high + 1 - low) * width]
            self._from.files.read_path_into(path, tensor.begin + low * width, view)
            gathered[begin:end] = view.view(gathered.dtype)[flat[begin:end] - low]
        return gathered


def _elements(view: NDArray[np.uint8], begin: int, width: int) -> Elements:
    """The elements in `view`; in memory of their own where it does not lie as the kernels need it."""
    return (view.copy() if begin % width else view).view(uint_dtype(width))
