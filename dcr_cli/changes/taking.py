"""Decodes a delta against the checkpoint that it starts from: of each tensor, the elements that change, and their new
bits.

It holds some blocks of them at a time, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from dcr_cli.changes.blocks import Block, Elements, blocks_of, is_moved, may_change, read_block
from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, Tensor, open_checkpoint
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.delta import Delta
from dcr_cli.delta.encoding import BLOCK_BYTES, uint_dtype
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.delta.strided import spans
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.box import Indices
from dcr_cli.pool import run_all
from dcr_cli.receiver.passes.runs import Runs

# What becomes of a tensor: elements by their ascending flat positions, one at least, and their new bits. Of one tensor
# it is told part by part, by several threads, and of no element twice.
Put = Callable[[str, Indices, Elements], None]

# So many blocks in a row are decoded by one thread; and put, with what came before, when so many elements change.
_BLOCKS = 16
_CHANGES = 1 << 16


def take(delta: Delta, folder: Path, jobs: int, put: Put) -> None:
    """Decode what a delta changes in its base, the checkpoint in `folder`; that it is the base is for others to see.

    DamagedError if a payload is, or a block is malformed; UnsupportedError if it changes which tensors there are, or
    makes one of another one; ConflictError if the checkpoint changes meanwhile.
    """
    checkpoint = open_checkpoint(folder, what="base", allow_strangers=True)
    rows = [row for row in delta.manifest.tensors if may_change(row)]
    for row in rows:
        _check(row, checkpoint)
    with PayloadReader(delta.folder, delta.manifest.payloads) as reader, checkpoint.reader() as base:
        reader.verify_all(jobs)
        payloads = ChainPayloads([reader])

        def work(blocks: list[Block]) -> None:
            _take(blocks, payloads, partial(_gather, base, checkpoint.by_name[blocks[0].row.name]), put)

        run_all(_tasks(rows, payloads, checkpoint), lambda: work, jobs)
        base.check_unchanged()


def _take(blocks: list[Block], payloads: ChainPayloads, base_of: Callable[[Indices], Elements], put: Put) -> None:
    """Decode blocks of one piece that follow each other."""
    flat_parts: list[Indices] = []
    new_parts: list[Elements] = []
    for number, block in enumerate(blocks, 1):
        flat, values, is_mask = read_block(block, payloads, base_of)
        old = base_of(flat)
        new = old ^ values if is_mask else values
        differs = new != old
        flat_parts.append(flat[differs])
        new_parts.append(new[differs])
        count = sum(map(len, flat_parts))
        if count >= _CHANGES or (count and number == len(blocks)):
            put(block.row.name, np.concatenate(flat_parts), np.concatenate(new_parts))
            flat_parts, new_parts = [], []


def _check(row: TensorRow, checkpoint: Checkpoint) -> None:
    if row.source is None or is_moved(row) or row.name not in checkpoint.by_name:
        facts = "is new, or made of another one: nothing that lies somewhere changes"
        raise UnsupportedError(f"tensor {shown(row.name)}", facts, hint="load what serves it anew, at this version")


def _tasks(rows: list[TensorRow], payloads: ChainPayloads, checkpoint: Checkpoint) -> Iterator[list[Block]]:
    runs = Runs(payloads)
    for row in rows:
        blocks = blocks_of(runs, payloads, row, checkpoint.by_name[row.name].elements)
        for _, of_piece in groupby(blocks, key=lambda block: id(block.coded.piece)):
            while some := list(islice(of_piece, _BLOCKS)):
                yield some


def _gather(reader: Reader, tensor: Tensor, flat: Indices) -> Elements:
    """Read elements at ascending positions, span by span."""
    width = tensor.dtype.width
    found: Elements = np.empty(len(flat), uint_dtype(width))
    for _, begin, end in spans(flat, BLOCK_BYTES // width):
        first = int(flat[begin])
        elements = np.empty(int(flat[end - 1]) + 1 - first, found.dtype)
        reader.read_into(tensor, first * width, elements.view(np.uint8))
        found[begin:end] = elements[flat[begin:end] - first]
    return found
