"""Modules with loaders as odd as those of engines, the checkpoints that they load, and steps of training that change
them: bits at random, among them NaNs and both zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.live.memory import memory_of
from strategies import TensorData, write_checkpoint

HEADS, GROUPS, WIDTH, HIDDEN, VOCAB = 4, 2, 4, 8, 21
PADDED = 24
# NaNs with payloads, quiet and signalling, minus zero, infinity, the smallest number.
STRANGE = (0x7FC1, 0xFFA5, 0x7F81, 0x8000, 0xFF80, 0x0001)
Forms = Mapping[str, tuple[str, tuple[int, ...]]]

FORMS: Forms = {
    "embed.weight": ("BF16", (VOCAB, HIDDEN)),
    "q.weight": ("BF16", (HEADS * WIDTH, HIDDEN)),
    "k.weight": ("BF16", (GROUPS * WIDTH, HIDDEN)),
    "v.weight": ("BF16", (GROUPS * WIDTH, HIDDEN)),
    "fused.weight": ("BF16", ((HEADS + 2 * GROUPS) * WIDTH, HIDDEN)),
    "o.weight": ("BF16", (HIDDEN, HEADS * WIDTH)),
    **{f"experts.{number}.up.weight": ("BF16", (8, HIDDEN)) for number in range(3)},
    "conv.weight": ("F32", (5, 7)),
    "norm.weight": ("F32", (HIDDEN,)),
    "scale": ("F64", ()),
    "ids": ("I64", (70,)),
    "mask": ("BOOL", (9,)),
    "empty": ("F32", (0, 3)),
}
MADE: Forms = {"a_log": ("F32", (12,)), "wide.weight": ("F32", (6, 8)), "wide.scale": ("F32", (6,))}


def rows(weight: Any, rank: int, ranks: int, axis: int = 0) -> Any:
    """The slice of a rank."""
    return weight.chunk(ranks, axis)[rank]


class Engine(nn.Module):
    """A rank of an engine: slices of heads, of columns and of a padded vocabulary, tied embeddings, fused and
    transposed weights, buffers, a tensor that is in two places, one that is not contiguous."""

    norm_copy: torch.Tensor

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.embed = nn.Parameter(torch.zeros(PADDED // ranks, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(HIDDEN, PADDED // ranks, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed
        groups = max(GROUPS // ranks, 1)
        self.qkv = nn.Parameter(torch.zeros((HEADS // ranks + 2 * groups) * WIDTH, HIDDEN, dtype=torch.bfloat16))
        self.fused = nn.Parameter(torch.zeros_like(self.qkv))
        self.o = nn.Parameter(torch.zeros(HIDDEN, HEADS // ranks * WIDTH, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.zeros(3, 8 // ranks, HIDDEN, dtype=torch.bfloat16))
        self.conv = nn.Parameter(torch.zeros(7, 5).t())
        self.norm = nn.Parameter(torch.zeros(HIDDEN))
        arena = torch.zeros(100)
        self.register_buffer("norm_copy", arena[40 : 40 + HIDDEN])
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))
        self.register_buffer("ids", torch.zeros(70, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("rotary", torch.arange(5, dtype=torch.float32) + 0.5)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            self.load(name, weight)

    def load(self, name: str, weight: Any) -> None:
        rank, ranks = self.rank, self.ranks
        queries, groups = HEADS // ranks * WIDTH, max(GROUPS // ranks, 1) * WIDTH
        copies = max(ranks // GROUPS, 1)
        if name == "embed.weight":
            padded = torch.zeros(PADDED, HIDDEN, dtype=weight.dtype)
            padded[:VOCAB] = weight
            self.embed.data.copy_(rows(padded, rank, ranks))
        elif name == "q.weight":
            self.qkv.data[:queries].copy_(rows(weight, rank, ranks))
        elif name in ("k.weight", "v.weight"):
            begin = queries + (groups if name == "v.weight" else 0)
            self.qkv.data[begin : begin + groups].copy_(rows(weight, rank // copies, min(ranks, GROUPS)))
        elif name == "fused.weight":
            parts = weight.split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH])
            mine = [rows(parts[0], rank, ranks)]
            mine += [rows(part, rank // copies, min(ranks, GROUPS)) for part in parts[1:]]
            self.fused.data.copy_(torch.cat(mine))
        elif name == "o.weight":
            self.o.data.copy_(rows(weight, rank, ranks, axis=1))
        elif name.startswith("experts."):
            self.experts.data[int(name.split(".")[1])].copy_(rows(weight, rank, ranks))
        elif name == "conv.weight":
            self.conv.data.copy_(weight)
        elif name == "norm.weight":
            self.norm.data.copy_(weight)
            self.norm_copy.copy_(weight)
        elif name != "empty":
            self.get_buffer(name).copy_(weight)


class Converting(Engine):
    """One that also computes: an exponential, and a cast with a scale for each row."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        self.a = nn.Parameter(torch.zeros(12 // ranks), requires_grad=False)
        self.wide = nn.Parameter(torch.zeros(6, 8, dtype=torch.float16), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.loads += 1
        pending = {}
        for name, weight in weights:
            if name == "a_log":
                self.a.data.copy_(-torch.exp(rows(weight, self.rank, self.ranks)))
            elif name.startswith("wide."):
                pending[name] = weight
            else:
                self.load(name, weight)
        if pending:
            self.wide.data.copy_(pending["wide.weight"] * pending["wide.scale"][:, None])


Bits = dict[str, NDArray[Any]]


def new_bits(forms: Forms, seed: int = 0) -> Bits:
    """Weights as training has them, small numbers, and some strange ones."""
    random = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in forms.items():
        count = math.prod(shape)
        if dtype in ("BF16", "F32"):
            singles = (random.standard_normal(count) * 0.05).astype("<f4").view("<u4")
            found[name] = (singles >> 16).astype("<u2") if dtype == "BF16" else singles
        else:
            found[name] = random.integers(0, 2, count).astype(f"<u{DTYPES[dtype].width}")
        if dtype == "BF16":
            found[name][: len(STRANGE)] = STRANGE
    return found


def train(bits: Bits, forms: Forms, seed: int) -> Bits:
    """A step later: some tensors as they were, in some a few elements changed, in others many."""
    random = np.random.default_rng(seed)
    found = {}
    for name, elements in bits.items():
        share = random.choice([0.0, 0.02, 0.3])
        changes = random.random(len(elements)) < share
        later = elements ^ (changes * (1 if forms[name][0] == "BOOL" else random.integers(1, 4))).astype(elements.dtype)
        if forms[name][0] == "BF16" and share:
            later[random.integers(0, len(later))] = random.choice(STRANGE)
        found[name] = later
    return found


def write(root: Path, forms: Forms, bits: Bits) -> Path:
    tensors: dict[str, TensorData] = {name: (*forms[name], elements.tobytes()) for name, elements in bits.items()}
    return write_checkpoint(root, tensors, shards=min(3, len(tensors)), sidecars={"config.json": b"{}"})


def weights_in(root: Path) -> Iterable[tuple[str, Any]]:
    from safetensors.torch import load_file

    for path in sorted(root.glob("*.safetensors")):
        yield from load_file(path).items()


def loaded(make: Callable[[], Any], root: Path) -> Any:
    """A module that its own loader has filled from a checkpoint."""
    module = make()
    with torch.no_grad():
        module.load_weights(weights_in(root))
    return module


def held(module: Any) -> dict[str, bytes]:
    """All bits of all parameters and buffers."""
    memory = memory_of(module)
    return {name: each.bits.read(0, each.form.elements).tobytes() for name, each in sorted(memory.stretches.items())}


def addresses(module: Any) -> dict[str, int]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.data_ptr() for name, tensor in tensors}
