"""Remotes for tests, made by hand: a store whose clock and rights are set, histories of no real content, and of real
checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State, files_digest, object_digest
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.content import Workers, read_state
from dcr_cli.delta.commit import Commit
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.file_rules import RangedFile, range_spans
from dcr_cli.diff import diff
from dcr_cli.remote.acknowledgement import Acknowledgement, encode_acknowledgement
from dcr_cli.remote.anchor import Anchor, encode_anchor
from dcr_cli.remote.hint import Hint, encode_hint
from dcr_cli.remote.history import ENCODINGS, History, encode_history
from dcr_cli.remote.keys import (
    APPLIED,
    HINT_KEY,
    HISTORY_KEY,
    Place,
    acknowledgement_key,
    anchor_file_key,
    anchor_key,
    commit_key,
    digests_key,
    manifest_key,
    payload_key,
    prepared_key,
)
from dcr_cli.remote.signing import SigningKey
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, Version, encode_version
from dcr_cli.store import opening
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    OutsideError,
    Readable,
    Status,
    is_leftover,
    parts,
)

URL = "memory://tended"
HISTORY = "f" * 32
DAY = 24 * 3600.0
CREATED, PUBLISHER = "2031-02-03T04:05:06Z", "trainer"


class KilledError(BaseException):
    """The process is no more."""


class Objects:
    """A backend of objects in memory whose clock is set by hand. What is in `denied` (list, write, absent) is not
    allowed; from call number `dies_at` on nothing is done any more."""

    can_create = True

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float | None]] = {}
        self.now = 1e9
        self.tells_time = True
        self.denied: frozenset[str] = frozenset()
        self.calls: list[tuple[str, str]] = []
        self.dies_at: int | None = None

    def copy(self) -> Objects:
        other = Objects()
        other.objects, other.now = dict(self.objects), self.now
        return other

    def set(self, key: str, data: bytes) -> None:
        self.objects[key] = data, self.now if self.tells_time else None

    def data(self, key: str) -> bytes:
        return self.objects[key][0]

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        self._call("read", key)
        if key not in self.objects:
            raise DeniedError("403") if "absent" in self.denied else AbsentError
        data = self.data(key)
        if begin > len(data):
            raise OutsideError("ends before")
        body = data[begin:] if size is None else data[begin : begin + size]
        return Answer(begin, len(body), len(data), self.body_of(body))

    def body_of(self, data: bytes) -> Iterator[bytes]:
        """In which parts it comes."""
        return iter([data] if data else [])

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        self._call("write", key)
        self.set(key, b"".join(parts(data)))

    def create(self, key: str, data: bytes) -> bool:
        self._call("write", key)
        if key in self.objects:
            return False
        self.set(key, data)
        return True

    def status(self, key: str) -> Status | None:
        self._call("status", key)
        if key not in self.objects:
            if "absent" in self.denied:
                raise DeniedError("403")
            return None
        data, modified = self.objects[key]
        return Status(len(data), modified)

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._call("list", prefix)
        for key, (data, modified) in list(self.objects.items()):
            if key.startswith(prefix) and not is_leftover(key):
                yield Entry(key, len(data), modified)

    def remove(self, key: str) -> None:
        self._call("write", key)
        self.objects.pop(key, None)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        self._call("list", prefix)
        for key, (data, modified) in list(self.objects.items()):
            if key.startswith(prefix) and is_leftover(key):
                yield Entry(key, len(data), modified)

    def close(self) -> None:
        pass

    def _call(self, name: str, key: str) -> None:
        if self.dies_at is not None and len(self.calls) >= self.dies_at:
            raise KilledError
        self.calls.append((name, key))
        if name in self.denied:
            raise DeniedError("403")


def serve(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> str:
    """Let every address lead to these objects; one of them."""
    monkeypatch.setattr(opening, "_backend", lambda *asked: objects)
    return URL


def new_remote(history: str = HISTORY) -> Objects:
    objects = Objects()
    objects.set(HISTORY_KEY, encode_history(History(history, ENCODINGS, CREATED, PUBLISHER)))
    return objects


class Publisher:
    """Appends versions to a remote."""

    def __init__(self, objects: Objects, key: SigningKey | None = None) -> None:
        self.objects = objects
        self.key = key
        self.head = 0
        self.previous: bytes | None = None
        self.anchor = 0
        self.versions: dict[int, Version] = {}

    def place(self, version: int) -> Place:
        return self.versions[version].place

    def commit(self, parts: Commit | AnchorParts) -> Version:
        """Commit the next version, whose objects are there."""
        self.head += 1
        if isinstance(parts, AnchorParts):
            self.anchor = self.head
        place = Place(self.head, id_of(self.head))
        version = Version(HISTORY, place, self.previous, self.anchor, parts, CREATED, PUBLISHER)
        line = encode_version(version)
        data = line if self.key is None else self.key.sign(line, COMMIT_KIND)
        self.objects.set(commit_key(self.head), data)
        self.previous = object_digest(data)
        self.versions[self.head] = version
        return version

    # Of no real content

    def empty_delta(self, payloads: int = 2) -> None:
        """Append a version that has a delta whose documents mean nothing."""
        place = Place(self.head + 1, id_of(self.head + 1))
        manifest, digests = b"manifest %d" % place.version, b"digests"
        datas = [b"payload %d %d" % (place.version, index) for index in range(payloads)]
        for index, data in enumerate(datas):
            self.objects.set(payload_key(place, index), data)
        self.objects.set(manifest_key(place), manifest)
        self.objects.set(digests_key(place), digests)
        self.commit(
            Commit(
                base=empty_state(self.head),
                target=empty_state(place.version),
                manifest_blake3=object_digest(manifest),
                manifest_decoded_blake3=object_digest(manifest),
                manifest_bytes=len(manifest),
                digests_blake3=object_digest(digests),
                digests_bytes=len(digests),
                payload_count=len(datas),
                payload_bytes=sum(map(len, datas)),
                created="",
                publisher="",
            )
        )

    def empty_anchor(self) -> None:
        """Append a version that has only an anchor, of one file that means nothing."""
        place = Place(self.head + 1, id_of(self.head + 1))
        anchor = Anchor(HISTORY, place, empty_state(place.version), (_EMPTY_FILE,), ())
        self.commit(self.put_anchor(anchor, {_EMPTY_FILE.path: _EMPTY_SHARD}))

    def add_empty_anchor(self, version: int) -> None:
        """Add an anchor to a version that has a delta."""
        anchor = Anchor(HISTORY, self.place(version), empty_state(version), (_EMPTY_FILE,), ())
        self.put_anchor(anchor, {_EMPTY_FILE.path: _EMPTY_SHARD})
        self.anchor = max(self.anchor, version)

    def put_anchor(self, anchor: Anchor, files: Mapping[str, bytes]) -> AnchorParts:
        for path, data in files.items():
            self.objects.set(anchor_file_key(anchor.place, path), data)
        document = encode_anchor(anchor)
        self.objects.set(anchor_key(anchor.place), document)
        return AnchorParts(anchor.target, object_digest(document), len(document), len(files), anchor.bytes)

    # Of checkpoints

    def delta(self, base: Path, target: Path, work: Path) -> None:
        """Append a version by the delta from base to target, which is made below `work`."""
        folder = work / f"delta-{self.head + 1}"
        diff(base, target, folder)
        place = Place(self.head + 1, id_of(self.head + 1))
        opened = open_delta(folder)
        for index in range(opened.commit.payload_count):
            self.objects.set(payload_key(place, index), (folder / f"payloads/{index:06d}.safetensors").read_bytes())
        self.objects.set(manifest_key(place), (folder / "manifest.zst").read_bytes())
        self.objects.set(digests_key(place), (folder / "digests.zst").read_bytes())
        self.commit(replace(opened.commit, created="", publisher=""))

    def whole(self, checkpoint: Path) -> None:
        """Append a version that has only an anchor, of a checkpoint."""
        place = Place(self.head + 1, id_of(self.head + 1))
        self.commit(self.put_anchor(*anchor_of(checkpoint, place)))

    def add_anchor(self, version: int, checkpoint: Path) -> None:
        self.put_anchor(*anchor_of(checkpoint, self.place(version)))
        self.anchor = max(self.anchor, version)

    # Of others

    def acknowledge(
        self,
        version: int,
        receiver: str,
        stage: str = APPLIED,
        *,
        own: str | None = None,
        key: SigningKey | None = None,
    ) -> None:
        """Say that a receiver has a version; `own` is the id of another than the one that was published."""
        where = Place(version, own or id_of(version))
        target = self.versions[version].target if version in self.versions else empty_state(version)
        word = Acknowledgement(HISTORY, where, receiver, stage, target, False, CREATED)
        self.objects.set(acknowledgement_key(where, receiver, stage), encode_acknowledgement(word, key))

    def begin(self, place: Place, state: str | None, *, is_prepared: bool = False) -> None:
        """Leave objects of a version that no commit names, and a word about it."""
        self.objects.set(payload_key(place, 0), b"begun")
        if is_prepared:
            self.objects.set(manifest_key(place), b"manifest")
            self.objects.set(prepared_key(place), b"{}\n")
        if state is not None:
            self.objects.set(HINT_KEY, encode_hint(Hint(HISTORY, place, state, CREATED)))


def id_of(version: int) -> str:
    return f"{version:032x}"


_EMPTY_SHARD = b"a shard of nothing"
_EMPTY_FILE = RangedFile("model.safetensors", SHARD, len(_EMPTY_SHARD), b"\1" * 32, (object_digest(_EMPTY_SHARD),))


def empty_state(version: int) -> State:
    files = files_digest([(_EMPTY_FILE.path, _EMPTY_FILE.kind, _EMPTY_FILE.blake3)])
    return State(object_digest(b"%d" % version), files)


def anchor_of(checkpoint: Path, place: Place) -> tuple[Anchor, dict[str, bytes]]:
    """The anchor of a checkpoint, and its files."""
    opened = open_checkpoint(checkpoint)
    with opened.reader() as reader, Workers(1, "test", None) as workers:
        state, _ = read_state(workers, opened, reader)
        records = opened.files_digest(reader)
    datas = {record.path: (checkpoint / record.path).read_bytes() for record in records}
    files = tuple(
        RangedFile(
            record.path,
            record.kind,
            len(datas[record.path]),
            record.blake3,
            tuple(
                object_digest(datas[record.path][begin : begin + size])
                for begin, size in range_spans(len(datas[record.path]))
            ),
        )
        for record in records
    )
    return Anchor(HISTORY, place, state, files, ()), datas


def publish(objects: Objects, kinds: Sequence[str]) -> Publisher:
    """A history of no real content: `a` has only an anchor, `d` a delta, `D` a delta and an anchor besides."""
    publisher = Publisher(objects)
    for kind in kinds:
        if kind == "a":
            publisher.empty_anchor()
        else:
            publisher.empty_delta()
            if kind == "D":
                publisher.add_empty_anchor(publisher.head)
    return publisher
