"""The files that vLLM saves of its own, against ranks that are cut and joined with NumPy, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, UsageError
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout
from dcr_cli.layout.opening import forms_of
from dcr_cli.layout.shards import open_shards
from dcr_cli.layout.vllm import sharded_state_layout
from strategies import shard_bytes, write_checkpoint
from test_layout_box import places

Arrays = dict[str, NDArray[np.uint16]]

HIDDEN, HEAD, VOCABULARY = 12, 4, 70
ROWS = 128  # Of the vocabulary, padded.


@dataclass(frozen=True)
class Case:
    """A model, and how many ranks have it."""

    family: str
    ranks: int
    heads: int = 4
    key_value_heads: int = 2
    is_tied: bool = False
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
]
IDS = [f"{case.family}-{case.ranks}-{case.key_value_heads}" for case in CASES]
EXPERTS = {"qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
EXPERTS["qwen2_moe"] = EXPERTS["qwen3_moe"]


def canonical(case: Case) -> Arrays:
    """A model of two layers, the first of them dense if not all are, no two elements of a tensor alike."""
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
        arrays[name] = np.random.default_rng(number).permutation(1 << 16)[: np.prod(shape)].astype("<u2").reshape(shape)
    return arrays


def feed_forward(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{prefix}{part}_proj.weight": (size, HIDDEN) for part in ("gate", "up")}
    return {**shapes, prefix + "down_proj.weight": (HIDDEN, size)}


def held(case: Case, base: Arrays, rank: int) -> Arrays:
    """What a rank of vLLM holds, by the names that it has for it."""

    def rows(name: str) -> NDArray[np.uint16]:
        return np.split(base[name], case.ranks)[rank]

    def columns(name: str) -> NDArray[np.uint16]:
        return np.split(base[name], case.ranks, axis=1)[rank]

    def of_heads(name: str) -> NDArray[np.uint16]:
        each_has = max(case.key_value_heads // case.ranks, 1)
        first = rank * case.key_value_heads // case.ranks
        return base[name][first * HEAD :][: each_has * HEAD]

    def padded(name: str) -> NDArray[np.uint16]:
        return np.split(np.pad(base[name], ((0, ROWS - VOCABULARY), (0, 0))), case.ranks)[rank]

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


def write_case(tmp_path: Path, case: Case, change: Callable[[list[Arrays]], None] = lambda ranks: None) -> list[Arrays]:
    base = canonical(case)
    write_checkpoint(tmp_path / "base", {name: ("BF16", each.shape, each.tobytes()) for name, each in base.items()})
    ranks = [held(case, base, rank) for rank in range(case.ranks)]
    change(ranks)
    write_ranks(tmp_path / "ranks", ranks)
    return ranks


def layout_of(tmp_path: Path, case: Case, *, ranks: int | None = None, **config: Any) -> Layout:
    forms = forms_of(open_checkpoint(tmp_path / "base"))
    shards = open_shards(tmp_path / "ranks")
    return sharded_state_layout({**case.config, **config}, forms, shards, tensor_parallel=ranks or case.ranks)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ranks_are_read_as_the_checkpoint(tmp_path: Path, case: Case) -> None:
    write_case(tmp_path, case)
    base = open_checkpoint(tmp_path / "base")
    laid = lay(open_shards(tmp_path / "ranks"), layout_of(tmp_path, case), base)
    with base.reader() as reader, laid.reader() as other:
        for tensor in base.tensors:
            expected, found = bytearray(tensor.bytes), bytearray(tensor.bytes)
            reader.read_into(tensor, 0, expected)
            other.read_into(laid.by_name[tensor.name], 0, found)
            assert found == expected, tensor.name


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_ranks_hold_is_made_of_the_checkpoint(tmp_path: Path, case: Case) -> None:
    ranks = write_case(tmp_path, case)
    base = canonical(case)
    layout = layout_of(tmp_path, case)
    seen = set()
    for rank, name, tensor in tensors_of(layout):
        if name.endswith("_scale"):
            assert (tensor.form, tensor.placements, tensor.fill) == (Form("F32", ()), (), KEEP)
            continue
        made = np.zeros(tensor.form.elements, np.uint16)
        covered = 0
        for placement in tensor.placements:
            flat = base[placement.tensor].reshape(-1)
            for there, here in places(placement.box).items():
                made[here] = flat[there]
            covered += placement.box.elements
        expected = ranks[rank][name]
        assert made.reshape(tensor.form.shape).tolist() == expected.tolist(), name
        assert tensor.fill == (KEEP if covered == expected.size else ZERO)
        seen.add((rank, name))
    assert seen == {(rank, name) for rank, arrays in enumerate(ranks) for name in arrays}


def tensors_of(layout: Layout) -> Iterator[tuple[int, str, Any]]:
    for path, tensors in layout.shards.items():
        for name, tensor in tensors.items():
            yield int(path.split("-")[2]), name, tensor


def test_what_no_rank_holds_is_skipped(tmp_path: Path) -> None:
    case = CASES[4]
    write_case(tmp_path, case)
    forms = dict(forms_of(open_checkpoint(tmp_path / "base")))
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    forms |= {"lm_head.weight": forms["model.embed_tokens.weight"], inverse: Form("F32", (2,))}
    shards = open_shards(tmp_path / "ranks")
    layout = sharded_state_layout(case.config, forms, shards, tensor_parallel=2)
    assert layout.skipped == {"lm_head.weight", inverse}


def test_tied_embeddings_under_both_names(tmp_path: Path) -> None:
    def both(ranks: list[Arrays]) -> None:
        for arrays in ranks:
            arrays["model.embed_tokens.weight"] = arrays["lm_head.weight"]

    write_case(tmp_path, CASES[4], both)
    tensors = {(rank, name): tensor for rank, name, tensor in tensors_of(layout_of(tmp_path, CASES[4]))}
    assert tensors[0, "lm_head.weight"] == tensors[0, "model.embed_tokens.weight"]


def test_a_head_that_is_not_tied_is_no_replica(tmp_path: Path) -> None:
    write_case(tmp_path, CASES[0])
    layout = layout_of(tmp_path, CASES[0], tie_word_embeddings=True)
    laid = lay(open_shards(tmp_path / "ranks"), layout, open_checkpoint(tmp_path / "base"))
    tensor = laid.by_name["model.embed_tokens.weight"]
    with laid.reader() as reader, pytest.raises(DamagedError, match=r"lm_head\.weight"):
        reader.read_into(tensor, 0, bytearray(tensor.bytes))


@pytest.mark.parametrize("family", ["gpt2", None, 3])
def test_another_family_is_refused(tmp_path: Path, family: object) -> None:
    write_case(tmp_path, CASES[1])
    with pytest.raises(UnsupportedError, match="is none of llama, mistral") as caught:
        layout_of(tmp_path, CASES[1], model_type=family)
    assert "dcr layout probe" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("config", "ranks", "error", "facts"),
    [
        ({"num_attention_heads": None}, 2, DamagedError, "num_attention_heads is not an integer"),
        ({"num_key_value_heads": True}, 2, DamagedError, "num_key_value_heads is not an integer"),
        ({"tie_word_embeddings": 0}, 2, DamagedError, "tie_word_embeddings is neither"),
        ({}, 3, UsageError, "4 heads, 2 of keys and values, cannot be divided among 3 ranks"),
        ({"num_key_value_heads": 3}, 2, UsageError, "cannot be divided among 2 ranks"),
        ({}, -1, UsageError, "among -1 ranks"),
        ({}, 1, DamagedError, "is of rank 1, but there are 1"),
        ({}, 4, DamagedError, r"is BF16 \[64, 12\], BF16 \[32, 12\] expected of 4 ranks"),
    ],
)
def test_a_config_that_is_not_the_models_is_refused(
    tmp_path: Path, config: dict[str, Any], ranks: int, error: type[DcrError], facts: str
) -> None:
    case = CASES[0]
    write_case(tmp_path, case)
    with pytest.raises(error, match=facts):
        layout_of(tmp_path, case, ranks=ranks, **config)


def lose(ranks: list[Arrays]) -> None:
    del ranks[1]["model.layers.1.mlp.experts.routed_experts.w2_weight"]


def add(ranks: list[Arrays]) -> None:
    ranks[1]["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.uint16)


def shorten(ranks: list[Arrays]) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    ranks[1][name] = ranks[1][name][:-4]


def leave(ranks: list[Arrays]) -> None:
    ranks.pop()


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        (lose, DamagedError, r"rank 1 of 2 lacks tensors: model.layers.1.mlp.experts.w2_weight$"),
        (
            add,
            UnsupportedError,
            r"model-rank-1-part-\d.safetensors: tensor model.layers.0.mlp.extra.weight is made of no",
        ),
        (shorten, DamagedError, r"qkv_proj.weight is BF16 \[12, 12\], BF16 \[16, 12\] expected of 2 ranks"),
        (leave, DamagedError, r"rank 1 of 2 lacks tensors"),
    ],
)
def test_ranks_that_are_not_the_models_are_refused(
    tmp_path: Path, change: Callable[[list[Arrays]], None], error: type[DcrError], facts: str
) -> None:
    write_case(tmp_path, CASES[5], change)
    with pytest.raises(error, match=facts):
        layout_of(tmp_path, CASES[5])


@pytest.mark.parametrize(
    "name", ["model-pp-0-tp-0-part-0.safetensors", "model.safetensors", "more/model-rank-0-part-9.safetensors"]
)
def test_files_of_other_names_are_refused(tmp_path: Path, name: str) -> None:
    write_case(tmp_path, CASES[1])
    (tmp_path / "ranks/more").mkdir()
    (tmp_path / "ranks/model-rank-0-part-0.safetensors").rename(tmp_path / "ranks" / name)
    with pytest.raises(UnsupportedError, match="is not named as vLLM names"):
        layout_of(tmp_path, CASES[1])


W2 = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize(
    ("forms", "error", "facts"),
    [
        ({"model.layers.0.mlp.extra.weight": Form("BF16", (3,))}, UnsupportedError, "extra.weight is of no kind"),
        ({"model.layers.0.self_attn.q_proj.bias": Form("BF16", (16,))}, DamagedError, "lacks .*qkv_proj.bias"),
        ({W2.format(9): Form("BF16", (12, 8))}, DamagedError, "there are only 0, 1, 2, 9"),
        ({W2.format(2): Form("BF16", (12, 7))}, UnsupportedError, "cannot be divided into 2 parts"),
        ({W2.format(2): Form("BF16", (12, 6))}, UnsupportedError, "cannot be one tensor with"),
        ({W2.format(2): Form("F16", (12, 8))}, UnsupportedError, "cannot be one tensor with"),
        ({"model.norm.weight": Form("F32", (12,))}, DamagedError, "model.norm.weight is BF16 .* F32 .* expected"),
        ({"model.norm.weight": Form("F4", (12,))}, UnsupportedError, "cannot be one tensor with"),
    ],
)
def test_a_checkpoint_that_is_not_the_models_is_refused(
    tmp_path: Path, forms: Mapping[str, Form], error: type[DcrError], facts: str
) -> None:
    write_case(tmp_path, CASES[5])
    known = forms_of(open_checkpoint(tmp_path / "base"))
    with pytest.raises(error, match=facts):
        sharded_state_layout(CASES[5].config, {**known, **forms}, open_shards(tmp_path / "ranks"), tensor_parallel=2)
