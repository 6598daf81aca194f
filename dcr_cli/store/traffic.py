"""What a store asked for and moved, and how fast it may: one count and one limit for all its transfers.

It counts what passes between a store and its backend; what a backend's library sends beside that, or sends again, is
not seen here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dcr_cli.stopping import check, pause
from dcr_cli.store.backend import Answer, Backend, Chooser, Entry, Readable, Status, Waiter

# How long the limit may have been left unused for it to be used at once afterwards.
_BURST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """How often a backend was asked, and how many bytes of objects went up and down. A large put is one request."""

    requests: int
    sent_bytes: int
    received_bytes: int


class Meter:
    """Counts, and holds back what would be more than `limit_bytes_per_second`, up and down together.

    `clock` and `sleep` are there for tests. Any number of threads may use it.
    """

    def __init__(
        self,
        limit_bytes_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = pause,
    ) -> None:
        if limit_bytes_per_second is not None and not limit_bytes_per_second > 0:
            raise ValueError(f"a limit of {limit_bytes_per_second} bytes per second lets nothing through")
        self._limit = limit_bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._requests = 0
        self._sent_bytes = 0
        self._received_bytes = 0
        # When all that was let through so far will have been paid for.
        self._paid_at = clock()

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            return Traffic(self._requests, self._sent_bytes, self._received_bytes)

    def asked(self) -> None:
        """Count a request."""
        with self._lock:
            self._requests += 1

    def sending(self, size: int) -> None:
        """Count bytes that are about to go up, when they may."""
        with self._lock:
            self._sent_bytes += size
            wait = self._wait(size)
        if wait > 0:
            self._sleep(wait)

    def received(self, size: int) -> None:
        """Count bytes that came down, and return when more may come."""
        with self._lock:
            self._received_bytes += size
            wait = self._wait(size)
        if wait > 0:
            self._sleep(wait)

    def _wait(self, size: int) -> float:
        if self._limit is None:
            return 0.0
        now = self._clock()
        # A part may be larger than what a second allows: it is let through, and what follows waits for it.
        self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + size / self._limit
        return self._paid_at - now


class Metered:
    """A backend that does what another does, and has it counted and held back."""

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self._backend = backend
        self._meter = meter

    @property
    def can_create(self) -> bool:
        return self._backend.can_create

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        self._meter.asked()
        answer = self._backend.read(key, begin, size)
        return replace(answer, chunks=self._metered(answer.chunks))

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        self._meter.asked()
        if isinstance(data, bytes):
            self._meter.sending(len(data))
            self._backend.write(key, data, size)
        else:
            self._backend.write(key, _Sending(data, self._meter), size)

    def create(self, key: str, data: bytes) -> bool:
        self._meter.asked()
        self._meter.sending(len(data))
        return self._backend.create(key, data)

    def status(self, key: str) -> Status | None:
        self._meter.asked()
        return self._backend.status(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._meter.asked()
        return self._backend.entries(prefix)

    def remove(self, key: str) -> None:
        self._meter.asked()
        self._backend.remove(key)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        self._meter.asked()
        return self._backend.leftovers(prefix)

    @property
    def can_wait(self) -> bool:
        """Whether the backend is a Waiter."""
        return isinstance(self._backend, Waiter)

    def wait(self, key: str, seconds: int) -> bool:
        if not isinstance(self._backend, Waiter):
            return False
        self._meter.asked()
        return self._backend.wait(key, seconds)

    def turn_to(self, key: str) -> bool:
        if not isinstance(self._backend, Chooser):
            return False
        self._meter.asked()
        return self._backend.turn_to(key)

    def close(self) -> None:
        self._backend.close()

    def _metered(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            check()
            self._meter.received(len(chunk))
            yield chunk


class _Sending:
    """A body on its way up."""

    def __init__(self, data: Readable, meter: Meter) -> None:
        self._data = data
        self._meter = meter

    def read(self, size: int, /) -> bytes:
        check()
        part = self._data.read(size)
        self._meter.sending(len(part))
        return part
