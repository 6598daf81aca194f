"""Scans runs of blocks on a device, many short ones at once, and all else as the scanner does that it is made of.

How a run is compared there is device/comparing.py's matter; what becomes of a block's changes, whoever has found them,
encoding.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import add
from dcr_cli.checkpoint.header import Dtype
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import BLOCK_BYTES, Elements, block_elements, compared_of
from dcr_cli.delta.scan import Part, Scanned
from dcr_cli.delta.scanning import Pace, Scans, ScansRuns, pace_of
from dcr_cli.stages import Stages
from dcr_kernels.reference import ROW_BYTES

if TYPE_CHECKING:
    from dcr_cli.device.comparing import Device
    from dcr_cli.device.lanes import Lanes

# Launches and waits take some half a millisecond, in which a thread of a processor compares about so much.
LEAST_BYTES = 4 << 20
# Runs are padded to whole blocks, so that of shorter ones less than half of what goes there would be theirs.
RUN_BYTES = BLOCK_BYTES // 2


@dataclass(frozen=True, slots=True)
class _Run:
    """Parts that follow each other in their tensor, from byte `offset` of it on; the first has number `first`."""

    first: int
    parts: list[Part]
    offset: int

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def kind(self) -> tuple[Dtype, int]:
        """What those that are compared at once have in common."""
        return self.parts[0].tensor.dtype, self.offset % ROW_BYTES


class DeviceScanner:
    """A scanner for which a device compares. Its methods may be called from several threads."""

    def __init__(self, device: Device, scanner: ScansRuns, allowed: Allowed) -> None:
        self._device = device
        self._scanner = scanner
        self._allowed = allowed

    @property
    def chosen_row(self) -> int | None:
        return self._scanner.chosen_row

    @chosen_row.setter
    def chosen_row(self, row: int | None) -> None:
        self._scanner.chosen_row = row

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        """Scan parts: runs that are long, or many, on the device; the others together."""
        found: dict[int, Scanned] = {}
        for batch in self._batches(parts):
            numbers = [run.first + number for run in batch for number in range(len(run.parts))]
            found.update(zip(numbers, self._scan_batch(batch), strict=True))
        others = [number for number in range(len(parts)) if number not in found]
        if others:
            found.update(zip(others, self._scanner.scan_all([parts[number] for number in others]), strict=True))
        return [found[number] for number in range(len(parts))]

    def _batches(self, parts: Sequence[Part]) -> list[list[_Run]]:
        """The runs that are compared on the device, those of each list at once."""
        batches: list[list[_Run]] = []
        open_ones: dict[tuple[Dtype, int], list[_Run]] = {}
        first = 0
        for run in runs_of(parts):
            offset = self._scanner.offset_of(run) if self._can_go(run) else None
            if offset is not None:
                each = _Run(first, run, offset)
                batch = open_ones.setdefault(each.kind, [])
                if sum(map(_padded, batch)) + _padded(each) > self._device.batch_bytes:
                    batches.append(batch)
                    batch = open_ones[each.kind] = []
                batch.append(each)
            first += len(run)
        batches += open_ones.values()
        return [batch for batch in batches if sum(run.bytes for run in batch) >= LEAST_BYTES]

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part again, in memory of their own."""
        return self._scanner.load(part)

    def is_sent_whole(self, tensor: Tensor) -> bool:
        return self._scanner.is_sent_whole(tensor)

    def _can_go(self, run: Sequence[Part]) -> bool:
        """Whether a run is worth its way to the device beside others: it has two sides, whose changes are to be
        coded."""
        first = run[0]
        has_sides = first.base is not None and first.target is not None
        return has_sides and sum(part.bytes for part in run) >= RUN_BYTES and not self.is_sent_whole(first.tensor)

    def _scan_batch(self, batch: Sequence[_Run]) -> list[Scanned]:
        from dcr_cli.device.comparing import Batch
        from dcr_kernels.gpu import Run

        dtype, allowed = batch[0].parts[0].tensor.dtype, self._allowed
        exponent = (dtype.exponent_bits, dtype.exponent_shift) if allowed.context else None
        there = Batch(dtype.width, tuple(Run(run.elements, run.offset) for run in batch), exponent)

        def read(read_run: Callable[[Sequence[Part], NDArray[np.uint8]], None], buffer: NDArray[np.uint8]) -> None:
            for run, end in zip(batch, there.ends, strict=True):
                read_run(run.parts, buffer[end - run.bytes : end])

        sides = partial(read, self._scanner.read_base), partial(read, self._scanner.read_target)
        parts = [part for run in batch for part in run.parts]
        scanned = []
        for part, found in zip(parts, self._device.compare(there, *sides), strict=True):
            is_sample = part.row != self.chosen_row
            compared = compared_of(found, part.elements, gap=allowed.gap, is_sample=is_sample)
            target_digest = add(compared.digest, compared.growth)
            scanned.append(Scanned(part, compared.digest, target_digest, compared.draft))
        return scanned


def _padded(run: _Run) -> int:
    """What a run takes among others."""
    return -(-run.bytes // BLOCK_BYTES) * BLOCK_BYTES


def scanning(
    lanes: Lanes | None, scanner: ScansRuns, allowed: Allowed, *, jobs: int, stages: Stages
) -> tuple[Scans, Pace]:
    """What scans in so many threads, on a device if there is one, and how much of it at once."""
    if lanes is None:
        return scanner, pace_of(jobs)
    from dcr_cli.device.comparing import Device

    device = Device(lanes, stages, slots=jobs)
    # A task has at most a block less one byte more than is asked for. While each slot is at one, others are drafted.
    return DeviceScanner(device, scanner, allowed), Pace(device.batch_bytes - BLOCK_BYTES, 2 * device.slots)


def runs_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut parts into runs: blocks of a row that follow each other, all of them whole but the last one."""
    run: list[Part] = []
    for part in parts:
        if run and not _continues(run[-1], part):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _continues(last: Part, part: Part) -> bool:
    is_next = part.row == last.row and part.start == last.start + last.elements
    return is_next and last.elements == block_elements(last.tensor.dtype.width)
