"""The parents of a relay, in their order: which of them is asked, and what a parent that does not answer costs.

One that failed is asked after all others until somebody has seen that it answers again: so it costs a time-out once.
One that holds another history is none. What is asked is not known here; all of it blocks, so it runs in threads.

A receiver (store/fallback.py) has nobody who looks: it passes one that failed over for a while, and its next request
finds out. So the two rules are no more alike than that both ask what is well first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import DamagedError, DcrError, LocalError, NotFoundError, TransportError, UnsupportedError
from dcr_cli.remote.history import decode_history
from dcr_cli.remote.keys import HISTORY_KEY
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store

T = TypeVar("T")

# What has failed within that time is not asked at all: others look whether it answers again.
_JUST_SECONDS = 8.0


class UnavailableError(Exception):
    """No parent answered."""


class ForbiddenError(Exception):
    """A parent answered that this relay may not do it, or cannot have it done there; no other one could."""


class WrongError(Exception):
    """What the parents have of an object is not right."""


class BehindError(Exception):
    """A parent lacks what another one has had."""


@dataclass(slots=True)
class Parent:
    """One parent: `is_relay` says that it waits where it is asked to; `failed_at` when it failed last, and `fault` how,
    None if it has answered since."""

    store: Store
    replaces: bool
    is_relay: bool = False
    is_checked: bool = False
    failed_at: float | None = None
    fault: str | None = None

    @property
    def shown(self) -> str:
        return self.store.shown


@dataclass(slots=True)
class Parents:
    """All parents. `history` is that of the remote, None before it has one; `changed` hears of a parent that has
    failed, or answers again; `clock` is there for tests."""

    all: tuple[Parent, ...]
    history: str | None = None
    changed: Callable[[Parent], None] = lambda parent: None
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[Parent]:
        """Those to ask, the first one first; those that failed come last, and not at all where that was just now, until
        `look_again` has found them well."""
        yield from [parent for parent in self.all if parent.failed_at is None]
        yield from [parent for parent in self.all if parent.failed_at is not None and not self._has_just_failed(parent)]

    @property
    def is_answering(self) -> bool:
        """Whether any has not failed when it was asked last."""
        return any(parent.failed_at is None for parent in self.all)

    @property
    def first(self) -> Parent:
        """The one that is asked first."""
        return next(iter(self), self.all[0])

    def _has_just_failed(self, parent: Parent) -> bool:
        return parent.failed_at is not None and self.clock() - parent.failed_at < _JUST_SECONDS

    def adopt(self, history: str) -> str:
        """Take a history, if none is known: the one that is known then."""
        with self._lock:
            if self.history is None:
                self.history = history
            return self.history

    def forget_history(self) -> None:
        """Take the history anew from the first parent that is asked."""
        with self._lock:
            self.history = None
            for parent in self.all:
                parent.is_checked = False

    def ask(self, question: Callable[[Parent], T], *, only_first: bool = False) -> T:
        """What the first parent that answers says, and what its own errors are, but for those that say that it cannot.

        With `only_first`, the others are not asked. UnavailableError if none answers, or those that do are behind;
        ForbiddenError, WrongError if that is what one of them came to.
        """
        ending: Exception = UnavailableError()
        for parent in self:
            if only_first and parent is not self.all[0]:
                continue
            try:
                self.prove(parent)
            except (NotFoundError, TransportError, LocalError, UnsupportedError) as error:
                self.failed(parent, error)
                continue
            try:
                found = question(parent)
            except BehindError:
                continue
            except DamagedError:
                ending = WrongError()
                continue
            except (RefusedError, UnsupportedError):
                # Perhaps the next one does.
                ending = ForbiddenError()
                continue
            except (NotFoundError, TransportError, LocalError) as error:
                # What is not there is its root.
                self.failed(parent, error)
                continue
            self.answered(parent)
            return found
        raise ending

    def look_again(self, parent: Parent) -> None:
        """See whether a parent that failed answers again, in a thread."""
        try:
            self.prove(parent)
        except DcrError as error:
            self.failed(parent, error)
        else:
            self.answered(parent)

    def answered(self, parent: Parent) -> None:
        """Note that a parent has answered."""
        had_failed = parent.fault is not None
        parent.failed_at = parent.fault = None
        if had_failed:
            self.changed(parent)

    def prove(self, parent: Parent) -> None:
        """See that a parent holds the relay's history, if it has been asked for nothing yet; TransportError if not."""
        if parent.is_checked:
            return
        data = parent.store.get(HISTORY_KEY, most_bytes=COMMIT_LIMIT)
        if data is None:
            if self.history is None:
                # Nobody has published anything yet.
                return
            raise TransportError(parent.shown, "holds no history")
        try:
            found = decode_history(data, HISTORY_KEY).id
        except DcrError as error:
            raise TransportError(parent.shown, error.facts) from error
        if self.adopt(found) != found:
            raise TransportError(parent.shown, "holds another history")
        parent.is_checked = True

    def failed(self, parent: Parent, error: DcrError) -> None:
        """Note that a parent did not answer."""
        is_new = parent.fault != error.facts
        parent.failed_at, parent.fault = self.clock(), error.facts
        # Who knows what is there when it comes back.
        parent.is_checked = False
        if is_new:
            self.changed(parent)


def get_if_there(parent: Parent, key: str, most_bytes: int) -> bytes | None:
    """Get a document; None if it is absent. TransportError if a parent lets us read nothing at all: some deny also what
    is not there, to all who may not list."""
    try:
        return parent.store.get(key, most_bytes=most_bytes)
    except RefusedError as error:
        refusal = error
    try:
        data = parent.store.get(key, most_bytes=most_bytes, is_denied_absent=True)
        parent.store.get(HISTORY_KEY, most_bytes=COMMIT_LIMIT)
    except RefusedError as error:
        raise TransportError(parent.shown, refusal.facts) from error
    return data
