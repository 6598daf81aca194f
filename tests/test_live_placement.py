"""The saved form of a placement, and what is malformed in one; parts that cover a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.errors import DamagedError, NotFoundError, UnsupportedError
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement as Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.live.placement import Placement, decode_placement, disjoint_cover, encode_placement, read_placement

LAYOUT = Layout(
    "layout",
    {"a": Form("BF16", (4,)), "made": Form("F32", (2,)), "other": Form("I8", ())},
    {ONLY_FILE: {"w": LocalTensor(Form("BF16", (6,)), (Placed("a", whole_box(4)),))}},
    frozenset({"other"}),
)
PLACEMENT = Placement(LAYOUT, (("made",),), "engine 1, rank 0 of 2")


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    data = encode_placement(PLACEMENT)
    found = decode_placement(data, "layout")
    assert found == PLACEMENT and found.placed == PLACEMENT.placed
    assert (found.stretches, encode_placement(found)) == ({"w": Form("BF16", (6,))}, data)
    # The layout in it is one, line by line.
    assert b'"w": {"dtype": "BF16", "shape": [6], "boxes": [["a", 0, 0, [[4, 1, 1]]]]}\n' in data
    (tmp_path / "layout").write_bytes(data)
    assert encode_placement(read_placement(tmp_path / "layout", PLACEMENT.key)) == data
    with pytest.raises(NotFoundError, match="no such file"):
        read_placement(tmp_path / "none", "")


def edited(**members: Any) -> bytes:
    document = json.loads(encode_placement(PLACEMENT))
    return json.dumps({key: value for key, value in (document | members).items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"format": "dcr-layout-1"}, "its format is not dcr-placement-1"),
        ({"format": None}, "its format is not dcr-placement-1"),
        ({"key": 3}, "its key is no text"),
        ({"key": None}, "its key is no text"),
        ({"loaded": {}}, "loaded is no list of lists of names"),
        ({"loaded": ["made"]}, "loaded is no list of lists of names"),
        ({"loaded": [[3]]}, "loaded is no list of lists of names"),
        ({"loaded": [["more"]]}, "tensors more are loaded, and not among its tensors"),
        ({"layout": None}, "its format is not dcr-layout-1"),
    ],
)
def test_what_is_malformed_is_refused(members: dict[str, Any], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        decode_placement(edited(**members), "layout")


def test_what_is_newer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has format dcr-placement-2"):
        decode_placement(edited(format="dcr-placement-2"), "layout")
    for requires in (["more"], None, "more"):
        with pytest.raises(UnsupportedError, match="unknown to this dcr"):
            decode_placement(edited(requires=requires), "layout")
    document = json.loads(encode_placement(PLACEMENT))["layout"]
    document["shards"]["other.safetensors"] = {}
    with pytest.raises(DamagedError, match="or shards beside the only one"):
        decode_placement(edited(layout=document), "layout")


def footprints(*boxes: Box) -> list[Box]:
    return [box.footprint for box in boxes]


def test_parts_that_cover_a_tensor() -> None:
    left, right = (slice_box((4, 6), (0, column), (4, 3)) for column in (0, 3))
    both = footprints(left, right)
    assert disjoint_cover(both, 24) == sorted(both)
    assert disjoint_cover(both[:1], 24) is None
    # The largest first: who has all of it needs no others.
    assert disjoint_cover([*both, whole_box(24)], 24) == [whole_box(24)]
    middle = slice_box((4, 6), (0, 2), (4, 3)).footprint
    assert disjoint_cover([middle, both[0]], 24) is None
    assert disjoint_cover([], 0) == []
    # Nobody waits for steps that do not divide each other.
    odd = [Box.make([(5000, 7919 + step, 1), (5000, 1, 5000)], 0, 0).footprint for step in range(2)]
    assert disjoint_cover(odd, sum(box.elements for box in odd)) is None
