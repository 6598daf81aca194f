"""The first signal ends a run within moments, whatever is done when it comes."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from dcr_cli import stopping
from dcr_cli.pool import run_all
from dcr_cli.process import signals_raised
from dcr_cli.stopping import Stopped, pause
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from store_wrappers import FailsCalls

SOON_SECONDS = 5.0


class Dropping:
    """Python drops what its destructor raises, here what a signal does that it is sent itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0)


def drop_and_wait(number: int, *others: Callable[[], object]) -> None:
    """Let a destructor be sent a signal, make and drop what others make, and wait for ever."""
    Dropping(number)
    for make in others:
        make()
    time.sleep(60)


@pytest.fixture
def began() -> Iterator[float]:
    began = time.monotonic()
    yield began
    assert time.monotonic() - began < SOON_SECONDS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_python_drops_is_raised_again(
    number: signal.Signals, began: float, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped) as caught, signals_raised():
        drop_and_wait(number)
    assert caught.value.number == number
    assert capfd.readouterr().err == ""


def test_as_often_as_it_is_dropped(began: float) -> None:
    """When it is raised again, another destructor runs, and another."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.5)

    with pytest.raises(Stopped), signals_raised():
        drop_and_wait(signal.SIGTERM, *(Slow for _ in range(3)))


def test_what_else_python_drops_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(found.exc_value))

    class Wrong:
        def __del__(self) -> None:
            raise ValueError("mine")

    with signals_raised():
        Wrong()
    assert [str(error) for error in told] == ["mine"]


def test_everything_is_as_it_was_afterwards() -> None:
    def surroundings() -> list[object]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
        return [sys.unraisablehook, signal.getitimer(signal.ITIMER_REAL), *map(signal.getsignal, numbers)]

    before = surroundings()
    with pytest.raises(Stopped), signals_raised():
        drop_and_wait(signal.SIGTERM)
    assert surroundings() == before
    in_thread(stopping.check)


def test_threads_end_what_they_wait_for(began: float) -> None:
    """What a store tries again for two minutes, in the threads of a pool."""
    waiting = threading.Event()

    def dice() -> float:
        waiting.set()
        return 1.0

    patience = Patience(first_wait_seconds=100.0, longest_wait_seconds=100.0, dice=dice)
    store = Store(FailsCalls(MemoryBackend(uuid4().hex), 1000), "test://remote", patience=patience)

    def stop() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(Stopped), signals_raised():
        run_all(range(2), lambda: lambda task: store.put(f"a{task}", b"1"), 2)


@pytest.mark.parametrize("way", ["up", "down"])
def test_threads_end_what_they_move(way: str) -> None:
    backend = MemoryBackend(uuid4().hex)
    store = Store(backend, "test://remote")
    store.put("a", bytes(5 << 20))
    stream = store.stream("a")
    next(stream)
    works: dict[str, Callable[[], object]] = {
        "down": lambda: list(stream),
        "up": lambda: store.put("b", io.BytesIO(b"1")),
    }
    stopping.ask(signal.SIGTERM)
    try:
        with pytest.raises(Stopped):
            in_thread(works[way])
        # Who cleans up is the main thread, and may still ask.
        assert store.stat("a") is not None
        assert store.stat("b") is None
    finally:
        stopping.ask(0)


def test_a_pause_is_as_long_as_it_should_be() -> None:
    began = time.monotonic()
    pause(0.25)
    assert time.monotonic() - began >= 0.25
    pause(0)
    pause(-1)


def in_thread(work: Callable[[], object]) -> None:
    """Call it in another thread, and raise here what it raises there."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    for error in raised:
        raise error
