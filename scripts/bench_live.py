"""What does it cost to patch a served module where it lies, beside loading it whole, and beside loading patches?

A decoder with fused projections is filled by a loader of its own, as an engine's is. For each share of changed elements
three ways bring it from base to target: `Receiver.apply` of what was staged; a full load of the target by its loader;
and a load of each tensor that changes as one of NaNs but for the new values, with a `copy_` that leaves alone what a
NaN is copied onto, which is how vLLM's function for patches in a checkpoint's coordinates does it. After each the
module is compared, bit for bit, with a full load. What staging takes, while the module serves, stands beside it.

Memory that is touched is counted, not measured: of the module, lines of 64 bytes that hold a changed element, or all
that a loader writes. Left out: reading files, which are in memory already; vLLM's own checks of patches.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_clock import Times
from bench_pairs import Named, Pair
from bench_report import BenchError, Report
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

import dcr_cli
from dcr_cli.live import Receiver
from dcr_cli.live.memory import memory_of

_PLAIN_COPY = torch.Tensor.copy_
LINE_BYTES = 64
WAYS = {"apply": "apply", "load": "full load", "patch": "patch of NaNs"}
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}

Weights = dict[str, Any]
Snapshot = dict[str, NDArray[np.uint16]]
Patches = dict[str, tuple[torch.Size, Any, Any]]


class Module(nn.Module):
    """A decoder whose queries, keys and values, and whose gates and ups, lie in one tensor each."""

    def __init__(self, tensors: Sequence[Named]) -> None:
        super().__init__()
        rows: dict[str, int] = {}
        self.places: dict[str, tuple[str, int]] = {}
        columns: dict[str, tuple[int, ...]] = {}
        for name, shape in tensors:
            place = _fused(name)
            self.places[name] = (place, rows.get(place, 0))
            rows[place] = rows.get(place, 0) + shape[0]
            columns[place] = shape[1:]
        for place, count in rows.items():
            self.register_buffer(place, torch.zeros(count, *columns[place], dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            place, first = self.places[name]
            self.get_buffer(place)[first : first + len(weight)].copy_(weight)


def live(report: Report, place: Path, tensors: Sequence[Named], pairs: Iterable[Pair], rounds: int) -> None:
    """Measure pairs of these tensors, in one table, each removed after it; BenchError where a module is not what it
    should be."""
    report.begin("live", f"a module of {2 * sum(math.prod(shape) for _, shape in tensors) / 2**20:.0f} MiB, BF16")
    layout = place / "placement.json"
    for pair in pairs:
        delta = pair.base.parent / "delta"
        dcr_cli.diff(pair.base, pair.target, delta, encoding="gap")
        _measure(report, layout, tensors, pair, rounds)
        shutil.rmtree(pair.base.parent)
    layout.unlink()


def _measure(report: Report, layout: Path, tensors: Sequence[Named], pair: Pair, rounds: int) -> None:
    base, target = _weights(pair.base), _weights(pair.target)
    module = Module(tensors)
    module.load_weights(base.items())
    old = _held(module)
    module.load_weights(target.items())
    expected = _held(module)
    patches = _patches(base, target)
    seconds: dict[str, list[float]] = {name: [] for name in ("stage", "apply", "load", "patch")}
    for _ in range(rounds):
        module.load_weights(base.items())
        receiver = Receiver(module, key="bench", checkpoint=pair.base, layout=layout if layout.exists() else None)
        receiver.learn()
        if not layout.exists():
            receiver.save_layout(layout)
        ways: dict[str, Callable[[], object]] = {
            "apply": receiver.apply,
            "load": partial(module.load_weights, target.items()),
            "patch": partial(_load_patches, module, patches),
        }
        seconds["stage"].append(_time(partial(receiver.stage, pair.base.parent / "delta")))
        for name, way in ways.items():
            if name != "apply":
                module.load_weights(base.items())
            seconds[name].append(_time(way))
            if not _is_same(_held(module), expected):
                raise BenchError(f"live: {name} leaves other bits than a full load")
    touched = {
        "apply": LINE_BYTES * sum(_lines(old[name], expected[name]) for name in old),
        "load": pair.bytes,
        "patch": 2 * sum(math.prod(shape) for shape, _, _ in patches.values()),
    }
    _tell(report, pair, touched, {name: Times(tuple(found)) for name, found in seconds.items()})


def _tell(report: Report, pair: Pair, touched: dict[str, int], times: dict[str, Times]) -> None:
    notes = {
        "apply": f"{pair.changed:,} elements, staged before it in {1e3 * times['stage'].best:.0f} ms",
        "load": "",
        "patch": "as much again is written and read for the NaNs",
    }
    share = f"{pair.changed / pair.elements:.2%}"
    for name, title in WAYS.items():
        report.add(f"{title}, {share}", 1e3 * times[name].best, "ms", note=notes[name])
        note = f"{touched[name] / pair.bytes:.2%} of the module"
        report.add(f"{title}, {share}: touched", touched[name] / 1e6, "MB", note=note)


def _patches(base: Weights, target: Weights) -> Patches:
    """What changes of each tensor: its shape, flat positions, new values."""
    found: Patches = {}
    for name, weight in target.items():
        differs = (weight.view(torch.int16) != base[name].view(torch.int16)).reshape(-1)
        positions = differs.nonzero().reshape(-1)
        if len(positions):
            found[name] = (weight.shape, positions, weight.reshape(-1)[positions])
    return found


def _load_patches(module: Module, patches: Patches) -> None:
    with mock.patch.object(torch.Tensor, "copy_", _copy_no_nans):
        module.load_weights(_scratch(patches))


def _scratch(patches: Patches) -> Iterator[tuple[str, Any]]:
    for name, (shape, positions, values) in patches.items():
        scratch = torch.full((math.prod(shape),), math.nan, dtype=torch.bfloat16)
        scratch[positions] = values
        yield name, scratch.reshape(shape)


def _copy_no_nans(tensor: Any, source: Any, *options: Any) -> Any:
    return _PLAIN_COPY(tensor, torch.where(source.isnan(), tensor, source), *options)


def _weights(folder: Path) -> Weights:
    return {name: weight for path in sorted(folder.glob("*.safetensors")) for name, weight in load_file(path).items()}


def _held(module: Module) -> Snapshot:
    stretches = memory_of(module).stretches
    return {name: each.bits.read(0, each.form.elements) for name, each in stretches.items()}


def _is_same(one: Snapshot, other: Snapshot) -> bool:
    return all(np.array_equal(elements, other[name]) for name, elements in one.items())


def _lines(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> int:
    """Lines of memory that hold an element that differs."""
    return len(np.unique(np.flatnonzero(old != new) * 2 // LINE_BYTES))


def _fused(name: str) -> str:
    for part, fused in FUSED.items():
        name = name.replace(part, fused)
    return name.replace(".", "_")


def _time(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start
