"""Reading through boxes: any range of any tensor, wherever its parts lie, is what NumPy makes of them."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dcr_cli.errors import DamagedError
from dcr_cli.layout import gather
from dcr_cli.layout.box import Box, row_strides, slice_box, whole_box
from dcr_cli.layout.gather import Boxes, Gatherer, Held, Sources
from dcr_cli.layout.layout import Form, Placed

HEAD = b"head of file"


class Files:
    """Local tensors in memory, each in a file of its own, behind some bytes."""

    def __init__(self, tensors: Sequence[NDArray[Any]]) -> None:
        self.contents = {f"{number}.safetensors": HEAD + each.tobytes() for number, each in enumerate(tensors)}
        self.reads: list[tuple[str, int, int]] = []

    def read_path_into(self, path: str, offset: int, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        content = self.contents[path][offset : offset + len(view)]
        assert len(content) == len(view), "read past the end of a file"
        self.reads.append((path, offset, len(view)))
        view[:] = content


def held(boxes: Sequence[Box], first: int = 0) -> Boxes:
    return Boxes([Held(Placed(box, f"{first + n}.safetensors", "part"), len(HEAD)) for n, box in enumerate(boxes)])


def sources(form: Form, owners: Sequence[Box], replicas: Sequence[Box] = ()) -> Sources:
    return Sources("w", form, held(owners), held(replicas, len(owners)))


def local_of(canonical: NDArray[Any], box: Box, padding: int = 0) -> NDArray[Any]:
    """A local tensor that holds what a box says, element by element, and other bits between and behind."""
    made = np.full(box.local_end + padding, 0xA5, canonical.dtype)
    found, local = box.find(np.arange(len(canonical)))
    made[local] = canonical[found]
    return made


def random_bits(shape: Sequence[int], dtype: str = "<u2") -> NDArray[Any]:
    count = math.prod(shape)
    return np.random.default_rng(count).integers(0, 1 << 8 * np.dtype(dtype).itemsize, count, dtype=np.dtype(dtype))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape, and boxes that have each of its elements once: a grid of cells, whose axes lie in any order in
    the local tensors, with room between them."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cells: list[tuple[list[int], list[int]]] = [([], [])]
    for count in shape:
        bounds = sorted({0, count, *draw(st.lists(st.integers(1, count), max_size=2))})
        pairs = list(itertools.pairwise(bounds))
        cells = [([*begin, low], [*size, high - low]) for begin, size in cells for low, high in pairs]
    boxes = []
    for begin, size in cells:
        order = draw(st.permutations(range(len(shape))))
        local, reach = [0] * len(shape), 1
        for number in order:
            local[number] = reach * draw(st.sampled_from([1, 1, 1, 3]))
            reach = local[number] * size[number]
        strides = row_strides(shape)
        offset = sum(start * stride for start, stride in zip(begin, strides, strict=True))
        axes = list(zip(size, strides, local, strict=True))
        boxes.append(Box.make(axes, offset, draw(st.integers(0, 3))))
    return shape, draw(st.permutations(boxes))


@given(cut_tensors(), st.sampled_from(["<u1", "<u2", "<u4", "<u8"]), st.data())
def test_any_range_is_gathered(cut: tuple[tuple[int, ...], list[Box]], dtype: str, data: st.DataObject) -> None:
    shape, boxes = cut
    canonical = random_bits(shape, dtype)
    files = Files([local_of(canonical, box, padding=2) for box in boxes])
    first = data.draw(st.integers(0, len(canonical)))
    out = np.empty(data.draw(st.integers(0, len(canonical) - first)), dtype)
    with pytest.MonkeyPatch.context() as patch:
        # Little is much here, so that ranges are read in all the ways there are.
        patch.setattr(gather, "_SCRATCH_BYTES", data.draw(st.sampled_from([16, 64, 1 << 22])))
        patch.setattr(gather, "_NEAR_BYTES", data.draw(st.sampled_from([0, 8, 1 << 16])))
        replicas = data.draw(st.lists(st.sampled_from(boxes), max_size=2))
        copies = Files(
            [*(local_of(canonical, box, 2) for box in boxes), *(local_of(canonical, box) for box in replicas)]
        )
        for read_from, source in (
            (files, sources(Form("U8", shape), boxes)),
            (copies, sources(Form("U8", shape), boxes, replicas)),
        ):
            out[:] = 0
            Gatherer(read_from).read(source, first, out)
            assert np.array_equal(out, canonical[first : first + len(out)])


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((64, 48), [slice_box((64, 48), (at, 0), (16, 48)) for at in range(0, 64, 16)]),
        ((64, 48), [slice_box((64, 48), (0, at), (64, 12)) for at in range(0, 48, 12)]),
        # Transposed in the shard.
        ((64, 48), [Box.make([(64, 48, 1), (48, 1, 64)], 0, 0)]),
        # Heads of two groups, each with queries, a key and a value.
        ((64, 48), [Box.make([(2, 32 * 48, 56 * 48), (32 * 48, 1, 1)], 0, 0)]),
        # Gate and up alternate in the columns.
        ((64, 48), [Box.make([(24, 2, 64), (64, 48, 1)], at, 0) for at in (0, 1)]),
        # A stack of experts, each transposed.
        ((4, 16, 48), [Box.make([(4, 768, 800), (16, 48, 1), (48, 1, 16)], 0, 0)]),
    ],
)
def test_what_trainers_do_is_gathered(shape: tuple[int, ...], boxes: list[Box]) -> None:
    canonical = random_bits(shape)
    gatherer = Gatherer(Files([local_of(canonical, box) for box in boxes]))
    source = sources(Form("BF16", shape), boxes)
    for step in (1000, 7, len(canonical)):
        for first in range(0, len(canonical), step):
            out = np.empty(min(step, len(canonical) - first), np.uint16)
            gatherer.read(source, first, out)
            assert np.array_equal(out, canonical[first : first + step])


def test_one_run_is_read_where_it_goes() -> None:
    canonical = random_bits((100,))
    files = Files([canonical[:60], canonical[60:]])
    out = np.empty(50, np.uint16)
    Gatherer(files).read(
        sources(Form("BF16", (100,)), [Box.make([(60, 1, 1)], 0, 0), Box.make([(40, 1, 1)], 60, 0)]), 20, out
    )
    assert np.array_equal(out, canonical[20:70])
    assert files.reads == [("0.safetensors", len(HEAD) + 40, 80), ("1.safetensors", len(HEAD), 20)]


def test_no_more_is_read_at_once_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_SCRATCH_BYTES", 256)
    canonical = random_bits((64, 48))
    box = Box.make([(64, 48, 1), (48, 1, 64)], 0, 0)
    files = Files([local_of(canonical, box)])
    out = np.empty(640, np.uint16)
    Gatherer(files).read(sources(Form("BF16", (64, 48)), [box]), 96, out)
    assert np.array_equal(out, canonical[96:736])
    assert max(size for _, _, size in files.reads) <= 256


def test_replicas_that_differ_are_refused_by_their_first_element() -> None:
    canonical = random_bits((8, 6))
    owners = [slice_box((8, 6), (0, at), (8, 3)) for at in (0, 3)]
    copy = canonical.copy()
    copy[[27, 40]] ^= 0x0101
    files = Files([*(local_of(canonical, box) for box in owners), copy])
    source = sources(Form("BF16", (8, 6)), owners, [whole_box(48)])
    with pytest.raises(DamagedError) as caught:
        Gatherer(files).read(source, 20, np.empty(25, np.uint16))
    old, new = int(canonical[27]), int(copy[27])
    assert str(caught.value) == (
        f"tensor w: element [4, 3] is 0x{old:04x} in part of 1.safetensors, but 0x{new:04x} in part of 2.safetensors"
    )
    assert caught.value.hint is not None
    # What is not asked for is not compared.
    Gatherer(files).read(source, 0, np.empty(27, np.uint16))


def test_a_replica_of_a_part_is_compared_where_it_lies() -> None:
    canonical = random_bits((8, 6))
    column = slice_box((8, 6), (0, 5), (8, 1))
    copy = local_of(canonical, column)
    source = sources(Form("BF16", (8, 6)), [whole_box(48)], [column])
    Gatherer(Files([canonical, copy])).read(source, 0, np.empty(48, np.uint16))
    copy[3] ^= 1
    with pytest.raises(DamagedError, match=r"element \[3, 5\]"):
        Gatherer(Files([canonical, copy])).read(source, 0, np.empty(48, np.uint16))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=12), st.integers(0, 80), st.integers(0, 30))
def test_boxes_of_a_range_are_found_in_their_order(spans: list[tuple[int, int]], first: int, count: int) -> None:
    made = [Box.make([(size, 1, 1)], start, 0) for start, size in spans]
    boxes = held(made)
    wanted = [number for number, (start, size) in enumerate(spans) if start < first + count and first < start + size]
    assert [int(each.placed.path.partition(".")[0]) for each in boxes.within(first, first + count)] == wanted


def test_threads_do_not_share_what_they_read_into() -> None:
    canonical = random_bits((64, 48))
    box = Box.make([(64, 48, 1), (48, 1, 64)], 0, 0)
    gatherer, source = Gatherer(Files([local_of(canonical, box)])), sources(Form("BF16", (64, 48)), [box])
    wrong: list[int] = []

    def read(seed: int) -> None:
        for first in np.random.default_rng(seed).integers(0, 2000, 40).tolist():
            out = np.empty(1000, np.uint16)
            gatherer.read(source, first, out)
            if not np.array_equal(out, canonical[first : first + 1000]):
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(cut_tensors(), st.integers(1, 40), st.data())
def test_panels_are_what_they_are_cut_from(
    cut: tuple[tuple[int, ...], list[Box]], panel_bytes: int, data: st.DataObject
) -> None:
    shape, boxes = cut
    canonical = random_bits(shape, "<u1")
    gatherer = Gatherer(Files([local_of(canonical, box) for box in boxes]))
    source = sources(Form("U8", shape), boxes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_PANEL_BYTES", panel_bytes)
        for _ in range(3):
            first = data.draw(st.integers(0, len(canonical)))
            out = np.zeros(data.draw(st.integers(0, len(canonical) - first)), np.uint8)
            source.read(gatherer, first, out)
            assert np.array_equal(out, canonical[first : first + len(out)])


@pytest.mark.parametrize(
    "boxes",
    [
        [Box.make([(64, 48, 1), (48, 1, 64)], 0, 0)],
        [slice_box((64, 48), (0, at), (64, 8)) for at in range(0, 48, 8)],
    ],
)
def test_a_panel_is_gathered_once(boxes: list[Box]) -> None:
    """Where little of a tensor would be read in short runs, all of it, up to a panel, is gathered for the first."""
    canonical = random_bits((64, 48))
    files = Files([local_of(canonical, box) for box in boxes])
    gatherer, source = Gatherer(files), sources(Form("BF16", (64, 48)), boxes)
    for first in range(0, len(canonical), 96):
        out = np.empty(96, np.uint16)
        source.read(gatherer, first, out)
        assert np.array_equal(out, canonical[first : first + 96])
    assert len(files.reads) == len(boxes)


def test_runs_are_not_gathered_before_they_are_asked_for() -> None:
    boxes = [slice_box((64, 48), (at, 0), (8, 48)) for at in range(0, 64, 8)]
    files = Files([local_of(random_bits((64, 48)), box) for box in boxes])
    sources(Form("BF16", (64, 48)), boxes).read(Gatherer(files), 0, np.empty(96, np.uint16))
    assert files.reads == [("0.safetensors", len(HEAD), 192)]
