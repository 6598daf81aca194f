"""Deltas made by way of a CUDA device are byte for byte those of the CPU, with as many blocks at once as fit."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dcr_cli
from device_deltas import DeviceDeltas, sides, tensors_of, write_pair
from interpreter import HAS_CUDA, HAS_TRITON
from kernel_cases import BLOCK_BYTES
from receivers import tree

# It has no types for its streams.
CUDA: Any = torch.cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device"),
]


class TestDeltasOnDevice(DeviceDeltas):
    @pytest.fixture
    def lanes(self) -> Any:
        from dcr_cli.device.lanes import cuda_lanes

        return cuda_lanes(0, "the tests' device")

    @pytest.fixture
    def memory(self) -> str:
        return "cuda:0"

    @pytest.mark.parametrize("encoding", ["auto", "gap"])
    @pytest.mark.parametrize("rate", [1e-4, 0.01, 1.0])
    def test_many_blocks_and_threads(
        self,
        tmp_path: Path,
        device: Counter[int],
        monkeypatch: pytest.MonkeyPatch,
        rate: float,
        encoding: str,
    ) -> None:
        """More batches than slots, of tensors that take more than one each."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(comparing, "BATCH_BYTES", 8 * BLOCK_BYTES)
        tensors = {f"layers.{number}": sides("BF16", 8 * BLOCK_BYTES + 65, rate, number) for number in range(6)}
        self.check(
            *write_pair(tmp_path, tensors | {"f32": sides("F32", BLOCK_BYTES, rate)}), tmp_path, encoding, jobs=8
        )
        assert device[2] >= 12 and device[4]

    @pytest.mark.parametrize("places", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda:1")])
    def test_what_a_side_stream_still_writes(self, tmp_path: Path, places: tuple[str, str]) -> None:
        """It has slept for a while before it writes; where tensors lie in pieces, it copies them, too."""
        if torch.cuda.device_count() < 2 and "cuda:1" in places:
            pytest.skip("there is one CUDA device")
        base, target = write_pair(tmp_path, {"w": sides("BF16", 3 * BLOCK_BYTES, 0.02)})
        both = [tensors_of(side, "cpu")["w"].reshape(64, -1).T for side in (base, target)]
        expected = dcr_cli.diff_tensors({"w": both[0]}, {"w": both[1]}, tmp_path / "here", device="cpu")
        given = [torch.zeros_like(side, device=place) for side, place in zip(both, places, strict=True)]
        sources = [side.to(place) for side, place in zip(both, places, strict=True)]
        streams = [CUDA.Stream(index) for index in range(torch.cuda.device_count())]
        torch.cuda.synchronize()
        for stream in reversed(streams):
            torch.cuda.set_stream(stream)
        try:
            for out, source in zip(given, sources, strict=True):
                if out.is_cuda:
                    with torch.cuda.device(out.device):
                        CUDA._sleep(200_000_000)
                out.copy_(source)
            found = dcr_cli.diff_tensors({"w": given[0]}, {"w": given[1]}, tmp_path / "there")
        finally:
            for index in reversed(range(len(streams))):
                torch.cuda.set_stream(torch.cuda.default_stream(index))
        assert tree(tmp_path / "there") == tree(tmp_path / "here")
        assert (found.base, found.target) == (expected.base, expected.target)

    def test_memory_that_another_stream_still_works_on(self, lanes: Any) -> None:
        """What a trainer has freed, and its stream still writes, is not handed out to the lanes."""
        size = 64 << 20
        torch.cuda.synchronize()
        freed = torch.empty(size, dtype=torch.uint8, device="cuda")
        CUDA._sleep(200_000_000)
        freed.fill_(7)
        del freed
        memory = lanes.device_memory(size)
        lanes.up.run(memory.zero_)
        torch.cuda.synchronize()
        assert not memory.any()

    def test_several_diffs_at_once(self, tmp_path: Path) -> None:
        """Each makes a Device of its own, by way of the same lanes."""
        pairs = [write_pair(tmp_path / str(n), {"w": sides("F32", BLOCK_BYTES, 0.02, n)}) for n in range(3)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: self.check(*pairs[n], tmp_path / str(n), jobs=2), range(3)))

    def test_another_device_than_the_current_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from dcr_cli.device import finding
        from dcr_cli.device.lanes import cuda_lanes

        if torch.cuda.device_count() < 2:
            pytest.skip("there is one CUDA device")
        monkeypatch.setattr(finding, "find", lambda index: cuda_lanes(index, "the tests' device"))
        base, target = write_pair(tmp_path, {"w": sides("BF16", BLOCK_BYTES, 0.02)})
        old, new = (tensors_of(side, "cuda:1") for side in (base, target))
        there = dcr_cli.diff_tensors(old, new, tmp_path / "tensors")
        assert there.device == "cuda:1" and torch.cuda.current_device() == 0
        files = dcr_cli.diff(base, target, tmp_path / "files", device="cuda:1")
        assert files.device == "cuda:1" and files.changed_elements == there.changed_elements
