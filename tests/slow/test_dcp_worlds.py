"""PyTorch's distributed checkpoint in worlds of 3, 4 and 8 processes, with uneven parts, and empty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_cli import apply, diff, verify
from dcr_cli.errors import DamagedError
from layouts import run_world
from receivers import tree

WORLDS = [3, 4, 8]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What PyTorch writes before and after a step of AdamW, by the number of processes."""
    folder = tmp_path_factory.mktemp("worlds")
    return {world: run_world(folder / str(world), world) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_the_delta_is_that_of_what_is_gathered(worlds: dict[int, Path], tmp_path: Path, world: int) -> None:
    before, after = worlds[world] / "before", worlds[world] / "after"
    dense = diff(before / "gathered", after / "gathered", tmp_path / "dense-delta")
    laid = diff(before / "gathered", after / "sharded", tmp_path / "delta")
    assert dense.changed_elements and tree(tmp_path / "delta") == tree(tmp_path / "dense-delta")
    assert (laid.base, laid.target) == (dense.base, dense.target)
    apply(tmp_path / "delta", before / "gathered", to=tmp_path / "receiver")
    assert tree(tmp_path / "receiver") == tree(after / "gathered")
    assert verify(after / "sharded", against=tmp_path / "receiver").matches


@pytest.mark.parametrize("world", WORLDS)
def test_what_pytorch_joins_is_right_but_for_scalars(worlds: dict[int, Path], world: int) -> None:
    found = verify(worlds[world] / "after/sharded", against=worlds[world] / "after/joined")
    assert [(each.tensor, each.expected) for each in found.differences] == [("model.scale", "0x0000")]


@pytest.mark.parametrize(("one", "other"), [(3, 4), (4, 8), (8, 3)])
def test_a_world_is_compared_with_another_one(worlds: dict[int, Path], one: int, other: int) -> None:
    """Masters, gradients and the step are the same everywhere; only how they are cut is not."""
    assert diff(worlds[one] / "after/sharded", worlds[other] / "after/sharded").changed_elements == 0
    dense = diff(worlds[one] / "before/gathered", worlds[one] / "after/gathered")
    crossed = diff(worlds[one] / "before/sharded", worlds[other] / "after/sharded")
    assert (crossed.base.content, crossed.target.content) == (dense.base.content, dense.target.content)
    assert crossed.changed_elements == dense.changed_elements


@pytest.mark.parametrize("world", WORLDS)
def test_every_shard_is_missed(worlds: dict[int, Path], tmp_path: Path, world: int) -> None:
    after = worlds[world] / "after/sharded"
    for shard in sorted(after.iterdir()):
        found = verify(after, against=worlds[world] / "after/gathered")
        assert found.matches
        hidden = shard.rename(tmp_path / shard.name)
        try:
            with pytest.raises(DamagedError, match=r"is in no shard"):
                diff(worlds[world] / "before/gathered", after)
        finally:
            hidden.rename(shard)
