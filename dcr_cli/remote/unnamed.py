"""Which of a version's or an anchor's objects nobody names: no commit, no anchor's document, and not next.json (pure).

They are what was stopped has left, or what somebody is sending; which of it goes, and when, prune decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass

from dcr_cli.remote.keys import Place, is_payload, payload_key, place_of_version
from dcr_cli.remote.listing import Held, Listing
from dcr_cli.remote.version import Published
from dcr_cli.store.backend import Entry


@dataclass(frozen=True, slots=True)
class Names:
    """Who names objects: the commits that can be read, of versions up to `head`, the place that next.json says is made
    or prepared, and, of anchors whose documents can be read, the keys of their files."""

    commits: Mapping[int, Published]
    head: int
    making: Place | None
    files: Mapping[Place, AbstractSet[str]]


def unnamed(listing: Listing, names: Names) -> list[Entry]:
    """The listed objects that nobody names. Of what cannot be read nobody knows what it names: that is left out."""
    found: list[Entry] = []
    for place, held in listing.versions.items():
        if _is_known(place, names):
            found += _unnamed_of_version(held, names.commits.get(place.version))
    for place, held in listing.anchors.items():
        if _is_known(place, names):
            found += _unnamed_of_anchor(held, names.commits.get(place.version), names.files.get(place))
    return found


def _is_known(place: Place, names: Names) -> bool:
    return place != names.making and (place.version in names.commits or place.version > names.head)


def _unnamed_of_version(held: Held, published: Published | None) -> Iterator[Entry]:
    commit = published.version.delta if published is not None and published.version.place == held.place else None
    if commit is None:
        yield from held.entries
        return
    payloads = {payload_key(held.place, index) for index in range(commit.payload_count)}
    for entry in held.others:
        known = place_of_version(entry.key)
        if known is not None and is_payload(known[1]) and entry.key not in payloads:
            yield entry


def _unnamed_of_anchor(held: Held, published: Published | None, files: AbstractSet[str] | None) -> Iterator[Entry]:
    if published is None or published.version.place != held.place or held.document is None:
        yield from held.entries
    elif files is not None:
        yield from (entry for entry in held.others if entry.key not in files)
