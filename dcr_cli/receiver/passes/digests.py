"""What a pass over tensors finds out: digests of sources and targets, and the first block that could not be decoded.

What it means is told by who asked for the pass.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first block that could not be decoded."""

    row: int
    payload: int
    facts: str


class Digests:
    """What a pass found out: per row the digests of its source and of its target and how many elements its pieces
    changed, per base tensor its digest."""

    def __init__(self, rows: int, bases: int) -> None:
        self.source = np.zeros((rows, 4), np.uint32)
        self.target = np.zeros((rows, 4), np.uint32)
        self.base = np.zeros((bases, 4), np.uint32)
        self.changed = np.zeros(rows, np.int64)
        self.failure: Failure | None = None
        self.bytes_done = 0
        self._lock = threading.Lock()

    def add(self, tally: Tally) -> None:
        with self._lock:
            for sums, numbers, found in (
                (self.source, tally.rows, tally.sources),
                (self.target, tally.rows, tally.targets),
                (self.base, tally.bases, tally.base_sums),
            ):
                if numbers:
                    np.add.at(sums, numbers, np.concatenate(found))
            for row, changed in tally.changed:
                self.changed[row] += changed
            self.bytes_done += tally.bytes

    def fail(self, row: int, payload: int, error: ValueError) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = Failure(row, payload, str(error))


class Tally:
    """What one task adds to the digests."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.sources: list[Sums] = []
        self.targets: list[Sums] = []
        self.bases: list[int] = []
        self.base_sums: list[Sums] = []
        self.changed: list[tuple[int, int]] = []
        self.bytes = 0
