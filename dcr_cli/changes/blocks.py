"""The coded blocks of a delta's tensors (FORMAT 4), and what each of them says: of which elements of its tensor, which
bits.

Where a base's elements come from, and where the new ones go, is the callers' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.encoding import Changed, Encoding, block_elements, decode_block, decode_gap, is_whole
from dcr_cli.delta.manifest import Box, TensorRow
from dcr_cli.delta.strided import box_elements, flat_indices
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Indices
from dcr_cli.receiver.passes.runs import Coded, Runs, piece_blocks

Elements = NDArray[Any]


class Block(NamedTuple):
    """A coded block of a row: elements `start` to `start + elements` of its piece, which may have a box."""

    row: TensorRow
    box: Box | None
    coded: Coded
    start: int
    elements: int


class Said(NamedTuple):
    """Elements of a tensor, by ascending flat positions, and their new bits, or the masks of these."""

    flat: Indices
    values: Elements
    is_mask: bool


def is_moved(row: TensorRow) -> bool:
    """Whether a tensor is made of another one."""
    return row.source is not None and row.source != row.name


def may_change(row: TensorRow) -> bool:
    """Whether a tensor may have other bits than it had."""
    return bool(row.pieces) or is_moved(row)


def blocks_of(runs: Runs, payloads: ChainPayloads, row: TensorRow, elements: int) -> Iterator[Block]:
    """The blocks of a tensor of so many elements that change something. DamagedError for a malformed run."""

    def fail(number: int, payload: int, error: ValueError) -> None:
        raise DamagedError(f"tensor {shown(row.name)} in {payloads.name_of(payload)}", str(error)) from error

    size = block_elements(DTYPES[row.dtype].width)
    for piece in row.pieces:
        start, total = 0, box_elements(piece.box) if piece.box is not None else elements
        for coded in piece_blocks(runs, row, 0, piece, fail):
            if coded is not None:
                yield Block(row, piece.box, coded, start, min(size, total - start))
            start += size


def read_block(block: Block, payloads: ChainPayloads, base_of: Callable[[Indices], Elements]) -> Said:
    """Decode a block; `base_of` reads elements of its tensor as they were before, for those that need that.

    DamagedError if it is malformed.
    """
    coded = block.coded
    data = coded.block
    if data is None:
        data = payloads.run_bytes(coded.run, coded.begin, coded.end)
    try:
        return _decode(block, data, base_of)
    except ValueError as error:
        what = f"tensor {shown(block.row.name)} in {payloads.name_of(coded.run.payload)}"
        raise DamagedError(what, str(error)) from error


def _decode(block: Block, data: memoryview, base_of: Callable[[Indices], Elements]) -> Said:
    coded, dtype = block.coded, DTYPES[block.row.dtype]
    encoding = Encoding(coded.piece.encoding)
    if is_whole(data, encoding):
        new = decode_block(data, None, dtype, block.elements, encoding, coded.states, coded.table)
        assert not isinstance(new, Changed)
        return Said(_flat(block, None), new, False)
    if encoding is Encoding.CONTEXT:
        flat = _flat(block, None)
        changed = decode_block(data, base_of(flat), dtype, block.elements, encoding, coded.states, None)
        assert isinstance(changed, Changed)
        # They come class by class.
        order = np.argsort(changed.positions)
        return Said(flat[changed.positions[order]], changed.values[order], False)
    changed = decode_gap(data, dtype, block.elements, encoding, coded.table)
    return Said(_flat(block, changed.positions), changed.values, encoding is Encoding.GAP_XOR)


def _flat(block: Block, positions: NDArray[np.uint32] | None) -> Indices:
    """Where elements of a block, given by their places in it, or all of them, lie in the tensor."""
    if block.box is not None:
        flat = flat_indices(block.box, block.row.shape, block.start, block.elements)
        return flat if positions is None else flat[positions]
    if positions is None:
        return np.arange(block.start, block.start + block.elements, dtype=np.int64)
    return positions.astype(np.int64) + block.start
