"""Makes canonical tensors of stored ones that lie whole in memory, by the rules of a layout.

How they came there is joining.py's matter; what the rules are, the layout's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dcr_cli.checkpoint.header import DTYPES, bytes_view
from dcr_cli.delta.encoding import Elements, uint_dtype
from dcr_cli.layout.box import whole_box
from dcr_cli.layout.gather import Boxes, Gatherer, Held, Source, Sources
from dcr_cli.layout.layout import Layout, Placed
from dcr_cli.layout.residual.sources import residual_source

# So many elements are made at a time: what is read for them is one more copy.
_AT_ONCE = 1 << 18


class Makers:
    """What makes each tensor of a layout, but for those that are skipped.

    UnsupportedError where a function is not among those that the layout may call.
    """

    def __init__(self, layout: Layout) -> None:
        self._forms = layout.tensors
        self._made: dict[str, dict[str, Source | None]] = {name: {} for name in layout.read()}
        for name in layout.tensors:
            if name not in layout.skipped:
                stored = layout.boxed(name)
                source = residual_source(name, layout, _whole(stored, layout)) if name in layout.rules else None
                self._made[stored][name] = source

    def names(self, stored: str) -> list[str]:
        """The tensors that a stored one is, or that are made of it."""
        return list(self._made[stored])

    def make(self, stored: str, elements: Elements) -> Iterator[tuple[str, Elements]]:
        """Each of them, of all elements of the stored one; the next one is made when it is asked for."""
        for name, source in self._made[stored].items():
            yield name, elements if source is None else self._make(name, source, elements)

    def _make(self, name: str, source: Source, elements: Elements) -> Elements:
        form = self._forms[name]
        made: Elements = np.empty(form.elements, uint_dtype(DTYPES[form.dtype].width))
        gatherer = Gatherer(_InMemory(elements))
        for first in range(0, len(made), _AT_ONCE):
            source.read(gatherer, first, made[first : first + _AT_ONCE])
        return made


def _whole(stored: str, layout: Layout) -> Sources:
    """A stored tensor as the only one of a file."""
    form = layout.stored[stored]
    held = [Held(Placed(whole_box(form.elements), stored, stored), 0)] if form.elements else []
    return Sources(stored, form, Boxes(held), Boxes(()))


class _InMemory:
    """Reads what lies in memory as if it were a file."""

    def __init__(self, elements: Elements) -> None:
        self._bytes = elements.view(np.uint8)

    def read_path_into(self, path: str, offset: int, buffer: Any) -> None:
        view = bytes_view(buffer)
        view[:] = self._bytes[offset : offset + len(view)].data
