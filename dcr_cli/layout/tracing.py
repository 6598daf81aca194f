"""What the addresses in a local tensor come to: the boxes of canonical tensors that it is made of, and what a load
of other values leaves in it then. Pure.

Whose loads they were, and where what they left was read from, is probe.py's, or live/'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.layout.addresses import NOWHERE, Addresses, WritesBits
from dcr_cli.layout.box import Box, Indices, Rectangle
from dcr_cli.layout.fitting import Fitting
from dcr_cli.layout.layout import Form, Placement

# More boxes than this, between one local tensor and one canonical one, are no short list.
MAX_BOXES = 64
# So many elements are looked at together.
_AT_ONCE = 1 << 22


def parts_of(form: Form) -> list[tuple[int, int]]:
    """Cut a tensor, between rows where that can be, into (first element, count)."""
    row = form.shape[-1] if form.shape else 1
    at_once = max(_AT_ONCE // max(row, 1), 1) * row if row <= _AT_ONCE else _AT_ONCE
    return [(first, min(at_once, form.elements - first)) for first in range(0, form.elements, max(at_once, 1))]


class Trace:
    """Takes the addresses of a local tensor of `dtype`, part by part, in order."""

    def __init__(self, addresses: Addresses, dtype: str) -> None:
        self._addresses = addresses
        self._dtype = dtype
        self._fittings: dict[str, Fitting] = {}

    def add(self, first: int, found: Indices) -> None:
        """Take the addresses of the elements from number `first` on. TooIrregularError as soon as it is plain."""
        local = np.flatnonzero(found != NOWHERE)
        addresses = found[local]
        for tensor, places in self._addresses.by_tensor(self._dtype, addresses):
            fitting = self._fittings.setdefault(tensor, Fitting())
            fitting.add(first + local[places], addresses[places] - self._addresses.begins[tensor])

    def placements(self) -> list[Placement]:
        """The boxes of all that was added, in the order of the local tensor. TooIrregularError if they are no short
        list."""
        placements = [
            Placement(tensor, box) for tensor, fitting in self._fittings.items() for box in fitting.boxes(MAX_BOXES)
        ]
        placements.sort(key=lambda placement: placement.box.local)
        return placements


class Expectation:
    """What a local tensor with these placements holds after a load of certain values, where they lead."""

    def __init__(self, addresses: Addresses, form: Form, placements: Sequence[Placement], values: WritesBits) -> None:
        self._dtype = DTYPES[form.dtype]
        self._boxes = [(addresses.begins[each.tensor], each.box.inverse()) for each in placements]
        self._values = values

    def put(self, elements: NDArray[Any], first: int) -> None:
        """Write it into `elements`, which are those from number `first` on."""
        for begin, box in self._boxes:
            for part in box.rectangles(box.rank(first), box.rank(first + len(elements))):
                bits = self._values.bits(self._dtype, begin + _canonical_of(box, part).reshape(-1))
                box.canonical_view(elements, first, part)[...] = bits.reshape(part.counts)

    def mark(self, flags: NDArray[np.bool_], first: int) -> None:
        """Set those of `flags`, which are of the elements from number `first` on, that something is written into."""
        for _, box in self._boxes:
            for part in box.rectangles(box.rank(first), box.rank(first + len(flags))):
                box.canonical_view(flags, first, part)[...] = True


def _canonical_of(inverse: Box, part: Rectangle) -> Indices:
    """The numbers in the canonical tensor of a rectangle's elements, for a box whose tensors are exchanged."""
    steps = [np.arange(count) * axis.local for count, axis in zip(part.counts, inverse.axes, strict=True)]
    return reduce(np.add.outer, steps, np.array(part.local, np.int64))
