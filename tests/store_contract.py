"""What every store does, whatever is behind it, as one class of tests."""

from __future__ import annotations

import io
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dcr_cli.errors import DamagedError, NotFoundError
from dcr_cli.store.opening import open_store
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store

RACERS = 8
ROUNDS = 50
MOST = 1 << 20
BIG = bytes(range(256)) * (20 << 12)


@dataclass
class Clock:
    """Time that only waiting lets pass."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)

    def patience(self, **changes: Any) -> Patience:
        return replace(Patience(clock=lambda: self.now, sleep=self.sleep, dice=lambda: 1.0), **changes)


@dataclass(frozen=True)
class Place:
    """Where a contract is tried: what to open, and what to write through where that can only be read."""

    url: str
    options: dict[str, object] = field(default_factory=dict)
    writer: Store | None = None

    def open(self) -> Store:
        return open_store(self.url, self.options, patience=Patience(deadline_seconds=20))


class ReadContract:
    """What is read is what was written, all of it, or an error."""

    # More than any backend moves in one part.
    big = BIG

    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        with place.open() as store:
            yield store

    @pytest.fixture
    def writer(self, place: Place, store: Store) -> Store:
        return place.writer or store

    @pytest.mark.parametrize("size", [0, 1, 1000])
    def test_get(self, store: Store, writer: Store, size: int) -> None:
        writer.put(f"get/{size}.bin", BIG[:size])
        assert store.get(f"get/{size}.bin", most_bytes=MOST) == BIG[:size]
        assert store.get(f"get/{size}.bin", most_bytes=MOST, size=size) == BIG[:size]

    def test_what_is_not_there(self, store: Store, writer: Store) -> None:
        writer.put("here/a", b"1")
        for key in ("nothing", "here/b", "no/such/folder"):
            assert store.get(key, most_bytes=MOST) is None
            assert store.stat(key) is None
            with pytest.raises(NotFoundError):
                store.get_range(key, 0, 1)
            with pytest.raises(NotFoundError):
                list(store.stream(key))

    def test_more_than_is_wanted(self, store: Store, writer: Store) -> None:
        writer.put("more/a", b"12345")
        with pytest.raises(DamagedError, match="at most 4"):
            store.get("more/a", most_bytes=4)
        with pytest.raises(DamagedError, match="has 5 bytes, 6 expected"):
            store.get("more/a", most_bytes=MOST, size=6)
        with pytest.raises(DamagedError, match="has 5 bytes, 6 expected"):
            list(store.stream("more/a", size=6))

    @pytest.mark.parametrize(("begin", "size"), [(0, 1), (0, 5), (3, 2), (4, 1), (2, 0)])
    def test_ranges(self, store: Store, writer: Store, begin: int, size: int) -> None:
        writer.put("range/a", b"12345")
        assert store.get_range("range/a", begin, size) == b"12345"[begin : begin + size]

    @pytest.mark.parametrize(("begin", "size"), [(0, 6), (4, 2), (5, 1), (6, 1)])
    def test_ranges_that_end_outside(self, store: Store, writer: Store, begin: int, size: int) -> None:
        writer.put("range/a", b"12345")
        with pytest.raises(DamagedError):
            store.get_range("range/a", begin, size)

    def test_streams(self, store: Store, writer: Store) -> None:
        writer.put("stream/big", io.BytesIO(self.big))
        writer.put("stream/empty", io.BytesIO(b""))
        for begin in (0, len(self.big) - 1, len(self.big)):
            chunks = list(store.stream("stream/big", begin=begin, size=len(self.big)))
            assert b"".join(chunks) == self.big[begin:]
            assert max(map(len, chunks), default=0) <= 16 << 20
        assert b"".join(store.stream("stream/big")) == self.big
        assert b"".join(store.stream("stream/empty", size=0)) == b""
        assert b"".join(store.stream("stream/empty")) == b""

    def test_a_stream_that_is_not_read_to_its_end(self, store: Store, writer: Store) -> None:
        writer.put("stream/end", BIG[:MOST])
        for _ in range(12):
            stream = store.stream("stream/end")
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        assert store.get_range("stream/end", 7, 9) == BIG[7:16]

    def test_stat(self, store: Store, writer: Store) -> None:
        writer.put("stat/a", b"12345")
        status = store.stat("stat/a")
        assert status is not None and status.size == 5
        assert status.modified is None or status.modified > 1e9

    def test_names(self, store: Store, writer: Store) -> None:
        for key in ("names/a b", "names/a+b", "names/a%20b", "names/a#b?c", "names/ü~", "names/a=b&c"):
            writer.put(key, key.encode())
            assert store.get(key, most_bytes=MOST) == key.encode()

    @pytest.mark.parametrize("key", ["", "/a", "../a", "a/../b", "a//b", "a/", ".a", "a/.b/c", "a\0b", "a\nb"])
    def test_unsafe_names(self, store: Store, key: str) -> None:
        for work in (
            lambda: store.get(key, most_bytes=1),
            lambda: store.get_range(key, 0, 1),
            lambda: list(store.stream(key)),
            lambda: store.put(key, b""),
            lambda: store.put_if_absent(key, b""),
            lambda: store.delete(key),
        ):
            with pytest.raises(DamagedError, match="unsafe name"):
                work()


class StoreContract(ReadContract):
    """What is written is there whole or not at all, and what is created, once."""

    rounds = ROUNDS

    def test_put_over(self, store: Store) -> None:
        store.put("over/a", b"first, and longer")
        store.put("over/a", b"second")
        assert store.get("over/a", most_bytes=MOST) == b"second"

    def test_a_stream_is_put_from_where_it_stands(self, store: Store) -> None:
        source = io.BytesIO(self.big)
        source.seek(5)
        store.put("put/a", source)
        assert b"".join(store.stream("put/a", size=len(self.big) - 5)) == self.big[5:]

    def test_put_if_absent(self, store: Store) -> None:
        assert store.put_if_absent("create/a", b"ours")
        assert not store.put_if_absent("create/a", b"theirs")
        # Again by us, who do not know that it was done.
        assert store.put_if_absent("create/a", b"ours")
        assert store.get("create/a", most_bytes=MOST) == b"ours"

    def test_a_put_over_what_was_created(self, store: Store) -> None:
        assert store.put_if_absent("next/a", b"1")
        store.put("next/a", b"2")
        assert not store.put_if_absent("next/a", b"1")

    def test_exclusive_create_is_proved(self, store: Store) -> None:
        assert store.put_if_absent("proof/a", b"ours")
        store.prove_exclusive("proof/a")
        assert store.get("proof/a", most_bytes=MOST) == b"ours"
        with pytest.raises(NotFoundError):
            store.prove_exclusive("proof/b")

    def test_lists(self, store: Store) -> None:
        assert store.list("list/") == ()
        for key in ("list/b", "list/a", "list/c/d/e", "listed"):
            store.put(key, key.encode())
        assert [(entry.key, entry.size) for entry in store.list("list/")] == [
            ("list/a", 6),
            ("list/b", 6),
            ("list/c/d/e", 10),
        ]
        assert [entry.key for entry in store.list("list/c/")] == ["list/c/d/e"]
        assert {"list/a", "listed"} <= {entry.key for entry in store.list()}

    def test_delete(self, store: Store) -> None:
        store.put("delete/a", b"1")
        store.delete("delete/a")
        assert store.get("delete/a", most_bytes=MOST) is None
        store.delete("delete/a")
        store.delete("delete/no/such/folder")
        assert store.put_if_absent("delete/a", b"2")

    def test_threads_race(self, store: Store, place: Place) -> None:
        """Of eight threads that create the same key, each with other bytes, one wins, and its bytes are there."""
        stores = [place.open() for _ in range(RACERS)]
        wins: list[list[bool]] = [[] for _ in range(RACERS)]
        barrier = threading.Barrier(RACERS)

        def race(number: int) -> None:
            try:
                for turn in range(self.rounds):
                    barrier.wait(60)
                    wins[number].append(stores[number].put_if_absent(f"race/{turn}", b"%d" % number))
            except BaseException:
                barrier.abort()
                raise

        threads = [threading.Thread(target=race, args=(number,)) for number in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_wins(store, "race", wins)
        for each in stores:
            each.close()
        assert len(wins[0]) == self.rounds

    def test_threads_share_a_store(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    data = bytes([number]) * (1000 + turn)
                    store.put(f"share/{number}", data)
                    assert store.get(f"share/{number}", most_bytes=MOST) == data
                    assert store.get_range(f"share/{number}", 10, 20) == data[10:30]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class RaceOfProcesses:
    """For what processes can share."""

    def test_processes_race(self, place: Place) -> None:
        spawning = multiprocessing.get_context("spawn")
        barrier, results = spawning.Barrier(RACERS), spawning.SimpleQueue()
        racers = [
            spawning.Process(target=_race, args=(place.url, place.options, number, barrier, results))
            for number in range(RACERS)
        ]
        for racer in racers:
            racer.start()
        wins = dict(results.get() for _ in racers)
        for racer in racers:
            racer.join()
        with place.open() as store:
            check_wins(store, "processes", [wins[number] for number in range(RACERS)])


def _race(url: str, options: dict[str, object], number: int, barrier: Any, results: Any) -> None:
    wins: list[bool] = []
    try:
        with open_store(url, options) as store:
            for turn in range(ROUNDS):
                barrier.wait(60)
                wins.append(store.put_if_absent(f"processes/{turn}", b"%d" % number))
    finally:
        results.put((number, wins))


def check_wins(store: Store, folder: str, wins: list[list[bool]]) -> None:
    for turn in range(len(wins[0])):
        winners = [number for number, each in enumerate(wins) if each[turn]]
        assert len(winners) == 1, f"round {turn}: {winners}"
        assert store.get(f"{folder}/{turn}", most_bytes=MOST) == b"%d" % winners[0]
