"""Reads canonical tensors that rules make: reads what is stored, panel by panel, and converts it.

What is made of a panel is kept for a while, as a panel is more than what is asked for at once. What the arithmetic is,
and which rules there are, is said in floats.py, quantize.py and rules.py.
"""

from __future__ import annotations

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
from dcr_cli.layout.residual.quantize import Largest, Recipe, scale_bits, scales_of, weights_of
from dcr_cli.layout.residual.rules import WEIGHT, Elementwise, Quantized, conversion_of

# About so many stored bytes are a panel.
_PANEL_BYTES = 2 << 20
# So many elements are converted at a time: they stay in the processor's cache.
_AT_ONCE = 1 << 16


def residual_source(name: str, layout: Layout, stored: Sources) -> Source:
    """Where canonical tensor `name`, which a rule makes of `stored`, is read from; or what it makes of a part of that.

    Raises as conversion_of, and UnsupportedError where a function is not among those that the layout may call.
    """
    conversion = conversion_of(name, layout)
    canonical = layout.tensors[name]
    if isinstance(conversion, Elementwise):
        return _Converted(stored, conversion)
    if isinstance(conversion, Quantized):
        return _quantized(name, stored, conversion)
    at = f"{layout.what}: rule of tensor {shown(name)}"
    return _Called(name, stored, canonical, allowed_function(conversion.function, layout.functions, at), at)


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tensor that is made element by element."""

    stored: Sources
    conversion: Elementwise

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        bits = gatherer.read_stored(self.stored, first, len(out))
        for at in range(0, len(out), _AT_ONCE):
            out[at : at + _AT_ONCE] = self.conversion.convert(bits[at : at + _AT_ONCE])


@dataclass(frozen=True, slots=True)
class _Quantized:
    """The weights, or the scales, of blocks. Panels of `scales` are rows of blocks; those of `weights` are the rows of
    what is stored that these are of, or, where one row of blocks alone is large, some of its rows."""

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
                made = gatherer.panels.of(key, partial(self._weights, gatherer, panel))
            else:
                largest = self._largest(gatherer, panel)
                made = scale_bits(scales_of(largest, self._recipe), self.conversion.canonical).reshape(-1)
            place(made, panel.first, out, first)

    def _weights(self, gatherer: Gatherer, panel: Panel) -> Elements:
        # Which blocks they are of.
        matrix, top = divmod(panel.first // self.weights.width, self.weights.rows)
        begin, end = top // self._height, -(-(top + panel.rows) // self._height)
        first = matrix * self.scales.rows * self.scales.width
        across = self.scales.width
        found = [
            self._largest(gatherer, each) for each in self.scales.within(first + begin * across, first + end * across)
        ]
        largest = np.concatenate(found) if len(found) > 1 else found[0]
        bits = self._read(gatherer, panel.first, panel.rows)
        return weights_of(bits, largest, self._recipe, top % self._height).reshape(-1)

    def _largest(self, gatherer: Gatherer, panel: Panel) -> Floats:
        """`a` of the blocks of a panel of scales."""
        key = self.stored.key, self._recipe, panel.number
        return gatherer.findings.of(key, partial(self._find_largest, gatherer, panel))

    def _find_largest(self, gatherer: Gatherer, panel: Panel) -> Floats:
        matrix, above = divmod(panel.first // self.scales.width, self.scales.rows)
        top, end = above * self._height, min(self.weights.rows, (above + panel.rows) * self._height)
        found = Largest(panel.rows, self.weights.width, self._recipe)
        for row in range(top, end, self.weights.height):
            first = (matrix * self.weights.rows + row) * self.weights.width
            found.see(self._read(gatherer, first, min(self.weights.height, end - row)), row - top)
        return found.result()

    def _read(self, gatherer: Gatherer, first: int, rows: int) -> Elements:
        """Some rows of what is stored, until the thread reads the next ones."""
        return gatherer.read_stored(self.stored, first, rows * self.weights.width).reshape(rows, self.weights.width)

    @property
    def _recipe(self) -> Recipe:
        return self.conversion.recipe

    @property
    def _height(self) -> int:
        return self.conversion.recipe.block[0]


def _quantized(name: str, stored: Sources, conversion: Quantized) -> _Quantized:
    *_, rows, columns = stored.form.shape
    height, width = conversion.recipe.block
    most = max(1, _PANEL_BYTES // (columns * _width(stored.form)))
    blocks = max(1, most // height)
    weights = Panels(rows, columns, min(blocks * height, max(most, 1)))
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
