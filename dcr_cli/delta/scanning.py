"""What scans parts, whoever does it, and how much of them at once.

On the CPU that is scan.py, or who compares boxes; on a device, device_scan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.delta.encoding import Elements
from dcr_cli.delta.scan import TASK_BYTES, Part, Scanned


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is in memory at once: a task holds at least so many bytes of the target where it can, and so many tasks
    are begun before the first one's results are taken."""

    task_bytes: int
    tasks: int


def pace_of(jobs: int) -> Pace:
    """How so many threads work through parts."""
    return Pace(TASK_BYTES, 2 * jobs)


class Scans(Protocol):
    """Compares and digests parts of two checkpoints, in any number of threads.

    `chosen_row` is the row that is worked on, once all is chosen for it: blocks of it that come now are part of no
    sample.
    """

    chosen_row: int | None

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        """Scan parts, and say in their order what was found."""

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part again, in memory of their own; an absent base is empty."""

    def is_sent_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor that has a base is coded whole, whatever changed in it."""


class ScansRuns(Scans, Protocol):
    """One that also reads parts for somebody else to compare: parts with two sides that follow each other in a row."""

    def read_base(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        """Fill the buffer with the base's bytes of a run."""

    def read_target(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        """Fill it with the target's."""

    def offset_of(self, run: Sequence[Part]) -> int | None:
        """At which byte of its tensor a run begins; None where not all of it lies there in one piece."""
