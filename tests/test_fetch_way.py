"""Which way is taken: the one that moves the fewest bytes, around what is missing."""

from __future__ import annotations

from dcr_cli.fetch.way import Goal, Way, find_way, first_gap, is_worth_looking

DELTAS = dict.fromkeys(range(2, 10), 10)


def test_deltas_from_the_receivers_own_version() -> None:
    assert find_way(Goal(3, 6), DELTAS, {}) == Way(None, (4, 5, 6), 30)
    assert find_way(Goal(6, 6), DELTAS, {1: 100}) == Way(None, (), 0)
    assert Way(2, (3, 4), 0).versions == (2, 3, 4)


def test_an_anchor_where_there_is_no_version_to_start_from() -> None:
    assert find_way(Goal(None, 4), DELTAS, {1: 100}) == Way(1, (2, 3, 4), 130)
    assert find_way(Goal(None, 4), DELTAS, {}) is None


def test_the_way_with_fewer_bytes() -> None:
    assert find_way(Goal(1, 9), DELTAS, {8: 69}) == Way(8, (9,), 79)
    assert find_way(Goal(1, 9), DELTAS, {8: 70}) == Way(None, tuple(range(2, 10)), 80)
    assert find_way(Goal(None, 9), DELTAS, {1: 100, 8: 169, 9: 180}) == Way(8, (9,), 179)
    assert find_way(Goal(None, 9), DELTAS, {1: 100, 9: 180}) == Way(9, (), 180)


def test_around_what_is_missing() -> None:
    assert find_way(Goal(1, 6), DELTAS, {1: 0, 5: 100}, missing={2, 3}) == Way(5, (6,), 110)
    assert find_way(Goal(1, 6), DELTAS, {1: 0}, missing={2, 3}) is None
    assert first_gap(Goal(1, 6), DELTAS, {3, 2}) == 2
    assert first_gap(Goal(None, 6), DELTAS, ()) == 1
    assert first_gap(Goal(3, 6), DELTAS, ()) is None


def test_a_break_has_no_delta() -> None:
    deltas = {version: size for version, size in DELTAS.items() if version != 5}
    assert find_way(Goal(4, 6), deltas, {5: 100}) == Way(5, (6,), 110)


def test_back_only_by_an_anchor() -> None:
    assert find_way(Goal(9, 4), DELTAS, {1: 100, 6: 1}) == Way(1, (2, 3, 4), 130)
    assert find_way(Goal(9, 4), DELTAS, {6: 1}) is None


def test_an_anchor_is_looked_for_where_it_may_be_the_better_way() -> None:
    assert is_worth_looking(None, 0)
    assert is_worth_looking(Way(None, (2,), 50), 100)
    assert not is_worth_looking(Way(None, (2,), 49), 100)
