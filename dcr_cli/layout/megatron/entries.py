"""Entries: one says of one kind of local tensor how Megatron-Core names it and of which canonical tensors it is made.

And what a config.json says, which mappings need to know. Which entries a family of models has is families.py's
business, those of its layers are blocks.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping as Members
from dataclasses import dataclass, replace
from typing import Any

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.megatron.mappings import Mapping
from dcr_cli.layout.megatron.views import Seen

LAYER, EXPERT = "{layer}", "{expert}"
# Where the layers of the model are, and where the layer is that predicts one token more.
DECODER = f"decoder.layers.{LAYER}"
MTP = "mtp.layers"
# The rule of what is stored less one.
ADD_ONE = "add-one"
_NUMBER = re.compile(r"(?<=\.)(?:\d+|\{\w+\})(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """A kind of local tensor, in every layer and for every expert that its name has a field for.

    In `canonical`, {layer} is the number of the layer in the model and {expert} that of the expert among all; in
    `local` they are those in the pipeline stage and in the expert rank. Where no canonical name has the expert,
    `seen_as` finds it in a tensor of all experts. `within` and `without` name a canonical tensor that the layer has, or
    lacks. `stored` is the dtype of the local tensor, where it does not follow the model's. `apart` is the mapping where
    norms are modules of their own: Megatron-Core's own layers, which differ from Transformer Engine's.
    """

    local: str
    mapping: Mapping
    canonical: tuple[str, ...]
    seen_as: Seen | None = None
    within: str | None = None
    without: str | None = None
    rule: str | None = None
    stored: str | None = None
    apart: Mapping | None = None

    @property
    def is_of_experts(self) -> bool:
        return EXPERT in self.local


def entries(local: str, canonical: str, *rows: tuple[Any, ...], **conditions: Any) -> list[Entry]:
    """Entries below one place in both names: rows of (rest of the local name, mapping, rests of canonical names)."""
    return [
        Entry(f"{local}.{own}", mapping, tuple(f"{canonical}.{name}" for name in names), **conditions)
        for own, mapping, *names in rows
    ]


def moved(found: Iterable[Entry], local: tuple[str, str], canonical: tuple[str, str]) -> list[Entry]:
    """The entries of a layer at another place: what of their names is replaced, and by what."""

    def name(each: str | None) -> str | None:
        return each.replace(*canonical, 1) if each is not None else None

    return [
        replace(
            entry,
            local=entry.local.replace(*local, 1),
            canonical=tuple(each.replace(*canonical, 1) for each in entry.canonical),
            within=name(entry.within),
            without=name(entry.without),
        )
        for entry in found
    ]


def without_numbers(name: str) -> str:
    """A tensor's name in which every number, or the field for one, is the same sign."""
    return _NUMBER.sub("#", name)


class Config:
    """What a config.json says. DamagedError where a member is not what it must be."""

    def __init__(self, members: Members[str, Any]) -> None:
        self._members = members

    @property
    def model_type(self) -> str:
        found = self._members.get("model_type")
        if type(found) is not str:
            raise DamagedError("config.json", "has no model_type")
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A member that is a positive integer."""
        found = self._members.get(name)
        if found is None and default is not None:
            return default
        if type(found) is not int or found < 1:
            raise DamagedError("config.json", f"{shown(name)} is no integer from 1 on")
        return found

    def count_or_none(self, name: str) -> int:
        """A member that is a positive integer, or 0 where there is none."""
        return self.count(name) if self._members.get(name) else 0

    def is_set(self, name: str, default: bool) -> bool:
        """A member that is true or false."""
        found = self._members.get(name, default)
        if type(found) is not bool:
            raise DamagedError("config.json", f"{shown(name)} is neither true nor false")
        return found

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers")

    @property
    def query_heads(self) -> int:
        return self.count("num_attention_heads")

    @property
    def groups(self) -> int:
        """How many heads keys and values have."""
        return self.count("num_key_value_heads", self.query_heads)
