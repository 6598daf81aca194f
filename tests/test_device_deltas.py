"""Deltas made by way of Triton's interpreter, in the place of a device, are byte for byte those of the CPU, and no
memory is used before those who used it are done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcr_cli
from dcr_cli.publisher import given
from device_deltas import DeviceDeltas, sides, tensors_of, write_pair
from fake_cuda import FakeCuda
from interpreter import HAS_CUDA, HAS_TRITON, hurry
from receivers import tree

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, on which tests/gpu runs the same tests"),
]


class TestInterpretedDeltas(DeviceDeltas):
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
        from dcr_cli.device import comparing

        hurry(monkeypatch)
        cuda = FakeCuda(monkeypatch)
        for name in ("compare_runs", "digest"):
            monkeypatch.setattr(comparing, name, cuda.using(getattr(comparing, name)))
        yield cuda
        assert cuda.faults == []

    @pytest.fixture
    def lanes(self, cuda: FakeCuda) -> Any:
        from dcr_cli.device.lanes import cuda_lanes

        return cuda_lanes(0, "the tests' device")

    @pytest.fixture
    def memory(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> str:
        """Tensors in the host's memory are taken to lie on the device, where the caller's stream still writes them."""

        def device_of(tensor: torch.Tensor) -> int:
            cuda.take(tensor)
            return 0

        monkeypatch.setattr(given, "_device_of", device_of)
        return "cpu"

    @pytest.mark.parametrize("there", ["base", "target", "both", "apart"])
    def test_what_a_side_stream_writes(
        self, tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, there: str
    ) -> None:
        """Of one side that lies on the device, of both, and of both on two of them; in one piece, and in several."""
        base, target = write_pair(tmp_path, {"w": sides("BF16", 6000, 0.02), "all": sides("F32", 700, 1.0)})
        old, new = ({k: t.reshape(20, -1).T for k, t in tensors_of(side, "cpu").items()} for side in (base, target))
        on = {id(t): 0 for t in (new if there == "target" else old).values()}
        on |= {id(t): 1 if there == "apart" else 0 for t in new.values()} if there in ("both", "apart") else {}

        def device_of(tensor: torch.Tensor) -> int | None:
            if id(tensor) in on:
                cuda.take(tensor, on[id(tensor)])
            return on.get(id(tensor))

        here = dcr_cli.diff_tensors(old, new, tmp_path / "here", device="cpu")
        monkeypatch.setattr(given, "_device_of", device_of)
        with cuda.stream(cuda.make_stream(0)):
            found = dcr_cli.diff_tensors(old, new, tmp_path / "there")
        assert tree(tmp_path / "there") == tree(tmp_path / "here") and found.base == here.base
