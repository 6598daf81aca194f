"""The saved form of a placement, its rules, and what is malformed in one; parts that cover a tensor."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.delta.frame import encode_frame
from dcr_cli.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement as Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.live.compared import check_fits
from dcr_cli.live.marks import AT_ONCE, Marks
from dcr_cli.live.memory import View, memory_of
from dcr_cli.live.placement import (
    Placement,
    Product,
    decode_placement,
    disjoint_cover,
    encode_placement,
    read_placement,
)

LAYOUT = Layout(
    "layout",
    {"a": Form("BF16", (4,)), "made": Form("F32", (2,)), "other": Form("I8", ())},
    {
        ONLY_FILE: {
            "w": LocalTensor(Form("BF16", (6,)), (Placed("a", whole_box(4)),)),
            "x": LocalTensor(Form("F16", (9,)), ()),
        }
    },
    frozenset({"other"}),
)
VIEWS = {"w": View("w", 0, (3, 2), (2, 1)), "w.part": View("w", 1, (2,), (2,)), "x": View("x", 0, (9,), (1,))}
FLAGS = np.array([0, 0, 1, 0, 0, 0, 0, 1, 1], np.bool_)
PLACEMENT = Placement(LAYOUT, (("made",),), "engine 1, rank 0 of 2", VIEWS, {"x": Product(0, Marks.of(FLAGS))})


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    data = encode_placement(PLACEMENT)
    found = decode_placement(data, "layout")
    assert found == PLACEMENT and found.placed == PLACEMENT.placed
    assert encode_placement(found) == data
    assert found.stretches == {"w": Form("BF16", (6,)), "x": Form("F16", (9,))}
    ((first, flags),) = found.made_of(["made"])["x"].parts()
    assert first == 0 and np.array_equal(flags, FLAGS) and found.made_of(["a"]) == {}
    # The layout in it is one, line by line.
    assert b'"w": {"dtype": "BF16", "shape": [6], "boxes": [["a", 0, 0, [[4, 1, 1]]]]},\n' in data
    (tmp_path / "layout").write_bytes(data)
    assert encode_placement(read_placement(tmp_path / "layout", PLACEMENT.key)) == data
    with pytest.raises(NotFoundError, match="no such file"):
        read_placement(tmp_path / "none", "")


@pytest.mark.parametrize("count", [1, 8, 63, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE - 5])
def test_marks_are_read_again(count: int) -> None:
    flags = np.zeros(count, np.bool_)
    flags[[count // 3, count - 1]] = True
    marks = Marks.checked(count, Marks.of(flags).frames)
    found = np.zeros(count, np.bool_)
    for first, part in marks.parts():
        assert part.any()
        found[first : first + len(part)] = part
    assert np.array_equal(found, flags) and sum(map(len, marks.frames)) < 300 * len(marks.frames)


def sealed(rest: bytes) -> bytes:
    return b'{"blake3": "blake3:%s",\n%s' % (object_digest(rest).hex().encode(), rest)


def edited(**members: Any) -> bytes:
    document = json.loads(encode_placement(PLACEMENT)) | members
    del document["blake3"]
    return sealed(json.dumps({key: value for key, value in document.items() if value is not None}).encode()[1:])


def refused(message: str, **members: Any) -> None:
    with pytest.raises(DamagedError, match=message):
        decode_placement(edited(**members), "layout")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"format": "dcr-layout-1"}, "its format is not dcr-placement-2"),
        ({"format": None}, "its format is not dcr-placement-2"),
        ({"key": 3}, "its key is no text"),
        ({"key": None}, "its key is no text"),
        ({"loaded": {}}, "loaded is no list of lists of names"),
        ({"loaded": ["made"]}, "loaded is no list of lists of names"),
        ({"loaded": [[3]]}, "loaded is no list of lists of names"),
        ({"layout": None}, "its format is not dcr-layout-1"),
        ({"views": None}, "views is not an object"),
        ({"made": []}, "made is not an object"),
    ],
)
def test_rule_140_a_placement_is_an_object_with_its_members(members: dict[str, Any], message: str) -> None:
    refused(message, **members)
    for number in (1, 3):
        with pytest.raises(UnsupportedError, match=f"has format dcr-placement-{number}"):
            decode_placement(edited(format=f"dcr-placement-{number}"), "layout")
    for requires in (["more"], None, "more"):
        with pytest.raises(UnsupportedError, match="unknown to this dcr"):
            decode_placement(edited(requires=requires), "layout")


def test_rule_141_a_layout_of_rows_in_one_shard() -> None:
    document = json.loads(encode_placement(PLACEMENT))["layout"]
    refused("or shards beside the only one", layout={**document, "shards": {"other.safetensors": {}}})
    square = {"x": {"dtype": "F16", "shape": [3, 3], "boxes": []}}
    shard = document["shards"][ONLY_FILE]
    refused("stretch x is no row of elements", layout={**document, "shards": {ONLY_FILE: {**shard, **square}}})


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ([["more"]], "tensors more are loaded, and not among its tensors"),
        ([["made", "made"]], "a group of loaded has no names, or one that another has too"),
        ([["made"], ["made"]], "a group of loaded has no names, or one that another has too"),
        ([[]], "a group of loaded has no names, or one that another has too"),
        ([["made"], ["a"]], "the groups of loaded are not those that something is made of"),
        ([], "the groups of loaded are not those that something is made of"),
    ],
)
def test_rule_142_groups_are_of_tensors_and_of_what_is_made(loaded: list[list[str]], message: str) -> None:
    refused(message, loaded=loaded)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (3, "is not made of a stretch"),
        (["more", 0, [1], [1]], "is not made of a stretch"),
        (["w", 0, [1]], "is not made of a stretch"),
        (["w", 0, [2, 3], [1]], "has not as many strides as dimensions"),
        (["w", 0, 6, 1], "has not as many strides as dimensions"),
        (["w", -1, [6], [1]], "is not made of integers from 0 on"),
        (["w", 0, [6], [True]], "is not made of integers from 0 on"),
        (["w", 0, [2, 0], [1, 1]], "is not made of integers from 0 on, or has no elements"),
        (["w", 1, [6], [1]], "ends at element 7 of 6"),
        (["w", 0, [2, 2], [5, 1]], "ends at element 7 of 6"),
        (["w", 0, [2], [1 << 62]], "ends at element 4611686018427387905 of 6"),
    ],
)
def test_rule_143_a_view_lies_within_its_stretch(view: Any, message: str) -> None:
    refused(message, views={"w": view})


def frame(content: bytes) -> str:
    return base64.b64encode(encode_frame(content, 1)).decode()


RIGHT = frame(bytes([4, 1]))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"more": [0, [RIGHT], False]}, "what is made in more: is in no stretch"),
        ({"x": [RIGHT]}, "is not the number of a group, a list of texts and a truth value"),
        ({"x": [0, [RIGHT]]}, "is not the number of a group, a list of texts and a truth value"),
        ({"x": [0, [RIGHT], 0]}, "is not the number of a group, a list of texts and a truth value"),
        ({"x": [0, RIGHT, False]}, "is not the number of a group, a list of texts and a truth value"),
        ({"x": [0, [3], False]}, "is not the number of a group, a list of texts and a truth value"),
        ({"x": [1, [RIGHT], False]}, "the groups of loaded are not"),
        ({"x": [0, [], False]}, "has 0 frames for 9 elements"),
        ({"x": [0, [RIGHT, RIGHT], False]}, "has 2 frames for 9 elements"),
        ({"x": [0, ["!"], False]}, "base64"),
        ({"x": [0, [base64.b64encode(b"no frame").decode()], False]}, "is not a zstd frame"),
        ({"x": [0, [frame(bytes([4]))], False]}, "holds 1 bytes, not 2"),
        ({"x": [0, [frame(bytes(1 << 22))], False]}, "states 4194304 bytes"),
        ({"x": [0, [frame(bytes([4, 2]))], False]}, "marks elements that are not there"),
        ({"x": [0, [frame(bytes(2))], False]}, "marks nothing"),
    ],
)
def test_rule_144_what_is_made_has_a_bit_for_each_element(made: dict[str, Any], message: str) -> None:
    refused(message, made=made)
    assert decode_placement(edited(made={"x": [0, [RIGHT], True]}), "layout").made == {
        "x": Product(0, Marks.checked(9, [base64.b64decode(RIGHT)]), True)
    }
    document = json.loads(encode_placement(PLACEMENT))["layout"]
    large = {"x": {"dtype": "F16", "shape": [1 << 41], "boxes": []}}
    shards = {ONLY_FILE: {**document["shards"][ONLY_FILE], **large}}
    refused(
        f"have more than {1 << 40} elements", layout={**document, "shards": shards}, made=made | {"x": [0, [], False]}
    )


class Plain(torch.nn.Module):
    """The tensors of VIEWS."""

    def __init__(self) -> None:
        super().__init__()
        row = torch.zeros(6, dtype=torch.bfloat16)
        self.register_buffer("w", row.view(3, 2))
        self.register_buffer("x", torch.zeros(9, dtype=torch.float16))


def test_rule_145_the_module_is_the_one_that_it_was_learnt_of() -> None:
    module = Plain()
    views = {name: view for name, view in VIEWS.items() if name != "w.part"}
    placement = replace(PLACEMENT, views=views)
    check_fits(placement, memory_of(module))
    for wrong, named in (
        (replace(placement, views=VIEWS), "w.part"),
        (replace(placement, views={**views, "w": View("w", 0, (3, 2), (1, 3))}), "w"),
        (replace(placement, views={**views, "w": View("w", 1, (2, 2), (2, 1))}), "w"),
    ):
        with pytest.raises(UsageError, match=f"or that lie otherwise: {named}$"):
            check_fits(wrong, memory_of(module))
    module.register_buffer("x", torch.zeros(9, dtype=torch.int16))
    with pytest.raises(UsageError, match=r"or that lie otherwise: x$"):
        check_fits(placement, memory_of(module))
    both = Product(0, Marks.of(np.array([0, 0, 0, 1, 0, 0], np.bool_)))
    with pytest.raises(DamagedError, match="elements of w are both placed and made of something"):
        check_fits(replace(placement, made={"w": both}), memory_of(Plain()))


def test_rule_146_what_a_placement_claims_is_what_was_written() -> None:
    data = encode_placement(PLACEMENT)
    line, rest = data.split(b"\n", 1)
    assert sealed(rest) == data
    # Each of these is a placement that could be another module's.
    for claim, other in (
        (b"[[4, 1, 1]]", b"[[2, 1, 1]]"),
        (b'["a", 0, 0,', b'["a", 0, 2,'),
        (b'"x": [0, ["', b'"w": [0, ["'),
        (b'"loaded": [["made"]]', b'"loaded": [["a"]]'),
    ):
        assert claim in rest
        changed = rest.replace(claim, other)
        with pytest.raises(DamagedError, match="its first line is not the blake3 of the others"):
            decode_placement(line + b"\n" + changed, "layout")
    for other in (rest, b"{" + rest, line.upper() + b"\n" + rest, line + b" \n" + rest, line + rest, data + b" "):
        with pytest.raises(DamagedError):
            decode_placement(other, "layout")


@pytest.mark.parametrize("mask", [1, 4, 0x20, 0xFF])
def test_no_byte_of_a_placement_can_change(mask: int) -> None:
    data = encode_placement(PLACEMENT)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= mask
        with pytest.raises((DamagedError, UnsupportedError)):
            decode_placement(bytes(changed), "layout")
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            decode_placement(data[:length], "layout")


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
    # Those that have to be among them.
    assert disjoint_cover([*both, whole_box(24)], 24, both[:1]) == both
    # Nobody waits for steps that do not divide each other.
    odd = [Box.make([(5000, 7919 + step, 1), (5000, 1, 5000)], 0, 0).footprint for step in range(2)]
    assert disjoint_cover(odd, sum(box.elements for box in odd)) is None
