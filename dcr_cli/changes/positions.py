"""Whether positions of changes are positions of their tensor (FORMAT 12.1). Pure.

They are checked as they lie, in the host's shared memory, a block or a window of the tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# So many elements of a tensor are looked at together where blocks lie between each other.
_WINDOW_ELEMENTS = 1 << 22

Positions = NDArray[Any]


def fault_in(blocks: Sequence[Positions], elements: int) -> str | None:
    """What is wrong with the blocks of a tensor of so many elements, unsigned integers, none of them empty: positions
    that do not ascend, that no element has, or that two blocks have; None if nothing is."""
    for positions in blocks:
        if not (positions[1:] > positions[:-1]).all():
            return "positions of a block do not ascend"
        if int(positions[-1]) >= elements:
            return f"has position {int(positions[-1])}, and only {elements} elements"
    if any(map(_has_twice, _clusters(blocks))):
        return "two blocks have the same position"
    return None


def _clusters(blocks: Sequence[Positions]) -> Iterator[list[Positions]]:
    """The blocks that lie between each other, those of strided pieces, by where they begin."""
    cluster: list[Positions] = []
    last = -1
    for positions in sorted(blocks, key=lambda positions: int(positions[0])):
        if cluster and int(positions[0]) > last:
            yield cluster
            cluster = []
        cluster.append(positions)
        last = max(last, int(positions[-1]))
    yield cluster


def _has_twice(cluster: list[Positions]) -> bool:
    """Whether two blocks of a cluster, by where they begin, have a position in common."""
    if len(cluster) == 1:
        return False
    is_taken = np.zeros(_WINDOW_ELEMENTS, np.bool_)
    pending = cluster[::-1]
    # With how many of its positions were looked at.
    active: list[tuple[Positions, int]] = []
    while pending or active:
        starts = [int(positions[done]) for positions, done in active]
        begin = min(starts + [int(positions[0]) for positions in pending[-1:]])
        end = begin + _WINDOW_ELEMENTS
        while pending and int(pending[-1][0]) < end:
            active.append((pending.pop(), 0))
        looked_at, left = [], []
        for positions, done in active:
            local = positions[done:].astype(np.int64) - begin
            local = local[: np.searchsorted(local, _WINDOW_ELEMENTS)]
            if is_taken[local].any():
                return True
            is_taken[local] = True
            looked_at.append(local)
            if done + len(local) < len(positions):
                left.append((positions, done + len(local)))
        for local in looked_at:
            is_taken[local] = False
        active = left
    return False
