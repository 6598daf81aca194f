"""Deltas made by way of a device, here Triton's interpreter, are byte for byte those of the CPU."""

from __future__ import annotations

import pytest

from interpreter import HAS_CUDA, HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, on which tests/gpu runs the same tests"),
]
