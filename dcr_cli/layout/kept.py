"""What was made once and is asked for again, from several threads, in bounded memory. What it is, it does not know."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from numpy.typing import NDArray

# The last ones asked for stay, however large they are: threads that pass from one to the next ask for both in turn.
_STAY = 2
# What one costs besides its elements, about.
_ENTRY_BYTES = 1 << 10


@dataclass(slots=True, eq=False)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: NDArray[Any] | None = None


class Kept:
    """Arrays by keys, those asked for last; about `budget_bytes` of them, but always two."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """What `make` returned for `key`. Whoever asks while it is being made waits; what it raises, each gets anew."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
        with entry.lock:
            if entry.value is None:
                value = make()
                with self._lock:
                    entry.value = value
                    self._bytes += _cost(value)
                    self._let_go()
            return entry.value

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


def _cost(value: NDArray[Any]) -> int:
    return value.nbytes + _ENTRY_BYTES
