"""One pass over tensors: read, digest, decode, patch, and hand the new bytes on, in threads and in bounded memory.

Where new bytes go is told by the caller, who also judges the digests that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.header import DTYPES, Dtype
from dcr_cli.delta.encoding import (
    BLOCK_BYTES,
    Changed,
    Encoding,
    Patched,
    changed_elements,
    decode_block,
    patch_block,
    uint_dtype,
)
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.delta.strided import flat_indices, spans
from dcr_cli.pool import run_all
from dcr_cli.receiver.passes.digests import Digests, Sums, Tally
from dcr_cli.receiver.passes.journal import Entry
from dcr_cli.receiver.passes.runs import Coded
from dcr_cli.receiver.passes.tasks import (
    STRETCH_BYTES,
    BoxBlock,
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

# What a position takes in the journal, and what a changed byte does: its position and itself.
POSITION_BYTES = 4
BYTE_ENTRY_BYTES = POSITION_BYTES + 1

Elements = NDArray[Any]
Bytes = NDArray[np.uint8]

_NOTHING = np.zeros(4, np.uint32)


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
        if stretch.source is not None:
            self._from.files.read_path_into(*stretch.source, buffer)
        if stretch.parts[0].row < 0:
            tally.bases += [part.base for part in stretch.parts]
            tally.base_sums.append(_digest_parts(stretch.parts, buffer))
        else:
            go_over = self._go_over_one if len(stretch.parts) == 1 else self._go_over_many
            sources, targets = go_over(stretch, buffer, task, tally)
            tally.rows += [part.row for part in stretch.parts]
            tally.sources.append(sources)
            tally.targets.append(targets)
        tally.bytes += stretch.size
        if task.sink is not None and not task.is_patch:
            task.sink.write(stretch.begin, buffer.data)

    def _go_over_one(self, stretch: Stretch, buffer: Bytes, task: Task, tally: Tally) -> tuple[Sums, Sums]:
        """Bring one part to its target bits, in the buffer or in the journal: digests of both."""
        part = stretch.parts[0]
        has_source = stretch.source is not None
        if not part.coded:
            old = kernels.digest(buffer, part.at) if has_source else _NOTHING
            return old.reshape(1, 4), old.reshape(1, 4)
        dtype = self._dtype(part)
        # One block is journalled as it is decoded; of several, what they have changed together.
        in_place = not task.is_patch or len(part.coded) > 1
        before = buffer.copy() if task.is_patch and in_place and has_source else None
        base: Sums | None = None if has_source else _NOTHING
        for number, coded in enumerate(part.coded):
            try:
                if has_source or number:
                    elements = buffer.view(uint_dtype(dtype.width))
                    patched = self._patch(coded, elements, part.at, dtype, in_place=in_place)
                else:
                    patched = self._make(coded, buffer, part.at, dtype)
            except ValueError as error:
                self._digests.fail(part.row, coded.run.payload, error)
                # Whether the base is the right one comes before what cannot be decoded with it.
                old = kernels.digest(buffer, part.at) if base is None else base
                return old.reshape(1, 4), _NOTHING.reshape(1, 4)
            tally.changed.append((part.row, patched.changed))
            base = patched.old if base is None else base
        assert base is not None
        found = patched.found
        if len(part.coded) > 1:
            found = _together(before, buffer, dtype)
        self._journal(task, stretch.begin, found, part.size // dtype.width)
        return base.reshape(1, 4), patched.new.reshape(1, 4)

    def _go_over_many(self, stretch: Stretch, buffer: Bytes, task: Task, tally: Tally) -> tuple[Sums, Sums]:
        """Bring small parts to their target bits in the buffer, and in the journal: digests of both."""
        has_source = stretch.source is not None
        old = _digest_parts(stretch.parts, buffer) if has_source else np.zeros((len(stretch.parts), 4), np.uint32)
        before = buffer.copy() if task.is_patch and has_source else None
        begin = 0
        for part in stretch.parts:
            self._patch_small(part, buffer[begin : begin + part.size], begin, tally, has_source=has_source)
            begin += part.size
        if before is not None:
            # Many small tensors are one span of bytes; one entry each would take longer than all else.
            positions = kernels.scan(before, buffer)
            if len(positions) * BYTE_ENTRY_BYTES < len(buffer):
                self._journal(task, stretch.begin, Changed(positions, buffer.take(positions)), len(buffer))
            else:
                self._journal(task, stretch.begin, buffer, len(buffer))
        elif task.is_patch:
            # What the buffer held before has nothing to do with what the file holds.
            self._journal(task, stretch.begin, buffer, len(buffer))
        return old, _digest_parts(stretch.parts, buffer)

    def _patch_small(self, part: Part, view: Bytes, begin: int, tally: Tally, *, has_source: bool) -> None:
        """Bring a small part, `view` from byte `begin` of its stretch on, to its target bits."""
        width = self._dtype(part).width
        for number, coded in enumerate(part.coded):
            base = _elements(view, begin, width)
            source = base if has_source or number else None
            found = self._decode(part, coded, source)
            if found is None:
                return
            tally.changed.append((part.row, changed_elements(Encoding(coded.piece.encoding), source, found)))
            if isinstance(found, Changed):
                kernels.patch(base, found.positions, found.values)
                if begin % width:
                    view[:] = base.view(np.uint8)
            else:
                view[:] = found.view(np.uint8)

    def _dtype(self, part: Part) -> Dtype:
        return DTYPES[self._from.rows[part.row].dtype]

    def _decode(self, part: Part, coded: Coded, base: Elements | None) -> Changed | Elements | None:
        """Decode a block; None, and a failure, if it cannot be."""
        dtype = self._dtype(part)
        try:
            found = self._decode_block(coded, base, dtype, part.size // dtype.width)
            if isinstance(found, Changed) and base is None:
                raise ValueError("changes, where there is nothing to change")
        except ValueError as error:
            self._digests.fail(part.row, coded.run.payload, error)
            return None
        return found

    def _journal(self, task: Task, begin: int, found: Changed | Elements, elements: int) -> None:
        if task.sink is not None and task.is_patch:
            positions, values = (found.positions, found.values) if isinstance(found, Changed) else (None, found)
            if len(values):
                task.sink.journal(Entry(begin, elements, positions, values), is_alone=False)

    def _decode_block(self, coded: Coded, base: Elements | None, dtype: Dtype, elements: int) -> Changed | Elements:
        encoding = Encoding(coded.piece.encoding)
        return decode_block(self._block(coded), base, dtype, elements, encoding, coded.states, coded.table)

    def _patch(self, coded: Coded, base: Elements, at: int, dtype: Dtype, *, in_place: bool) -> Patched:
        """Decode a block of a part that has a source."""
        encoding = Encoding(coded.piece.encoding)
        return patch_block(self._block(coded), base, at, dtype, encoding, coded.states, coded.table, in_place=in_place)

    def _make(self, coded: Coded, buffer: Bytes, at: int, dtype: Dtype) -> Patched:
        """Decode a block of a part that has none into the buffer."""
        found = self._decode_block(coded, None, dtype, len(buffer) // dtype.width)
        if isinstance(found, Changed):
            raise ValueError("changes, where there is nothing to change")
        buffer[:] = found.view(np.uint8)
        return Patched(found, len(found), _NOTHING, kernels.digest(buffer, at))

    def _block(self, coded: Coded) -> memoryview:
        """A block's bytes, from its payload if need be."""
        if coded.block is not None:
            return coded.block
        return self._from.payloads.run_bytes(coded.run, coded.begin, coded.end)

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
        tally.changed.append((item.row, changed_elements(Encoding(item.coded.piece.encoding), base, found)))
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
            tally.sources.append(_NOTHING.reshape(1, 4))
            tally.targets.append(grown.reshape(1, 4))
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


def _digest_parts(parts: Sequence[Part], buffer: Bytes) -> Sums:
    """The digests of parts that lie back to back in the buffer."""
    ends = np.cumsum([part.size for part in parts]).astype(np.uint64)
    begins = ends - np.array([part.size for part in parts], np.uint64)
    sums: Sums = kernels.digest_spans(buffer, begins, ends)
    for number, part in enumerate(parts):
        # The others are whole tensors, or their beginnings.
        if part.at:
            sums[number] = kernels.digest(buffer[int(begins[number]) : int(ends[number])], part.at)
    return sums


def _together(before: Bytes | None, buffer: Bytes, dtype: Dtype) -> Changed | Elements:
    """What has become of a block in several steps: what differs from `before`, or, where that is nothing or much, all
    of it."""
    after = buffer.view(uint_dtype(dtype.width))
    if before is None:
        return after
    positions = kernels.scan(before.view(after.dtype), after)
    if len(positions) * (POSITION_BYTES + dtype.width) >= len(buffer):
        return after
    return Changed(positions, kernels.gather(after, positions))


def _elements(view: Bytes, begin: int, width: int) -> Elements:
    """The elements in `view`; in memory of their own where it does not lie as the kernels need it."""
    return (view.copy() if begin % width else view).view(uint_dtype(width))
