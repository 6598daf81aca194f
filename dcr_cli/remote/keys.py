"""Where the objects of a remote lie (FORMAT 13.1): keys, made and read back."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME, PAYLOADS_NAME
from dcr_cli.delta.payload import payload_name
from dcr_cli.errors import UsageError

HISTORY_KEY, HINT_KEY = "dcr.json", "next.json"
PRUNE_KEY = "prune.json"
DECISION_NAME = "decision.json"
COMMITS, VERSIONS, ANCHORS, ACKNOWLEDGEMENTS = "commits/", "versions/", "anchors/", "acks/"
STAGED, APPLIED = "staged", "applied"
MOST_VERSION = 9_999_999_999
ID_DIGITS = 32
_PARTS = "parts/"

_ID = re.compile(rf"[0-9a-f]{{{ID_DIGITS}}}")
_NUMBER = r"((?!0{10})[0-9]{10})"
_PLACE = rf"{_NUMBER}-([0-9a-f]{{{ID_DIGITS}}})"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_NAMED = re.compile(_PLACE)
_COMMIT = re.compile(rf"commits/{_NUMBER}\.json")
_VERSION = re.compile(rf"versions/{_PLACE}/(.+)")
_ANCHOR = re.compile(rf"anchors/{_PLACE}(?:\.json|/files/.+)")
_ACKNOWLEDGEMENT = re.compile(rf"acks/{_PLACE}/({_NAME})\.({STAGED}|{APPLIED})")
_RECEIVER = re.compile(_NAME)


class Place(NamedTuple):
    """A version's number and id, as keys have them."""

    version: int
    id: str

    def __str__(self) -> str:
        return f"{self.version:010d}-{self.id}"


class AcknowledgementPlace(NamedTuple):
    """What the key of an acknowledgement tells."""

    place: Place
    receiver: str
    stage: str


def new_id() -> str:
    """An id that nothing else has."""
    return secrets.token_hex(ID_DIGITS // 2)


def is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def is_receiver(name: str) -> bool:
    """Whether keys can have the name of a receiver."""
    return _RECEIVER.fullmatch(name) is not None


def check_receiver(name: str, what: str = "name") -> str:
    """Return a receiver's name; UsageError about the argument `what` if keys cannot have it."""
    if not is_receiver(name):
        facts = f"{shown(name)} is no name: letters, digits, _ . and - are, at most 128 of them, the first no . or -"
        raise UsageError(what, facts, hint="such as the name of the host: eu-1.rollout")
    return name


def commit_key(version: int) -> str:
    return f"{COMMITS}{version:010d}.json"


def version_of_commit(key: str) -> int | None:
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match else None


def prepared_key(place: Place) -> str:
    return f"{VERSIONS}{place}/{COMMIT_NAME}"


def decision_key(place: Place) -> str:
    return f"{VERSIONS}{place}/{DECISION_NAME}"


def manifest_key(place: Place) -> str:
    return f"{VERSIONS}{place}/{MANIFEST_NAME}"


def digests_key(place: Place) -> str:
    return f"{VERSIONS}{place}/{DIGESTS_NAME}"


def payload_key(place: Place, index: int) -> str:
    return f"{VERSIONS}{place}/{payload_name(index)}"


def part_key(place: Place, name: str) -> str:
    """The key of what one rank of several has published of a version."""
    return f"{VERSIONS}{place}/{_PARTS}{name}"


def place_named(name: str) -> Place | None:
    """The version that a folder is of by its name; None for other names."""
    match = _NAMED.fullmatch(name)
    return Place(int(match[1]), match[2]) if match else None


def place_of_version(key: str) -> tuple[Place, str] | None:
    """The version that a key belongs to, and the rest of the key; None for other keys."""
    match = _VERSION.fullmatch(key)
    return (Place(int(match[1]), match[2]), match[3]) if match else None


def is_payload(rest: str) -> bool:
    """Whether the rest of a version's key is that of a payload."""
    return rest.startswith(f"{PAYLOADS_NAME}/")


def is_part(rest: str) -> bool:
    """Whether the rest of a version's key is that of what one rank has published."""
    return rest.startswith(_PARTS)


def is_part_document(rest: str) -> bool:
    """Whether it is that of a document which makes what a rank has published count."""
    return is_part(rest) and rest.endswith(".json")


def anchor_key(place: Place) -> str:
    return f"{ANCHORS}{place}.json"


def anchor_file_key(place: Place, path: str) -> str:
    return f"{ANCHORS}{place}/files/{path}"


def place_of_anchor(key: str) -> Place | None:
    """The version whose anchor an object is, or is part of."""
    match = _ANCHOR.fullmatch(key)
    return Place(int(match[1]), match[2]) if match else None


def acknowledgements_prefix(place: Place) -> str:
    return f"{ACKNOWLEDGEMENTS}{place}/"


def acknowledgement_key(place: Place, receiver: str, stage: str) -> str:
    return f"{acknowledgements_prefix(place)}{receiver}.{stage}"


def place_of_acknowledgement(key: str) -> AcknowledgementPlace | None:
    match = _ACKNOWLEDGEMENT.fullmatch(key)
    if match is None:
        return None
    return AcknowledgementPlace(Place(int(match[1]), match[2]), match[3], match[4])
