"""gpu on a CUDA device: bit for bit what the reference and the compiled kernels are, where offsets need 64 bits too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcr_kernels import reference
from gpu_kernels import BF16, OF_WIDTH, RATES, GpuKernels, every_width
from interpreter import HAS_CUDA, HAS_TRITON
from kernel_cases import BLOCK_BYTES, pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device"),
]


class TestOnDevice(GpuKernels):
    @pytest.fixture
    def device(self) -> str:
        return "cuda"

    @pytest.fixture
    def gpu(self) -> Any:
        import dcr_kernels.gpu as gpu

        return gpu

    @every_width
    @pytest.mark.parametrize("rate", RATES)
    def test_blocks(self, gpu: Any, device: str, width: int, rate: float) -> None:
        spec = OF_WIDTH[width]
        self.check(gpu, device, pair(spec, 2 * BLOCK_BYTES // width + 63, rate), 4096 + 8 * width, spec)

    def test_the_same_bytes_every_time(self, gpu: Any, device: str) -> None:
        """With more tiles than the device has room for at once."""
        base, target = (torch.from_numpy(side).to(device).repeat(64) for side in pair(BF16, BLOCK_BYTES // 2, 0.03))
        first = gpu.compare(base, target, 0, (8, 7))
        for _ in range(20):
            found = gpu.compare(base, target, 0, (8, 7))
            assert torch.equal(found.positions.view(torch.int32), first.positions.view(torch.int32))
            assert torch.equal(found.ranking.ranks.view(torch.int32), first.ranking.ranks.view(torch.int32))

    def test_where_algorithms_have_to_be_deterministic(self, gpu: Any, device: str) -> None:
        """Torch refuses some of its own then."""
        torch.use_deterministic_algorithms(True)
        try:
            self.check(gpu, device, pair(BF16, 5000, 0.03), 0, BF16)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_more_than_two_to_the_31_elements(self, gpu: Any, device: str) -> None:
        n = 2**31 + 3 * BLOCK_BYTES + 5
        base = torch.zeros(n, dtype=torch.uint8, device=device)
        target = base.clone()
        places = np.array([0, 2**31 - 1, 2**31, n - 1])
        gpu.patch(target, torch.from_numpy(places).to(device), torch.full((4,), 7, dtype=torch.uint8, device=device))
        assert target.nonzero().flatten().tolist() == places.tolist()
        found = gpu.compare(base, target, 0, (4, 3))
        block = torch.bucketize(torch.arange(4, device=device), found.starts, right=True) - 1
        flat = found.positions.to(torch.int64) + block * BLOCK_BYTES
        assert flat.tolist() == places.tolist()
        growth = found.growths.cpu().numpy().sum(0, dtype=np.uint32)
        old, new = np.zeros(4, np.uint8), np.full(4, 7, np.uint8)
        expected = np.zeros(4, np.uint32)
        for place in places.tolist():
            expected += reference.digest_changes(np.zeros(1, np.uint32), old[:1], new[:1], place)
        assert growth.tolist() == expected.tolist()
