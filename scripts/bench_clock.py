"""Times of work that is run again and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the same work, run again and again."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Run all tasks in turn, `rounds` times, so that what disturbs the machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    return {name: Times(tuple(found)) for name, found in seconds.items()}
