"""Arrays that the tests of the kernels share: all kinds of element, many sizes and rates, awkward values, addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.unsignedinteger[Any]]

BLOCK_BYTES = 524288


@dataclass(frozen=True, slots=True)
class Spec:
    """A kind of element, as the kernels see it."""

    width: int
    exponent_bits: int
    exponent_shift: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.width}")

    def __str__(self) -> str:
        return f"w{self.width}e{self.exponent_bits}"


SPECS = (
    Spec(1, 0, 0),
    Spec(1, 4, 3),
    Spec(1, 5, 2),
    Spec(2, 0, 0),
    Spec(2, 5, 10),
    Spec(2, 8, 7),
    Spec(4, 0, 0),
    Spec(4, 8, 23),
    Spec(8, 0, 0),
    Spec(8, 11, 52),
)
SIZES = (1, 2, 63, 64, 65, 127, 1000, 4095, 4096, 4097)
RATES = (0.0, 1e-4, 0.01, 0.3, 0.5, 0.97, 1.0)


def weights(spec: Spec, n: int, rng: np.random.Generator) -> Elements:
    """Return n elements distributed as weights are, zeros, infinities and NaN payloads of both signs among them."""
    bits = 8 * spec.width
    if not spec.exponent_bits:
        return rng.integers(0, 2**64, n, dtype=np.uint64).astype(spec.dtype)
    ones = (1 << spec.exponent_bits) - 1
    middle = ones // 2
    exponents = np.clip(middle - rng.geometric(0.4, n), 0, ones).astype(np.uint64)
    sign = rng.integers(0, 2, n).astype(np.uint64) << np.uint64(bits - 1)
    mantissa = rng.integers(0, 1 << spec.exponent_shift, n).astype(np.uint64)
    values = sign | exponents << np.uint64(spec.exponent_shift) | mantissa
    special = np.array(
        [
            0,
            1 << (bits - 1),
            ones << spec.exponent_shift,
            (1 << (bits - 1)) | (ones << spec.exponent_shift),
            (ones << spec.exponent_shift) | 1,
            (1 << bits) - 1,
        ],
        np.uint64,
    )
    planted = rng.random(n) < 0.003
    values[planted] = rng.choice(special, int(planted.sum()))
    return values.astype(spec.dtype)


def pair(spec: Spec, n: int, rate: float, seed: int = 0) -> tuple[Elements, Elements]:
    """Return base and target, which differ in about a share `rate` of the elements: by small steps, signs, any bits.

    Small elements change more often than large ones, as under an optimiser; at a rate of 1 all do.
    """
    rng = np.random.default_rng([seed, n, spec.width, spec.exponent_bits, int(rate * 10000)])
    base = weights(spec, n, rng)
    chance = np.full(n, rate)
    if spec.exponent_bits and n and 0 < rate < 1:
        exponents = (base >> spec.exponent_shift) & ((1 << spec.exponent_bits) - 1)
        chance = np.where(exponents < np.median(exponents), min(1, 1.6 * rate), 0.4 * rate)
    changed = rng.random(n) < chance
    if rate > 0 and n and not changed.any():
        changed[rng.integers(n)] = True
    steps = rng.geometric(0.6, n).astype(np.uint64)
    steps = np.where(rng.random(n) < 0.5, steps, np.uint64(0) - steps)
    steps = np.where(rng.random(n) < 0.02, rng.integers(0, 2**64, n, dtype=np.uint64), steps)
    steps = np.where(rng.random(n) < 0.005, np.uint64(1 << (8 * spec.width - 1)), steps).astype(spec.dtype)
    steps[steps == 0] = 1
    return base, base + np.where(changed, steps, np.zeros_like(steps))


def unaligned(array: NDArray[Any], shift: int = 1) -> NDArray[Any]:
    """Return a copy whose first byte lies `shift` bytes past an address that is a multiple of 64."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + shift
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def draft(kernels: Any, base: Elements, target: Elements, exponent: tuple[int, int]) -> tuple[bytes, Any, Any]:
    """Return the stream, class counts and magnitudes of the context form of a block that changes."""
    stream, class_counts, magnitudes = kernels.compare(base, target, 0, exponent).draft
    return stream, class_counts, magnitudes


def ranking(base: Elements, positions: NDArray[Any], spec: Spec) -> tuple[int, Any, Any]:
    """Return the top exponent of a block, the members of its classes, and the rank of each change in its class."""
    exponents = (base >> spec.exponent_shift & ((1 << spec.exponent_bits) - 1)).astype(np.int64)
    top = next(t for t in range(1 << spec.exponent_bits) if 256 * np.count_nonzero(exponents > t) <= base.size)
    classes = np.clip(top - exponents, 0, 15)
    ranks = np.zeros(base.size, np.uint32)
    for index in range(16):
        members = classes == index
        ranks[members] = np.arange(np.count_nonzero(members))
    members = np.bincount(classes, minlength=16 if spec.exponent_bits else 1).astype(np.uint32)
    return top, members, ranks[positions]


def decode(kernels: Any, block: Any, base: Elements, exponent: tuple[int, int], states: Any) -> tuple[Any, Any]:
    """Return the positions and the new bits of a context block."""
    positions, values = kernels.context_decode(block, base, 0, exponent, states)[2:]
    return positions, values
