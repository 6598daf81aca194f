"""Owners: against a painting of every element, and quickly where boxes are very many."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dcr_cli.errors import DamagedError
from dcr_cli.layout import box as geometry, coverage
from dcr_cli.layout.box import Box, Patience, slice_box, whole_box
from dcr_cli.layout.coverage import (
    Coverage,
    GapError,
    OverlapError,
    Owners,
    check_locals,
    find_owners,
    tied_tensors,
)
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placed, Placement


def elements_of(box: Box, elements: int) -> np.ndarray:
    """Which elements of a tensor are in a box, asked of each alone."""
    is_in = np.zeros(elements, np.bool_)
    is_in[box.find(np.arange(elements))[0]] = True
    return is_in


def painted(elements: int, boxes: list[Box]) -> Owners | str:
    """What find_owners has to say, from a painting of all boxes in their order."""
    is_owned = np.zeros(elements, np.bool_)
    owners, replicas = [], []
    for number, box in enumerate(boxes):
        mine = elements_of(box, elements)
        if not (mine & is_owned).any():
            owners.append(number)
            is_owned |= mine
        elif (mine & ~is_owned).any():
            return f"{number} {np.argmax(mine & is_owned)}"
        else:
            replicas.append(number)
    if not is_owned.all():
        return f"gap {np.argmin(is_owned)}"
    return Owners(tuple(owners), tuple(replicas))


def found(elements: int, boxes: list[Box]) -> Owners | str:
    try:
        return find_owners(elements, boxes)
    except OverlapError as error:
        return f"{error.other} {error.element}"
    except GapError as error:
        return f"gap {error.element}"


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, list[Box]]:
    """A tensor cut along all axes into a grid, cells of it dropped, doubled, joined, shifted, in any order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=2))}) for count in shape]
    cells: list[tuple[list[int], list[int]]] = [([], [])]
    for bounds in cuts:
        pairs = list(itertools.pairwise(bounds))
        cells = [([*begin, low], [*size, high - low]) for begin, size in cells for low, high in pairs]
    boxes = [slice_box(shape, begin, size) for begin, size in cells]
    boxes += draw(st.lists(st.sampled_from(boxes), max_size=3))
    if draw(st.booleans()):
        boxes.append(whole_box(int(np.prod(shape))))
    return int(np.prod(shape)), list(draw(st.permutations(boxes)))


@given(grids(), st.data())
def test_owners_are_those_of_a_painting(grid: tuple[int, list[Box]], data: st.DataObject) -> None:
    elements, boxes = grid
    for _ in range(data.draw(st.integers(0, 2))):
        if boxes:
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    wanted = painted(elements, boxes)
    if isinstance(wanted, str) and not wanted.startswith("gap"):
        # Of several overlaps any one may be named.
        with pytest.raises(OverlapError) as caught:
            find_owners(elements, boxes)
        shared = elements_of(boxes[caught.value.one], elements) & elements_of(boxes[caught.value.other], elements)
        assert shared[caught.value.element]
    else:
        assert found(elements, boxes) == wanted


@st.composite
def strided(draw: st.DrawFn) -> Box:
    outer, inner = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 3))
    far = inner * stride + draw(st.integers(0, 4))
    return Box.make([(outer, far, inner), (inner, stride, 1)], draw(st.integers(0, 12)), 0)


@given(st.lists(strided(), max_size=6))
def test_any_boxes_are_judged_as_a_painting_of_them(boxes: list[Box]) -> None:
    elements = max((box.canonical_end for box in boxes), default=0)
    wanted = painted(elements, boxes)
    assert isinstance(wanted, Owners) == isinstance(found(elements, boxes), Owners)
    if isinstance(wanted, Owners) or wanted.startswith("gap"):
        assert found(elements, boxes) == wanted


def test_the_first_of_equal_boxes_owns_wherever_they_lie_here() -> None:
    packed, apart = Box.make([(4, 2, 2), (2, 1, 1)], 0, 0), Box.make([(4, 2, 5), (2, 1, 1)], 0, 3)
    assert find_owners(8, [apart, packed]) == Owners((0,), (1,))


def test_a_part_of_what_is_owned_is_a_replica_and_more_than_that_an_overlap() -> None:
    rows = [slice_box([4, 6], [at, 0], [2, 6]) for at in (0, 2)]
    column = slice_box([4, 6], [0, 1], [4, 2])
    assert find_owners(24, [*rows, column]) == Owners((0, 1), (2,))
    with pytest.raises(OverlapError) as caught:
        find_owners(24, [column, *rows])
    assert (caught.value.one, caught.value.other, caught.value.element) == (0, 1, 1)


@pytest.mark.parametrize(
    ("boxes", "element"),
    [
        ([], 0),
        ([Box.make([(20, 1, 1)], 0, 0)], 20),
        ([Box.make([(20, 1, 1)], 4, 0)], 0),
        ([slice_box([4, 6], [0, 0], [4, 3]), slice_box([4, 6], [0, 4], [4, 2])], 3),
        ([slice_box([4, 6], [0, 0], [4, 3]), slice_box([4, 6], [0, 3], [2, 3]), slice_box([4, 6], [3, 3], [1, 3])], 15),
        ([slice_box([2, 2, 6], [0, 0, 0], [2, 2, 5])], 5),
        ([Box.make([(12, 2, 1)], 0, 0)], 1),
    ],
)
def test_the_first_gap_is_found(boxes: list[Box], element: int) -> None:
    with pytest.raises(GapError) as caught:
        find_owners(24, boxes)
    assert caught.value.element == element


def test_a_gap_past_what_is_looked_at_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_AT_ONCE", 7)
    shape = [8, 10]
    boxes = [slice_box(shape, [0, 0], [8, 4]), slice_box(shape, [0, 4], [5, 6]), slice_box(shape, [6, 4], [2, 6])]
    with pytest.raises(GapError) as caught:
        find_owners(80, boxes)
    assert caught.value.element == 54


def test_a_box_past_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at element 25 of 24"):
        find_owners(24, [Box.make([(24, 1, 1)], 1, 0)])


def test_a_tensor_without_elements_needs_no_box() -> None:
    assert find_owners(0, []) == Owners((), ())


def test_very_many_boxes_are_not_compared_two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "meetings", None)
    count = 3_000
    columns = [Box.make([(3, count, 1)], at, 0) for at in range(count)]
    rows = [Box.make([(3, 1, 1)], 3 * at, 0) for at in range(count)]
    for boxes in (columns, rows):
        assert find_owners(3 * count, boxes) == Owners(tuple(range(count)), ())
        assert find_owners(3 * count, [*boxes, *boxes[:9]]).replicas == tuple(range(count, count + 9))
        with pytest.raises(GapError):
            find_owners(3 * count, boxes[:-1])


def test_very_many_boxes_in_no_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_MOST_PAIRS", 9)
    first = [Box.make([(2, 10, 2)], at, at) for at in range(2)]
    second = [Box.make([(3, 5, 10)], at, at) for at in range(2, 5)]
    with pytest.raises(GapError):
        find_owners(20, [*first, *second[:-1]])
    with pytest.raises(ValueError, match="too many of its boxes lie in one another in no order"):
        find_owners(20, [*first, *second])
    check_locals(here([box.inverse() for box in (*first, *second[:-1])]))
    with pytest.raises(DamagedError, match="too many of its boxes lie in one another in no order"):
        check_locals(here([box.inverse() for box in (*first, *second)]))


def no_patience(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Have all boxes of a layout be compared in so few steps, however many they are."""
    monkeypatch.setattr(geometry, "_MOST_STEPS", steps)
    monkeypatch.setattr(geometry, "_STEPS_OF_BOX", 0)


def test_a_gap_that_is_too_far_away_to_be_found_is_one_all_the_same() -> None:
    far = [Box.make([(2, 1 << 55, 1)], 0, 0), Box.make([(1 << 50, 1, 1)], 1, 2)]
    with pytest.raises(ValueError, match="some of its elements, far from the first one, are in no box"):
        find_owners(1 << 56, far)


def test_boxes_that_are_many_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the elements of a tensor one by one, beside a replica of all of them."""
    monkeypatch.setattr(geometry, "_MOST_STEPS", 0)
    boxes = [whole_box(3_000), *(Box((), at, at) for at in range(3_000))]
    assert find_owners(3_000, boxes).owners == (0,)
    no_patience(monkeypatch, 3_000)
    with pytest.raises(ValueError, match="take too long to compare"):
        find_owners(3_000, boxes)


def test_strides_that_do_not_divide_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All boxes of a layout together, however few they are, take no longer than is said."""
    no_patience(monkeypatch, 2)
    boxes = [Box.make([(60, 3, 1)], 0, 0), Box.make([(36, 5, 1)], 1, 60)]
    with pytest.raises(DamagedError, match=r"tensor w: has shape \[180\], but boxes have strides that do not divide"):
        Coverage(here([])).owners_of("w", Form("BF16", (180,)), [Placed(box, "a", "x") for box in boxes])
    with pytest.raises(DamagedError, match="x of a: boxes have strides that do not divide each other"):
        check_locals(here([box.inverse() for box in boxes]))


# Local tensors


def here(boxes: list[Box]) -> Layout:
    """A layout of one local tensor of these boxes."""
    placements = tuple(Placement("w", box) for box in boxes)
    form = Form("BF16", (1 << 20,))
    return Layout("the layout", {"w": form}, {"a": {"x": LocalTensor(form, placements)}})


@given(st.lists(strided(), min_size=1, max_size=4))
def test_a_local_element_in_two_boxes_is_found(given_boxes: list[Box]) -> None:
    boxes = [box.inverse() for box in given_boxes]
    counts = np.zeros(200, np.int64)
    for box in boxes:
        counts[box.inverse().find(np.arange(200))[0]] += 1
    if counts.max() < 2:
        check_locals(here(boxes))
        return
    with pytest.raises(DamagedError, match=r"x of a: element \d+ is in box \d+ of w and in box \d+ of w") as caught:
        check_locals(here(boxes))
    element, one, other = map(int, re.findall(r"element (\d+) is in box (\d+) .*box (\d+)", str(caught.value))[0])
    assert one < other and all(boxes[number].inverse().find(np.array([element]))[0].size for number in (one, other))


def test_very_many_boxes_here_are_not_compared_two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "meetings", None)
    count = 3_000
    columns = [Box.make([(3, 1, count)], 3 * at, at) for at in range(count)]
    rows = [Box.make([(3, 1, 1)], 3 * at, 3 * at) for at in range(count)]
    for boxes in (columns, rows):
        check_locals(here(boxes))


# What a layout's tensors are said to lack


def refusal(shape: tuple[int, ...], *boxes: Box) -> DamagedError:
    placed = [Placed(box, f"rank-{number}.safetensors", "part") for number, box in enumerate(boxes)]
    layout = Layout("the layout", {}, {}, hint="ask rank 1")
    with pytest.raises(DamagedError) as caught:
        Coverage(layout).owners_of("w", Form("BF16", shape), placed)
    return caught.value


def test_refusals_name_tensor_coordinate_and_shards() -> None:
    overlap = refusal((4, 6), slice_box([4, 6], [0, 0], [3, 6]), slice_box([4, 6], [2, 1], [2, 5]))
    assert str(overlap) == (
        "the layout: tensor w: element [2, 1] is in part of rank-0.safetensors and in part of rank-1.safetensors, "
        "which overlap in part"
    )
    gap = refusal((4, 6), slice_box([4, 6], [0, 0], [3, 6]))
    assert (str(gap), gap.hint) == ("the layout: tensor w: element [3, 0] is in no shard", "ask rank 1")
    assert "tensor w: is in no shard" in str(refusal((4, 6)))
    assert "has shape [4], but a box ends at element 5 of 4" in str(refusal((4,), whole_box(5)))
    assert "element 2 is in no shard" in str(refusal((4,), whole_box(2)))


def test_tensors_that_lie_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(elements: int, boxes: tuple[Box, ...], patience: Patience) -> Owners:
        calls.append(elements)
        return find_owners(elements, boxes, patience)

    monkeypatch.setattr(coverage, "find_owners", counted)
    looked = Coverage(Layout("the layout", {}, {}))
    placed = [Placed(slice_box([4, 6], [at, 0], [2, 6]), f"{at}.safetensors", "part") for at in (0, 2)]
    for layer in range(5):
        assert looked.owners_of(f"layers.{layer}", Form("BF16", (4, 6)), placed) == Owners((0, 1), ())
    assert calls == [24]


# Tensors that lie in one place


def two_shards(*tensors: tuple[str, tuple[Box, Box]]) -> Layout:
    """A layout of two shards, which each have a part of every tensor in one local tensor."""
    forms = {name: Form("BF16", (4, 6)) for name, _ in tensors}
    placements = [tuple(Placement(name, boxes[at]) for name, boxes in tensors) for at in (0, 1)]
    local = Form("BF16", (2, 6))
    shards = {f"{at}.safetensors": {"local": LocalTensor(local, each)} for at, each in enumerate(placements)}
    return Layout("two shards", forms, shards)


def halves() -> tuple[Box, Box]:
    first, second = (slice_box([4, 6], [at, 0], [2, 6]) for at in (0, 2))
    return first, second


def test_tensors_whose_boxes_are_all_the_same_are_tied() -> None:
    layout = two_shards(("embed", halves()), ("head", halves()), ("third", halves()))
    assert tied_tensors(layout) == {"head": "embed", "third": "embed"}
    check_locals(layout)


@pytest.mark.parametrize("other", [halves()[::-1], (halves()[0], slice_box([4, 6], [2, 0], [1, 6]))])
def test_tensors_some_of_whose_boxes_differ_are_not(other: tuple[Box, Box]) -> None:
    layout = two_shards(("embed", halves()), ("head", other))
    assert tied_tensors(layout) == {}
    with pytest.raises(DamagedError, match=r"element \[0, 0\] is in box 0 of embed and in box \d of head"):
        check_locals(layout)


def test_a_tensor_twice_in_one_place_is_not_tied_to_itself() -> None:
    with pytest.raises(DamagedError, match=r"is in box 0 of embed and in box 1 of embed"):
        check_locals(two_shards(("embed", halves()), ("embed", halves())))


def test_tensors_without_elements_are_not_tied() -> None:
    assert tied_tensors(Layout("empty", {"a": Form("BF16", (0,)), "b": Form("BF16", (0,))}, {})) == {}
