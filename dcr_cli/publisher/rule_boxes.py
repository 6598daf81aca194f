"""What a rule makes of a box of a stored tensor, and of which box it makes a part of a canonical one (FORMAT 14.3).
Pure.

A box of None is all of a tensor. Which boxes ranks have is not its business.
"""

from __future__ import annotations

from dcr_cli.delta.manifest import Box
from dcr_cli.layout.layout import Form
from dcr_cli.layout.residual.rules import WEIGHT, Conversion, Elementwise, Named, Quantized


class DividedError(ValueError):
    """A box divides what a rule makes something of as a whole: its text says what that is."""


def needs_whole(conversion: Conversion | None) -> bool:
    """Whether a rule, if there is one, makes an element of more than the one at its place."""
    return not (conversion is None or isinstance(conversion, Elementwise))


def made_box(box: Box | None, conversion: Conversion | None, stored: Form) -> Box | None:
    """The box of the canonical tensor that is made of a box of a stored one. DividedError if none is."""
    if box is None or not needs_whole(conversion):
        return box
    height, width = _block_of(conversion)
    *_, rows, columns = stored.shape
    if not (_has_whole(box, -2, height, rows) and _has_whole(box, -1, width, columns)):
        raise DividedError(f"whole blocks of [{height}, {width}]")
    assert isinstance(conversion, Quantized)
    if conversion.part == WEIGHT:
        return box
    *starts, row, column = box.starts
    *counts, tall, wide = box.counts
    return Box((*starts, row // height, column // width), box.steps, (*counts, -(-tall // height), -(-wide // width)))


def stored_box(box: Box | None, conversion: Conversion | None, stored: Form) -> Box | None:
    """The box of a stored tensor that a box of the canonical one is made of. DividedError if more is."""
    if box is None or not needs_whole(conversion):
        return box
    height, width = _block_of(conversion)
    assert isinstance(conversion, Quantized)
    if conversion.part != WEIGHT:
        box = _box_of_blocks(box, (height, width), stored)
    made_box(box, conversion, stored)
    return box


def _block_of(conversion: Conversion | None) -> tuple[int, int]:
    if isinstance(conversion, Named):
        raise DividedError("all")
    assert isinstance(conversion, Quantized)
    return conversion.recipe.block


def _has_whole(box: Box, axis: int, block: int, size: int) -> bool:
    """Whether a box has whole blocks along an axis, the last of which may be cut off by the tensor's end."""
    start, count = box.starts[axis], box.counts[axis]
    end = start + count
    return box.steps[axis] == 1 and start % block == 0 and (end % block == 0 or end == size)


def _box_of_blocks(box: Box, block: tuple[int, int], stored: Form) -> Box:
    """The elements of blocks, which follow each other."""
    starts, counts = list(box.starts), list(box.counts)
    for axis, size in zip((-2, -1), block, strict=True):
        starts[axis] *= size
        counts[axis] = min(counts[axis] * size, stored.shape[axis] - starts[axis])
    return Box(tuple(starts), box.steps, tuple(counts))
