"""The pieces of a canonical tensor, whose digests are kept apart, so that parts of it that overlap can be compared by
what they have in common. Pure.

Every rank cuts a tensor alike, whatever it holds of it, into at most sixteen pieces: as many rows each, where there are
enough, else single rows, and these in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import DIGEST_BYTES, digest_bytes, tensor_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.layout.box import Box, Indices
from dcr_cli.layout.layout import Form

_PIECES = 16
_KEPT_FORMS = 4096

Sums = NDArray[np.uint32]


@lru_cache(_KEPT_FORMS)
def cuts_of(form: Form) -> tuple[int, ...]:
    """The elements of a tensor at which its pieces begin, and its end; of an empty one only the latter."""
    if not form.elements:
        return (0,)
    outer = form.shape[:-1]
    # The last dimension as elements are coded: of F4, two are one.
    return (*_cuts((*outer, form.elements // prod(outer)), _PIECES), form.elements)


def _cuts(shape: Sequence[int], most: int) -> list[int]:
    if not shape:
        return [0]
    rows, row = shape[0], prod(shape[1:])
    if rows >= most:
        return [rows * number // most * row for number in range(most)]
    within = _cuts(shape[1:], most // rows)
    return [number * row + cut for number in range(rows) for cut in within]


def no_sums(form: Form) -> Sums:
    """The digests of the pieces of a tensor of zeros."""
    return np.zeros((len(cuts_of(form)) - 1, 4), np.uint32)


def sums_of(data: bytes) -> Sums:
    """The digests of pieces from their bytes."""
    return np.frombuffer(data, "<u4").astype(np.uint32).reshape(-1, 4)


def total_of(data: bytes) -> Sums:
    """What the pieces with these digests are together."""
    total: Sums = sums_of(data).sum(0, np.uint32)
    return total


def split(form: Form, flat: Indices) -> Iterator[tuple[int, int, int]]:
    """Cut elements of a tensor, which ascend, into those of its pieces: (piece, begin, end) for each that has any."""
    bounds: list[int] = np.searchsorted(flat, cuts_of(form)).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            yield number, begin, end


def digest_whole(form: Form, elements: NDArray[np.generic]) -> bytes:
    """The digests of the pieces of a tensor that is there whole."""
    width = DTYPES[form.dtype].width
    return b"".join(
        digest_bytes(tensor_digest(elements[begin:end], begin * width)) for begin, end in pairwise(cuts_of(form))
    )


def boxes_of(form: Form, box: Box, data: bytes) -> dict[Box, bytes]:
    """What a footprint has of each piece, as footprints, with their digests; itself, where these are no boxes."""
    found: dict[Box, bytes] = {}
    for number, (begin, end) in enumerate(pairwise(cuts_of(form))):
        parts = list(box.rectangles(box.rank(begin), box.rank(end)))
        if len(parts) > 1:
            return {box: digest_bytes(total_of(data))}
        for part in parts:
            axes = [(count, axis.canonical, axis.local) for count, axis in zip(part.counts, box.axes, strict=True)]
            piece = Box.make(axes, part.canonical, part.local)
            found[piece] = data[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
    return found
