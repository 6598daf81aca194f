"""A pair in memory, block by block through all that the commands do with it but reading and writing files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_methods import TensorPair
from bench_report import BenchError
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.delta.choice import StatesSample
from dcr_cli.delta.encoding import (
    Draft,
    Encoding,
    States,
    block_elements,
    compare_block,
    encode_block,
)

Sums = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor: its place, both its sides, and a buffer of that size for a result."""

    pair: TensorPair
    offset: int
    base: NDArray[Any]
    target: NDArray[Any]
    out: NDArray[Any]


@dataclass(slots=True)
class Coded:
    """All blocks of a pair as bytes, and the digests of both sides, tensor by tensor."""

    blocks: list[bytes]
    states: States
    base_digests: dict[str, Sums]
    target_digests: dict[str, Sums]


def cut(pairs: list[TensorPair]) -> list[Block]:
    """Cut tensors into the blocks of the format."""
    blocks = []
    for pair in pairs:
        out = np.zeros_like(pair.base)
        size = block_elements(pair.dtype.width)
        for start in range(0, len(pair.base), size):
            part = slice(start, start + size)
            offset = start * pair.dtype.width
            blocks.append(Block(pair, offset, pair.base[part], pair.target[part], out[part]))
    return blocks


def check(blocks: list[Block], coded: Coded, pairs: list[TensorPair]) -> None:
    """Decode all blocks and compare them bit for bit, and all digests with those of whole tensors."""
    found = decode(blocks, coded)
    for block in blocks:
        if not np.array_equal(block.out, block.target):
            raise BenchError(f"{block.pair.name}: the block at byte {block.offset} does not decode to its target")
    for pair in pairs:
        for digests in (coded, found):
            if not np.array_equal(digests.base_digests[pair.name], kernels.digest(pair.base)):
                raise BenchError(f"{pair.name}: the base's digest by blocks is not that of the whole tensor")
            if not np.array_equal(digests.target_digests[pair.name], kernels.digest(pair.target)):
                raise BenchError(f"{pair.name}: the target's digest by changes is not that of the whole tensor")


def encode(blocks: list[Block]) -> Coded:
    """Compare, digest and code all blocks, as `dcr diff --encoding context` does."""
    coded = Coded([b""] * len(blocks), {}, {}, {})
    sample = StatesSample()
    held: list[tuple[int, Draft]] = []
    for number, block in enumerate(blocks):
        width = block.base.itemsize
        found = compare_block(block.base, block.target, block.offset, block.pair.dtype, context=True, gap=False)
        _add(coded.base_digests, block, found.digest)
        _add(coded.target_digests, block, found.digest + found.growth)
        draft = found.draft
        if draft is None:
            continue
        held.append((number, draft))
        if width not in coded.states:
            # The first blocks wait until the starting states are made of them.
            sample.add(draft)
            if not sample.is_full:
                continue
            coded.states[width] = sample.states()
        _encode_held(held, blocks, coded)
    coded.states.setdefault(2, sample.states())
    _encode_held(held, blocks, coded)
    return coded


def _encode_held(held: list[tuple[int, Draft]], blocks: list[Block], coded: Coded) -> None:
    for number, draft in held:
        block = blocks[number]
        load = _loader(block)
        coded.blocks[number] = encode_block(draft, Encoding.CONTEXT, block.base.itemsize, coded.states, None, load)
    held.clear()


def _loader(block: Block) -> Callable[[], tuple[NDArray[Any], NDArray[Any]]]:
    return lambda: (block.base, block.target)


def decode(blocks: list[Block], coded: Coded) -> Coded:
    """Decode all blocks into their buffers and digest both sides, as `dcr apply` does."""
    found = Coded([], {}, {}, {})
    for block, code in zip(blocks, coded.blocks, strict=True):
        if not code:
            digest = kernels.digest(block.base, block.offset)
            block.out[:] = block.base
            _add(found.base_digests, block, digest)
            _add(found.target_digests, block, digest)
            continue
        exponent = block.pair.dtype.exponent_bits, block.pair.dtype.exponent_shift
        states = coded.states[block.base.itemsize]
        decoded = kernels.context_decode(code, block.base, block.offset, exponent, states, block.out)
        _add(found.base_digests, block, decoded.digest)
        _add(found.target_digests, block, decoded.digest + decoded.growth)
    return found


def _add(digests: dict[str, Sums], block: Block, digest: Sums) -> None:
    name = block.pair.name
    digests[name] = digests[name] + digest if name in digests else digest
