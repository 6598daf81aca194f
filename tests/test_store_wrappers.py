"""The wrappers that other tests build on do what they say, here and in a process of its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from dcr_cli.errors import TransportError
from dcr_cli.store.backend import PermanentError
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from faults import StoppedError
from store_contract import MOST, Clock
from store_wrappers import (
    Allows,
    FailsCall,
    FlipsAByte,
    KillsAtCall,
    ListsLate,
    Records,
    Slow,
    Wrapped,
    run_dcr,
    run_python,
    wrapping,
)

# Three calls: a write, which is read back, and a create.
PROGRAM = """
import io, sys
from dcr_cli.store.opening import open_store
store = open_store(sys.argv[1])
store.put("a", io.BytesIO(bytes(3 << 20)))
print(store.put_if_absent("b", b"1"))
"""


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(str(tmp_path))


def opened(backend: Wrapped) -> Store:
    return Store(backend, "test://remote", patience=Clock().patience())


def test_allows_only_what_it_is_told_to(backend: LocalBackend) -> None:
    for key in ("commits/1", "acks/1/a", "other/a"):
        backend.write(key, b"1", 1)
    store = opened(Allows(backend, get=["commits/*", "acks/*"], put=["acks/1/*"], list=["acks/*"]))
    assert store.get("commits/1", most_bytes=MOST) == b"1"
    assert store.stat("commits/1") is not None
    assert store.get("acks/2/a", most_bytes=MOST) is None
    assert store.put_if_absent("acks/1/b", b"2")
    assert len(store.list("acks/")) == 2
    works: list[Callable[[], object]] = [
        lambda: store.get("other/a", most_bytes=MOST),
        # Not there, which only who may list is told.
        lambda: store.get("commits/2", most_bytes=MOST),
        lambda: store.stat("commits/2"),
        lambda: store.put("commits/2", b""),
        lambda: store.put_if_absent("acks/2/a", b""),
        lambda: store.list("commits/"),
        lambda: store.list(),
        lambda: store.leftovers(),
        lambda: store.delete("acks/1/b"),
    ]
    for work in works:
        with pytest.raises(TransportError, match="access is denied"):
            work()
    opened(Allows(backend, delete=["other/*"])).delete("other/a")
    assert backend.status("other/a") is None
    assert opened(Allows(backend, create=["a"])).put_if_absent("a", b"1")
    with pytest.raises(TransportError, match="access is denied"):
        opened(Allows(backend, create=["a"])).put("a", b"1")


def test_one_call_fails(backend: LocalBackend) -> None:
    def work(store: Store) -> None:
        store.put("a", b"1")
        assert store.put_if_absent("b", b"1")
        assert [entry.key for entry in store.list()] == ["a", "b"]

    for number in range(3):
        work(opened(FailsCall(backend, number)))
        for key in "ab":
            backend.remove(key)
        with pytest.raises(TransportError, match="of no use"):
            work(opened(FailsCall(backend, number, PermanentError("of no use"))))
        for key in "ab":
            backend.remove(key)
    work(opened(FailsCall(backend, 3, PermanentError("of no use"))))


def test_a_byte_is_another(backend: LocalBackend) -> None:
    for key in ("a/1", "b"):
        backend.write(key, b"12345", 5)
    store = opened(FlipsAByte(backend, "a/*", 3))
    assert store.get("a/1", most_bytes=MOST) == b"123\x145"
    assert store.get_range("a/1", 3, 2) == b"\x145"
    assert store.get_range("a/1", 0, 3) == b"123"
    assert store.get("b", most_bytes=MOST) == b"12345"
    assert opened(FlipsAByte(backend, "*", 100)).get("b", most_bytes=MOST) == b"1234\x15"


def test_late_lists_catch_up(backend: LocalBackend) -> None:
    late = ListsLate(backend)
    store = opened(late)
    store.put("a", b"1")
    assert store.list() == ()
    late.catch_up()
    assert [entry.key for entry in store.list()] == ["a"]


def test_slow_ones_take_longer(backend: LocalBackend) -> None:
    waits: list[float] = []
    opened(Slow(backend, 3.0, waits.append)).put("a", b"1")
    assert waits == [3.0]


def test_whatever_is_opened_is_wrapped(tmp_path: Path) -> None:
    records: list[Records] = []

    def wrap(backend: LocalBackend) -> Records:
        records.append(Records(backend))
        return records[-1]

    with wrapping(wrap):  # type: ignore[arg-type]
        open_store(tmp_path).put("a", b"1")
        open_store(tmp_path).put("b", b"1")
    open_store(tmp_path).put("c", b"1")
    assert [record.calls for record in records] == [[("write", "a")], [("write", "b")]]


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_the_end_at_every_call(backend: LocalBackend, when: str) -> None:
    """What is there afterwards is what was done until then, whole."""
    there: list[list[str]] = []
    for number in range(10):
        kills = KillsAtCall(backend, number, when=when)
        store = opened(kills)
        try:
            store.put("a", io.BytesIO(bytes(3 << 20)))
            assert store.put_if_absent("b", b"1")
        except StoppedError:
            with pytest.raises(StoppedError):
                store.list()
        else:
            break
        there.append([entry.key for entry in opened(Wrapped(backend)).list()])
        for key in there[-1]:
            backend.remove(key)
    first = ["a"] if when == "after" else []
    assert there == [first, ["a"], ["a", "b"] if when == "after" else ["a"]]


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_the_end_of_a_process_at_every_call(tmp_path: Path, when: str) -> None:
    there = []
    for number in range(10):
        root = tmp_path / str(number)
        ended = run_python(f"KillsAtCall(BACKEND, {number}, when={when!r}, signal=9)", PROGRAM, root)
        if ended.returncode == 0:
            assert ended.stdout == "True\n"
            break
        assert ended.returncode == -9, ended.stderr
        store = open_store(root)
        there.append([entry.key for entry in store.list()])
        # Only a write that was stopped within leaves something, which its own name tells.
        assert len(store.leftovers()) == (1 if when == "within" and number == 0 else 0)
    first = ["a"] if when == "after" else []
    assert there == [first, ["a"], ["a", "b"] if when == "after" else ["a"]]


def test_the_command_runs_with_one() -> None:
    ended = run_dcr("FailsCall(BACKEND, 0)", "--help")
    assert ended.returncode == 0 and "diff" in ended.stdout
    assert run_dcr("FailsCall(BACKEND, 0)", "no-such-command").returncode == 2
