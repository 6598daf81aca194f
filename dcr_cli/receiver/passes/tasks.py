"""Cuts the work on tensors into tasks for threads: what is read, decoded and written at once (FORMAT 4, 6).

Tiny tensors that lie back to back are read and written together, giant ones are shared out block by block. The work
itself is passes.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.delta.strided import box_elements
from dcr_cli.layout.gather import ReadsPaths
from dcr_cli.receiver.passes.journal import Entry
from dcr_cli.receiver.passes.runs import Coded, Fail, Runs, piece_blocks
from dcr_cli.receiver.plan import Place

# A stretch is read and written at once; a task is some stretches, worth the taking.
STRETCH_BYTES = BLOCK_BYTES
TASK_BYTES = 8 * BLOCK_BYTES
TASK_PARTS = 512

Item = TypeVar("Item")
# Path and byte offset of a file of the base.
Spot = tuple[str, int]


class Sink(Protocol):
    """Where the new bytes of one shard go; its methods are called from several threads."""

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes of the new file."""

    def journal(self, entry: Entry, *, is_alone: bool) -> None:
        """Take new bits of the new file; `is_alone`: others may have bits for the same span."""

    def hold(self) -> None:
        """There is more to come."""

    def release(self) -> None:
        """As often as `hold` was called; after the last time nothing more comes."""


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One file to go over. With `is_patch`, only changed bits are handed on, to the journal; without a sink, none
    are."""

    places: Sequence[Place]
    sink: Sink | None
    is_patch: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What a pass reads: rows of the target, tensors and shards of the base, its files, and the payloads."""

    rows: Sequence[TensorRow]
    shards: Sequence[str]
    tensor: Callable[[str], Tensor]
    files: ReadsPaths
    payloads: ChainPayloads


class Part(NamedTuple):
    """Bytes `at` to `at + size` of a tensor: of row `row`, or, where that is -1, of base tensor `base` alone.

    `coded` are the blocks that change it, each for what the one before leaves.
    """

    row: int
    base: int
    at: int
    size: int
    coded: tuple[Coded, ...]


class Stretch(NamedTuple):
    """Parts that lie back to back in a file of the base, unless they come from nowhere, and in the new file."""

    source: Spot | None
    begin: int
    size: int
    parts: list[Part]


class BoxBlock(NamedTuple):
    """A block of a piece with a box: elements `start` to `start + elements` of its enumeration."""

    row: int
    place: Place
    coded: Coded
    start: int
    elements: int


class Task(NamedTuple):
    """What one thread does at a time, all of it for one file. The sink is held for it."""

    sink: Sink | None
    is_patch: bool
    items: list[Stretch | BoxBlock]


def shard_tasks(source: Source, work: ShardWork, fail: Fail) -> Iterator[Task]:
    """The tasks of one file. `fail` is told of runs that cannot be read: row, payload, what is wrong."""
    if work.sink is not None:
        work.sink.hold()
    yield from _tasks(work.sink, work.is_patch, _items(source, work.places, fail))
    if work.sink is not None:
        work.sink.release()


def digest_tasks(source: Source, tensors: Iterable[tuple[int, Tensor]]) -> Iterator[Task]:
    """Tasks that only digest base tensors, given with their numbers."""
    return _tasks(None, False, _base_stretches(source, tensors))


def interleave(streams: Iterable[Iterator[Item]], width: int) -> Iterator[Item]:
    """Take from `width` streams in turn; where one ends, the next one takes its place."""
    waiting = iter(streams)
    active = list(islice(waiting, width))
    turn = 0
    while active:
        turn %= len(active)
        try:
            item = next(active[turn])
        except StopIteration:
            active[turn : turn + 1] = islice(waiting, 1)
        else:
            yield item
            turn += 1


def _tasks(sink: Sink | None, is_patch: bool, items: Iterator[Stretch | BoxBlock]) -> Iterator[Task]:
    task: list[Stretch | BoxBlock] = []
    size = parts = 0
    for item in items:
        task.append(item)
        size += item.size if isinstance(item, Stretch) else BLOCK_BYTES
        parts += len(item.parts) if isinstance(item, Stretch) else 1
        if size >= TASK_BYTES or parts >= TASK_PARTS:
            yield _held(Task(sink, is_patch, task))
            task, size, parts = [], 0, 0
    if task:
        yield _held(Task(sink, is_patch, task))


def _held(task: Task) -> Task:
    if task.sink is not None:
        task.sink.hold()
    return task


def _base_stretches(source: Source, tensors: Iterable[tuple[int, Tensor]]) -> Iterator[Stretch]:
    joiner = _Joiner()
    for number, tensor in tensors:
        for at in range(0, tensor.bytes, BLOCK_BYTES):
            part = Part(-1, number, at, min(BLOCK_BYTES, tensor.bytes - at), ())
            stretch = joiner.add(part, (source.shards[tensor.shard], tensor.begin + at), tensor.begin + at)
            if stretch is not None:
                yield stretch
    yield from joiner.end()


def _items(source: Source, places: Sequence[Place], fail: Fail) -> Iterator[Stretch | BoxBlock]:
    joiner = _Joiner()
    runs = Runs(source.payloads)
    for place in places:
        row = source.rows[place.row]
        if not place.size:
            continue
        spot = _spot(source, row)
        steps: list[Iterator[Coded | None]] = []
        if row.pieces and row.pieces[0].box is None:
            steps = [piece_blocks(runs, row, place.row, piece, fail) for piece in row.pieces]
        elif row.pieces:
            yield from _box_blocks(runs, source, place, fail)
        if not steps and spot is None:
            continue
        for at in range(0, place.size, BLOCK_BYTES):
            blocks = tuple(block for step in steps if (block := next(step, None)) is not None)
            part = Part(place.row, -1, at, min(BLOCK_BYTES, place.size - at), blocks)
            stretch = joiner.add(part, (spot[0], spot[1] + at) if spot else None, place.begin + at)
            if stretch is not None:
                yield stretch
    yield from joiner.end()


def _spot(source: Source, row: TensorRow) -> Spot | None:
    if row.source is None:
        return None
    tensor = source.tensor(row.source)
    return source.shards[tensor.shard], tensor.begin


class _Joiner:
    """Joins parts that lie back to back into stretches."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._source: Spot | None = None
        self._begin = 0
        self._bytes = 0

    def add(self, part: Part, source: Spot | None, begin: int) -> Stretch | None:
        """Take a part; what lay before it, if it does not go on with that."""
        before = None
        if self._parts and not self._continues(source, begin, part.size):
            before = Stretch(self._source, self._begin, self._bytes, self._parts)
            self._parts, self._bytes = [], 0
        if not self._parts:
            self._source, self._begin = source, begin
        self._parts.append(part)
        self._bytes += part.size
        return before

    def end(self) -> Iterator[Stretch]:
        if self._parts:
            yield Stretch(self._source, self._begin, self._bytes, self._parts)
            self._parts, self._bytes = [], 0

    def _continues(self, source: Spot | None, begin: int, size: int) -> bool:
        if self._bytes + size > STRETCH_BYTES or len(self._parts) >= TASK_PARTS or begin != self._begin + self._bytes:
            return False
        if source is None or self._source is None:
            return source is self._source
        return source == (self._source[0], self._source[1] + self._bytes)


def _box_blocks(runs: Runs, source: Source, place: Place, fail: Fail) -> Iterator[BoxBlock]:
    row = source.rows[place.row]
    size = BLOCK_BYTES // DTYPES[row.dtype].width
    for piece in row.pieces:
        assert piece.box is not None
        elements = box_elements(piece.box)
        for number, coded in enumerate(piece_blocks(runs, row, place.row, piece, fail)):
            if coded is not None:
                yield BoxBlock(place.row, place, coded, number * size, min(size, elements - number * size))
