"""Deltas made by way of a CUDA device are byte for byte those of the CPU, with as many blocks at once as fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from device_deltas import DeviceDeltas, sides, write_pair
from interpreter import HAS_CUDA, HAS_TRITON
from kernel_cases import BLOCK_BYTES

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
