"""Fetches what deltas need from a remote into a receiver's spool, each object checked before it counts.

Documents come first, so that what is missing is known before any payload is fetched. What an earlier run has fetched is
used after its digest was checked again. Applying is not its business.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from dcr_cli.checkpoint.digest import ObjectHasher
from dcr_cli.delta.commit import Commit, open_digests, open_manifest
from dcr_cli.delta.document import CONTENT_LIMIT, WINDOW_LIMIT
from dcr_cli.delta.frame import stated_bytes
from dcr_cli.delta.manifest import Manifest, PayloadRow
from dcr_cli.delta.output import DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.durable import NoRoomError
from dcr_cli.errors import DamagedError, NotFoundError, size
from dcr_cli.fetch.losses import RemovedError, is_gone, telling_spoiled
from dcr_cli.fetch.spool import Spool
from dcr_cli.pool import run_all
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.keys import Place, digests_key, manifest_key, payload_key
from dcr_cli.remote.version import Published
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store

T = TypeVar("T")

STAGE = "fetch"
_TRIES = 2
_OBJECT_LIMIT = 2 * CONTENT_LIMIT
# So much is looked at of what stands in a document's place, so that a page of an error or a login is told as one.
_PAGE_BYTES = 1 << 20
# What the documents of deltas that are applied together decode to, at most: as much as those of one alone may. In
# memory they take several times as much.
AT_ONCE_BYTES = CONTENT_LIMIT
# What is written beside payloads and documents, and what the file system needs for it.
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FetchedDocuments:
    """A version, and the documents of its delta as objects; `payloads` are those that its manifest lists."""

    published: Published
    manifest_object: bytes
    digests_object: bytes
    payloads: tuple[PayloadRow, ...]

    @property
    def place(self) -> Place:
        return self.published.version.place

    @property
    def decoded_bytes(self) -> int:
        objects = (self.manifest_object, self.digests_object)
        return sum(stated_bytes(each, CONTENT_LIMIT, WINDOW_LIMIT) for each in objects)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A payload that is to be fetched."""

    place: Place
    index: int
    row: PayloadRow


def fetch_manifest(store: Store, published: Published, commit: Commit, spool: Spool | None) -> tuple[bytes, Manifest]:
    """Fetch the manifest of a version, whose commit is `commit`, unless it is in the spool: the object and what it
    says.

    RemovedError if it is not there, or may not be read where commits may; SpoiledError if it is not the right one, the
    second time too.
    """
    place = published.version.place

    def check(data: bytes, what: str) -> Manifest:
        return open_manifest(commit, data, what)

    kept = _kept(spool, place, MANIFEST_NAME, check)
    key, size_bytes = manifest_key(place), commit.manifest_bytes
    return kept or _twice(lambda: _fetched(store, place, (key, size_bytes), check))


def fetch_delta_documents(store: Store, published: Published, commit: Commit, spool: Spool | None) -> FetchedDocuments:
    """Fetch manifest and digests of a version, as `fetch_manifest` does."""
    place = published.version.place
    manifest_object, manifest = fetch_manifest(store, published, commit, spool)

    def check(data: bytes, what: str) -> bool:
        open_digests(commit, manifest, data, what)
        return True

    kept = _kept(spool, place, DIGESTS_NAME, check)
    key, size_bytes = digests_key(place), commit.digests_bytes
    digests_object, _ = kept or _twice(lambda: _fetched(store, place, (key, size_bytes), check))
    return FetchedDocuments(published, manifest_object, digests_object, tuple(manifest.payloads))


def at_once(versions: Sequence[FetchedDocuments]) -> int:
    """How many of the first versions are applied together, at least one: memory does not grow with all that there are.

    It depends on no more than these, so that what was stopped is finished with the same ones.
    """
    decoded = accumulate(each.decoded_bytes for each in versions)
    return max(1, bisect_right(list(decoded), AT_ONCE_BYTES))


def _kept(spool: Spool | None, place: Place, name: str, check: Callable[[bytes, str], T]) -> tuple[bytes, T] | None:
    """A document that is in the spool, if it is the right one: what stopped an earlier run may have torn it."""
    data = spool.read(place, name, _OBJECT_LIMIT) if spool is not None else None
    try:
        return (data, check(data, name)) if data is not None else None
    except DamagedError:
        return None


def _fetched(store: Store, place: Place, wanted: tuple[str, int], check: Callable[[bytes, str], T]) -> tuple[bytes, T]:
    key, size_bytes = wanted
    most_bytes = min(max(size_bytes, _PAGE_BYTES), _OBJECT_LIMIT)
    with telling_spoiled(store, place):
        data = store.get(key, most_bytes=most_bytes, is_denied_absent=True, is_seen=True)
        if data is None:
            raise RemovedError(store.shown, place.version)
        return data, check(data, f"{store.shown}/{key}")


def fetch_versions(store: Store, spool: Spool, versions: Sequence[FetchedDocuments], effort: Effort) -> int:
    """Fetch all of these versions into the spool, where each is a delta's folder in the end: how many bytes of payloads
    were there already.

    Nothing of the checkpoint is changed. NoRoomError before any payload is fetched; SpoiledError if one is not the one
    that the manifest lists, the second time too; RemovedError if one is gone.
    """
    for documents in versions:
        _write_documents(spool, documents)
    wanted = [payload for documents in versions for payload in _lacking(spool, documents)]
    needed = sum(payload.row.bytes for payload in wanted)
    if needed and needed + _SLACK_BYTES > spool.room_bytes:
        facts = f"{size(needed + _SLACK_BYTES)} are needed to fetch deltas, {size(spool.room_bytes)} are free"
        raise NoRoomError(str(spool.path(versions[0].place).parent), facts, hint="make room and run the command again")
    before = store.traffic.received_bytes

    def tick() -> None:
        if effort.progress is not None:
            effort.progress(STAGE, min(store.traffic.received_bytes - before, needed), needed)

    run_all(wanted, lambda: lambda payload: _fetch_payload(store, spool, payload), effort.jobs, tick)
    for documents in versions:
        spool.finish(documents.published)
    return sum(row.bytes for documents in versions for row in documents.payloads) - needed


def _write_documents(spool: Spool, documents: FetchedDocuments) -> None:
    spool.expect(documents.published)
    pairs = ((MANIFEST_NAME, documents.manifest_object), (DIGESTS_NAME, documents.digests_object))
    for name, data in pairs:
        if spool.read(documents.place, name, len(data)) != data:
            spool.write(documents.place, name, data)


def _lacking(spool: Spool, documents: FetchedDocuments) -> Iterator[_Wanted]:
    """The payloads of a version that are not in the spool as they should be."""
    for index, row in enumerate(documents.payloads):
        if spool.payload_digest(documents.place, index, row.bytes) != row.blake3:
            yield _Wanted(documents.place, index, row)


def _fetch_payload(store: Store, spool: Spool, payload: _Wanted) -> None:
    place, index, row = payload.place, payload.index, payload.row
    key = payload_key(place, index)

    def attempt() -> None:
        hasher = ObjectHasher()
        with spool.create_payload(place, index) as file, telling_spoiled(store, place):
            at = 0
            for chunk in store.stream(key, size=row.bytes, is_seen=True):
                file.write_at(at, chunk)
                hasher.update(chunk)
                at += len(chunk)
            file.sync()
            if hasher.digest() != row.blake3:
                facts = "is not the payload that the manifest lists: its blake3 differs"
                raise DamagedError(f"{store.shown}/{key}", facts)

    try:
        _twice(attempt)
    except (NotFoundError, RefusedError) as error:
        if not is_gone(store, key, error):
            raise
        raise RemovedError(store.shown, place.version) from error
    except DamagedError:
        spool.drop_payload(place, index)
        raise
    spool.accept_payload(place, index)


def _twice(attempt: Callable[[], T]) -> T:
    """Try again, once, what came damaged: it may have been damaged on its way."""
    for _ in range(_TRIES - 1):
        try:
            return attempt()
        except DamagedError:
            pass
    return attempt()
