"""Compares two checkpoints bit for bit and, where asked, writes the delta that turns one into the other.

Scanning runs in threads, block by block, in bounded memory; coding is encoder.py's, documents are manifest.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Reader, Tensor, unless_changed
from dcr_cli.checkpoint.digest import State, add, content_digest, digest_bytes, files_digest, no_digest
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.checkpoint.patterns import check_recorded_patterns
from dcr_cli.delta.choice import ALLOWED, Allowed
from dcr_cli.delta.device_scan import scanning
from dcr_cli.delta.encoder import PieceEncoder
from dcr_cli.delta.encoding import Encoding, LoadBlock
from dcr_cli.delta.feed import PieceFeed, write_file
from dcr_cli.delta.manifest import FileRow, Manifest, Piece, RemovedFile, Run, TensorRow
from dcr_cli.delta.matching import Matching, match
from dcr_cli.delta.output import DeltaOutput, Sink
from dcr_cli.delta.scan import (
    Part,
    Scanned,
    Scanner,
    block_count,
    block_part,
    digest_part,
    parts_of,
    sample,
    tasks_of,
)
from dcr_cli.device.finding import Found, check, choose
from dcr_cli.device.wish import Wish, wish_of
from dcr_cli.diff_result import Compared, DiffResult, DiffRow, summarize
from dcr_cli.errors import UsageError
from dcr_cli.layout.exchanged import check_places
from dcr_cli.layout.opening import layout_given, open_any
from dcr_cli.stages import Account, Stages
from dcr_cli.work import threads

__all__ = ["DiffResult", "DiffRow", "diff"]

Progress = Callable[[str, int, int], None]


def diff(
    base: str | Path,
    target: str | Path,
    output: str | Path | None = None,
    *,
    encoding: str = "auto",
    jobs: int | None = None,
    dry_run: bool = False,
    skip: Sequence[str] = (),
    layout: str | Path | None = None,
    base_layout: str | Path | None = None,
    functions: Sequence[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> DiffResult:
    """Compare checkpoint `target` with checkpoint `base`; with `output`, write the delta there.

    Either may be shards of ranks: with `layout` (of the target) and `base_layout`, files that say where their tensors
    belong, or as PyTorch's distributed checkpoint writes them. The delta is the one between the checkpoints that they
    are parts of; the files of the target are those of the base, but for sidecars of its own. `functions`, each
    `module:function`, are those that rules of the layouts may call.

    `device` says where long tensors are compared: `cpu`, `cuda`, `cuda:N`, or with `auto` on CUDA where that is there
    and the checkpoints are large enough for it to be worth its start. The delta's bytes do not depend on it.

    `output` must not exist, or be an empty folder, or hold a delta that was never finished and that nobody is writing;
    it is complete when its commit.json is there. Without it, and in a dry run, the same work is done and nothing is
    written. Memory does not depend on the size of the checkpoints. Raises NotFoundError, DamagedError, ConflictError
    (a source changed while it was read, the output is taken), LocalError, UnsupportedError (a layout needs what is not
    known here, or a function that it may not call; a device cannot be had), UsageError.
    """
    if encoding not in ALLOWED:
        raise UsageError("encoding", f"one of {', '.join(ALLOWED)} expected, found {encoding!r}")
    wish, workers = wish_of(device), threads(jobs)
    check_recorded_patterns(skip)
    check(wish)
    old = open_any(base, layout=layout_given(base_layout, functions), skip=skip, what="base")
    new = open_any(target, layout=layout_given(layout, functions), like=old, skip=skip, what="target")
    check_places(new, old)
    manner = Manner(ALLOWED[encoding], workers, wish)
    with DeltaOutput(output, outside=(old.root, new.root), dry_run=dry_run) as sink:
        return diff_into(sink, old, new, manner, progress=progress)


@dataclass(frozen=True, slots=True)
class Manner:
    """How two checkpoints are compared: for which encodings, in how many threads, on which device."""

    allowed: Allowed
    jobs: int
    wish: Wish


def diff_into(
    sink: Sink, base: Checkpoint, target: Checkpoint, manner: Manner, *, progress: Progress | None = None
) -> DiffResult:
    """Compare two opened checkpoints and write the delta into `sink`, as `diff` does."""
    found = choose(manner.wish, work_bytes=sum(tensor.bytes for tensor in target.tensors), jobs=manner.jobs)
    with ExitStack() as stack:
        sides = _Sides(base, target, stack.enter_context(base.reader()), stack.enter_context(target.reader()))
        pool = stack.enter_context(ThreadPoolExecutor(manner.jobs, "dcr-diff"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        stack.enter_context(unless_changed(sides.base_reader, sides.target_reader))
        run = _Run(sides, sink, manner, pool=pool, found=found)
        return run.result(progress or (lambda stage, done, total: None))


@dataclass(frozen=True, slots=True)
class _Sides:
    """The two checkpoints, open."""

    base: Checkpoint
    target: Checkpoint
    base_reader: Reader
    target_reader: Reader


@dataclass(slots=True)
class _Row:
    """What is known of one tensor of the target so far."""

    tensor: Tensor
    source: Tensor | None
    twin: int | None
    base_digest: NDArray[np.uint32]
    target_digest: NDArray[np.uint32]
    changed: int = 0
    blocks_left: int = 0
    feed: PieceFeed | None = None
    encoding: Encoding | None = None
    runs: tuple[Run, ...] = ()


class _Run:
    """One diff from its first read to its last write."""

    def __init__(self, sides: _Sides, sink: Sink, manner: Manner, *, pool: ThreadPoolExecutor, found: Found) -> None:
        self.base, self.target = sides.base, sides.target
        self.base_reader, self.target_reader = sides.base_reader, sides.target_reader
        self.pool, self.sink, self.found, self.stages = pool, sink, found, Stages()
        jobs, allowed = manner.jobs, manner.allowed
        scanner = Scanner(self.base_reader, self.target_reader, allowed, self.stages)
        self.scanner, self.pace = scanning(found.lanes, scanner, allowed, jobs=jobs, stages=self.stages)
        self.encoder = PieceEncoder(pool, sink.writer, allowed, tasks=2 * jobs, stages=self.stages)
        self.base_digests: dict[str, bytes] = {}
        self.rows: list[_Row] = []

    def result(self, progress: Progress) -> DiffResult:
        matching = match(self.base, self.target, self._sample, self._digest)
        self._make_rows(matching)
        gone = self._base_only()
        self._scan(gone, progress)
        file_rows, base_files, target_files = self._files()
        self.base_reader.check_unchanged()
        self.target_reader.check_unchanged()
        manifest = self._manifest(file_rows, base_files)
        base_state, target_state = self._states(base_files, target_files)
        tensor_digests = [digest_bytes(row.target_digest) for row in self.rows]
        self.sink.finish(manifest, tensor_digests, base_state, target_state)
        twins = frozenset(row.tensor.name for row in self.rows if row.twin is not None)
        changed = [row.changed for row in self.rows]
        found = Compared(self.base, self.target, base_state, target_state, base_files, manifest, changed, twins)
        account = Account(self.found.name, self.found.why, self.stages.all())
        return summarize(found, self.sink, account)

    def _reader(self, checkpoint: Checkpoint) -> Reader:
        return self.base_reader if checkpoint is self.base else self.target_reader

    def _sample(self, checkpoint: Checkpoint, tensor: Tensor) -> bytes:
        return sample(self._reader(checkpoint), tensor)

    def _digest(self, checkpoint: Checkpoint, tensor: Tensor) -> bytes:
        """The digest of all of a tensor, in the pool's threads."""
        if checkpoint is self.base and tensor.name in self.base_digests:
            return self.base_digests[tensor.name]
        total = no_digest()
        for found in self.pool.map(partial(digest_part, self._reader(checkpoint)), parts_of(-1, tensor, None)):
            total = add(total, found)
        if checkpoint is self.base:
            self.base_digests[tensor.name] = digest_bytes(total)
        return digest_bytes(total)

    def _make_rows(self, matching: Matching) -> None:
        index = {tensor.name: i for i, tensor in enumerate(self.target.tensors)}
        for tensor in self.target.tensors:
            source = matching.sources[tensor.name]
            twin = matching.twins.get(tensor.name)
            self.rows.append(
                _Row(
                    tensor,
                    self.base.by_name[source] if source is not None else None,
                    index[twin] if twin is not None else None,
                    no_digest(),
                    no_digest(),
                )
            )

    def _base_only(self) -> list[Tensor]:
        """Base tensors that no row reads, which the base's digest needs all the same."""
        read = {row.source.name for row in self.rows if row.source is not None and row.twin is None}
        return [t for t in self.base.tensors if t.name not in read and t.name not in self.base_digests]

    def _all_parts(self, gone: Sequence[Tensor]) -> Iterator[Part]:
        for index, row in enumerate(self.rows):
            if row.twin is None:
                yield from parts_of(index, row.source, row.tensor)
        for tensor in gone:
            yield from parts_of(-1, tensor, None)

    def _scan(self, gone: Sequence[Tensor], progress: Progress) -> None:
        """Scan all parts in tasks, a bounded number ahead, and take their results in order."""
        for row in self.rows:
            row.blocks_left = block_count(row.tensor) if row.twin is None else 0
        total = sum(row.tensor.bytes for row in self.rows) + sum(tensor.bytes for tensor in gone)
        done = 0
        gone_digests = {tensor.name: no_digest() for tensor in gone}
        ahead: deque[tuple[int, Future[list[Scanned]]]] = deque()
        for size, parts in tasks_of(self._all_parts(gone), self.pace.task_bytes):
            ahead.append((size, self.pool.submit(self.scanner.scan_all, parts)))
            while len(ahead) > self.pace.tasks:
                done += self._take(ahead.popleft(), gone_digests)
                progress("diff", done, total)
        while ahead:
            done += self._take(ahead.popleft(), gone_digests)
            progress("diff", done, total)
        self.base_digests.update((name, digest_bytes(found)) for name, found in gone_digests.items())
        for row in self.rows:
            if row.source is not None and row.twin is None:
                self.base_digests[row.source.name] = digest_bytes(row.base_digest)
        for row in self.rows:
            if row.twin is not None:
                twin = self.rows[row.twin]
                row.target_digest, row.changed = twin.target_digest, twin.changed

    def _take(self, task: tuple[int, Future[list[Scanned]]], gone_digests: dict[str, NDArray[np.uint32]]) -> int:
        for scanned in task[1].result():
            part = scanned.part
            if part.row < 0:
                assert part.base is not None
                gone_digests[part.base.name] = add(gone_digests[part.base.name], scanned.base_digest)
            else:
                self._take_block(self.rows[part.row], scanned)
        return task[0]

    def _take_block(self, row: _Row, scanned: Scanned) -> None:
        """Hand one block of a row to the encoder."""
        if scanned.part.start:
            row.base_digest = add(row.base_digest, scanned.base_digest)
            row.target_digest = add(row.target_digest, scanned.target_digest)
        else:
            row.base_digest, row.target_digest = scanned.base_digest, scanned.target_digest
        row.blocks_left -= 1
        if row.feed is None:
            whole = row.source is None or self.scanner.is_sent_whole(row.tensor)
            row.feed = PieceFeed(self.encoder, row.tensor.dtype, partial(self._unchanged, row), whole=whole)
        sides = scanned.sides
        load = partial(self.scanner.load, scanned.part) if sides is None else lambda: sides
        row.feed.add(scanned.draft, load)
        if row.feed.is_begun and self.encoder.has_chosen:
            self.scanner.chosen_row = scanned.part.row
        if not row.blocks_left:
            row.feed.end(partial(_remember, row))
            row.changed, row.feed = row.feed.changed, None

    def _unchanged(self, row: _Row, block: int) -> tuple[int, LoadBlock]:
        part = block_part(-1, row.source, row.tensor, block)
        return part.elements, partial(self.scanner.load, part)

    def _files(self) -> tuple[list[FileRow], list[FileDigest], list[FileDigest]]:
        """Rows of all files of the target; those that the base has not are written after all pieces."""
        base_files = self.base.files_digest(self.base_reader)
        target_files = self.target.files_digest(self.target_reader)
        known = {(facts.path, facts.kind): facts.blake3 for facts in base_files}
        self.encoder.close()
        headers = {shard.path: shard.header.raw for shard in self.target.shards}
        rows = []
        for facts in target_files:
            runs: tuple[Run, ...] = ()
            if known.get((facts.path, facts.kind)) != facts.blake3:
                data = headers.get(facts.path) or self.target_reader.read_file(facts.path)
                runs = write_file(self.sink.writer, data)
            rows.append(FileRow(facts.path, facts.kind, facts.size, facts.blake3, runs))
        return rows, base_files, target_files

    def _manifest(self, files: list[FileRow], base_files: list[FileDigest]) -> Manifest:
        tensors = []
        for row in self.rows:
            origin = row if row.twin is None else self.rows[row.twin]
            pieces: tuple[Piece, ...] = ()
            digest = None
            if origin.encoding is not None:
                elements = row.tensor.elements
                changed = elements if origin.encoding is Encoding.WHOLE else origin.changed
                pieces = (Piece(int(origin.encoding), changed, None, origin.runs),)
                digest = digest_bytes(row.target_digest)
            tensor, source = row.tensor, row.source.name if row.source is not None else None
            is_reshaped = row.source is not None and source == tensor.name and row.source.shape != tensor.shape
            tensors.append(TensorRow(tensor.name, tensor.dtype.name, tensor.shape, source, pieces, digest, is_reshaped))
        removed = tuple(t.name for t in self.base.tensors if t.name not in self.target.by_name)
        kept = {row.path for row in files}
        removed_files = (
            RemovedFile(facts.path, facts.blake3)
            for facts in base_files
            if facts.kind == SIDECAR and facts.path not in kept
        )
        payloads = self.sink.writer.finish()
        return Manifest(tuple(tensors), removed, tuple(files), tuple(removed_files), payloads, self.target.skipped)

    def _states(self, base_files: list[FileDigest], target_files: list[FileDigest]) -> tuple[State, State]:
        base = content_digest((t.name, t.dtype.name, t.shape, self.base_digests[t.name]) for t in self.base.tensors)
        target = content_digest(
            (row.tensor.name, row.tensor.dtype.name, row.tensor.shape, digest_bytes(row.target_digest))
            for row in self.rows
        )
        files = [
            files_digest((facts.path, facts.kind, facts.blake3) for facts in each)
            for each in (base_files, target_files)
        ]
        return State(base, files[0]), State(target, files[1])


def _remember(row: _Row, encoding: Encoding, runs: tuple[Run, ...]) -> None:
    row.encoding, row.runs = encoding, runs
