"""Which tensors something is made of, by loads in which some of them have other values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcr_cli.errors import UnsupportedError
from dcr_cli.live.attribution import Flags, Made, attribute

NAMES = [f"tensor.{number}" for number in range(37)]


class Module:
    """Stretches whose elements are each made of some tensors, by number, some of which make no difference."""

    def __init__(self, stretches: Mapping[str, Sequence[Sequence[int]]], deaf: Flags | None = None) -> None:
        self.stretches, self.deaf = stretches, deaf
        self.loads = 0

    def read(self, changed: Collection[str]) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        self.loads += 1
        numbers = {NAMES.index(name) for name in changed}
        return {
            name: np.array(
                [
                    sum(number in numbers for number in sources) * (not (self.deaf is not None and self.deaf[place]))
                    for place, sources in enumerate(elements)
                ]
            )
            for name, elements in self.stretches.items()
        }

    def groups(self) -> tuple[tuple[str, ...], ...]:
        first = self.read(())
        made = {name: Made(np.ones(len(elements), np.bool_), first[name]) for name, elements in self.stretches.items()}
        found = attribute(NAMES, made, self.read, "loader")
        return tuple(sorted(set(found.values()), key=lambda group: NAMES.index(group[0])))


def named(*groups: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(NAMES[number] for number in group) for group in groups)


def test_one_tensor_for_each_element_takes_few_loads() -> None:
    module = Module({**{f"a.{number}": [[number]] for number in range(0, 37, 3)}, "b": [[36], [36]], "c": [[1]]})
    assert module.groups() == named(*([number] for number in sorted([*range(0, 37, 3), 1])))
    assert module.loads == 2 + 2 * 6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 36), min_size=1, max_size=3, unique=True), min_size=1, max_size=6))
def test_what_is_made_of_several_is_in_one_group(elements: list[list[int]]) -> None:
    """None that has a part in something is missed, nor in two groups; one more may be named, by a small chance."""
    found = Module({f"a.{place}": [sources] for place, sources in enumerate(elements)}).groups()
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


def test_an_element_that_never_changes_is_passed_over_among_others() -> None:
    deaf = np.array([False, True, False])
    assert Module({"a": [[1], [2], [1]]}, deaf).groups() == named([1])
    with pytest.raises(UnsupportedError, match="nobody can say what its loader makes a of"):
        Module({"a": [[1], [2], [1]]}, np.ones(3, np.bool_)).groups()
