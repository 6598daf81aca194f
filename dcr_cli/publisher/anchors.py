"""Publishes anchors: a version's files as they are, then the document that binds them (FORMAT 13.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Reader
from dcr_cli.checkpoint.digest import ObjectHasher, State, files_digest, object_digest
from dcr_cli.delta.file_rules import RangedFile, range_spans
from dcr_cli.durable import Folder
from dcr_cli.errors import ConflictError, WrongBaseError
from dcr_cli.publisher.outgoing import note_sent, was_sent
from dcr_cli.publisher.uploads import MOST_AT_ONCE, Uploads
from dcr_cli.remote.anchor import ANCHOR_KIND, Anchor, encode_anchor
from dcr_cli.remote.keys import Place, anchor_file_key, anchor_key
from dcr_cli.remote.signing import SigningKey
from dcr_cli.store.store import Store

_READ_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class AnchorPlan:
    """Whose anchor is published: a version's, and the state that the files must make up.

    `document_blake3` is that of the document, if the version's commit binds one.
    """

    history: str
    place: Place
    target: State
    document_blake3: bytes | None = None


@dataclass(frozen=True, slots=True)
class PublishedAnchor:
    """An anchor that is complete: its document's bytes, and how much was sent."""

    anchor: Anchor
    data: bytes
    sent_bytes: int


def is_anchor_due(every: int | None, version: int, newest: int) -> bool:
    """Whether a version is to have an anchor, which is wanted every so many versions, as `newest` has the last one."""
    return every is not None and version - newest >= every


def publish_anchor(
    store: Store,
    source: Checkpoint,
    plan: AnchorPlan,
    *,
    key: SigningKey | None = None,
    home: Folder | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> PublishedAnchor:
    """Send the files of `source`, and then the document of the anchor that they are.

    ConflictError if the files are not those of `plan.target`, or change meanwhile, WrongBaseError if the document
    would be another than the commit binds. That the tensors are the target's is the caller's to know. With `home`, a
    publisher's state folder in which this is being sent, what a stopped run had sent is not sent again.
    """
    tell = progress or (lambda stage, done, total: None)
    with source.reader() as reader:
        records = source.files_digest(reader)
        if files_digest((file.path, file.kind, file.blake3) for file in records) != plan.target.files:
            facts = f"its files are not those of version {plan.place.version}"
            raise ConflictError(str(source.root), facts, hint="try again when nothing writes there")
        total = sum(source.identities[record.path].size for record in records)
        counter = _Counter(tell, total)
        with ThreadPoolExecutor(max(1, min(jobs, MOST_AT_ONCE)), "dcr-anchor") as pool:
            files = tuple(pool.map(partial(_file, reader, source, counter), records))
        anchor = Anchor(plan.history, plan.place, plan.target, files, source.skipped)
        line = encode_anchor(anchor)
        data = key.sign(line, ANCHOR_KIND) if key is not None else line
        if plan.document_blake3 not in (None, object_digest(data)):
            facts = f"its anchor would be another than the commit of version {plan.place.version} binds"
            raise WrongBaseError(str(source.root), facts, hint="give the --sign-key and --skip that it was pushed with")
        sent_bytes = 0
        with Uploads(jobs) as uploads:
            for file in files:
                if home is None or not _is_sent(store, home, plan.place, file):
                    sent_bytes += file.size
                    uploads.submit(partial(_send, store, source, plan.place, file, home))
            uploads.finish()
        reader.check_unchanged()
        store.put(anchor_key(plan.place), data)
        for file in _taken(store, plan.place, files):
            _send(store, source, plan.place, file, None)
            sent_bytes += file.size
        reader.check_unchanged()
    return PublishedAnchor(anchor, data, sent_bytes + len(data))


class _Counter:
    """Counts bytes that are read, in several threads, and tells how far that is."""

    def __init__(self, tell: Progress, total: int) -> None:
        self._tell = tell
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._tell("anchor", min(self._done, self._total), self._total)


def _file(reader: Reader, source: Checkpoint, counter: _Counter, record: FileDigest) -> RangedFile:
    """A file's row: the blake3 of each of its ranges."""
    size = source.identities[record.path].size
    ranges = []
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    for begin, count in range_spans(size):
        hasher = ObjectHasher()
        for at in range(begin, begin + count, _READ_BYTES):
            part = buffer[: min(_READ_BYTES, begin + count - at)]
            reader.read_path_into(record.path, at, part)
            hasher.update(part)
            counter.add(len(part))
        ranges.append(hasher.digest())
    return RangedFile(record.path, record.kind, size, record.blake3, tuple(ranges))


def _send(store: Store, source: Checkpoint, place: Place, file: RangedFile, home: Folder | None) -> None:
    with (source.root / file.path).open("rb") as stream:
        store.put(anchor_file_key(place, file.path), stream)
    if home is not None:
        note_sent(home, _mark(file))


def _taken(store: Store, place: Place, files: Iterable[RangedFile]) -> list[RangedFile]:
    """The files that a prune, which began when there was no document of this anchor, has taken meanwhile. From when
    there is one, it takes none."""
    if store.stat(anchor_key(place), is_denied_absent=True) is None:
        # Who may only write is not shown what came of it.
        return []
    return [file for file in files if not _is_there(store, place, file)]


def _is_there(store: Store, place: Place, file: RangedFile) -> bool:
    status = store.stat(anchor_file_key(place, file.path), is_denied_absent=True)
    return status is not None and status.size == file.size


def _is_sent(store: Store, home: Folder, place: Place, file: RangedFile) -> bool:
    return was_sent(home, _mark(file)) and _is_there(store, place, file)


def _mark(file: RangedFile) -> str:
    """A name that no other file, and no other bytes of this one, have."""
    return object_digest(b"".join((file.path.encode(), b"\0", *file.ranges))).hex()
