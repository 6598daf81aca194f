"""What is kept: made once, let go in the order of asking, whatever threads do."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.layout.kept import Kept, Making, Step


def maker(calls: list[int], number: int, size: int = 10) -> NDArray[np.uint8]:
    calls.append(number)
    return np.full(size, number, np.uint8)


def test_what_was_asked_for_first_goes_first() -> None:
    kept, calls = Kept(3 * (1024 + 10)), list[int]()
    for number in (1, 2, 3, 1, 4, 1, 3, 2):
        assert kept.of(number, lambda number=number: maker(calls, number))[0] == number  # type: ignore[misc]
    assert calls == [1, 2, 3, 4, 2]


def test_the_last_two_stay_however_large() -> None:
    kept, calls = Kept(5), list[int]()
    for number in (1, 2, 1, 2, 3, 2, 1):
        kept.of(number, lambda number=number: maker(calls, number))  # type: ignore[misc]
    assert calls == [1, 2, 3, 1]


def test_threads_wait_for_the_one_that_makes_it() -> None:
    kept, calls = Kept(10_000), list[int]()
    together = threading.Barrier(4)

    def ask(_: int) -> NDArray[np.uint8]:
        together.wait(10)
        return kept.of("key", lambda: maker(calls, 7))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert calls == [7] and all(each is found[0] for each in found)


def test_the_time_for_one_more_does_not_grow_with_what_is_kept() -> None:
    looks = []

    class Key:
        def __hash__(self) -> int:
            looks.append(self)
            return id(self)

    kept = Kept(1 << 20)
    each = []
    for _ in range(3000):
        looks.clear()
        kept.of(Key(), lambda: np.zeros(8, np.uint8))
        each.append(len(looks))
    assert max(each) <= 8


def test_small_ones_are_not_kept_for_ever() -> None:
    kept, calls = Kept(100 * 1024), list[int]()
    for number in range(200):
        kept.of(number, lambda number=number: maker(calls, number, 1))  # type: ignore[misc]
    kept.of(0, lambda: maker(calls, 0, 1))
    assert calls.count(0) == 2


def making(steps: Iterable[Step], last: Step = lambda: None) -> Making:
    return Making(np.zeros(8, np.uint8), iter(steps), last)


def test_who_waits_helps() -> None:
    kept, begun = Kept(1 << 20), []
    together, doers = threading.Barrier(3), []

    def step() -> None:
        # None of the three steps ends before all have begun, each in a thread of its own.
        together.wait(10)
        doers.append(threading.get_ident())

    def begin() -> Making:
        begun.append(1)
        return making([step, step, step], lambda: doers.append(0))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: kept.shared("key", begin), range(3)))
    assert all(each is found[0] for each in found) and begun == [1]
    assert len(set(doers)) == 4 and doers[3] == 0
    assert kept.shared("key", begin) is found[0] and begun == [1]


@pytest.mark.parametrize("where", ["step", "plan", "last"])
def test_what_goes_wrong_in_one_thread_all_are_told(where: str) -> None:
    kept, together = Kept(1 << 20), threading.Barrier(2)

    def fail() -> None:
        raise ZeroDivisionError

    def meet() -> None:
        together.wait(10)

    def steps() -> Iterator[Step]:
        yield meet
        yield meet
        if where == "plan":
            fail()
        if where == "step":
            yield fail

    def ask(_: int) -> bool:
        with pytest.raises(ZeroDivisionError):
            kept.shared("key", lambda: making(steps(), fail if where == "last" else lambda: None))
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(ask, range(2)))
    again = making([])
    assert kept.shared("key", lambda: again) is again.value


def test_who_fails_is_asked_again() -> None:
    kept = Kept(100)
    with pytest.raises(ZeroDivisionError):
        kept.of("key", lambda: np.zeros(1 // 0))
    assert kept.of("key", lambda: np.zeros(1)).tolist() == [0]
