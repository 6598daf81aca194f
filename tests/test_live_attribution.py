"""Which tensors something is made of, by loads in which some of them have other values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcr_cli.errors import UnsupportedError
from dcr_cli.live.attribution import attribute, separating

NAMES = [f"tensor.{number}" for number in range(37)]


# What is added to the numbers of tensors that are left alone in a pair, and of those that are changed.
PAIRS = ((1, 1000), (1000, -1000), (-1000, 1000))
MOST = 30


class Module:
    """Stretches whose elements are each made of some tensors, by number, by `make` of numbers that are never the same
    for two tensors; `deaf` says of an element up to which pair nothing changes it."""

    def __init__(
        self,
        stretches: Mapping[str, Sequence[Sequence[int]]],
        make: Callable[[list[int]], int] = sum,
        deaf: Mapping[int, int] | None = None,
    ) -> None:
        self.stretches, self.make, self.deaf = stretches, make, deaf or {}
        self.loads = 0

    def read(self, changed: Collection[str], pair: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        self.loads += 1
        numbers = {NAMES.index(name) for name in changed}
        values = [number + PAIRS[pair % len(PAIRS)][number in numbers] for number in range(len(NAMES))]
        return {
            name: np.array(
                [
                    self.make([values[number] for number in sources]) * (pair >= self.deaf.get(place, 0))
                    for place, sources in enumerate(elements)
                ]
            )
            for name, elements in self.stretches.items()
        }

    def groups(self) -> tuple[tuple[str, ...], ...]:
        made = {name: np.ones(len(elements), np.bool_) for name, elements in self.stretches.items()}
        found = attribute(NAMES, made, self.read, pairs=(len(PAIRS), MOST), what="loader")
        return tuple(sorted(set(found.values()), key=lambda group: NAMES.index(group[0])))


def named(*groups: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(NAMES[number] for number in group) for group in groups)


def test_one_tensor_for_each_element_takes_few_loads() -> None:
    module = Module({**{f"a.{number}": [[number]] for number in range(0, 37, 3)}, "b": [[36], [36]], "c": [[1]]})
    assert module.groups() == named(*([number] for number in sorted([*range(0, 37, 3), 1])))
    # 14 groups have codes of 6 places, for each pair.
    assert module.loads == 3 + 2 * 6 + len(PAIRS) * (1 + 6)
    module = Module({"a": [[5]]})
    assert module.groups() == named([5]) and module.loads == 3 + 2 * 6 + len(PAIRS) * 2


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 36), min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
    st.sampled_from([sum, min, max]),
)
def test_what_is_made_of_several_is_in_one_group(elements: list[list[int]], make: Callable[[list[int]], int]) -> None:
    """None that has a part in something is missed, nor in two groups, also where only the least or the largest of them
    shows; one more may be named, by a small chance."""
    found = Module({f"a.{place}": [sources] for place, sources in enumerate(elements)}, make).groups()
    of = {name: group for group in found for name in group}
    for sources in elements:
        assert len({of[NAMES[number]] for number in sources}) == 1
    assert len(of) == sum(map(len, found))


def test_two_tensors_far_apart_are_told_from_all_others() -> None:
    # Their numbers differ in every digit.
    assert Module({"scaled": [[15, 16]] * 50, "other": [[3]]}).groups() == named([3], [15, 16])


def test_what_is_in_one_stretch_is_in_one_group() -> None:
    module = Module({"qkv": [[3], [3], [20, 21]], "o": [[5]], "bias": [[21], [30]]})
    assert module.groups() == named([3, 20, 21, 30], [5])


def test_an_element_that_does_not_change_at_first_is_not_dropped() -> None:
    assert Module({"a": [[1], [2], [1]]}, deaf={1: 1}).groups() == named([1, 2])
    assert Module({"a": [[1], [2], [1]]}, deaf={1: 2}).groups() == named([1, 2])
    assert Module({"a": [[1], [2], [1]]}, deaf={1: len(PAIRS) + 1}).groups() == named([1, 2])
    with pytest.raises(UnsupportedError, match="nobody can say what its loader makes a of"):
        Module({"a": [[1], [2], [1]], "b": [[2]]}, deaf={1: MOST}).groups()


def test_a_part_that_shows_only_beside_other_values_is_found() -> None:
    """As that of a tensor behind a gate, which the values of the first pair close."""

    def gated(values: list[int]) -> int:
        gate, value = values
        return gate + (value if gate < 0 else 0)

    assert Module({"a": [[4, 9]]}, gated).groups() == named([4, 9])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 20, 100])
def test_of_each_two_groups_each_is_left_alone_while_the_other_changes(count: int) -> None:
    sets = list(separating(count))
    assert len(sets) <= 2 + 1.5 * count.bit_length()
    for one in range(count):
        assert any(one in resting for resting in sets)
        for other in set(range(count)) - {one}:
            assert any(one in resting and other not in resting for resting in sets)
