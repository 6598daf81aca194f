"""Makes and sends the part of one rank: compares its share, puts its payloads while they come, then what binds them.

Which share is whose is shares.py's matter; what the parts make together, merging.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Reader, unless_changed
from dcr_cli.checkpoint.digest import TensorDigest, add, digest_bytes, no_digest, object_digest
from dcr_cli.content import Workers
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.device_scan import scanning
from dcr_cli.delta.encoder import PieceEncoder
from dcr_cli.delta.encoding import Encoding, LoadBlock, block_elements
from dcr_cli.delta.feed import PieceFeed, write_file
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.delta.scan import Part, Scanned, Scanner
from dcr_cli.delta.scanning import Pace, Scans, ScansRuns
from dcr_cli.device.finding import choose
from dcr_cli.device.wish import Wish
from dcr_cli.errors import ConflictError
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.publisher.committing import Author
from dcr_cli.publisher.part_reading import ReadPart
from dcr_cli.publisher.piece_scanning import PieceScanner
from dcr_cli.publisher.shares import Slice
from dcr_cli.publisher.uploads import Uploads
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.keys import VERSIONS
from dcr_cli.remote.part import (
    BASE,
    BOTH,
    PART_KIND,
    TARGET,
    Attempt,
    PartCommit,
    PartTable,
    SliceRow,
    encode_part,
    encode_table,
    part_commit_key,
    part_table_key,
)
from dcr_cli.stages import Account, Stages
from dcr_cli.store.store import Store

# A rank keeps no copy of what it sends: so many payloads at a time are in memory.
_UPLOADS = 2


@dataclass(slots=True)
class _Row:
    """What is known of a slice so far."""

    number: int
    slice: Slice
    base_digest: TensorDigest = field(default_factory=no_digest)
    target_digest: TensorDigest = field(default_factory=no_digest)
    feed: PieceFeed | None = None
    changed: int = 0
    encoding: Encoding | None = None
    runs: tuple[Run, ...] = ()


class PartMaking:
    """The part of one rank on its way."""

    def __init__(self, store: Store, attempt: Attempt, rank: int, author: Author, effort: Effort, wish: Wish) -> None:
        self._store = store
        self._attempt = attempt
        self._rank = rank
        self._author = author
        self._effort = effort
        self._wish = wish
        self._kept: ReadPart | None = None
        self.sent_bytes = 0
        self.account: Account | None = None

    def make(
        self,
        base: Checkpoint,
        target: Checkpoint,
        share: tuple[Slice, ...],
        allowed: Allowed,
        *,
        kept: ReadPart | None = None,
    ) -> None:
        """Compare the share and put its payloads; rank 0 also writes the files that changed.

        `kept` is the part that a stopped run has published, if one has: then the same has to come of it again, as its
        document cannot be another. ConflictError if it does not, or if one of the checkpoints changes meanwhile.
        `publish` makes it count.
        """
        self._kept = kept
        with ExitStack() as stack:
            readers = stack.enter_context(base.reader()), stack.enter_context(target.reader())
            workers = stack.enter_context(Workers(self._effort.jobs, "part", self._effort.progress))
            uploads = stack.enter_context(Uploads(_UPLOADS))
            place = self._attempt.place
            identity = {"history": self._attempt.history, "version": str(place.version), "id": place.id}
            emit = partial(self._emit, uploads)
            writer = PayloadWriter(emit, identity=identity, first=self._rank, step=self._attempt.ranks)
            stages, jobs = Stages(), self._effort.jobs
            runs: ScansRuns = Scanner(*readers, allowed, stages)
            if isinstance(target, LaidCheckpoint):
                runs = PieceScanner((base, target), readers, share, allowed, stages)
            found = choose(self._wish, work_bytes=_bytes_of(share), jobs=jobs)
            scanner, pace = scanning(found.lanes, runs, allowed, jobs=jobs, stages=stages)
            encoder = PieceEncoder(workers.pool, writer, allowed, tasks=2 * jobs, stages=stages)
            with unless_changed(*readers):
                rows = _Comparing(scanner, encoder, workers, pace).compare(share)
            self.account = Account(found.name, found.why, stages.all())
            file_runs = _write_files(writer, base, target, readers) if self._rank == 0 else ()
            payloads = writer.finish()
            uploads.finish()
            for reader in readers:
                reader.check_unchanged()
        numbers = {name: index for index, name in enumerate(sorted(base.by_name.keys() | target.by_name.keys()))}
        self._table = encode_table(PartTable(tuple(_slice_row(row, numbers) for row in rows), file_runs, payloads))

    def publish(self) -> None:
        """Put the table, and make the part count, unless there is one of this rank already: then that counts."""
        place = self._attempt.place
        data = self._document()
        self._store.put(part_table_key(place, self._rank), self._table)
        self._store.put_if_absent(part_commit_key(place, self._rank), data)
        self.sent_bytes += len(self._table) + len(data)

    def _document(self) -> bytes:
        author, digest = self._author, object_digest(self._table)
        if self._kept is not None:
            if self._kept.commit.table_blake3 != digest:
                raise self._made_otherwise()
            return self._kept.data
        part = PartCommit(self._rank, digest, len(self._table), author.now(), author.publisher)
        line = encode_part(self._attempt, part)
        return author.key.sign(line, PART_KIND) if author.key is not None else line

    def _emit(self, uploads: Uploads, name: str, data: bytes) -> None:
        kept = self._kept
        # Its number is in it: no two of them are the same.
        if kept is not None and PayloadRow(len(data), object_digest(data)) not in kept.table.payloads:
            raise self._made_otherwise()
        self.sent_bytes += len(data)
        uploads.submit(lambda: self._store.put(f"{VERSIONS}{self._attempt.place}/{name}", data))

    def _made_otherwise(self) -> ConflictError:
        facts = f"the part of rank {self._rank} was published before, and is not what comes of it now"
        hint = "give all ranks the options that it was made with, or another --attempt"
        return ConflictError(self._store.shown, facts, hint=hint)


class _Comparing:
    """Compares the slices of a share, in order."""

    def __init__(self, scanner: Scans, encoder: PieceEncoder, workers: Workers, pace: Pace) -> None:
        self._scanner = scanner
        self._encoder = encoder
        self._workers = workers
        self._pace = pace

    def compare(self, share: tuple[Slice, ...]) -> list[_Row]:
        rows = [_Row(number, each) for number, each in enumerate(share)]
        parts = (part for index, each in enumerate(share) for part in _blocks(index, each))
        for scanned in self._workers.results(self._scanner.scan_all, parts, _bytes_of(share), self._pace):
            self._take(rows[scanned.part.row], scanned)
        self._encoder.close()
        return rows

    def _take(self, row: _Row, scanned: Scanned) -> None:
        row.base_digest = add(row.base_digest, scanned.base_digest)
        row.target_digest = add(row.target_digest, scanned.target_digest)
        each, part = row.slice, scanned.part
        if each.target is None:
            return
        if row.feed is None:
            whole = each.base is None or self._scanner.is_sent_whole(each.tensor)
            row.feed = PieceFeed(self._encoder, each.tensor.dtype, partial(self._unchanged, row), whole=whole)
        sides = scanned.sides
        row.feed.add(scanned.draft, partial(self._scanner.load, part) if sides is None else lambda: sides)
        if row.feed.is_begun and self._encoder.has_chosen:
            self._scanner.chosen_row = part.row
        if part.start + part.elements == each.start + each.elements:
            row.feed.end(partial(_remember, row))
            row.changed, row.feed = row.feed.changed, None

    def _unchanged(self, row: _Row, block: int) -> tuple[int, LoadBlock]:
        part = _block(row.number, row.slice, block)
        return part.elements, partial(self._scanner.load, part)


def _bytes_of(share: tuple[Slice, ...]) -> int:
    return sum(each.elements * each.tensor.dtype.width for each in share)


def _blocks(row: int, each: Slice) -> list[Part]:
    """The blocks of a slice, in order; they are counted from where it begins."""
    count = -(-each.elements // block_elements(each.tensor.dtype.width))
    return [_block(row, each, block) for block in range(count)]


def _block(row: int, each: Slice, block: int) -> Part:
    size = block_elements(each.tensor.dtype.width)
    return Part(row, each.base, each.target, each.start + block * size, min(size, each.elements - block * size))


def _write_files(
    writer: PayloadWriter, base: Checkpoint, target: Checkpoint, readers: tuple[Reader, Reader]
) -> tuple[tuple[Run, ...], ...]:
    """The runs of the target's files in order, none of those that are the base's own."""
    known = _files_of(base.files_digest(readers[0]))
    headers = {shard.path: shard.header.raw for shard in target.shards}
    runs: list[tuple[Run, ...]] = []
    for file in target.files_digest(readers[1]):
        if known.get((file.path, file.kind)) == file.blake3:
            runs.append(())
        else:
            runs.append(write_file(writer, headers.get(file.path) or readers[1].read_file(file.path)))
    return tuple(runs)


def _files_of(files: list[FileDigest]) -> dict[tuple[str, int], bytes]:
    return {(file.path, file.kind): file.blake3 for file in files}


def _slice_row(row: _Row, numbers: Mapping[str, int]) -> SliceRow:
    each = row.slice
    return SliceRow(
        tensor=numbers[each.tensor.name],
        side=side_of(each),
        start=each.start,
        elements=each.elements,
        base_digest=digest_bytes(row.base_digest),
        target_digest=digest_bytes(row.target_digest),
        encoding=int(row.encoding or 0),
        changed=row.changed,
        runs=row.runs,
    )


def side_of(each: Slice) -> int:
    """In which of the checkpoints the elements of a slice are, as a part says it."""
    if each.base is None:
        return TARGET
    return BOTH if each.target is not None else BASE


def _remember(row: _Row, encoding: Encoding, runs: tuple[Run, ...]) -> None:
    row.encoding, row.runs = encoding, runs
