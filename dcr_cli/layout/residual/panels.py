"""Panels: the runs of rows that a tensor is converted in. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Panel(NamedTuple):
    """Panel `number` of a tensor: `rows` rows, which begin at element `first`."""

    number: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Panels:
    """A tensor of matrices, one after the other, each of `rows` rows of `width` elements, cut into panels of `height`
    rows; the last panel of a matrix is what is left."""

    rows: int
    width: int
    height: int

    def within(self, first: int, end: int) -> Iterator[Panel]:
        """The panels that have an element from number `first` to `end`."""
        each = -(-self.rows // self.height)
        while first < end:
            matrix, row = divmod(first // self.width, self.rows)
            panel = self.panel(matrix * each + row // self.height)
            yield panel
            first = panel.first + panel.rows * self.width

    def panel(self, number: int) -> Panel:
        """Panel `number`, counted over all matrices."""
        matrix, above = divmod(number, -(-self.rows // self.height))
        row = above * self.height
        first = (matrix * self.rows + row) * self.width
        return Panel(number, first, min(self.height, self.rows - row))


def place(data: NDArray[Any], begin: int, out: NDArray[Any], first: int) -> None:
    """Copy elements from number `begin` on to where they are in `out`, which are those from number `first` on."""
    low, high = max(begin, first), min(begin + len(data), first + len(out))
    out[low - first : high - first] = data[low - begin : high - begin]
