"""What each rank of vLLM's tensor parallelism holds of a model, from its config.json and its canonical tensors.

In a rank, query, key and value are one tensor, and so are gate and up, and all experts of a layer; the vocabulary is
padded with zeros. In which files it lies, and under which of several names, is vllm.py's to say. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError, UsageError
from dcr_cli.layout.box import slice_box
from dcr_cli.layout.layout import KEEP, ZERO, Form, LocalTensor, Placement

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
PROBE = "dcr layout probe derives the layout of any loader, vLLM's too"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The rows of a vocabulary are padded to a multiple of this.
_VOCABULARY_ROWS = 64
# What is left out of a checkpoint when it is loaded, as a rank makes it itself.
_LEFT_OUT = re.compile(r".*\.rotary_emb\.[a-z_]+")


@dataclass(frozen=True, slots=True)
class Model:
    """What of a config.json, with the number of ranks, says how tensors are cut."""

    key_value_heads: int
    is_tied: bool
    ranks: int


def read_config(config: Mapping[str, Any], ranks: int) -> Model:
    """Read a config.json. UnsupportedError for a family that is not known, UsageError for a number of ranks that the
    model cannot be divided among."""
    family = config.get("model_type")
    if family not in FAMILIES:
        facts = f"model_type {shown(str(family))} is none of {', '.join(FAMILIES)}"
        raise UnsupportedError("config.json", facts, hint=PROBE)
    heads = _count(config, "num_attention_heads", None)
    key_value_heads = _count(config, "num_key_value_heads", heads)
    is_tied = config.get("tie_word_embeddings", False)
    if type(is_tied) is not bool:
        raise DamagedError("config.json", "tie_word_embeddings is neither true nor false")
    if ranks < 1 or heads % ranks or (key_value_heads % ranks and ranks % key_value_heads):
        facts = f"{heads} heads, {key_value_heads} of keys and values, cannot be divided among {ranks} ranks"
        raise UsageError("tensor parallel size", facts, hint="it is the number of ranks that have saved the files")
    return Model(key_value_heads, is_tied, ranks)


def _count(config: Mapping[str, Any], key: str, default: int | None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise DamagedError("config.json", f"{key} is not an integer from 1 on")
    return value


class _Slice(NamedTuple):
    """A part of a canonical tensor, and the shape of what it is of in a rank, if that is larger."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]
    padded: tuple[int, ...]


_Cut = Callable[[tuple[int, ...], Model, int], _Slice]


class _Piece(NamedTuple):
    """A canonical tensor, whose cut is a part of a local one: of expert `expert`, or of none, and there number
    `number`."""

    tensor: str
    expert: int | None
    number: int
    cut: _Cut


class _Kind(NamedTuple):
    """Tensors of some names, and which local tensor each of them is a part of."""

    names: re.Pattern[str]
    local: str
    number: int
    cut: _Cut


def rank_tensors(forms: Mapping[str, Form], model: Model) -> tuple[list[dict[str, LocalTensor]], frozenset[str]]:
    """What each rank holds of the canonical tensors `forms`, by names that are made of theirs; and which of these no
    rank holds. UnsupportedError where one of them is of no kind that is known, or cannot be divided."""
    pieces, skipped = _pieces(forms, model)
    ranks = [
        {local: _local_tensor(each, forms, model, rank) for local, each in pieces.items()}
        for rank in range(model.ranks)
    ]
    if _has_tied_head(forms, model):
        for tensors in ranks:
            tensors[EMBEDDINGS] = _with_head(tensors[EMBEDDINGS])
    return ranks, skipped


def _has_tied_head(forms: Mapping[str, Form], model: Model) -> bool:
    """Whether the checkpoint has an output layer that ranks have tied to the embeddings. DamagedError where that
    cannot be."""
    is_there = model.is_tied and HEAD in forms and EMBEDDINGS in forms
    if is_there and forms[HEAD] != forms[EMBEDDINGS]:
        facts = f"is {forms[HEAD]}, but tied to {shown(EMBEDDINGS)}, {forms[EMBEDDINGS]}"
        raise DamagedError(f"base: tensor {shown(HEAD)}", facts)
    return is_there


def _with_head(embeddings: LocalTensor) -> LocalTensor:
    """The embeddings, which are the output layer too."""
    head = tuple(Placement(HEAD, placement.box) for placement in embeddings.placements)
    return replace(embeddings, placements=(*embeddings.placements, *head))


def _pieces(forms: Mapping[str, Form], model: Model) -> tuple[dict[str, list[_Piece]], frozenset[str]]:
    """Of what the local tensors are made, in order, and which canonical tensors are in none."""
    found: dict[str, list[_Piece]] = {}
    skipped = set()
    has_tied_head = _has_tied_head(forms, model)
    for name in forms:
        if _LEFT_OUT.fullmatch(name):
            skipped.add(name)
        if name in skipped or (has_tied_head and name == HEAD):
            continue
        local, piece = _piece(name)
        found.setdefault(local, []).append(piece)
    for local, pieces in found.items():
        pieces.sort(key=lambda piece: (piece.expert or 0, piece.number))
        experts = sorted({piece.expert for piece in pieces if piece.expert is not None})
        if experts != list(range(len(experts))):
            facts = f"of the experts of {shown(local)} there are only {listed([str(expert) for expert in experts])}"
            raise DamagedError("base", facts)
    return found, frozenset(skipped)


def _piece(name: str) -> tuple[str, _Piece]:
    for kind in _EXPERT_KINDS:
        if match := kind.names.fullmatch(name):
            return match.expand(kind.local), _Piece(name, int(match[2]), kind.number, kind.cut)
    for kind in _KINDS:
        if match := kind.names.fullmatch(name):
            return match.expand(kind.local), _Piece(name, None, kind.number, kind.cut)
    raise UnsupportedError("base", f"tensor {shown(name)} is of no kind that is known of vLLM's models", hint=PROBE)


def _local_tensor(pieces: Sequence[_Piece], forms: Mapping[str, Form], model: Model, rank: int) -> LocalTensor:
    """The pieces, one after the other."""
    first = forms[pieces[0].tensor]
    placements, rows, offset, fill = [], 0, 0, KEEP
    for piece in pieces:
        form = forms[piece.tensor]
        what = f"base: tensor {shown(piece.tensor)}"
        try:
            cut = piece.cut(form.shape, model, rank)
        except ValueError as error:
            raise UnsupportedError(what, str(error), hint=PROBE) from error
        if piece is pieces[0]:
            rest = cut.padded[1:]
        if form.dtype != first.dtype or cut.padded[1:] != rest or DTYPES[form.dtype].is_packed:
            facts = f"is {form}, which cannot be one tensor with {shown(pieces[0].tensor)}, {first}"
            raise UnsupportedError(what, facts, hint=PROBE)
        if prod(cut.shape):
            box = slice_box(form.shape, cut.starts, cut.shape)
            placements.append(Placement(piece.tensor, box._replace(local=offset)))
        if cut.shape != cut.padded:
            fill = ZERO
        rows += cut.padded[0] if cut.padded else 0
        offset += prod(cut.padded)
    experts = pieces[-1].expert
    shape = (rows, *rest) if experts is None else (experts + 1, rows // (experts + 1), *rest)
    return LocalTensor(Form(first.dtype, shape), tuple(placements), fill)


# How a tensor is cut: what of it a rank has


def _whole(shape: tuple[int, ...], model: Model, rank: int) -> _Slice:
    return _Slice((0,) * len(shape), shape, shape)


def _rows(shape: tuple[int, ...], model: Model, rank: int) -> _Slice:
    return _divided(shape, 0, model.ranks, rank)


def _columns(shape: tuple[int, ...], model: Model, rank: int) -> _Slice:
    return _divided(shape, 1, model.ranks, rank)


def _key_value_rows(shape: tuple[int, ...], model: Model, rank: int) -> _Slice:
    """Where there are more ranks than heads, several ranks have the same one."""
    parts = min(model.ranks, model.key_value_heads)
    return _divided(shape, 0, parts, rank // (model.ranks // parts))


def _vocabulary_rows(shape: tuple[int, ...], model: Model, rank: int) -> _Slice:
    padded = -(-shape[0] // _VOCABULARY_ROWS) * _VOCABULARY_ROWS
    starts, part, _ = _divided((padded, *shape[1:]), 0, model.ranks, rank)
    rows = max(0, min(part[0], shape[0] - starts[0]))
    return _Slice(starts, (rows, *shape[1:]), part)


def _divided(shape: tuple[int, ...], axis: int, parts: int, number: int) -> _Slice:
    if len(shape) <= axis or shape[axis] % parts:
        raise ValueError(f"its shape {list(shape)} cannot be divided into {parts} parts")
    part = shape[axis] // parts
    starts = tuple(number * part if each == axis else 0 for each in range(len(shape)))
    cut = (*shape[:axis], part, *shape[axis + 1 :])
    return _Slice(starts, cut, cut)


# Names of what an expert is made of have its number as their second group.
_EXPERT_KINDS = tuple(
    _Kind(re.compile(pattern), local, number, cut)
    for pattern, local, number, cut in (
        (r"(.*\.experts\.)(\d+)\.(?:gate_proj|w1)\.weight", r"\1w13_weight", 0, _rows),
        (r"(.*\.experts\.)(\d+)\.(?:up_proj|w3)\.weight", r"\1w13_weight", 1, _rows),
        (r"(.*\.experts\.)(\d+)\.(?:down_proj|w2)\.weight", r"\1w2_weight", 0, _columns),
    )
)
_KINDS = tuple(
    _Kind(re.compile(pattern), local, number, cut)
    for pattern, local, number, cut in (
        (r"(.*\.self_attn\.)q_proj(\.weight|\.bias)", r"\1qkv_proj\2", 0, _rows),
        (r"(.*\.self_attn\.)k_proj(\.weight|\.bias)", r"\1qkv_proj\2", 1, _key_value_rows),
        (r"(.*\.self_attn\.)v_proj(\.weight|\.bias)", r"\1qkv_proj\2", 2, _key_value_rows),
        (r"(.*\.(?:mlp|shared_expert)\.)gate_proj(\.weight|\.bias)", r"\1gate_up_proj\2", 0, _rows),
        (r"(.*\.(?:mlp|shared_expert)\.)up_proj(\.weight|\.bias)", r"\1gate_up_proj\2", 1, _rows),
        (r".*\.(?:self_attn\.o_proj|(?:mlp|shared_expert)\.down_proj)\.weight", r"\g<0>", 0, _columns),
        (r".*\.(?:self_attn\.o_proj|(?:mlp|shared_expert)\.down_proj)\.bias", r"\g<0>", 0, _whole),
        (r".*norm\.weight", r"\g<0>", 0, _whole),
        (r".*\.(?:mlp|block_sparse_moe)\.(?:shared_expert_)?gate\.weight", r"\g<0>", 0, _whole),
        (rf"{re.escape(EMBEDDINGS)}|{re.escape(HEAD)}", r"\g<0>", 0, _vocabulary_rows),
    )
)
