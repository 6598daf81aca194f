"""Reads canonical tensors that rules make: reads what is stored, panel by panel, and converts it.

What is made of a panel is kept for a while, as a panel is more than what is asked for at once. What the arithmetic is,
and which rules there are, is said in floats.py, quantize.py and rules.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.layout.gather import Gatherer, Source, Sources
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.layout.residual.floats import Elements, Floats
from dcr_cli.layout.residual.function import Function, allowed_function, call
from dcr_cli.layout.residual.panels import Panel, Panels, place
from dcr_cli.layout.residual.quantize import Recipe, largest_of, scale_bits, scales_of, weights_of
from dcr_cli.layout.residual.rules import WEIGHT, Elementwise, Quantized, conversion_of

# About so many stored bytes are a panel; more where boxes lie across it, so that each of them is read in longer runs.
_PANEL_BYTES = 2 << 20
_ACROSS_PANEL_BYTES = 16 << 20
# So many elements are converted at a time: they stay in the processor's cache.
_AT_ONCE = 1 << 16


def residual_source(name: str, layout: Layout, stored: Sources) -> Source:
    """Where canonical tensor `name`, which a rule makes of `stored`, is read from; or what it makes of a part of that.

    Raises as conversion_of, and UnsupportedError where a function is not among those that the layout may call.
    """
    conversion = conversion_of(name, layout)
    canonical = layout.tensors[name]
    if isinstance(conversion, Elementwise):
        return _converted(name, stored, conversion)
    if isinstance(conversion, Quantized):
        return _quantized(name, stored, conversion)
    at = f"{layout.what}: rule of tensor {shown(name)}"
    return _Called(name, stored, canonical, allowed_function(conversion.function, layout.functions, at), at)


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tensor that is made element by element; in panels where they are given."""

    name: str
    stored: Sources
    conversion: Elementwise
    panels: Panels | None

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        if self.panels is None:
            self._convert(gatherer, first, out)
            return
        for panel in self.panels.within(first, first + len(out)):
            made = gatherer.panels.of((self.name, self.stored.key, panel.number), partial(self._make, gatherer, panel))
            place(made, panel.first, out, first)

    def _make(self, gatherer: Gatherer, panel: Panel) -> Elements:
        made: Elements = np.empty(panel.rows, f"<u{DTYPES[self.conversion.canonical].width}")
        self._convert(gatherer, panel.first, made)
        return made

    def _convert(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        bits = gatherer.read_stored(self.stored, first, len(out))
        for at in range(0, len(out), _AT_ONCE):
            out[at : at + _AT_ONCE] = self.conversion.convert(bits[at : at + _AT_ONCE])


def _converted(name: str, stored: Sources, conversion: Elementwise) -> _Converted:
    if not stored.owners.lie_across:
        return _Converted(name, stored, conversion, None)
    height = _ACROSS_PANEL_BYTES // _width(stored.form)
    return _Converted(name, stored, conversion, Panels(stored.form.elements, 1, height))


@dataclass(frozen=True, slots=True)
class _Quantized:
    """The weights, or the scales, of blocks. Panels, as many of both, are whole rows of blocks; those of `weights` are
    those of what is stored too."""

    name: str
    stored: Sources
    conversion: Quantized
    weights: Panels
    scales: Panels

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        is_weight = self.conversion.part == WEIGHT
        for panel in (self.weights if is_weight else self.scales).within(first, first + len(out)):
            if is_weight:
                key = self.name, self.stored.key, panel.number
                made = gatherer.panels.of(key, partial(self._weights, gatherer, panel.number))
            else:
                made = self._scales(gatherer, panel.number)
            place(made, panel.first, out, first)

    def _weights(self, gatherer: Gatherer, number: int) -> Elements:
        matrix = self._matrix(gatherer, number)
        largest = gatherer.findings.of(self._key(number), partial(largest_of, matrix, self._recipe))
        return weights_of(matrix, largest, self._recipe).reshape(-1)

    def _scales(self, gatherer: Gatherer, number: int) -> Elements:
        largest = gatherer.findings.of(self._key(number), partial(self._largest, gatherer, number))
        return scale_bits(scales_of(largest, self._recipe), self.conversion.canonical).reshape(-1)

    def _largest(self, gatherer: Gatherer, number: int) -> Floats:
        return largest_of(self._matrix(gatherer, number), self._recipe)

    def _matrix(self, gatherer: Gatherer, number: int) -> Elements:
        """The stored elements of a panel, until the thread reads the next ones."""
        panel = self.weights.panel(number)
        width = self.weights.width
        return gatherer.read_stored(self.stored, panel.first, panel.rows * width).reshape(panel.rows, width)

    @property
    def _recipe(self) -> Recipe:
        return self.conversion.recipe

    def _key(self, number: int) -> tuple[Hashable, Recipe, int]:
        """What is the same for the weights and the scales of a panel."""
        return self.stored.key, self._recipe, number


def _quantized(name: str, stored: Sources, conversion: Quantized) -> _Quantized:
    *_, rows, columns = stored.form.shape
    height, width = conversion.recipe.block
    size = _ACROSS_PANEL_BYTES if stored.owners.lie_across else _PANEL_BYTES
    blocks = max(1, size // (min(height, rows) * columns * _width(stored.form)))
    weights = Panels(rows, columns, blocks * height)
    return _Quantized(name, stored, conversion, weights, Panels(-(-rows // height), -(-columns // width), blocks))


@dataclass(frozen=True, slots=True)
class _Called:
    """A tensor that a function makes, all of it at once."""

    name: str
    stored: Sources
    canonical: Form
    function: Function
    at: str

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        place(gatherer.panels.of((self.name, self.stored.key, 0), partial(self._make, gatherer)), 0, out, first)

    def _make(self, gatherer: Gatherer) -> Elements:
        bits: Elements = np.empty(self.stored.form.elements, f"<u{_width(self.stored.form)}")
        gatherer.read(self.stored, 0, bits)
        return call(self.function, bits, self.stored.form, self.canonical, self.at)


def _width(form: Form) -> int:
    return DTYPES[form.dtype].width
