"""Which tensors a loader makes something else of: what it makes is watched while some tensors have other values.

Each tensor has a number; for each digit of it there is a load in which those with 0 there are changed, and one in which
those with 1 are. What changes in one of the two is made of tensors with that digit. What changes in both is made of
several; of those that are left, some are changed at random, until no load excludes any more. An element may fail to
change, where a cast rounds two values to one; all that have changed alike are looked at together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError

# Where something is made of several tensors, so many of all are changed at a time, until so many loads in a row have
# told nothing new. For two tensors a third tells the most; one that has no part in it stays with a chance of 1 in 600.
_CHANGED_SHARE, _QUIET_LOADS, _SEED = 1 / 3, 40, 20_011

Flags = NDArray[np.bool_]
ReadWith = Callable[[Collection[str]], Mapping[str, NDArray[Any]]]


class Made(NamedTuple):
    """Elements of a stretch that are made of something, and what the whole stretch holds when nothing is changed.

    Those that turn out to change by themselves are taken out of `flags`.
    """

    flags: Flags
    reading: NDArray[Any]


class _Kind(NamedTuple):
    """Elements of a stretch that have changed in the same loads, and which tensors, by number, they may be made of."""

    stretch: str
    code: int
    is_possible: Flags


def attribute(
    names: Sequence[str], stretches: Mapping[str, Made], read_with: ReadWith, what: str
) -> dict[str, tuple[str, ...]]:
    """Find, for each of `stretches` in which something is made, the group of tensors that it is made of: those that
    something is made of together, or that something in one stretch is made of, are in one group.

    `read_with` loads all tensors, those that are named with other values, and reads the stretches. UnsupportedError for
    a stretch of which nobody can say it.
    """
    again = read_with(())
    for name, made in stretches.items():
        # A counter of loads, say, is nothing that comes from a checkpoint.
        np.logical_and(made.flags, again[name] == made.reading, out=made.flags)
    digits = max(1, (len(names) - 1).bit_length())
    codes = {name: np.zeros(int(made.flags.sum()), np.int64) for name, made in stretches.items()}
    for digit in range(digits):
        for value in (0, 1):
            changed = [each for number, each in enumerate(names) if number >> digit & 1 == value]
            reading = read_with(changed)
            for name, made in stretches.items():
                differs = (reading[name] != made.reading)[made.flags]
                codes[name] |= differs.astype(np.int64) << (2 * digit + value)
    kinds = [
        _Kind(name, code, _candidates(code, digits, len(names)))
        for name, found in codes.items()
        for code in _patterns(name, found, what)
    ]
    several = [kind for kind in kinds if _is_of_several(kind.code, digits)]
    if several:
        _exclude(names, several, lambda changed: _changed_kinds(stretches, read_with(changed), codes, several))
    groups = _Groups(len(names))
    sources: dict[str, list[int]] = {}
    for kind in kinds:
        sources.setdefault(kind.stretch, []).extend(np.flatnonzero(kind.is_possible).tolist())
    for stretch, numbers in sources.items():
        if not numbers:
            raise _unknown(what, stretch)
        groups.join(numbers)
    of = {number: tuple(names[each] for each in group) for group in groups.all() for number in group}
    return {stretch: of[numbers[0]] for stretch, numbers in sources.items()}


def _patterns(name: str, codes: NDArray[np.int64], what: str) -> list[int]:
    patterns: list[int] = np.unique(codes).tolist()
    telling = [code for code in patterns if code]
    if patterns and not telling:
        raise _unknown(what, name)
    return telling


def _unknown(what: str, name: str) -> UnsupportedError:
    return UnsupportedError(what, f"nobody can say what its loader makes {shown(name)} of", hint="use --engine")


def _is_of_several(code: int, digits: int) -> bool:
    """Whether elements have changed both with tensors that have some digit and with those that have not."""
    return any(code >> 2 * digit & 3 == 3 for digit in range(digits))


def _exclude(
    names: Sequence[str], kinds: Sequence[_Kind], changes: Callable[[Collection[str]], Sequence[bool]]
) -> None:
    """Take out of what elements of these kinds may be made of whatever can be changed without them. `changes` loads
    with other values of some tensors, and says which kinds have changed."""
    random = np.random.default_rng(_SEED)
    quiet = 0
    while quiet < _QUIET_LOADS:
        is_changed = random.random(len(names)) < _CHANGED_SHARE
        changed = [names[number] for number in np.flatnonzero(is_changed).tolist()]
        quiet += 1
        for kind, has_changed in zip(kinds, changes(changed), strict=True):
            if not has_changed and (kind.is_possible & is_changed).any():
                kind.is_possible[is_changed] = False
                quiet = 0


def _changed_kinds(
    stretches: Mapping[str, Made],
    reading: Mapping[str, NDArray[Any]],
    codes: Mapping[str, NDArray[np.int64]],
    kinds: Sequence[_Kind],
) -> list[bool]:
    differs = {name: (reading[name] != made.reading)[made.flags] for name, made in stretches.items()}
    return [bool(differs[kind.stretch][codes[kind.stretch] == kind.code].any()) for kind in kinds]


def _candidates(code: int, digits: int, count: int) -> Flags:
    """By number, the tensors that an element may be made of that changed in the loads that `code` tells of."""
    numbers = np.arange(count)
    is_possible = np.ones(count, np.bool_)
    for digit in range(digits):
        zero, one = code >> 2 * digit & 1, code >> (2 * digit + 1) & 1
        if zero != one:
            is_possible &= (numbers >> digit & 1) == one
    return is_possible


class _Groups:
    """Disjoint sets of numbers, joined as they are found to belong together."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._members: set[int] = set()

    def join(self, numbers: Sequence[int]) -> None:
        self._members.update(numbers)
        for number in numbers[1:]:
            self._parent[self._root(number)] = self._root(numbers[0])

    def all(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for number in sorted(self._members):
            found.setdefault(self._root(number), []).append(number)
        return list(found.values())

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number
