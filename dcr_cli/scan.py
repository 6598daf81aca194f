"""Reads checkpoints block by block: compares, digests and drafts, in bounded memory and any number of threads.

What a row of a delta becomes is diff.py's decision; the bytes of blocks are encoding.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dcr_kernels as kernels
import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint import Reader, Tensor
from dcr_cli.choice import Allowed
from dcr_cli.digest import add, no_digest
from dcr_cli.encoding import BLOCK_BYTES, Draft, Elements, block_elements, draft_block, find_changes, uint_dtype

# A task holds at least this many bytes of the target where it can, and at most this many parts.
TASK_BYTES = 4 * BLOCK_BYTES
TASK_PARTS = 512
SAMPLE_BYTES = 4096
# For `auto`, a tensor of at most this many bytes is sent whole: no coding of it is worth its own head.
WHOLE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One block of a tensor: compared, or new (no base), or only digested as part of the base (no target).

    `row` is the caller's number for the tensor.
    """

    row: int
    base: Tensor | None
    target: Tensor | None
    start: int
    count: int

    @property
    def tensor(self) -> Tensor:
        """The side that is there."""
        tensor = self.target or self.base
        assert tensor is not None
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of one side."""
        return self.count * self.tensor.dtype.width


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a part added to the digests of its two sides, and its draft where something changed."""

    part: Part
    base_digest: NDArray[np.uint32]
    target_digest: NDArray[np.uint32]
    draft: Draft | None


class _Side:
    """Reads one side of parts into a buffer that is used again and again; small neighbours are read at once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)
        self._shard, self._begin, self._end = -1, 0, 0

    def prepare(self, tensors: Sequence[Tensor | None]) -> None:
        """Read what the coming parts of `tensors` need, if it is small and lies close together."""
        self._shard = -1
        small = [tensor for tensor in tensors if tensor is not None]
        if len(small) < 2 or sum(tensor.bytes for tensor in small) > BLOCK_BYTES:
            return
        shard = small[0].shard
        begin, end = min(tensor.begin for tensor in small), max(tensor.begin + tensor.bytes for tensor in small)
        if end - begin <= BLOCK_BYTES and all(tensor.shard == shard for tensor in small):
            self._reader.read_shard_into(shard, begin, self._buffer[: end - begin])
            self._shard, self._begin, self._end = shard, begin, end

    def read(self, tensor: Tensor, part: Part) -> Elements:
        """The elements of a part, until the next call."""
        begin = tensor.begin + part.start * tensor.dtype.width
        if tensor.shard == self._shard and self._begin <= begin and begin + part.bytes <= self._end:
            # Not aligned to the element in general, which kernels and NumPy cope with.
            elements: Elements = self._buffer[begin - self._begin :][: part.bytes].view(uint_dtype(tensor.dtype.width))
            return elements
        self._shard = -1
        return _read(self._reader, tensor, part, self._buffer)


class _Sides(threading.local):
    """Both sides for one thread."""

    def __init__(self, base: Reader, target: Reader) -> None:
        self.base = _Side(base)
        self.target = _Side(target)


class Scanner:
    """Scans parts of two checkpoints. Its methods may be called from several threads."""

    def __init__(self, base: Reader, target: Reader, allowed: Allowed) -> None:
        self._base = base
        self._target = target
        self._allowed = allowed
        self._sides = _Sides(base, target)

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        """Scan parts one after the other."""
        self._sides.base.prepare([part.base for part in parts])
        self._sides.target.prepare([part.target for part in parts])
        return [self.scan(part) for part in parts]

    def scan(self, part: Part) -> Scanned:
        """Compare and digest one block."""
        offset = part.start * part.tensor.dtype.width
        old = self._sides.base.read(part.base, part) if part.base is not None else None
        new = self._sides.target.read(part.target, part) if part.target is not None else None
        base_digest = kernels.digest(old, offset) if old is not None else no_digest()
        if new is None:
            return Scanned(part, base_digest, no_digest(), None)
        if old is None:
            return Scanned(part, base_digest, kernels.digest(new, offset), whole_draft(part.count))
        changes = find_changes(old, new)
        if not len(changes.positions):
            return Scanned(part, base_digest, base_digest, None)
        growth = kernels.digest_changes(changes.positions, changes.old, changes.new, offset)
        if self.is_sent_whole(part.tensor):
            draft = whole_draft(part.count, changed=len(changes.positions))
        else:
            allowed = self._allowed
            draft = draft_block(old, new, changes, part.tensor.dtype, context=allowed.context, gap=allowed.gap)
        return Scanned(part, base_digest, add(base_digest, growth), draft)

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part again, in memory of their own; an absent base is empty."""
        target = _read(self._target, part.tensor, part, np.empty(part.bytes, np.uint8))
        if part.base is None:
            return target[:0], target
        return _read(self._base, part.base, part, np.empty(part.bytes, np.uint8)), target

    def is_sent_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor that has a base is coded whole, whatever changed in it."""
        allowed = self._allowed
        return allowed.whole or (allowed.context and allowed.gap and tensor.bytes <= WHOLE_BYTES)


def digest_part(reader: Reader, part: Part) -> NDArray[np.uint32]:
    """The digest of a part of one checkpoint's tensor."""
    return kernels.digest(
        _read(reader, part.tensor, part, np.empty(part.bytes, np.uint8)), part.start * part.tensor.dtype.width
    )


def sample(reader: Reader, tensor: Tensor) -> bytes:
    """The bytes in the middle of a tensor."""
    buffer = np.empty(min(SAMPLE_BYTES, tensor.bytes), np.uint8)
    start = (tensor.bytes - len(buffer)) // 2
    reader.read_into(tensor, start - start % tensor.dtype.width, buffer.data)
    return buffer.tobytes()


def whole_draft(elements: int, *, changed: int | None = None) -> Draft:
    """The draft of a block of which all elements are sent."""
    return Draft(elements if changed is None else changed, elements, None, 0, None)


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


def tasks_of(parts: Iterator[Part]) -> Iterator[tuple[int, list[Part]]]:
    """Parts in order, in lists worth a task, each with its bytes."""
    task: list[Part] = []
    size = 0
    for part in parts:
        task.append(part)
        size += part.bytes
        if size >= TASK_BYTES or len(task) >= TASK_PARTS:
            yield size, task
            task, size = [], 0
    if task:
        yield size, task


def _read(reader: Reader, tensor: Tensor | None, part: Part, buffer: NDArray[np.uint8]) -> Elements:
    assert tensor is not None
    view = buffer[: part.bytes]
    reader.read_into(tensor, part.start * tensor.dtype.width, view.data)
    elements: Elements = view.view(uint_dtype(tensor.dtype.width))
    return elements
