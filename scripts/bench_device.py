"""How fast is a CUDA device, stage by stage, beside copies of the same bytes on it and to it?

Kernels are timed by the device's own clock, the best of some rounds after one that loads them; GB/s are bytes of the
target, so that comparing, which reads both sides, comes to at most half of what a copy moves. What is compared
and patched is checked first: against the CPU's kernels, block by block, digests and drafts included, and a delta of
files against the CPU's, byte by byte. Files are in memory already, and on both ways as many threads work.

Left out: how long torch takes to import, CUDA to start, kernels to compile, and pinned memory to be allocated, which
the better of two runs of `dcr diff` finds done; devices that others use meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from bench_report import BenchError, Report

import dcr_cli
import dcr_kernels as kernels
from dcr_cli.checkpoint.header import write_header
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.device.comparing import Batch, Device
from dcr_cli.stages import Stages
from dcr_kernels import gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcr_cli.device.lanes import Lane, Lanes

PERCENTS = (1, 3)
EXPONENT = (8, 7)
# Elements whose comparison is checked against the CPU's, and those that are made at once.
CHECKED = 32 * BLOCK_BYTES
AT_ONCE = 1 << 26
TENSORS, SHARDS = 8, 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of BF16 that lie on the device, and in files; rounds, and threads of `dcr diff`."""

    elements: int
    file_elements: int
    rounds: int
    jobs: int


def measure(lanes: Lanes, report: Report, place: Path, sizes: Sizes) -> None:
    """Measure a device, in one table; BenchError where a result is wrong."""
    report.begin("device", f"{lanes.name}, {lanes.model}; BF16, {sizes.elements / 2**29:.3g} GiB on the device")
    copy = _copies(lanes, report, pair(lanes, sizes.elements, PERCENTS[0])[0], sizes.rounds)
    for percent in PERCENTS:
        _kernels(lanes, report, copy, sizes, percent)
    for percent in PERCENTS:
        _files(lanes, report, place / f"files {percent}", sizes, percent)


def _kernels(lanes: Lanes, report: Report, copy: float, sizes: Sizes, percent: int) -> None:
    """Time what is done with tensors that lie on the device, where a copy moves `copy` GB/s."""
    base, target = pair(lanes, sizes.elements, percent)
    check_comparison(lanes, base[:CHECKED], target[:CHECKED])
    if percent == PERCENTS[0]:
        report.add("digest", _rate(lanes.compute, partial(gpu.digest, base), base.nbytes, sizes.rounds), "GB/s")
    rate = _rate(lanes.compute, partial(gpu.compare, base, target, 0, EXPONENT), base.nbytes, sizes.rounds)
    share = f"{100 * 2 * rate / copy:.0f} % of the copy, which moves as many bytes"
    report.add(f"compare and rank, {percent} %", rate, "GB/s", note=share)
    places, values, masks = lanes.compute.run(partial(_changes, base, target))[0]
    for name, patch, bits in (("patch", gpu.patch, values), ("patch xor", gpu.patch_xor, masks)):
        out, _ = lanes.compute.run(base.clone)
        # An odd number of times, the one that loads the kernel included: then masks have flipped what they should.
        rounds = 2 * max(1, sizes.rounds // 2)
        rate = _rate(lanes.compute, partial(patch, out, places, bits), base.nbytes, rounds)
        if not torch.equal(out.view(torch.int16), target.view(torch.int16)):
            raise BenchError(f"{name} at {percent} % does not lead to the target")
        report.add(f"{name}, {percent} %", rate, "GB/s", note=f"{bits.nbytes / 1e6:.3g} MB of changes")


def pair(lanes: Lanes, elements: int, percent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as they are distributed, and a share of them a step further, on the device, as bits.

    As all that is measured with, they are made in a lane, which waits until that is done.
    """
    return lanes.compute.run(partial(_pair, lanes.device, elements, percent))[0]


def _pair(device: torch.device, elements: int, percent: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.device(device):
        torch.manual_seed(percent)
        base = torch.empty(elements, dtype=torch.bfloat16)
        target = torch.empty(elements, dtype=torch.int16)
        for begin in range(0, elements, AT_ONCE):
            some = base[begin : begin + AT_ONCE].normal_(std=0.02)
            is_changed = torch.rand(len(some)) < percent / 100
            step = 1 - 2 * torch.randint(2, (len(some),), dtype=torch.int16)
            target[begin : begin + AT_ONCE] = some.view(torch.int16) + step * is_changed
    return base.view(torch.uint16), target.view(torch.uint16)


def _changes(base: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where two sides differ, the bits there, and the masks of those that flip."""
    old, new = base.view(torch.int16), target.view(torch.int16)
    places = (old != new).nonzero().flatten()
    values = new[places]
    return places, values.view(torch.uint16), (old[places] ^ values).view(torch.uint16)


def check_comparison(lanes: Lanes, base: torch.Tensor, target: torch.Tensor) -> None:
    """BenchError unless the device finds in each block of a batch what the CPU finds."""
    size = BLOCK_BYTES // 2
    old, new = base.cpu().numpy(), target.cpu().numpy()
    batch = Batch(2, (gpu.Run(len(old), 0),), EXPONENT)
    found = Device(lanes, Stages(), slots=1).compare(batch, base, target)
    for number, block in enumerate(found):
        here = slice(number * size, (number + 1) * size)
        expected = kernels.compare(old[here], new[here], number * BLOCK_BYTES, EXPONENT)
        if plain(block) != plain(expected):
            raise BenchError(f"block {number} on {lanes.name} is not what the CPU makes of it")


def plain(value: Any) -> Any:
    """What is in a comparison, in a form that compares bit for bit."""
    if isinstance(value, tuple):
        return tuple(plain(member) for member in value)
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _copies(lanes: Lanes, report: Report, data: torch.Tensor, rounds: int) -> float:
    """Time copies on the device, to it and back; the GB/s that one on it moves."""
    there, host = lanes.device_memory(data.nbytes).view(data.dtype), lanes.host_memory(data.nbytes).view(data.dtype)
    rate = _rate(lanes.compute, partial(there.copy_, data), 2 * data.nbytes, rounds)
    report.add("copy on the device", rate, "GB/s", note="bytes read and written")
    for name, lane, out, source in (("to", lanes.up, there, host), ("from", lanes.back, host, data)):
        one_way = _rate(lane, partial(out.copy_, source, non_blocking=True), data.nbytes, rounds)
        report.add(f"copy {name} the device", one_way, "GB/s", note="pinned memory")
    return rate


def _rate(lane: Lane, work: Callable[[], object], count_bytes: int, rounds: int) -> float:
    """GB/s of the best round, after one that does not count."""
    lane.run(work)
    return count_bytes / min(lane.run(work)[1] for _ in range(rounds)) / 1e9


def _files(lanes: Lanes, report: Report, place: Path, sizes: Sizes, percent: int) -> None:
    """Time `dcr diff` of files by way of the device, stage by stage, and on the CPU."""
    base, target = (side.cpu().numpy() for side in pair(lanes, sizes.file_elements, percent))
    for name, side in (("base", base), ("target", target)):
        _write(place / name, side)
    seconds: dict[str, float] = {}
    for device in (lanes.name, "cpu"):
        for number in range(2):
            start = time.perf_counter()
            out = place / f"{device} {number}"
            result = dcr_cli.diff(place / "base", place / "target", out, jobs=sizes.jobs, device=device)
            seconds[device] = min(seconds.get(device, float("inf")), time.perf_counter() - start)
        if device != "cpu":
            account = result.account
    if _tree(place / f"{lanes.name} 1") != _tree(place / "cpu 1"):
        raise BenchError(f"the delta by way of {lanes.name} is not the CPU's")
    for stage in account.stages:
        if stage.seconds > 0:
            note = f"{stage.seconds:.3f} s of all threads"
            report.add(
                f"diff of files, {percent} %: {stage.name}", stage.bytes / stage.seconds / 1e9, "GB/s", note=note
            )
    for device, took in seconds.items():
        note = f"{took:.3f} s, {sizes.jobs} threads"
        report.add(f"diff of files, {percent} %, {device}", base.nbytes / took / 1e9, "GB/s", note=note)


def _write(folder: Path, elements: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    """A checkpoint of some tensors in two shards."""
    folder.mkdir(parents=True)
    tensors = np.array_split(elements, TENSORS)
    names: dict[str, str] = {}
    for shard in range(SHARDS):
        own = {f"layers.{number}.weight": tensors[number] for number in range(shard, TENSORS, SHARDS)}
        path = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        with (folder / path).open("wb") as file:
            file.write(write_header({name: ("BF16", tensor.shape) for name, tensor in own.items()}))
            for tensor in own.values():
                file.write(tensor.tobytes())
        names |= dict.fromkeys(own, path)


def _tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
