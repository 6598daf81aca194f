"""Deltas made by way of Triton's interpreter, in the place of a device, are byte for byte those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

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

        return interpreted_lanes()
