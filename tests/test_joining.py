"""Publisher: shards of ranks that are added from memory are the checkpoint that they make up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.publish import Publisher
from dcr_cli.push import push
from published import build_all
from ranks import RANKS, canonical, make_layout, path_of, rank_tensors, write_canonical, write_layout
from receivers import tree


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """One at version 1, which has begun the next."""
    push(write_canonical(tmp_path / "base", canonical(0)), tmp_path / "remote", baseline=tmp_path / "baseline")
    layout = write_layout(tmp_path)
    with Publisher(tmp_path / "remote", tmp_path / "baseline", layout=layout, jobs=1) as publisher:
        publisher.begin()
        yield publisher


def held(step: int) -> list[tuple[int, str, Any]]:
    return [(rank, *each) for rank in range(RANKS) for each in rank_tensors(canonical(step), rank).items()]


@pytest.mark.parametrize("order", [1, -1])
def test_shards_from_memory(publisher: Publisher, tmp_path: Path, order: int) -> None:
    """In any order: replicas before what they are replicas of, too."""
    for rank, name, tensor in held(1)[::order]:
        changing = np.array(tensor)
        publisher.add(name, changing, shard=path_of(rank))
        changing.view(np.uint8).reshape(-1)[:] = 0
    assert publisher.commit().version == 2
    expected = write_canonical(tmp_path / "expected", canonical(1))
    assert build_all(tmp_path / "remote", tmp_path / "scratch")[1] == tree(expected)
    publisher.begin()
    for rank, name, tensor in held(1):
        publisher.add(name, tensor, shard=path_of(rank))
    assert publisher.commit().kind == "same"


def test_from_threads_and_beside_whole_tensors(publisher: Publisher, tmp_path: Path) -> None:
    tensors = canonical(2)

    def add(rank: int) -> None:
        publisher.add("wide", rank_tensors(tensors, rank)["wide"], shard=path_of(rank))

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    publisher.add("emb", tensors["emb"])
    for thread in threads:
        thread.join()
    publisher.commit()
    expected = canonical(0) | {name: tensors[name] for name in ("wide", "emb")}
    assert build_all(tmp_path / "remote", tmp_path / "scratch")[1] == tree(
        write_canonical(tmp_path / "expected", expected)
    )


def test_all_of_a_tensor_has_to_come(publisher: Publisher) -> None:
    tensors = canonical(1)
    publisher.add("down", rank_tensors(tensors, 0)["down"], shard=path_of(0))
    with pytest.raises(UsageError, match="48 of its elements were not added: down of model-rank-1"):
        publisher.commit()
    publisher.add("down", rank_tensors(tensors, 1)["down"], shard=path_of(1))
    assert publisher.commit().version == 2


@pytest.mark.parametrize("first", [0, 1])
def test_replicas_that_differ(publisher: Publisher, first: int) -> None:
    norms = [canonical(0)["norm"], canonical(1)["norm"]]
    publisher.add("norm", norms[0], shard=path_of(first))
    with pytest.raises(DamagedError, match=r"norm of model-rank-1.* has other bits"):
        publisher.add("norm", norms[1], shard=path_of(1 - first))
    with pytest.raises(DamagedError, match="other bits"):
        publisher.commit()


def test_what_cannot_be_added(publisher: Publisher, tmp_path: Path) -> None:
    down = rank_tensors(canonical(1), 0)["down"]
    publisher.add("down", down, shard=path_of(0))
    with pytest.raises(UsageError, match="added twice"):
        publisher.add("down", down, shard=path_of(0))
    for shard, name in (("other", "down"), (path_of(0), "other")):
        with pytest.raises(UsageError, match="is in no shard"):
            publisher.add(name, down, shard=shard)


def test_without_a_layout_or_with_another(publisher: Publisher, tmp_path: Path) -> None:
    publisher.close()
    with Publisher(tmp_path / "remote", tmp_path / "baseline") as plain:
        plain.begin()
        with pytest.raises(UsageError, match="layout"):
            plain.add("down", b"", shard=path_of(0))
    layout = make_layout()
    other = Layout("other", dict(layout.tensors) | {"more": Form("F16", (0,))}, layout.shards)
    path = write_layout(tmp_path, other)
    with (
        Publisher(tmp_path / "remote", tmp_path / "baseline", layout=path) as another,
        pytest.raises(DamagedError, match="more"),
    ):
        another.begin()
