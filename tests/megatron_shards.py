"""What four of Megatron-Core's ranks, two of tensors by two stages, hold of the tiny llama, cut by NumPy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_models import GROUPS, HIDDEN, LLAMA, VOCABULARY
from strategies import TensorData, shard_bytes

Arrays = Mapping[str, NDArray[Any]]
RANKS = [(tensor, pipeline) for pipeline in (0, 1) for tensor in (0, 1)]
# The dtypes of elements that are written as bits, by their bytes.
_DTYPES = {2: "BF16", 4: "F32"}


@dataclass(frozen=True)
class Setup:
    """How a trainer was set up: the layers of each stage, rows of embeddings with their padding, what norms are
    called, how the file of a rank is, and which tensors it does not write."""

    layers: tuple[int, int] = (2, 2)
    rows: int = VOCABULARY
    has_fused_norms: bool = True
    path: str = "mp_rank_{tensor:02}_{pipeline:03}/model.safetensors"
    lacks: tuple[str, ...] = ()


AS_USUAL = Setup()


def dense_llama(version: int = 0) -> dict[str, NDArray[np.uint16]]:
    """Random bits; later versions differ from the first in some of them."""
    random = np.random.default_rng(0)
    dense = {name: random.integers(0, 1 << 16, shape, np.uint16) for name, shape in LLAMA.shapes.items()}
    for _ in range(version):
        dense = {name: each ^ (random.random(each.shape) < 0.05).astype(np.uint16) for name, each in dense.items()}
    return dense


def cut_llama(dense: Arrays, tensor: int, pipeline: int, setup: Setup = AS_USUAL) -> dict[str, NDArray[Any]]:
    """What one rank holds, by the names that it has for it."""

    def rows(name: str) -> NDArray[Any]:
        return np.split(dense[name], 2)[tensor]

    def columns(name: str) -> NDArray[Any]:
        return np.split(dense[name], 2, axis=1)[tensor]

    def padded(name: str) -> NDArray[Any]:
        return np.split(np.pad(dense[name], ((0, setup.rows - VOCABULARY), (0, 0))), 2)[tensor]

    norms = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    if setup.has_fused_norms:
        norms = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    found: dict[str, NDArray[Any]] = {}
    if pipeline == 0:
        found["embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    for own in range(setup.layers[pipeline]):
        at, canonical = f"decoder.layers.{own}", f"model.layers.{sum(setup.layers[:pipeline]) + own}"
        q, k, v = (dense[f"{canonical}.self_attn.{each}_proj.weight"].reshape(GROUPS, -1, HIDDEN) for each in "qkv")
        fused = np.concatenate([q, k, v], axis=1).reshape(-1, HIDDEN)
        gate_up = [rows(f"{canonical}.mlp.{each}_proj.weight") for each in ("gate", "up")]
        found |= {
            f"{at}.{norms[0]}": dense[f"{canonical}.input_layernorm.weight"],
            f"{at}.self_attention.linear_qkv.weight": np.split(fused, 2)[tensor],
            f"{at}.self_attention.linear_proj.weight": columns(f"{canonical}.self_attn.o_proj.weight"),
            f"{at}.{norms[1]}": dense[f"{canonical}.post_attention_layernorm.weight"],
            f"{at}.mlp.linear_fc1.weight": np.concatenate(gate_up),
            f"{at}.mlp.linear_fc2.weight": columns(f"{canonical}.mlp.down_proj.weight"),
        }
    if pipeline == 1:
        found["decoder.final_layernorm.weight"] = dense["model.norm.weight"]
        found["output_layer.weight"] = padded("lm_head.weight")
    return {name: each for name, each in found.items() if name not in setup.lacks}


def as_tensors(arrays: Arrays) -> dict[str, TensorData]:
    """Bits of 16 as BF16, those of 32 as F32."""
    return {name: (_DTYPES[each.itemsize], each.shape, each.tobytes()) for name, each in arrays.items()}


def write_ranks(root: Path, dense: Arrays, setup: Setup = AS_USUAL) -> Path:
    """Write the file of each rank."""
    for tensor, pipeline in RANKS:
        file = root / setup.path.format(tensor=tensor, pipeline=pipeline)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(shard_bytes(as_tensors(cut_llama(dense, tensor, pipeline, setup))))
    return root
