"""What a listing of a remote shows, sorted by what it belongs to. What any of it is worth is not its business."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.errors import UnsupportedError
from dcr_cli.remote.keys import (
    DECISION_NAME,
    HINT_KEY,
    HISTORY_KEY,
    PRUNE_KEY,
    AcknowledgementPlace,
    Place,
    anchor_key,
    is_part,
    is_payload,
    manifest_key,
    place_of_acknowledgement,
    place_of_anchor,
    place_of_version,
    version_of_commit,
)
from dcr_cli.store.backend import Entry
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store

_OF_THE_ROOT = frozenset((HISTORY_KEY, HINT_KEY, PRUNE_KEY))


@dataclass(frozen=True, slots=True)
class Held:
    """The objects of one version, or of one anchor, as far as they are listed; `document` is the one that all others
    count by: a version's manifest, an anchor's document."""

    place: Place
    document: Entry | None
    others: tuple[Entry, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return ((self.document,) if self.document is not None else ()) + self.others

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects of a remote by what they belong to, and the keys that have no meaning."""

    root: Mapping[str, Entry]
    commits: Mapping[int, Entry]
    versions: Mapping[Place, Held]
    anchors: Mapping[Place, Held]
    acknowledgements: Mapping[AcknowledgementPlace, Entry]
    unknown: tuple[str, ...]


def sort_entries(entries: Iterable[Entry]) -> Listing:
    """Sort what a listing of a whole remote, or of a part of it, has."""
    root: dict[str, Entry] = {}
    commits: dict[int, Entry] = {}
    versions: dict[Place, list[Entry]] = defaultdict(list)
    anchors: dict[Place, list[Entry]] = defaultdict(list)
    acknowledgements: dict[AcknowledgementPlace, Entry] = {}
    unknown = []
    for entry in entries:
        version = place_of_version(entry.key)
        if entry.key in _OF_THE_ROOT:
            root[entry.key] = entry
        elif (number := version_of_commit(entry.key)) is not None:
            commits[number] = entry
        elif version is not None and _is_of_version(version[1]):
            versions[version[0]].append(entry)
        elif (anchor := place_of_anchor(entry.key)) is not None:
            anchors[anchor].append(entry)
        elif (acknowledgement := place_of_acknowledgement(entry.key)) is not None:
            acknowledgements[acknowledgement] = entry
        else:
            unknown.append(entry.key)
    return Listing(
        root,
        commits,
        {place: _held(place, found, manifest_key(place)) for place, found in versions.items()},
        {place: _held(place, found, anchor_key(place)) for place, found in anchors.items()},
        acknowledgements,
        tuple(unknown),
    )


def list_if_allowed(store: Store, prefix: str) -> tuple[Entry, ...] | None:
    """List what is below `prefix`; None where that is not allowed, or cannot be done."""
    try:
        return store.list(prefix)
    except (RefusedError, UnsupportedError):
        return None


def _is_of_version(rest: str) -> bool:
    """Whether the rest of a key is that of an object which a version has."""
    is_document = rest in (MANIFEST_NAME, DIGESTS_NAME, COMMIT_NAME, DECISION_NAME)
    return is_document or is_payload(rest) or is_part(rest)


def _held(place: Place, entries: list[Entry], document: str) -> Held:
    others = tuple(entry for entry in entries if entry.key != document)
    return Held(place, next((entry for entry in entries if entry.key == document), None), others)
