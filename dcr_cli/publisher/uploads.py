"""Puts objects into a store in a few threads, a bounded number of them ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

# More at a time helps no link, and costs memory.
MOST_AT_ONCE = 8
# So many wait for each that is under way.
_AHEAD = 2


class Uploads:
    """Work that goes out; a context manager. What goes wrong is raised by the next call, and ends the rest.

    `submit` waits while too many are waiting, so that what produces them goes no faster than they leave.
    """

    def __init__(self, jobs: int) -> None:
        threads = max(1, min(jobs, MOST_AT_ONCE))
        self._pool = ThreadPoolExecutor(threads, "dcr-upload")
        self._slots = threading.Semaphore(threads * _AHEAD)
        self._lock = threading.Lock()
        self._futures: list[Future[None]] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._error = self._error or error
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done, soon."""
        self._slots.acquire()
        self._raise()
        with self._lock:
            self._futures = [future for future in self._futures if not future.done()]
            self._futures.append(self._pool.submit(self._do, work))

    def finish(self) -> None:
        """Wait until all is done."""
        while self._futures:
            self._futures.pop().result()
        self._raise()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            self._slots.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
