"""What a stretch held after a load, packed: values that say where they come from follow each other so regularly that
they take next to no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES, bytes_view
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.delta.frame import decode_frame, encode_frame
from dcr_cli.layout.layout import Form
from dcr_cli.layout.tracing import parts_of
from dcr_cli.live.bits import Bits

_LEVEL = 1


class Reading:
    """A copy of the elements of a stretch, in the parts of `parts_of`."""

    def __init__(self, form: Form, bits: Bits) -> None:
        self._dtype = uint_dtype(DTYPES[form.dtype].width)
        self._parts = {
            first: encode_frame(bytes_view(bits.read(first, count)), _LEVEL) for first, count in parts_of(form)
        }

    def part(self, first: int, count: int) -> NDArray[Any]:
        """The elements of a part, to be read."""
        size = count * self._dtype.itemsize
        return np.frombuffer(decode_frame(self._parts[first], size, size), self._dtype)

    def all(self, form: Form) -> NDArray[Any]:
        """All elements, to be read."""
        return np.concatenate([self.part(*each) for each in parts_of(form)])
