"""Makes new shards beside the old ones, or journals of their changes, and puts journals into place.

Everything it makes is synced before it says so. Which shards those are, and when their names change, is told by
change.py and fresh.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from dcr_cli.durable import File, Folder, open_folder
from dcr_cli.errors import DcrError
from dcr_cli.layout.coverage import tied_tensors
from dcr_cli.layout.gather import Sources
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.pool import run_all
from dcr_cli.receiver.job import Job, Outcome
from dcr_cli.receiver.laid.plan import laid_places
from dcr_cli.receiver.laid.projection import ProjectingSink
from dcr_cli.receiver.passes.journal import Chunk, ChunkPlacer, Entry, JournalWriter
from dcr_cli.receiver.passes.passes import STREAMS
from dcr_cli.receiver.passes.tasks import ShardWork, interleave
from dcr_cli.receiver.plan import Action, NewShard, Place


class OpenFile:
    """A file that is opened when it is first held, and synced and closed when nobody holds it any more."""

    def __init__(self, open_file: Callable[[], File]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._holders = 0
        self._file: File | None = None

    @property
    def file(self) -> File:
        assert self._file is not None
        return self._file

    def hold(self) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._open_file()
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            file, self._file = self._file, None
        assert file is not None
        with file:
            file.sync()

    def abandon(self) -> None:
        """Close it as it is; for use when something went wrong elsewhere."""
        if self._file is not None:
            with suppress(DcrError):
                self._file.close()
            self._file = None


class ShardSink:
    """Where the new bytes of shard number `number` go: into its staged file, if it has one, and into the journal."""

    def __init__(self, number: int, staged: OpenFile | None, journal: JournalWriter) -> None:
        self._number = number
        self._staged = staged
        self._journal = journal
        self._lock = threading.Lock()
        self._holders = 0

    def write(self, offset: int, data: memoryview) -> None:
        assert self._staged is not None
        self._staged.file.write_at(offset, data)

    def journal(self, entry: Entry, *, is_alone: bool) -> None:
        self._journal.add(self._number, entry, is_alone=is_alone)

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
        if self._staged is not None:
            self._staged.hold()

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            is_last = not self._holders
        if is_last:
            self._journal.flush(self._number)
        if self._staged is not None:
            self._staged.release()


class StagePlace(Protocol):
    """Where staged files lie."""

    def create(self, number: int) -> File:
        """Create the file of shard number `number`."""

    def open(self, number: int) -> File:
        """Open the file of shard number `number` once more."""

    def create_journal(self) -> File:
        """Create the journal."""


class Staged(NamedTuple):
    """What staging found out, and the journal of the shards that are to be patched where they lie."""

    outcome: Outcome
    chunks: tuple[Chunk, ...]


def stage(
    job: Job,
    shards: Sequence[tuple[int, NewShard]],
    place: StagePlace,
    others: Sequence[NewShard] = (),
    *,
    whole_base: bool,
    name: str,
) -> Staged:
    """Make the new files of rewritten `shards`, given with their numbers, and the journal of the patched ones; sync
    both. Those of a receiver with a layout have to be all that change.

    With `whole_base`, `others` and all other base tensors are read too.
    The outcome is not judged here. After an error, what was made is worth nothing.
    """
    if job.base.laid is not None:
        return _stage_laid(job, job.base.laid, shards, place, whole_base=whole_base, name=name)
    journal = JournalWriter(place.create_journal)
    open_files: list[OpenFile] = []
    works = []
    for number, shard in shards:
        staged = None
        if shard.action is not Action.PATCH:
            staged = OpenFile(_with_header(place.create, number, shard))
            open_files.append(staged)
        works.append(ShardWork(shard.places, ShardSink(number, staged, journal), staged is None))
    works += [ShardWork(shard.places, None, is_patch=False) for shard in others]
    try:
        outcome = job.run(works, whole_base=whole_base, stage=name)
        patched = {number for number, shard in shards if shard.action is Action.PATCH}
        if journal.file is not None:
            # Pieces with boxes change a staged file after all of it has been written.
            now = [chunk for chunk in journal.chunks if chunk.file not in patched]
            place_chunks(journal.file, now, place.open, job.target.jobs)
            journal.file.sync()
    finally:
        for file in open_files:
            file.abandon()
        if journal.file is not None:
            journal.file.close()
    return Staged(outcome, tuple(chunk for chunk in journal.chunks if chunk.file in patched))


def _stage_laid(
    job: Job,
    laid: LaidCheckpoint,
    shards: Sequence[tuple[int, NewShard]],
    place: StagePlace,
    *,
    whole_base: bool,
    name: str,
) -> Staged:
    """The same for a receiver that stores its tensors through a layout: files that are rewritten begin as copies, and
    all changes go through a journal."""
    journal = JournalWriter(place.create_journal)
    rewritten = [(number, shard) for number, shard in shards if shard.action is not Action.PATCH]
    patched = {number for number, shard in shards if shard.action is Action.PATCH}
    with open_folder(job.root) as root:
        run_all(rewritten, lambda: _copy_to(root, place.create), job.target.jobs)
    numbers = {shard.path: number for number, shard in shards if shard.action is not Action.KEEP}
    tied = tied_tensors(laid.layout)
    sources = {
        tensor: source for tensor, source in laid.sources.items() if isinstance(source, Sources) and tensor not in tied
    }
    sink = ProjectingSink(laid.by_name, sources, numbers, journal)
    try:
        outcome = job.run(_laid_work(job, laid, sink), whole_base=whole_base, stage=name)
        if journal.file is not None:
            now = [chunk for chunk in journal.chunks if chunk.file not in patched]
            place_chunks(journal.file, now, place.open, job.target.jobs)
            journal.file.sync()
    finally:
        if journal.file is not None:
            journal.file.close()
    return Staged(outcome, tuple(chunk for chunk in journal.chunks if chunk.file in patched))


def _laid_work(job: Job, laid: LaidCheckpoint, sink: ProjectingSink) -> list[ShardWork]:
    """Of tensors that go on, what changes; of those that become others, all."""
    own: list[Place] = []
    others: list[Place] = []
    for place in laid_places(laid, job.target.rows):
        row = job.target.rows[place.row]
        (own if row.source == row.name else others).append(place)
    return [ShardWork(own, sink, is_patch=True), ShardWork(others, sink, is_patch=False)]


def _copy_to(root: Folder, create: Callable[[int], File]) -> Callable[[tuple[int, NewShard]], None]:
    def copy(numbered: tuple[int, NewShard]) -> None:
        number, shard = numbered
        with root.open_linked(shard.path) as source, create(number) as file:
            if not file.clone_from(source):
                file.copy_from(source)
            file.sync()

    return copy


def _with_header(create_shard: Callable[[int], File], number: int, shard: NewShard) -> Callable[[], File]:
    def create() -> File:
        file = create_shard(number)
        try:
            file.write_at(0, shard.header)
            file.resize(shard.size)
        except BaseException:
            file.close()
            raise
        return file

    return create


class _Placing(NamedTuple):
    chunk: Chunk
    target: OpenFile


def place_chunks(journal: File, chunks: Iterable[Chunk], open_target: Callable[[int], File], jobs: int) -> int:
    """Write journalled bits into the files they are for, and sync these: how many bytes were written.

    `open_target` opens the file of a number.
    """
    written: list[int] = []
    by_file: dict[int, list[Chunk]] = {}
    alone: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        (alone if chunk.is_alone else by_file).setdefault(chunk.file, []).append(chunk)
    for group, threads in ((by_file, jobs), (alone, 1)):
        targets = {number: OpenFile(_opener(open_target, number)) for number in group}
        streams = [_placings(targets[number], group[number]) for number in group]
        try:
            run_all(
                interleave(streams, min(threads, STREAMS)), lambda: _place_with(ChunkPlacer(journal), written), threads
            )
        finally:
            for target in targets.values():
                target.abandon()
    return sum(written)


def _opener(open_target: Callable[[int], File], number: int) -> Callable[[], File]:
    return lambda: open_target(number)


def _placings(target: OpenFile, chunks: Sequence[Chunk]) -> Iterator[_Placing]:
    target.hold()
    for chunk in chunks:
        target.hold()
        yield _Placing(chunk, target)
    target.release()


def _place_with(placer: ChunkPlacer, written: list[int]) -> Callable[[_Placing], None]:
    def place(placing: _Placing) -> None:
        written.append(placer.place(placing.chunk, placing.target.file))
        placing.target.release()

    return place
