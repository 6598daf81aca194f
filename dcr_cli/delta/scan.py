"""Reads checkpoints block by block: compares, digests and drafts, in bounded memory and any number of threads.

What a row of a delta becomes is diff.py's decision; the bytes of blocks are encoding.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Reader, Tensor
from dcr_cli.checkpoint.digest import add, no_digest
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import BLOCK_BYTES, Compared, Draft, Elements, block_elements, compare_block, uint_dtype
from dcr_cli.stages import Stages

# A task of the processor's holds at least this many bytes of the target where it can, and any at most so many parts.
TASK_BYTES = 4 * BLOCK_BYTES
TASK_PARTS = 512
# So many parts of a task are worth a look at whether they can be read together.
TOGETHER_PARTS = 8
SAMPLE_BYTES = 4096
# For `auto`, a tensor of at most this many bytes is sent whole: no coding of it is worth its own head.
WHOLE_BYTES = 16
# Tensors no further apart than this in a file are read in one go.
NEAR_BYTES = 4096


class TensorReader(Protocol):
    """Reads the tensors of a checkpoint, wherever they are."""

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` with the tensor's bytes from `byte_offset` on."""


class Part(NamedTuple):
    """One block of a tensor: compared, or new (no base), or only digested as part of the base (no target).

    `row` is the caller's number for the tensor.
    """

    row: int
    base: Tensor | None
    target: Tensor | None
    start: int
    elements: int

    @property
    def tensor(self) -> Tensor:
        """The side that is there."""
        tensor = self.target or self.base
        assert tensor is not None
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of one side."""
        return self.elements * self.tensor.dtype.width


class Scanned(NamedTuple):
    """What a part added to the digests of its two sides, its draft where something changed, and both sides' elements
    where they are few and will be asked for."""

    part: Part
    base_digest: NDArray[np.uint32]
    target_digest: NDArray[np.uint32]
    draft: Draft | None
    sides: tuple[Elements, Elements] | None = None


class _Side:
    """Reads one side of parts into a buffer that is used again and again."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def read(self, tensor: Tensor, part: Part) -> Elements:
        """The elements of a part, until the next call."""
        return _read(self._reader, tensor, part, self._buffer)

    def read_together(self, tensors: Sequence[Tensor]) -> _Together | None:
        """All of several tensors, until the next call, in one read for those that lie close together; None where they
        do not fit the buffer."""
        spots = np.array([(tensor.shard, tensor.begin, tensor.bytes) for tensor in tensors], np.int64)
        shards, begins, sizes = spots.T
        order = np.lexsort((begins, shards))
        ends = (begins + sizes)[order]
        is_first = np.ones(len(order), np.bool_)
        for near in (NEAR_BYTES, 0):
            # A run of tensors ends where the next one is in another shard, or further away than a read is worth.
            is_first[1:] = (np.diff(shards[order]) != 0) | (begins[order][1:] - ends[:-1] > near)
            firsts = np.flatnonzero(is_first)
            starts, stops = begins[order][firsts], ends[np.append(firsts[1:], len(order)) - 1]
            places = np.cumsum(stops - starts)
            if places[-1] <= len(self._buffer):
                break
        else:
            return None
        places -= stops - starts
        for shard, start, stop, place in zip(shards[order][firsts], starts, stops, places, strict=True):
            self._reader.read_shard_into(int(shard), int(start), self._buffer[place : place + stop - start])
        moved = np.empty_like(begins)
        moved[order] = begins[order] + np.repeat(places - starts, np.diff(np.append(firsts, len(order))))
        new_begins, new_ends = moved.astype(np.uint64), (moved + sizes).astype(np.uint64)
        digests = kernels.digest_spans(self._buffer, new_begins, new_ends)
        return _Together(self._buffer, new_begins, new_ends, digests)


@dataclass(frozen=True, slots=True)
class _Together:
    """Tensors that were read at once: their bytes, where each lies in them, and their digests [tensors, 4]."""

    data: NDArray[np.uint8]
    begins: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    digests: NDArray[np.uint32]

    def tensor_bytes(self) -> list[bytes]:
        """Each tensor's bytes."""
        data = self.data[: int(self.ends.max())].tobytes()
        return [data[begin:end] for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)]


class _Sides(threading.local):
    """Both sides for one thread."""

    def __init__(self, base: Reader, target: Reader) -> None:
        self.base = _Side(base)
        self.target = _Side(target)


class Scanner:
    """Scans parts of two checkpoints. Its methods may be called from several threads."""

    def __init__(self, base: Reader, target: Reader, allowed: Allowed, stages: Stages) -> None:
        self._base = base
        self._target = target
        self._allowed = allowed
        self._stages = stages
        self._sides = _Sides(base, target)
        self.chosen_row: int | None = None

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        """Scan parts one after the other; small tensors that lie close together on both sides, together."""
        found: list[Scanned] = []
        with self._stages.timed("read and compare", sum(part.bytes for part in parts)):
            for group in _groups(parts):
                scanned = self._scan_together(group) if len(group) >= TOGETHER_PARTS else None
                found += scanned if scanned is not None else [self.scan(part) for part in group]
        return found

    def _scan_together(self, parts: Sequence[Part]) -> list[Scanned] | None:
        """Scan parts that are whole small tensors with two sides; None where they are not that."""
        bases = [part.base for part in parts if part.base is not None]
        targets = [part.target for part in parts if part.target is not None]
        if len(bases) != len(parts) or len(targets) != len(parts):
            return None
        if any(part.elements < part.tensor.elements for part in parts):
            return None
        old, new = self._sides.base.read_together(bases), self._sides.target.read_together(targets)
        if old is None or new is None:
            return None
        rows = zip(parts, old.tensor_bytes(), new.tensor_bytes(), old.digests, new.digests, strict=True)
        return [
            self._scanned(part, before, after, old_digest, new_digest)
            if before != after
            else Scanned(part, old_digest, new_digest, None)
            for part, before, after, old_digest, new_digest in rows
        ]

    def _scanned(
        self, part: Part, before: bytes, after: bytes, old_digest: NDArray[np.uint32], new_digest: NDArray[np.uint32]
    ) -> Scanned:
        """What is known of a part that changed."""
        dtype = uint_dtype(part.tensor.dtype.width)
        old, new = np.frombuffer(before, dtype), np.frombuffer(after, dtype)
        if not self.is_sent_whole(part.tensor):
            return Scanned(part, old_digest, new_digest, self._compare(part, old, new).draft)
        draft = Draft(int(np.count_nonzero(old != new)), part.elements, None, 0, None)
        return Scanned(part, old_digest, new_digest, draft, (old, new) if part.bytes <= WHOLE_BYTES else None)

    def _compare(self, part: Part, old: Elements, new: Elements) -> Compared:
        is_whole, allowed, dtype = self.is_sent_whole(part.tensor), self._allowed, part.tensor.dtype
        context, gap = allowed.context and not is_whole, allowed.gap and not is_whole
        is_sample = part.row != self.chosen_row
        offset = part.start * dtype.width
        return compare_block(old, new, offset, dtype, context=context, gap=gap, is_sample=is_sample)

    def scan(self, part: Part) -> Scanned:
        """Compare and digest one block."""
        offset = part.start * part.tensor.dtype.width
        old = self._sides.base.read(part.base, part) if part.base is not None else None
        new = self._sides.target.read(part.target, part) if part.target is not None else None
        if old is not None and new is not None:
            found = self._compare(part, old, new)
            return Scanned(part, found.digest, add(found.digest, found.growth), found.draft)
        base_digest = kernels.digest(old, offset) if old is not None else no_digest()
        if new is None:
            return Scanned(part, base_digest, no_digest(), None)
        return Scanned(part, base_digest, kernels.digest(new, offset), whole_draft(part.elements))

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part again, in memory of their own; an absent base is empty."""
        target = _read(self._target, part.tensor, part, np.empty(part.bytes, np.uint8))
        if part.base is None:
            return target[:0], target
        return _read(self._base, part.base, part, np.empty(part.bytes, np.uint8)), target

    def is_sent_whole(self, tensor: Tensor) -> bool:
        """As the function."""
        return is_sent_whole(tensor, self._allowed)

    def read_base(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        for part, room in rooms_of(run, buffer):
            _read(self._base, part.base, part, room)

    def read_target(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        for part, room in rooms_of(run, buffer):
            _read(self._target, part.target, part, room)

    def offset_of(self, run: Sequence[Part]) -> int:
        return run[0].start * run[0].tensor.dtype.width


def is_sent_whole(tensor: Tensor, allowed: Allowed) -> bool:
    """Whether a tensor that has a base is coded whole, whatever changed in it."""
    return allowed.whole or (allowed.context and allowed.gap and tensor.bytes <= WHOLE_BYTES)


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut parts, in order, into groups that fit a buffer, if they are small."""
    group: list[Part] = []
    size = 0
    for part in parts:
        if group and size + part.bytes > BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.bytes
    if group:
        yield group


def rooms_of(run: Sequence[Part], buffer: NDArray[np.uint8]) -> Iterator[tuple[Part, NDArray[np.uint8]]]:
    """Where each part of a run lies in a buffer that all of them fill."""
    begin = 0
    for part in run:
        yield part, buffer[begin : begin + part.bytes]
        begin += part.bytes


def digest_part(reader: TensorReader, part: Part) -> NDArray[np.uint32]:
    """The digest of a part of one checkpoint's tensor."""
    return kernels.digest(read_part(reader, part), part.start * part.tensor.dtype.width)


def read_part(reader: TensorReader, part: Part) -> Elements:
    """The elements of a part of one checkpoint's tensor, in memory of their own."""
    return _read(reader, part.tensor, part, np.empty(part.bytes, np.uint8))


def sample(reader: Reader, tensor: Tensor) -> bytes:
    """The bytes in the middle of a tensor."""
    buffer = np.empty(min(SAMPLE_BYTES, tensor.bytes), np.uint8)
    start = (tensor.bytes - len(buffer)) // 2
    reader.read_into(tensor, start - start % tensor.dtype.width, buffer.data)
    return buffer.tobytes()


def whole_draft(elements: int) -> Draft:
    """The draft of a block that has no base."""
    return Draft(elements, elements, None, 0, None)


def block_count(tensor: Tensor) -> int:
    """Blocks of a tensor that is one piece."""
    return -(-tensor.elements // block_elements(tensor.dtype.width))


def block_part(row: int, base: Tensor | None, target: Tensor | None, block: int) -> Part:
    """Block number `block` of a tensor."""
    tensor = target or base
    assert tensor is not None
    size = block_elements(tensor.dtype.width)
    return Part(row, base, target, block * size, min(size, tensor.elements - block * size))


def parts_of(row: int, base: Tensor | None, target: Tensor | None) -> Iterator[Part]:
    """All blocks of a tensor, in order."""
    tensor = target or base
    assert tensor is not None
    for block in range(block_count(tensor)):
        yield block_part(row, base, target, block)


def tasks_of(parts: Iterator[Part], task_bytes: int = TASK_BYTES) -> Iterator[tuple[int, list[Part]]]:
    """Parts in order, in lists of at least so many bytes, if they are not many; each with its bytes."""
    task: list[Part] = []
    size = 0
    for part in parts:
        task.append(part)
        size += part.bytes
        if size >= task_bytes or len(task) >= TASK_PARTS:
            yield size, task
            task, size = [], 0
    if task:
        yield size, task


def _read(reader: TensorReader, tensor: Tensor | None, part: Part, buffer: NDArray[np.uint8]) -> Elements:
    assert tensor is not None
    view = buffer[: part.bytes]
    reader.read_into(tensor, part.start * tensor.dtype.width, view.data)
    elements: Elements = view.view(uint_dtype(tensor.dtype.width))
    return elements
