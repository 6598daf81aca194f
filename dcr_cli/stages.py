"""How long each stage of some work took, and how many bytes went through it, added up over all threads.

Threads work side by side, so that stages together take longer than the clock says. Who prints it is report's matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: what went through it, and how long threads were busy with it."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """How some work was done: on which device, why on that one, and its stages in order."""

    device: str
    why: str
    stages: tuple[Stage, ...]


class Stages:
    """Collects what stages took; in the order in which they first ended, and from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Stage] = {}

    def add(self, name: str, count_bytes: int, seconds: float) -> None:
        """Add to a stage."""
        with self._lock:
            before = self._found.get(name, Stage(name, 0, 0.0))
            self._found[name] = Stage(name, before.bytes + count_bytes, before.seconds + seconds)

    @contextmanager
    def timed(self, name: str, count_bytes: int) -> Iterator[None]:
        """Add what the body takes, unless it fails."""
        start = time.perf_counter()
        yield
        self.add(name, count_bytes, time.perf_counter() - start)

    def all(self) -> tuple[Stage, ...]:
        """Every stage so far."""
        with self._lock:
            return tuple(self._found.values())
