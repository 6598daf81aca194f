"""What was made once and is asked for again, from several threads, in bounded memory. What it is, it does not know."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from numpy.typing import NDArray

# The last ones asked for stay, however large they are: threads that pass from one to the next ask for both in turn.
_STAY = 2
# What one costs besides its elements, about.
_ENTRY_BYTES = 1 << 10


Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Making:
    """An array that is filled by steps, in any order and by several threads, and `last` something else."""

    value: NDArray[Any]
    steps: Iterator[Step]
    last: Step


@dataclass(slots=True, eq=False)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: NDArray[Any] | None = None
    work: _Work | None = None


class Kept:
    """Arrays by keys, those asked for last; about `budget_bytes` of them, but always two."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """What `make` returned for `key`. Whoever asks while it is being made waits; what it raises, each gets anew."""
        entry = self._entry(key)
        with entry.lock:
            return entry.value if entry.value is not None else self._keep(entry, make())

    def shared(self, key: Hashable, begin: Callable[[], Making]) -> NDArray[Any]:
        """The same of an array that takes long: whoever asks while it is being made helps."""
        entry = self._entry(key)
        with entry.lock:
            if entry.value is not None:
                return entry.value
            work = entry.work = entry.work or _Work(begin())
        try:
            work.help()
        except BaseException:
            with entry.lock:
                entry.work = None if entry.work is work else entry.work
            raise
        with entry.lock:
            if entry.work is work:
                entry.work = None
                self._keep(entry, work.value)
        return work.value

    def _entry(self, key: Hashable) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            return entry

    def _keep(self, entry: _Entry, value: NDArray[Any]) -> NDArray[Any]:
        with self._lock:
            entry.value = value
            self._bytes += _cost(value)
            self._let_go()
        return value

    def _let_go(self) -> None:
        over = self._bytes - self._budget_bytes
        if over <= 0:
            return
        gone = []
        for key, entry in islice(self._entries.items(), max(0, len(self._entries) - _STAY)):
            if over <= 0:
                break
            if entry.value is not None:
                gone.append(key)
                over -= _cost(entry.value)
        for key in gone:
            del self._entries[key]
        self._bytes = over + self._budget_bytes


class _Work:
    """Steps that several threads do between them."""

    def __init__(self, making: Making) -> None:
        self.value = making.value
        self._making = making
        self._changed = threading.Condition()
        self._under_way = 0
        self._error: BaseException | None = None
        self._is_done = False

    def help(self) -> None:
        """Do steps while there are any, and return when all are done. What goes wrong, all raise who are here."""
        while (step := self._next()) is not None:
            self._do(step)
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            if not self._is_done and self._error is None:
                self._try(self._making.last)
                self._is_done = True
        if self._error is not None:
            raise self._error

    def _next(self) -> Step | None:
        with self._changed:
            step = None
            if self._error is None:
                try:
                    step = next(self._making.steps, None)
                except BaseException as error:
                    self._error = error
            self._under_way += step is not None
            return step

    def _do(self, step: Step) -> None:
        try:
            self._try(step)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _try(self, step: Step) -> None:
        try:
            step()
        except BaseException as error:
            self._error = self._error or error


def _cost(value: NDArray[Any]) -> int:
    return value.nbytes + _ENTRY_BYTES
