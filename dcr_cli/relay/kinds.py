"""Which object a key names, and what its kind means to a relay: how large it may be, and whether it is kept (pure).

Whether an object is right is checks.py's matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from dcr_cli.checkpoint.names import path_fault
from dcr_cli.delta.documents import OBJECT_LIMIT
from dcr_cli.delta.line import BYTES_LIMIT, COMMIT_LIMIT
from dcr_cli.delta.manifest_rules import MOST_PAYLOAD_BYTES, PAYLOAD_COUNT_LIMIT
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.delta.payload import payload_name
from dcr_cli.relay.spool import Label
from dcr_cli.remote.anchor import ANCHOR_LIMIT
from dcr_cli.remote.keys import (
    DECISION_NAME,
    HINT_KEY,
    HISTORY_KEY,
    Place,
    anchor_key,
    place_of_acknowledgement,
    place_of_anchor,
    place_of_version,
    version_of_commit,
)
from dcr_cli.remote.part import UNCHANGED_NAME

# What is asked for is asked for by many.
_REMEMBERED = 1024
_PAYLOAD = re.compile(r"payloads/(\d{6,})\.safetensors")
_PART = re.compile(r"parts/(\d{5})\.(json|zst)")
_FILES = "/files/"


class Kind(Enum):
    """What an object is."""

    HISTORY = auto()
    HINT = auto()
    COMMIT = auto()
    PREPARED = auto()
    DECISION = auto()
    PAYLOAD = auto()
    MANIFEST = auto()
    DIGESTS = auto()
    PART = auto()
    UNCHANGED = auto()
    TABLE = auto()
    ANCHOR = auto()
    ANCHOR_FILE = auto()
    ACKNOWLEDGEMENT = auto()


# These are bound by a digest, come in pieces, and may be large; all others are documents, held in memory.
BODIES = frozenset((Kind.PAYLOAD, Kind.MANIFEST, Kind.DIGESTS, Kind.TABLE, Kind.ANCHOR_FILE))
# The documents that are kept.
KEPT_DOCUMENTS = frozenset((Kind.HISTORY, Kind.COMMIT))
# What may be put over what is there.
REPLACED = frozenset((Kind.HINT, Kind.ANCHOR))
# What never changes once it is there, and is not taken back.
_IMMUTABLE = BODIES | {Kind.HISTORY, Kind.ACKNOWLEDGEMENT, Kind.PART, Kind.UNCHANGED}

_MOST_BYTES = {
    Kind.PAYLOAD: MOST_PAYLOAD_BYTES,
    Kind.MANIFEST: OBJECT_LIMIT,
    Kind.DIGESTS: OBJECT_LIMIT,
    Kind.TABLE: OBJECT_LIMIT,
    Kind.ANCHOR: ANCHOR_LIMIT,
    Kind.ANCHOR_FILE: BYTES_LIMIT,
}
_OF_THE_ROOT = {HISTORY_KEY: Kind.HISTORY, HINT_KEY: Kind.HINT}
_OF_A_VERSION = {
    COMMIT_NAME: Kind.PREPARED,
    DECISION_NAME: Kind.DECISION,
    MANIFEST_NAME: Kind.MANIFEST,
    DIGESTS_NAME: Kind.DIGESTS,
    f"parts/{UNCHANGED_NAME}": Kind.UNCHANGED,
}


@dataclass(frozen=True, slots=True)
class Named:
    """An object by its key: `number` is a commit's version, a payload's number, or a rank; `path` that of an anchor's
    file."""

    key: str
    kind: Kind
    place: Place | None = None
    number: int = 0
    path: str = ""

    @property
    def is_body(self) -> bool:
        return self.kind in BODIES

    @property
    def is_immutable(self) -> bool:
        return self.kind in _IMMUTABLE

    @property
    def most_bytes(self) -> int:
        return _MOST_BYTES.get(self.kind, COMMIT_LIMIT)

    @property
    def version(self) -> int:
        """The version that it belongs to; 0 where it belongs to none."""
        if self.place is not None:
            return self.place.version
        return self.number if self.kind is Kind.COMMIT else 0


def label_of(asked: Named, part: int = 0) -> Label:
    """What a spool calls an object, or a range of it."""
    return Label(asked.key, part, asked.version)


def require_named(key: str) -> Named:
    """What a key names that is one of an object."""
    found = named(key)
    assert found is not None
    return found


@lru_cache(_REMEMBERED)
def named(key: str) -> Named | None:
    """What a key names; None if no object of a remote that a relay serves has it."""
    if path_fault(key) is not None:
        return None
    if (kind := _OF_THE_ROOT.get(key)) is not None:
        return Named(key, kind)
    if (version := version_of_commit(key)) is not None:
        return Named(key, Kind.COMMIT, number=version)
    if (of_version := place_of_version(key)) is not None:
        return _of_version(key, *of_version)
    if (place := place_of_anchor(key)) is not None:
        if key == anchor_key(place):
            return Named(key, Kind.ANCHOR, place)
        return Named(key, Kind.ANCHOR_FILE, place, path=key.partition(_FILES)[2])
    word = place_of_acknowledgement(key)
    return Named(key, Kind.ACKNOWLEDGEMENT, word.place) if word is not None else None


def _of_version(key: str, place: Place, rest: str) -> Named | None:
    if (kind := _OF_A_VERSION.get(rest)) is not None:
        return Named(key, kind, place)
    if (payload := _PAYLOAD.fullmatch(rest)) is not None:
        number = int(payload[1])
        is_one = number < PAYLOAD_COUNT_LIMIT and payload_name(number) == rest
        return Named(key, Kind.PAYLOAD, place, number) if is_one else None
    if (part := _PART.fullmatch(rest)) is not None:
        return Named(key, Kind.PART if part[2] == "json" else Kind.TABLE, place, int(part[1]))
    return None
