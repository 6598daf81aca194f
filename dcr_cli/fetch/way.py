"""Which way leads a receiver to a version: deltas alone, or an anchor and the deltas after it (pure).

What is there, and what it takes, is found out elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# An anchor is asked for beside a way that takes so many of the bytes that the receiver has.
_WORTH_LOOKING = 2


@dataclass(frozen=True, slots=True)
class Way:
    """First the anchor of a version, unless it is None, then the deltas of these versions, in order."""

    anchor: int | None
    deltas: tuple[int, ...]
    bytes: int

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that the receiver is brought to, one after the other."""
        return (*([self.anchor] if self.anchor is not None else []), *self.deltas)


class Goal(NamedTuple):
    """From which version, if it is known, to which one."""

    own: int | None
    target: int


def find_way(
    goal: Goal, deltas: Mapping[int, int], anchors: Mapping[int, int], *, missing: Collection[int] = ()
) -> Way | None:
    """Find the way that moves the fewest bytes; None if there is none.

    `deltas` and `anchors` are the bytes of those that there are, by version, but for `missing` deltas. Where two ways
    take the same, the one of deltas alone is taken, then that of the newest anchor.
    """
    usable = {version: size for version, size in deltas.items() if version not in missing}
    ways = []
    if goal.own is not None and goal.own <= goal.target:
        ways += _ways(None, goal.own, goal.target, usable, 0)
    for anchor in sorted(anchors, reverse=True):
        if anchor <= goal.target and not _is_passed(anchor, goal):
            ways += _ways(anchor, anchor, goal.target, usable, anchors[anchor])
    return min(ways, key=lambda way: way.bytes, default=None)


def _is_passed(anchor: int, goal: Goal) -> bool:
    """Whether a receiver on its way forward has an anchor behind it, or under it."""
    return goal.own is not None and goal.own <= goal.target and anchor <= goal.own


def _ways(anchor: int | None, start: int, target: int, deltas: Mapping[int, int], size: int) -> list[Way]:
    chain = tuple(range(start + 1, target + 1))
    if not all(version in deltas for version in chain):
        return []
    return [Way(anchor, chain, size + sum(deltas[version] for version in chain))]


def first_gap(goal: Goal, deltas: Collection[int], missing: Collection[int]) -> int | None:
    """The first version after the receiver's own, or up to the target, that no delta leads to."""
    versions: Sequence[int] = range((goal.own or 0) + 1, goal.target + 1)
    return next((version for version in versions if version not in deltas or version in missing), None)


def is_worth_looking(way: Way | None, own_bytes: int) -> bool:
    """Whether an anchor that nobody has told of yet could be the better way; it has about as many bytes as the
    receiver."""
    return way is None or way.bytes * _WORTH_LOOKING >= own_bytes
