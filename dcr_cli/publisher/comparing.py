"""Compares a tensor that was given with the base's, block by block, in threads and in bounded memory, or on a device.

What is coded later of a block has its own copy of what that needs, because what was given may change by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import TensorDigest, add, no_digest
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import (
    BLOCK_BYTES,
    KEPT_SHARE,
    Changes,
    Compared,
    Draft,
    Elements,
    LoadBlock,
    compare_block,
    compared_of,
    find_changes,
    uint_dtype,
)
from dcr_cli.delta.scan import (
    Part,
    TensorReader,
    block_part,
    digest_part,
    is_sent_whole,
    parts_of,
    read_part,
    rooms_of,
    tasks_of,
)
from dcr_cli.publisher.bases import Base, Change
from dcr_cli.publisher.devices import Taken
from dcr_cli.publisher.given import Bytes
from dcr_cli.stages import Stages

if TYPE_CHECKING:
    from dcr_cli.device.comparing import Device, Side


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """What a block adds to its tensor's digest, what that grows by, and what is needed to code it if it changed."""

    base_digest: TensorDigest
    growth: TensorDigest
    draft: Draft | None
    load: LoadBlock | None
    change: Change | None


class Comparer:
    """Compares tensors with those of a base, which stays."""

    def __init__(self, base: Base, allowed: Allowed, pool: ThreadPoolExecutor, jobs: int, stages: Stages) -> None:
        self._base = base
        self._allowed = allowed
        self._pool = pool
        self._jobs = jobs
        self._stages = stages

    def compare(self, tensor: Tensor, taken: Taken) -> Iterator[ComparedBlock]:
        """All blocks of a tensor in order, a bounded number ahead; once it is left, what was given is read no more."""
        tasks: Iterator[Callable[[], list[ComparedBlock]]]
        parts = parts_of(0, tensor, None)
        if taken.device is None:
            most, tasks = 2 * self._jobs, (partial(self._compare, part, taken.data) for part in parts)
        else:
            lists = tasks_of(parts, taken.device.batch_bytes - BLOCK_BYTES)
            most, tasks = 2 * taken.device.slots, (partial(self._compare_there, run, taken) for _, run in lists)
        ahead: deque[Future[list[ComparedBlock]]] = deque()
        try:
            for task in tasks:
                ahead.append(self._pool.submit(task))
                if len(ahead) > most:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for future in ahead:
                if not future.cancel():
                    future.exception()

    def load_unchanged(self, tensor: Tensor, block: int) -> tuple[int, LoadBlock]:
        """The elements of a block that did not change, and how both its sides are read."""
        part = block_part(0, tensor, None, block)
        return part.elements, partial(self._load, Change(part, np.empty(0, np.uint32), np.empty(0, np.uint8)))

    def digest_given(self, tensor: Tensor, taken: Taken) -> TensorDigest:
        """The digest of a tensor that was given."""
        if taken.device is not None and taken.is_there:
            return taken.device.digest(taken.data, tensor.dtype.width)
        return self.digest(GivenReader(taken.data), tensor)

    def digest(self, reader: TensorReader, tensor: Tensor) -> TensorDigest:
        """The digest of a whole tensor of the base, or of another reader."""
        total = no_digest()
        for found in self._pool.map(partial(digest_part, reader), parts_of(0, tensor, None)):
            total = add(total, found)
        return total

    def _compare(self, part: Part, data: Bytes) -> list[ComparedBlock]:
        """One block, on the CPU."""
        dtype = part.tensor.dtype
        begin = part.start * dtype.width
        with self._stages.timed("read and compare", part.bytes):
            old = read_part(self._base, part)
            new = np.require(data[begin : begin + part.bytes].view(uint_dtype(dtype.width)), requirements="A")
            whole = is_sent_whole(part.tensor, self._allowed)
            context, gap = self._allowed.context and not whole, self._allowed.gap and not whole
            found = compare_block(old, new, begin, dtype, context=context, gap=gap)
        if found.draft is None:
            return [self._block(found, None)]
        few = find_changes(old, new) if found.draft.changes is None and _are_few(found.draft) else found.draft.changes
        return [self._block(found, _change(part, few, new.copy))]

    def _compare_there(self, run: Sequence[Part], taken: Taken) -> list[ComparedBlock]:
        """Blocks that follow each other, on the device."""
        from dcr_cli.device.comparing import Batch
        from dcr_kernels.gpu import Run

        assert taken.device is not None
        dtype = run[0].tensor.dtype
        begin = run[0].start * dtype.width
        exponent = (dtype.exponent_bits, dtype.exponent_shift) if self._allowed.context else None
        batch = Batch(dtype.width, (Run(sum(part.elements for part in run), begin),), exponent)
        sides = self._base_side(run, taken.device), taken.side(begin, begin + batch.bytes)
        blocks = []
        for part, found in zip(run, taken.device.compare(batch, *sides), strict=True):
            compared = compared_of(found, part.elements, gap=self._allowed.gap)
            change = None
            if compared.draft is not None:
                few = Changes(found.positions, found.old, found.new) if _are_few(compared.draft) else None
                change = _change(part, few, partial(_fetch, taken, part))
            blocks.append(self._block(compared, change))
        return blocks

    def _base_side(self, run: Sequence[Part], device: Device) -> Side:
        """The base's side of a run: where it lies, if that is the device, or how it is read."""
        begin, size = run[0].start * run[0].tensor.dtype.width, sum(part.bytes for part in run)
        there = self._base.bytes_on(device.lanes.name, run[0].tensor)
        return there[begin : begin + size] if there is not None else partial(_read_run, self._base, run)

    def _block(self, found: Compared, change: Change | None) -> ComparedBlock:
        """What is needed of a block, with the copy of its changes if it has any."""
        draft = found.draft
        if draft is None or change is None:
            return ComparedBlock(found.digest, found.growth, None, None, None)
        if draft.changes is None:
            held = change.values.nbytes + (change.positions.nbytes if change.positions is not None else 0)
            draft = replace(draft, copied_bytes=held)
        return ComparedBlock(found.digest, found.growth, draft, partial(self._load, change), change)

    def _load(self, change: Change) -> tuple[Elements, Elements]:
        """Both sides of a block again."""
        old = read_part(self._base, change.part)
        if change.positions is None:
            return old, change.values
        new = old.copy()
        new[change.positions] = change.values
        return old, new


class GivenReader:
    """A tensor that was given, as one that can be read."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[byte_offset : byte_offset + len(buffer)].data


def _are_few(draft: Draft) -> bool:
    """Whether the changes of a block are kept, and not all of it."""
    return draft.changed * KEPT_SHARE <= draft.elements


def _change(part: Part, few: Changes | None, fetch: Callable[[], Elements]) -> Change:
    """What is kept of a block that changed: its changes where they are few, else all of it."""
    return Change(part, None, fetch()) if few is None else Change(part, few.positions, few.new)


def _fetch(taken: Taken, part: Part) -> Elements:
    width = part.tensor.dtype.width
    found: Elements = taken.fetch(part.start * width, part.start * width + part.bytes).view(uint_dtype(width))
    return found


def _read_run(base: TensorReader, run: Sequence[Part], buffer: Bytes) -> None:
    for part, room in rooms_of(run, buffer):
        base.read_into(part.tensor, part.start * part.tensor.dtype.width, room.data)
