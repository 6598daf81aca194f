"""Which device is wished for, when one is worth its start, and what is said where there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcr_cli
from commands import Run
from dcr_cli.device import finding
from dcr_cli.device.lanes import cuda_lanes
from dcr_cli.device.wish import AUTO_BYTES_PER_JOB, MOST_SLOTS, Wish, why_not_worth, wish_of
from dcr_cli.errors import LocalError, UnsupportedError, UsageError
from dcr_cli.stages import Account, Stage, Stages
from fake_cuda import FakeCuda
from interpreter import HAS_CUDA, hurry

LARGE = 1 << 50


def test_wishes() -> None:
    assert [wish_of(text) for text in ("auto", "cpu", "cuda", "cuda:0", "cuda:12")] == [
        Wish("auto"),
        Wish("cpu"),
        Wish("cuda", 0),
        Wish("cuda", 0),
        Wish("cuda", 12),
    ]
    assert [wish_of(text).text for text in ("auto", "cpu", "cuda", "cuda:7")] == ["auto", "cpu", "cuda:0", "cuda:7"]


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "CUDA", "cuda:99999", "cpu:0"])
def test_what_is_no_device_is_refused(text: str, run: Run, tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match=r"^--device: auto, cpu, cuda or cuda:N expected, found "):
        wish_of(text)
    assert run("diff", *tiny_pair, "--device", text).code == 2


def test_work_is_worth_a_device_from_so_many_bytes_on() -> None:
    for jobs in (1, 2, MOST_SLOTS):
        assert why_not_worth(AUTO_BYTES_PER_JOB * jobs, jobs) is None
        assert why_not_worth(AUTO_BYTES_PER_JOB * jobs - 1, jobs) is not None
    expected = "1 GB to compare, and with 2 threads a device is worth its start from 64 GB on"
    assert why_not_worth(10**9, 2) == expected
    assert why_not_worth(LARGE, MOST_SLOTS + 1) == "9 threads compare as fast as a device is given what it compares"
    assert "with one thread a device is worth its start from 32 GB on" in str(why_not_worth(0, 1))


def test_auto_looks_only_where_the_work_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def find(index: int) -> Any:
        looked.append(index)
        raise UnsupportedError(f"--device cuda:{index}", "there is none")

    monkeypatch.setattr(finding, "find", find)
    assert finding.choose(Wish("auto"), work_bytes=1000, jobs=1).name == "cpu" and not looked
    found = finding.choose(Wish("auto"), work_bytes=LARGE, jobs=1)
    assert (found.lanes, found.why, looked) == (None, "there is none", [0])
    assert finding.choose(Wish("cpu"), work_bytes=LARGE, jobs=1).lanes is None and looked == [0]
    with pytest.raises(UnsupportedError):
        finding.choose(Wish("cuda", 3), work_bytes=0, jobs=1)
    finding.check(Wish("auto"))
    finding.check(Wish("cpu"))
    assert looked == [0, 3]
    with pytest.raises(UnsupportedError):
        finding.check(Wish("cuda", 1))


def test_auto_takes_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    lanes = cuda_lanes(1, "it")
    monkeypatch.setattr(finding, "find", lambda index: lanes)
    assert finding.choose(Wish("auto"), work_bytes=LARGE, jobs=1).lanes is lanes
    assert finding.choose(Wish("cuda"), work_bytes=0, jobs=1).why.endswith(", as asked for")


def test_auto_takes_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, the one which its process has made the current one; without CUDA begun, nothing is begun to look."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(finding, "find", lambda index: cuda_lanes(index, "it"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with torch.cuda.device(1):
        assert finding.choose(Wish("auto"), work_bytes=LARGE, jobs=1).name == "cuda:1"
        assert finding.choose(Wish("cuda", 0), work_bytes=LARGE, jobs=1).name == "cuda:0"
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert finding.choose(Wish("auto"), work_bytes=LARGE, jobs=1).name == "cuda:0"


def test_why_a_device_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"^--device cuda:2: Triton is not installed$") as caught:
        finding.find(2)
    assert caught.value.hint == "pip install 'dcr-cli[gpu]'"
    monkeypatch.setattr(finding, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(finding, "DRIVER_NODES", ("/nowhere/nvidiactl",))
    with pytest.raises(UnsupportedError, match="there is no CUDA device: NVIDIA's driver is not loaded"):
        finding.find(0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device is there; what its kernels are compiled by can be replaced."""
    pytest.importorskip("triton")
    hurry(monkeypatch)
    FakeCuda(monkeypatch)
    monkeypatch.setattr(finding, "DRIVER_NODES", ("/",))
    from dcr_cli.device import comparing

    return comparing


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, which Triton compiles for")
def test_a_device_is_tried_before_it_is_found(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding.find(1) is finding.find(1) and finding.find(1).name == "cuda:1"
    compare = kernels.compare_runs
    monkeypatch.setattr(kernels, "compare_runs", lambda old, new, *rest: compare(old, old, *rest))
    with pytest.raises(UnsupportedError, match=r"on fake 1: RuntimeError: what they find is not what the CPU finds$"):
        finding.find(1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Failed to find C compiler.\nPlease"), "failed: Failed to find C compiler."),
        (subprocess.CalledProcessError(1, ["gcc"]), r"failed: Command '\['gcc'\]' returned non-zero exit status 1."),
        (AssertionError("libcuda.so cannot found!\nPossible"), "AssertionError: libcuda.so cannot found!"),
        (PermissionError(13, "Permission denied", "/.triton"), r"PermissionError: \[Errno 13\] .*'/.triton'"),
        (torch.cuda.OutOfMemoryError("tried to allocate"), "out of memory"),
    ],
)
def test_where_kernels_cannot_run_the_cpu_works(
    kernels: Any, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is, unless the device was asked for."""

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(kernels, "compare_runs", fail)
    with pytest.raises(UnsupportedError, match=f"^--device cuda:0: kernels do not run on fake 0: {said}$"):
        finding.choose(Wish("cuda"), work_bytes=0, jobs=1)
    found = finding.choose(Wish("auto"), work_bytes=LARGE, jobs=1)
    assert found.lanes is None and re.fullmatch(f"kernels do not run on fake 0: {said}", found.why)


def test_why_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match=r"^it: torch .* is built without CUDA$"):
        cuda_lanes(0, "it")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="torch finds no CUDA device"):
        cuda_lanes(0, "it")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="there is one CUDA device, numbered from 0"):
        cuda_lanes(1, "it")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UnsupportedError, match="there are 8 CUDA devices, numbered from 0"):
        cuda_lanes(8, "it")

    def fail(index: int) -> str:
        raise RuntimeError("CUDA driver initialization failed\nmore of it")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    with pytest.raises(UnsupportedError, match=r"CUDA does not start: CUDA driver initialization failed$"):
        cuda_lanes(7, "it")


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (torch.cuda.OutOfMemoryError("tried to allocate\nmuch"), "cuda:1: out of memory"),
        (RuntimeError("an illegal memory access\nwas met"), "cuda:1: failed: an illegal memory access"),
        (subprocess.CalledProcessError(1, "gcc"), "cuda:1: failed: Command 'gcc' returned non-zero exit status 1."),
        (type("PTXASError", (Exception,), {"__module__": "triton.runtime.errors"})("no"), "cuda:1: failed: no"),
    ],
)
def test_a_device_that_fails_is_an_error_and_no_fall_back(
    error: Exception, facts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch, "empty", fail)
    lanes = cuda_lanes(1, "it")
    for memory in (lanes.host_memory, lanes.device_memory):
        with pytest.raises(LocalError, match=f"^{facts}$") as caught:
            memory(1)
        assert "--device cpu" in str(caught.value.hint)


def test_stages_add_up() -> None:
    stages = Stages()
    stages.add("read", 5, 1.0)
    with stages.timed("code", 7):
        pass
    stages.add("read", 1, 0.5)
    with pytest.raises(ZeroDivisionError), stages.timed("read", 100):
        raise ZeroDivisionError
    assert [(stage.name, stage.bytes) for stage in stages.all()] == [("read", 6), ("code", 7)]
    assert stages.all()[0].seconds == 1.5


def test_an_account_as_text() -> None:
    from dcr_cli.report.stages import account_text

    account = Account("cuda:0", "NVIDIA H200", (Stage("read", 3 * 10**9, 1.5), Stage("write", 0, 0.0)))
    assert account_text(account) == (
        "device: cuda:0 (NVIDIA H200)\nstage read: 3 GB, 1.500 s, 2 GB/s\nstage write: 0 B, 0.000 s\n"
    )


def test_verbose_says_where_and_how_long(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    ran = run("diff", *tiny_pair, "-v")
    lines = ran.err.splitlines()
    assert any(line.startswith("device: cpu (") and "worth its start" in line for line in lines)
    assert any(line.startswith("stage read and compare: 32.8 kB, ") for line in lines)
    ran = run("diff", *tiny_pair, "--json", "--device", "cpu")
    document = json.loads(ran.out)
    assert document["device"] == "cpu" and "account" not in document


@pytest.mark.parametrize("command", ["diff", "push", "part", "apply", "pull"])
def test_a_device_that_cannot_be_had_changes_nothing(
    command: str, run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "find_spec", lambda name: None)
    base, target = tiny_pair
    delta, remote = tmp_path / "delta", tmp_path / "remote"
    dcr_cli.diff(base, target, delta)
    dcr_cli.push(base, remote, baseline=tmp_path / "baseline")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments: dict[str, list[str | Path]] = {
        "diff": ["diff", base, target, "-o", tmp_path / "out"],
        "push": ["push", target, remote, "--baseline", tmp_path / "baseline"],
        "part": ["push", target, remote, "--baseline", tmp_path / "baseline", "--part", "0/1", "--attempt", "a"],
        "apply": ["apply", delta, base],
        "pull": ["pull", remote, tmp_path / "out"],
    }
    ran = run(*arguments[command], "--device", "cuda:3")
    assert ran.code == 8
    assert ran.err == "dcr: --device cuda:3: Triton is not installed\nhint: pip install 'dcr-cli[gpu]'\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_files_are_patched_on_the_cpu_and_it_is_said(
    run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "find", lambda index: None)
    base, target = tiny_pair
    dcr_cli.diff(base, target, tmp_path / "delta")
    ran = run("apply", tmp_path / "delta", base, "--device", "cuda", "-n")
    assert (ran.code, ran.err) == (0, "note: --device cuda:0 is not used: files are patched on the CPU\n")
    assert "device" not in run("apply", tmp_path / "delta", base, "-n").err
    assert "device: cpu (files are patched there)\n" in run("apply", tmp_path / "delta", base, "-n", "-v").err


def test_small_work_does_not_import_torch(tiny_pair: tuple[Path, Path]) -> None:
    code = "import sys, dcr_cli\nresult = dcr_cli.diff(sys.argv[1], sys.argv[2])\n"
    code += "print(result.device, sorted({'torch', 'triton'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *tiny_pair], check=True, capture_output=True, text=True)
    assert done.stdout == "cpu []\n"
