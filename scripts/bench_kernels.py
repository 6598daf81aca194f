"""How long each kernel takes over all blocks of a pair, and what one core gets from memory."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_blocks import Block, Coded
from bench_clock import interleave
from bench_methods import TensorPair
from bench_report import BenchError
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.delta.encoding import Changes
from dcr_cli.delta.huffman import HuffmanTable, build_table

TABLE_BLOCKS = 64
Tasks = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class _Input:
    """All that kernels are given for one block, as they get it in the codecs."""

    block: Block
    code: bytes
    changes: Changes
    class_counts: NDArray[np.uint32]
    magnitudes: NDArray[Any]
    fields: tuple[int, int]

    @property
    def masks(self) -> NDArray[Any]:
        masks: NDArray[Any] = self.changes.old ^ self.changes.new
        return masks


def kernel_times(blocks: list[Block], coded: Coded, rounds: int) -> dict[str, float]:
    """Best seconds of each kernel over all blocks that changed."""
    inputs = [_input(block, code) for block, code in zip(blocks, coded.blocks, strict=True) if code]
    states = coded.states[blocks[0].base.itemsize]

    def each(work: Callable[[_Input], object]) -> Callable[[], object]:
        return lambda: [work(i) for i in inputs]

    tasks: Tasks = {
        "compare": each(lambda i: kernels.compare(i.block.base, i.block.target, i.block.offset, i.fields)),
        "compare, no draft": each(lambda i: kernels.compare(i.block.base, i.block.target, i.block.offset)),
        "digest": each(lambda i: kernels.digest(i.block.base, i.block.offset)),
        "magnitude_bins": each(lambda i: kernels.magnitude_bins(i.class_counts, i.magnitudes)),
        "magnitude_encode": each(lambda i: kernels.magnitude_encode(i.class_counts, i.magnitudes, states)),
        "context_decode": each(
            lambda i: kernels.context_decode(i.code, i.block.base, i.block.offset, i.fields, states, i.block.out)
        ),
        "position_bits": each(lambda i: kernels.position_bits(len(i.block.base), i.changes.positions)),
        **_gap_tasks(inputs),
    }
    return {name: times.best for name, times in interleave(tasks, rounds).items()}


def _input(block: Block, code: bytes) -> _Input:
    fields = block.pair.dtype.exponent_bits, block.pair.dtype.exponent_shift
    found = kernels.compare(block.base, block.target, block.offset, fields)
    if found.draft is None:
        raise BenchError(f"{block.pair.name}: nothing changed in a block that was coded")
    changes = Changes(found.positions, found.old, found.new)
    return _Input(block, code, changes, found.draft.class_counts, found.draft.magnitudes, fields)


def _gap_tasks(inputs: list[_Input]) -> Tasks:
    """Coding all blocks as `gap`, by one Huffman table of the masks of the first ones; what decodes is checked."""
    masks = [given.masks for given in inputs]
    values, counts = np.unique(np.concatenate(masks[:TABLE_BLOCKS]), return_counts=True)
    counted = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    width = masks[0].itemsize
    table = build_table(counted, width, complete=False)
    codes = _gap_encode(inputs, masks, table)
    found = _gap_decode(inputs, codes, table, width)
    for given, mask, (positions, symbols) in zip(inputs, masks, found, strict=True):
        if not np.array_equal(positions, given.changes.positions) or not np.array_equal(symbols, mask):
            raise BenchError(f"{given.block.pair.name}: a block does not decode as `gap`")
    return {
        "gap_encode": lambda: _gap_encode(inputs, masks, table),
        "gap_decode": lambda: _gap_decode(inputs, codes, table, width),
    }


def _gap_encode(inputs: list[_Input], masks: list[NDArray[Any]], table: HuffmanTable) -> list[bytes]:
    entries = table.symbols, table.lengths, table.escape_length
    return [
        kernels.gap_encode(len(given.block.base), given.changes.positions, mask, *entries)
        for given, mask in zip(inputs, masks, strict=True)
    ]


def _gap_decode(
    inputs: list[_Input], codes: list[bytes], table: HuffmanTable, width: int
) -> list[tuple[NDArray[np.uint32], NDArray[Any]]]:
    entries = table.symbols, table.lengths, table.escape_length
    return [
        kernels.gap_decode(code, len(given.block.base), width, *entries)
        for given, code in zip(inputs, codes, strict=True)
    ]


def memory_tasks(pairs: list[TensorPair]) -> Tasks:
    """What one core gets from memory: one stream read, two streams read, a copy onto pages touched before."""
    library = ctypes.CDLL(None)
    size = sum(pair.base.nbytes for pair in pairs)
    first, second = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    first[:], second[:] = 1, 1
    places = [ctypes.c_void_p(array.ctypes.data) for array in (first, second)]
    count = ctypes.c_size_t(size)
    return {
        # The arrays are kept by the closures; a byte 0 is nowhere in them, and they are equal.
        "read": lambda: (library.memchr(places[0], 0, count), first.size),
        "read both": lambda: (library.memcmp(*places, count), first.size + second.size),
        "copy": lambda: (library.memcpy(*places, count), first.size + second.size),
    }
