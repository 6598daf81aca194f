"""The layout of the files that vLLM saves of its own, `sharded_state`, as each rank of tensor parallelism writes them.

The files say nothing of which rank has which part: that is vllm_ranks.py's to say. Which tensor is in which file of a
rank is read from their headers, as vLLM cuts files by size. Where two names are one tensor, as tied embeddings are,
vLLM saves the one that is first in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.layout import Form, Layout, LocalTensor
from dcr_cli.layout.shards import RankShards
from dcr_cli.layout.vllm_ranks import EMBEDDINGS, HEAD, PROBE, Model, rank_tensors, read_config

_FILE = re.compile(r"model-rank-(\d+)-part-\d+\.safetensors")
# What vLLM makes itself, beside what it loads.
_BUFFER = re.compile(r".*\.(attn\._?[a-z]+_scale|rotary_emb\.[a-z_]+)")
# What else it calls its tensors, and the names that are made of those of the canonical ones.
_OTHER_NAMES = (
    (".mlp.experts._shared_experts._layer.expert_gate.", ".mlp.shared_expert_gate."),
    (".mlp.experts._shared_experts._layer.", ".mlp.shared_expert."),
    (".experts.gate.", ".gate."),
    (".experts.routed_experts.", ".experts."),
)
_OTHERS_FILES = "is it a model of as many ranks, and are all their files there?"


def sharded_state_layout(
    config: Mapping[str, Any], forms: Mapping[str, Form], shards: RankShards, *, tensor_parallel: int
) -> Layout:
    """The layout of the files in `shards`, of a model of config.json `config` whose canonical tensors are `forms`.

    UnsupportedError for a model of another family, or files of another way to be parallel; DamagedError where a tensor
    that a rank should have is not there, or has another form. Nothing on either side is left out in silence.
    """
    model = _as_in_files(read_config(config, tensor_parallel), forms, shards)
    ranks, skipped = rank_tensors(forms, model)
    rank_of = {path: _rank_of(path, str(shards.root / path), model) for path in shards.shards}
    missing = [set(tensors) for tensors in ranks]
    found: dict[str, dict[str, LocalTensor]] = {}
    for path, rank in rank_of.items():
        found[path] = _local_tensors(shards, path, ranks[rank], model)
        missing[rank] -= {_plain_name(name, model) for name in found[path]}
    for rank, names in enumerate(missing):
        if names:
            facts = f"rank {rank} of {tensor_parallel} lacks tensors: {listed(sorted(names))}"
            raise DamagedError(str(shards.root), facts, hint=_OTHERS_FILES)
    return Layout(f"sharded_state layout of {shards.root}", forms, found, skipped)


def _as_in_files(model: Model, forms: Mapping[str, Form], shards: RankShards) -> Model:
    """vLLM unties an output layer that the checkpoint has of its own, and ties it again where it is the same."""
    both = {EMBEDDINGS, HEAD}
    is_apart = both <= forms.keys() and both <= {name for path in shards.shards for name in shards.tensors(path)}
    return replace(model, is_tied=False) if is_apart else model


def _rank_of(path: str, what: str, model: Model) -> int:
    match = _FILE.fullmatch(path)
    if match is None:
        facts = "is not named as vLLM names the files of tensor parallelism, model-rank-R-part-P.safetensors"
        raise UnsupportedError(what, facts, hint=PROBE)
    rank = int(match[1])
    if rank >= model.ranks:
        raise DamagedError(what, f"is of rank {rank}, but there are {model.ranks}", hint=_OTHERS_FILES)
    return rank


def _local_tensors(
    shards: RankShards, path: str, wanted: Mapping[str, LocalTensor], model: Model
) -> dict[str, LocalTensor]:
    """The tensors of a file, which are some of those that its rank has."""
    what = str(shards.root / path)
    found = {}
    for name, entry in shards.tensors(path).items():
        form = Form(entry.dtype, entry.shape)
        tensor = LocalTensor(form, ()) if _BUFFER.fullmatch(name) else wanted.get(_plain_name(name, model))
        if tensor is None:
            raise UnsupportedError(what, f"tensor {shown(name)} is made of no tensor of the base", hint=PROBE)
        if tensor.form != form:
            facts = f"tensor {shown(name)} is {form}, {tensor.form} expected of {model.ranks} ranks"
            raise DamagedError(what, facts, hint=PROBE)
        found[name] = tensor
    return found


def _plain_name(name: str, model: Model) -> str:
    """The name of a local tensor that is made of those of the canonical ones."""
    for other, plain in _OTHER_NAMES:
        name = name.replace(other, plain)
    return EMBEDDINGS if model.is_tied and name == HEAD else name
