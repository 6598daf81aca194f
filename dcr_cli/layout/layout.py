"""A layout: which boxes of which local tensors, in which files, are which canonical tensors. Values, no disk.

Its JSON form is document.py's, whether it covers every element once coverage.py's, reading through it gather.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcr_cli.checkpoint.header import DTYPES, stored_elements
from dcr_cli.layout.box import Box

# What the elements of a local tensor hold that are in no box: whatever is there, or zeros.
KEEP, ZERO = "keep", "zero"
FILLS = (KEEP, ZERO)


class Form(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements as dcr codes them."""
        return stored_elements(DTYPES[self.dtype], self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Placement(NamedTuple):
    """A box between the canonical tensor `tensor`, or what a rule stores of one, and the local tensor that has it."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as a shard holds it, and what of it is what. One without placements has no canonical source."""

    form: Form
    placements: tuple[Placement, ...]
    fill: str = KEEP


@dataclass(frozen=True, slots=True)
class Rule:
    """A canonical tensor that is made of the elements of another, stored one, by a conversion of residual/."""

    kind: str
    of: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors of some shards relate to canonical tensors.

    `tensors` are the canonical ones, `shards` the local ones by the path of their file and their name. `rules` say
    which canonical tensors are not the bits that boxes lead to, but made of them; boxes then are of the tensor that the
    rule is made `of`, whose form is in `stored`. `skipped` are canonical tensors that no shard holds: whoever reads
    through the layout takes them for unchanged. `what` names the layout in messages, `hint` says what is to be done
    where it lacks elements. `functions` are no part of the layout, but those that its rules may call. Unless
    `has_known_shapes`, tensors are as large as the shards that are there need, and perhaps larger.
    """

    what: str
    tensors: Mapping[str, Form]
    shards: Mapping[str, Mapping[str, LocalTensor]]
    skipped: frozenset[str] = frozenset()
    stored: Mapping[str, Form] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    hint: str = "is the shard of a rank missing?"
    functions: frozenset[str] = frozenset()
    has_known_shapes: bool = True

    @property
    def boxes(self) -> int:
        """How many boxes all local tensors have."""
        return sum(len(tensor.placements) for tensors in self.shards.values() for tensor in tensors.values())

    def forms(self) -> dict[str, Form]:
        """The tensors that boxes lead to: the canonical ones, but for those that a rule makes of others."""
        plain = {name: form for name, form in self.tensors.items() if name not in self.rules}
        return {**plain, **self.stored}

    def read(self) -> frozenset[str]:
        """Those of the tensors that boxes lead to that something is made of which is not skipped."""
        return frozenset(self.boxed(name) for name in self.tensors if name not in self.skipped)

    def boxed(self, name: str) -> str:
        """The tensor that boxes lead to which canonical tensor `name` is, or is made of."""
        return self.rules[name].of if name in self.rules else name

    def placed(self) -> dict[str, list[Placed]]:
        """Where each tensor that boxes lead to lies: its boxes, in the order of files and local tensors."""
        found: dict[str, list[Placed]] = {name: [] for name in self.forms()}
        for path, tensors in self.shards.items():
            for name, tensor in tensors.items():
                for placement in tensor.placements:
                    found[placement.tensor].append(Placed(placement.box, path, name))
        return found


class Placed(NamedTuple):
    """A box of a canonical tensor, and the local tensor, `name` in file `path`, that holds it."""

    box: Box
    path: str
    name: str
