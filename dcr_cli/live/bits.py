"""The elements of one stretch of a storage, as unsigned integers where they lie, in the host's memory or on a device.

Whose storage it is, and what its elements mean, is memory.py's and placement.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.layout.box import Box, Indices, Rectangle

Elements = NDArray[Any]

# Positions in one piece of a stretch are 32 bits wide.
_PIECE_ELEMENTS = 1 << 32
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Patch(Protocol):
    """Elements of a stretch that change, with their old and new bits, lying where they are needed at once."""

    def has_old(self) -> bool:
        """Whether all of them have their old bits."""

    def has_new(self) -> bool:
        """Whether all of them have their new bits."""

    def write(self) -> None:
        """Give all of them their new bits, whatever they have."""


class Bits(Protocol):
    """The elements of a stretch."""

    def read(self, first: int, count: int) -> Elements:
        """A copy of some elements in a row."""

    def write(self, first: int, elements: Elements) -> None:
        """Overwrite some elements in a row."""

    def view(self, box: Box, part: Rectangle) -> Elements:
        """The elements of a rectangle of a box whose local tensor this is, to be read."""

    def gather(self, positions: Indices) -> Elements:
        """The elements at positions."""

    def patch(self, positions: Indices, old: Elements, new: Elements) -> Patch:
        """Get ready to change elements at positions, which are distinct."""


def bits_of(storage: Any, begin: int, size: int, width: int) -> Bits:
    """The bytes `begin` to `begin + size` of a torch storage as elements of `width` bytes."""
    row = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (size,), (1,))
    return HostBits(row, width) if storage.device.type == "cpu" else DeviceBits(row, width)


class HostBits:
    """Elements in the host's memory."""

    def __init__(self, row: Any, width: int) -> None:
        self._elements: Elements = row.numpy().view(uint_dtype(width))

    def read(self, first: int, count: int) -> Elements:
        return self._elements[first : first + count].copy()

    def write(self, first: int, elements: Elements) -> None:
        self._elements[first : first + len(elements)] = elements

    def view(self, box: Box, part: Rectangle) -> Elements:
        return box.local_view(self._elements, 0, part)

    def gather(self, positions: Indices) -> Elements:
        return self._elements[positions]

    def patch(self, positions: Indices, old: Elements, new: Elements) -> HostPatch:
        return HostPatch(self._elements, positions, old, new)


class HostPatch:
    """Elements in the host's memory that change."""

    def __init__(self, elements: Elements, positions: Indices, old: Elements, new: Elements) -> None:
        # In their order, the processor goes over the stretch once.
        order = np.argsort(positions)
        positions, old, new = positions[order], old[order], new[order]
        cuts = range(0, len(elements) + _PIECE_ELEMENTS, _PIECE_ELEMENTS)
        bounds = np.searchsorted(positions, cuts).tolist()
        self._pieces = [
            (elements[cut : cut + _PIECE_ELEMENTS], (positions[a:b] - cut).astype(np.uint32), old[a:b], new[a:b])
            for cut, (a, b) in zip(cuts, pairwise(bounds), strict=False)
            if a < b
        ]

    def has_old(self) -> bool:
        return all(np.array_equal(kernels.gather(piece, at), old) for piece, at, old, _ in self._pieces)

    def has_new(self) -> bool:
        return all(np.array_equal(kernels.gather(piece, at), new) for piece, at, _, new in self._pieces)

    def write(self) -> None:
        for piece, positions, _, new in self._pieces:
            kernels.patch(piece, positions, new)


class DeviceBits:
    """Elements on a device. What is asked for comes to the host; what is written goes there."""

    def __init__(self, row: Any, width: int) -> None:
        # Torch can do little with unsigned integers.
        self._elements = row.view(_SIGNED[width])
        self._width = width

    def read(self, first: int, count: int) -> Elements:
        return self._to_host(self._elements[first : first + count])

    def write(self, first: int, elements: Elements) -> None:
        self._elements[first : first + len(elements)].copy_(self._to_device(elements))

    def view(self, box: Box, part: Rectangle) -> Elements:
        strides: Sequence[int] = [axis.local for axis in box.axes]
        offset = self._elements.storage_offset() + part.local
        return self._to_host(self._elements.as_strided(part.counts, strides, offset).contiguous())

    def gather(self, positions: Indices) -> Elements:
        return self._to_host(self._elements[torch.from_numpy(positions).to(self._elements.device)])

    def patch(self, positions: Indices, old: Elements, new: Elements) -> DevicePatch:
        order = np.argsort(positions)
        at = torch.from_numpy(positions[order]).to(self._elements.device)
        return DevicePatch(self._elements, at, self._to_device(old[order]), self._to_device(new[order]))

    def _to_host(self, elements: Any) -> Elements:
        found: Elements = elements.to("cpu", copy=True).numpy().view(uint_dtype(self._width))
        return found

    def _to_device(self, elements: Elements) -> Any:
        signed = np.ascontiguousarray(elements).view(np.uint8)
        return torch.from_numpy(signed).to(self._elements.device).view(self._elements.dtype)


class DevicePatch:
    """Elements on a device that change."""

    def __init__(self, elements: Any, positions: Any, old: Any, new: Any) -> None:
        self._elements = elements
        self._positions = positions
        self._old = old
        self._new = new

    def has_old(self) -> bool:
        return bool(torch.equal(self._elements[self._positions], self._old))

    def has_new(self) -> bool:
        return bool(torch.equal(self._elements[self._positions], self._new))

    def write(self) -> None:
        from dcr_kernels import gpu

        unsigned = _UNSIGNED[self._elements.element_size()]
        gpu.patch(self._elements.view(unsigned), self._positions, self._new.view(unsigned))
