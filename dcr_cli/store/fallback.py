"""Several backends that lead to one remote, used as one: each call is served by the first of them that answers.

Which that is, is decided by `order`, a pure function; that a backend failed is remembered for a while, so that one that
is dead is not asked each time, and is asked again when it may be back. What objects mean, and which of two backends
that disagree is right, is not its business, but that one which lacks what somebody has seen is behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from dcr_cli.errors import UnsupportedError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    Backend,
    DeniedError,
    Entry,
    FaultError,
    MissingRootError,
    PermanentError,
    Readable,
    Status,
    TransientError,
    Waiter,
)

T = TypeVar("T")

PASSED_OVER_SECONDS = 30.0
# One that is behind answers, and will not have caught up in a moment.
BEHIND_SECONDS = 300.0
# Of a backend, not of an object.
_FAULTS = (TransientError, PermanentError, MissingRootError)


def order(passed_over_until: Sequence[float], now: float) -> list[int]:
    """The numbers of backends in the order in which they are asked: those that are not passed over in their own, and
    then, for when these fail too, the others."""
    return sorted(range(len(passed_over_until)), key=lambda number: (passed_over_until[number] > now, number))


class FallbackBackend:
    """What the first of `backends` does that answers; that an object is absent, or access denied, is an answer.

    A body that breaks off has its backend passed over, so that whoever asks again for the rest is served by another
    one. `clock` is there for tests.
    """

    def __init__(self, backends: Sequence[Backend], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backends = tuple(backends)
        self._clock = clock
        self._lock = threading.Lock()
        self._until = [float("-inf")] * len(self._backends)

    @property
    def can_create(self) -> bool:
        return any(backend.can_create for backend in self._backends)

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        number, answer = self._first(lambda backend: backend.read(key, begin, size))
        # Two servers have tags of their own for the same bytes.
        return replace(answer, chunks=self._watched(number, answer), tag=None)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        if isinstance(data, bytes):
            self._first(lambda backend: backend.write(key, data, size))
        else:
            self._write_stream(key, data, size)

    def create(self, key: str, data: bytes) -> bool:
        def create(backend: Backend) -> bool:
            if not backend.can_create:
                raise UnsupportedError(key, "has no way to be created only if it is not there")
            return backend.create(key, data)

        return self._first(create)[1]

    def status(self, key: str) -> Status | None:
        return self._first(lambda backend: backend.status(key))[1]

    def wait(self, key: str, seconds: int) -> bool:
        return self._first(lambda backend: isinstance(backend, Waiter) and backend.wait(key, seconds))[1]

    def entries(self, prefix: str) -> Iterator[Entry]:
        return iter(self._first(lambda backend: list(backend.entries(prefix)))[1])

    def remove(self, key: str) -> None:
        self._first(lambda backend: backend.remove(key))

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        return iter(self._first(lambda backend: list(backend.leftovers(prefix)))[1])

    def turn_to(self, key: str) -> bool:
        """Have the first backend that has an object, which somebody has seen, be asked from now on: whether any has it.

        Those that lack it are passed over as being behind, unless all do. TransientError if none that answers has it
        and another one does not answer.
        """
        behind: list[int] = []
        unknown: FaultError | None = None
        for number, backend in enumerate(self._backends):
            try:
                is_there = backend.status(key) is not None
            except (AbsentError, DeniedError):
                is_there = False
            except _FAULTS as fault:
                self._pass_over(number, PASSED_OVER_SECONDS)
                unknown = fault
                continue
            if is_there:
                for each in behind:
                    self._pass_over(each, BEHIND_SECONDS)
                return True
            behind.append(number)
        if unknown is not None:
            raise TransientError(f"{unknown.reason}, and what answers instead is behind") from unknown
        return False

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def _order(self) -> list[int]:
        with self._lock:
            return order(self._until, self._clock())

    def _pass_over(self, number: int, seconds: float) -> None:
        with self._lock:
            self._until[number] = max(self._until[number], self._clock() + seconds)

    def _first(self, work: Callable[[Backend], T]) -> tuple[int, T]:
        """What the first backend that answers does, and its number; a fault of all is one that may pass if any is."""
        faults: list[FaultError] = []
        unsupported: UnsupportedError | None = None
        for number in self._order():
            try:
                return number, work(self._backends[number])
            except _FAULTS as fault:
                self._pass_over(number, PASSED_OVER_SECONDS)
                faults.append(fault)
            except UnsupportedError as error:
                # A mirror that is only read is none that is dead.
                unsupported = unsupported or error
        if unsupported is not None and not faults:
            raise unsupported
        raise next((fault for fault in reversed(faults) if isinstance(fault, TransientError)), faults[-1])

    def _write_stream(self, key: str, data: Readable, size: int) -> None:
        """Write what can be read once: another backend writes it when all of it is tried again."""
        number = self._order()[0]
        try:
            self._backends[number].write(key, data, size)
        except _FAULTS as fault:
            self._pass_over(number, PASSED_OVER_SECONDS)
            if self._is_any_left():
                raise TransientError(fault.reason) from fault
            raise

    def _is_any_left(self) -> bool:
        with self._lock:
            return any(until <= self._clock() for until in self._until)

    def _watched(self, number: int, answer: Answer) -> Iterator[bytes]:
        """The body of an answer; if it breaks off, or ends early, its backend is passed over."""
        size = 0
        try:
            for chunk in answer.chunks:
                size += len(chunk)
                yield chunk
        except _FAULTS as fault:
            self._pass_over(number, PASSED_OVER_SECONDS)
            raise TransientError(fault.reason) from fault
        if answer.announced is not None and size < answer.announced:
            self._pass_over(number, PASSED_OVER_SECONDS)
