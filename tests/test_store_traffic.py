"""What is counted of a store's transfers, and the limit on them."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from dcr_cli.store.local import LocalBackend
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.store.traffic import Meter, Traffic
from store_contract import MOST, Clock
from store_wrappers import IgnoresRanges


def test_what_is_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.traffic == Traffic(0, 0, 0)
    store.put("a", bytes(1000))
    assert store.traffic == Traffic(1, 1000, 0)
    store.put("b", io.BytesIO(bytes(3 << 20)))
    # Its size was read back.
    assert store.traffic == Traffic(3, 1000 + (3 << 20), 0)
    assert store.put_if_absent("c", bytes(10))
    before = store.traffic
    assert not store.put_if_absent("c", b"other bytes")
    assert store.traffic == Traffic(before.requests + 2, before.sent_bytes + 11, 0)
    sent = store.traffic
    assert store.get("a", most_bytes=MOST) == bytes(1000)
    assert store.get_range("b", 5, 100) == bytes(100)
    assert len(b"".join(store.stream("a", begin=400))) == 600
    store.stat("a")
    store.list()
    store.leftovers()
    store.delete("c")
    assert store.traffic == Traffic(sent.requests + 7, sent.sent_bytes, 1700)


def test_what_is_read_for_nothing_is_counted_too(tmp_path: Path) -> None:
    store = Store(IgnoresRanges(MemoryBackend(str(tmp_path))), "test://remote")
    store.put("a", bytes(1000))
    assert store.get_range("a", 500, 10) == bytes(10)
    assert store.traffic.received_bytes == 1000


def test_threads_are_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def work() -> None:
        for _ in range(50):
            store.put("a", b"12345")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.traffic == Traffic(400, 2000, 0)


class TestLimit:
    """1000 bytes a second, by a clock that only waiting moves."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def meter(self, clock: Clock) -> Meter:
        return Meter(1000, clock=lambda: clock.now, sleep=clock.sleep)

    def test_both_ways_together(self, clock: Clock, meter: Meter) -> None:
        for _ in range(10):
            meter.sending(300)
            meter.received(200)
        assert clock.now == pytest.approx(5.0)

    def test_what_was_not_used_is_kept_for_a_second(self, clock: Clock, meter: Meter) -> None:
        clock.now = 100.0
        meter.sending(1000)
        assert clock.now == 100.0
        meter.sending(1000)
        assert clock.now == pytest.approx(101.0)

    def test_more_than_a_second_allows_at_once(self, clock: Clock, meter: Meter) -> None:
        meter.received(5000)
        assert clock.now == pytest.approx(5.0)

    def test_threads_share_it(self, clock: Clock, meter: Meter) -> None:
        """None of them waits less because another one does: what all asked for takes its time."""
        waits: list[float] = []
        meter = Meter(1000, clock=lambda: 0.0, sleep=waits.append)
        threads = [threading.Thread(target=meter.sending, args=(100,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(waits) == pytest.approx([0.1 * number for number in range(1, 21)])

    def test_a_store(self, clock: Clock, tmp_path: Path) -> None:
        store = open_store(tmp_path, patience=clock.patience(), limit_bytes_per_second=1 << 20)
        store.put("a", io.BytesIO(bytes(5 << 20)))
        assert clock.now == pytest.approx(5.0)
        store.put("b", bytes(1 << 20))
        store.put_if_absent("c", bytes(1 << 20))
        assert clock.now == pytest.approx(7.0)
        assert sum(map(len, store.stream("a"))) == 5 << 20
        assert store.get("b", most_bytes=MOST) == bytes(1 << 20)
        assert clock.now == pytest.approx(13.0)

    @pytest.mark.parametrize("limit", [0, -1, float("nan")])
    def test_nothing_is_no_limit(self, limit: float) -> None:
        with pytest.raises(ValueError, match="lets nothing through"):
            Meter(limit)

    def test_without_one_nothing_waits(self, clock: Clock, tmp_path: Path) -> None:
        meter = Meter(clock=lambda: clock.now, sleep=clock.sleep)
        Store(LocalBackend(str(tmp_path)), "test://remote", meter=meter).put("a", bytes(MOST))
        assert clock.waits == []
