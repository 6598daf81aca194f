"""One version on its way: from where the log stands to a commit, whoever makes the delta (FORMAT 13.4).

What a stopped run has left is taken over here. The baseline is moved by the caller, who knows what it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dcr_cli.checkpoint.digest import State
from dcr_cli.delta.commit import Commit
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.durable import Folder
from dcr_cli.errors import ConflictError
from dcr_cli.fetch.position import Position
from dcr_cli.publisher.age import announce, is_begun, is_young, note_beginning
from dcr_cli.publisher.committing import Author, Outcome, create_commit, is_same_commit, make_commit, newest_anchor
from dcr_cli.publisher.outgoing import (
    Outgoing,
    Sending,
    SourceChangedError,
    begin_anchor,
    drop_outgoing,
    note_prepared,
    read_sending,
    was_prepared,
)
from dcr_cli.publisher.uploads import Uploads
from dcr_cli.remote.decision import ABORT, COMMIT, decide, read_decision
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, STREAMING, Hint, write_hint
from dcr_cli.remote.keys import Place, new_id, prepared_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.version import AnchorParts, Published
from dcr_cli.store.store import Store

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that exists: its commit, whether it is this publisher's, and the bytes of its commit."""

    published: Published
    outcome: Outcome
    commit_bytes: int


class Publication:
    """What a publisher that keeps its state in `home` publishes next to a log."""

    def __init__(self, store: Store, log: Log, home: Folder, author: Author) -> None:
        self._store = store
        self.log = log
        self._home = home
        self._author = author
        self.head: Published | None = None

    @property
    def history(self) -> str:
        return self.log.history

    def find_head(self, position: Position | None, seen_at: str) -> Published | None:
        """Read where the log stands, and go on from there."""
        self.head = find_head(self.log, position, seen_at)
        return self.head

    def find_own(self) -> Published | None:
        """The commit of what a stopped run was sending, if that exists; what another one was faster with is dropped."""
        sending = read_sending(self._home)
        if sending is None:
            return None
        number = self.head.version.number if self.head is not None else 0
        if sending.history == self.history and sending.place.version <= number:
            published = self.log.require(sending.place.version)
            if published.version.place == sending.place:
                return published
        if sending.history != self.history or sending.place.version <= number:
            drop_outgoing(self._home)
        return None

    def prepared(self) -> Place | None:
        """The version that this publisher has prepared and nobody has committed yet, or given up, if there is one."""
        sending = read_sending(self._home)
        if sending is None or not was_prepared(self._home) or self._is_given_up(sending):
            return None
        return sending.place

    def check_decided(self) -> None:
        """Raise ConflictError if this publisher has prepared a version which nobody has committed yet, or given up."""
        place = self.prepared()
        if place is None:
            return
        number = place.version
        facts = f"version {number} is prepared, and nobody has committed it or given it up"
        hint = f"dcr commit {shlex.quote(self._store.shown)} {number}, or the same with --abort, comes first"
        raise ConflictError(self._store.shown, facts, hint=hint)

    def sending(self) -> Sending:
        """What is sent now: what a stopped run was sending, if it follows the newest version and cannot be pruned by
        now, or a new one."""
        sending = read_sending(self._home)
        if sending is None or (sending.place.version, sending.previous) != self._next or not self._goes_on(sending):
            return self.new_sending()
        return sending

    def _goes_on(self, sending: Sending) -> bool:
        if not is_begun(self._home) or (was_prepared(self._home) and self._is_given_up(sending)):
            return False
        if is_young(self._home, announce(self._store, self._hint(sending.place, self._state))):
            return True
        write_hint(self._store, self._hint(sending.place, GIVEN_UP))
        return False

    def _is_given_up(self, sending: Sending) -> bool:
        """Whether what was prepared is so no more. Receivers that have said they have it staged have it no longer, so
        that their word must not count for another attempt."""
        if self._store.stat(prepared_key(sending.place), is_denied_absent=True) is None:
            return True
        return read_decision(self._store, self.history, sending.place) == ABORT

    def _hint(self, place: Place, state: str) -> Hint:
        return Hint(self.history, place, state, self._author.now())

    def _begin(self, place: Place) -> None:
        """Say what is being sent, and since when."""
        note_beginning(self._home, announce(self._store, self._hint(place, self._state)))

    @property
    def _state(self) -> str:
        """How far what is sent is: what receivers may stage is not taken back while it is looked at again."""
        return PREPARED if was_prepared(self._home) else STREAMING

    def anchor_sending(self, state: State) -> Sending:
        """What is sent now of a version that is an anchor of this state."""
        sending = begin_anchor(self._home, self.sending, state)
        self._begin(sending.place)
        return sending

    def new_sending(self) -> Sending:
        """A new version; what a stopped run was sending is dropped."""
        drop_outgoing(self._home)
        number, previous = self._next
        return Sending(self.history, Place(number, new_id()), previous)

    @property
    def _next(self) -> tuple[int, bytes | None]:
        """The number of the version that follows, and the commit before it."""
        return (self.head.version.number + 1, self.head.blake3) if self.head is not None else (1, None)

    @contextmanager
    def outgoing(self, sending: Sending, jobs: int) -> Iterator[Outgoing]:
        """What a delta is written to, and sent from while it comes."""
        with Uploads(jobs) as uploads:
            yield Outgoing(self._home, sending, self._store, uploads, partial(self._begin, sending.place))

    def send(self, make: Callable[[Outgoing], Result], jobs: int) -> tuple[Outgoing, Result]:
        """Have a delta made, and send it while it comes.

        `make` is called again if what a stopped run had begun to send turns out to be another delta.
        """
        for _ in range(2):
            try:
                with self.outgoing(self.sending(), jobs) as sink:
                    return sink, make(sink)
            except SourceChangedError:
                # Nothing of it is on its way any more.
                drop_outgoing(self._home)
        raise ConflictError(self._store.shown, "the source changes all the time", hint="push when nothing writes there")

    def anchor_before(self) -> int:
        """The newest version that has an anchor, before this one."""
        assert self.head is not None
        return newest_anchor(self._store, self.head)

    def prepare(self, place: Place, parts: Commit, anchor: int) -> int:
        """Let receivers stage the version, all of which is sent: the bytes of its commit to be."""
        data = self._commit_to_be(place, parts, anchor)
        note_prepared(self._home)
        self._store.put(prepared_key(place), data)
        write_hint(self._store, self._hint(place, PREPARED))
        return len(data)

    def commit(
        self, place: Place, parts: Commit | AnchorParts, anchor: int, *, is_attempt_of_many: bool = False
    ) -> Committed:
        """Make the version exist, all of which is sent. ConflictError if another one was faster with another state, or
        if it is given up.

        What may be prepared, or given up, is decided first: what this publisher has prepared, and an attempt that
        others may make too.
        """
        is_decided = is_attempt_of_many or was_prepared(self._home)
        data = (self._commit_to_be if is_decided else self._make_commit)(place, parts, anchor)
        try:
            if is_decided:
                self._decide(place)
            outcome, published = create_commit(self._store, self.log, data, place.version)
        except ConflictError:
            drop_outgoing(self._home)
            raise
        return Committed(published, outcome, len(data))

    def give_up(self, place: Place) -> None:
        """Let go of a version, some of which may be sent, that nobody is to get."""
        sending = read_sending(self._home)
        if sending is not None and sending.place == place:
            drop_outgoing(self._home)
            write_hint(self._store, self._hint(place, GIVEN_UP))

    def _commit_to_be(self, place: Place, parts: Commit | AnchorParts, anchor: int) -> bytes:
        """The bytes of the commit of a version: those with which it is prepared, if it is, and never others.

        ConflictError if these say something else.
        """
        made = self._make_commit(place, parts, anchor)
        key = prepared_key(place)
        kept = self._store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True)
        if kept is not None and not is_same_commit(kept, made, place.version, f"{self._store.shown}/{key}"):
            facts = f"version {place.version} is prepared otherwise, or without the signature of this --sign-key"
            hint = f"dcr commit --abort {shlex.quote(self._store.shown)} {place.version} gives it up"
            raise ConflictError(self._store.shown, facts, hint=hint)
        return made if kept is None else kept

    def _make_commit(self, place: Place, parts: Commit | AnchorParts, anchor: int) -> bytes:
        return make_commit(self.history, place, self.head, parts, anchor=anchor, author=self._author)

    def _decide(self, place: Place) -> None:
        """Decide that a version which may be prepared is committed; ConflictError if it was given up."""
        if decide(self._store, self.history, place, COMMIT) != COMMIT:
            raise _given_up(self._store, place)


def check_not_given_up(store: Store, history: str, place: Place) -> None:
    """Raise ConflictError if an attempt at a version was given up before."""
    if read_decision(store, history, place) == ABORT:
        raise _given_up(store, place)


def _given_up(store: Store, place: Place) -> ConflictError:
    facts = f"this attempt at version {place.version} was given up"
    hint = "run the same command again; with --part on all ranks, and with another --attempt"
    return ConflictError(store.shown, facts, hint=hint)


def find_head(log: Log, position: Position | None, seen_at: str) -> Published | None:
    """Read where a log stands: the newest version, which follows the one that was seen, if one was."""
    if position is None:
        newest = log.newest(0)
        return log.require(newest) if newest else None
    at = log.check_known(position.known, seen_at)
    return [at, *log.following(at, log.newest(position.version))][-1]
