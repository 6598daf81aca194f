"""Layouts shown, checked, composed and written: what `dcr layout` does, against shards that are cut by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_cli import check_layout, compose_layouts, show_layout
from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError, UsageError
from dcr_cli.layout import box
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.composition import compose_layouts as compose
from dcr_cli.layout.coverage import coordinate
from dcr_cli.layout.document import decode_layout, encode_layout
from dcr_cli.layout.layout import ZERO, Form, Layout, LocalTensor, Placement, Rule

W = np.arange(48, dtype=np.uint16).reshape(8, 6)
NORM = np.arange(6, dtype=np.uint16) + 100
FORMS = {"norm": Form("U16", (6,)), "w": Form("U16", (8, 6))}


def rows(rank: int, *, padding: int = 0) -> LocalTensor:
    """Half of the rows of w, and below them rows of padding."""
    box = slice_box((8, 6), (4 * rank, 0), (4, 6))
    return LocalTensor(Form("U16", (4 + padding, 6)), (Placement("w", box),), ZERO if padding else "keep")


def whole(name: str) -> LocalTensor:
    return LocalTensor(FORMS[name], (Placement(name, whole_box(FORMS[name].elements)),))


def two_ranks(*, padding: int = 0) -> Layout:
    """Rows of w divided between two ranks, which both have all of norm."""
    shards = {f"rank-{r}.safetensors": {"norm": whole("norm"), "w": rows(r, padding=padding)} for r in (0, 1)}
    return Layout("two ranks", FORMS, shards)


def write(path: Path, layout: Layout) -> Path:
    path.write_bytes(encode_layout(layout))
    return path


def write_ranks(folder: Path, norms: Mapping[int, np.ndarray] | None = None) -> Path:
    folder.mkdir()
    for rank in (0, 1):
        norm = (norms or {}).get(rank, NORM)
        save_file({"norm": norm, "w": W[4 * rank : 4 * rank + 4].copy()}, folder / f"rank-{rank}.safetensors")
    return folder


def test_show_counts_what_is_where(tmp_path: Path) -> None:
    result = show_layout(write(tmp_path / "l.json", two_ranks(padding=1)), tensors=True)
    assert (result.tensors, result.elements, result.shards, result.local_tensors) == (2, 54, 2, 4)
    assert (result.boxes, result.placed_elements, result.padding) == (4, 60, 12)
    row = result.rows[3]
    assert (row.shard, row.name, row.shape, row.fill, row.padding) == ("rank-1.safetensors", "w", (5, 6), "zero", 6)
    assert [(box.tensor, box.canonical_offset, box.local_offset, box.axes) for box in row.boxes] == [
        ("w", 24, 0, ((24, 1, 1),))
    ]


def test_show_writes_the_layout_once(tmp_path: Path) -> None:
    layout = two_ranks()
    result = show_layout(write(tmp_path / "l.json", layout), output=tmp_path / "copy.json")
    assert result.output == str(tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == encode_layout(layout)
    with pytest.raises(ConflictError, match="is there already"):
        show_layout(tmp_path / "l.json", output=tmp_path / "copy.json")


def test_check_of_shards_and_their_replicas(tmp_path: Path) -> None:
    layout = write(tmp_path / "l.json", two_ranks())
    (tmp_path / "base").mkdir()
    save_file({"norm": NORM, "w": W}, tmp_path / "base" / "model.safetensors")
    good = write_ranks(tmp_path / "good")
    result = check_layout(layout, good, base=tmp_path / "base", deep=True)
    assert (result.elements, result.replica_elements, result.is_deep) == (54, 6, True)
    changed = NORM.copy()
    changed[4] = 7
    bad = write_ranks(tmp_path / "bad", {1: changed})
    check_layout(layout, bad)
    with pytest.raises(DamagedError, match=r"norm: element 4 is 0x0068 .*rank-0.*0x0007 .*rank-1"):
        check_layout(layout, bad, deep=True)
    with pytest.raises(UsageError, match="replicas in a checkpoint"):
        check_layout(layout, deep=True)


def test_check_looks_at_padding(tmp_path: Path) -> None:
    layout = write(tmp_path / "l.json", two_ranks(padding=1))
    for name, value in (("good", 0), ("bad", 77)):
        for rank in (0, 1):
            padded = np.concatenate([W[4 * rank : 4 * rank + 4], np.zeros((1, 6), np.uint16)])
            padded[4, 2] = value if rank else 0
            (tmp_path / name).mkdir(exist_ok=True)
            save_file({"norm": NORM, "w": padded}, tmp_path / name / f"rank-{rank}.safetensors")
    check_layout(layout, tmp_path / "good", deep=True)
    check_layout(layout, tmp_path / "bad")
    with pytest.raises(DamagedError, match=r"w of rank-1.safetensors: element \[4, 2\] is padding, and 0x004d"):
        check_layout(layout, tmp_path / "bad", deep=True)


def test_elements_of_packed_dtypes_are_named_by_their_first() -> None:
    assert coordinate(200, Form("F4", (8, 64))) == "[6, 16]"
    assert coordinate(3, Form("F6_E2M3", (16,))) == "4"
    assert coordinate(0, Form("F32", ())) == "0"


def test_check_names_the_element_that_two_local_places_want(tmp_path: Path) -> None:
    both = LocalTensor(Form("U16", (4, 6)), (*rows(0).placements, *rows(1).placements))
    layout = Layout("both", FORMS, {"a.safetensors": {"w": both, "norm": whole("norm")}})
    with pytest.raises(DamagedError, match=r"w of a.safetensors: element \[0, 0\] is in box 0 of w and in box 1 of w"):
        check_layout(write(tmp_path / "l.json", layout))


def test_check_against_another_base(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_file({"norm": NORM, "w": W.reshape(6, 8)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(DamagedError, match=r"w is U16 \[8, 6\], in .*base it is U16 \[6, 8\]"):
        check_layout(write(tmp_path / "l.json", two_ranks()), base=tmp_path / "base")


def test_composed_layouts_lead_where_both_lead(tmp_path: Path) -> None:
    """w transposed, then its rows divided: columns of w."""
    transposed = LocalTensor(Form("U16", (6, 8)), (Placement("w", _transposing(8, 6)),))
    first = Layout("transposed", {"w": FORMS["w"]}, {"all.safetensors": {"t": transposed}})
    halves = {
        f"{r}.safetensors": {
            "h": LocalTensor(Form("U16", (3, 8)), (Placement("t", slice_box((6, 8), (3 * r, 0), (3, 8))),))
        }
        for r in (0, 1)
    }
    second = Layout("halves", {"t": Form("U16", (6, 8))}, halves)
    one, two = write(tmp_path / "1.json", first), write(tmp_path / "2.json", second)
    compose_layouts(one, two, output=tmp_path / "both.json")
    both = decode_layout((tmp_path / "both.json").read_bytes(), "both")
    assert dict(both.tensors) == {"w": FORMS["w"]}
    for rank in (0, 1):
        (placement,) = both.shards[f"{rank}.safetensors"]["h"].placements
        local = np.zeros(24, np.uint16)
        placement.box.local_view(local, 0, placement.box.whole)[...] = placement.box.canonical_view(
            W.reshape(-1), 0, placement.box.whole
        )
        assert np.array_equal(local.reshape(3, 8), W.T[3 * rank : 3 * rank + 3])


def _transposing(count: int, width: int) -> Box:
    return Box.make([(count, width, 1), (width, 1, count)], 0, 0)


def test_composed_padding_is_in_no_box() -> None:
    """Rows 3 to 5 of a local tensor whose last row is padding."""
    first = Layout(
        "padded",
        {"w": Form("U16", (8, 6))},
        {
            "a.safetensors": {"u": rows(0, padding=1)},
            "b.safetensors": {"v": rows(1, padding=1)},
        },
    )
    tail = LocalTensor(Form("U16", (2, 6)), (Placement("u", slice_box((5, 6), (3, 0), (2, 6))),))
    second = Layout("tails", {name: Form("U16", (5, 6)) for name in "uv"}, {"c.safetensors": {"x": tail}})
    (placement,) = compose(first, second).shards["c.safetensors"]["x"].placements
    assert (placement.box.canonical, placement.box.local, placement.box.elements) == (18, 0, 6)


def test_names_of_several_shards_are_told_apart() -> None:
    second = Layout(
        "one of two",
        {
            "rank-0.safetensors:w": Form("U16", (4, 6)),
            "rank-1.safetensors:w": Form("U16", (4, 6)),
            "rank-0.safetensors:norm": FORMS["norm"],
            "rank-1.safetensors:norm": FORMS["norm"],
        },
        {"x.safetensors": {"y": LocalTensor(Form("U16", (4, 6)), (Placement("rank-1.safetensors:w", whole_box(24)),))}},
    )
    (placement,) = compose(two_ranks(), second).shards["x.safetensors"]["y"].placements
    assert placement == Placement("w", rows(1).placements[0].box)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": Form("U16", (9, 6))}, "w is no local tensor"),
        (
            {"rank-0.safetensors:w": Form("U16", (9, 6))},
            r"is U16 \[9, 6\], a local tensor of two ranks is U16 \[4, 6\]",
        ),
        ({"rank-0.safetensors:w": Form("U16", (4, 6))}, "local tensors of two ranks are not in it"),
    ],
)
def test_layouts_that_do_not_fit_are_not_composed(tensors: Mapping[str, Form], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        compose(two_ranks(), Layout("second", tensors, {}))


def test_layouts_that_take_too_long_to_compose_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {f"{path}:{name}": each.form for path, both in two_ranks().shards.items() for name, each in both.items()}
    local = LocalTensor(Form("U16", (4, 6)), (Placement("rank-1.safetensors:w", whole_box(24)),))
    second = Layout("second", forms, {"x.safetensors": {"y": local}})
    compose(two_ranks(), second)
    for limit in ("_MOST_STEPS", "_STEPS_OF_BOX"):
        monkeypatch.setattr(box, limit, 0)
    with pytest.raises(DamagedError, match="second: does not follow two ranks: boxes have strides"):
        compose(two_ranks(), second)


def test_what_the_second_layout_skips_is_skipped() -> None:
    forms = {"w": FORMS["w"], "norm": FORMS["norm"]}
    first = Layout("plain", forms, {"a.safetensors": {name: whole(name) for name in forms}})
    kept = {"b.safetensors": {"w": whole("w")}}
    second = Layout("without norm", forms, kept, frozenset({"norm"}))
    assert compose(first, second).skipped == {"norm"}


def test_two_local_tensors_of_one_name_are_told() -> None:
    one = {path: {"x": rows(number)} for number, path in enumerate(("p", "q"))}
    first = Layout("twice", FORMS, one | {"r": {"p:x": whole("norm")}})
    with pytest.raises(DamagedError, match="twice: two of its local tensors are called p:x"):
        compose(first, Layout("second", {}, {}))


def test_rules_come_first() -> None:
    ruled = Layout("ruled", FORMS, {}, stored={"s": Form("F32", (6,))}, rules={"norm": Rule("cast", "s")})
    with pytest.raises(UnsupportedError, match="has rules"):
        compose(two_ranks(), ruled)
