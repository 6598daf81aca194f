"""Does padding hold what a layout says of it? Reads the local tensors that are filled with zeros, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Shard
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Box
from dcr_cli.layout.coverage import coordinate
from dcr_cli.layout.gather import ReadsPaths
from dcr_cli.layout.layout import ZERO, Form, Layout

# So many elements are looked at together.
_AT_ONCE = 1 << 20


def check_padding(files: ReadsPaths, shards: Sequence[Shard], layout: Layout) -> None:
    """Raise DamagedError, naming the first one, if an element that is in no box is not zero where a layout says so."""
    for shard in shards:
        for entry in shard.header.tensors:
            tensor = layout.shards[shard.path][entry.name]
            if tensor.fill != ZERO:
                continue
            boxes = [placement.box.inverse() for placement in tensor.placements]
            begin, width = len(shard.header.raw) + entry.begin, DTYPES[entry.dtype].width
            for first in range(0, tensor.form.elements, _AT_ONCE):
                data = np.empty(min(_AT_ONCE, tensor.form.elements - first), f"<u{width}")
                files.read_path_into(shard.path, begin + first * width, data.view(np.uint8))
                _check(data, first, boxes, (f"{shown(entry.name)} of {shown(shard.path)}", tensor.form))


def _check(data: NDArray[Any], first: int, boxes: Sequence[Box], named: tuple[str, Form]) -> None:
    is_padding = np.ones(len(data), bool)
    for box in boxes:
        for part in box.rectangles(box.rank(first), box.rank(first + len(data))):
            box.canonical_view(is_padding, first, part)[...] = False
    wrong = np.flatnonzero(is_padding & (data != 0))
    if wrong.size:
        what, form = named
        at, digits = int(wrong[0]), 2 * data.itemsize
        facts = f"element {coordinate(first + at, form)} is padding, and 0x{int(data[at]):0{digits}x} instead of zero"
        raise DamagedError(what, facts)
