"""gpu: run by Triton's interpreter, it equals the reference and the compiled kernels bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

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

    def test_one_thread_launches_at_a_time(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of two that patch, and one that digests; each waits for another one."""
        from dcr_kernels.gpu import comparing, patching

        both, met = threading.Barrier(2), []

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return self

            def __call__(self, *_: Any, **__: Any) -> None:
                with suppress(threading.BrokenBarrierError):
                    met.append(both.wait(0.1))

        monkeypatch.setattr(patching, "scatter", Kernel())
        monkeypatch.setattr(comparing, "measure", Kernel())
        data, places = torch.zeros(9, dtype=torch.uint8), torch.arange(3)
        with ThreadPoolExecutor(3) as pool:
            patches = [pool.submit(gpu.patch, data, places, data[:3]) for _ in range(2)]
            for each in [*patches, pool.submit(gpu.digest, data)]:
                each.result()
        assert not met
