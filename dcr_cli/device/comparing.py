"""Compares batches on a device: their sides go there, and only what changed comes back.

What kernels do is dcr_kernels.gpu's matter; which batches there are, and what is made of their changes, the caller's.
Memory is bounded: a few slots, each with room for both sides of a batch on the host and on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.device.lanes import Lanes
from dcr_cli.device.wish import MOST_SLOTS
from dcr_cli.stages import Stages
from dcr_kernels.gpu import Compared, Ranks, Run, compare_runs, digest
from dcr_kernels.gpu.elements import BLOCK_BYTES

# No batch has sides of more bytes: then a copy takes a few milliseconds, against half a one of launches and waits.
BATCH_BYTES = 64 << 20
# What comes back does so in parts of this size; all changes of a block fit, of any width.
_BACK_BYTES = 16 << 20
_ELEMENTS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

# Fills an array of bytes with its runs, or is one on the device already.
Side = Callable[[NDArray[np.uint8]], None] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Elements of one width that are compared at once, `exponent` being given if changes are to be ranked: runs, each
    of which begins a block."""

    width: int
    runs: tuple[Run, ...]
    exponent: tuple[int, int] | None

    @property
    def bytes(self) -> int:
        """Bytes of one side."""
        return sum(self.width * run.elements for run in self.runs)

    @property
    def ends(self) -> list[int]:
        """At which byte each run ends, the first one having begun at 0, and others where blocks after it do."""
        begin, ends = 0, []
        for run in self.runs:
            ends.append(begin + self.width * run.elements)
            begin = -(-ends[-1] // BLOCK_BYTES) * BLOCK_BYTES
        return ends


class _Slot:
    """Room for one batch: for what comes back, and for each side that is read, on either end of the way."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.back = lanes.host_memory(_BACK_BYTES)

    def rooms(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for a side on the host and on the device, made when it is first needed."""
        if number not in self._rooms:
            self._rooms[number] = self._lanes.host_memory(BATCH_BYTES), self._lanes.device_memory(BATCH_BYTES)
        return self._rooms[number]


@dataclass(frozen=True, slots=True)
class _Summary:
    """What is known of the blocks of a batch, on the host, but for the changes themselves."""

    digests: NDArray[np.uint32]
    growths: NDArray[np.uint32]
    starts: NDArray[np.int64]
    tops: NDArray[np.int32] | None
    members: NDArray[np.uint32] | None


class Device:
    """Compares batches in any number of threads, at most `slots` of them at once."""

    def __init__(self, lanes: Lanes, stages: Stages, *, slots: int) -> None:
        self.lanes = lanes
        self.batch_bytes = BATCH_BYTES
        self.slots = min(slots, MOST_SLOTS)
        self._stages = stages
        self._turn = threading.Semaphore(self.slots)
        self._free: list[_Slot] = []

    def compare(self, batch: Batch, base: Side, target: Side) -> Iterator[kernels.Comparison]:
        """What changes in each block of a batch, in order, with drafts if changes are ranked.

        A side that is read is so before the first is given; one that lies on the device must not change until then.
        Both are as long as the end of the last run. LocalError if the device fails.
        """
        if batch.ends[-1] > BATCH_BYTES:
            raise ValueError(f"a batch of {batch.ends[-1]} bytes, more than {BATCH_BYTES}")
        with self._slot() as slot:
            old, new = (self._bring(slot, number, batch, side) for number, side in enumerate((base, target)))
            found, seconds = self.lanes.compute.run(lambda: compare_runs(old, new, batch.runs, batch.exponent))
            self._stages.add("compare", batch.bytes, seconds)
            summary = self._summary(slot, found)
            yield from self._blocks(slot, batch, found, summary)

    def digest(self, data: torch.Tensor, width: int) -> NDArray[np.uint32]:
        """The digest of all bytes of a tensor that lies on the device."""
        found, _ = self.lanes.compute.run(lambda: digest(data.view(_ELEMENTS[width])).cpu())
        return found.numpy()

    def fetch(self, data: torch.Tensor) -> NDArray[np.uint8]:
        """Bytes that lie on the device, in memory of the host's own."""
        found, _ = self.lanes.back.run(lambda: torch.empty_like(data, device="cpu").copy_(data))
        return found.numpy()

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        """A slot that is free, made when it is first needed."""
        with self._turn:
            try:
                slot = self._free.pop()
            except IndexError:
                slot = _Slot(self.lanes)
            try:
                yield slot
            finally:
                self._free.append(slot)

    def _bring(self, slot: _Slot, number: int, batch: Batch, side: Side) -> torch.Tensor:
        """One side on the device, as elements."""
        if isinstance(side, torch.Tensor):
            return side.view(_ELEMENTS[batch.width])
        host, there = (room[: batch.ends[-1]] for room in slot.rooms(number))
        with self._stages.timed("read", batch.bytes):
            side(host.numpy())
        _, seconds = self.lanes.up.run(lambda: there.copy_(host, non_blocking=True))
        self._stages.add("copy there", batch.bytes, seconds)
        return there.view(_ELEMENTS[batch.width])

    def _summary(self, slot: _Slot, found: Compared) -> _Summary:
        ranking = found.ranking
        ranks = (ranking.tops, ranking.members) if ranking is not None else ()
        # The changes will come to where these do.
        parts = [part.copy() for part in self._fetch(slot, (found.digests, found.growths, found.starts, *ranks))]
        return _Summary(*parts[:3], *(parts[3:] if ranks else (None, None)))

    def _blocks(self, slot: _Slot, batch: Batch, found: Compared, summary: _Summary) -> Iterator[kernels.Comparison]:
        """Fetch the changes of as many blocks at once as fit, and draft them one by one."""
        of_changes = found.positions, found.old, found.new, *_ranks_of(found.ranking)
        most = _BACK_BYTES // sum(tensor.itemsize for tensor in of_changes)
        starts = summary.starts.tolist()
        first = 0
        while first < len(starts) - 1:
            last = first + 1
            while last < len(starts) - 1 and starts[last + 1] - starts[first] <= most:
                last += 1
            begin, end = starts[first], starts[last]
            arrays = self._fetch(slot, tuple(tensor[begin:end] for tensor in of_changes))
            for block, (start, stop) in enumerate(pairwise(starts[first : last + 1]), first):
                changes = tuple(array[start - begin : stop - begin] for array in arrays)
                yield self._comparison(batch, summary, block, changes)
            first = last

    def _comparison(
        self, batch: Batch, summary: _Summary, block: int, changes: tuple[NDArray[Any], ...]
    ) -> kernels.Comparison:
        # The next block's changes come to where these are.
        positions, old, new = (each.copy() for each in changes[:3])
        draft = None
        if batch.exponent is not None and summary.tops is not None and summary.members is not None and len(positions):
            ranking = kernels.Ranking(int(summary.tops[block]), summary.members[block], changes[3])
            with self._stages.timed("draft", old.nbytes):
                draft = kernels.draft(ranking, old, new, batch.exponent)
        return kernels.Comparison(summary.digests[block], summary.growths[block], positions, old, new, draft)

    def _fetch(self, slot: _Slot, tensors: tuple[torch.Tensor, ...]) -> tuple[NDArray[Any], ...]:
        """Bring tensors to the host, where they are valid until the next call."""
        places, at = [], 0
        for tensor in tensors:
            places.append(slot.back[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += -(-tensor.nbytes // 8) * 8
        copies = list(zip(places, tensors, strict=True))
        _, seconds = self.lanes.back.run(lambda: [place.copy_(tensor, non_blocking=True) for place, tensor in copies])
        self._stages.add("copy back", at, seconds)
        return tuple(place.numpy() for place in places)


def try_kernels(lanes: Lanes) -> None:
    """Compare two tiles of BF16, and raise whatever stands in the way: at a first launch Triton needs a C compiler, a
    library of the driver, and a folder for what it has compiled. RuntimeError if this Triton's kernels find anything
    but what the CPU finds."""
    old = np.arange(0x3F00, 0x3F00 + 5000, dtype=np.uint16)
    new = old ^ (old % 7 == 0)
    batch, exponent = (Run(len(old), 0),), (8, 7)
    sides = [lanes.device_memory(side.nbytes).view(torch.uint16) for side in (old, new)]
    bits = [torch.from_numpy(side) for side in (old, new)]
    lanes.up.run(lambda: [there.copy_(side) for there, side in zip(sides, bits, strict=True)])
    found, _ = lanes.compute.run(lambda: _on_host(compare_runs(sides[0], sides[1], batch, exponent)))
    expected = kernels.compare(old, new, 0, exponent)
    pairs = zip(found, (expected.digest, expected.growth, expected.positions, expected.old, expected.new), strict=True)
    if not all(np.array_equal(here, there) for here, there in pairs):
        raise RuntimeError("what they find is not what the CPU finds")


def _on_host(found: Compared) -> list[NDArray[Any]]:
    """All that is found in one block, but ranks."""
    return [each.cpu().numpy() for each in (found.digests[0], found.growths[0], found.positions, found.old, found.new)]


def _ranks_of(ranking: Ranks | None) -> tuple[torch.Tensor, ...]:
    return (ranking.ranks,) if ranking is not None else ()
