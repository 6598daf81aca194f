"""Shards of one form in each other's place: refused where a base shows it, and nothing else is taken for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dcr_cli import diff, verify
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import main
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import slice_box, whole_box
from dcr_cli.layout.exchanged import Run, Sight, agreement, check_places, find_alike, first_of_other, spread
from dcr_cli.layout.gather import Gatherer
from dcr_cli.layout.laid import lay_part
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement, Rule
from dcr_cli.layout.shards import open_shards
from dcr_cli.layouts import check_layout
from dcr_cli.push import push
from layouts import cut_rows, dcp_metadata, dcp_name, part_of, write_dcp
from part_ranks import all_ranks, results
from published import commits
from ranks import write_layout
from receivers import tree
from strategies import shard_bytes, tensor_of, write_checkpoint

Arrays = dict[str, NDArray[Any]]

ROWS, COLUMNS, HEADS = 64, 48, 24


def weights(seed: int = 0, *, rate: float = 0.02) -> Arrays:
    """Two weights, a bias of each rank's own, and a norm that all ranks hold, after a step from those of seed 0."""
    rng = np.random.default_rng(11)
    shapes = {"gate": (ROWS, COLUMNS), "out": (COLUMNS, ROWS), "bias": (HEADS,), "norm": (COLUMNS,)}
    arrays: Arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    change = np.random.default_rng(seed)
    for array in arrays.values() if seed else ():
        bits = array.view(np.uint16).reshape(-1)
        bits[change.random(bits.size) < rate] ^= 1
    return arrays


def path_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def places(rank: int, ranks: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where a rank's parts begin, and their shapes: rows, columns, some elements, all."""
    rows, columns, heads = ROWS // ranks, ROWS // ranks, HEADS // ranks
    return {
        "gate": ((rank * rows, 0), (rows, COLUMNS)),
        "out": ((0, rank * columns), (COLUMNS, columns)),
        "bias": ((rank * heads,), (heads,)),
        "norm": ((0,), (COLUMNS,)),
    }


def layout_of(ranks: int, *, replicas: int = 1, dtype: str = "F16", **more: Any) -> Layout:
    """So many ranks that share the weights, each of them so many times; `dtype` is that of their shards."""
    forms = {name: Form("F16", array.shape) for name, array in weights().items()}
    shards = {}
    for number in range(ranks * replicas):
        cut = places(number % ranks, ranks)
        shards[path_of(number)] = {
            name: LocalTensor(Form(dtype, shape), (Placement(name, slice_box(forms[name].shape, starts, shape)),))
            for name, (starts, shape) in cut.items()
        }
    return Layout("ranks", forms, shards, **more)


def write_ranks(folder: Path, arrays: Arrays, ranks: int, *, replicas: int = 1, dtype: Any = np.float16) -> Path:
    folder.mkdir()
    for number in range(ranks * replicas):
        found = {}
        for name, (starts, shape) in places(number % ranks, ranks).items():
            part = tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))
            found[name] = np.ascontiguousarray(arrays[name][part]).astype(dtype)
        save_file(found, folder / path_of(number))
    return folder


def write_dense(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    return folder


def move(folder: Path, numbers: Sequence[int]) -> Path:
    """Put the file of each of some ranks where the one of the next of them is."""
    held = [(folder / path_of(number)).read_bytes() for number in numbers]
    for number, data in zip([*numbers[1:], numbers[0]], held, strict=True):
        (folder / path_of(number)).write_bytes(data)
    return folder


def refused(work: Callable[[], object], *, shard: int, as_one_of: int) -> DamagedError:
    with pytest.raises(DamagedError, match=rf"rank-{shard}\.safetensors: holds what belongs to rank-{as_one_of}") as e:
        work()
    return e.value


# What is refused


@pytest.mark.parametrize(
    ("ranks", "moved", "first"),
    [(2, [0, 1], (0, 1)), (4, [1, 3], (1, 3)), (4, [0, 1, 2], (0, 2)), (8, [3, 6, 4, 5], (3, 5))],
)
def test_a_swap_and_a_circle_are_refused(tmp_path: Path, ranks: int, moved: list[int], first: tuple[int, int]) -> None:
    base = write_dense(tmp_path / "base", weights())
    layout = write_layout(tmp_path, layout_of(ranks))
    shards = write_ranks(tmp_path / "shards", weights(1), ranks)
    assert 0 < diff(base, shards, layout=layout).changed_elements < 300
    move(shards, moved)
    before = tree(tmp_path)
    error = refused(lambda: diff(base, shards, tmp_path / "delta", layout=layout), shard=first[0], as_one_of=first[1])
    here, there = (f"[{rank * (ROWS // ranks)}, 0]" for rank in first)
    assert error.facts.endswith(f": tensor gate, element {here}, is what the base has of tensor gate, element {there}")
    assert tree(tmp_path) == before


def test_a_shard_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    base = write_dense(tmp_path / "base", weights())
    layout = write_layout(tmp_path, layout_of(4))
    shards = write_ranks(tmp_path / "shards", weights(1), 4)
    shutil.copy(shards / path_of(1), shards / path_of(2))
    refused(lambda: diff(base, shards, layout=layout), shard=2, as_one_of=1)


def test_one_of_several_replicas_is_refused_by_its_place(tmp_path: Path) -> None:
    base = write_dense(tmp_path / "base", weights())
    layout = write_layout(tmp_path, layout_of(2, replicas=2))
    shards = write_ranks(tmp_path / "shards", weights(1), 2, replicas=2)
    move(shards, [0, 2])
    assert diff(base, shards, layout=layout).changed_elements
    move(shards, [0, 3])
    refused(lambda: diff(base, shards, layout=layout), shard=0, as_one_of=1)


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constants_do_not_hide_it(tmp_path: Path, constant: float) -> None:
    """One weight tells, whatever the larger one is."""
    old, new = weights(), weights(1)
    old["gate"][:] = new["gate"][:] = constant
    base = write_dense(tmp_path / "base", old)
    layout = write_layout(tmp_path, layout_of(2))
    shards = move(write_ranks(tmp_path / "shards", new, 2), [0, 1])
    assert "tensor out" in refused(lambda: diff(base, shards, layout=layout), shard=0, as_one_of=1).facts


def test_shards_are_compared_with_a_base_of_shards(tmp_path: Path) -> None:
    base = write_ranks(tmp_path / "base", weights(), 4)
    old, new = write_layout(tmp_path, layout_of(4)), tmp_path / "two.json"
    old.rename(new)
    two = write_layout(tmp_path, layout_of(2))
    shards = move(write_ranks(tmp_path / "shards", weights(1), 2), [0, 1])
    refused(lambda: diff(base, shards, layout=two, base_layout=new), shard=0, as_one_of=1)


def test_masters_are_cast_before_they_are_compared(tmp_path: Path) -> None:
    names = weights().keys()
    layout = layout_of(
        2,
        dtype="F32",
        stored={name: Form("F32", array.shape) for name, array in weights().items()},
        rules={name: Rule("cast", name) for name in names},
    )
    base = write_dense(tmp_path / "base", weights())
    shards = write_ranks(tmp_path / "shards", weights(1), 2, dtype=np.float32)
    file = write_layout(tmp_path, layout)
    assert 0 < diff(base, shards, layout=file).changed_elements < 300
    move(shards, [0, 1])
    refused(lambda: diff(base, shards, layout=file), shard=0, as_one_of=1)


def test_headers_of_pytorch_that_lie_are_refused(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("BF16", (32, 8))}
    base = write_checkpoint(tmp_path / "base", tensors)
    ranks = write_dcp(tmp_path / "ranks", tensors, [[cut] for cut in cut_rows("w", (32, 8), 2)])
    assert diff(base, ranks).same
    for rank, begin in ((1, 16), (2, 0)):
        part = part_of(tensors["w"], (16 * rank - 16, 0), (16, 8))
        (ranks / dcp_name(rank)).write_bytes(shard_bytes({"w": part}, dcp_metadata({"w": (begin, 0)})))
    with pytest.raises(DamagedError, match=r"shard-00001.*: holds what belongs to shard-00002.*\[16, 0\].*\[0, 0\]"):
        diff(base, ranks)


# Where it is looked for


def test_checks_and_pushes_refuse_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, remote = write_dense(tmp_path / "base", weights()), tmp_path / "remote"
    layout = write_layout(tmp_path, layout_of(2))
    push(base, remote)
    shards = move(write_ranks(tmp_path / "shards", weights(1), 2), [0, 1])
    for dry_run in (True, False):
        refused(lambda dry=dry_run: push(shards, remote, layout=layout, dry_run=dry), shard=0, as_one_of=1)  # type: ignore[misc]
    assert len(commits(remote)) == 1
    refused(lambda: check_layout(layout, shards, base=base), shard=0, as_one_of=1)
    assert check_layout(layout, shards).shards == 2
    assert main(["layout", "check", str(layout), str(shards), "--base", str(base)]) == 4
    assert "hint: put each shard where its layout has it" in capsys.readouterr().err
    assert not verify(shards, against=base, layout=layout).matches
    move(shards, [0, 1])
    assert check_layout(layout, shards, base=base).base and push(shards, remote, layout=layout).version == 2


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_part_with_the_shard_of_another_rank_is_refused(tmp_path: Path, is_shared: bool) -> None:
    """Whether a rank sees the shards of the others, or its own alone."""
    base, remote = write_dense(tmp_path / "base", weights()), tmp_path / "remote"
    layout = write_layout(tmp_path, layout_of(4))
    push(base, remote)
    shards = write_ranks(tmp_path / "shards", weights(1), 4)

    def folder(rank: int) -> Path:
        if is_shared:
            return shards
        own = tmp_path / f"own-{rank}"
        own.mkdir(exist_ok=True)
        shutil.copy(shards / path_of(rank), own)
        return own

    move(shards, [1, 2])
    # A rank that finds nothing wrong would wait for those that do.
    found = all_ranks(folder, remote, 4, "a", layout=layout, wait=False, timeout_seconds=0.1)
    for rank, other in ((1, 2), (2, 1)):
        error = found[rank]
        assert isinstance(error, DamagedError) and f"holds what belongs to {path_of(other)}" in error.facts
    assert len(commits(remote)) == 1
    move(shards, [1, 2])
    assert {each.version for each in results(all_ranks(folder, remote, 4, "b", layout=layout))} == {2}


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_base_of_shards_tells_if_all_of_it_is_there(tmp_path: Path, is_shared: bool) -> None:
    remote, layout = tmp_path / "remote", write_layout(tmp_path, layout_of(2))
    push(write_dense(tmp_path / "dense", weights()), remote)
    base = write_ranks(tmp_path / "base", weights(), 2)
    shards = move(write_ranks(tmp_path / "shards", weights(1), 2), [0, 1])

    def own(rank: int) -> dict[str, object]:
        folder = tmp_path / f"base-{rank}"
        if not is_shared:
            folder.mkdir()
            shutil.copy(base / path_of(rank), folder)
        return {"base": base if is_shared else folder, "base_layout": layout}

    found = all_ranks(shards, remote, 2, "a", layout=layout, own=own)
    if is_shared:
        assert all("holds what belongs to" in str(each) for each in found)
    else:
        assert {each.version for each in results(found)} == {2}


def test_a_base_that_is_not_all_there_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, like = layout_of(2), open_checkpoint(write_dense(tmp_path / "like", weights()))
    base = open_shards(write_ranks(tmp_path / "base", weights(), 2))
    target = open_shards(move(write_ranks(tmp_path / "shards", weights(1), 2), [0, 1]))
    old, new = (lay_part(shards, layout, like, layout.shards) for shards in (base, target))
    refused(lambda: check_places(new, old), shard=0, as_one_of=1)
    (tmp_path / "base" / path_of(1)).unlink()
    partial = lay_part(open_shards(tmp_path / "base"), layout, like, [path_of(0)])
    monkeypatch.setattr(Gatherer, "read", lambda *_: pytest.fail("it is read"))
    check_places(new, partial)


# What is not refused


def test_weights_that_have_all_changed_are_nobodys(tmp_path: Path) -> None:
    base = write_dense(tmp_path / "base", weights())
    layout = write_layout(tmp_path, layout_of(2))
    new = {name: -2 * array for name, array in weights().items()}
    shards = write_ranks(tmp_path / "shards", new, 2)
    assert diff(base, shards, layout=layout).changed_elements > 6000


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_weights_that_become_those_constants_that_others_are(tmp_path: Path, constant: float) -> None:
    """All of rank 0 is set to what all of rank 1 is, and is."""
    old = weights()
    for name, (starts, shape) in places(1, 2).items():
        old[name][tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))] = constant
    base = write_dense(tmp_path / "base", old)
    new = {name: np.full_like(array, constant) for name, array in old.items()}
    shards = write_ranks(tmp_path / "shards", new, 2)
    assert diff(base, shards, layout=write_layout(tmp_path, layout_of(2))).changed_elements


def test_a_few_elements_tell_nothing(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("BF16", (2, 15))}
    base = write_checkpoint(tmp_path / "base", tensors)
    ranks = write_dcp(tmp_path / "ranks", tensors, [[cut] for cut in cut_rows("w", (2, 15), 2)])
    for rank in (1, 2):
        part = part_of(tensors["w"], (2 - rank, 0), (1, 15))
        (ranks / dcp_name(rank)).write_bytes(shard_bytes({"w": part}, dcp_metadata({"w": (rank - 1, 0)})))
    assert diff(base, ranks).changed_elements


# What is decided


def sight(bits: Sequence[int], *, silent: Sequence[int] = ()) -> Sight:
    is_telling = np.ones(len(bits), np.bool_)
    is_telling[list(silent)] = False
    zeros = np.zeros(len(bits), np.int64)
    return Sight(("w",), zeros, zeros, np.array(bits, np.uint64), is_telling)


def test_where_elements_belong_is_decided_by_those_that_tell() -> None:
    own, other = sight(range(40)), sight(range(100, 140))
    found = other.bits.copy()
    assert (agreement(found, own), first_of_other(found, own, other)) == (0.0, 0)
    found[:9] = own.bits[:9]
    assert first_of_other(found, own, other) == 9
    found[9] = own.bits[9]
    assert first_of_other(found, own, other) is None and agreement(found, own) == 0.25
    found[:20] = 1000
    assert first_of_other(found, own, other) == 20
    found[:21] = 1000
    assert first_of_other(found, own, other) is None


def test_what_is_the_same_in_both_places_tells_nothing() -> None:
    own, other = sight(range(40)), sight([*range(24), *range(124, 140)])
    assert first_of_other(other.bits, own, other) == 24
    other = sight([*range(25), *range(125, 140)])
    assert first_of_other(other.bits, own, other) is None
    own, other = sight(range(40), silent=range(12)), sight(range(100, 140), silent=range(28, 40))
    assert first_of_other(other.bits, own, other) == 12
    own = sight(range(40), silent=range(13))
    assert first_of_other(other.bits, own, other) is None
    assert agreement(other.bits, sight(range(40), silent=range(40))) == 1.0


def test_runs_are_spread_over_the_largest_tensors() -> None:
    assert spread({"w": 3200})[0] == Run("w", 0, 32) and spread({"w": 3200})[-1] == Run("w", 3168, 32)
    assert len(spread({"w": 3200})) == 32
    assert spread({"w": 10, "none": 0, "v": 40}) == [Run("w", 0, 10), Run("v", 0, 32)]
    assert [run.name for run in spread({str(number): number for number in range(100)})] == [
        str(number) for number in range(68, 100)
    ]
    assert spread({}) == []


def test_only_shards_of_one_form_in_several_places_are_looked_at() -> None:
    layout = layout_of(2)
    (found,) = find_alike(layout, layout.tensors.keys())
    assert found.conversions == {"gate": None, "out": None, "bias": None}
    (found,) = find_alike(layout, {"bias", "norm"})
    assert found.conversions.keys() == {"bias"}
    assert not list(find_alike(layout, ()))
    whole = LocalTensor(Form("BOOL", (64,)), (Placement("mask", whole_box(64)),))
    half = LocalTensor(Form("BOOL", (64,)), ())
    masks = Layout("masks", {"mask": Form("BOOL", (64,))}, {"a": {"mask": whole}, "b": {"mask": half}})
    assert not list(find_alike(masks, {"mask"}))
    other = {**layout.shards, path_of(1): {**layout.shards[path_of(1)], "more": half}}
    assert not list(find_alike(Layout("other", layout.tensors, other), layout.tensors.keys()))
