"""The JSON of layouts: what is read is what was written, and what is malformed is refused by name, and soon."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dcr_cli.errors import DamagedError, DcrError, NotFoundError, UnsupportedError
from dcr_cli.layout import document
from dcr_cli.layout.box import Box
from dcr_cli.layout.document import decode_layout, encode_layout, read_layout
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout, LocalTensor, Placement, Rule
from layouts import layout_bytes
from strategies import names


def valid() -> dict[str, Any]:
    """A tensor cut by columns between two ranks, one of which pads it, and one that no rank has."""
    half = {"dtype": "BF16", "shape": [4, 3], "boxes": [["w", 0, 0, [[4, 6, 3], [3, 1, 1]]]]}
    padded = {"dtype": "BF16", "shape": [5, 3], "fill": "zero", "boxes": [["w", 3, 0, [[4, 6, 3], [3, 1, 1]]]]}
    forms = {"w": {"dtype": "BF16", "shape": [4, 6]}, "s": {"dtype": "F32", "shape": []}}
    return {
        "format": "dcr-layout-1",
        "requires": [],
        "tensors": forms,
        "skipped": ["s"],
        "shards": {"rank-0.safetensors": {"w": half}, "rank-1.safetensors": {"w": padded}},
    }


def decoded(value: Any) -> Layout:
    return decode_layout(value if isinstance(value, bytes) else layout_bytes(value), "layout L")


def test_a_layout_is_read() -> None:
    boxes = [Box.make([(4, 6, 3), (3, 1, 1)], offset, 0) for offset in (0, 3)]
    assert decoded(valid()) == Layout(
        "layout L",
        {"w": Form("BF16", (4, 6)), "s": Form("F32", ())},
        {
            "rank-0.safetensors": {"w": LocalTensor(Form("BF16", (4, 3)), (Placement("w", boxes[0]),), KEEP)},
            "rank-1.safetensors": {"w": LocalTensor(Form("BF16", (5, 3)), (Placement("w", boxes[1]),), ZERO)},
        },
        frozenset(["s"]),
    )


def test_unknown_members_are_ignored() -> None:
    more = valid()
    more["comment"] = {"by": "somebody"}
    more["tensors"]["w"]["why"] = None
    more["shards"]["rank-0.safetensors"]["w"]["note"] = [1]
    assert decoded(more) == decoded(valid())


def test_boxes_are_brought_into_their_form() -> None:
    other = valid()
    other["shards"]["rank-0.safetensors"]["w"]["boxes"] = [["w", 0, 0, [[3, 1, 1], [1, 7, 9], [4, 6, 3]]]]
    assert decoded(other) == decoded(valid())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    forms = draw(
        st.dictionaries(names, st.builds(Form, st.just("BF16"), st.lists(st.integers(0, 9), max_size=3).map(tuple)))
    )
    shards: dict[str, dict[str, LocalTensor]] = {}
    for number, name in enumerate(forms):
        placed = tuple(Placement(name, Box.make([(1, 1, 1)], 0, 0)) for _ in range(min(forms[name].elements, 1)))
        fill = draw(st.sampled_from([KEEP, ZERO]))
        shards.setdefault(f"rank-{number % 2}.safetensors", {})[name] = LocalTensor(forms[name], placed, fill)
    skipped = {name for name, form in forms.items() if not form.elements and draw(st.booleans())}
    return Layout("layout L", forms, shards, frozenset(skipped))


@given(layouts())
def test_what_is_written_is_read(layout: Layout) -> None:
    data = encode_layout(layout)
    assert decoded(data) == layout
    assert encode_layout(decoded(data)) == data


def test_rules_are_written_and_read() -> None:
    local = {"m": LocalTensor(Form("F32", (4,)), (Placement("m", Box.make([(4, 1, 1)], 0, 0)),))}
    rule = Rule("cast", "m")
    layout = Layout(
        "layout L",
        {"w": Form("BF16", (4,))},
        {"a.safetensors": local},
        stored={"m": Form("F32", (4,))},
        rules={"w": rule},
    )
    assert json.loads(encode_layout(layout))["requires"] == ["rules"]
    assert decoded(encode_layout(layout)) == layout


def test_there_is_a_line_for_each_tensor() -> None:
    assert encode_layout(decoded(valid())).decode().splitlines() == [
        "{",
        '"format": "dcr-layout-1", "requires": [],',
        '"tensors": {',
        '"w": {"dtype": "BF16", "shape": [4, 6]},',
        '"s": {"dtype": "F32", "shape": []}',
        "},",
        '"skipped": ["s"],',
        '"shards": {',
        '"rank-0.safetensors": {',
        '"w": {"dtype": "BF16", "shape": [4, 3], "boxes": [["w", 0, 0, [[4, 6, 3], [3, 1, 1]]]]}',
        "},",
        '"rank-1.safetensors": {',
        '"w": {"dtype": "BF16", "shape": [5, 3], "fill": "zero", "boxes": [["w", 3, 0, [[4, 6, 3], [3, 1, 1]]]]}',
        "}",
        "}",
        "}",
    ]


# What is refused


def put(*path: str | int) -> Callable[[dict[str, Any], Any], None]:
    """What puts a value at a path of the valid document."""

    def change(value: Any, new: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = new

    return change


AT = ("shards", "rank-0.safetensors", "w")
BOX = (*AT, "boxes", 0)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("format",), "dcr-1", "its format is not dcr-layout-1"),
        (("format",), None, "its format is not dcr-layout-1"),
        (("requires",), "rules", "requires is not a list of strings"),
        (("requires",), [1], "requires is not a list of strings"),
        (("tensors",), [], "tensors is not an object"),
        (("shards",), None, "shards is not an object"),
        (("stored",), 1, "stored is not an object"),
        (("rules",), "", "rules is not an object"),
        (("skipped",), {}, "skipped is not a list of strings"),
        (("skipped",), [None], "skipped is not a list of strings"),
        (("skipped",), ["x"], "tensor x is not among its tensors"),
        (("tensors", "w"), 7, "tensor w: is not described by an object"),
        (("tensors", "w", "dtype"), "BF17", "tensor w: its dtype is none of safetensors"),
        (("tensors", "w", "dtype"), ["BF16"], "tensor w: its dtype is none of safetensors"),
        (("tensors", "w", "shape"), [4, -6], "tensor w: its shape is not a list of integers"),
        (("tensors", "w", "shape"), [4, 6.0], "tensor w: its shape is not a list of integers"),
        (("tensors", "w", "shape"), [4, True], "tensor w: its shape is not a list of integers"),
        (("tensors", "w", "shape"), "46", "tensor w: its shape is not a list of integers"),
        (("tensors", "w", "shape"), [2**62 + 1], "tensor w: its shape is not a list of integers"),
        (("tensors", "w", "shape"), [2**62, 2], "tensor w: has more elements than can be counted"),
        (("tensors", "w", "shape"), [2**62, 2, 0], "tensor w: has more elements than can be counted"),
        (("tensors", "s"), {"dtype": "F4", "shape": [3]}, "3 elements of F4 do not fill whole bytes"),
        (("shards", "rank-0.safetensors"), [], "shard rank-0.safetensors is not an object of tensors"),
        (AT, None, "rank-0.safetensors: tensor w: is not described by an object"),
        ((*AT, "fill"), "ones", "rank-0.safetensors: tensor w: its fill is none of keep, zero"),
        ((*AT, "fill"), [], "its fill is none of keep, zero"),
        ((*AT, "boxes"), {}, "has no list of boxes"),
        (BOX, ["w", 0, 0], "tensor w: box 0 is not a list of tensor, canonical offset, local offset and axes"),
        (BOX, {}, "box 0 is not a list of tensor"),
        ((*BOX, 0), "x", "box 0 is of x, which is no tensor of the layout"),
        ((*BOX, 0), ["w"], "box 0 is of what is no tensor of the layout"),
        ((*BOX, 0), "s", "box 0 of s ends at element 21 of 1"),
        ((*BOX, 1), -1, "box 0 of w is not made of integers from 0 on"),
        ((*BOX, 1), 2**62 + 1, "box 0 of w is not made of integers from 0 on"),
        ((*BOX, 1), 4, "box 0 of w ends at element 25 of 24, here at 12 of 12"),
        ((*BOX, 2), 1.0, "box 0 of w is not made of integers from 0 on"),
        ((*BOX, 2), 1, "box 0 of w ends at element 21 of 24, here at 13 of 12"),
        ((*BOX, 3), [[4, 6]], "box 0 of w is not made of integers from 0 on"),
        ((*BOX, 3), 12, "box 0 of w is not made of integers from 0 on"),
        ((*BOX, 3), [[0, 1, 1]], "box 0 of w is none: counts and strides are positive"),
        ((*BOX, 3), [[2, 0, 1]], "box 0 of w is none: counts and strides are positive"),
        ((*BOX, 3), [[2, 1, 1], [2, 1, 2]], "box 0 of w is none: two of its elements would be one"),
        ((*BOX, 3), [[2, 1, 1], [2, 2, 1]], "box 0 of w is none: two of its elements would be one"),
        ((*BOX, 3), [[1, 1, 1]] * 33, "axes not more than 32"),
        ((*BOX, 3), [[2**62, 2**62, 1]], "box 0 of w ends at element"),
        ((*AT, "dtype"), "F16", "rank-0.safetensors: tensor w: box 0 of w is BF16, the local tensor F16"),
        (("skipped",), ["w", "s"], "tensor w has elements of w, which is skipped"),
        (("rules",), {"w": {"kind": "cast"}}, "rule of tensor w: has no kind, or does not say of which tensor"),
        (("rules",), {"w": None}, "rule of tensor w: is not an object"),
        (("rules",), {"x": {"kind": "cast", "of": "m"}}, "tensor x is not among its tensors"),
        (("rules",), {"w": {"kind": "cast", "of": "m"}}, "tensor w is made of m, which is not stored"),
        (("stored",), {"m": {"dtype": "F32", "shape": []}}, "no rule makes anything of stored tensor m"),
    ],
)
def test_malformed_documents_are_refused(path: tuple[str | int, ...], value: Any, match: str) -> None:
    broken = valid()
    put(*path)(broken, value)
    with pytest.raises(DamagedError) as caught:
        decoded(broken)
    assert match in str(caught.value) and caught.value.what.startswith("layout L")


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("format",), "dcr-layout-2", "has format dcr-layout-2, this dcr reads dcr-layout-1"),
        (("requires",), ["rules", "moonlight"], "requires moonlight, unknown to this dcr"),
    ],
)
def test_newer_documents_are_unsupported(path: tuple[str, ...], value: Any, match: str) -> None:
    newer = valid()
    put(*path)(newer, value)
    with pytest.raises(UnsupportedError, match=match):
        decoded(newer)


@pytest.mark.parametrize(
    "path", ["../a.safetensors", "/a.safetensors", "a//b.safetensors", "a\\b", "", ".dcr/a", "a/..", "C:a"]
)
def test_paths_stay_below_the_folder(path: str) -> None:
    broken = valid()
    broken["shards"] = {path: {}}
    with pytest.raises(DamagedError, match="unsafe name"):
        decoded(broken)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"format": "dcr-layout-1", "format": "dcr-layout-1"}',
        b'{"format": "dcr-layout-1", "requires": [], "tensors": NaN}',
        b'{"format": "dcr-layout-1", "requires": [], "tensors": 1e999}',
        b'{"format": "dcr-layout-1", "requires": [], "tensors": 99999999999999999999999}',
        b'{"format": "dcr-layout-1", "requires": [' + b"[" * 20 + b"]" * 20 + b"]}",
        b"[" * 100_000,
        b'{"format": "dcr-layout-1", "requires": [], "tensors": {"\\ud800": {}}}',
    ],
)
def test_what_is_no_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedError, match="layout L"):
        decode_layout(data, "layout L")


@given(st.binary(max_size=3), st.integers(0, 400), st.integers(0, 3))
def test_no_damage_is_anything_but_refused(new: bytes, at: int, size: int) -> None:
    data = layout_bytes(valid())
    with contextlib.suppress(DamagedError, UnsupportedError):
        decode_layout(data[:at] + new + data[at + size :], "layout L")


def test_a_long_shape_is_not_multiplied_to_its_end() -> None:
    long = valid()
    long["tensors"]["s"]["shape"] = [2**62] * 300_000
    data = layout_bytes(long)
    start = time.process_time()
    with pytest.raises(DamagedError, match="more elements than can be counted"):
        decoded(data)
    assert time.process_time() - start < 10


def test_very_many_boxes_are_read_one_by_one() -> None:
    """Time goes with the number of boxes: ten times as many take no more than some ten times as long."""

    def seconds(count: int) -> float:
        many = valid()
        many["skipped"] = []
        many["tensors"]["w"]["shape"] = [count]
        boxes = [["w", at, at, []] for at in range(count)]
        many["shards"] = {"a.safetensors": {"w": {"dtype": "BF16", "shape": [count], "boxes": boxes}}}
        data = layout_bytes(many)
        start = time.process_time()
        assert len(decoded(data).shards["a.safetensors"]["w"].placements) == count
        return time.process_time() - start

    assert seconds(30_000) < 40 * max(seconds(3_000), 0.01)


def test_the_box_that_is_wrong_is_named() -> None:
    broken = valid()
    broken["shards"]["rank-1.safetensors"]["w"]["boxes"].append(["s", 0, 15, []])
    with pytest.raises(DamagedError) as caught:
        decoded(broken)
    assert caught.value.what == "layout L: rank-1.safetensors: tensor w"
    assert caught.value.facts == "box 1 of s ends at element 1 of 1, here at 16 of 15"


@pytest.mark.parametrize(("limit", "value"), [("MAX_LAYOUT_BYTES", 100), ("_MAX_VALUES", 10)])
def test_what_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    layout = decoded(valid())
    monkeypatch.setattr(document, limit, value)
    with pytest.raises(UnsupportedError, match=f"layout L: cannot be written: has more than (the )?{value} "):
        encode_layout(layout)


# Files


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    file.write_bytes(layout_bytes(valid()))
    assert read_layout(file).tensors == decoded(valid()).tensors
    assert read_layout(str(file)).what == f"layout {file}"


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_layout(tmp_path / "none.json")
    with pytest.raises(DcrError, match="cannot be read: Is a directory"):
        read_layout(tmp_path)
    file = tmp_path / "layout.json"
    file.write_bytes(layout_bytes(valid()))
    monkeypatch.setattr(document, "MAX_LAYOUT_BYTES", 100)
    with pytest.raises(DamagedError, match="has more than the 100 bytes that a layout may have"):
        read_layout(file)
