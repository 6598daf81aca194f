"""The commit of a version (FORMAT 13.4): a delta's commit with its place in a history, or that of an anchor.

Reading a log of them is log.py's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.digest import State, blake3_text, object_digest, parse_blake3
from dcr_cli.delta.commit import Commit, commit_members, commit_of
from dcr_cli.delta.line import (
    BYTES_LIMIT,
    COMMIT_LIMIT,
    count,
    decode_line,
    encode_line,
    member,
    state_members,
    state_of as state_of_member,
)
from dcr_cli.errors import DamagedError
from dcr_cli.remote.keys import MOST_VERSION, Place, is_id
from dcr_cli.remote.signing import MAX_SIGNATURES_BYTES, Signed, split_signed

# What is signed is told apart by these.
COMMIT_KIND = "commit"
DELTA, ANCHOR = "delta", "anchor"
# The whole commit of a version, with its signatures, beside the line of it that makes a folder a delta.
PUBLISHED_NAME = "published.json"
_HINT = "see that the address is that of a remote"
_TAMPERED = "the log was tampered with, or two were mixed"


@dataclass(frozen=True, slots=True)
class AnchorParts:
    """What the commit of a version that has only an anchor binds: the anchor's document, its files and their bytes."""

    target: State
    document_blake3: bytes
    document_bytes: int
    file_count: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a history.

    `previous` is the blake3 of the commit before, None for version 1. `anchor` is the newest version up to this one
    that its publisher knew to have an anchor. A version whose `parts` are an anchor's starts from no base.
    """

    history: str
    place: Place
    previous: bytes | None
    anchor: int
    parts: Commit | AnchorParts
    created: str
    publisher: str

    @property
    def number(self) -> int:
        return self.place.version

    @property
    def target(self) -> State:
        return self.parts.target

    @property
    def delta(self) -> Commit | None:
        """The commit of its delta, if it has one."""
        return self.parts if isinstance(self.parts, Commit) else None

    @property
    def bytes(self) -> int:
        """What fetching its delta, or its anchor, takes, but for the commit itself."""
        if isinstance(self.parts, Commit):
            return self.parts.payload_bytes + self.parts.manifest_bytes + self.parts.digests_bytes
        return self.parts.file_bytes + self.parts.document_bytes


@dataclass(frozen=True, slots=True)
class Published:
    """A version, the bytes of its commit and their blake3."""

    version: Version
    signed: Signed
    data: bytes
    blake3: bytes


def is_next(before: Published, version: Version) -> bool:
    """Whether a version names the commit before it as the one that it follows."""
    return version.previous == before.blake3


def check_follows(before: Published, version: Version, what: str) -> None:
    """Raise DamagedError unless a version names the commit before it, and its delta starts from that one's state."""
    number = before.version.number
    if not is_next(before, version):
        raise DamagedError(what, f"does not follow the commit of version {number} that is there", hint=_TAMPERED)
    if version.delta is not None and version.delta.base != before.version.target:
        raise DamagedError(what, f"starts from another state than that of version {number}")


def encode_version(version: Version) -> bytes:
    """Encode the line of a version's commit; signatures are added to it."""
    parts = version.parts
    members: dict[str, Any] = {
        "history": version.history,
        "version": version.place.version,
        "id": version.place.id,
        "kind": DELTA if isinstance(parts, Commit) else ANCHOR,
        "previous": blake3_text(version.previous) if version.previous is not None else None,
        "anchor": version.anchor,
    }
    if isinstance(parts, Commit):
        members |= commit_members(parts)
    else:
        members |= {
            "target": state_members(parts.target),
            "manifest": {"blake3": blake3_text(parts.document_blake3), "bytes": parts.document_bytes},
            "payloads": {"count": parts.file_count, "bytes": parts.file_bytes},
        }
    members |= {"created": version.created, "publisher": version.publisher}
    return encode_line(members, "commit", limit=COMMIT_LIMIT - MAX_SIGNATURES_BYTES)


def decode_version(data: bytes, number: int | None, what: str) -> Published:
    """Decode and check the commit of version `number`, of whichever it says without; DamagedError, or UnsupportedError,
    names `what`."""
    if not data:
        raise DamagedError(what, "is empty", hint=_HINT)
    signed = split_signed(data, what)
    document = decode_line(signed.line, what, hint=_HINT)
    found = count(document, "version", MOST_VERSION + 1, what)
    if number is None and found:
        number = found
    if found != number:
        expected = number if number is not None else "one from 1 on"
        raise DamagedError(what, f"is the commit of version {found}, {expected} expected")
    if not is_id(document.get("history")) or not is_id(document.get("id")):
        raise DamagedError(what, "its history or id is none")
    if "previous" not in document:
        raise DamagedError(what, "previous is missing")
    previous = document["previous"]
    if (previous is None) != (number == 1):
        raise DamagedError(what, "previous is null in version 1, and in no other")
    kind = document.get("kind")
    if kind not in (DELTA, ANCHOR):
        raise DamagedError(what, "its kind is neither delta nor anchor")
    if kind == DELTA and number == 1:
        raise DamagedError(what, "version 1 has no base, and cannot be a delta")
    anchor = count(document, "anchor", number + 1, what)
    if anchor < 1 or (kind == ANCHOR and anchor != number):
        raise DamagedError(what, f"cannot have its anchor at version {anchor}")
    created, publisher = (member(document, key, str, what) for key in ("created", "publisher"))
    version = Version(
        history=document["history"],
        place=Place(number, document["id"]),
        previous=parse_blake3(previous, f"{what}: previous") if previous is not None else None,
        anchor=anchor,
        parts=commit_of(document, what) if kind == DELTA else _anchor_parts(document, what),
        created=created,
        publisher=publisher,
    )
    return Published(version, signed, data, object_digest(data))


def _anchor_parts(document: dict[str, Any], what: str) -> AnchorParts:
    manifest, payloads = (member(document, key, dict, what) for key in ("manifest", "payloads"))
    return AnchorParts(
        target=state_of_member(document, "target", what),
        document_blake3=parse_blake3(manifest.get("blake3"), f"{what}: manifest blake3"),
        document_bytes=count(manifest, "bytes", BYTES_LIMIT, f"{what}: manifest"),
        file_count=count(payloads, "count", BYTES_LIMIT, f"{what}: payloads"),
        file_bytes=count(payloads, "bytes", BYTES_LIMIT, f"{what}: payloads"),
    )
