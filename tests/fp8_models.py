"""Checkpoints with FP8 weights of blocks or of rows, as PyTorch's arithmetic makes them of BF16 ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from strategies import TensorData, write_checkpoint

Tensors = Mapping[str, torch.Tensor]
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_BITS = {2: torch.int16, 4: torch.int32, 1: torch.uint8}


def data_of(tensors: Tensors) -> dict[str, TensorData]:
    return {
        name: (_NAMES[each.dtype], tuple(each.shape), each.contiguous().view(_BITS[each.itemsize]).numpy().tobytes())
        for name, each in tensors.items()
    }


def model(version: int = 0) -> dict[str, torch.Tensor]:
    """Masters of a model of an embedding, a norm, a matrix of six blocks and one of two experts; later versions differ
    from the first in all of them, a little."""
    shapes = {"embed": (40, 16), "norm": (16,), "w": (130, 300), "experts": (2, 130, 40)}
    generator = torch.Generator().manual_seed(0)
    first = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: each + version * 3e-3 * torch.randn(each.shape, generator=torch.Generator().manual_seed(version))
        for name, each in first.items()
    }


def rounded(masters: Tensors) -> dict[str, torch.Tensor]:
    return {name: each.to(torch.bfloat16) for name, each in masters.items()}


def blocks(values: torch.Tensor, height: int = 128, width: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of blocks."""
    *experts, rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % width, 0, -rows % height))
    tiles = padded.reshape(*experts, -(-rows // height), height, -(-columns // width), width)
    scales = tiles.abs().amax(dim=(-3, -1), keepdim=True) / 448
    made = (tiles / scales).reshape(padded.shape)[..., :rows, :columns]
    return made.to(torch.float8_e4m3fn), scales.squeeze(-1).squeeze(-2)


def channels(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of rows, which are BF16."""
    scales = values.float().abs().amax(dim=-1, keepdim=True) / 448
    return (values.float() / scales).to(torch.float8_e4m3fn), scales.to(torch.bfloat16)


Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def with_fp8(tensors: Tensors, quantize: Quantize = blocks, end: str = "_scale_inv") -> dict[str, torch.Tensor]:
    """The same model with FP8 weights where a matrix of it is no embedding."""
    made: dict[str, torch.Tensor] = {}
    for name, each in tensors.items():
        made[name] = each
        if each.ndim > 1 and "embed" not in name and name != "lm_head.weight":
            made[name], made[name + end] = quantize(each)
    return made


def write(root: Path, tensors: Tensors, config: bytes = b"{}") -> Path:
    return write_checkpoint(root, data_of(tensors), shards=2, sidecars={"config.json": config})


def write_fp8(root: Path) -> tuple[Path, Path]:
    """Write the model with FP8 and without, as root/fp8 and root/plain."""
    root.mkdir()
    plain = rounded(model())
    return write(root / "fp8", with_fp8(plain)), write(root / "plain", plain)
