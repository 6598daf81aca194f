"""Reading through boxes: whatever is read together, every element comes from where its box says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from box_cases import boxes, places
from dcr_cli.checkpoint.header import bytes_view
from dcr_cli.errors import DamagedError
from dcr_cli.layout import gather
from dcr_cli.layout.box import Box, whole_box
from dcr_cli.layout.gather import Boxes, Gatherer, Held, Sources
from dcr_cli.layout.layout import Form, Placed

BEGIN = 3


class Memory:
    """Files that are in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def read_path_into(self, path: str, offset: int, buffer: Any) -> None:
        view = bytes_view(buffer)
        view[:] = self._files[path][offset : offset + len(view)]


def sources(owners: list[Box], replicas: list[Box], elements: int) -> Sources:
    def held(each: list[Box], kind: str) -> Boxes:
        return Boxes([Held(Placed(box, f"{kind}{number}", "local"), BEGIN) for number, box in enumerate(each)])

    return Sources("tensor", Form("U16", (elements,)), held(owners, "owner"), held(replicas, "replica"))


@given(boxes(), st.data())
def test_every_element_is_read_where_it_lies(box: Box, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, box.canonical_end - 1))
    count = data.draw(st.integers(1, box.canonical_end - first + 2))
    local = np.arange(1, box.local_end + 1, dtype=np.uint16)
    out = np.zeros(count, np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_NEAR_BYTES", data.draw(st.sampled_from([0, 8, 1 << 16])))
        patch.setattr(gather, "_SPARSE", data.draw(st.integers(1, 4)))
        patch.setattr(gather, "_STACK_BYTES", data.draw(st.sampled_from([1, 8, 24, 1 << 18])))
        files = Memory({"owner0": bytes(BEGIN) + local.tobytes()})
        Gatherer(files).read(sources([box], [], box.canonical_end), first, out)
    where = places(box)
    expected = [int(local[where[element]]) if element in where else 0 for element in range(first, first + count)]
    assert out.tolist() == expected


def test_stored_elements_stay_until_the_next_are_asked_for() -> None:
    data = np.arange(100, dtype=np.uint16)
    gatherer = Gatherer(Memory({"owner0": bytes(BEGIN) + data.tobytes()}))
    whole = sources([whole_box(100)], [], 100)
    assert gatherer.read_stored(whole, 10, 50).tolist() == list(range(10, 60))
    assert gatherer.read_stored(whole, 90, 10).tolist() == list(range(90, 100))


def test_replicas_have_the_same_bits() -> None:
    data = np.arange(100, dtype=np.uint16)
    other = data.copy()
    other[70] ^= 1
    files = {"owner0": bytes(BEGIN) + data.tobytes(), "replica0": bytes(BEGIN) + other.tobytes()}
    gatherer = Gatherer(Memory(files))
    both = sources([whole_box(100)], [whole_box(100)], 100)
    gatherer.read(both, 0, np.empty(70, np.uint16))
    with pytest.raises(DamagedError, match="element 70 is 0x0046 in local of owner0, but 0x0047 in local of replica0"):
        gatherer.read(both, 0, np.empty(100, np.uint16))


def test_boxes_that_lie_across_are_told() -> None:
    assert not sources([whole_box(100), Box.make([(9, 20, 10), (10, 1, 1)], 0, 0)], [], 100).owners.lie_across
    assert sources([Box.make([(9, 10, 1), (10, 1, 9)], 0, 0)], [], 100).owners.lie_across
