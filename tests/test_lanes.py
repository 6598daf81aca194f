"""A device's lanes: each works in a stream of its own, one step after the other, and is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from dcr_cli.device.lanes import Lanes, cuda_lanes
from fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def lanes(cuda: FakeCuda) -> Lanes:
    return cuda_lanes(1, "it")


def test_each_lane_has_a_stream_of_its_own(cuda: FakeCuda, lanes: Lanes) -> None:
    found = [lane.run(lambda: cuda.current_stream())[0] for lane in (lanes.up, lanes.compute, lanes.back)]
    assert found == cuda.streams and len(set(found)) == 3 and {stream.index for stream in found} == {1}
    assert cuda.current_stream().name == "default stream of cuda:0"


def test_all_who_ask_are_given_the_same(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ask at once, too, of whom the first waits for the second."""
    both = threading.Barrier(2)

    def name(index: int) -> str:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return "slow"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: cuda_lanes(0, "it"), range(2))
    assert first is second and len(cuda.streams) == 3
    assert cuda_lanes(1, "it") is cuda_lanes(1, "it") is not first


def test_what_a_lane_did_is_done(cuda: FakeCuda, lanes: Lanes) -> None:
    memory = lanes.device_memory(5)
    assert lanes.compute.run(lambda: cuda.use(memory))[1] == 0.001
    assert all(cuda.done[stream] == cuda.begun[stream] for stream in cuda.streams)


def test_a_lane_does_one_step_at_a_time(cuda: FakeCuda, lanes: Lanes) -> None:
    is_first, is_second = threading.Event(), threading.Event()

    def first() -> bool:
        is_first.set()
        return is_second.wait(0.3)

    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(lanes.compute.run, first)
        assert is_first.wait(10)
        pool.submit(lanes.compute.run, is_second.set)
        assert not found.result()[0]


def test_memory_is_the_lanes_that_writes_it(cuda: FakeCuda, lanes: Lanes) -> None:
    """Torch hands out memory again that the stream which freed it still works on; so the stream that is first to write
    to it has to be that one."""
    memory, source = lanes.device_memory(5), torch.arange(5, dtype=torch.uint8)
    lanes.up.run(lambda: memory.copy_(source))
    lanes.back.run(lambda: cuda.use(memory))
    assert cuda.faults == []


def test_what_nobody_waited_for_is_noticed(cuda: FakeCuda, lanes: Lanes) -> None:
    """That is, by what stands in for the device in these tests."""
    memory = cuda.take(torch.zeros(5), 1)
    lanes.back.run(lambda: cuda.use(memory))
    [own] = cuda.faults
    assert own == "stream 2 of cuda:1 uses what default stream of cuda:1 may still work on"
