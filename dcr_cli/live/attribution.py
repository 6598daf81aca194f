"""Which tensors a loader makes something else of: what it makes is watched while some tensors have other values.

Each tensor has a number; for each digit of it there is a load in which those with 0 there are changed, and one in which
those with 1 are. What changes in the one only is made of tensors with that digit. An element may fail to change, where
a cast rounds two values to one; so more tensors than it is made of may be named, but never fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError

Flags = NDArray[np.bool_]
ReadWith = Callable[[Collection[str]], Mapping[str, NDArray[Any]]]


class Made(NamedTuple):
    """Elements of a stretch that are made of something, and what the whole stretch holds when nothing is changed.

    Those that turn out to change by themselves are taken out of `flags`.
    """

    flags: Flags
    reading: NDArray[Any]


def attribute(
    names: Sequence[str], stretches: Mapping[str, Made], read_with: ReadWith, what: str
) -> tuple[tuple[str, ...], ...]:
    """Group the tensors that what is made in `stretches` is made of: those that something is made of together are in
    one group.

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
    groups = _Groups(len(names))
    for name, found in codes.items():
        for code in _patterns(name, found, what):
            groups.join(_candidates(code, digits, len(names)))
    return tuple(tuple(names[number] for number in group) for group in groups.all())


def _patterns(name: str, codes: NDArray[np.int64], what: str) -> list[int]:
    patterns: list[int] = np.unique(codes).tolist()
    telling = [code for code in patterns if code]
    if patterns and not telling:
        raise UnsupportedError(what, f"nobody can say what its loader makes {shown(name)} of", hint="use --engine")
    return telling


def _candidates(code: int, digits: int, count: int) -> list[int]:
    """The numbers of the tensors that an element may be made of that changed in the loads that `code` tells of."""
    numbers = np.arange(count)
    is_possible = np.ones(count, np.bool_)
    for digit in range(digits):
        zero, one = code >> 2 * digit & 1, code >> (2 * digit + 1) & 1
        if zero != one:
            is_possible &= (numbers >> digit & 1) == one
    return np.flatnonzero(is_possible).tolist()


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
