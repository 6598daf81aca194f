"""Digests of what ranks hold, and what they are together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcr_cli.checkpoint.digest import content_digest, digest_bytes, tensor_digest
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Box, Rectangle, slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement as Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.live.bits import HostBits
from dcr_cli.live.memory import memory_of
from dcr_cli.live.pieces import cuts_of, digest_whole, split, total_of
from dcr_cli.live.placement import Placement
from dcr_cli.live.shares import Part, Shares, content_of, digest_parts

WHOLE = np.arange(24, dtype="<u2") * 2749
FORMS = {"empty": Form("BF16", (0,)), "w": Form("BF16", (4, 6))}


def share(box: Box, elements: np.ndarray[tuple[int], np.dtype[np.uint16]] = WHOLE) -> Shares:
    """What a rank gives that holds a box of the tensor."""
    held = np.zeros_like(elements)
    for part in box.rectangles(0, box.elements):
        box.canonical_view(held, 0, part)[...] = box.canonical_view(elements, 0, part)
    return Shares(FORMS, {Part("w", box.footprint): digest_whole(FORMS["w"], held)})


def expected() -> bytes:
    digests = {"empty": bytes(16), "w": digest_bytes(tensor_digest(WHOLE))}
    return content_digest((name, *FORMS[name], digests[name]) for name in sorted(FORMS))


def column(first: int, count: int) -> Box:
    return slice_box((4, 6), (0, first), (4, count))


def test_parts_add_up_and_replicas_count_once() -> None:
    left, right = share(column(0, 2)), share(column(2, 4))
    assert content_of([left, right]) == content_of([right, left, right]) == expected()
    assert content_of([share(whole_box(24)), left, right]) == expected()
    assert left.tensors() == {"empty": bytes(16)} and left.content is None
    assert share(whole_box(24)).content == expected()


def test_what_nobody_holds_and_what_overlaps() -> None:
    for shares in ([share(column(0, 2))], [share(column(0, 4)), share(column(2, 3))], [share(row(0, 3))]):
        with pytest.raises(DamagedError, match="no ranks hold all elements of tensors w, or parts of them overlap"):
            content_of(shares)
    with pytest.raises(DamagedError, match="are of different tensors"):
        content_of([share(whole_box(24)), Shares({}, {})])


def test_ranks_that_hold_other_bits() -> None:
    other = WHOLE.copy()
    other[3] += 1
    with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
        content_of([share(whole_box(24)), share(whole_box(24), other)])
    one, two = (Shares(FORMS, {}, {"w": digest_whole(FORMS["w"], each)}) for each in (WHOLE, other))
    assert content_of([one, one]) == content_of([one, share(whole_box(24))]) == expected()
    for shares in ([one, two], [one, share(whole_box(24), other)], [two, share(row(0, 2))]):
        with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
            content_of(shares)


def row(first: int, count: int) -> Box:
    return slice_box((4, 6), (first, 0), (count, 6))


def test_every_part_is_compared_and_not_a_cover_alone() -> None:
    other = WHOLE.copy()
    other[3] += 1
    left, right = column(0, 3), column(3, 3)
    whole = share(whole_box(24))
    # A part of what another rank has whole, and parts that are together what it has.
    for parts in ([row(0, 2)], [row(0, 3), row(1, 3)], [left, right]):
        assert content_of([whole, *map(share, parts)]) == expected()
        with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
            content_of([whole, *(share(part, other) for part in parts)])


def test_windows_that_overlap() -> None:
    other = WHOLE.copy()
    other[9] += 1
    for one, two in ((row(0, 3), row(1, 3)), (column(0, 4), column(3, 3))):
        assert content_of([share(one), share(two)]) == content_of([share(two), share(one)]) == expected()
        with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
            content_of([share(one), share(two, other)])


def test_what_cannot_be_compared_is_said() -> None:
    for part in (column(0, 2), Box.make([(5, 1, 1)], 2, 0)):
        with pytest.raises(UnsupportedError, match="begin or end within a piece, and cannot be compared"):
            content_of([share(whole_box(24)), share(part)])


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (5,), (16, 3), (100, 7), (2, 3, 50), (1, 1, 1000)])
def test_pieces_have_each_element_once(shape: tuple[int, ...]) -> None:
    form = Form("BF16", shape)
    cuts = cuts_of(form)
    assert cuts[0] == 0 and cuts[-1] == form.elements and list(cuts) == sorted(set(cuts)) and len(cuts) <= 17
    elements = (np.arange(form.elements) * 2749).astype("<u2")
    data = digest_whole(form, elements)
    assert len(data) == 16 * (len(cuts) - 1)
    assert digest_bytes(total_of(data)) == digest_bytes(tensor_digest(elements))
    flat = np.arange(0, form.elements, 3)
    # Whole rows are whole pieces, where there are few.
    if form.elements and shape and shape[0] <= 16:
        assert set(range(0, form.elements, form.elements // shape[0])) <= set(cuts)
    assert [part for number, begin, end in split(form, flat) for part in flat[begin:end]] == flat.tolist()


@pytest.mark.parametrize(("shape", "reads"), [((64, 64), 1), ((3, 5), 1), ((1 << 20,), 1), ((1100, 1000), 2)])
def test_a_tensor_is_read_by_what_it_has_and_not_by_its_pieces(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], reads: int
) -> None:
    form = Form("BF16", shape)
    size = form.elements
    elements = (np.arange(size) * 2749).astype("<u2")
    row = Form("BF16", (size + 5,))
    layout = Layout("layout", {"w": form}, {ONLY_FILE: {"row": LocalTensor(row, (Placed("w", box_at(size, 5)),))}})
    module = torch.nn.Module()
    module.register_buffer("row", torch.from_numpy(np.append(np.zeros(5, "<u2"), elements)).view(torch.bfloat16))
    views: list[Box] = []
    view = HostBits.view

    def counted(self: HostBits, box: Box, part: Rectangle) -> Any:
        views.append(box)
        return view(self, box, part)

    monkeypatch.setattr(HostBits, "view", counted)
    ((part, data),) = digest_parts(memory_of(module), Placement(layout)).items()
    assert part == Part("w", whole_box(size)) and data == digest_whole(form, elements) and len(views) == reads


def box_at(elements: int, local: int) -> Box:
    return Box.make([(elements, 1, 1)], 0, local)


@pytest.mark.parametrize("columns", [(0, 3000), (2999, 1)])
def test_the_digest_of_columns_is_that_of_each_piece(columns: tuple[int, int]) -> None:
    form = Form("BF16", (700, 3000))
    box = slice_box(form.shape, (0, columns[0]), (700, columns[1]))
    whole = np.zeros(form.elements, "<u2")
    held = (np.arange(box.elements) * 2749).astype("<u2")
    whole.reshape(form.shape)[:, columns[0] : sum(columns)] = held.reshape(700, -1)
    row = LocalTensor(Form("BF16", (len(held),)), (Placed("w", box),))
    module = torch.nn.Module()
    module.register_buffer("row", torch.from_numpy(held).view(torch.bfloat16))
    placement = Placement(Layout("layout", {"w": form}, {ONLY_FILE: {"row": row}}))
    assert list(digest_parts(memory_of(module), placement).values()) == [digest_whole(form, whole)]
