"""scripts/compile_gpu.py: without a device, the kernels compile for an H200, and nothing is spilt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import HAS_TRITON

SCRIPT = Path(__file__).parents[1] / "scripts" / "compile_gpu.py"


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_bf16_compiles(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(SCRIPT), "2"]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert [row["kernel"] for row in found["kernels"]] == ["measure", "settle", "compact", "gather", "scatter"]
    assert all(row["width"] == 2 and row["spilt_bytes"] == 0 < row["registers"] <= 128 for row in found["kernels"])
    assert found["target"] == "sm_90"
    by_kernel = {row["kernel"]: row for row in found["kernels"]}
    # Of 65536 registers of a processor, 8 warps with 103 each take 26624: twice.
    assert (by_kernel["compact"]["shared_bytes"], by_kernel["compact"]["resident_warps"]) == (32768, 16)
    assert by_kernel["scatter"]["shared_bytes"] == 8192
