"""scripts/bench --device: what it measures and checks, on Triton's interpreter in the place of a device."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dcr_cli.delta import device_scan
from dcr_cli.device import finding
from dcr_cli.device.lanes import cuda_lanes
from dcr_cli.errors import LocalError
from fake_cuda import FakeCuda
from interpreter import HAS_CUDA, HAS_TRITON, hurry

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, which Triton compiles for"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    hurry(monkeypatch)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("bench_device")


@pytest.fixture
def cuda(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """What is made for it to measure with lies on the device, and nothing is used before that is done."""
    cuda = FakeCuda(monkeypatch)
    for name in ("compare", "digest", "patch", "patch_xor"):
        monkeypatch.setattr(bench.gpu, name, cuda.using(getattr(bench.gpu, name)))
    for name in ("_pair", "_changes"):
        make = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *given, make=make: tuple(cuda.take(each) for each in make(*given)))
    yield cuda
    assert cuda.faults == []


@pytest.fixture
def lanes(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    lanes = replace(cuda_lanes(0, "it"), device=torch.device("cpu"))
    monkeypatch.setattr(finding, "find", lambda index: lanes)
    monkeypatch.setattr(device_scan, "RUN_BYTES", 1)
    monkeypatch.setattr(device_scan, "LEAST_BYTES", 1)
    return lanes


def test_every_stage_is_in_the_table(bench: Any, lanes: Any, tmp_path: Path) -> None:
    stream = io.StringIO()
    report = bench.Report(stream)
    bench.measure(lanes, report, tmp_path, bench.Sizes(5000, 3000, 2, 2))
    report.end()
    found = {row.what for row in report.rows}
    for what in ("copy on the device", "copy to the device", "copy from the device", "digest"):
        assert what in found and what in stream.getvalue()
    for percent in (1, 3):
        for what in ("compare and rank", "patch", "patch xor"):
            assert f"{what}, {percent} %" in found
        for stage in ("read", "copy there", "compare", "copy back", "draft", "code", "write"):
            assert f"diff of files, {percent} %: {stage}" in found
        assert {f"diff of files, {percent} %, cuda:0", f"diff of files, {percent} %, cpu"} <= found
    assert [row.what for row in report.rows if row.value <= 0 or row.unit != "GB/s"] == []


def test_wrong_results_are_noticed(bench: Any, lanes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = bench.pair(lanes, 2000, 3)
    assert 20 < torch.count_nonzero(base.view(torch.int16) != target.view(torch.int16)) < 120
    compare = bench.kernels.compare
    monkeypatch.setattr(bench.kernels, "compare", lambda old, *rest: compare(old ^ 1, *rest))
    with pytest.raises(bench.BenchError, match="block 0 on cuda:0 is not what the CPU makes of it"):
        bench.check_comparison(lanes, base, target)
    monkeypatch.setattr(bench.kernels, "compare", compare)
    monkeypatch.setattr(bench.gpu, "patch", lambda out, places, values: None)
    with pytest.raises(bench.BenchError, match="patch at 1 % does not lead to the target"):
        bench.measure(lanes, bench.Report(io.StringIO()), tmp_path, bench.Sizes(500, 500, 1, 1))


def test_a_device_that_fails_is_said(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four threads are what one is measured with, unless others are asked for."""
    loader = SourceFileLoader("bench_command", str(Path(__file__).parents[1] / "scripts" / "bench"))
    command: Any = ModuleType(loader.name)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(command)
    given: list[int] = []

    def fail(lanes: Any, report: Any, place: Path, sizes: Any) -> None:
        given.append(sizes.jobs)
        raise LocalError("cuda:0", "out of memory", hint="free some of it")

    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "find_device", lambda text: object())
    monkeypatch.setattr(bench, "measure", fail)
    assert command.main(["--quick", "--dir", str(tmp_path), "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "bench: cuda:0: out of memory\nhint: free some of it\n"
    assert given == [4] and command.parse([]).jobs == 2 and not any(tmp_path.iterdir())
