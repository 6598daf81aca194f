"""Where the elements of a piece's block lie in their tensor (FORMAT 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dcr_cli.delta.manifest import Box

Indices = NDArray[np.int64]


def box_elements(box: Box) -> int:
    return math.prod(box.counts)


def flat_indices(box: Box, shape: Sequence[int], start: int, count: int) -> Indices:
    """Flat indices in a tensor of `shape` of the elements `start` to `start + count` of a box's enumeration,
    ascending."""
    rest = np.arange(start, start + count, dtype=np.int64)
    flat = np.zeros(count, np.int64)
    stride = 1
    for axis in reversed(range(len(shape))):
        rest, index = np.divmod(rest, box.counts[axis])
        flat += (box.starts[axis] + index * box.steps[axis]) * stride
        stride *= shape[axis]
    return flat


def spans(flat: Indices, span_elements: int) -> list[tuple[int, int, int]]:
    """Cut ascending flat indices where spans of `span_elements` elements of the tensor end: (span, from, to)."""
    if not len(flat):
        return []
    numbers = flat // span_elements
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    bounds = [0, *cuts.tolist(), len(flat)]
    return [(int(numbers[begin]), begin, end) for begin, end in pairwise(bounds)]
