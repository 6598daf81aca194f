"""Which objects of a remote a prune removes, and in which order (FORMAT 13.11): decided from values alone.

What is kept are the newest versions and all young ones, each with a way to it: an anchor and the deltas after it; the
newest two anchors and the one that the newest commit names; and what receivers that were seen lately need to go on
from where they are. Removing is not its business, nor finding out what is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME
from dcr_cli.remote.keys import (
    APPLIED,
    DECISION_NAME,
    AcknowledgementPlace,
    Place,
    is_part_document,
    is_payload,
    place_of_version,
)
from dcr_cli.remote.listing import Held, Listing
from dcr_cli.store.backend import Entry

# What no commit names is left alone for so long: somebody may be writing it.
GRACE_SECONDS = 24 * 3600.0
NEWEST_ANCHORS = 2

VERSION, ANCHOR, ORPHAN, ACKNOWLEDGEMENTS = "version", "anchor", "orphan", "acknowledgements"


@dataclass(frozen=True, slots=True)
class Terms:
    """How much is kept: so many of the newest versions, those younger than, and what receivers need that were seen
    within."""

    keep: int
    keep_within_seconds: float
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Making:
    """What somebody is said to make or to have prepared, `place`, None for nothing. Where what is said cannot be
    understood, `is_known` is false, and it may be anything."""

    place: Place | None
    is_known: bool = True

    def may_be(self, place: Place) -> bool:
        return not self.is_known or place == self.place


@dataclass(frozen=True, slots=True)
class Facts:
    """What a prune knows of a remote.

    `ids` are those of the committed versions that anything is listed of. `deltas` and `anchors` are the versions whose
    delta, or anchor, is there with all of its objects; `in_doubt` the anchors that are listed and no such.
    `leftovers` is what killed writers began to write, `now` the store's time, None if it tells none.
    """

    listing: Listing
    head: int
    head_anchor: int
    ids: Mapping[int, str]
    deltas: frozenset[int]
    anchors: frozenset[int]
    in_doubt: frozenset[Place]
    making: Making
    leftovers: tuple[Entry, ...]
    now: float | None

    def is_committed(self, place: Place) -> bool:
        return self.ids.get(place.version) == place.id


@dataclass(frozen=True, slots=True)
class Lease:
    """A receiver that was seen lately: the version that it is at, and the acknowledgements which say so."""

    receiver: str
    version: int
    evidence: frozenset[AcknowledgementPlace]


@dataclass(frozen=True, slots=True)
class Removal:
    """Objects that go together, in this order. `is_committed` says that a commit names what they are of."""

    what: str
    place: Place
    keys: tuple[str, ...]
    bytes: int
    is_committed: bool


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What is kept and what goes. `is_head_reachable` says that somebody who has nothing can get the newest version;
    where not, nothing that a commit names is removed."""

    kept_versions: frozenset[int]
    kept_anchors: frozenset[int]
    leases: tuple[Lease, ...]
    removals: tuple[Removal, ...]
    leftovers: tuple[Entry, ...]
    is_head_reachable: bool


def plan_prune(facts: Facts, terms: Terms) -> PrunePlan:
    """Decide what goes. Carried out in order and stopped anywhere, it leaves a way to every version whose manifest is
    still there, and a manifest with all that it names."""
    ways = ways_from_anchors(facts.deltas, facts.anchors)
    is_reachable = facts.head == 0 or facts.head in ways
    leases = tuple(_leases(facts, terms))
    if is_reachable:
        versions, anchors = _kept(facts, terms, ways, leases)
    else:
        versions, anchors = frozenset(facts.ids), facts.anchors
    removals = (*_outlived(facts, versions, anchors, leases), *_orphans(facts))
    leftovers = tuple(entry for entry in facts.leftovers if _are_old(facts, [entry]))
    return PrunePlan(versions, anchors, leases, removals, leftovers, is_reachable)


def ways_from_anchors(deltas: frozenset[int], anchors: frozenset[int]) -> dict[int, int]:
    """The versions that somebody who has nothing can get, each with the newest anchor that leads to it."""
    ways: dict[int, int] = {}
    for version in sorted(deltas | anchors):
        if version in anchors:
            ways[version] = version
        elif version - 1 in ways:
            ways[version] = ways[version - 1]
    return ways


def _kept(
    facts: Facts, terms: Terms, ways: Mapping[int, int], leases: Iterable[Lease]
) -> tuple[frozenset[int], frozenset[int]]:
    """The versions whose objects are kept, and those whose anchors are."""
    anchors = {*sorted(facts.anchors)[-NEWEST_ANCHORS:], *facts.anchors.intersection({facts.head_anchor})}
    wanted = {facts.head, *(version for version in facts.ids if _is_recent(facts, terms, version))}
    versions = set(wanted)
    way, before = 0, 0
    for version in sorted(facts.deltas | facts.anchors):
        if version in anchors:
            way = version
        elif version != before + 1 or version not in facts.deltas:
            way = 0
        if version in wanted and not way:
            # No anchor that is kept anyway leads here; those after this one will be reached from the same.
            way = ways.get(version, 0)
            anchors |= {way} - {0}
        if version in wanted and way:
            versions |= set(range(way + 1, version + 1))
        before = version
    for lease in leases:
        needed = set(range(lease.version + 1, facts.head + 1))
        # Without all of them the receiver has to begin at an anchor, as anybody can. What follows a manifest that is
        # listed is there, be it listed later: it goes after the manifest.
        if all(version in facts.deltas or _has_manifest(facts, version) for version in needed):
            versions |= needed
    return frozenset(versions), frozenset(anchors)


def _has_manifest(facts: Facts, version: int) -> bool:
    held = facts.listing.versions.get(Place(version, facts.ids.get(version, "")))
    return held is not None and held.document is not None


def _is_recent(facts: Facts, terms: Terms, version: int) -> bool:
    return version > facts.head - terms.keep or _is_within(
        facts, facts.listing.commits.get(version), terms.keep_within_seconds
    )


def _is_within(facts: Facts, entry: Entry | None, seconds: float) -> bool:
    """Whether an object is younger than that; one of unknown age is."""
    if seconds <= 0:
        return False
    age = _age(facts, entry)
    return age is None or age < seconds


def _age(facts: Facts, entry: Entry | None) -> float | None:
    if entry is None or entry.modified is None or facts.now is None:
        return None
    return facts.now - entry.modified


def _leases(facts: Facts, terms: Terms) -> Iterator[Lease]:
    by_receiver: dict[str, list[AcknowledgementPlace]] = defaultdict(list)
    for place in facts.listing.acknowledgements:
        is_ahead = place.place.version == facts.head + 1
        if is_ahead or facts.is_committed(place.place):
            by_receiver[place.receiver].append(place)
    for receiver, places in sorted(by_receiver.items()):
        seen = [
            place for place in places if _is_within(facts, facts.listing.acknowledgements[place], terms.lease_seconds)
        ]
        if not seen:
            continue
        applied = [place for place in places if place.stage == APPLIED and place.place.version <= facts.head]
        # Whoever has staged a version, and applied none, is at the one before it at best.
        at = max(applied or places, key=lambda place: place.place.version)
        version = at.place.version - (0 if applied else 1)
        last = max(seen, key=lambda place: facts.listing.acknowledgements[place].modified or 0.0)
        yield Lease(receiver, version, frozenset((at, last)))


def _outlived(
    facts: Facts, versions: frozenset[int], anchors: frozenset[int], leases: Iterable[Lease]
) -> Iterator[Removal]:
    """What commits name and nobody needs, the newest first: what is removed later leads to nothing that is left."""
    evidence = frozenset[AcknowledgementPlace]().union(*(lease.evidence for lease in leases))
    acknowledged: dict[Place, list[Entry]] = defaultdict(list)
    for word, entry in facts.listing.acknowledgements.items():
        if word not in evidence:
            acknowledged[word.place].append(entry)
    doubted = {place.version for place in facts.in_doubt}
    places = {*facts.listing.versions, *facts.listing.anchors, *acknowledged}
    for place in sorted(filter(facts.is_committed, places), reverse=True):
        version, anchor = facts.listing.versions.get(place), facts.listing.anchors.get(place)
        entries = [] if place.version in versions | anchors else acknowledged[place]
        if version is not None and place.version not in versions:
            yield _removal(VERSION, version, entries, True)
        elif entries:
            yield Removal(ACKNOWLEDGEMENTS, place, _keys(entries), _bytes(entries), True)
        if anchor is not None and anchor.document is not None and place.version not in anchors | doubted:
            yield _removal(ANCHOR, anchor, [], True)


def _orphans(facts: Facts) -> Iterator[Removal]:
    """What no commit names, or no document, and nobody has touched for a day."""
    acknowledged: dict[Place, list[Entry]] = defaultdict(list)
    for word, entry in facts.listing.acknowledgements.items():
        acknowledged[word.place].append(entry)
    places = {*facts.listing.versions, *facts.listing.anchors, *acknowledged}
    for place in sorted(places):
        version, anchor = facts.listing.versions.get(place), facts.listing.anchors.get(place)
        if facts.is_committed(place):
            if anchor is not None and anchor.document is None and _are_old(facts, anchor.others):
                yield _removal(ORPHAN, anchor, [], True)
            continue
        if facts.making.may_be(place) and (place.version > facts.head or not facts.making.is_known):
            continue
        held = [each for each in (version, anchor) if each is not None]
        entries = [entry for each in held for entry in each.entries] + acknowledged[place]
        # A prune that was stopped may have decided, just now, that the rest goes.
        if _are_old(facts, (entry for entry in entries if _rest(entry) != DECISION_NAME)):
            for each in held:
                yield _removal(ORPHAN, each, [], False)
            if words := acknowledged[place]:
                yield Removal(ORPHAN, place, _keys(words), _bytes(words), False)


def _are_old(facts: Facts, entries: Iterable[Entry]) -> bool:
    ages = [_age(facts, entry) for entry in entries]
    return all(age is not None and age >= GRACE_SECONDS for age in ages)


def _removal(what: str, held: Held, acknowledgements: list[Entry], is_committed: bool) -> Removal:
    others = sorted(held.entries, key=lambda entry: _rank(held, entry, is_committed))
    entries = [*others, *sorted(acknowledgements, key=lambda entry: entry.key)]
    return Removal(what, held.place, _keys(entries), _bytes(entries), is_committed)


def _rank(held: Held, entry: Entry, is_committed: bool) -> tuple[int, str]:
    """The document first, without which the rest is nothing; before it, of what is no version yet, its prepared commit
    and the documents of its parts, so that it does not become one. Last what was decided of it, which nobody is to
    decide again while that is there."""
    rest = _rest(entry)
    if rest == DECISION_NAME:
        return 7, entry.key
    if rest == COMMIT_NAME:
        return 6 if is_committed else 0, entry.key
    if is_part_document(rest) and not is_committed:
        return 1, entry.key
    if entry is held.document:
        return 2, entry.key
    return 3 if rest == DIGESTS_NAME else 4 if is_payload(rest) else 5, entry.key


def _rest(entry: Entry) -> str:
    """What the key of an object of a version has after the version's place; nothing for any other object."""
    split = place_of_version(entry.key)
    return split[1] if split is not None else ""


def _keys(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(entry.key for entry in entries)


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries)
