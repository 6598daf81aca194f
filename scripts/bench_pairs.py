"""Makes pairs of synthetic checkpoints with an RL-like change between them, of any size, chunk by chunk in all threads.

A weight is a float32 master, Gaussian with a spread that differs from tensor to tensor and from row to row. The base
stores its bfloat16 rounding. One step moves every master by the learning rate times a number between -1 and 1 (bell-
shaped; Adam's updates are bounded by about the rate), and the target stores the rounding of that. So small weights
change often and large ones hardly ever, as in training. The rate that changes the wanted share is found by bisection.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 16
TYPICAL_SPREAD = 0.02
SAMPLE_TENSORS = 512
SAMPLE_ELEMENTS = 1 << 12

Shape = tuple[int, ...]
Named = tuple[str, Shape]
Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a pair lies and what is in it."""

    base: Path
    target: Path
    elements: int
    changed: int
    bytes: int

    @property
    def change(self) -> str:
        """The share of changed elements, in words."""
        return f"{self.changed:,} of {self.elements:,} elements changed ({self.changed / self.elements:.2%})"


def decoder(elements: int) -> list[Named]:
    """Tensors of a decoder-only model with about `elements` elements in all, under the usual names."""
    hidden = 256 if elements < 1 << 25 else 1024 if elements < 1 << 30 else 2048
    layer = [
        ("input_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.k_proj.weight", (hidden // 4, hidden)),
        ("self_attn.v_proj.weight", (hidden // 4, hidden)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (3 * hidden, hidden)),
        ("mlp.up_proj.weight", (3 * hidden, hidden)),
        ("mlp.down_proj.weight", (hidden, 3 * hidden)),
    ]
    layers = max(1, int(elements * 0.9) // sum(math.prod(shape) for _, shape in layer))
    named: list[Named] = [(f"model.layers.{i}.{name}", shape) for i in range(layers) for name, shape in layer]
    vocabulary = max(1, (elements - sum(math.prod(shape) for _, shape in named)) // hidden)
    return [("model.embed_tokens.weight", (vocabulary, hidden)), *named, ("model.norm.weight", (hidden,))]


def giant(elements: int) -> list[Named]:
    """One tensor of about `elements` elements."""
    return [("model.embed_tokens.weight", (max(1, elements // 4096), 4096))]


def make_pair(folder: Path, tensors: Sequence[Named], *, rate: float, shards: int, seed: int) -> Pair:
    """Write folder/base and folder/target: `tensors` in at most `shards` shards, of which about `rate` changes."""
    seeds = {name: (seed, number) for number, (name, _) in enumerate(tensors)}
    step = _find_step(tensors, seeds, rate)
    groups = _groups(tensors, shards)
    weight_map: dict[str, str] = {}
    changed = 0
    for side in ("base", "target"):
        (folder / side).mkdir(parents=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            weight_map |= {name: file for name, _ in group}
            header, begins = _header(group)
            size = begins[-1]
            files = [_create(folder / side / file, header, size) for side in ("base", "target")]
            try:
                tasks = _tasks(group, begins, seeds, step, files)
                changed += sum(pool.map(lambda task: task(), tasks))
            finally:
                for descriptor in files:
                    os.close(descriptor)
    elements = sum(math.prod(shape) for _, shape in tensors)
    index = {"metadata": {"total_size": 2 * elements}, "weight_map": weight_map}
    for side in ("base", "target"):
        (folder / side / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        (folder / side / "config.json").write_text('{"model_type": "synthetic"}\n')
    return Pair(folder / "base", folder / "target", elements, changed, 2 * elements)


def make_tiny_pair(folder: Path, *, count: int, rate: float, seed: int) -> Pair:
    """Write a pair of `count` tensors of 1 to 16 bytes in four shards; each byte changes with probability `rate`."""
    rng = np.random.Generator(np.random.SFC64(seed))
    widths = {"BF16": 2, "F32": 4, "U8": 1}
    weight_map: dict[str, str] = {}
    elements = changed = total = 0
    for side in ("base", "target"):
        (folder / side).mkdir(parents=True)
    for number in range(4):
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for i in range(number, count, 4):
            dtype = ("BF16", "F32", "U8")[i % 3]
            size = 1 + i * 7 % 16
            numel = max(1, size // widths[dtype])
            size = numel * widths[dtype]
            name = f"model.layers.{i // 64}.experts.{i % 64}.scale"
            header[name] = {"dtype": dtype, "shape": [numel], "data_offsets": [at, at + size]}
            weight_map[name] = file
            elements, at = elements + numel, at + size
        old = rng.integers(0, 256, at, np.uint8)
        new = np.where(rng.random(at) < rate, old ^ rng.integers(1, 256, at, np.uint8), old)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            differs = (old[begin:end] != new[begin:end]).reshape(-1, widths[entry["dtype"]])
            changed += int(differs.any(axis=1).sum())
        for side, data in (("base", old), ("target", new)):
            (folder / side / file).write_bytes(framed(header) + data.tobytes())
        total += at
    for side in ("base", "target"):
        (folder / side / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}) + "\n")
    return Pair(folder / "base", folder / "target", elements, changed, total)


@dataclass(frozen=True, slots=True)
class _Law:
    """How one tensor's masters are drawn: their centre, and the spread of each row."""

    centre: float
    spreads: NDArray[np.float32]
    columns: int

    def draw(self, first: int, rows: int, seed: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Masters of some rows, and where between -1 and 1 a step moves each."""
        rng = np.random.Generator(np.random.SFC64([*seed, first]))
        masters = rng.standard_normal((rows, self.columns), np.float32)
        masters *= self.spreads[first : first + rows, None]
        masters += np.float32(self.centre)
        # The sum of two uniform numbers.
        raw = rng.integers(0, 1 << 64, -(-masters.size // 2), np.uint64).view(np.uint16)
        moves = raw[: masters.size].astype(np.float32)
        moves += raw[-masters.size :]
        moves -= np.float32(65535)
        moves *= np.float32(1 / 65535)
        return masters.reshape(-1), moves


def _law(shape: Shape, seed: Sequence[int]) -> _Law:
    rng = np.random.Generator(np.random.SFC64([*seed, 1 << 40]))
    if len(shape) == 1:
        return _Law(1.0, np.full(1, 0.1, np.float32), shape[0])
    spread = TYPICAL_SPREAD * math.exp(0.5 * rng.standard_normal())
    return _Law(0.0, (spread * np.exp(0.3 * rng.standard_normal(shape[0]))).astype(np.float32), shape[1])


def _round(values: NDArray[np.float32]) -> Bits:
    """bfloat16 bits of float32 values, to the nearest, ties to even; there is no NaN among them."""
    bits = values.view(np.uint32)
    sums = bits >> 16
    sums &= 1
    sums += 0x7FFF
    sums += bits
    return np.ascontiguousarray(sums.view("<u2")[1::2])


def _write_chunk(law: _Law, first: int, rows: int, seed: Sequence[int], step: float, files: list[int], at: int) -> int:
    masters, moves = law.draw(first, rows, seed)
    base = _round(masters)
    moves *= np.float32(step)
    masters += moves
    target = _round(masters)
    for descriptor, bits in zip(files, (base, target), strict=True):
        left = bits.data.cast("B")
        place = at
        while left:
            written = os.pwrite(descriptor, left, place)
            left, place = left[written:], place + written
    return int(np.count_nonzero(base != target))


def _tasks(
    group: Sequence[Named], begins: list[int], seeds: dict[str, tuple[int, int]], step: float, files: list[int]
) -> Iterator[Callable[[], int]]:
    for (name, shape), begin in zip(group, begins, strict=False):
        law = _law(shape, seeds[name])
        rows_at_once = max(1, CHUNK_ELEMENTS // law.columns)
        for first in range(0, len(law.spreads), rows_at_once):
            rows = min(rows_at_once, len(law.spreads) - first)
            yield partial(_write_chunk, law, first, rows, seeds[name], step, files, begin + 2 * first * law.columns)


def _find_step(tensors: Sequence[Named], seeds: dict[str, tuple[int, int]], rate: float) -> float:
    """The learning rate that changes the share `rate` of a sample."""
    large = [named for named in tensors if len(named[1]) > 1]
    weights = np.array([math.prod(shape) for _, shape in large], np.float64)
    order = np.random.default_rng(0).choice(len(large), SAMPLE_TENSORS, p=weights / weights.sum())
    masters, moves = [], []
    for draw, number in enumerate(order.tolist()):
        name, shape = large[number]
        rows = min(shape[0], -(-SAMPLE_ELEMENTS // shape[1]))
        first = draw * (shape[0] - rows) // SAMPLE_TENSORS
        drawn = _law(shape, seeds[name]).draw(first, rows, (*seeds[name], draw))
        masters.append(drawn[0])
        moves.append(drawn[1])
    sample, move = np.concatenate(masters), np.concatenate(moves)
    stored = _round(sample)
    low, high = math.log(1e-10), math.log(1e-1)
    for _ in range(24):
        middle = (low + high) / 2
        share = np.mean(_round(sample + move * np.float32(math.exp(middle))) != stored)
        low, high = (middle, high) if share < rate else (low, middle)
    return math.exp((low + high) / 2)


def _groups(tensors: Sequence[Named], shards: int) -> list[list[Named]]:
    total = sum(math.prod(shape) for _, shape in tensors)
    groups: list[list[Named]] = [[] for _ in range(shards)]
    placed = 0
    for named in tensors:
        groups[placed * shards // total].append(named)
        placed += math.prod(named[1])
    return [group for group in groups if group]


def _header(group: Sequence[Named]) -> tuple[bytes, list[int]]:
    """The head of a shard, where in the file each of its tensors begins, and last the file's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = [0]
    for name, shape in group:
        offsets.append(offsets[-1] + 2 * math.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets[-2:]}
    head = framed(header)
    return head, [len(head) + offset for offset in offsets]


def framed(header: Mapping[str, Any]) -> bytes:
    """The head of a safetensors file, padded as its usual writer does."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _create(path: Path, header: bytes, size: int) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.truncate(descriptor, size)
    os.pwrite(descriptor, header, 0)
    return descriptor
