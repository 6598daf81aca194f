"""Which version of a remote a receiver is at: what it noted, or what its bytes say.

It reads and changes nothing.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.errors import DamagedError, IncompleteError, NotFoundError, UnsupportedError, WrongBaseError
from dcr_cli.fetch.download import fetch_manifest
from dcr_cli.fetch.held import Held, changes_since_record, read_held, recorded_skips
from dcr_cli.fetch.listing import Listing, listing_of_anchor, listing_of_manifest
from dcr_cli.fetch.losses import RemovedError, SpoiledError
from dcr_cli.fetch.position import Position
from dcr_cli.fetch.situation import Situation
from dcr_cli.fetch.source import Source, commits_between, require_version
from dcr_cli.fetch.wish import Wish
from dcr_cli.receiver.cut.shards import can_be_cut
from dcr_cli.receiver.survey import open_root
from dcr_cli.receiver.view import has_layout, layout_blake3
from dcr_cli.remote.documents import fetch_anchor
from dcr_cli.remote.log import ADOPTED_VERSIONS
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published

_REPAIR = "dcr pull --repair brings it to a version whatever it holds, and fetches what differs from an anchor"

_SHOWN_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """The version that a receiver is at, None if that is none that counts.

    `is_adopted`: its bytes alone said so. `held` and `listing` are what was found in it, and what the version has.
    `has_lost_newest`: the log has no more the newest version that the receiver has seen, and its user goes back.
    """

    own: Published | None
    is_adopted: bool = False
    held: Held | None = None
    listing: Listing | None = None
    has_lost_newest: bool = False


def find_standing(source: Source, situation: Situation, target: int, wish: Wish) -> Standing:
    """Find the version that a receiver is at; WrongBaseError if it holds something else, or what nobody has signed who
    is trusted.

    Its note counts if the log still has that version, and the newest one that it has seen; where another version is
    asked for by its number, one that the log has no more is passed over. A log that went backwards is refused also
    where what the receiver holds is none.
    """
    if situation.is_new:
        return Standing(None)
    position = situation.position
    if position is None or position.history != source.log.history:
        return _find(source, situation, target, wish, None)
    noted = _noted(source, position, wish, str(situation.path))
    standing = _find(source, situation, target, wish, noted if is_trusted(position, wish.trust) else None)
    return replace(standing, has_lost_newest=wish.version is not None and not source.log.has(position.newest))


def _find(source: Source, situation: Situation, target: int, wish: Wish, noted: Published | None) -> Standing:
    """Find the version that a receiver is at; `noted` is the one that it has noted, if that counts."""
    if wish.is_repair and wish.version is not None:
        return Standing(None)
    layout = wish.view.layout
    if layout is not None and situation.held is not None and situation.held.layout != layout_blake3(layout):
        # It was recorded through another one, which says nothing of what this one leads to.
        situation = replace(situation, held=None)
    if situation.is_marked or wish.is_repair:
        return Standing(None)
    if noted is not None and situation.is_at_position:
        return Standing(noted)
    if wish.version is not None and situation.is_at_position:
        # Its log has lost that version; what is asked for by its number is come to by an anchor.
        return Standing(None)
    held = situation.held or _read(source, situation, target, wish)
    if noted is not None and (found := _match(source, held, noted)) is not None:
        return found
    if wish.trust.is_asked_for:
        facts = "is not known to be built from signed versions"
        raise _refused(situation, held, facts, f"{_REPAIR} that is signed")
    newest = source.log.newest(target)
    first = max(1, newest - ADOPTED_VERSIONS + 1)
    versions = commits_between(source, require_version(source, first), newest)
    for version in sorted(versions, reverse=True):
        if (found := _match(source, held, versions[version])) is not None:
            return replace(found, is_adopted=True)
    which = f"is none of the versions {first} to {newest}" if first < newest else f"is not version {newest}"
    raise _refused(situation, held, f"what it holds {which} of {source.shown}", _REPAIR)


def _refused(situation: Situation, held: Held, facts: str, hint: str) -> WrongBaseError:
    """Say of what a receiver holds also what was changed since its record was written, if it has one that tells."""
    path = str(situation.path)
    with open_root(path) as root:
        changes = changes_since_record(root, held)
    if not changes:
        return WrongBaseError(path, facts, hint=hint)
    more = f" and {len(changes) - _SHOWN_CHANGES:,} more" if len(changes) > _SHOWN_CHANGES else ""
    facts = f"{facts}; since dcr left it, {', '.join(changes[:_SHOWN_CHANGES])}{more}"
    return WrongBaseError(path, facts, hint=f"dcr verify {shlex.quote(path)} tells all that was changed; {hint}")


def is_trusted(position: Position, trust: Trust) -> bool:
    """Whether what a receiver was brought to is a base for whoever trusts these keys."""
    return not trust.is_asked_for or any(bytes.fromhex(key) in trust.keys for key in position.trusted)


def list_files(source: Source, published: Published) -> Listing | None:
    """Which files a version has; None if that is not there any more, SpoiledError if it is there, and damaged."""
    commit = published.version.delta
    if commit is None:
        return _listing_of_anchor(source, published)
    fault: SpoiledError | None = None
    try:
        return listing_of_manifest(fetch_manifest(source.store, published, commit, None)[1])
    except RemovedError:
        pass
    except SpoiledError as error:
        fault = error
    # It may have an anchor that says so; one that cannot be used is as good as none.
    listing = None
    with suppress(DamagedError, WrongBaseError, UnsupportedError):
        listing = _listing_of_anchor(source, published)
    if listing is None and fault is not None:
        raise fault
    return listing


def _listing_of_anchor(source: Source, published: Published) -> Listing | None:
    anchor = fetch_anchor(source.store, published, source.trust)
    return listing_of_anchor(anchor) if anchor is not None else None


def _noted(source: Source, position: Position, wish: Wish, seen_at: str) -> Published | None:
    """The version that a receiver has noted that it is at, if its log still has it."""
    if wish.version is None:
        if position.newer is not None:
            source.log.check_known(position.newer, seen_at)
        return source.log.check_known(position.known, seen_at)
    if wish.is_repair:
        # Whatever it is at, it goes to that version.
        return None
    found = source.log.read(position.version, is_denied_absent=True)
    return found if found is not None and found.blake3 == position.commit else None


def _read(source: Source, situation: Situation, newest: int, wish: Wish) -> Held:
    with open_root(situation.path) as root:
        skip = recorded_skips(root)
        if not skip:
            # A damaged newest version is no reason not to see which one the receiver is at.
            with suppress(SpoiledError):
                listing = list_files(source, require_version(source, newest))
                skip = listing.skipped if listing is not None else ()
        try:
            return read_held(root, skip, wish.effort, wish.view)
        except (DamagedError, NotFoundError) as error:
            place = Path(os.path.realpath(situation.path))
            is_incomplete = isinstance(error, IncompleteError)
            if is_incomplete or not has_layout(place, wish.view) or not can_be_cut(place, wish.view, skip):
                raise
            raise type(error)(error.what, error.facts, hint=_REPAIR) from error


def _match(source: Source, held: Held, published: Published) -> Standing | None:
    """Whether what is held is a version; its files are asked for only where the tensors alone are the same."""
    target = published.version.target
    if held.content != target.content:
        return None
    if held.is_state(target, None):
        return Standing(published, held=held)
    listing = list_files(source, published)
    return Standing(published, held=held, listing=listing) if held.is_state(target, listing) else None
