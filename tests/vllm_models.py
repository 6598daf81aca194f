"""Models of families that vLLM loads, and what its ranks hold of them: cut and joined with NumPy, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies import shard_bytes

Arrays = dict[str, NDArray[np.uint16]]

HIDDEN, HEAD, VOCABULARY = 12, 4, 70
ROWS = 128  # Of the vocabulary, padded.


@dataclass(frozen=True)
class Case:
    """A model, and how many ranks have it. `has_head`: it is tied, and the checkpoint has the output layer all the
    same."""

    family: str
    ranks: int
    heads: int = 4
    key_value_heads: int = 2
    is_tied: bool = False
    has_head: bool = False
    has_biases: bool = False
    has_norms: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.family,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "tie_word_embeddings": self.is_tied,
        }


CASES = [
    Case("llama", 2, has_biases=True),
    Case("mistral", 1),
    Case("qwen2", 4),
    Case("qwen2", 2, key_value_heads=1),
    Case("qwen3", 2, is_tied=True, has_norms=True),
    Case("qwen3_moe", 2, has_norms=True),
    Case("qwen2_moe", 4, has_biases=True),
    Case("mixtral", 2),
    Case("llama", 2, is_tied=True, has_head=True),
]
IDS = [f"{case.family}-{case.ranks}-{case.key_value_heads}{'-head' if case.has_head else ''}" for case in CASES]
EXPERTS = {"qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
EXPERTS["qwen2_moe"] = EXPERTS["qwen3_moe"]


def canonical(case: Case, version: int = 0) -> Arrays:
    """A model of two layers, the first of them dense if not all are, no two elements of a tensor alike; later versions
    differ from that in some bits."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not case.is_tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes[layer + "input_layernorm.weight"] = (HIDDEN,)
        shapes[layer + "post_attention_layernorm.weight"] = (HIDDEN,)
        for part, heads in (("q", case.heads), ("k", case.key_value_heads), ("v", case.key_value_heads)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (heads * HEAD, HIDDEN)
            if case.has_biases:
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (heads * HEAD,)
            if case.has_norms and part != "v":
                shapes[f"{layer}self_attn.{part}_norm.weight"] = (HEAD,)
        shapes[layer + "self_attn.o_proj.weight"] = (HIDDEN, case.heads * HEAD)
        if case.family in EXPERTS and (layer.endswith("1.") or case.family == "mixtral"):
            block, gate, up, down = EXPERTS[case.family]
            shapes[f"{layer}{block}.gate.weight"] = (3, HIDDEN)
            for expert in range(3):
                shapes[f"{layer}{block}.experts.{expert}.{gate}.weight"] = (8, HIDDEN)
                shapes[f"{layer}{block}.experts.{expert}.{up}.weight"] = (8, HIDDEN)
                shapes[f"{layer}{block}.experts.{expert}.{down}.weight"] = (HIDDEN, 8)
            if case.family == "qwen2_moe":
                shapes |= feed_forward(layer + "mlp.shared_expert.", 20)
                shapes[layer + "mlp.shared_expert_gate.weight"] = (1, HIDDEN)
        else:
            shapes |= feed_forward(layer + "mlp.", 16)
            if case.family == "llama":
                shapes |= {layer + "mlp.gate_proj.bias": (16,), layer + "mlp.up_proj.bias": (16,)}
                shapes |= {layer + "mlp.down_proj.bias": (HIDDEN,), layer + "self_attn.o_proj.bias": (HIDDEN,)}
    arrays = {}
    for number, (name, shape) in enumerate(shapes.items()):
        random = np.random.default_rng(number)
        arrays[name] = random.permutation(1 << 16)[: np.prod(shape)].astype("<u2").reshape(shape)
        for _ in range(version):
            arrays[name] ^= (random.random(shape) < 0.1).astype("<u2")
    if case.has_head:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    return arrays


def feed_forward(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{prefix}{part}_proj.weight": (size, HIDDEN) for part in ("gate", "up")}
    return {**shapes, prefix + "down_proj.weight": (HIDDEN, size)}


def held(case: Case, base: Arrays, rank: int, *, padding: int = 0) -> Arrays:
    """What a rank of vLLM holds, by the names that it has for it; what pads the vocabulary has the bits `padding`."""

    def rows(name: str) -> NDArray[np.uint16]:
        return np.split(base[name], case.ranks)[rank]

    def columns(name: str) -> NDArray[np.uint16]:
        return np.split(base[name], case.ranks, axis=1)[rank]

    def of_heads(name: str) -> NDArray[np.uint16]:
        each_has = max(case.key_value_heads // case.ranks, 1)
        first = rank * case.key_value_heads // case.ranks
        return base[name][first * HEAD :][: each_has * HEAD]

    def padded(name: str) -> NDArray[np.uint16]:
        all_rows = np.pad(base[name], ((0, ROWS - VOCABULARY), (0, 0)), constant_values=padding)
        return np.split(all_rows, case.ranks)[rank]

    found = {"model.norm.weight": base["model.norm.weight"]}
    if case.is_tied:
        found["lm_head.weight"] = padded("model.embed_tokens.weight")
    else:
        found |= {name: padded(name) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    for layer in ("model.layers.0.", "model.layers.1."):
        whole = [
            name
            for name in base
            if name.startswith(layer) and ("norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")))
        ]
        found |= {name: base[name] for name in whole}
        attention = layer + "self_attn."
        for kind in ("weight", "bias") if case.has_biases else ("weight",):
            parts = [
                rows(f"{attention}q_proj.{kind}"),
                of_heads(f"{attention}k_proj.{kind}"),
                of_heads(f"{attention}v_proj.{kind}"),
            ]
            found[f"{attention}qkv_proj.{kind}"] = np.concatenate(parts)
        found[attention + "o_proj.weight"] = columns(attention + "o_proj.weight")
        for prefix, name in (("mlp.", "mlp."), ("mlp.shared_expert.", "mlp.experts._shared_experts._layer.")):
            for kind in ("weight", "bias"):
                if f"{layer}{prefix}gate_proj.{kind}" in base:
                    parts = [rows(f"{layer}{prefix}{part}_proj.{kind}") for part in ("gate", "up")]
                    found[f"{layer}{name}gate_up_proj.{kind}"] = np.concatenate(parts)
            if f"{layer}{prefix}down_proj.weight" in base:
                found[f"{layer}{name}down_proj.weight"] = columns(f"{layer}{prefix}down_proj.weight")
        if case.family in EXPERTS:
            found |= of_experts(case, base, layer, rows, columns)
    return found


def of_experts(
    case: Case,
    base: Arrays,
    layer: str,
    rows: Callable[[str], NDArray[np.uint16]],
    columns: Callable[[str], NDArray[np.uint16]],
) -> Arrays:
    block, gate, up, down = EXPERTS[case.family]
    prefix = f"{layer}{block}."
    if prefix + "gate.weight" not in base:
        return {}
    both = [
        np.concatenate([rows(f"{prefix}experts.{expert}.{part}.weight") for part in (gate, up)]) for expert in range(3)
    ]
    downs = [columns(f"{prefix}experts.{expert}.{down}.weight") for expert in range(3)]
    found = {prefix + "experts.routed_experts.w13_weight": np.stack(both)}
    found[prefix + "experts.routed_experts.w2_weight"] = np.stack(downs)
    # qwen3_moe has its router in the experts, too, and that name comes first.
    router = "experts.gate.weight" if case.family == "qwen3_moe" else "gate.weight"
    found[prefix + router] = base[prefix + "gate.weight"]
    if case.family == "qwen2_moe":
        gate_name = "experts._shared_experts._layer.expert_gate.weight"
        found[prefix + gate_name] = base[prefix + "shared_expert_gate.weight"]
    return found


def write_ranks(root: Path, ranks: list[Arrays]) -> Path:
    """Write what ranks hold, each in three files, with the buffers that vLLM has besides."""
    root.mkdir()
    for rank, arrays in enumerate(ranks):
        for part in range(3):
            names = sorted(arrays)[part::3]
            tensors = {name: ("BF16", arrays[name].shape, arrays[name].tobytes()) for name in names}
            if part == 1:
                tensors["model.layers.0.self_attn.attn._k_scale"] = ("F32", (), b"\0\0\x80\x3f")
            (root / f"model-rank-{rank}-part-{part}.safetensors").write_bytes(shard_bytes(tensors))
    return root
