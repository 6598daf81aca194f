"""Removes from a remote what nobody needs any more, beside pushes and pulls that go on meanwhile.

What that is, is decided in retention.py; here it is found out what is there, and removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.remote.decision import ABORT, decide
from dcr_cli.remote.documents import fetch_anchor
from dcr_cli.remote.hint import GIVEN_UP, require_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import (
    HINT_KEY,
    VERSIONS,
    Place,
    anchor_file_key,
    anchor_key,
    decision_key,
    digests_key,
    is_payload,
    place_of_anchor,
    place_of_version,
)
from dcr_cli.remote.listing import Held, Listing, sort_entries
from dcr_cli.remote.log import Log
from dcr_cli.remote.prune_lock import PruneLock
from dcr_cli.remote.version import Published
from dcr_cli.retention import Facts, Making, PrunePlan, Terms, plan_prune
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

Progress = Callable[[str, int, int], None]
# So many commits are asked for at once.
_AT_ONCE = 16
KEEP, KEEP_WITHIN_SECONDS, LEASE_SECONDS = 64, 24 * 3600.0, 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Outlived:
    """What goes of one version. `what` is version (its delta), anchor, acknowledgements, or orphan: what no commit
    names, or an anchor that was never finished."""

    what: str
    version: int
    id: str
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Leaseholder:
    """A receiver that was seen within the lease, and the version that it was at."""

    receiver: str
    version: int


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What a prune removed, or would remove.

    `outlived` is what the plan says, with `leftovers` of killed writers; `deleted_objects` and `freed_bytes` what was
    removed of it, nothing in a dry run.
    `kept` are the versions whose deltas stay and `anchors` those whose anchors do. `in_doubt` are anchors that lack
    some of their objects: they stay, and lead nowhere. Where `is_head_reachable` is false, nobody who has nothing can
    get the newest version, and nothing that a commit names is removed. `unknown` are keys that mean nothing; they stay,
    and where next.json is one of them, so does all that no commit names.
    """

    remote: str
    history: str
    head: int
    dry_run: bool
    kept: tuple[int, ...]
    anchors: tuple[int, ...]
    receivers: tuple[Leaseholder, ...]
    outlived: tuple[Outlived, ...]
    leftovers: int
    outlived_objects: int
    outlived_bytes: int
    deleted_objects: int
    freed_bytes: int
    is_head_reachable: bool
    in_doubt: tuple[int, ...]
    unknown: tuple[str, ...]


def prune(
    remote: str | Path,
    *,
    keep: int = KEEP,
    keep_within: float = KEEP_WITHIN_SECONDS,
    lease: float = LEASE_SECONDS,
    dry_run: bool = False,
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> PruneResult:
    """Remove what is neither of the newest `keep` versions, nor younger than `keep_within` seconds, nor needed to get
    those, one of the newest two anchors, or by a receiver that was seen within `lease` seconds.

    Ages are by the store's own time; a dry run writes nothing, and so goes by this machine's. Stopped anywhere, it
    leaves a way to every version whose manifest is there, and the next prune goes on. Raises ConflictError while
    another prune is at work, NotFoundError, DamagedError, TransportError, UsageError.
    """
    if keep < 1:
        raise UsageError("keep", f"a number from 1 on expected, found {keep}", hint="the newest version is always kept")
    if keep_within < 0 or lease < 0:
        raise UsageError("prune", "a duration is less than nothing")
    terms = Terms(keep, keep_within, lease)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(remote, storage_options, is_single_writer=single_writer))
        history = require_history(store)
        log = Log(store, history.id)
        if dry_run:
            facts = _look(store, log, time.time())
            return _result(store, log, facts, plan_prune(facts, terms), None)
        lock = stack.enter_context(PruneLock(store))
        facts = _look(store, log, lock.now)
        plan = plan_prune(facts, terms)
        removed = _carry_out(store, log, plan, lock, progress)
        return _result(store, log, facts, plan, removed)


def _look(store: Store, log: Log, now: float | None) -> Facts:
    """Find out what is there. The newest version is found first: all of it is there by then, and so in the listing.
    What is listed first and read after cannot be missing from what is read."""
    head = log.newest(0)
    listing = sort_entries(store.list())
    making = _making(store)
    versions = sorted(_versions_of(listing, head) | ({head} - {0}))
    with ThreadPoolExecutor(_AT_ONCE, "dcr-prune") as pool:
        published = dict(zip(versions, pool.map(log.require, versions), strict=True))
    deltas: set[int] = set()
    anchors: set[int] = set()
    in_doubt: set[int] = set()
    for version, each in published.items():
        place = each.version.place
        if _is_whole_delta(each, listing.versions.get(place)):
            deltas.add(version)
        anchor = listing.anchors.get(place)
        if anchor is not None and anchor.document is not None:
            (anchors if _is_whole_anchor(store, each, anchor) else in_doubt).add(version)
    return Facts(
        listing=listing,
        head=head,
        head_anchor=published[head].version.anchor if head else 0,
        ids={version: each.version.place.id for version, each in published.items()},
        deltas=frozenset(deltas),
        anchors=frozenset(anchors),
        in_doubt=frozenset(published[version].version.place for version in in_doubt),
        making=making,
        leftovers=store.leftovers(),
        now=now,
    )


def _versions_of(listing: Listing, head: int) -> set[int]:
    """The committed versions of which something is listed beside the commit."""
    places: set[Place] = {*listing.versions, *listing.anchors, *(each.place for each in listing.acknowledgements)}
    return {place.version for place in places if 1 <= place.version <= head}


def _is_whole_delta(published: Published, held: Held | None) -> bool:
    """Whether all objects that a version's commit counts are listed."""
    commit = published.version.delta
    if commit is None or held is None or held.document is None or held.document.size != commit.manifest_bytes:
        return False
    digests = digests_key(published.version.place)
    payloads = [entry.size for entry in held.others if _is_payload(entry.key)]
    return (len(payloads), sum(payloads)) == (commit.payload_count, commit.payload_bytes) and any(
        entry.key == digests and entry.size == commit.digests_bytes for entry in held.others
    )


def _is_payload(key: str) -> bool:
    split = place_of_version(key)
    return split is not None and is_payload(split[1])


def _is_whole_anchor(store: Store, published: Published, held: Held) -> bool:
    """Whether an anchor's document is right and all files that it names are listed."""
    try:
        anchor = fetch_anchor(store, published)
    except DamagedError:
        return False
    listed = {entry.key: entry.size for entry in held.others}
    place = published.version.place
    return anchor is not None and all(
        listed.get(anchor_file_key(place, file.path)) == file.size for file in anchor.files
    )


@dataclass(slots=True)
class _Removed:
    objects: int = 0
    bytes: int = 0


def _carry_out(store: Store, log: Log, plan: PrunePlan, lock: PruneLock, progress: Progress | None) -> _Removed:
    removed = _Removed()
    total = _bytes(plan)
    for removal in plan.removals:
        is_attempt = not removal.is_committed and removal.keys[0].startswith(VERSIONS)
        if is_attempt and not _is_given_up(store, log, removal.place):
            continue
        for key in removal.keys:
            lock.keep()
            if not removal.is_committed and _is_taken_up(store, log, removal.place):
                break
            if _is_anchored_again(store, removal.place, key):
                break
            store.delete(key)
            removed.objects += 1
        else:
            removed.bytes += removal.bytes
            if is_attempt and decision_key(removal.place) not in removal.keys:
                store.delete(decision_key(removal.place))
        if progress is not None:
            progress("prune", removed.bytes, total)
    for entry in plan.leftovers:
        lock.keep()
        store.delete_leftover(entry.key)
        removed.objects += 1
        removed.bytes += entry.size
    return removed


def _bytes(plan: PrunePlan) -> int:
    return sum(removal.bytes for removal in plan.removals) + sum(entry.size for entry in plan.leftovers)


def _is_given_up(store: Store, log: Log, place: Place) -> bool:
    """Give up an attempt at a version that nobody has touched for a day; False if it is to be committed.

    Ranks that were stopped may go on with theirs under the same id while it is removed: what is given up is not made.
    """
    if _is_taken_up(store, log, place):
        return False
    # What is to be committed, and has lost, cannot be any more.
    return decide(store, log.history, place, ABORT) == ABORT or log.read(place.version) is not None


def _is_taken_up(store: Store, log: Log, place: Place) -> bool:
    """Whether what nobody had touched for a day has been committed meanwhile, or is gone on with."""
    published = log.read(place.version, is_denied_absent=True)
    if published is not None:
        return published.version.place == place
    return _making(store).may_be(place)


def _is_anchored_again(store: Store, place: Place, key: str) -> bool:
    """Whether what is to be removed is a file of an anchor whose document, which goes first, is there again."""
    document = anchor_key(place)
    return place_of_anchor(key) == place and key != document and store.stat(document) is not None


def _making(store: Store) -> Making:
    """The version that somebody is said to make. Whoever does may have been stopped for days, and goes on with what it
    has sent."""
    try:
        hint = require_hint(store)
    except DamagedError:
        return Making(None, is_known=False)
    return Making(hint.place if hint is not None and hint.state != GIVEN_UP else None)


def _result(store: Store, log: Log, facts: Facts, plan: PrunePlan, removed: _Removed | None) -> PruneResult:
    outlived = tuple(
        Outlived(each.what, each.place.version, each.place.id, len(each.keys), each.bytes) for each in plan.removals
    )
    return PruneResult(
        remote=store.shown,
        history=log.history,
        head=facts.head,
        dry_run=removed is None,
        kept=tuple(sorted(plan.kept_versions & facts.deltas)),
        anchors=tuple(sorted(plan.kept_anchors)),
        receivers=tuple(Leaseholder(lease.receiver, lease.version) for lease in plan.leases),
        outlived=outlived,
        leftovers=len(plan.leftovers),
        outlived_objects=sum(each.objects for each in outlived) + len(plan.leftovers),
        outlived_bytes=_bytes(plan),
        deleted_objects=removed.objects if removed is not None else 0,
        freed_bytes=removed.bytes if removed is not None else 0,
        is_head_reachable=plan.is_head_reachable,
        in_doubt=tuple(sorted(place.version for place in facts.in_doubt)),
        unknown=(*facts.listing.unknown, *([] if facts.making.is_known else [HINT_KEY])),
    )
