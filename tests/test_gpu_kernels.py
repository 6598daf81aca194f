"""gpu: run by Triton's interpreter, it equals the reference and the compiled kernels bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_kernels import GpuKernels
from interpreter import HAS_CUDA, HAS_TRITON, hurry

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, on which tests/gpu runs the same tests"),
]


class TestInterpreted(GpuKernels):
    @pytest.fixture
    def device(self) -> str:
        return "cpu"

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        hurry(monkeypatch)
        import dcr_kernels.gpu as gpu

        return gpu
