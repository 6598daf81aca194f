"""Follows a remote: brings a checkpoint to each new version as soon as it is there, until it is stopped.

One round is a pull, or a look whether there is news; how long it waits between them, and what for where the remote
itself can wait, is decided here. What a stop leaves, the next run finishes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from dcr_cli.advance import advance
from dcr_cli.arguments import check_path
from dcr_cli.engine.engines import DEFAULT_SECONDS as DEFAULT_ENGINE_SECONDS
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    HookError,
    NotFoundError,
    TransportError,
    UnsupportedError,
    WrongBaseError,
)
from dcr_cli.fetch.ahead import Ahead
from dcr_cli.fetch.following import FollowLock
from dcr_cli.fetch.hook import DEFAULT_SECONDS
from dcr_cli.fetch.leaving import begin_leaving
from dcr_cli.fetch.opening import check_addresses, open_remote
from dcr_cli.fetch.prepared import find_prepared, is_staged, stage
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.source import Source, open_source, require_version
from dcr_cli.fetch.spool import Spool, spool_of
from dcr_cli.fetch.wish import Wish, make_wish
from dcr_cli.finishing import finish
from dcr_cli.journey import Trip
from dcr_cli.receiver.change import REPLACE
from dcr_cli.receiver.install.gather import Effort, Progress
from dcr_cli.remote.hint import GIVEN_UP, STREAMING, Hint, read_hint
from dcr_cli.remote.keys import Place, commit_key
from dcr_cli.remote.log import Known
from dcr_cli.remote.version import Published
from dcr_cli.stopping import pause
from dcr_cli.store.store import Store
from dcr_cli.work import threads

__all__ = ["Arrival", "follow"]

# What passes, perhaps; a follower tells of it once and goes on.
_PASSING = (TransportError, ConflictError, HookError, NotFoundError)
# What a version is refused for that is prepared, not signed or not right.
_REFUSED = (DamagedError, WrongBaseError, UnsupportedError)
# However small a checkpoint is, so much of what is made of it is fetched ahead.
_SMALL_BYTES = 64 << 20
# In so many rounds once, it is seen that the log still has the version that the receiver is at.
_CHECK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a follower waits between rounds: twice as long each time that nothing is new, by chance a little less.

    A remote that can wait for news is asked to, for `remote_seconds` each time. What is being made counts as near for
    `patient_seconds` after it has moved last. `sleep`, `clock` and `dice` (a number from 0 to 1) are there for tests.
    """

    shortest_seconds: float = 0.5
    longest_seconds: float = 10.0
    patient_seconds: float = 60.0
    remote_seconds: int = 30
    sleep: Callable[[float], None] = pause
    clock: Callable[[], float] = time.monotonic
    dice: Callable[[], float] = random.random

    def wait(self, quiet_rounds: int) -> None:
        longest = min(self.shortest_seconds * 2.0 ** min(quiet_rounds, 30), self.longest_seconds)
        # Many receivers that one commit woke must not all come back at once.
        self.sleep(longest * (1 + self.dice()) / 2)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that a follower has brought its receiver to.

    `at` is when, for people. `within_seconds`: its commit was made at most so long before, by this host's clock alone:
    it was not there yet when the log was looked at last; None if it never was before. Its payloads have
    `payload_bytes`.
    """

    result: PullResult
    at: str
    within_seconds: float | None
    payload_bytes: int


def follow(
    remote: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    tell: Callable[[DcrError], None],
    mode: str = REPLACE,
    keep_previous: bool = False,
    storage_options: Mapping[str, object] | None = None,
    fallbacks: Sequence[str | os.PathLike[str]] = (),
    trusted_keys: Sequence[str] = (),
    receiver: str | None = None,
    receiver_key: str | os.PathLike[str] | None = None,
    hook: str | None = None,
    hook_seconds: float = DEFAULT_SECONDS,
    engines: Sequence[str] = (),
    engine_seconds: float = DEFAULT_ENGINE_SECONDS,
    engine_token: str | None = None,
    layout: str | os.PathLike[str] | None = None,
    publish_changes: str | os.PathLike[str] | None = None,
    limit_bytes_per_second: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Arrival]:
    """Bring `checkpoint` to each new version of `remote`, for ever: yield an Arrival after each time.

    Arguments are those of `pull`. What passes by itself, a remote that does not answer, or holds nothing yet, a hook
    that fails, is handed to `tell`, once, and tried again; all else that `pull` raises is raised, and ends it, as does
    ConflictError if somebody else follows into `checkpoint`.
    """
    wish = make_wish(
        Effort(threads(jobs), progress),
        mode=mode,
        keep_previous=keep_previous,
        trusted_keys=trusted_keys,
        receiver=receiver,
        receiver_key=receiver_key,
        hook=hook,
        hook_seconds=hook_seconds,
        engines=engines,
        engine_seconds=engine_seconds,
        engine_token=engine_token,
        layout=layout,
        publish_changes=publish_changes,
    )
    check_path(checkpoint, "checkpoint")
    check_addresses(checkpoint, remote, fallbacks, publish_changes)
    path = Path(checkpoint)
    begin_leaving(wish)
    finish(path, wish)
    with open_remote(
        remote, fallbacks, storage_options, receiver=receiver, limit_bytes_per_second=limit_bytes_per_second
    ) as store:
        yield from Follower(store, path, wish, tell).arrivals()


@dataclass(slots=True)
class Follower:
    """One receiver that follows a remote through an open store. `tell` hears of troubles, each kind once in a row."""

    store: Store
    path: Path
    wish: Wish
    tell: Callable[[DcrError], None]
    pace: Pace = field(default_factory=Pace)
    _own: Published | None = None
    _source: Source | None = None
    _ahead: Ahead | None = None
    _refused: Place | None = None
    # What rounds have done since the last one that ended well, and could not tell of.
    _trip: Trip | None = None
    _hint: Hint | None = None
    _moved_at: float = 0.0
    _looked_at: float | None = None
    _quiet: int = 0
    _rounds: int = 0
    # Whether the remote's last wait was over at once; and when it is asked again whether it waits, if it does not.
    _is_hasty: bool = False
    _asks_at_round: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield each arrival, for ever. Raises what does not pass by itself: damage, a wrong base, a full disk, and
        ConflictError if somebody else follows into the checkpoint."""
        with FollowLock(self.path) as lock:
            yield from self._arrivals(lock)

    def _arrivals(self, lock: FollowLock) -> Iterator[Arrival]:
        trouble: type[DcrError] | None = None
        while True:
            lock.take()
            begun_at = self.pace.clock()
            try:
                arrival = self._round()
            except _PASSING as error:
                self._own = None
                if trouble is not type(error):
                    trouble = type(error)
                    self.tell(error)
                arrival = None
            else:
                trouble = None
            if arrival is not None:
                self._quiet, self._is_hasty = 0, False
                yield arrival
                continue
            if not self._wait_for_news(begun_at):
                self.pace.wait(self._quiet)
                self._quiet += 1

    def _wait_for_news(self, begun_at: float) -> bool:
        """Have the remote wait for what comes next, after a round without an arrival: whether the next round may begin.

        One that has news each time that it is asked, and nothing comes of them, is left alone as one that cannot wait.
        """
        was_hasty, self._is_hasty = self._is_hasty, False
        if self._own is None or self._rounds < self._asks_at_round or (was_hasty and self._moved_at < begun_at):
            return False
        asked_at = self.pace.clock()
        try:
            # Payloads and hints are news that end it too. By the key of a payload a commit could be missed that came
            # after this round has looked; by this one no more than a payload, which then comes with the next news.
            key = commit_key(self._own.version.number + 1)
            is_waited_for = self.store.wait(key, self.pace.remote_seconds)
        except TransportError:
            # What is wrong the next round is told too.
            return False
        if not is_waited_for:
            self._asks_at_round = self._rounds + _CHECK_EVERY
            return False
        self._is_hasty = self.pace.clock() - asked_at < self.pace.shortest_seconds
        if not self._is_hasty:
            self._quiet = 0
        return True

    def _round(self) -> Arrival | None:
        self._rounds += 1
        own, source, begun_at = self._own, self._source, self.pace.clock()
        if own is not None and source is not None and self._rounds % _CHECK_EVERY:
            number = own.version.number
            if source.log.newest(number) == number:
                self._looked_at = begun_at
                self._look_ahead(source, own)
                return None
        if self._trip is None:
            self._trip = Trip(self.store.traffic.received_bytes)
        result = advance(self.store, self.path, self.wish, self._trip)
        self._source = open_source(self.store, self.wish.trust, None) if source is None else source
        self._own = require_version(self._source, result.version)
        arrival = self._arrival(result, self._own) if not result.already else None
        # Whatever comes next came after this round began.
        self._looked_at = begun_at
        self._trip = None
        if arrival is not None:
            self._ahead = None
        return arrival

    def _look_ahead(self, source: Source, own: Published) -> None:
        """Fetch what there is of the version that is being made, as its hint says; stage it if it is prepared."""
        hint = read_hint(source.store)
        if hint is not None and hint != self._hint:
            self._hint, self._moved_at = hint, self.pace.clock()
        if hint is None or hint.history != own.version.history or hint.place.version != own.version.number + 1:
            return
        if hint.state == GIVEN_UP:
            if self._ahead is not None:
                self._ahead = None
                with spool_of(self.path) as spool:
                    spool.keep(())
            return
        if self._ahead is None or self._ahead.place != hint.place:
            # A delta is about as large as what it makes, at most.
            self._ahead = Ahead(own.version.history, hint.place, 2 * look(self.path).bytes + _SMALL_BYTES)
        with spool_of(self.path) as spool:
            if hint.state == STREAMING:
                if self._ahead.fetch(source.store, spool):
                    self._moved_at = self.pace.clock()
                # While something is being made, its commit is near; one who was stopped, or killed, makes nothing.
                if self.pace.clock() - self._moved_at < self.pace.patient_seconds:
                    self._quiet = 0
            elif hint.place != self._refused and not is_staged(spool, hint.place, self.wish):
                self._ahead.fetch(source.store, spool)
                try:
                    self._stage(source, own, spool)
                except _REFUSED as error:
                    # A hint may say anything: what is not committed ends nothing.
                    self._refused = hint.place
                    self.tell(error)

    def _stage(self, source: Source, own: Published, spool: Spool) -> None:
        prepared = find_prepared(source, Known(own.version.history, own.version.number, own.blake3))
        if prepared is not None:
            stage(source, self.path, spool, prepared, self.wish)

    def _arrival(self, result: PullResult, published: Published) -> Arrival:
        now, within = datetime.now(UTC), None
        if self._looked_at is not None:
            within = self.pace.clock() - self._looked_at
        if self._ahead is not None and self._ahead.place == published.version.place:
            early = min(self._ahead.bytes, result.reused_bytes)
            result = replace(result, fetched_before_commit_bytes=early)
        delta = published.version.delta
        payload_bytes = delta.payload_bytes if delta is not None else 0
        return Arrival(result, now.isoformat(timespec="milliseconds"), within, payload_bytes)
