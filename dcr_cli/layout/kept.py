"""What was made once and is asked for again, from several threads, in bounded memory. What it is, it does not know."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

# The last ones asked for stay, however large they are: threads that pass from one to the next ask for both in turn.
_STAY = 2


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
                    self._bytes += value.nbytes
                    self._let_go()
            return entry.value

    def _let_go(self) -> None:
        for key in list(self._entries)[:-_STAY]:
            if self._bytes <= self._budget_bytes:
                return
            value = self._entries[key].value
            if value is not None:
                del self._entries[key]
                self._bytes -= value.nbytes
