"""The baselines: published ways to send a change of weights, and what no code of order 0 can go below.

Each is written from its description, one tensor at a time, as published:

    dense XOR    target xor base over all bits, zstd level 1 (slime, miles, SkyRL)
    16-bit gaps  distances between changes in 16 bits, the xor masks of the changes, zstd level 1 (NeMo RL)
    COO values   steps of rows and columns, the new values of the changes, zstd level 1 (PULSE)

The limits are entropies of a tensor's changes:

    plain            which elements changed, and each one's xor mask
    given base       the same, where the exponent of the base's element is known, which the receiver holds
    given base, ulp  the same, where the change is a difference of the bits as integers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.header import Dtype

Elements = NDArray[Any]
METHODS = ("dense XOR", "16-bit gaps", "COO values")
LIMITS = ("plain", "given base", "given base, ulp")

_COMPRESSOR = zstandard.ZstdCompressor(level=1)
_DECOMPRESSOR = zstandard.ZstdDecompressor()


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One tensor on both sides, as unsigned integers."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    base: Elements
    target: Elements


@dataclass(slots=True)
class Measure:
    """What a pair takes by each method, in bytes, and the limits, in bits."""

    elements: int = 0
    changed: int = 0
    dense_bytes: int = 0
    method_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    limit_bits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0.0))

    def limit_bytes(self, limit: str) -> float:
        """A limit in bytes."""
        return self.limit_bits[limit] / 8


def read_pairs(base: Path, target: Path) -> Iterator[TensorPair]:
    """Read all tensors that both checkpoints have in the same form, one after the other."""
    old_checkpoint, new_checkpoint = open_checkpoint(base), open_checkpoint(target)
    with old_checkpoint.reader() as old_reader, new_checkpoint.reader() as new_reader:
        for new in new_checkpoint.tensors:
            old = old_checkpoint.by_name.get(new.name)
            if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
                continue
            sides = [np.empty(new.elements, f"<u{new.dtype.width}") for _ in range(2)]
            old_reader.read_into(old, 0, sides[0].view(np.uint8))
            new_reader.read_into(new, 0, sides[1].view(np.uint8))
            yield TensorPair(new.name, new.dtype, new.shape, *sides)


def measure(pairs: Iterable[TensorPair]) -> Measure:
    """Encode every tensor by every method, check that dense XOR gives it back, and add up the limits."""
    found = Measure()
    for pair in pairs:
        positions = np.flatnonzero(pair.base != pair.target)
        found.elements += len(pair.base)
        found.changed += len(positions)
        found.dense_bytes += pair.base.nbytes
        dense = dense_xor(pair.base, pair.target)
        if not np.array_equal(dense_xor_apply(dense, pair.base), pair.target):
            raise AssertionError(f"the baseline dense XOR does not give back {pair.name}")
        found.method_bytes["dense XOR"] += len(dense)
        found.method_bytes["16-bit gaps"] += len(gaps_16_bit(pair, positions))
        found.method_bytes["COO values"] += len(coo_values(pair, positions))
        _add_limits(found.limit_bits, pair, positions)
    return found


def dense_xor(base: Elements, target: Elements) -> bytes:
    """Encode a tensor."""
    return _COMPRESSOR.compress((base ^ target).data)


def dense_xor_apply(encoded: bytes, base: Elements) -> Elements:
    """Decode a tensor into a new buffer."""
    target: Elements = np.frombuffer(_DECOMPRESSOR.decompress(encoded), base.dtype) ^ base
    return target


def gaps_16_bit(pair: TensorPair, positions: NDArray[np.int64]) -> bytes:
    """Encode a tensor. A gap that is too long is cut by changes with an empty mask."""
    gaps = np.diff(positions, prepend=-1) - 1
    masks = pair.base[positions] ^ pair.target[positions]
    fillers = gaps >> 16
    if fillers.any():
        after = np.repeat(np.arange(len(gaps)), fillers)
        masks = np.insert(masks, after, 0)
        gaps = np.insert(gaps - (fillers << 16), after, 0xFFFF)
    return _compress(gaps.astype(np.uint16), masks)


def coo_values(pair: TensorPair, positions: NDArray[np.int64]) -> bytes:
    """Encode a tensor: a row's first column is written as it is, the others as steps."""
    columns = int(np.prod(pair.shape[1:], dtype=np.int64)) if pair.shape else 1
    row, column = np.divmod(positions, max(columns, 1))
    row_steps = np.diff(row, prepend=0)
    column_steps = np.diff(column, prepend=0)
    begins_row = row_steps > 0
    begins_row[:1] = True
    column_steps[begins_row] = column[begins_row]
    return _compress(_narrow(row_steps, np.uint8), _narrow(column_steps, np.uint16), pair.target[positions])


def _narrow(values: NDArray[np.int64], dtype: type[np.unsignedinteger[Any]]) -> Elements:
    return values.astype(dtype if not len(values) or values.max() <= np.iinfo(dtype).max else np.uint32)


def _compress(*columns: Elements) -> bytes:
    return _COMPRESSOR.compress(b"".join(column.tobytes() for column in columns))


def _add_limits(bits: dict[str, float], pair: TensorPair, positions: NDArray[np.int64]) -> None:
    old, new = pair.base[positions], pair.target[positions]
    masks, differences = old ^ new, new - old
    bits["plain"] += _choice_bits(len(positions), len(pair.base)) + _symbol_bits(masks)
    field_mask = (1 << pair.dtype.exponent_bits) - 1
    exponents = ((pair.base >> pair.dtype.exponent_shift) & field_mask).astype(np.uint16)
    members = np.bincount(exponents, minlength=field_mask + 1)
    classes = exponents[positions]
    for exponent in np.unique(classes).tolist():
        chosen = classes == exponent
        where = _choice_bits(int(np.count_nonzero(chosen)), int(members[exponent]))
        bits["given base"] += where + _symbol_bits(masks[chosen])
        bits["given base, ulp"] += where + _symbol_bits(differences[chosen])


def _choice_bits(chosen: int, members: int) -> float:
    """Entropy of which members are chosen, all members alike."""
    counts = np.array([chosen, members - chosen], np.float64)
    return _counts_bits(counts[counts > 0])


def _symbol_bits(symbols: Elements) -> float:
    """Entropy of all symbols together, by their own frequencies."""
    if symbols.dtype.itemsize <= 2:
        counts = np.bincount(symbols)
        return _counts_bits(counts[counts > 0].astype(np.float64))
    return _counts_bits(np.unique(symbols, return_counts=True)[1].astype(np.float64))


def _counts_bits(counts: NDArray[np.float64]) -> float:
    total = counts.sum()
    return float((counts * (np.log2(total) - np.log2(counts))).sum()) if total else 0.0
