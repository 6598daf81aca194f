"""Compares pieces that are boxes of tensors, block by block, each side read from where its elements lie, in any number
of threads.

Which pieces are whose is rank_shares.py's matter, where they are read from piece_sources.py's; the bytes of blocks are
encoding.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, Tensor
from dcr_cli.checkpoint.digest import TensorDigest, add, no_digest
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import Elements, compare_block, uint_dtype
from dcr_cli.delta.scan import Part, Scanned, is_sent_whole, rooms_of
from dcr_cli.delta.strided import spans
from dcr_cli.layout.box import Box, Rectangle
from dcr_cli.layout.gather import Gatherer, Source
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.publisher.box_cutting import region_of
from dcr_cli.publisher.piece_sources import piece_source
from dcr_cli.publisher.shares import Slice
from dcr_cli.stages import Stages

# Runs of consecutive elements of at least so many bytes are digested one by one, shorter ones element by element.
_RUN_BYTES = 2048
# Positions within a block's reach are numbers of 32 bits.
_REACH_ELEMENTS = 1 << 32


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece lies in its tensor, whose element `start` is its first one, and where it is read from on the base's
    side, and on the target's, unless that is the base's."""

    start: int
    region: Box
    base: Source
    target: Source | None


class PieceScanner:
    """Scans the blocks of a share's slices, whose number a part has as its row. A part begins as many elements after
    the first one of its slice as come before it in the slice's own order.

    UnsupportedError as piece_source.
    """

    def __init__(
        self,
        sides: tuple[Checkpoint, Checkpoint],
        readers: tuple[Reader, Reader],
        share: Sequence[Slice],
        allowed: Allowed,
        stages: Stages,
    ) -> None:
        self._allowed = allowed
        self._stages = stages
        self.chosen_row: int | None = None
        self._base, self._target = (Gatherer(reader) for reader in readers)
        self._places = {number: _place(sides, each) for number, each in enumerate(share) if each.elements}

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        """Scan parts one after the other."""
        with self._stages.timed("read and compare", sum(part.bytes for part in parts)):
            return [self._scan(part) for part in parts]

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part, in memory of their own."""
        place = self._places[part.row]
        old = _read(self._base, place.base, part, part.start - place.start)
        # A tensor that no shard holds is what it was.
        if place.target is None:
            return old, old
        return old, _read(self._target, place.target, part, part.start - place.start)

    def is_sent_whole(self, tensor: Tensor) -> bool:
        """As for a tensor that is compared as it lies."""
        return is_sent_whole(tensor, self._allowed)

    def read_base(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        place = self._places[run[0].row]
        for part, room in rooms_of(run, buffer):
            _fill(self._base, place.base, part.start - place.start, room, part)

    def read_target(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        place = self._places[run[0].row]
        assert place.target is not None
        for part, room in rooms_of(run, buffer):
            _fill(self._target, place.target, part.start - place.start, room, part)

    def offset_of(self, run: Sequence[Part]) -> int | None:
        """As for every scanner; a tensor that no shard holds is not worth any way."""
        place = self._places[run[0].row]
        if place.target is None or not _is_one_run(place.region):
            return None
        return run[0].start * run[0].tensor.dtype.width

    def _scan(self, part: Part) -> Scanned:
        old, new = self.load(part)
        whole, dtype = self.is_sent_whole(part.tensor), part.tensor.dtype
        region, start = self._places[part.row].region, part.start - self._places[part.row].start
        is_one_run = _is_one_run(region)
        offset = part.start * dtype.width if is_one_run else 0
        context, gap = self._allowed.context and not whole, self._allowed.gap and not whole
        is_sample = part.row != self.chosen_row
        found = compare_block(old, new, offset, dtype, context=context, gap=gap, is_sample=is_sample)
        base_digest, growth = found.digest, found.growth
        if not is_one_run:
            base_digest = digest_of(region, start, old)
            growth = no_digest() if found.draft is None else _growth(region, start, old, new)
        return Scanned(part, base_digest, add(base_digest, growth), found.draft)


def digest_of(region: Box, start: int, elements: Elements) -> TensorDigest:
    """What consecutive elements of a piece, from number `start` on, add to the digest of their tensor."""
    total = no_digest()
    width = elements.itemsize
    for part in region.rectangles(start, start + len(elements)):
        values = elements[part.canonical - start : part.canonical - start + part.elements]
        run = part.counts[-1] if region.axes and region.axes[-1].local == 1 else 1
        if run * width < _RUN_BYTES:
            flat = _flat(region, part, part.counts)
            total = add(total, _growth_at(flat, np.zeros_like(values), values))
            continue
        for number, first in enumerate(_flat(region, part, part.counts[:-1]).tolist()):
            total = add(total, kernels.digest(values[number * run : (number + 1) * run], first * width))
    return total


def _growth(region: Box, start: int, old: Elements, new: Elements) -> TensorDigest:
    """What the digest of their tensor grows by where elements of a piece, from number `start` on, are others."""
    positions = kernels.scan(old, new)
    flat = region.find(positions.astype(np.int64) + start)[1]
    return _growth_at(flat, kernels.gather(old, positions), kernels.gather(new, positions))


def _growth_at(flat: NDArray[np.int64], old: Elements, new: Elements) -> TensorDigest:
    total = no_digest()
    for span, begin, end in spans(flat, _REACH_ELEMENTS):
        first = span * _REACH_ELEMENTS
        positions = (flat[begin:end] - first).astype(np.uint32)
        grown = kernels.digest_changes(positions, old[begin:end], new[begin:end], first * old.itemsize)
        total = add(total, grown)
    return total


def _flat(region: Box, part: Rectangle, counts: Sequence[int]) -> NDArray[np.int64]:
    """Flat indices in the tensor of a rectangle's elements along its first axes, in order."""
    flat = np.array([part.local], np.int64)
    for axis, count in zip(region.axes, counts, strict=False):
        flat = (flat[:, None] + np.arange(count, dtype=np.int64) * axis.local).reshape(-1)
    return flat


def _is_one_run(region: Box) -> bool:
    return all(axis.local == 1 for axis in region.axes)


def _read(gatherer: Gatherer, source: Source, part: Part, start: int) -> Elements:
    out: Elements = np.empty(part.elements, uint_dtype(part.tensor.dtype.width))
    source.read(gatherer, start, out)
    return out


def _fill(gatherer: Gatherer, source: Source, start: int, room: NDArray[np.uint8], part: Part) -> None:
    source.read(gatherer, start, room.view(uint_dtype(part.tensor.dtype.width)))


def _place(sides: tuple[Checkpoint, Checkpoint], each: Slice) -> _Place:
    old, new = sides
    region = region_of(each.box, each.tensor.shape, each.elements)
    is_skipped = isinstance(new, LaidCheckpoint) and each.tensor.name in new.layout.skipped
    return _Place(each.start, region, piece_source(old, each), None if is_skipped else piece_source(new, each))
