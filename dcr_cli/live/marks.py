"""Which elements of a stretch are marked: a bit for each, packed, in memory as in a file (FORMAT 14.6). Pure.

What it means that one is marked is its users' matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dcr_cli.delta.frame import decode_frame, encode_frame

# So many elements have one frame.
AT_ONCE = 1 << 22
_LEVEL = 3
_WINDOW_BYTES = 1 << 20

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of so many elements: a frame for each 4 194 304 of them, of a bit for each, the first in the lowest."""

    elements: int
    frames: tuple[bytes, ...]

    @classmethod
    def of(cls, flags: Flags) -> Self:
        """Pack marks."""
        parts = (flags[first : first + AT_ONCE] for first in range(0, len(flags), AT_ONCE))
        packed = (np.packbits(part, bitorder="little").tobytes() for part in parts)
        return cls(len(flags), tuple(encode_frame(each, _LEVEL) for each in packed))

    @classmethod
    def checked(cls, elements: int, frames: Sequence[bytes]) -> Self:
        """Take frames that somebody else has made. ValueError says what is wrong with them."""
        marks = cls(elements, tuple(frames))
        if len(frames) != -(-elements // AT_ONCE):
            raise ValueError(f"has {len(frames)} frames for {elements} elements")
        if not any(flags.any() for _, flags in marks._parts()):
            raise ValueError("marks nothing")
        return marks

    def parts(self) -> Iterator[tuple[int, Flags]]:
        """The marks in parts of AT_ONCE elements: where each begins. Parts without any are left out."""
        return ((first, flags) for first, flags in self._parts() if flags.any())

    def _parts(self) -> Iterator[tuple[int, Flags]]:
        for number, frame in enumerate(self.frames):
            first = number * AT_ONCE
            count = min(AT_ONCE, self.elements - first)
            packed = np.frombuffer(decode_frame(frame, -(-count // 8), _WINDOW_BYTES), np.uint8)
            bits = np.unpackbits(packed, bitorder="little")
            if bits[count:].any():
                raise ValueError("marks elements that are not there")
            yield first, bits[:count].view(np.bool_)
