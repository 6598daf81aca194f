"""Reads the runs of pieces, and cuts them into their blocks (FORMAT 6); small ones are read many at a time.

Which thread decodes a block is tasks.py's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta.bits import read_varint
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.huffman import HuffmanTable, read_table
from dcr_cli.delta.manifest import Piece, Run, TensorRow
from dcr_cli.delta.payload import States, split_run

# A run of at most so many bytes is read at once; of a longer one, the sizes of its blocks come first.
RUN_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 18
_TABLE_BYTES = 1 << 15
# A larger block is read by the thread that decodes it.
_SMALL_BLOCK_BYTES = 1 << 15

Fail = Callable[[int, int, ValueError], None]


class Coded(NamedTuple):
    """An encoded block, at bytes `begin` to `end` of its run, and what decoding it needs; `block` if it was read
    already."""

    piece: Piece
    run: Run
    begin: int
    end: int
    block: memoryview | None
    states: States
    table: HuffmanTable | None


def piece_blocks(runs: Runs, row: TensorRow, number: int, piece: Piece, fail: Fail) -> Iterator[Coded | None]:
    """The blocks of a piece in order, None where nothing changes; none after a malformed run."""
    width = DTYPES[row.dtype].width
    for run in piece.runs:
        try:
            yield from runs.blocks(width, piece, run)
        except ValueError as error:
            fail(number, run.payload, error)
            return


@dataclass(slots=True)
class _Window:
    """Bytes of one payload's runs, from byte `begin` of them on."""

    data: memoryview
    payload: int
    begin: int
    states: States


class Runs:
    """Reads runs of one stream; small ones that follow each other, many at a time.

    The deltas of a chain are read side by side, each through a window of its own.
    """

    def __init__(self, payloads: ChainPayloads) -> None:
        self._payloads = payloads
        self._windows: dict[int, _Window] = {}

    def blocks(self, width: int, piece: Piece, run: Run) -> Iterator[Coded | None]:
        """The blocks of a run in order, None where nothing changes. ValueError if it is malformed."""
        encoding = Encoding(piece.encoding)
        loaded, loaded_from = self._start_of(run), 0
        table, start = read_table(loaded, width) if encoding.is_gap else (None, 0)
        states = self._states_of(run)
        for number, (begin, end) in enumerate(pairwise(_bounds(loaded, run, start))):
            block = None
            if begin == end:
                if encoding is Encoding.WHOLE:
                    raise ValueError(f"block {number} of a whole piece is empty")
                yield None
                continue
            if end - begin <= _SMALL_BLOCK_BYTES or end <= loaded_from + len(loaded):
                if not loaded_from <= begin <= end <= loaded_from + len(loaded):
                    loaded, loaded_from = self._payloads.run_bytes(run, begin, begin + RUN_BYTES), begin
                block = loaded[begin - loaded_from : end - loaded_from]
            yield Coded(piece, run, begin, end, block, states, table)

    def _start_of(self, run: Run) -> memoryview:
        """All bytes of a run, or of a long one so many that the sizes of its blocks are among them."""
        if run.bytes > RUN_BYTES:
            return self._payloads.run_bytes(run, 0, _TABLE_BYTES + 4 * run.blocks)
        delta = self._payloads.delta_of(run.payload)
        window = self._windows.get(delta)
        if (
            window is None
            or window.payload != run.payload
            or not window.begin <= run.offset <= run.offset + run.bytes <= window.begin + len(window.data)
        ):
            size = self._payloads.runs_bytes(run.payload) - run.offset
            wanted = Run(run.payload, run.offset, max(run.bytes, min(size, _WINDOW_BYTES)), 1)
            window = _Window(
                self._payloads.run_bytes(wanted), run.payload, run.offset, self._payloads.states(run.payload)
            )
            self._windows[delta] = window
        begin = run.offset - window.begin
        return window.data[begin : begin + run.bytes]

    def _states_of(self, run: Run) -> States:
        window = self._windows.get(self._payloads.delta_of(run.payload))
        return (
            window.states
            if window is not None and window.payload == run.payload
            else self._payloads.states(run.payload)
        )


def _bounds(data: memoryview, run: Run, start: int) -> list[int]:
    """Where the blocks of a run begin, and where the last one ends."""
    if run.blocks > 1:
        bounds: list[int] = split_run(data, run, start).tolist()
        return bounds
    size, begin = read_varint(data, start)
    if begin + size != run.bytes:
        raise ValueError(f"its only block ends at byte {begin + size} of a run of {run.bytes}: at byte {start}")
    return [begin, begin + size]
