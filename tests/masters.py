"""A trainer's masters in F32, for tests: shards of two ranks, the layout that makes a checkpoint of them by rules, and
that checkpoint, made of them by PyTorch's arithmetic alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement, Rule
from strategies import TensorData, shard_bytes, write_checkpoint

RANKS = 2
BLOCK = 16
FUNCTION = "master_functions:mirror"
# What `FUNCTION` has to be imported from.
SOURCE = "def mirror(given):\n    return given[::-1]\n"
# By name: shape, and how ranks divide it: rows, columns, columns transposed, or not at all.
HELD = {
    "cast": ((40, 48), "rows"),
    "across": ((48, 40), "transposed"),
    "norm": ((33,), "all"),
    "bias": ((7,), "all"),
    "plain": ((12, 10), "columns"),
}
BLOCKS = {"blocks": ((64, 48), "rows"), "experts": ((4, 20, 32), "all"), "channels": ((30, 24), "rows")}
CALLED = {"called": ((6, 8), "all")}
_DTYPES = {torch.bfloat16: ("BF16", torch.int16), torch.float32: ("F32", torch.int32)}
_CODES = {torch.float8_e4m3fn: "F8_E4M3"}

Values = Mapping[str, torch.Tensor]
Kinds = Mapping[str, tuple[tuple[int, ...], str]]


def masters(kinds: Kinds, step: int) -> dict[str, torch.Tensor]:
    """What the trainer holds after so many steps: a few elements in a hundred are others after each."""
    found = {}
    for number, (name, (shape, _)) in enumerate(kinds.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.05
        draws = torch.Generator().manual_seed(100 + number)
        for _ in range(step):
            chosen = torch.rand(shape, generator=draws) < 0.1
            values = torch.where(chosen, values + 1e-3 * torch.randn(shape, generator=draws), values)
        found[name] = values.contiguous()
    return found


def checkpoint_of(values: Values) -> dict[str, TensorData]:
    """The checkpoint that the masters make."""
    made: dict[str, torch.Tensor] = {}
    for name, each in values.items():
        if name == "norm":
            made[name] = (each + 1).to(torch.bfloat16)
        elif name == "bias":
            made[name] = (each.to(torch.bfloat16).float() - 1).to(torch.bfloat16)
        elif name == "plain":
            made[name] = each
        elif name == "called":
            made[name] = each.flip(0)
        elif name in BLOCKS:
            block = (1, each.shape[-1]) if name == "channels" else (BLOCK, BLOCK)
            made[name], made[f"{name}_scale"] = quantized(each.to(torch.bfloat16).float(), block)
        else:
            made[name] = each.to(torch.bfloat16)
    return {name: _data_of(each) for name, each in made.items()}


def quantized(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of blocks."""
    rows, columns = values.shape[-2:]
    height, width = block
    padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    *experts, tall, wide = padded.shape
    blocks = padded.view(*experts, tall // height, height, wide // width, width)
    scales = blocks.abs().amax(dim=(-3, -1), keepdim=True) / 448
    made = (blocks / scales).clamp(-448, 448).view(*experts, tall, wide)[..., :rows, :columns]
    return made.to(torch.float8_e4m3fn), scales.squeeze(-1).squeeze(-2)


def _data_of(values: torch.Tensor) -> TensorData:
    name, bits = _DTYPES.get(values.dtype, (_CODES.get(values.dtype, ""), torch.uint8))
    return name, tuple(values.shape), values.contiguous().view(bits).numpy().tobytes()


def rules_of(name: str) -> dict[str, Rule]:
    """The rules of what a master makes."""
    if name == "plain":
        return {}
    if name in BLOCKS:
        kind = "fp8-channel" if name == "channels" else "fp8-block"
        options: dict[str, Any] = {"through": "BF16"} | ({} if name == "channels" else {"block": [BLOCK, BLOCK]})
        parts = {name: "weight", f"{name}_scale": "scale"}
        return {made: Rule(kind, name, {"part": part, **options}) for made, part in parts.items()}
    if name == "bias":
        return {name: Rule("subtract-one", name, {"through": "BF16"})}
    if name == "called":
        return {name: Rule("python", name, {"function": FUNCTION})}
    return {name: Rule("add-one" if name == "norm" else "cast", name)}


def write_layout(path: Path, kinds: Kinds, *, ranks: int = RANKS) -> Path:
    """Write the layout, of as many ranks."""
    layout = masters_layout(kinds, ranks=ranks)
    path.write_bytes(encode_layout(layout))
    return path


def masters_layout(kinds: Kinds, *, ranks: int = RANKS) -> Layout:
    made = checkpoint_of(masters(kinds, 0))
    rules = {made: rule for name in kinds for made, rule in rules_of(name).items()}
    stored = {name: Form("F32", shape) for name, (shape, _) in kinds.items() if name != "plain"}
    shards = {
        path_of(rank): {name: local_tensor(name, *kind, rank, ranks) for name, kind in kinds.items()}
        for rank in range(ranks)
    }
    forms = {name: Form(dtype, tuple(shape)) for name, (dtype, shape, _) in made.items()}
    return Layout("masters", forms, shards, stored=stored, rules=rules)


def path_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _part(shape: tuple[int, ...], way: str, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Where a rank's part of a tensor begins, and its shape."""
    starts, counts = [0] * len(shape), list(shape)
    if way != "all":
        axis = 0 if way == "rows" else len(shape) - 1
        starts[axis] = rank * shape[axis] // ranks
        counts[axis] = (rank + 1) * shape[axis] // ranks - starts[axis]
    return starts, counts


def local_tensor(name: str, shape: tuple[int, ...], way: str, rank: int, ranks: int) -> LocalTensor:
    """What a layout says of what a rank holds of a master."""
    starts, counts = _part(shape, way, rank, ranks)
    if way == "all":
        return LocalTensor(Form("F32", shape), (Placement(name, whole_box(int(np.prod(shape)))),))
    if way != "transposed":
        return LocalTensor(Form("F32", tuple(counts)), (Placement(name, slice_box(shape, starts, counts)),))
    rows, columns = counts
    box = Box.make([(rows, shape[1], 1), (columns, 1, rows)], starts[1], 0)
    return LocalTensor(Form("F32", (columns, rows)), (Placement(name, box),))


def rank_arrays(kinds: Kinds, values: Values, rank: int, *, ranks: int = RANKS) -> dict[str, NDArray[Any]]:
    """What a rank holds, as arrays."""
    found = {}
    for name, (shape, way) in kinds.items():
        starts, counts = _part(shape, way, rank, ranks)
        cut = tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))
        mine = values[name].numpy()[cut]
        found[name] = np.ascontiguousarray(mine.T if way == "transposed" else mine)
    return found


def write_shards(root: Path, kinds: Kinds, step: int, *, ranks: int = RANKS) -> Path:
    """Write the ranks' shards after so many steps."""
    root.mkdir()
    values = masters(kinds, step)
    for rank in range(ranks):
        arrays = rank_arrays(kinds, values, rank, ranks=ranks)
        held = {name: ("F32", array.shape, array.tobytes()) for name, array in arrays.items()}
        (root / path_of(rank)).write_bytes(shard_bytes(held))
    return root


def write_dense(root: Path, kinds: Kinds, step: int) -> Path:
    """Write the checkpoint that they make after so many steps."""
    return write_checkpoint(root, checkpoint_of(masters(kinds, step)))


def write_steps(folder: Path, kinds: Kinds, steps: int) -> tuple[list[Path], list[Path]]:
    """The checkpoint and the shards of each of some steps."""
    dense = [write_dense(folder / f"dense-{step}", kinds, step) for step in range(steps)]
    return dense, [write_shards(folder / f"ranks-{step}", kinds, step) for step in range(steps)]


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a function, on the path, that is not imported yet."""
    name = FUNCTION.partition(":")[0]
    (folder / "code").mkdir()
    (folder / "code" / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder / "code"))
    monkeypatch.delitem(sys.modules, name, raising=False)
