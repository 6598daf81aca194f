"""Receivers with a layout in which two tensors are one, as an output layer is that is tied to an embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcr_cli import apply, diff, verify
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.box import slice_box
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement
from receivers import tree

SHAPE = (8, 6)
NAMES = ("embed", "head")


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Equal, equal, different, equal again; and a receiver that holds the first one's rows in two shards."""
    rng = np.random.default_rng(1)
    found: list[Path] = []
    for number in range(4):
        embed = rng.integers(0, 1 << 16, SHAPE, np.uint16)
        head = embed if number != 2 else embed + np.uint16(1)
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        save_file(dict(zip(NAMES, (embed, head), strict=True)), folder / "model.safetensors")
        if found:
            diff(found[-1], folder, tmp_path / f"d{number}")
        found.append(folder)
    receiver = tmp_path / "receiver"
    receiver.mkdir()
    first = load_file(found[0] / "model.safetensors")["embed"]
    shards = {}
    for rank in (0, 1):
        save_file({"w": first[4 * rank : 4 * rank + 4]}, receiver / f"rank-{rank}.safetensors")
        box = slice_box(SHAPE, (4 * rank, 0), (4, 6))
        local = LocalTensor(Form("U16", (4, 6)), tuple(Placement(name, box) for name in NAMES))
        shards[f"rank-{rank}.safetensors"] = {"w": local}
    layout = Layout("tied", {name: Form("U16", SHAPE) for name in NAMES}, shards)
    (tmp_path / "layout.json").write_bytes(encode_layout(layout))
    return found


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_both_change_together(tmp_path: Path, versions: list[Path], mode: str) -> None:
    receiver, layout = tmp_path / "receiver", tmp_path / "layout.json"
    apply(tmp_path / "d1", receiver, mode=mode, layout=layout)
    assert verify(receiver, against=versions[1]).matches


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_a_target_in_which_they_differ_is_refused(tmp_path: Path, versions: list[Path], mode: str) -> None:
    receiver, layout = tmp_path / "receiver", tmp_path / "layout.json"
    before = tree(receiver)
    with pytest.raises(UnsupportedError, match=r"embed and head, which are one tensor here, differ in the target"):
        apply([tmp_path / "d1", tmp_path / "d2"], receiver, mode=mode, layout=layout)
    assert tree(receiver) == before


def test_what_lies_between_may_differ(tmp_path: Path, versions: list[Path]) -> None:
    receiver, layout = tmp_path / "receiver", tmp_path / "layout.json"
    apply([tmp_path / f"d{number}" for number in (1, 2, 3)], receiver, layout=layout)
    assert verify(receiver, against=versions[3]).matches
