"""Decodes a delta against the checkpoint that it starts from: of each tensor, the elements that change, and their new
bits.

It holds all of them in memory, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

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


class Taken(NamedTuple):
    """What becomes of a tensor: elements by their ascending flat positions, and their new bits."""

    tensor: str
    positions: Indices
    new: Elements


def take(delta: Delta, folder: Path, jobs: int) -> list[Taken]:
    """Decode what a delta changes in its base, the checkpoint in `folder`, tensor by tensor in canonical order; that it
    is the base is for others to see.

    DamagedError if a payload is, or a block is malformed; UnsupportedError if it changes which tensors there are, or
    makes one of another one; ConflictError if the checkpoint changes meanwhile.
    """
    checkpoint = open_checkpoint(folder, what="base", allow_strangers=True)
    rows = [row for row in delta.manifest.tensors if may_change(row)]
    for row in rows:
        _check(row, checkpoint)
    with PayloadReader(delta.folder, delta.manifest.payloads) as reader:
        reader.verify_all(jobs)
        return _decoded(rows, ChainPayloads([reader]), checkpoint, jobs)


def _decoded(rows: list[TensorRow], payloads: ChainPayloads, checkpoint: Checkpoint, jobs: int) -> list[Taken]:
    found: dict[str, list[tuple[Indices, Elements]]] = {row.name: [] for row in rows}
    lock = Lock()
    with checkpoint.reader() as reader:

        def work(block: Block) -> None:
            base_of = partial(_gather, reader, checkpoint.by_name[block.row.name])
            flat, values, is_mask = read_block(block, payloads, base_of)
            old = base_of(flat)
            new = old ^ values if is_mask else values
            differs = new != old
            with lock:
                found[block.row.name].append((flat[differs], new[differs]))

        run_all(_tasks(rows, payloads, checkpoint), lambda: work, jobs)
        reader.check_unchanged()
    return [_joined(name, parts) for name, parts in found.items() if any(len(flat) for flat, _ in parts)]


def _check(row: TensorRow, checkpoint: Checkpoint) -> None:
    if row.source is None or is_moved(row) or row.name not in checkpoint.by_name:
        facts = "is new, or made of another one: nothing that lies somewhere changes"
        raise UnsupportedError(f"tensor {shown(row.name)}", facts, hint="load what serves it anew, at this version")


def _tasks(rows: list[TensorRow], payloads: ChainPayloads, checkpoint: Checkpoint) -> Iterator[Block]:
    runs = Runs(payloads)
    for row in rows:
        yield from blocks_of(runs, payloads, row, checkpoint.by_name[row.name].elements)


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


def _joined(name: str, parts: list[tuple[Indices, Elements]]) -> Taken:
    positions = np.concatenate([flat for flat, _ in parts])
    new = np.concatenate([values for _, values in parts])
    order = np.argsort(positions)
    return Taken(name, positions[order], new[order])
