"""How often and how long something is tried: the only place that retries.

Which faults may pass is the backends' knowledge, told by the kind of fault.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcr_cli.stopping import pause
from dcr_cli.store.backend import PermanentError, TransientError
from dcr_cli.waiting import tell

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an operation is tried again, counted from the first failure since its last progress, and the waits
    between. What works, however slowly, is not given up.

    The n-th wait is between half and all of `first_wait_seconds` doubled n times, at most `longest_wait_seconds`.
    If `what` is waited for has a name, that is said meanwhile. `clock`, `sleep` and `dice` (a number from 0 to 1) are
    there for tests.
    """

    deadline_seconds: float = 120.0
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 15.0
    what: str = ""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = pause
    dice: Callable[[], float] = random.random


class OutOfPatienceError(PermanentError):
    """It failed each time, but not in a way that says it always will."""


class Attempts:
    """The attempts of one operation."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.progressed()

    def progressed(self) -> None:
        """Begin anew: what was tried has come further than before."""
        self._failures = 0
        self._first_failure = 0.0
        self._began = self._patience.clock()

    def failed(self, fault: TransientError) -> OutOfPatienceError | None:
        """Wait before the next attempt; if there is no time for one, return what the operation came to."""
        patience = self._patience
        now = patience.clock()
        if self._failures == 0:
            self._first_failure = now
        self._failures += 1
        longest = min(patience.first_wait_seconds * 2.0 ** min(self._failures - 1, 60), patience.longest_wait_seconds)
        # Many receivers that one failure stopped at once must not come back at once.
        wait = max(longest * (1 + patience.dice()) / 2, fault.after_seconds)
        spent = now - self._first_failure
        if spent + wait > patience.deadline_seconds:
            times = "once" if self._failures == 1 else f"{self._failures} times"
            return OutOfPatienceError(f"{fault.reason}; tried {times} in {spent:.0f} s")
        if patience.what:
            left = patience.deadline_seconds - spent
            tell(patience.what, fault.reason, waited_seconds=now - self._began, left_seconds=left)
        patience.sleep(wait)
        return None


def retrying(work: Callable[[], T], patience: Patience) -> T:
    """Return what `work` returns, called again after each TransientError while there is time."""
    attempts = Attempts(patience)
    while True:
        try:
            return work()
        except TransientError as error:
            end = attempts.failed(error)
        if end is not None:
            raise end
