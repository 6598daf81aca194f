"""The ranks of Megatron-Core: how many there are, which layers and experts each has, and which file is whose. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from math import lcm
from typing import NamedTuple

from dcr_cli.checkpoint.names import path_fault, shown
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.errors import UsageError

FILE = "model.safetensors"
# The hint for sizes that cannot be.
SIZES_OF_TRAINER = "are these the parallel sizes of the trainer?"
_LAYERS = "one number of layers for each stage, in the order of the model"


class Rank(NamedTuple):
    """The coordinates of a rank. Ranks that differ in others, such as data parallel ones, hold the same tensors."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


class Chunk(NamedTuple):
    """A part of the model: which pipeline rank has it, as which of its virtual stages, and which layers are in it."""

    pipeline: int
    virtual: int
    layers: range


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parallel sizes that a model is trained with.

    `expert_tensor` is how many ranks divide each expert, by default as many as divide other tensors. `layers` says how
    many layers each pipeline stage has, or each virtual one in the order of the model, where they are not all alike.
    UsageError where a size is not positive, or `layers` does not name every stage.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.virtual > 1 and self.pipeline == 1:
            facts = f"is {self.virtual}, but there is one pipeline stage alone"
            raise UsageError("size virtual", facts, hint="leave it out, or say how many pipeline stages there are")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise UsageError(f"size {field.name}", f"is {value}, must be 1 or more", hint=SIZES_OF_TRAINER)
        if self.layers is not None:
            if len(self.layers) != self.stages:
                facts = f"names the layers of {len(self.layers)} stages, there are {self.stages}"
                raise UsageError("size layers", facts, hint=_LAYERS)
            if any(count < 0 for count in self.layers):
                facts = f"is {list(self.layers)}, but no stage has less than 0 layers"
                raise UsageError("size layers", facts, hint=_LAYERS)

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def tensor_of_experts(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def ranks(self) -> Iterator[Rank]:
        """One rank of those that hold the same tensors: for each pipeline stage the first ones, in their order."""
        experts = self.tensor_of_experts
        for pipeline in range(self.pipeline):
            for number in range(lcm(self.tensor, experts * self.expert)):
                yield Rank(number % self.tensor, pipeline, number // experts % self.expert, number % experts)

    def chunks(self, layers: int) -> list[Chunk]:
        """The parts of a model of so many layers, in the order of the model. UsageError if the stages do not fit."""
        counts = self.layers
        if counts is None:
            each, left = divmod(layers, self.stages)
            if left:
                facts = f"{layers} layers cannot be divided by {self.stages} stages"
                raise UsageError("size pipeline", facts, hint="say how many layers each stage has")
            counts = (each,) * self.stages
        if sum(counts) != layers:
            facts = f"is {list(counts)}, {sum(counts)} layers together, the model has {layers}"
            raise UsageError("size layers", facts, hint=_LAYERS)
        ends = accumulate(counts)
        return [
            Chunk(number % self.pipeline, number // self.pipeline, range(end - count, end))
            for number, (count, end) in enumerate(zip(counts, ends, strict=True))
        ]

    def paths(self, pattern: str | None = None) -> dict[Rank, str]:
        """The file of every rank.

        They lie in folders named as Megatron-LM names its own: mp_rank_TT, with _PPP if there is more than one pipeline
        rank, and _EEE if there is more than one expert rank; and _XX, the expert tensor rank, where it does not follow
        from the tensor rank. `pattern` names them otherwise, with fields {tensor}, {pipeline}, {expert} and
        {expert_tensor}. UsageError where two ranks would share a file.
        """
        if pattern is None:
            pattern = self._pattern()
        what, hint = f"path {shown(pattern)}", f"such as {self._pattern()}"
        found: dict[Rank, str] = {}
        for rank in self.ranks():
            try:
                path = pattern.format(**rank._asdict())
            except (LookupError, ValueError, AttributeError) as error:
                known = ", ".join(f"{{{name}}}" for name in Rank._fields)
                raise UsageError(what, f"is no pattern of fields {known}", hint=hint) from error
            if (fault := path_fault(path)) is not None:
                raise UsageError(what, f"unsafe name {shown(path)}: {fault}", hint=hint)
            if not path.endswith(SHARD_SUFFIX):
                raise UsageError(what, f"does not end with {SHARD_SUFFIX}", hint=hint)
            found[rank] = path
        if len(set(found.values())) != len(found):
            raise UsageError(what, "names one file for several ranks", hint=hint)
        return found

    def _pattern(self) -> str:
        folder = "mp_rank_{tensor:02d}"
        if self.pipeline > 1:
            folder += "_{pipeline:03d}"
        if self.expert > 1:
            folder += "_{expert:03d}"
        if self.tensor % self.tensor_of_experts:
            folder += "_{expert_tensor:02d}"
        return f"{folder}/{FILE}"
