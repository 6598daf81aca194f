"""Reads canonical elements out of a module: those that it holds, where they lie.

It changes nothing; what is read while somebody changes the module is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.layout.box import Indices
from dcr_cli.layout.layout import Placed
from dcr_cli.live.memory import Memory
from dcr_cli.live.placement import Placement

Elements = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Holdings:
    """A module, where it holds what, and whole tensors that are kept beside it, because it holds what its loader has
    made of them."""

    memory: Memory
    placement: Placement
    kept: Mapping[str, Elements] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The module's tensors that hold elements of canonical ones, or what its loader makes of them."""
        places = {place.name for placed in self.placement.placed.values() for place in placed}
        return {name for stretch in {*places, *self.placement.made} for name in self.memory.stretches[stretch].names}

    def find(self, tensor: str, flat: Indices) -> Iterator[tuple[Placed, Indices, Indices]]:
        """Where some elements of a tensor lie: for each place that has any, which ones, and where they are there."""
        for place in self.placement.placed[tensor]:
            found, local = place.box.find(flat)
            if len(found):
                yield place, found, local

    def gather(self, tensor: str, flat: Indices) -> tuple[Elements, NDArray[np.bool_]]:
        """The bits of some elements of a tensor, and which of them are held here: of the others, nothing."""
        if tensor in self.kept:
            return self.kept[tensor][flat], np.ones(len(flat), np.bool_)
        form = self.placement.forms[tensor]
        bits = np.zeros(len(flat), uint_dtype(DTYPES[form.dtype].width))
        is_held = np.zeros(len(flat), np.bool_)
        for place, found, local in self.find(tensor, flat):
            if not is_held.all():
                bits[found] = self.memory.stretches[place.name].bits.gather(local)
                is_held[found] = True
        return bits, is_held
