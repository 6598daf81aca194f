"""Deltas made by way of Triton's interpreter, in the place of a device, are byte for byte those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.publisher import devices, given_base
from device_deltas import DeviceDeltas
from interpreter import HAS_CUDA, HAS_TRITON, hurry

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, on which tests/gpu runs the same tests"),
]


class TestInterpretedDeltas(DeviceDeltas):
    @pytest.fixture
    def lanes(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        hurry(monkeypatch)
        from dcr_cli.device.lanes import interpreted_lanes

        lanes = interpreted_lanes()
        object.__setattr__(lanes, "name", "cuda:0")
        return lanes

    @pytest.fixture
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Tensors in the host's memory are taken to lie on the device, but for those of publishers on a CPU."""

        def there(given: Any, tensor: Tensor) -> tuple[int, Any] | None:
            is_there = isinstance(given, torch.Tensor) and given.numel()
            return (0, given.contiguous().reshape(-1).view(torch.uint8)) if is_there else None

        monkeypatch.setattr(devices, "bytes_there", there)
        monkeypatch.setattr(given_base, "bytes_there", there)
        return "cpu"
