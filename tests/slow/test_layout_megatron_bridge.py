"""Mappings against megatron-bridge's own, and names against models of Megatron-Core: its ranks run over gloo, on CPUs.

They need an environment of their own, without CUDA:

    python -m venv /tmp/megatron && /tmp/megatron/bin/pip install torch==2.13.0 triton rich transformers==5.24.0
    /tmp/megatron/bin/pip install --no-deps --ignore-requires-python megatron-core==0.19.2 megatron-bridge==0.6.2
    DCR_MEGATRON_PYTHON=/tmp/megatron/bin/python scripts/test tests/slow/test_layout_megatron_bridge.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import megatron_models
from dcr_cli.layout.megatron import mappings, views
from dcr_cli.layout.megatron.assembly import Options, megatron_layout
from dcr_cli.layout.megatron.dividing import Naming
from dcr_cli.layout.megatron.mappings import Section
from dcr_cli.layout.megatron.ranks import Rank, Sizes

PYTHON = os.environ.get("DCR_MEGATRON_PYTHON", sys.executable)
HIDDEN, DIM, HEADS = 6, 4, 8
ATTENTION = {"num_attention_heads": HEADS, "kv_channels": DIM, "hidden_size": HIDDEN}
NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": 3,
    "hidden_size": HIDDEN,
}
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "mamba_state_dim": 5,
    "mamba_num_groups": 4,
    "hidden_size": HIDDEN,
}
MAMBA_SECTIONS = {"heads": Section(8, 3), "groups": Section(4, 5)}


class Case(NamedTuple):
    """A class of megatron-bridge, the names by which it knows its canonical tensors with their shapes, our mapping.

    What it stores is so much `less`. It is run on `least` ranks or more.
    """

    bridge: str
    shapes: dict[str, tuple[int, ...]]
    mapping: mappings.Mapping
    config: dict[str, Any] | None = None
    parameter: str = "decoder.layers.0.own.weight"
    module: str = "ColumnParallelLinear"
    is_read_back: bool = True
    less: int = 0
    least: int = 1


def attention(groups: int, *rest: int, gates: int = 1) -> Case:
    shapes = {"q": (gates * HEADS * DIM, *rest), "k": (groups * DIM, *rest), "v": (groups * DIM, *rest)}
    mapping = partial(mappings.qkv, query_heads=HEADS, groups=groups, is_gated=gates > 1)
    config = {**ATTENTION, "num_query_groups": groups, "attention_output_gate": gates > 1}
    return Case("QKVMapping", shapes, mapping, config)


def concatenated(groups: int) -> Case:
    rows = [HEADS * DIM, groups * DIM, groups * DIM]
    mapping = views.seen(partial(mappings.qkv, query_heads=HEADS, groups=groups), views.rows_of(rows))
    config = {**ATTENTION, "num_query_groups": groups}
    return Case("ConcatenatedQKVMapping", {"qkv": (sum(rows), HIDDEN)}, mapping, config)


def expert(bridge: str, shape: tuple[int, ...], mapping: mappings.Mapping, projection: str, module: str) -> Case:
    parameter = f"decoder.layers.0.mlp.experts.{projection}.weight1"
    return Case(bridge, {"stack": shape}, mapping, None, parameter, module, is_read_back=False)


CASES = {
    "replicated": Case("ReplicatedMapping", {"norm": (HIDDEN,)}, mappings.replicated),
    "column": Case("ColumnParallelMapping", {"weight": (8, HIDDEN)}, mappings.column),
    "column, bias": Case("ColumnParallelMapping", {"bias": (8,)}, mappings.column),
    "row": Case("RowParallelMapping", {"weight": (HIDDEN, 8)}, mappings.row, module="RowParallelLinear"),
    "row, bias": Case("RowParallelMapping", {"bias": (8,)}, mappings.row, module="RowParallelLinear"),
    "norm with a centre": Case(
        "RMSNorm2ZeroCenteredRMSNormMapping", {"norm": (HIDDEN,)}, mappings.replicated, module="RMSNorm", less=1
    ),
    # Rows are added where there are several ranks; for one, whoever calls the class has to.
    "padded vocabulary": Case(
        "ColumnParallelMapping",
        {"embedding": (9, HIDDEN)},
        partial(mappings.vocabulary, rows=16),
        parameter="embedding.word_embeddings.weight",
        is_read_back=False,
        least=2,
    ),
    "gate and up": Case("GatedMLPMapping", dict.fromkeys(("gate", "up"), (8, HIDDEN)), mappings.column),
    "gate and up, biases": Case("GatedMLPMapping", dict.fromkeys(("gate", "up"), (8,)), mappings.column),
    "qkv, a group for each head": attention(8, HIDDEN),
    "qkv": attention(4, HIDDEN),
    "qkv, biases": attention(4),
    "qkv, two groups": attention(2, HIDDEN),
    "qkv, one group": attention(1, HIDDEN),
    "qkv with gates": attention(4, HIDDEN, gates=2),
    "qkv with gates, one group": attention(1, HIDDEN, gates=2),
    "qkv concatenated": concatenated(4),
    "qkv concatenated, one group": concatenated(1),
    "mamba projection": Case(
        "MambaInProjMapping", {"weight": (96, HIDDEN)}, mappings.mamba_projection(**MAMBA_SECTIONS), MAMBA
    ),
    "mamba convolution": Case(
        "MambaConv1dMapping", {"weight": (64, 1, 4)}, mappings.mamba_convolution(**MAMBA_SECTIONS), MAMBA
    ),
    "delta net convolution": Case(
        "GDNConv1dMapping",
        {"weight": (56, 1, 4)},
        mappings.delta_net_convolution(keys=Section(4, DIM), values=Section(8, 3)),
        NET,
    ),
    "delta net projection": Case(
        "GDNLinearMapping",
        {"qkvz": (4 * (2 * DIM + 2 * 2 * 3), HIDDEN), "ba": (16, HIDDEN)},
        partial(mappings.delta_net, key_heads=4, value_heads=8, key_dim=DIM, value_dim=3),
        NET,
    ),
    "expert of a stack": expert(
        "FusedExpertMapping",
        (3, HIDDEN, 8),
        views.seen(mappings.row, partial(views.of_expert, rows=HIDDEN), 1),
        "linear_fc2",
        "TERowParallelGroupedLinear",
    ),
    "transposed expert of a stack": expert(
        "FusedExpertMapping",
        (3, 8, HIDDEN),
        views.seen(mappings.row, partial(views.of_expert_transposed, rows=HIDDEN), 1),
        "linear_fc2",
        "TERowParallelGroupedLinear",
    ),
    "gated expert of a stack": expert(
        "FusedGatedExpertMapping",
        (3, 16, HIDDEN),
        views.seen(mappings.column, partial(views.gate_and_up, columns=HIDDEN), 1),
        "linear_fc1",
        "TEColumnParallelGroupedLinear",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _needs_megatron() -> None:
    probe = "import megatron.core, torch, importlib.util as u; assert u.find_spec('megatron.bridge')"
    if subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} has no megatron-core and megatron-bridge; see the head of {Path(__file__).name}")


def cases_of(size: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if size >= case.least}


def write_cases(folder: Path, size: int) -> dict[str, NDArray[Any]]:
    """What ranks need to run the cases; returns the dense tensors, in which every element is another number."""
    dense: dict[str, Any] = {}
    told, next_one = {}, 1
    for name, case in cases_of(size).items():
        for key, shape in case.shapes.items():
            dense[f"{name}/{key}"] = np.arange(next_one, next_one + prod(shape), dtype=np.int32).reshape(shape)
            next_one += prod(shape)
        told[name] = {
            "class": case.bridge,
            "keys": list(case.shapes),
            "config": case.config or {},
            "parameter": case.parameter,
            "module": case.module,
            "local": case.mapping(list(case.shapes.values()), 0, size).shape,
            "is_read_back": case.is_read_back,
        }
    np.savez(folder / "dense.npz", **dense)
    (folder / "cases.json").write_text(json.dumps(told))
    return dense


def run_ranks(program: str, size: int, *arguments: object) -> None:
    """Run a program as so many ranks, whose number is its first argument."""
    command = [PYTHON, Path(__file__).with_name(program)]
    ranks = [
        subprocess.Popen([*map(str, [*command, rank, *arguments])], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=600)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_boxes_lead_where_megatron_bridge_puts_elements(tmp_path: Path, size: int) -> None:
    dense = write_cases(tmp_path, size)
    run_ranks("megatron_rank.py", size, size, tmp_path)
    for rank in range(size):
        found = dict(np.load(tmp_path / f"local-{rank}.npz"))
        for name, case in cases_of(size).items():
            arrays = [dense[f"{name}/{key}"] for key in case.shapes]
            part = case.mapping([array.shape for array in arrays], rank, size)
            local = np.zeros(prod(part.shape), np.int32)
            for number, box in part.boxes:
                view = box.local_view(local, 0, box.whole)
                view[...] = box.canonical_view(arrays[number].reshape(-1), 0, box.whole) - case.less
            where = f"{name}, rank {rank} of {size}"
            np.testing.assert_array_equal(local.reshape(part.shape), found[f"{name}/local"], where)
            if case.is_read_back:
                for key, array in zip(case.shapes, arrays, strict=True):
                    np.testing.assert_array_equal(found[f"{name}/{key}"], array, where)
    print(f"{len(cases_of(size))} mappings, {size} ranks: every element where megatron-bridge has it")


# The models that megatron_model.py builds, without layers that predict more.
MODELS = {
    "qwen3": megatron_models.model("qwen3", [megatron_models.QWEN3] * 2),
    "qwen2_moe": next(each for each in megatron_models.MODELS if each.config["model_type"] == "qwen2_moe"),
    "deepseek_v3": megatron_models.deepseek("deepseek_v3"),
}


def as_built(name: str, *, is_tied: bool) -> megatron_models.Model:
    """A model as Megatron-Core was told to build it: with norms of queries and keys, no biases, 32 tokens."""
    config, shapes = MODELS[name]
    found = {each: shape for each, shape in shapes.items() if not each.endswith("_proj.bias")}
    found = {each: shape for each, shape in found.items() if not each.startswith("model.layers.2.")}
    if name == "qwen2_moe":
        norms = {f"self_attn.{each}_norm.weight": (megatron_models.DIM,) for each in "qk"}
        found |= {f"model.layers.{layer}.{each}": shape for layer in range(2) for each, shape in norms.items()}
    found |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (32, megatron_models.HIDDEN))
    model = megatron_models.Model({**config, "num_nextn_predict_layers": 0}, found)
    return megatron_models.tied(model) if is_tied else model


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(tensor=2, pipeline=2, expert=2, expert_tensor=1)], ids=str)
def test_ranks_hold_the_tensors_that_megatron_core_has(tmp_path: Path, sizes: Sizes) -> None:
    told = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.tensor_of_experts,
    }
    (tmp_path / "sizes.json").write_text(json.dumps(told))
    world = sizes.tensor * sizes.pipeline
    run_ranks("megatron_model.py", world, tmp_path)
    options = Options(naming=Naming(has_fused_norms=False, has_grouped_experts=False))
    files = sizes.paths()
    for number in range(world):
        document = json.loads((tmp_path / f"models-{number}.json").read_text())
        rank = Rank(**document["rank"])
        for name, tensors in document["models"].items():
            model_type, _, tied = name.partition(", ")
            model = as_built(model_type, is_tied=bool(tied))
            shard = megatron_layout(model.config, model.forms, sizes, options).shards[files[rank]]
            own = {each: list(local.form.shape) for each, local in shard.items()}
            assert own == tensors, f"{name}, {rank}"
    print(f"{len(MODELS)} models, tied and not, {world} ranks: all names and shapes those of Megatron-Core")
