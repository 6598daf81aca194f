"""What is waited for, as lines on standard error: the first after some seconds, then one a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dcr_cli.errors import one_line
from dcr_cli.waiting import Wait

SECONDS_BEFORE_LINE = 5.0
SECONDS_BETWEEN_LINES = 60.0


class Waits:
    """Hears of waits, and writes of each thing that is waited for no more than is due; from any thread."""

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}

    def hear(self, wait: Wait) -> None:
        if wait.waited_seconds < SECONDS_BEFORE_LINE:
            return
        with self._lock:
            now = self._clock()
            last = self._told.get(wait.what)
            # Many threads may wait for the same.
            if last is not None and now - last < SECONDS_BETWEEN_LINES:
                return
            self._told[wait.what] = now
        so_far = f"waited for {wait.waited_seconds:.0f} s, for {max(wait.left_seconds, 0):.0f} s more at most"
        self._write(f"waiting: {one_line(wait.what)}: {one_line(wait.facts)}; {so_far}\n")
