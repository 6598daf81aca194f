"""Shares of ranks: every element once, by a rank that holds it, and about as much for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.layout.box import slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement, Rule
from dcr_cli.publisher.rank_shares import cut_by_layout, shards_of
from dcr_cli.publisher.shares import Slice
from masters import path_of
from strategies import write_checkpoint

Shares = list[tuple[Slice, ...]]
# By name of tensor, and then by shard, the rows that it holds: from the first, to the last.
Rows = Mapping[str, Mapping[int, tuple[int, int]]]


def base_of(root: Path, forms: Mapping[str, Form]) -> Checkpoint:
    widths = {"F32": 4, "F16": 2}
    data = {name: (form.dtype, form.shape, bytes(widths[form.dtype] * form.elements)) for name, form in forms.items()}
    return open_checkpoint(write_checkpoint(root, data))


def layout_of(forms: Mapping[str, Form], rows: Rows, shards: int, **more: object) -> Layout:
    """Tensors of which each shard holds some rows."""
    local: dict[str, dict[str, LocalTensor]] = {path_of(number): {} for number in range(shards)}
    stored = more.get("stored", {})
    assert isinstance(stored, dict)
    for name, held in rows.items():
        form = stored.get(name) or forms[name]
        for number, (first, end) in held.items():
            shape = (end - first, *form.shape[1:])
            box = slice_box(form.shape, (first, *[0] * (len(shape) - 1)), shape)
            local[path_of(number)][name] = LocalTensor(Form(form.dtype, shape), (Placement(name, box),))
    return Layout("layout", forms, local, **more)  # type: ignore[arg-type]


def names_of(shares: Shares) -> list[list[str]]:
    return [[each.tensor.name for each in share] for share in shares]


def bytes_of(shares: Shares) -> list[int]:
    return [sum(each.elements * each.tensor.dtype.width for each in share) for share in shares]


def elements_of(each: Slice) -> list[int]:
    """The flat indices of a slice."""
    numbers = np.arange(each.tensor.elements).reshape(each.tensor.shape)
    if each.box is not None:
        box = each.box
        index = zip(box.starts, box.steps, box.counts, strict=True)
        numbers = numbers[tuple(slice(start, start + step * count, step) for start, step, count in index)]
    found: list[int] = numbers.reshape(-1).tolist()
    return found


def check(shares: Shares, base: Checkpoint, layout: Layout) -> None:
    """Every element is in one share, of a rank whose shards hold it, and shares are in canonical order."""
    count: dict[str, list[int]] = {tensor.name: [] for tensor in base.tensors}
    for rank, share in enumerate(shares):
        names = [each.tensor.name for each in share]
        assert names == sorted(names)
        own = shards_of(layout, rank, len(shares))
        for each in share:
            found = elements_of(each)
            count[each.tensor.name] += found
            boxes = [placed.box for placed in layout.placed()[layout.boxed(each.tensor.name)] if placed.path in own]
            held = {number for box in boxes for number in box.find(np.arange(each.tensor.elements))[0].tolist()}
            assert set(found) <= {np.arange(each.tensor.elements)[number] for number in held}
    assert all(sorted(found) == list(range(base.by_name[name].elements)) for name, found in count.items())


def test_replicas_go_to_who_has_least(tmp_path: Path) -> None:
    """By hand: what one rank alone can have counts first, then the largest of the others."""
    forms = {
        "a": Form("F32", (4, 5)),
        "b": Form("F16", (40,)),
        "c": Form("F32", (10,)),
        "d": Form("F32", (10,)),
        "e": Form("F32", (3,)),
        "f": Form("F32", (8, 3)),
    }
    everywhere = {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    rows: dict[str, dict[int, tuple[int, int]]] = {
        name: dict.fromkeys(everywhere, (0, forms[name].shape[0])) for name in ("b", "c", "d", "e")
    }
    rows["a"] = {1: (0, 4)}
    rows["f"] = {0: (0, 2), 2: (2, 8)}
    base, layout = base_of(tmp_path, forms), layout_of(forms, rows, 3)
    shares = cut_by_layout(base, layout, 3)
    # 24, 80 and 72 bytes; then b (80), c, d (40 each) and e (12).
    assert names_of(shares) == [["b", "e", "f"], ["a", "d"], ["c", "f"]]
    assert bytes_of(shares) == [24 + 80 + 12, 80 + 40, 72 + 40]
    check(shares, base, layout)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_have_about_as_much(tmp_path: Path, ranks: int) -> None:
    """Norms that all have, and halves of matrices that every other one has."""
    forms = {f"norm.{number:02}": Form("F32", (30 + number,)) for number in range(40)}
    forms |= {f"w.{number}": Form("F16", (20, 10)) for number in range(6)}
    rows = {
        name: {
            shard: (0, form.shape[0]) if name.startswith("norm") else (10 * (shard % 2), 10 * (shard % 2) + 10)
            for shard in range(8)
        }
        for name, form in forms.items()
    }
    base, layout = base_of(tmp_path, forms), layout_of(forms, rows, 8)
    shares = cut_by_layout(base, layout, ranks)
    check(shares, base, layout)
    found = bytes_of(shares)
    assert sum(found) == sum(tensor.bytes for tensor in base.tensors)
    assert max(found) - min(found) <= 200


def test_only_the_same_elements_are_given_away(tmp_path: Path) -> None:
    """A rank that has more of a tensor than the owner, or less, is not asked for it."""
    forms = {"w": Form("F32", (8, 3)), "x": Form("F32", (8, 3))}
    rows = {"w": {0: (0, 8), 1: (0, 4), 2: (4, 8)}, "x": {0: (0, 4), 1: (4, 8), 2: (0, 8)}}
    base, layout = base_of(tmp_path, forms), layout_of(forms, rows, 3)
    shares = cut_by_layout(base, layout, 3)
    assert names_of(shares) == [["w", "x"], ["x"], []]
    check(shares, base, layout)


def test_what_a_rule_needs_as_a_whole(tmp_path: Path) -> None:
    """It is in one piece where a rank has all of it, by several shards too; weights and scales go together."""
    forms = {"w": Form("F8_E4M3", (8, 4)), "w_scale": Form("F32", (3, 2)), "x": Form("F32", (50,))}
    rules = {name: Rule("fp8-block", "w", {"part": part, "block": [3, 3]}) for name, part in PARTS.items()}
    rows = {"w": {0: (0, 5), 1: (5, 8), 2: (0, 5), 3: (5, 8)}, "x": {0: (0, 50)}}
    layout = layout_of(forms, rows, 4, stored={"w": Form("F32", (8, 4))}, rules=rules)
    data = {"w": ("F8_E4M3", (8, 4), bytes(32)), "w_scale": ("F32", (3, 2), bytes(24)), "x": ("F32", (50,), bytes(200))}
    base = open_checkpoint(write_checkpoint(tmp_path / "base", data))
    shares = cut_by_layout(base, layout, 2)
    assert names_of(shares) == [["x"], ["w", "w_scale"]]
    assert all(each.box is None for share in shares for each in share)


PARTS = {"w": "weight", "w_scale": "scale"}


def test_tensors_that_are_the_same(tmp_path: Path) -> None:
    """Those that are tied, and those that are made of one, are all there."""
    forms = {name: Form("F32", (6,)) for name in ("cast", "head", "tied")} | {"cast": Form("F16", (6,))}
    both = (Placement("head", whole_box(6)), Placement("tied", whole_box(6)))
    local = {"both": LocalTensor(Form("F32", (6,)), both), "m": _whole("m", 6)}
    shards = {path_of(number): local for number in range(2)}
    rules = {"cast": Rule("cast", "m")}
    layout = Layout("layout", forms, shards, stored={"m": Form("F32", (6,))}, rules=rules)
    base = base_of(tmp_path, forms)
    shares = cut_by_layout(base, layout, 2)
    assert names_of(shares) == [["cast", "head"], ["tied"]]
    check(shares, base, layout)


def _whole(name: str, elements: int) -> LocalTensor:
    return LocalTensor(Form("F32", (elements,)), (Placement(name, whole_box(elements)),))
