"""prune.json: one prune at a time (FORMAT 13.1), and the time by the store's own clock.

Two prunes at once would remove nothing that both of them keep: the lock spares work and puzzling results. That is why
one that has been killed may be taken over by its age alone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Self

from dcr_cli.errors import ConflictError, DcrError
from dcr_cli.remote.keys import PRUNE_KEY
from dcr_cli.store.store import Store

# One that is as old was left by a prune that was killed: one that lives renews its own.
LEFT_AFTER_SECONDS = 3600.0
_RENEWED_AFTER_SECONDS = 600.0
_LIMIT = 1 << 16


class PruneLock:
    """The lock of a remote while it is pruned; a context manager.

    ConflictError if another prune holds it. `now` is the store's time when it was taken, None if the store tells none.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._owner = secrets.token_hex(16)
        self.now: float | None = None

    def __enter__(self) -> Self:
        try:
            if not self._store.put_if_absent(PRUNE_KEY, _encode(self._owner)):
                self._take_over()
            self._renewed = self._clock()
            status = self._store.stat(PRUNE_KEY)
        except BaseException:
            # What is left behind keeps every other prune away for an hour.
            with suppress(DcrError):
                self._let_go()
            raise
        self.now = status.modified if status is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What went wrong before is the cause to report, not that letting go failed after it.
        with nullcontext() if error is None else suppress(DcrError):
            self._let_go()

    def _let_go(self) -> None:
        if self._is_ours():
            self._store.delete(PRUNE_KEY)

    def keep(self) -> None:
        """Say from time to time that this prune is alive; ConflictError if another one has taken over."""
        if self._clock() - self._renewed >= _RENEWED_AFTER_SECONDS:
            if not self._is_ours():
                raise self._conflict("was taken over by another prune")
            self._store.put(PRUNE_KEY, _encode(self._owner))
            self._renewed = self._clock()

    def _take_over(self) -> None:
        data, status = self._store.get(PRUNE_KEY, most_bytes=_LIMIT), self._store.stat(PRUNE_KEY)
        if data is None:
            raise self._conflict("another prune was at work just now")
        owner, since = _decode(data)
        if since is None and status is not None:
            since = status.modified
        # What is there is put again, so that the store tells what time it is there; since when it has been, is kept.
        self._store.put(PRUNE_KEY, _encode(owner, since))
        status = self._store.stat(PRUNE_KEY)
        if since is None or status is None or status.modified is None:
            raise self._conflict("another prune is at work")
        age = status.modified - since
        if age < LEFT_AFTER_SECONDS:
            raise self._conflict(f"another prune is at work, for {age:.0f} s")
        self._store.put(PRUNE_KEY, _encode(self._owner))

    def _conflict(self, facts: str) -> ConflictError:
        hint = (
            f"if none is, it was killed: wait until it is {LEFT_AFTER_SECONDS / 3600:.0f} h old, or remove {PRUNE_KEY}"
        )
        return ConflictError(f"{self._store.shown}/{PRUNE_KEY}", facts, hint=hint)

    def _is_ours(self) -> bool:
        data = self._store.get(PRUNE_KEY, most_bytes=_LIMIT)
        return data is not None and _decode(data)[0] == self._owner


def _encode(owner: str, since: float | None = None) -> bytes:
    """Who holds a lock; and since when, if somebody else has put it again."""
    return json.dumps({"owner": owner} | ({"since": since} if since is not None else {})).encode() + b"\n"


def _decode(data: bytes) -> tuple[str, float | None]:
    """Whatever is no lock is that of an owner without a name."""
    try:
        document = json.loads(data)
        return str(document["owner"]), float(document["since"]) if "since" in document else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", None
