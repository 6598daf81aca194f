"""FORMAT.md section 9, the rules of layouts (14): each test breaks one rule in something valid and sees it refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcr_cli
from dcr_cli import diff
from dcr_cli.errors import DcrError
from dcr_cli.layout import document as documents
from dcr_cli.layout.box import Box
from dcr_cli.layout.document import decode_layout
from dcr_cli.layout.opening import open_any
from layouts import array_of, dcp_metadata, dcp_name, layout_bytes, part_of
from strategies import TensorData, shard_bytes, tensor_of, write_checkpoint

FORMAT = (Path(dcr_cli.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    """The layout that FORMAT.md shows."""
    section = FORMAT[FORMAT.index("### 14.2") :]
    found = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def refused(value: dict[str, Any] | bytes, match: str, code: int = 4) -> None:
    data = value if isinstance(value, bytes) else layout_bytes(value)
    with pytest.raises(DcrError, match=match) as caught:
        decode_layout(data, "layout L")
    assert caught.value.exit_code == code and caught.value.what.startswith("layout L")


def refused_with(value: Any, *path: str | int, match: str, code: int = 4) -> None:
    """The example is refused with this value at a path."""
    broken = example()
    place: Any = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    refused(broken, match, code)


W = ("shards", "rank-0.safetensors", "w")
BOX = (*W, "boxes", 0)
TENSORS: dict[str, TensorData] = {"w": tensor_of("BF16", (64, 48)), "norm": tensor_of("F32", (48,))}


class Folder:
    """The folder of the example, and the dense checkpoint that it makes up."""

    def __init__(self, root: Path) -> None:
        self.root, self.ranks, self.layout = root, root / "ranks", root / "layout.json"
        self.dense = write_checkpoint(root / "dense", TENSORS)
        self.ranks.mkdir()
        self.document = example()
        halves = [part_of(TENSORS["w"], (0, at), (64, 24)) for at in (0, 24)]
        self.held = {
            "rank-0.safetensors": {"w": halves[0], "norm": TENSORS["norm"]},
            "rank-1.safetensors": {"w": ("BF16", (66, 24), halves[1][2] + bytes(2 * 2 * 24)), "norm": TENSORS["norm"]},
        }
        self.write()

    def write(self) -> None:
        self.layout.write_bytes(layout_bytes(self.document))
        for path, tensors in self.held.items():
            (self.ranks / path).write_bytes(shard_bytes(tensors))

    def refused(self, match: str) -> None:
        self.write()
        with pytest.raises(DcrError, match=match) as caught:
            diff(self.dense, self.ranks, self.root / "delta", layout=self.layout)
        assert caught.value.exit_code == 4
        assert not (self.root / "delta").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_example_is_valid_and_is_what_it_says(folder: Folder) -> None:
    assert diff(folder.dense, folder.ranks, layout=folder.layout).same


@pytest.mark.parametrize(
    ("axes", "offset", "wanted"),
    [
        ([(1536, 1, 1)], 1536, lambda w: w[32:]),
        ([(64, 48, 24), (24, 1, 1)], 24, lambda w: w[:, 24:]),
        ([(64, 48, 1), (48, 1, 64)], 0, lambda w: w.T),
    ],
)
def test_boxes_are_what_the_text_says(
    axes: list[tuple[int, int, int]], offset: int, wanted: Callable[[Any], Any]
) -> None:
    text = json.dumps([list(axis) for axis in axes])
    assert f"`{text}`" in FORMAT
    w = array_of(TENSORS["w"])
    found, local = Box.make(axes, offset, 0).find(np.arange(w.size))
    here = np.empty(len(local), w.dtype)
    here[local] = w.ravel()[found]
    assert np.array_equal(here, wanted(w).ravel())


def test_rule_119_a_layout_is_json_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(b"{", "is not valid JSON")
    refused(layout_bytes(example())[:-1] + b', "format": "dcr-layout-1"}', "duplicate key format")
    refused(b"[]", "its format is not dcr-layout-1")
    refused_with("dcr-1", "format", match="its format is not dcr-layout-1")
    refused_with("dcr-layout-2", "format", match="has format dcr-layout-2", code=8)
    refused_with(["rules", "riddles"], "requires", match="requires riddles", code=8)


def test_rule_119_a_layout_is_not_too_large(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert documents.MAX_LAYOUT_BYTES == 400_000_000
    monkeypatch.setattr(documents, "MAX_LAYOUT_BYTES", 100)
    folder.refused("has more than the 100 bytes that a layout may have")


def test_rule_119_values_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    data = layout_bytes(example())
    monkeypatch.setattr(documents, "_MAX_VALUES", sum(map(data.count, b",[{")))
    decode_layout(data, "layout L")
    for more in (b"1,1", b"[]", b"{}"):
        refused(data[:-1] + b',"x":' + more + b"}", "has more than [0-9]+ values")
    monkeypatch.undo()
    refused(b"[" + b"[]," * (1 << 24) + b"[]]", "has more than 33554432 values")


@pytest.mark.parametrize("member", ["requires", "tensors", "shards"])
def test_rule_120_members_are_there_and_of_their_type(member: str) -> None:
    broken = example()
    del broken[member]
    refused(broken, member)
    refused_with("text", member, match=member)
    refused_with(None, *W, match="tensor w: is not described by an object")
    refused_with({"dtype": "BF16", "shape": [64, 24]}, *W, match="tensor w: has no list of boxes")
    refused_with("BF15", *W, "dtype", match="tensor w: its dtype is none of safetensors")
    refused_with("ones", *W, "fill", match="its fill is none of keep, zero")


def test_rule_121_shapes() -> None:
    refused_with([-1], "tensors", "w", "shape", match="its shape is not a list of integers from 0 on")
    refused_with([2**62 + 1], "tensors", "w", "shape", match="its shape is not a list of integers from 0 on")
    refused_with([2**62, 2, 0], "tensors", "w", "shape", match="has more elements than can be counted")
    refused_with({"dtype": "F6_E2M3", "shape": [2]}, "tensors", "w", match="do not fill whole bytes")


def test_rule_122_names_of_skipped_tensors_and_rules() -> None:
    rule = {"kind": "cast", "of": "master"}
    refused_with(["x"], "skipped", match="tensor x is not among its tensors")
    refused_with({"x": rule}, "rules", match="tensor x is not among its tensors")
    refused_with({"w": rule}, "rules", match="tensor w is made of master, which is not stored")
    refused_with({"master": {"dtype": "F32", "shape": []}}, "stored", match="no rule makes anything of stored tensor")
    both = example()
    both["requires"] = ["rules"]
    both["stored"] = {"norm": {"dtype": "F64", "shape": [48]}}
    both["tensors"]["other"] = {"dtype": "F32", "shape": [48]}
    both["rules"] = {"other": {"kind": "cast", "of": "norm"}}
    refused(both, "tensor norm is stored as another, and no rule makes it of that")
    both["stored"] = {"master": {"dtype": "F64", "shape": [48]}}
    both["rules"] = {"other": {"kind": "cast", "of": "master"}}
    decode_layout(layout_bytes(both), "layout L")
    both["requires"] = []
    refused(both, "has rules, and does not require rules")


def test_rule_123_paths_are_safe() -> None:
    for path in ("../rank-0.safetensors", "/rank-0.safetensors", "a/./b.safetensors", ".a/b.safetensors", ""):
        refused_with({}, "shards", path, match="unsafe name")


def test_rule_124_boxes() -> None:
    refused_with(["w", 0, 0], *BOX, match="box 0 is not a list of tensor, canonical offset, local offset and axes")
    refused_with("x", *BOX, 0, match="box 0 is of x, which is no tensor of the layout")
    refused_with(-1, *BOX, 1, match="is not made of integers from 0 on")
    refused_with(2**62 + 1, *BOX, 2, match="is not made of integers from 0 on")
    refused_with([[2, 1]], *BOX, 3, match="is not made of integers from 0 on")
    refused_with([[0, 1, 1]], *BOX, 3, match="counts and strides are positive")
    refused_with([[2, 1, 0]], *BOX, 3, match="counts and strides are positive")
    refused_with([[1, 1, 1]] * 33, *BOX, 3, match="axes not more than 32")
    of_one_step = example()
    of_one_step["shards"]["rank-0.safetensors"]["w"]["boxes"][0][3].append([1, 0, 0])
    assert decode_layout(layout_bytes(of_one_step), "layout L") == decode_layout(layout_bytes(example()), "layout L")


def test_rule_125_no_two_elements_of_a_box_are_one() -> None:
    refused_with([[2, 1, 3], [3, 1, 1]], *BOX, 3, match="two of its elements would be one")
    refused_with([[2, 3, 1], [3, 1, 1]], *BOX, 3, match="two of its elements would be one")
    refused_with([[2, 2, 3], [3, 1, 1]], *BOX, 3, match="two of its elements would be one")


def test_rule_126_boxes_end_within_both_tensors() -> None:
    refused_with(25, *BOX, 1, match="box 0 of w ends at element 3073 of 3072, here at 1536 of 1536")
    refused_with(1, *BOX, 2, match="box 0 of w ends at element 3048 of 3072, here at 1537 of 1536")


def test_rule_127_dtypes_are_the_same() -> None:
    refused_with("F16", *W, "dtype", match="box 0 of w is BF16, the local tensor F16")


def test_rule_128_what_is_skipped_is_in_no_box() -> None:
    refused_with(["w"], "skipped", match="tensor w has elements of w, which is skipped")


def test_rule_129_a_shard_is_missing(folder: Folder) -> None:
    del folder.held["rank-1.safetensors"]
    (folder.ranks / "rank-1.safetensors").unlink()
    folder.refused("shards of the layout are missing: rank-1.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("w", None, "tensor w of layout .* is missing"),
        ("w", tensor_of("BF16", (24, 64)), r"tensor w is BF16 \[24, 64\], BF16 \[64, 24\] expected by layout"),
        ("x", tensor_of("U8", (1,)), "tensors are in no rule of layout .*: x"),
    ],
)
def test_rule_129_shards_hold_what_the_layout_says(
    folder: Folder, name: str, tensor: TensorData | None, match: str
) -> None:
    held = {**folder.held["rank-0.safetensors"], name: tensor}
    folder.held["rank-0.safetensors"] = {each: data for each, data in held.items() if data is not None}
    folder.refused(match)


def test_rule_129_no_other_shard_is_there(folder: Folder) -> None:
    folder.held["rank-2.safetensors"] = {"w": tensor_of("U8", (1,))}
    folder.refused(r"rank-2\.safetensors: is in no rule of layout")


def test_rule_130_tensors_are_those_of_the_base(folder: Folder) -> None:
    folder.document["tensors"]["norm"]["shape"] = [6, 8]
    folder.refused(r"tensor norm is F32 \[6, 8\], in .* it is F32 \[48\]")
    folder.document["tensors"]["norm"]["shape"] = [48]
    folder.document["tensors"]["x"] = {"dtype": "F32", "shape": [0]}
    folder.refused("tensor x is not in ")


def test_rule_130_nothing_is_skipped_without_a_base(folder: Folder) -> None:
    folder.document["tensors"]["x"] = {"dtype": "F32", "shape": [4]}
    folder.document["skipped"] = ["x"]
    folder.write()
    with pytest.raises(DcrError, match="skips tensors, and there is no base to take them from: x") as caught:
        open_any(folder.ranks, layout=folder.layout)
    assert caught.value.exit_code == 8


def test_rule_131_every_element_is_in_a_box(folder: Folder) -> None:
    folder.document["shards"]["rank-1.safetensors"]["w"]["boxes"][0][3][0][0] = 63
    folder.refused(r"tensor w: element \[63, 24\] is in no shard")


def test_rule_131_no_box_is_in_owners_in_part(folder: Folder) -> None:
    folder.document["shards"]["rank-1.safetensors"]["w"]["boxes"][0][1] = 23
    folder.refused(r"tensor w: element \[0, 23\] is in w of rank-0.* and in w of rank-1.*, which overlap in part")


def test_rule_132_replicas_agree(folder: Folder) -> None:
    folder.held["rank-1.safetensors"]["norm"] = tensor_of("F32", (48,), 1)
    folder.refused(r"tensor norm: element 0 is 0x\w{8} in norm of rank-0.*, but 0x\w{8} in norm of rank-1")


class Parts:
    """Shards of PyTorch, and the dense checkpoint that they make up."""

    def __init__(self, root: Path) -> None:
        self.root, self.ranks = root, root / "ranks"
        self.dense = write_checkpoint(root / "dense", {**TENSORS, "packed": tensor_of("F4", (4, 4))})
        self.ranks.mkdir()
        self.parts = {
            1: {"w": part_of(TENSORS["w"], (0, 0), (40, 48)), "packed": tensor_of("F4", (4, 4))},
            2: {"w": part_of(TENSORS["w"], (40, 0), (24, 48)), "norm": TENSORS["norm"]},
        }
        self.metadata = [dcp_metadata({"w": (0, 0), "packed": (0, 0)}), dcp_metadata({"w": (40, 0), "norm": (0,)})]

    def write(self) -> None:
        for (rank, parts), metadata in zip(self.parts.items(), self.metadata, strict=True):
            (self.ranks / dcp_name(rank)).write_bytes(shard_bytes(parts, metadata))

    def refused(self, match: str, code: int = 4) -> None:
        self.write()
        with pytest.raises(DcrError, match=match) as caught:
            diff(self.dense, self.ranks, self.root / "delta")
        assert caught.value.exit_code == code


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_shards_of_pytorch_are_valid(parts: Parts) -> None:
    parts.write()
    assert diff(parts.dense, parts.ranks).same


@pytest.mark.parametrize(
    "info", ["", "[]", "{}", '{"w": {"saved_offsets": [40]}}', '{"w": {"saved_offsets": ["40", 0]}}']
)
def test_rule_133_shards_say_where_they_begin(parts: Parts, info: str) -> None:
    parts.metadata[1]["DCP_SHARDING_INFO"] = info
    parts.refused("DCP_SHARDING_INFO|saved_offsets")
    del parts.metadata[1]["DCP_SHARDING_INFO"]
    parts.refused("it has no DCP_SHARDING_INFO, which others have")


def test_rule_134_parts_end_within_the_whole(parts: Parts) -> None:
    parts.metadata[1] = dcp_metadata({"w": (41, 0), "norm": (0,)})
    parts.refused(r"tensor w is BF16 \[24, 48\] from \[41, 0\] on, the whole of it BF16 \[64, 48\]")
    parts.metadata[1] = dcp_metadata({"w": (40, 0), "norm": (0,)})
    parts.parts[2]["norm"] = tensor_of("I32", (48,))
    parts.refused(r"tensor norm is I32 \[48\] from \[0\] on, the whole of it F32 \[48\]")


def test_rule_134_no_packed_tensor_is_cut(parts: Parts) -> None:
    parts.parts[1]["packed"] = tensor_of("F4", (2, 4))
    parts.refused("tensor packed is a part of one of F4", code=8)
