"""Checkpoints for tests: written by hand, byte by byte, so that no code under test has a part in them.

A tensor is (dtype, shape, bytes). Hypothesis strategies for tensors and for pairs of checkpoints are at the end.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dcr_cli.checkpoint.header import DTYPES

TensorData = tuple[str, Sequence[int], bytes]
Tensors = Mapping[str, TensorData]

INDEX = "model.safetensors.index.json"


def raw_file(header: str | bytes, data: bytes = b"") -> bytes:
    """A safetensors file around any header, well formed or not."""
    encoded = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(encoded)) + encoded + data


def shard_bytes(tensors: Tensors, metadata: Mapping[str, str] | None = None, **extra: Any) -> bytes:
    """A safetensors file with the tensors in the given order; `extra` are further members of every tensor's object."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)], **extra}
        position += len(data)
    return raw_file(json.dumps(header), b"".join(data for _, _, data in tensors.values()))


def write_checkpoint(
    root: Path,
    tensors: Tensors,
    *,
    shards: int = 1,
    index: bool = True,
    sidecars: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a new checkpoint and return `root`. Tensors are dealt to the shards in turn; a weight map has them all."""
    root.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        path = shard_name(number, shards)
        part = dict(list(tensors.items())[number::shards])
        (root / path).write_bytes(shard_bytes(part, metadata))
        weight_map |= dict.fromkeys(part, path)
    if index and weight_map:
        write_weight_map(root, weight_map, total_size=sum(len(data) for _, _, data in tensors.values()))
    for path, content in (sidecars or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def write_weight_map(root: Path, weight_map: Mapping[str, Any], *, name: str = INDEX, total_size: int = 0) -> None:
    (root / name).write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2))


def shard_name(number: int, shards: int) -> str:
    return "model.safetensors" if shards == 1 else f"model-{number + 1:05}-of-{shards:05}.safetensors"


def tensor_of(dtype: str, shape: Sequence[int], seed: int = 0) -> TensorData:
    """A tensor of random bits, the same for equal arguments."""
    return dtype, tuple(shape), random.Random(f"{dtype} {shape} {seed}").randbytes(byte_count(dtype, shape))


def byte_count(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].bits // 8


def with_changes(tensor: TensorData, positions: Sequence[int], mask: int = 1) -> TensorData:
    """The tensor with `mask` xored into the lowest byte of the stored elements at `positions`."""
    dtype, shape, data = tensor
    changed = bytearray(data)
    for position in positions:
        changed[position * DTYPES[dtype].width] ^= mask
    return dtype, shape, bytes(changed)


def every_dtype() -> dict[str, TensorData]:
    """A tensor of each dtype that the format has."""
    return {f"t.{name}": tensor_of(name, (2, 8)) for name in DTYPES}


def tiny_tensors() -> tuple[dict[str, TensorData], dict[str, TensorData]]:
    """The tensors of the tiny pair: 4 of 64x64 BF16, differing in 5 elements."""
    base = {f"layers.{number}.weight": tensor_of("BF16", (64, 64), number) for number in range(4)}
    target = dict(base)
    target["layers.0.weight"] = with_changes(base["layers.0.weight"], [0, 63, 4095])
    target["layers.2.weight"] = with_changes(base["layers.2.weight"], [64])
    target["layers.3.weight"] = with_changes(base["layers.3.weight"], [1000])
    return base, target


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Write the tiny pair, each of 2 shards with a weight map, as folder/base and folder/target."""
    sidecars = {"config.json": b'{"model_type": "tiny"}\n', "tokenizer/vocab.txt": b"a\nb\n"}
    base, target = tiny_tensors()
    return (
        write_checkpoint(folder / "base", base, shards=2, sidecars=sidecars, metadata={"format": "pt"}),
        write_checkpoint(folder / "target", target, shards=2, sidecars=sidecars, metadata={"format": "pt"}),
    )


def write_tiny_steps(folder: Path, count: int) -> list[Path]:
    """Write so many successive checkpoints, folder/step-1 and so on: of 2 shards, each 5 elements from the one
    before."""
    (folder / "steps").mkdir()
    tensors, _ = tiny_tensors()
    steps = []
    for step in range(1, count + 1):
        sidecars = {"config.json": b'{"model_type": "tiny"}\n', "step.txt": f"{step}\n".encode()}
        steps.append(write_checkpoint(folder / f"steps/step-{step}", tensors, shards=2, sidecars=sidecars))
        positions = [100 * step + 7 * number for number in range(5)]
        name = f"layers.{step % 4}.weight"
        tensors = tensors | {name: with_changes(tensors[name], positions, 1 + step % 3)}
    return steps


def write_halves(folder: Path) -> list[Path]:
    """Write two successive checkpoints, folder/steps/step-1 and step-2, of two tensors that both change."""
    base = {name: tensor_of("BF16", (64, 64), seed) for seed, name in enumerate("ab")}
    target = {name: with_changes(tensor, range(0, 900, 7)) for name, tensor in base.items()}
    return [write_checkpoint(folder / f"steps/step-{step}", each) for step, each in enumerate((base, target), 1)]


# Strategies

dtypes = st.sampled_from(sorted(DTYPES))
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")


@st.composite
def shapes(draw: st.DrawFn, dtype: str, max_elements: int = 2000) -> tuple[int, ...]:
    """A shape of up to four axes, zeros among them, whose elements fill whole bytes."""
    shape: list[int] = []
    left = max_elements
    for _ in range(draw(st.integers(0, 4))):
        shape.append(draw(st.integers(0, min(left, 70))))
        left //= max(shape[-1], 1)
    if math.prod(shape) * DTYPES[dtype].bits % 8:
        shape.append(8)
    return tuple(shape)


@st.composite
def tensors(draw: st.DrawFn, dtype: str | None = None) -> TensorData:
    """A tensor of any dtype and shape; its bytes are often alike, so that pairs of them are too."""
    dtype = draw(dtypes) if dtype is None else dtype
    shape = draw(shapes(dtype))
    return tensor_of(dtype, shape, draw(st.integers(0, 2)))


@st.composite
def tensor_sets(draw: st.DrawFn, max_size: int = 6) -> dict[str, TensorData]:
    return draw(st.dictionaries(names, tensors(), max_size=max_size))


@st.composite
def tensor_set_pairs(draw: st.DrawFn) -> tuple[dict[str, TensorData], dict[str, TensorData]]:
    """Base and target: tensors kept, changed a little, changed wholly, replaced, removed, added, renamed."""
    base = draw(tensor_sets())
    target: dict[str, TensorData] = {}
    for name, tensor in base.items():
        dtype, shape, data = tensor
        elements = len(data) // DTYPES[dtype].width
        match draw(st.sampled_from(["keep", "change", "change", "renew", "replace", "remove", "rename"])):
            case "keep":
                target[name] = tensor
            case "change" if elements:
                positions = draw(st.lists(st.integers(0, elements - 1), max_size=20))
                target[name] = with_changes(tensor, positions, draw(st.integers(1, 255)))
            case "renew":
                target[name] = tensor_of(dtype, shape, draw(st.integers(3, 5)))
            case "replace":
                target[name] = draw(tensors())
            case "rename":
                target[draw(names)] = tensor
            case _:
                pass
    return base, target | draw(st.dictionaries(names, tensors(), max_size=2))
