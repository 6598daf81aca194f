"""Strided boxes: do any two of a tensor's pieces share an element? (FORMAT 4)

What a box is worth is not asked here; it is known to lie within its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAIR_LIMIT = 1 << 18
# Each pass tells apart what an axis can tell apart within the groups of the pass before; grids need one.
PASSES = 4

Boxes = NDArray[np.int64]
Groups = NDArray[np.int64]


class EntangledError(ValueError):
    """More pairs would have to be compared than anybody should wait for."""


def find_overlap(groups: Groups, boxes: Boxes) -> tuple[int, int] | None:
    """Find two boxes of one group that share an element: their indices, or None.

    `boxes` are [box, (start, step, count), axis], all of one rank. Two boxes meet only if they meet on every axis. So
    boxes of a group are split, axis by axis, where ranges do not touch and where residues modulo a common step
    differ; that separates every grid of slices, interleaved ones too, in the time of a sort. What no axis can separate
    is compared pair by pair, exactly, up to PAIR_LIMIT pairs; EntangledError beyond.
    """
    members = np.arange(len(groups))
    groups = _renumber(groups)
    for _ in range(PASSES):
        members, groups = _without_singles(members, groups)
        before = _count(groups)
        for axis in range(boxes.shape[2]):
            if len(groups):
                groups = _split(groups, *(boxes[members, part, axis] for part in range(3)))
        if _count(groups) == before:
            break
    members, groups = _without_singles(members, groups)
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, np.int64)
    if int((sizes * (sizes - 1) // 2).sum()) > PAIR_LIMIT:
        raise EntangledError(f"more than {PAIR_LIMIT} pairs of pieces cannot be told apart by one axis")
    for one, two in _pairs(members, groups):
        axes = zip(boxes[one].T.tolist(), boxes[two].T.tolist(), strict=True)
        if all(_progressions_meet(*axis, *other) for axis, other in axes):
            return one, two
    return None


def _split(groups: Groups, starts: NDArray[Any], steps: NDArray[Any], counts: NDArray[Any]) -> Groups:
    """Refine `groups` by what one axis separates."""
    steps = np.where(counts > 1, steps, 0)
    order = np.argsort(groups, kind="stable")
    moduli = np.gcd.reduceat(steps[order], _firsts(groups[order]))[groups]
    residues = np.where(moduli > 1, starts % np.maximum(moduli, 1), 0)
    ends = starts + (counts - 1) * steps
    order = np.lexsort((starts, residues, groups))
    is_new = np.ones(len(groups), bool)
    is_new[1:] = (np.diff(groups[order]) != 0) | (np.diff(residues[order]) != 0)
    # Within a part, a range that starts after all before it have ended begins another part. Ranks stand in for the
    # coordinates, so that one running maximum serves all parts: a later part's keys are above all of an earlier one's.
    ranks = np.unique(np.concatenate((starts[order], ends[order])), return_inverse=True)[1]
    base = (np.cumsum(is_new) - 1) * (2 * len(groups))
    reach = np.maximum.accumulate(base + ranks[len(groups) :])
    is_new[1:] |= base[1:] + ranks[1 : len(groups)] > reach[:-1]
    refined = np.empty_like(groups)
    refined[order] = np.cumsum(is_new) - 1
    return refined


def _firsts(sorted_groups: Groups) -> NDArray[np.intp]:
    return np.flatnonzero(np.concatenate(([True], sorted_groups[1:] != sorted_groups[:-1])))


def _renumber(groups: Groups) -> Groups:
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


def _count(groups: Groups) -> int:
    return int(groups.max()) + 1 if len(groups) else 0


def _without_singles(members: NDArray[np.intp], groups: Groups) -> tuple[NDArray[np.intp], Groups]:
    if not len(groups):
        return members, groups
    shared = np.bincount(groups)[groups] > 1
    return members[shared], _renumber(groups[shared])


def _pairs(members: NDArray[np.intp], groups: Groups) -> Iterator[tuple[int, int]]:
    if not len(groups):
        return
    order = np.argsort(groups, kind="stable")
    for group in np.split(members[order], _firsts(groups[order])[1:]):
        indices = group.tolist()
        for position, one in enumerate(indices):
            for two in indices[position + 1 :]:
                yield one, two


def _progressions_meet(start: int, step: int, count: int, start2: int, step2: int, count2: int) -> bool:
    """Whether two arithmetic progressions have a member in common."""
    low = max(start, start2)
    high = min(start + (count - 1) * step, start2 + (count2 - 1) * step2)
    if low > high:
        return False
    common = gcd(step, step2)
    if (start2 - start) % common:
        return False
    # The members of both, were they endless, are one residue modulo the least common multiple of their steps.
    turns = (start2 - start) // common * pow(step // common, -1, step2 // common) % (step2 // common)
    member = start + step * turns
    period = step // common * step2
    return member + -(-(low - member) // period) * period <= high
