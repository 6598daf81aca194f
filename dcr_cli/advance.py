"""Brings a receiver from where it stands to a version of a remote, by another way if a part of one is pruned meanwhile,
or is damaged.

It decides where to, and from where, anew for each way; going it is journey.py's matter, what is asked of a remote, and
how, that of fetch/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from dcr_cli.errors import DcrError, NotFoundError, WrongBaseError, one_line
from dcr_cli.fetch.adoption import find_standing
from dcr_cli.fetch.coming import ComingError
from dcr_cli.fetch.losses import Losses, RemovedError, SpoiledError
from dcr_cli.fetch.prepared import find_prepared, stage
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.scout import Scout
from dcr_cli.fetch.situation import Situation, look
from dcr_cli.fetch.source import Source, open_source, require_version
from dcr_cli.fetch.spool import spool_of
from dcr_cli.fetch.wish import Wish
from dcr_cli.finishing import check_overtakable
from dcr_cli.journey import Journey, Trip
from dcr_cli.receiver.view import has_layout
from dcr_cli.remote.log import no_versions
from dcr_cli.store.backend import TransientError
from dcr_cli.store.retry import Attempts
from dcr_cli.store.store import Store

# So many ways are begun; somebody who prunes faster than is fetched has to be told to keep more, and who has more than
# that damaged, that it is.
_MOST_WAYS = 8


def advance(store: Store, path: Path, wish: Wish, trip: Trip | None = None) -> PullResult:
    """Bring the checkpoint at `path` to what is wished for; what `finish` could finish has been finished.

    With `trip`, what that says was done before is part of what is told.
    What goes while it is fetched, or is damaged, is gone around, from where the receiver is then, to what is the newest
    then. What the newest version lacks is waited for, as long as for a remote that does not answer.
    """
    trip, losses = trip or Trip(store.traffic.received_bytes), Losses()
    with _telling_version(path, trip):
        result = _patiently(store, losses, lambda: _advance(store, path, wish, trip, losses))
    return replace(result, damaged=tuple(map(str, losses.spoiled)))


def _patiently(store: Store, losses: Losses, work: Callable[[], PullResult]) -> PullResult:
    """What `work` returns, called again for a while where the newest version is not all there yet."""
    attempts = Attempts(store.patience)
    while True:
        try:
            return work()
        except ComingError as error:
            end = attempts.failed(TransientError(error.facts))
            if end is not None:
                raise ComingError(error.what, end.reason) from error
            losses.look_again()


@contextmanager
def _telling_version(path: Path, trip: Trip) -> Iterator[None]:
    """Have what goes wrong meanwhile say to which version the receiver was brought all the same, if to one that nobody
    has asked for."""
    try:
        yield
    except DcrError as error:
        version = _version_on_the_way(path, trip)
        if version is not None:
            error.facts = f"{error.facts}; {one_line(str(path))} is at version {version}"
            error.args = (f"{error.what}: {error.facts}",)
            error.details = {**error.details, "version": version}
        raise


def _version_on_the_way(path: Path, trip: Trip) -> int | None:
    """The version that a receiver is at, if it was brought there on its way to another one, and is whole."""
    if not trip.applied or trip.applied[-1] == trip.target:
        return None
    with suppress(DcrError):
        situation = look(path)
        if situation.position is not None and situation.is_at_position:
            return situation.position.version
    return None


def _advance(store: Store, path: Path, wish: Wish, trip: Trip, losses: Losses) -> PullResult:
    ways = 0
    while True:
        ways += 1
        situation = look(path)
        if situation.is_marked and not wish.is_repair:
            check_overtakable(path)
        turns = store.turns
        source, target = _target(store, situation, wish)
        trip.target = target
        standing = find_standing(source, situation, target, wish)
        if store.turns > turns and ways < _MOST_WAYS:
            # What said which version is the newest is behind what the receiver has seen.
            continue
        if not trip.applied:
            trip.start = standing
        journey = Journey(source, path, wish, situation, standing, trip)
        if standing.own is not None and standing.own.version.number == target:
            return journey.stay(standing.own)
        try:
            return journey.go(Scout(source, standing.own, target, losses, prefers_deltas=has_layout(path, wish.view)))
        except (RemovedError, SpoiledError) as error:
            losses.add(error)
            if ways == _MOST_WAYS:
                raise
        except (WrongBaseError, NotFoundError):
            # The way there may have been pruned meanwhile; then one leads to the version that is the newest now.
            if ways == _MOST_WAYS or wish.version is not None or source.log.newest(target) == target:
                raise


def _target(store: Store, situation: Situation, wish: Wish) -> tuple[Source, int]:
    """The remote, and the version to go to; NotFoundError if there is none."""
    position = situation.position if not wish.is_repair else None
    source = open_source(store, wish.trust, position.history if position is not None else None)
    if wish.version is not None:
        return source, require_version(source, wish.version).version.number
    target = source.log.newest(position.newest.version if position is not None else 0)
    if not target:
        raise no_versions(store)
    return source, target


def stage_next(store: Store, path: Path, wish: Wish) -> int | None:
    """Stage the version after the one that the receiver at `path` is at, if it is prepared: its number."""
    position = look(path).position
    if position is None:
        return None
    source = open_source(store, wish.trust, position.history)
    prepared = find_prepared(source, position.known)
    if prepared is None:
        return None
    with spool_of(path) as spool:
        stage(source, path, spool, prepared, wish)
    return prepared.version.number
