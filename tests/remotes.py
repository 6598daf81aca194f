"""Remotes for tests, published by hand in the order of FORMAT 13.11; and small valid documents, to be broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.checkpoint.header import read_safetensors
from dcr_cli.delta.commit import Commit
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.file_rules import RANGE_BYTES, RangedFile
from dcr_cli.delta.manifest import PayloadRow
from dcr_cli.delta.payload import encode_payload
from dcr_cli.diff import diff
from dcr_cli.inspect import inspect
from dcr_cli.remote.acknowledgement import Acknowledgement, encode_acknowledgement
from dcr_cli.remote.anchor import ANCHOR_KIND, Anchor, encode_anchor
from dcr_cli.remote.hint import Hint, write_hint
from dcr_cli.remote.history import History, encode_history
from dcr_cli.remote.keys import (
    HISTORY_KEY,
    VERSIONS,
    Place,
    acknowledgement_key,
    anchor_file_key,
    anchor_key,
    commit_key,
)
from dcr_cli.remote.signing import SigningKey
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, Published, Version, decode_version, encode_version
from dcr_cli.store.store import Store
from receivers import rewrite_delta

HISTORY, OTHER_HISTORY = "0" * 31 + "1", "0" * 31 + "2"
CREATED, PUBLISHER = "2031-02-03T04:05:06Z", "trainer \u00e9"
STATES = [State(bytes([number]) * 32, bytes([number + 100]) * 32) for number in range(50)]


def place_of(number: int) -> Place:
    return Place(number, f"{number:032x}")


def signing_key(number: int = 0) -> SigningKey:
    """A key that is the same in every run, another for each number."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(number, number + 32))))


# Documents


def anchor_parts(number: int) -> AnchorParts:
    return AnchorParts(STATES[number], b"\7" * 32, 900, 3, 5_000_000_000)


def delta_parts(number: int) -> Commit:
    return Commit(
        base=STATES[number - 1],
        target=STATES[number],
        manifest_blake3=b"\1" * 32,
        manifest_decoded_blake3=b"\2" * 32,
        manifest_bytes=300,
        digests_blake3=b"\3" * 32,
        digests_bytes=200,
        payload_count=2,
        payload_bytes=1 << 40,
        created=CREATED,
        publisher=PUBLISHER,
    )


def version(number: int, **facts: Any) -> Version:
    """Version 1 has an anchor, the later ones are deltas."""
    parts = anchor_parts(1) if number == 1 else delta_parts(number)
    previous = None if number == 1 else b"\5" * 32
    known: dict[str, Any] = {"history": HISTORY, "place": place_of(number), "previous": previous, "anchor": 1}
    known |= {"parts": parts, "created": CREATED, "publisher": PUBLISHER}
    return Version(**known | facts)


def encode_members(members: dict[str, Any]) -> bytes:
    """Encode a document's members as one line."""
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def small_anchor(number: int = 3) -> Anchor:
    """A file of each kind, one of them empty, and a shard of two ranges."""
    files = (
        RangedFile("config.json", 2, 4, b"\1" * 32, (b"\1" * 32,)),
        RangedFile("empty.txt", 2, 0, object_digest(b""), ()),
        RangedFile("model-\u00e9.safetensors", 1, RANGE_BYTES + 1, b"\3" * 32, (b"\4" * 32, b"\5" * 32)),
        RangedFile("model.safetensors.index.json", 3, 7, b"\6" * 32, (b"\6" * 32,)),
    )
    return with_files(Anchor(HISTORY, place_of(number), STATES[number], files, ("*.bin",)))


def with_files(anchor: Anchor, files: Sequence[RangedFile] | None = None) -> Anchor:
    """The anchor with these files, and the files digest that goes with them."""
    kept = tuple(anchor.files if files is None else files)
    digest = files_digest_of(kept)
    return replace(anchor, files=kept, target=State(anchor.target.content, digest))


def files_digest_of(files: Sequence[RangedFile]) -> bytes:
    """FORMAT 3.3, in whatever order they are."""
    records = b""
    for file in files:
        path = file.path.encode("utf-8", "surrogatepass")
        records += len(path).to_bytes(4, "little") + path + bytes([1 if file.kind == 1 else 2]) + file.blake3
    return object_digest(records)


def acknowledgement(**facts: Any) -> Acknowledgement:
    known: dict[str, Any] = {"history": HISTORY, "place": place_of(2), "receiver": "host-1.a_b", "stage": "staged"}
    known |= {"target": STATES[2], "is_built": True, "created": CREATED}
    return Acknowledgement(**known | facts)


# Remotes


def write_log(store: Store, last: int, key: SigningKey | None = None) -> list[Published]:
    """Write dcr.json and the commits of versions 1 to `last`, and none of what they bind."""
    store.put(HISTORY_KEY, encode_history(History(HISTORY, ("context", "gap", "whole"), CREATED, PUBLISHER)))
    log: list[Published] = []
    for number in range(1, last + 1):
        log.append(commit(store, version(number, previous=log[-1].blake3 if log else None), key))
    return log


def commit(store: Store, version: Version, key: SigningKey | None = None) -> Published:
    """Write a version's commit over whatever has its key."""
    line = encode_version(version)
    data = line if key is None else key.sign(line, COMMIT_KIND)
    store.put(commit_key(version.number), data)
    return decode_version(data, version.number, "commit")


@dataclass
class Remote:
    """A remote that checkpoints are published to, each version's id its number; `scratch` is for deltas."""

    store: Store
    scratch: Path
    key: SigningKey | None = None
    log: list[Published] = field(default_factory=list)

    def __post_init__(self) -> None:
        history = History(HISTORY, ("context", "gap", "whole"), CREATED, PUBLISHER)
        assert self.store.put_if_absent(HISTORY_KEY, encode_history(history))

    def publish(self, checkpoint: Path, base: Path | None = None) -> Published:
        """Publish a checkpoint as the delta from `base`, the newest version, or as an anchor."""
        place = place_of(len(self.log) + 1)
        parts = self.put_anchor(checkpoint, place) if base is None else self.put_delta(base, checkpoint, place)
        anchor = place.version if base is None else self.log[-1].version.anchor
        previous = self.log[-1].blake3 if self.log else None
        self.log.append(
            commit(self.store, version(place.version, previous=previous, anchor=anchor, parts=parts), self.key)
        )
        return self.log[-1]

    def put_delta(self, base: Path, target: Path, place: Place) -> Commit:
        """Put the delta of a version, each payload of which says what it is of."""
        delta = self.scratch / str(place)
        diff(base, target, delta, jobs=1)
        identity = {"history": HISTORY, "version": str(place.version), "id": place.id}
        rows = []
        for index, path in enumerate(sorted((delta / "payloads").glob("*"))):
            header, data = read_safetensors(path.read_bytes(), path.name, max_header_bytes=1 << 16)
            payload = encode_payload(index, bytes(data[header.tensors[0].begin : header.tensors[0].end]), identity)
            rows.append(PayloadRow(len(payload), object_digest(payload)))
            path.write_bytes(payload)
        rewrite_delta(delta, manifest=lambda manifest: replace(manifest, payloads=tuple(rows)))
        for path in sorted((delta / "payloads").glob("*")):
            self.store.put(f"{VERSIONS}{place}/payloads/{path.name}", path.read_bytes())
        for name in ("digests.zst", "manifest.zst"):
            self.store.put(f"{VERSIONS}{place}/{name}", (delta / name).read_bytes())
        return replace(open_delta(delta).commit, created=CREATED, publisher=PUBLISHER)

    def put_anchor(self, checkpoint: Path, place: Place) -> AnchorParts:
        """Put an anchor: its files, then its document."""
        anchor = anchor_of(checkpoint, place)
        for file in anchor.files:
            self.store.put(anchor_file_key(place, file.path), (checkpoint / file.path).read_bytes())
        line = encode_anchor(anchor)
        data = line if self.key is None else self.key.sign(line, ANCHOR_KIND)
        self.store.put(anchor_key(place), data)
        return AnchorParts(anchor.target, object_digest(data), len(data), len(anchor.files), anchor.bytes)

    def acknowledge(self, published: Published, receiver: str, stage: str, *, is_built: bool = False) -> None:
        """Create the acknowledgement of a receiver, signed by the remote's key if it has one."""
        place, target = published.version.place, published.version.target
        said = Acknowledgement(HISTORY, place, receiver, stage, target, is_built, CREATED)
        assert self.store.put_if_absent(
            acknowledgement_key(place, receiver, stage), encode_acknowledgement(said, self.key)
        )

    def hint(self, number: int, state: str) -> None:
        write_hint(self.store, Hint(HISTORY, place_of(number), state, CREATED))


def anchor_of(checkpoint: Path, place: Place) -> Anchor:
    """The anchor of a checkpoint."""
    opened = open_checkpoint(checkpoint)
    with opened.reader() as reader:
        digests = opened.files_digest(reader)
    files = []
    for digest in digests:
        data = (checkpoint / digest.path).read_bytes()
        ranges = tuple(object_digest(data[at : at + RANGE_BYTES]) for at in range(0, len(data), RANGE_BYTES))
        files.append(RangedFile(digest.path, digest.kind, len(data), digest.blake3, ranges))
    state = inspect(checkpoint, digest=True, jobs=1).state
    assert state is not None
    return Anchor(HISTORY, place, state, tuple(files), ())
