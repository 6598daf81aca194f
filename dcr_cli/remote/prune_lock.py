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

# It is left behind if something there is so much younger.
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
        self._data = json.dumps({"owner": secrets.token_hex(16)}).encode() + b"\n"
        self.now: float | None = None

    def __enter__(self) -> Self:
        if not self._store.put_if_absent(PRUNE_KEY, self._data):
            self._take_over()
        self._renewed = self._clock()
        status = self._store.stat(PRUNE_KEY)
        self.now = status.modified if status is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What went wrong before is the cause to report, not that letting go failed after it.
        with nullcontext() if error is None else suppress(DcrError):
            if self._is_ours():
                self._store.delete(PRUNE_KEY)

    def keep(self) -> None:
        """Say from time to time that this prune is alive; ConflictError if another one has taken over."""
        if self._clock() - self._renewed >= _RENEWED_AFTER_SECONDS:
            if not self._is_ours():
                raise ConflictError(self._what, "was taken over by another prune", hint="run this one again later")
            self._store.put(PRUNE_KEY, self._data)
            self._renewed = self._clock()

    @property
    def _what(self) -> str:
        return f"{self._store.shown}/{PRUNE_KEY}"

    def _take_over(self) -> None:
        # Nothing may be written to learn what time it is there, but it is no earlier than what the newest object says.
        modified = {entry.key: entry.modified for entry in self._store.list()}
        known = [time for time in modified.values() if time is not None]
        taken = modified.get(PRUNE_KEY)
        age = max(known) - taken if taken is not None else None
        if PRUNE_KEY in modified and (age is None or age < LEFT_AFTER_SECONDS):
            facts = "another prune is at work, or was killed lately"
            hint = f"if none is at work, remove {PRUNE_KEY} there"
            raise ConflictError(self._what, facts, hint=hint)
        self._store.put(PRUNE_KEY, self._data)

    def _is_ours(self) -> bool:
        return self._store.get(PRUNE_KEY, most_bytes=_LIMIT) == self._data
