"""The layout of shards that PyTorch's distributed checkpoint has written: each says in its header where it begins.

Metadata member DCP_SHARDING_INFO of a shard is JSON in a string: for each tensor its `saved_offsets`, one for each
dimension. How large the whole tensor is, it does not say. Of tensors that are tied it writes both, under both names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dcr_cli.checkpoint.checkpoint import Shard
from dcr_cli.checkpoint.header import DTYPES, TensorEntry
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement
from dcr_cli.layout.shards import RankShards

SHARDING_INFO = "DCP_SHARDING_INFO"
# What an output layer and an embedding are called, which are one tensor where they are tied.
_HEAD = re.compile(r"(.+\.)?lm_head\.weight")
_EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|embeddings|word_embeddings|wte)\.weight")
_OF_LAYER = re.compile(r"\.\d+\.")
_SHARD_NAME = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}\.safetensors")


def dcp_layout(shards: RankShards, forms: Mapping[str, Form] | None) -> Layout:
    """Read the layout from the headers.

    `forms` are those of the canonical tensors. Where nobody knows them they are as large as the shards that are there
    need, and a shard that holds the end of a tensor is not missed. An output layer that they lack is the embedding once
    more. DamagedError where a header makes no sense.
    """
    offsets = {path: _offsets(str(shards.root / path), shard) for path, shard in shards.shards.items()}
    are_known = forms is not None
    if forms is None:
        forms = _forms(shards, offsets)
    tied = _embedding(forms)
    found = {path: _local_tensors(shards, path, begins, forms, embedding=tied) for path, begins in offsets.items()}
    return Layout(str(shards.root), forms, found, hint=_hint(shards), has_known_shapes=are_known)


def _offsets(what: str, shard: Shard) -> dict[str, tuple[int, ...]]:
    text = shard.header.metadata.get(SHARDING_INFO)
    if text is None:
        facts = f"does not say what it is part of: it has no {SHARDING_INFO}, which others have"
        raise DamagedError(what, facts, hint="such shards need --layout; if it is none of these, --skip leaves it out")
    info = strict_json(text.encode(), f"{what}: {SHARDING_INFO}")
    if type(info) is not dict:
        raise DamagedError(what, f"{SHARDING_INFO} is not an object of tensors")
    return {entry.name: _offsets_of(entry, info.get(entry.name), what) for entry in shard.header.tensors}


def _offsets_of(entry: TensorEntry, member: Any, what: str) -> tuple[int, ...]:
    offsets = member.get("saved_offsets") if type(member) is dict else None
    if type(offsets) is not list or not all(type(number) is int and number >= 0 for number in offsets):
        raise DamagedError(what, f"{SHARDING_INFO} has no saved_offsets of tensor {shown(entry.name)}")
    if len(offsets) != len(entry.shape):
        facts = f"tensor {shown(entry.name)} has shape {list(entry.shape)} and saved_offsets {offsets}"
        raise DamagedError(what, facts)
    return tuple(offsets)


def _forms(shards: RankShards, offsets: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, Form]:
    """As large as what is there needs."""
    found: dict[str, Form] = {}
    for path, begins in offsets.items():
        for entry in shards.shards[path].header.tensors:
            ends = tuple(begin + count for begin, count in zip(begins[entry.name], entry.shape, strict=True))
            known = found.setdefault(entry.name, Form(entry.dtype, ends))
            if (known.dtype, len(known.shape)) != (entry.dtype, len(ends)):
                facts = f"tensor {shown(entry.name)} is {Form(entry.dtype, entry.shape)}, in another shard {known}"
                raise DamagedError(str(shards.root / path), facts)
            found[entry.name] = Form(entry.dtype, tuple(map(max, known.shape, ends)))
    return {name: found[name] for name in sorted(found)}


def _embedding(forms: Mapping[str, Form]) -> str | None:
    """The embedding, where there is one alone and no output layer beside it."""
    if any(map(_HEAD.fullmatch, forms)):
        return None
    found = [name for name in forms if _EMBEDDING.fullmatch(name) and not _OF_LAYER.search(name)]
    return found[0] if len(found) == 1 else None


def _local_tensors(
    shards: RankShards,
    path: str,
    begins: Mapping[str, tuple[int, ...]],
    forms: Mapping[str, Form],
    *,
    embedding: str | None,
) -> dict[str, LocalTensor]:
    found = {}
    what = str(shards.root / path)
    for entry in shards.shards[path].header.tensors:
        own = Form(entry.dtype, entry.shape)
        name = embedding if embedding is not None and _HEAD.fullmatch(entry.name) else entry.name
        form = forms.get(name)
        if form is None:
            facts = f"tensor {shown(entry.name)} is not in the base"
            raise DamagedError(what, facts, hint="the base has to be a checkpoint with all tensors of the shards")
        begin = begins[entry.name]
        ends = [start + count for start, count in zip(begin, entry.shape, strict=True)]
        fits = len(ends) == len(form.shape) and all(map(int.__le__, ends, form.shape))
        if form.dtype != entry.dtype or not fits:
            facts = f"tensor {shown(entry.name)} is {own} from {list(begin)} on, the whole of it {form}"
            raise DamagedError(what, facts)
        placements: tuple[Placement, ...] = ()
        if own == form:
            placements = (Placement(name, whole_box(form.elements)),) if own.elements else ()
        elif DTYPES[form.dtype].is_packed:
            raise UnsupportedError(what, f"tensor {shown(entry.name)} is a part of one of {form.dtype}")
        elif own.elements:
            placements = (Placement(name, slice_box(form.shape, begin, entry.shape)),)
        found[entry.name] = LocalTensor(own, placements)
    return found


def _hint(shards: RankShards) -> str:
    """Which shards there are: how many there should be, nothing says."""
    names = (path.rpartition("/")[2] for path in shards.shards)
    numbers = {int(match[1]) for name in names if (match := _SHARD_NAME.fullmatch(name))}
    if not numbers:
        return "is the shard of a rank missing?"
    begins = [number for number in sorted(numbers) if number - 1 not in numbers]
    ends = [number for number in sorted(numbers) if number + 1 not in numbers]
    rows = [
        f"shard-{begin:05d}" if begin == end else f"shard-{begin:05d} to shard-{end:05d}"
        for begin, end in zip(begins, ends, strict=True)
    ]
    return f"there are {listed(rows)}: is another one missing?"
