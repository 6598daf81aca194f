"""Divides a model's local tensors between ranks: which file has which of them, under which name, in which boxes.

Pure. How one tensor is divided is mappings.py's business.
"""

from __future__ import annotations

from collections.abc import Mapping as Members, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.layout.layout import KEEP, ZERO, Form, LocalTensor, Placement
from dcr_cli.layout.megatron.entries import EXPERT, LAYER, MTP, Entry
from dcr_cli.layout.megatron.mappings import Mapping, Part, Shape
from dcr_cli.layout.megatron.matching import EMBEDDING, Local
from dcr_cli.layout.megatron.ranks import SIZES_OF_TRAINER, Chunk, Rank, Sizes
from dcr_cli.layout.megatron.views import seen

# How local tensors are called where norms are modules of their own, by the ends of their names where they are not.
_NORMS_APART = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
}


@dataclass(frozen=True, slots=True)
class Naming:
    """Whether norms are members of the projections after them, and all experts of a rank are one module."""

    has_fused_norms: bool = True
    has_grouped_experts: bool = True

    def mapping(self, entry: Entry) -> Mapping:
        """How an entry's tensors are divided."""
        return entry.mapping if self.has_fused_norms or entry.apart is None else entry.apart

    def name(self, local: str) -> str:
        """The name of an entry's local tensor."""
        if not self.has_fused_norms:
            for end, other in _NORMS_APART.items():
                if local.endswith(f".{end}"):
                    return local.removesuffix(end) + other
        if not self.has_grouped_experts and local.endswith(EXPERT):
            before, after = local.removesuffix(EXPERT).split(".experts.")
            return f"{before}.experts.local_experts.{EXPERT}.{after}"
        return local


class _Placed(NamedTuple):
    """A local tensor in a part of the model, and its name there."""

    chunk: int
    layer: int
    name: str
    local: Local


class Divider:
    """Divides tensors of the forms `stored`. Those that are divided alike, as in all layers, are divided once."""

    def __init__(self, sizes: Sizes, stored: Members[str, Form], chunks: Sequence[Chunk], naming: Naming) -> None:
        self._sizes = sizes
        self._naming = naming
        self._stored = stored
        self._chunks = chunks
        self._known: dict[tuple[object, ...], Part] = {}

    def divide(self, found: Sequence[Local], files: Members[Rank, str]) -> dict[str, dict[str, LocalTensor]]:
        """The tensors of each file, in the order of the model. UsageError where sizes do not divide them."""
        count = max((local.expert + 1 for local in found if local.expert is not None), default=0)
        experts, left = divmod(count, self._sizes.expert)
        if left:
            facts = f"{count} experts cannot be divided by {self._sizes.expert} ranks"
            raise UsageError("size expert", facts, hint=SIZES_OF_TRAINER)
        of_ranks: dict[tuple[int, int], list[_Placed]] = {}
        for placed in sorted(self._placed(found), key=lambda each: each[:2]):
            pipeline, expert = self._chunks[placed.chunk].pipeline, placed.local.expert
            holders = range(self._sizes.expert) if expert is None else (expert // experts,)
            for holder in holders:
                of_ranks.setdefault((pipeline, holder), []).append(placed)
        shards: dict[str, dict[str, LocalTensor]] = {}
        for rank, file in files.items():
            tensors = shards[file] = {}
            for placed in of_ranks.get((rank.pipeline, rank.expert), ()):
                expert = placed.local.expert
                name = placed.name if expert is None else placed.name.replace(EXPERT, str(expert % experts))
                tensors[name] = self._local_tensor(placed.local, rank)
        return shards

    def _placed(self, found: Sequence[Local]) -> list[_Placed]:
        """Each local tensor in every part of the model that has it."""
        last = len(self._chunks) - 1
        predicts_more = any(local.entry.local.startswith(MTP) for local in found)
        chunk_of = {layer: number for number, chunk in enumerate(self._chunks) for layer in chunk.layers}
        placed = []
        for local in found:
            layer, chunks = self._chunks[last].layers.stop, {last}
            if local.layer is not None:
                layer, chunks = local.layer, {chunk_of[local.layer]}
            elif local.entry.local == EMBEDDING:
                layer, chunks = -1, {0, last} if predicts_more else {0}
            placed += [_Placed(chunk, layer, self._name(local, chunk), local) for chunk in chunks]
        return placed

    def _name(self, local: Local, number: int) -> str:
        chunk = self._chunks[number]
        layer = str(local.layer - chunk.layers.start) if local.layer is not None else ""
        stage = f"model{chunk.virtual}." if self._sizes.virtual > 1 else ""
        return stage + self._naming.name(local.entry.local).replace(LAYER, layer)

    def _local_tensor(self, local: Local, rank: Rank) -> LocalTensor:
        if local.entry.is_of_experts:
            number, size = rank.expert_tensor, self._sizes.tensor_of_experts
        else:
            number, size = rank.tensor, self._sizes.tensor
        forms = [self._stored[name] for name in local.names]
        dtypes = sorted({form.dtype for form in forms})
        if len(dtypes) > 1:
            raise UnsupportedError(f"tensors {listed(local.names)}", f"have dtypes {', '.join(dtypes)}, in one tensor")
        part = self._part(local, [form.shape for form in forms], number, size)
        names = (local.names, *((name,) for name in local.also))
        placements = tuple(Placement(each[of], box) for each in names for of, box in part.boxes)
        is_full = sum(box.elements for _, box in part.boxes) == prod(part.shape)
        return LocalTensor(Form(dtypes[0], part.shape), placements, KEEP if is_full else ZERO)

    def _part(self, local: Local, shapes: Sequence[Shape], number: int, size: int) -> Part:
        mapping, seen_as = self._naming.mapping(local.entry), local.entry.seen_as
        expert = local.expert if seen_as is not None else None
        key = (id(local.entry), *shapes, number, size, expert)
        part = self._known.get(key)
        if part is not None:
            return part
        if seen_as is not None and expert is not None:
            mapping = seen(mapping, seen_as, expert)
        try:
            part = self._known[key] = mapping(shapes, number, size)
        except ValueError as error:
            what = f"tensor {shown(local.names[0])}"
            raise UsageError(what, str(error), hint=SIZES_OF_TRAINER) from error
        return part
