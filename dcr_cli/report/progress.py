"""Progress of long work on standard error: a live bar on a terminal, else a plain line now and then.

Short work shows nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dcr_cli.errors import size
from dcr_cli.report.people import share

if TYPE_CHECKING:
    from rich.progress import Progress as Bar, TaskID

SECONDS_BEFORE_BAR = 0.5
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES = 0.1


class Progress:
    """The callback `progress(stage, done_bytes, total_bytes)` of all long work; may be called from any thread."""

    def __init__(self, *, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if shown else None
        self._clock = clock
        self._live = self._stream is not None and self._stream.isatty()
        self._due = clock() + (SECONDS_BEFORE_BAR if self._live else SECONDS_BETWEEN_LINES)
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stream is None or self._clock() < self._due:
            return
        with self._lock:
            now = self._clock()
            if now < self._due:
                return
            if self._live and self._bar is None:
                self._bar = _new_bar()
                self._live = self._bar is not None
            self._due = now + (SECONDS_BETWEEN_UPDATES if self._live else SECONDS_BETWEEN_LINES)
            try:
                if self._bar is not None:
                    self._show_bar(self._bar, stage, done_bytes, total_bytes)
                else:
                    done = f"{size(done_bytes)} of {size(total_bytes)} ({share(done_bytes, total_bytes)})"
                    self._stream.write(f"{stage}: {done}\n")
                    self._stream.flush()
            except OSError:
                self._stream = None  # Nobody can read it; the work goes on.

    def _show_bar(self, bar: Bar, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._task is None or stage != self._stage:
            if self._task is not None:
                bar.remove_task(self._task)
            self._stage = stage
            self._task = bar.add_task(stage, total=total_bytes)
        bar.update(self._task, completed=done_bytes, total=total_bytes)


def _new_bar() -> Bar | None:
    """Start a bar on standard error; None on a terminal that cannot redraw a line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    bar.start()
    return bar
