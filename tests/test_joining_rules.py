"""Publisher: what ranks hold in memory, and a layout's rules make tensors of, is the checkpoint that they make."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcr_cli.errors import DamagedError, UnsupportedError, UsageError
from dcr_cli.layout.box import whole_box
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import LocalTensor, Placement, Rule
from dcr_cli.publish import Publisher
from dcr_cli.push import push
from masters import (
    BLOCKS,
    CALLED,
    FUNCTION,
    HELD,
    RANKS,
    SOURCE,
    checkpoint_of,
    masters,
    masters_layout,
    path_of,
    rank_arrays,
    write_dense,
    write_layout,
)
from published import build_all, commits
from receivers import tree

KINDS = HELD | BLOCKS | CALLED


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of a function, on the path, that is not imported yet."""
    name = FUNCTION.partition(":")[0]
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / f"{name}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return path


@pytest.fixture
def publisher(tmp_path: Path, module: Path) -> Iterator[Publisher]:
    """One at version 1; it begins the next when a test says so."""
    push(write_dense(tmp_path / "base", KINDS, 0), tmp_path / "remote", baseline=tmp_path / "baseline")
    layout = write_layout(tmp_path / "layout.json", KINDS)
    places = tmp_path / "remote", tmp_path / "baseline"
    with Publisher(*places, layout=layout, functions=[FUNCTION], jobs=1) as publisher:
        yield publisher


def add_all(publisher: Publisher, step: int, order: int = 1) -> None:
    values = masters(KINDS, step)
    held = [(rank, *each) for rank in range(RANKS) for each in rank_arrays(KINDS, values, rank).items()]
    for rank, name, tensor in held[::order]:
        changing = np.array(tensor)
        publisher.add(name, changing, shard=path_of(rank))
        changing.view(np.uint8).reshape(-1)[:] = 0


@pytest.mark.parametrize("order", [1, -1])
def test_masters_from_memory(publisher: Publisher, tmp_path: Path, order: int) -> None:
    publisher.begin()
    add_all(publisher, 1, order)
    assert publisher.commit().version == 2
    expected = write_dense(tmp_path / "expected", KINDS, 1)
    assert build_all(tmp_path / "remote", tmp_path / "scratch")[1] == tree(expected)
    publisher.begin()
    add_all(publisher, 1, order)
    assert publisher.commit().kind == "same"


def test_beside_whole_tensors(publisher: Publisher, tmp_path: Path) -> None:
    """What is given as it is in the checkpoint is not made of anything."""
    publisher.begin()
    made = checkpoint_of(masters(KINDS, 1))
    publisher.add("cast", made["cast"][2])
    values = masters(KINDS, 1)
    for rank in range(RANKS):
        publisher.add("blocks", rank_arrays(KINDS, values, rank)["blocks"], shard=path_of(rank))
    publisher.commit()
    with Publisher(tmp_path / "remote", tmp_path / "baseline") as plain:
        plain.begin()
        for name in ("cast", "blocks", "blocks_scale"):
            plain.add(name, made[name][2])
        assert plain.commit().kind == "same"


def test_masters_that_differ(publisher: Publisher) -> None:
    """Replicas are compared as they are stored, even where both would make the same."""
    publisher.begin()
    for rank in range(RANKS):
        norm = rank_arrays(KINDS, masters(KINDS, 1), rank)["norm"]
        norm.view("u4")[2] ^= rank
        if rank == 0:
            publisher.add("norm", norm, shard=path_of(rank))
            continue
        with pytest.raises(DamagedError, match=r"norm of rank-1.* has other bits"):
            publisher.add("norm", norm, shard=path_of(rank))
    with pytest.raises(DamagedError, match="other bits"):
        publisher.commit()


def test_what_was_not_added_cannot_be_lost(publisher: Publisher, tmp_path: Path) -> None:
    """The scales are not added where the weights went wrong: then there is no version without them."""
    publisher.begin()
    values = masters(KINDS, 1)
    publisher.add("blocks", checkpoint_of(values)["blocks"][2])
    publisher.add("blocks", rank_arrays(KINDS, values, 0)["blocks"], shard=path_of(0))
    with pytest.raises(UsageError, match="tensor blocks: was added twice"):
        publisher.add("blocks", rank_arrays(KINDS, values, 1)["blocks"], shard=path_of(1))
    with pytest.raises(UsageError, match="tensor blocks: all of it has come") as caught:
        publisher.commit()
    assert "begin() again" in str(caught.value.hint)
    assert len(commits(tmp_path / "remote")) == 1


def test_a_function_that_fails(publisher: Publisher, module: Path, tmp_path: Path) -> None:
    module.write_text("def mirror(given):\n    raise ValueError('no mirror')\n")
    publisher.begin()
    values = masters(KINDS, 1)
    with pytest.raises(UnsupportedError, match="its function failed: ValueError: no mirror"):
        publisher.add("called", rank_arrays(KINDS, values, 0)["called"], shard=path_of(0))
    with pytest.raises(UsageError, match="tensor called: all of it has come"):
        publisher.commit()
    assert len(commits(tmp_path / "remote")) == 1


def test_a_layout_calls_nothing_by_itself(publisher: Publisher, tmp_path: Path) -> None:
    publisher.close()
    layout = tmp_path / "layout.json"
    with (
        Publisher(tmp_path / "remote", tmp_path / "baseline", layout=layout) as another,
        pytest.raises(UnsupportedError, match="nobody has allowed"),
    ):
        another.begin()
    assert FUNCTION.partition(":")[0] not in sys.modules


def test_a_part_of_what_is_stored(publisher: Publisher) -> None:
    publisher.begin()
    held = [rank_arrays(KINDS, masters(KINDS, 1), rank)["across"] for rank in range(RANKS)]
    publisher.add("across", held[0], shard=path_of(0))
    with pytest.raises(UsageError, match="tensor across: 960 of its elements were not added"):
        publisher.commit()
    publisher.add("across", held[1], shard=path_of(1))
    assert publisher.commit().version == 2


def test_what_only_skipped_tensors_are_made_of(publisher: Publisher, tmp_path: Path) -> None:
    """It may come, and nothing is made of it."""
    publisher.close()
    layout = masters_layout(KINDS)
    master = LocalTensor(layout.stored["norm"], (Placement("master", whole_box(33)),))
    shards = {shard: {**local, "norm": master} for shard, local in layout.shards.items()}
    stored = {"master" if name == "norm" else name: form for name, form in layout.stored.items()}
    rules = {**layout.rules, "norm": Rule("add-one", "master")}
    skipped = frozenset({"norm", "blocks_scale"})
    path = tmp_path / "layout.json"
    path.write_bytes(encode_layout(replace(layout, shards=shards, stored=stored, rules=rules, skipped=skipped)))
    places = tmp_path / "remote", tmp_path / "baseline"
    with Publisher(*places, layout=path, functions=[FUNCTION], jobs=1) as another:
        another.begin()
        add_all(another, 9)
        another.commit()
    expected = checkpoint_of(masters(KINDS, 9))
    kept = checkpoint_of(masters(KINDS, 0))
    with Publisher(*places) as plain:
        plain.begin()
        for name, (_, _, data) in expected.items():
            plain.add(name, kept[name][2] if name in ("norm", "blocks_scale") else data)
        assert plain.commit().kind == "same"
