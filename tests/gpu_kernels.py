"""What gpu has to do on any device: equal the reference and the compiled kernels bit for bit, and refuse what they do.

All memory that the kernels get is full of garbage, with a margin around it that stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import dcr_kernels
from dcr_kernels import reference
from kernel_cases import BLOCK_BYTES, SPECS, Elements, Spec, pair, weights

GARBAGE = 0xA5
MARGIN = 64

WIDTHS = (1, 2, 4, 8)
BF16 = Spec(2, 8, 7)
OF_WIDTH = {1: Spec(1, 4, 3), 2: BF16, 4: Spec(4, 8, 23), 8: Spec(8, 11, 52)}
RATES = (0.0, 1e-4, 0.01, 0.5, 1.0)

every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
every_width = pytest.mark.parametrize("width", WIDTHS)


class Memory:
    """Stands in for what allocates: tensors of garbage within garbage."""

    def __init__(self) -> None:
        self.rooms: list[torch.Tensor] = []

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        size = math.prod(sizes) * dtype.itemsize
        room = torch.full((size + 2 * MARGIN,), GARBAGE, dtype=torch.uint8, device=device)
        self.rooms.append(room)
        return room[MARGIN : MARGIN + size].view(dtype).view(sizes)

    def new_empty(self, like: torch.Tensor, *shape: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return self.empty(*shape, dtype=dtype or like.dtype, device=device or like.device)

    def check(self) -> None:
        for room in self.rooms:
            assert (room[:MARGIN] == GARBAGE).all() and (room[-MARGIN:] == GARBAGE).all()


def exact(value: Any) -> Any:
    """Return what kernels give in a form that compares bit for bit."""
    if isinstance(value, tuple):
        return tuple(exact(part) for part in value)
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def comparisons(found: Any, exponent: tuple[int, int] | None) -> list[reference.Comparison]:
    """Bring what was compared to the host, as what `compare` of the reference says of each block."""
    starts = found.starts.tolist()
    digests, growths = found.digests.cpu().numpy(), found.growths.cpu().numpy()
    positions, old, new = (each.cpu().numpy() for each in (found.positions, found.old, found.new))
    ranking = found.ranking
    compared = []
    for block, (begin, end) in enumerate(pairwise(starts)):
        drafted = None
        if ranking is not None and exponent is not None and begin < end:
            top, members = int(ranking.tops[block]), ranking.members.cpu().numpy()[block]
            known = reference.Ranking(top, members, ranking.ranks.cpu().numpy()[begin:end])
            drafted = reference.draft(known, old[begin:end], new[begin:end], exponent)
        changes = positions[begin:end], old[begin:end], new[begin:end]
        compared.append(reference.Comparison(digests[block], growths[block], *changes, drafted))
    return compared


class GpuKernels:
    """The tests; a device and the kernels are fixtures of the modules that have them as their own."""

    @pytest.fixture(autouse=True)
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        memory = Memory()
        monkeypatch.setattr(torch, "empty", memory.empty)
        monkeypatch.setattr(torch, "empty_like", lambda like: memory.new_empty(like, like.shape))
        monkeypatch.setattr(
            torch.Tensor, "new_empty", lambda like, *shape, **kind: memory.new_empty(like, *shape, **kind)
        )
        yield
        memory.check()

    def check(self, gpu: Any, device: str, sides: tuple[Elements, Elements], offset: int, spec: Spec) -> None:
        """Compare what is found of two sides of a piece with what the others say of each block."""
        base, target = sides
        exponent = spec.exponent_bits, spec.exponent_shift
        tensors = torch.from_numpy(base.copy()).to(device), torch.from_numpy(target.copy()).to(device)
        found = comparisons(gpu.compare(*tensors, offset, exponent), exponent)
        size = BLOCK_BYTES // spec.width
        blocks = [slice(begin, begin + size) for begin in range(0, len(base), size)]
        assert len(found) == len(blocks)
        for number, block in enumerate(blocks):
            place = offset + number * BLOCK_BYTES
            for compare in (reference.compare, dcr_kernels.compare):
                assert exact(found[number]) == exact(compare(base[block], target[block], place, exponent))
        assert all(
            tensor.cpu().numpy().tobytes() == side.tobytes() for tensor, side in zip(tensors, sides, strict=True)
        )

    @every_spec
    def test_small_pieces(self, gpu: Any, device: str, spec: Spec) -> None:
        for n in (0, 1, 63, 64, 65, 1000):
            for rate in RATES if n == 1000 else (0.01, 1.0) if n == 65 else (0.5,):
                self.check(gpu, device, pair(spec, n, rate), spec.width * n, spec)

    @every_width
    def test_one_past_a_block(self, gpu: Any, device: str, width: int) -> None:
        spec = OF_WIDTH[width]
        base, target = pair(spec, BLOCK_BYTES // width + 1, 0.01)
        target[-1] = base[-1] ^ spec.dtype.type(1)
        self.check(gpu, device, (base, target), 3 * BLOCK_BYTES, spec)

    @pytest.mark.parametrize("rate", RATES)
    def test_two_tiles(self, gpu: Any, device: str, rate: float) -> None:
        """The last one has one element."""
        self.check(gpu, device, pair(BF16, 4097, rate), 0, BF16)

    def test_several_blocks_of_different_scales(self, gpu: Any, device: str) -> None:
        """The top exponents of one block are too far from those of the others to be counted in the same pass."""
        n = BLOCK_BYTES // 2
        base, target = pair(BF16, 2 * n + 65, 1e-3)
        moved = base[n : 2 * n] & np.uint16(0x7F80) > np.uint16(0x2000)
        base[n : 2 * n][moved] -= np.uint16(0x1000)
        target[n : 2 * n][moved] -= np.uint16(0x1000)
        self.check(gpu, device, (base, target), 2 * n * 2 + 4098, BF16)

    @every_width
    def test_exponents_that_no_sample_shows(self, gpu: Any, device: str, width: int) -> None:
        """They lie between the elements that are looked at beforehand; or all are the largest there is."""
        spec, n = OF_WIDTH[width], 8200
        base: Elements = np.zeros(n, spec.dtype)
        base[1::2] = weights(spec, n // 2, np.random.default_rng(1))
        self.check(gpu, device, (base, np.roll(base, 1)), 0, spec)
        ones: Elements = np.full(200, (1 << 8 * spec.width) - 1, spec.dtype)
        self.check(gpu, device, (ones, ones ^ spec.dtype.type(1)), 0, spec)

    def test_bits_are_compared_not_numbers(self, gpu: Any, device: str) -> None:
        """Zeros of both signs differ, NaNs of other payloads do, those of equal bits do not."""
        base = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC0, 0xFFC1, 0x7F80, 0x3F80], np.uint16)
        target = np.array([0x8000, 0x0000, 0x7FC0, 0x7FC1, 0x7FC1, 0x7F80, 0x3F80], np.uint16)
        found = gpu.compare(torch.from_numpy(base).to(device), torch.from_numpy(target).to(device), 0)
        assert found.positions.tolist() == [0, 1, 3, 4]
        self.check(gpu, device, (base, target), 0, BF16)

    @pytest.mark.parametrize("width", [1, 8])
    def test_pieces_at_once(self, gpu: Any, device: str, width: int) -> None:
        """What lies between them is garbage, and changes nothing."""
        spec, size = OF_WIDTH[width], BLOCK_BYTES // width
        exponent = spec.exponent_bits, spec.exponent_shift
        lengths = (8192 // width + 1, 0, 70)
        pairs = [pair(spec, n, rate, n) for n, rate in zip(lengths, (0.02, 0.0, 1.0), strict=True)]
        runs = [gpu.Run(n, 8192 * number + 24) for number, n in enumerate(lengths)]
        rng = np.random.default_rng(1)
        whole = [rng.integers(0, 256, BLOCK_BYTES + 70 * width).astype(np.uint8).view(spec.dtype) for _ in range(2)]
        begin = 0
        for sides in pairs:
            for side, each in zip(whole, sides, strict=True):
                side[begin : begin + len(each)] = each
            begin += size if len(sides[0]) else 0
        tensors = (torch.from_numpy(side).to(device) for side in whole)
        found = comparisons(gpu.compare_runs(*tensors, runs, exponent), exponent)
        expected = [
            reference.compare(*sides, run.offset, exponent)
            for sides, run in zip(pairs, runs, strict=True)
            if run.elements
        ]
        assert [exact(each) for each in found] == [exact(each) for each in expected]

    def test_no_ranks_unless_asked(self, gpu: Any, device: str) -> None:
        base, target = pair(BF16, 100, 0.5)
        found = gpu.compare(torch.from_numpy(base).to(device), torch.from_numpy(target).to(device), 0)
        assert found.ranking is None
        assert exact(comparisons(found, None)[0]) == exact(reference.compare(base, target, 0))

    @settings(max_examples=10)
    @given(st.data())
    def test_any_two_sides(self, gpu: Any, device: str, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(SPECS))
        size = data.draw(st.integers(0, 40))
        side = st.binary(min_size=size * spec.width, max_size=size * spec.width)
        base, target = (np.frombuffer(data.draw(side), spec.dtype) for _ in range(2))
        offset = spec.width * data.draw(st.integers(0, (1 << 62) // spec.width))
        self.check(gpu, device, (base, target), offset, spec)

    @every_width
    def test_digest_at_any_place(self, gpu: Any, device: str, width: int) -> None:
        data = np.random.default_rng(0).integers(0, 256, 16 * 1100).astype(np.uint8)
        for size in (0, 1, 1001):
            elements = data[: 8 * size].view(f"<u{width}")
            for place in (0, 1023, 1025, 2**40 + 1):
                found = gpu.digest(torch.from_numpy(elements.copy()).to(device), place * width)
                assert exact(found.cpu().numpy()) == exact(reference.digest(elements, place * width))

    @every_width
    @pytest.mark.parametrize("dtype", [np.uint32, np.int64])
    def test_patches(self, gpu: Any, device: str, width: int, dtype: type) -> None:
        rng = np.random.default_rng(width)
        for n, count in ((1, 0), (1, 1), (65, 64), (5000, 1), (5000, 1025), (5000, 5000)):
            out = weights(OF_WIDTH[width], n, rng)
            positions: NDArray[Any] = rng.permutation(n)[:count].astype(dtype)
            values = weights(OF_WIDTH[width], count, rng)
            for name in ("patch", "patch_xor"):
                expected, found = out.copy(), torch.from_numpy(out.copy()).to(device)
                getattr(reference, name)(expected, positions.astype(np.uint32), values)
                getattr(gpu, name)(found, torch.from_numpy(positions).to(device), torch.from_numpy(values).to(device))
                assert found.cpu().numpy().tobytes() == expected.tobytes()

    @pytest.mark.parametrize("positions", [np.array([0, 9, 8], np.uint32), np.array([0, -1], np.int64)])
    def test_positions_outside_change_nothing(self, gpu: Any, device: str, positions: NDArray[Any]) -> None:
        out = torch.zeros(9, dtype=torch.uint8, device=device)
        values = torch.ones(len(positions), dtype=torch.uint8, device=device)
        for patch in (gpu.patch, gpu.patch_xor):
            with pytest.raises(ValueError, match="position outside of 9 elements: at element 1"):
                patch(out, torch.from_numpy(positions).to(device), values)
        assert not out.any()

    def test_what_is_no_pair_is_refused(self, gpu: Any, device: str) -> None:
        two, three = (torch.zeros(n, dtype=torch.uint16, device=device) for n in (2, 3))
        with pytest.raises(ValueError, match="sizes differ: 2 and 3: at element 2"):
            gpu.compare(two, three, 0)
        for other in (two.view(torch.int16), two[None], torch.zeros(2, dtype=torch.uint32, device=device)):
            with pytest.raises(ValueError, match="not elements of one width"):
                gpu.compare(two, other, 0)
        with pytest.raises(ValueError, match="not a contiguous row"):
            gpu.digest(three[::2])
        for offset in (-2, 1, 2**62 + 2):
            with pytest.raises(ValueError, match="no offset"):
                gpu.digest(two, offset)
        for runs, message in (
            ([gpu.Run(3, 0)], "runs of 3 elements, and there are 2"),
            ([gpu.Run(1, 0), gpu.Run(1, 0)], "runs of 262145 elements, and there are 2"),
            ([gpu.Run(0, 0), gpu.Run(1, 8190)], "offsets not equally far into a row: 0 and 8190"),
        ):
            with pytest.raises(ValueError, match=message):
                gpu.compare_runs(two, two, runs)
        with pytest.raises(ValueError, match="no exponent field"):
            gpu.compare(two, two, 0, (8, 9))
        positions = torch.zeros(1, dtype=torch.uint32, device=device)
        with pytest.raises(ValueError, match="sizes differ: 1 and 2"):
            gpu.patch(three, positions, two)
        with pytest.raises(ValueError, match="not positions"):
            gpu.patch(three, positions.view(torch.int32), two[:1])
