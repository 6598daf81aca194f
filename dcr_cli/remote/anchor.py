"""Anchors (FORMAT 13.6): a version's files as they are, and the document that binds them by range.

Fetching and publishing the files is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dcr_cli.checkpoint.digest import State, blake3_text, files_digest, object_digest, parse_blake3
from dcr_cli.checkpoint.header import LENGTH_BYTES
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, WEIGHT_MAP
from dcr_cli.delta.file_rules import RangedFile, check_file_parts, check_file_sizes, check_skipped, range_count
from dcr_cli.delta.line import BYTES_LIMIT, count, decode_line, encode_line, member, state_members, state_of
from dcr_cli.errors import DamagedError
from dcr_cli.remote.keys import MOST_VERSION, Place, is_id
from dcr_cli.remote.signing import MAX_SIGNATURES_BYTES, Signed, Trust, split_signed
from dcr_cli.remote.version import AnchorParts, Version

ANCHOR_KIND = "anchor"
ANCHOR_LIMIT = 256 << 20
# So many bytes of a document may begin a value: each takes memory, many times as much as the byte does.
_MAX_VALUES = 1 << 23
_OPENING = b",[{"
_NO_BYTES = object_digest(b"")
_HINT = "see that the address is that of a remote; push --anchor-every or dcr anchor makes another anchor"


@dataclass(frozen=True, slots=True)
class Anchor:
    """All files of a version."""

    history: str
    place: Place
    target: State
    files: tuple[RangedFile, ...]
    skipped: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def encode_anchor(anchor: Anchor) -> bytes:
    """Encode the line of an anchor's document; signatures are added to it. The same anchor gives the same bytes."""
    members = {
        "history": anchor.history,
        "version": anchor.place.version,
        "id": anchor.place.id,
        "kind": ANCHOR_KIND,
        "target": state_members(anchor.target),
        "skipped": list(anchor.skipped),
        "files": [
            {
                "path": file.path,
                "kind": file.kind,
                "bytes": file.size,
                "blake3": blake3_text(file.blake3),
                "ranges": [blake3_text(digest) for digest in file.ranges],
            }
            for file in anchor.files
        ],
    }
    return encode_line(members, "anchor", limit=ANCHOR_LIMIT - MAX_SIGNATURES_BYTES)


def open_anchor(version: Version, data: bytes, what: str, trust: Trust) -> Anchor:
    """Decode the anchor of a version, and check that it is one of this version and is bound as it has to be.

    That of a version that has nothing else is bound by the commit, any other by a signature, if `trust` asks for one.
    """
    parts = version.parts
    if isinstance(parts, AnchorParts) and object_digest(data) != parts.document_blake3:
        raise DamagedError(what, "is not the object that the commit names: its blake3 differs", hint=_HINT)
    anchor, signed = decode_anchor(data, version.place, what)
    if not isinstance(parts, AnchorParts):
        trust.check(signed, ANCHOR_KIND, what)
    elif (len(anchor.files), anchor.bytes) != (parts.file_count, parts.file_bytes):
        facts = f"lists {len(anchor.files)} files of {anchor.bytes} bytes, the commit {parts.file_count} of "
        raise DamagedError(what, f"{facts}{parts.file_bytes}", hint=_HINT)
    if (anchor.history, anchor.target) != (version.history, version.target):
        raise DamagedError(what, f"is of another history or state than the commit of version {version.number}")
    return anchor


def decode_anchor(data: bytes, place: Place, what: str) -> tuple[Anchor, Signed]:
    """Decode and check the document of the anchor of a version, and the signatures below it, which are not checked."""
    signed = split_signed(data, what, limit=ANCHOR_LIMIT)
    if sum(map(signed.line.count, _OPENING)) > _MAX_VALUES:
        raise DamagedError(what, f"has more than {_MAX_VALUES} values", hint=_HINT)
    document = decode_line(signed.line, what, limit=ANCHOR_LIMIT, hint=_HINT)
    number = count(document, "version", MOST_VERSION + 1, what)
    is_its = (number, document.get("id")) == place and document.get("kind") == ANCHOR_KIND
    if not is_its or not is_id(document.get("history")):
        raise DamagedError(what, f"is not the anchor of version {place.version}", hint=_HINT)
    skipped = member(document, "skipped", list, what)
    if not all(isinstance(pattern, str) for pattern in skipped):
        raise DamagedError(what, "skipped is not a list of patterns")
    files = tuple(_file(entry, what) for entry in member(document, "files", list, what))
    anchor = Anchor(document["history"], place, state_of(document, "target", what), files, tuple(skipped))
    _check(anchor, what)
    return anchor, signed


def _file(entry: Any, what: str) -> RangedFile:
    if not isinstance(entry, dict):
        raise DamagedError(what, "files is not a list of objects")
    path = member(entry, "path", str, what)
    name = f"{what}: file {shown(path)}"
    ranges = member(entry, "ranges", list, name)
    size = count(entry, "bytes", BYTES_LIMIT, name)
    if len(ranges) != range_count(size):
        raise DamagedError(name, f"has {size} bytes, and {len(ranges)} ranges")
    return RangedFile(
        path,
        count(entry, "kind", WEIGHT_MAP + 1, name),
        size,
        parse_blake3(entry.get("blake3"), f"{name}: blake3"),
        tuple(parse_blake3(digest, f"{name}: a range") for digest in ranges),
    )


def _check(anchor: Anchor, what: str) -> None:
    paths, kinds = [file.path for file in anchor.files], [file.kind for file in anchor.files]
    if any(first >= second for first, second in pairwise(paths)):
        raise DamagedError(what, "its files are not in canonical order")
    check_file_parts(paths, kinds, what)
    # What counts of a shard is its header, which may be all of it; how large that is is not known here.
    sizes = [min(file.size, LENGTH_BYTES + 1) if file.kind == SHARD else file.size for file in anchor.files]
    check_file_sizes(paths, kinds, sizes, what)
    for file in anchor.files:
        if file.kind != SHARD and len(file.ranges) < 2 and file.blake3 != (*file.ranges, _NO_BYTES)[0]:
            raise DamagedError(what, f"file {shown(file.path)} has another blake3 than its only range")
    check_skipped(anchor.skipped, paths, what)
    if files_digest((file.path, file.kind, file.blake3) for file in anchor.files) != anchor.target.files:
        raise DamagedError(what, "its files do not make up the files digest of its target")
