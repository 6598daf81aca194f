"""The pool of threads: order does not matter, the first error stops all, and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dcr_cli.pool import run_all


class WrongError(Exception):
    pass


def assert_no_thread_is_left() -> None:
    """Counts the pool's own threads alone: the program that runs the tests may have others."""
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("dcr-")] == []


def adding(done: list[int]) -> Callable[[], Callable[[int], None]]:
    return lambda: done.append


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_every_task_is_done_once(jobs: int) -> None:
    done: list[int] = []
    run_all(range(1000), adding(done), jobs)
    assert sorted(done) == list(range(1000))


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_the_first_error_stops_all(jobs: int) -> None:
    done: list[int] = []

    def work(task: int) -> None:
        if task == 10:
            raise WrongError(task)
        done.append(task)

    def endless() -> Iterator[int]:
        task = 0
        while True:
            yield task
            task += 1

    with pytest.raises(WrongError, match="10"):
        run_all(endless(), lambda: work, jobs)
    assert_no_thread_is_left()


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("where", ["tasks", "worker"])
def test_errors_of_tasks_and_of_workers(jobs: int, where: str) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        if where == "tasks":
            raise WrongError

    def make() -> Callable[[int], None]:
        if where == "worker":
            raise WrongError
        return lambda task: None

    with pytest.raises(WrongError):
        run_all(tasks(), make, jobs)
    assert_no_thread_is_left()


def test_each_thread_has_its_own_worker() -> None:
    barrier = threading.Barrier(4)
    owners: set[tuple[int, int]] = set()

    def make() -> Callable[[int], None]:
        number = threading.get_ident()

        def work(task: int) -> None:
            barrier.wait(10)
            owners.add((number, threading.get_ident()))

        return work

    run_all(range(4), make, 4)
    assert len(owners) == 4
    assert all(maker == worker for maker, worker in owners)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_stops_all(jobs: int) -> None:
    def stop(number: int, frame: object) -> None:
        raise WrongError

    def endless() -> Iterator[int]:
        yield 0
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            yield 1

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(WrongError):
            run_all(endless(), lambda: lambda task: None, jobs)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_no_thread_is_left()


def test_somebody_is_told() -> None:
    ticks: list[int] = []
    run_all(range(3), adding([]), 1, lambda: ticks.append(1))
    assert len(ticks) == 3
