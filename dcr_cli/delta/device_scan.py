"""Scans long runs of blocks on a device, and all else as the scanner does that it is made of.

How a run is compared there is device/comparing.py's matter; what becomes of a block's changes, whoever has found them,
encoding.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import add
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import BLOCK_BYTES, Elements, block_elements, compared_of
from dcr_cli.delta.scan import Pace, Part, Scanned, Scans, ScansRuns, pace_of
from dcr_cli.stages import Stages

if TYPE_CHECKING:
    from dcr_cli.device.comparing import Device
    from dcr_cli.device.lanes import Lanes

# A run takes some half a millisecond of launches and waits, in which a thread of a processor compares about so much.
RUN_BYTES = 4 << 20


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
        """Scan parts: long runs on the device, what lies between them together."""
        found: list[Scanned] = []
        others: list[Part] = []
        for run in runs_of(parts):
            offset = self._scanner.offset_of(run) if self._is_long(run) else None
            if offset is None:
                others += run
                continue
            found += self._scan_others(others)
            others = []
            found += self._scan_run(run, offset)
        return found + self._scan_others(others)

    def _scan_others(self, parts: Sequence[Part]) -> list[Scanned]:
        return self._scanner.scan_all(parts) if parts else []

    def load(self, part: Part) -> tuple[Elements, Elements]:
        """Both sides of a part again, in memory of their own."""
        return self._scanner.load(part)

    def is_sent_whole(self, tensor: Tensor) -> bool:
        return self._scanner.is_sent_whole(tensor)

    def _is_long(self, run: Sequence[Part]) -> bool:
        """Whether a run is worth its way to the device: it has two sides, whose changes are to be coded."""
        first = run[0]
        has_sides = first.base is not None and first.target is not None
        return has_sides and sum(part.bytes for part in run) >= RUN_BYTES and not self.is_sent_whole(first.tensor)

    def _scan_run(self, run: Sequence[Part], offset: int) -> list[Scanned]:
        from dcr_cli.device.comparing import Piece

        dtype, allowed = run[0].tensor.dtype, self._allowed
        exponent = (dtype.exponent_bits, dtype.exponent_shift) if allowed.context else None
        piece = Piece(dtype.width, sum(part.elements for part in run), offset, exponent)
        sides = partial(self._scanner.read_base, run), partial(self._scanner.read_target, run)
        scanned = []
        for part, found in zip(run, self._device.compare(piece, *sides), strict=True):
            is_sample = part.row != self.chosen_row
            compared = compared_of(found, part.elements, gap=allowed.gap, is_sample=is_sample)
            target_digest = add(compared.digest, compared.growth)
            scanned.append(Scanned(part, compared.digest, target_digest, compared.draft))
        return scanned


def scanning(
    lanes: Lanes | None, scanner: ScansRuns, allowed: Allowed, *, jobs: int, stages: Stages
) -> tuple[Scans, Pace]:
    """What scans in so many threads, on a device if there is one, and how much of it at once."""
    if lanes is None:
        return scanner, pace_of(jobs)
    from dcr_cli.device.comparing import Device

    device = Device(lanes, stages, slots=jobs)
    # A task has at most a block less one byte more than is asked for. While each slot is at one, others are drafted.
    return DeviceScanner(device, scanner, allowed), Pace(device.piece_bytes - BLOCK_BYTES, 2 * device.slots)


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
