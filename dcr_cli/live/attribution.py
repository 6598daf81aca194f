"""Which tensors a loader makes something else of: what it makes is watched while some tensors have other values.

Each tensor has a number; for each digit of it there is a load in which those with 0 there are changed, and one in which
those with 1 are. What changes in one of the two is made of tensors with that digit. What changes in both is made of
several; of those that are left, some are changed at random, until no load excludes any more.

That something does not change proves little: it may be the largest of several, masked, or rounded to the same. So what
was found is tried: some groups are left alone, and all other tensors changed, in all `pairs` of values, until each
group has been left alone while each other tensor was changed. Where what is made of a group changes then, or something
has not changed at all, all is done again with the next pair of values, and what either tells belongs together.

For N tensors that are made into g groups these are 2 log2 N loads, about 50 more where something is made of several,
and then, for each pair of values, a few more than log2 g: with eight pairs 35 to 45 for one group of 500 tensors, about
100 for 500 groups. A part that a tensor has in something and that none of the pairs shows, such as beyond a bound that
none of their values reaches, is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import UnsupportedError

# Where something is made of several tensors, so many of all are changed at a time, until so many loads in a row have
# told nothing new. For two tensors a third tells the most; one that has no part in it stays with a chance of 1 in 600.
_CHANGED_SHARE, _QUIET_LOADS, _SEED = 1 / 3, 40, 20_011
# So many pairs of values in a row that told nothing new are enough.
_QUIET_PAIRS = 5
_NOBODY = -1
_HINT = "use --engine: what it makes of which tensors cannot be told"

Elements = NDArray[Any]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]
ReadWith = Callable[[Collection[str], int], Mapping[str, Elements]]


class _Kind(NamedTuple):
    """Elements of a stretch that have changed in the same loads, and which tensors, by number, they may be made of."""

    stretch: str
    code: int
    is_possible: Flags


def attribute(
    names: Sequence[str], made: Mapping[str, Flags], read_with: ReadWith, *, pairs: tuple[int, int], what: str
) -> dict[str, tuple[str, ...]]:
    """Find, for each stretch that has elements flagged in `made`, the group of tensors that they are made of: those
    that something is made of together, or that something in one stretch is made of, are in one group.

    `read_with` loads all tensors, those that are named with the changed values of a pair, by its number, the others
    with what they have while left alone, and reads what is flagged. By so many of `pairs` as the first number says what
    was found is tried; up to the second one are used where something has not changed yet, such as whether a number is
    odd. Elements that change by themselves are taken out of the flags. UnsupportedError where nobody can say what
    something is made of.
    """
    reading = read_with((), 0)
    again = read_with((), 0)
    for name, flags in made.items():
        # A counter of loads, say, is nothing that comes from a checkpoint.
        flags[flags] = again[name] == reading[name]
    if not any(flags.any() for flags in made.values()):
        return {}
    return _Attribution(names, made, read_with).sources(pairs, what)


class _Attribution:
    """What is known of made elements: for each, one of the tensors that it is made of; and which belong together."""

    def __init__(self, names: Sequence[str], made: Mapping[str, Flags], read_with: ReadWith) -> None:
        self._names = names
        self._read = read_with
        self._digits = max(1, (len(names) - 1).bit_length())
        self._owners: dict[str, Numbers] = {
            name: np.full(int(flags.sum()), _NOBODY, np.int64) for name, flags in made.items()
        }
        self._groups = _Groups(len(names))

    def sources(self, pairs: tuple[int, int], what: str) -> dict[str, tuple[str, ...]]:
        tried, most = pairs
        wrong: list[str] = []
        unknown, quiet = 0, 0
        for pair in range(most):
            self._look(pair)
            left = sum(int((owners == _NOBODY).sum()) for owners in self._owners.values())
            wrong = [name for name, owners in self._owners.items() if (owners == _NOBODY).any()]
            wrong = wrong or sorted(self._misjudged(tried))
            if not wrong:
                return self._by_stretch()
            quiet = quiet + 1 if left == unknown else 0
            unknown = left
            if pair + 1 >= tried and quiet >= _QUIET_PAIRS:
                break
        raise UnsupportedError(what, f"nobody can say what its loader makes {listed(wrong)} of", hint=_HINT)

    def _by_stretch(self) -> dict[str, tuple[str, ...]]:
        """The group of each stretch; groups that something in one stretch is made of become one."""
        owned = {name: np.unique(owners).tolist() for name, owners in self._owners.items() if len(owners)}
        for numbers in owned.values():
            self._groups.join(numbers)
        of = {number: tuple(self._names[each] for each in group) for group in self._groups.all() for number in group}
        return {name: of[numbers[0]] for name, numbers in owned.items()}

    # Looking

    def _look(self, pair: int) -> None:
        """Note what one pair of values tells."""
        left = self._read((), pair)
        codes = {name: np.zeros(len(owners), np.int64) for name, owners in self._owners.items()}
        for digit in range(self._digits):
            for value in (0, 1):
                changed = [each for number, each in enumerate(self._names) if number >> digit & 1 == value]
                for name, found in self._read(changed, pair).items():
                    codes[name] |= (found != left[name]).astype(np.int64) << (2 * digit + value)
        kinds = [
            _Kind(name, code, self._candidates(code))
            for name, found in codes.items()
            for code in np.unique(found).tolist()
            if _is_complete(code, self._digits)
        ]

        def changes(changed: Collection[str], several: Sequence[_Kind]) -> list[bool]:
            differs = {name: found != left[name] for name, found in self._read(changed, pair).items()}
            return [bool(differs[each.stretch][codes[each.stretch] == each.code].any()) for each in several]

        if several := [kind for kind in kinds if _is_of_several(kind.code, self._digits)]:
            _exclude(self._names, several, changes)
        for kind in kinds:
            self._note(kind, codes[kind.stretch] == kind.code)

    def _candidates(self, code: int) -> Flags:
        """By number, the tensors that an element may be made of that changed in the loads that `code` tells of."""
        numbers = np.arange(len(self._names))
        is_possible = np.ones(len(numbers), np.bool_)
        for digit in range(self._digits):
            zero, one = code >> 2 * digit & 1, code >> (2 * digit + 1) & 1
            if zero != one:
                is_possible &= (numbers >> digit & 1) == one
        return is_possible

    def _note(self, kind: _Kind, is_of_it: Flags) -> None:
        sources = np.flatnonzero(kind.is_possible).tolist()
        if sources:
            owners = self._owners[kind.stretch]
            known = np.unique(owners[is_of_it]).tolist()
            self._groups.join([*sources, *(each for each in known if each != _NOBODY)])
            owners[is_of_it] = sources[0]

    # Trying

    def _misjudged(self, pairs: int) -> set[str]:
        """The stretches that have elements that change although all that they are made of, as far as is known, is left
        alone."""
        groups = self._groups.all()
        numbers = np.full(len(self._names), _NOBODY, np.int64)
        for number, group in enumerate(groups):
            numbers[group] = number
        of_groups = {name: numbers[owners] for name, owners in self._owners.items()}
        found = set()
        for pair in range(pairs):
            left = self._read((), pair)
            for resting in separating(len(groups)):
                kept = {number for each in resting for number in groups[each]}
                changed = [name for number, name in enumerate(self._names) if number not in kept]
                for name, reading in self._read(changed, pair).items():
                    if ((reading != left[name]) & np.isin(of_groups[name], resting)).any():
                        found.add(name)
            if found:
                break
        return found


def separating(count: int) -> Iterator[list[int]]:
    """Few sets of numbers below `count`: for each two of these, one in which the first is and the second is not."""
    length = next(length for length in range(1, count + 2) if comb(length, max(length // 2, 1)) >= count)
    codes = list(islice(combinations(range(length), max(length // 2, 1)), count))
    for place in range(length):
        if found := [number for number, code in enumerate(codes) if place in code]:
            yield found


def _is_complete(code: int, digits: int) -> bool:
    """Whether elements have changed with tensors of some value of each digit, as all that are made of one do unless two
    values happen to come to the same: then another pair of values tells more."""
    return all(code >> 2 * digit & 3 for digit in range(digits))


def _is_of_several(code: int, digits: int) -> bool:
    """Whether elements have changed both with tensors that have some digit and with those that have not."""
    return any(code >> 2 * digit & 3 == 3 for digit in range(digits))


def _exclude(
    names: Sequence[str],
    kinds: Sequence[_Kind],
    changes: Callable[[Collection[str], Sequence[_Kind]], Sequence[bool]],
) -> None:
    """Take out of what elements of these kinds may be made of whatever can be changed without them. `changes` loads
    with other values of some tensors, and says which kinds have changed."""
    random = np.random.default_rng(_SEED)
    quiet = 0
    while quiet < _QUIET_LOADS:
        is_changed = random.random(len(names)) < _CHANGED_SHARE
        changed = [names[number] for number in np.flatnonzero(is_changed).tolist()]
        quiet += 1
        for kind, has_changed in zip(kinds, changes(changed, kinds), strict=True):
            if not has_changed and (kind.is_possible & is_changed).any():
                kind.is_possible[is_changed] = False
                quiet = 0


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
