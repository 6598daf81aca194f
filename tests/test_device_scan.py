"""Which parts go to a device, and how many of them at once; all of it, in the order in which they were given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta import device_scan
from dcr_cli.delta.choice import ALLOWED
from dcr_cli.delta.device_scan import DeviceScanner, runs_of
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.delta.scan import Part, Scanned, is_sent_whole, parts_of

MIB = 1 << 20


class CpuScanner:
    """Notes what is left to it; what it reads are zeros, and ones for the target."""

    chosen_row: int | None = None

    def __init__(self) -> None:
        self.scanned: list[Part] = []

    def scan_all(self, parts: Sequence[Part]) -> list[Scanned]:
        self.scanned += parts
        return [Scanned(part, np.zeros(4, np.uint32), np.zeros(4, np.uint32), None) for part in parts]

    def load(self, part: Part) -> Any:
        return part

    def is_sent_whole(self, tensor: Tensor) -> bool:
        return is_sent_whole(tensor, ALLOWED["auto"])

    def read_base(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        assert len(buffer) == sum(part.bytes for part in run)
        buffer[:] = 0

    def read_target(self, run: Sequence[Part], buffer: NDArray[np.uint8]) -> None:
        buffer[:] = run[0].row

    def offset_of(self, run: Sequence[Part]) -> int | None:
        return None if run[0].tensor.name == "scattered" else run[0].start * run[0].tensor.dtype.width


class FakeDevice:
    """Compares on the CPU, block by block, and notes what it was given at once."""

    batch_bytes = 8 * BLOCK_BYTES
    slots = 1

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def compare(self, batch: Any, base: Any, target: Any) -> Iterator[kernels.Comparison]:
        self.batches.append(batch)
        sides = [np.full(batch.ends[-1], 255, np.uint8) for _ in range(2)]
        for side, read in zip(sides, (base, target), strict=True):
            read(side)
        old, new = (side.view(f"<u{batch.width}") for side in sides)
        for run, end in zip(batch.runs, batch.ends, strict=True):
            begin = end // batch.width - run.elements
            assert begin * batch.width % BLOCK_BYTES == 0
            size = BLOCK_BYTES // batch.width
            for first in range(begin, begin + run.elements, size):
                here = slice(first, min(first + size, begin + run.elements))
                offset = run.offset + (first - begin) * batch.width
                yield kernels.compare(old[here], new[here], offset, batch.exponent)


def tensor(name: str, count_bytes: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, DTYPES[dtype], (count_bytes // DTYPES[dtype].width,), 0, 0, count_bytes)


def blocks(row: int, count_bytes: int, dtype: str = "BF16", name: str = "a") -> list[Part]:
    each = tensor(name, count_bytes, dtype)
    return list(parts_of(row, each, each))


@pytest.fixture
def scanner() -> CpuScanner:
    return CpuScanner()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def scan(device: Any, scanner: CpuScanner, parts: list[Part]) -> list[Scanned]:
    pytest.importorskip("triton")
    found = DeviceScanner(device, scanner, ALLOWED["auto"]).scan_all(parts)
    assert [each.part for each in found] == parts
    left = {id(part) for part in scanner.scanned}
    for each in found:
        if id(each.part) not in left:
            assert each.draft is not None and each.draft.changed == each.part.elements
            ones = np.full(each.part.bytes, each.part.row, np.uint8)
            digest = kernels.digest(ones, each.part.start * each.part.tensor.dtype.width)
            assert each.target_digest.tolist() == digest.tolist()
    return found


def test_runs_are_cut_where_blocks_do_not_follow() -> None:
    first, second = blocks(1, 3 * BLOCK_BYTES + 6), blocks(2, 2 * BLOCK_BYTES)
    parts = [*first[:2], first[3], *second, *first[2:3], *blocks(3, 0)]
    assert [len(run) for run in runs_of(parts)] == [2, 1, 2, 1]
    assert list(runs_of([])) == []
    # A block that is shorter than a whole one ends its run, whatever comes after.
    odd = [first[0]._replace(elements=10), first[0]._replace(start=10)]
    assert [len(run) for run in runs_of(odd)] == [1, 1]


def test_many_short_tensors_go_at_once(
    device: FakeDevice, scanner: CpuScanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scan, "LEAST_BYTES", 1)
    parts = [part for row in range(1, 8) for part in blocks(row, MIB + 2 * row)]
    scan(device, scanner, parts)
    assert not scanner.scanned
    # Each takes three blocks.
    assert [len(batch.runs) for batch in device.batches] == [2, 2, 2, 1]


def test_what_stays_on_the_cpu(device: FakeDevice, scanner: CpuScanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_scan, "LEAST_BYTES", 2 * MIB)
    new, gone = tensor("new", MIB), tensor("gone", MIB)
    kept = [
        *blocks(1, 1000),
        *parts_of(2, None, new),
        *parts_of(-1, gone, None),
        *blocks(3, MIB, name="scattered"),
        *blocks(4, 16),
        *blocks(5, MIB, "F32"),
    ]
    gone_there = blocks(6, 2 * MIB)
    scan(device, scanner, [*kept[:3], *gone_there, *kept[3:]])
    assert scanner.scanned == kept
    assert [batch.bytes for batch in device.batches] == [2 * MIB]


def test_kinds_do_not_mix(device: FakeDevice, scanner: CpuScanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither dtypes, whose exponents lie elsewhere, nor runs that begin elsewhere in a row of the digest."""
    monkeypatch.setattr(device_scan, "LEAST_BYTES", 1)
    moved = [part._replace(start=part.start + 5) for part in blocks(4, MIB)]
    parts = [*blocks(1, MIB), *blocks(2, MIB, "F16"), *blocks(3, MIB), *moved, *blocks(5, MIB, "I32")]
    scan(device, scanner, parts)
    assert not scanner.scanned
    found = sorted((batch.width, batch.exponent, len(batch.runs)) for batch in device.batches)
    assert found == [(2, (5, 10), 1), (2, (8, 7), 1), (2, (8, 7), 2), (4, (0, 0), 1)]


def test_the_chosen_row_is_the_scanners(device: FakeDevice, scanner: CpuScanner) -> None:
    there = DeviceScanner(device, scanner, ALLOWED["auto"])  # type: ignore[arg-type]
    there.chosen_row = 5
    assert scanner.chosen_row == there.chosen_row == 5
    part = blocks(1, 10)[0]
    assert there.load(part) is part  # type: ignore[comparison-overlap]
    assert there.is_sent_whole(tensor("a", 16)) and not there.is_sent_whole(tensor("a", 18))
