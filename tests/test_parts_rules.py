"""Parts of ranks whose shards hold what rules make tensors of: each converts what it holds, and together it is what the
checkpoint would give."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.delta.commit import open_manifest
from dcr_cli.delta.manifest import Box
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Box as LayoutBox
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import Placement
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.push_part import Rank
from dcr_cli.remote.version import decode_version
from dcr_cli.verify import verify
from masters import (
    BLOCK,
    BLOCKS,
    CALLED,
    FUNCTION,
    HELD,
    RANKS,
    masters,
    masters_layout,
    path_of,
    put_on_path,
    rank_arrays,
    write_dense,
    write_layout,
    write_shards,
    write_steps,
)
from part_ranks import all_ranks, one_rank, results
from published import build_all, commits, version_folder
from receivers import tree
from strategies import shard_bytes

STEPS = 3


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


def apart(shards: Path, number: int) -> Path:
    """The folder of a rank that sees its own shard alone."""
    folder = shards.parent / f"{shards.name}-of-{number}"
    if not folder.exists():
        folder.mkdir()
        shutil.copy(shards / path_of(number), folder / path_of(number))
    return folder


def boxes_of(remote: Path, number: int) -> dict[str, list[Box | None]]:
    """The boxes of the pieces of each tensor of a version."""
    version = decode_version((remote / f"commits/{number:010d}.json").read_bytes(), number, "commit").version
    assert version.delta is not None
    data = (version_folder(remote, commits(remote)[number - 1]) / "manifest.zst").read_bytes()
    rows = open_manifest(version.delta, data, "manifest").tensors
    return {row.name: [piece.box for piece in row.pieces] for row in rows}


def check_versions(remote: Path, dense: list[Path], scratch: Path) -> None:
    assert build_all(remote, scratch) == [tree(path) for path in dense]
    assert pull(str(remote), scratch / "pulled").version == len(dense)
    assert verify(scratch / "pulled", against=dense[-1]).matches


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kinds", [HELD, BLOCKS], ids=["elements", "blocks"])
def test_rules_in_parts(
    kinds: dict[str, tuple[tuple[int, ...], str]], remote: Path, tmp_path: Path, count: int
) -> None:
    dense, ranks = write_steps(tmp_path, kinds, STEPS)
    layout = write_layout(tmp_path / "layout.json", kinds)
    push(dense[0], remote)
    push(dense[0], tmp_path / "whole", baseline=tmp_path / "whole-baseline")
    for step in range(1, STEPS):
        whole = push(ranks[step], tmp_path / "whole", layout=layout, baseline=tmp_path / "whole-baseline")
        found = results(all_ranks(ranks[step], remote, count, layout=layout))
        assert {(each.version, each.kind, each.target) for each in found} == {(step + 1, "delta", whole.target)}
        assert (found[0].changed_elements, found[0].changed_tensors) == (whole.changed_elements, whole.changed_tensors)
    check_versions(remote, dense, tmp_path / "scratch")
    assert push(ranks[-1], remote, layout=layout).kind == "same"


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kinds", [HELD, BLOCKS], ids=["elements", "blocks"])
def test_ranks_that_see_their_own_masters(
    kinds: dict[str, tuple[tuple[int, ...], str]], remote: Path, tmp_path: Path, is_sharded: bool
) -> None:
    """The base is the checkpoint of the step before, or the masters of then, which make it by the same rules."""
    dense, ranks = write_steps(tmp_path, kinds, STEPS)
    layout = write_layout(tmp_path / "layout.json", kinds)
    push(dense[0], remote)
    for step in range(1, STEPS):

        def own(number: int, step: int = step) -> dict[str, Any]:
            if is_sharded:
                return {"base": apart(ranks[step - 1], number), "base_layout": layout}
            return {"base": dense[step - 1]}

        outcomes = all_ranks(
            lambda number, step=step: apart(ranks[step], number),  # type: ignore[misc]
            remote,
            RANKS,
            f"step {step}",
            layout=layout,
            own=own,
        )
        assert {each.kind for each in results(outcomes)} == {"delta"}
    check_versions(remote, dense, tmp_path / "scratch")


def test_ranks_that_hold_the_same(remote: Path, tmp_path: Path) -> None:
    """Two copies of both halves: each rank sees its own shard, and does its part, on both sides."""
    kinds = HELD | BLOCKS
    dense = [write_dense(tmp_path / f"dense-{step}", kinds, step) for step in range(2)]
    layout = masters_layout(kinds)
    path = tmp_path / "layout.json"
    shards = {path_of(number): layout.shards[path_of(number % RANKS)] for number in range(2 * RANKS)}
    path.write_bytes(encode_layout(replace(layout, shards=shards)))
    for step in range(2):
        halves = write_shards(tmp_path / f"halves-{step}", kinds, step)
        for number in range(2 * RANKS):
            (folder := tmp_path / f"own-{step}-{number}").mkdir()
            shutil.copy(halves / path_of(number % RANKS), folder / path_of(number))
    push(dense[0], remote)
    found = results(
        all_ranks(
            lambda number: tmp_path / f"own-1-{number}",
            remote,
            2 * RANKS,
            "a",
            layout=path,
            own=lambda number: {"base": tmp_path / f"own-0-{number}", "base_layout": path},
        )
    )
    assert all(each.uploaded_bytes > 600 for each in found)
    check_versions(remote, dense, tmp_path / "scratch")


def test_blocks_that_ranks_have_whole(remote: Path, tmp_path: Path) -> None:
    """Weights and scales of a block are of one rank; what is no whole number of blocks ends where the tensor does."""
    kinds = {"blocks": ((60, 40), "rows"), "channels": ((31, 24), "rows")}
    dense = [write_dense(tmp_path / f"dense-{step}", kinds, 9 * step) for step in range(2)]
    layout = masters_layout(kinds)
    ranks = write_shards(tmp_path / "ranks", kinds, 9)
    push(dense[0], remote)
    path = tmp_path / "layout.json"
    path.write_bytes(encode_layout(layout))
    outcome = one_rank(ranks, remote, Rank(0, 2), layout=path)
    assert isinstance(outcome, UnsupportedError) and f"whole blocks of [{BLOCK}, {BLOCK}] of blocks" in str(outcome)
    # Rows up to a whole number of blocks, and the rest.
    held = {name: each.numpy() for name, each in masters(kinds, 9).items()}
    moved = {}
    for rank, rows in enumerate((slice(0, 32), slice(32, None))):
        mine = {"blocks": held["blocks"][rows], "channels": held["channels"][rows.start // 2 : (rows.stop or 62) // 2]}
        data = {name: ("F32", array.shape, array.tobytes()) for name, array in mine.items()}
        (ranks / path_of(rank)).write_bytes(shard_bytes(data))
        moved[path_of(rank)] = {
            name: replace(
                layout.shards[path_of(rank)][name],
                form=layout.stored[name]._replace(shape=array.shape),
                placements=(_rows_of(name, array.shape, rank * (16 if name == "channels" else 32)),),
            )
            for name, array in mine.items()
        }
    path.write_bytes(encode_layout(replace(layout, shards=moved)))
    results(all_ranks(ranks, remote, 2, layout=path))
    check_versions(remote, dense, tmp_path / "scratch")
    boxes = boxes_of(remote, 2)
    assert boxes["blocks"] == [Box((0, 0), (1, 1), (32, 40)), Box((32, 0), (1, 1), (28, 40))]
    assert boxes["blocks_scale"] == [Box((0, 0), (1, 1), (2, 3)), Box((2, 0), (1, 1), (2, 3))]
    assert boxes["channels_scale"] == [Box((0, 0), (1, 1), (16, 1)), Box((16, 0), (1, 1), (15, 1))]


def _rows_of(name: str, shape: tuple[int, ...], first: int) -> Placement:
    return Placement(name, LayoutBox.make([(shape[0] * shape[1], 1, 1)], first * shape[1], 0))


@pytest.mark.parametrize(
    ("kinds", "facts"),
    [
        (
            {"blocks": ((40, 48), "rows")},
            "tensor blocks: is made of whole blocks of [16, 16] of blocks, by rule fp8-block",
        ),
        ({"channels": ((30, 24), "columns")}, "of whole blocks of [1, 24] of channels, by rule fp8-channel, of which"),
        (
            {"called": ((6, 8), "rows")},
            "is made of all of called, by rule python, of which called of rank-0.safetensors",
        ),
    ],
)
@pytest.mark.usefixtures("module")
def test_what_no_rank_has_whole(
    kinds: Mapping[str, tuple[tuple[int, ...], str]], facts: str, remote: Path, tmp_path: Path
) -> None:
    """All ranks refuse it before anything is sent; a rank that has all of it, and one process, do not."""
    dense, ranks = write_steps(tmp_path, kinds, 3)
    layout = write_layout(tmp_path / "layout.json", kinds)
    push(dense[0], remote)
    for number in range(RANKS):
        outcome = one_rank(ranks[1], remote, Rank(number, RANKS), layout=layout, functions=[FUNCTION])
        assert isinstance(outcome, UnsupportedError) and facts in str(outcome)
        assert outcome.hint == "push without --part: one process reads all shards"
    assert not list(remote.glob("versions/*"))
    results(all_ranks(ranks[1], remote, 1, layout=layout, functions=[FUNCTION]))
    push(ranks[2], remote, layout=layout, functions=[FUNCTION])
    check_versions(remote, dense, tmp_path / "scratch")


@pytest.mark.usefixtures("module")
def test_a_function_where_a_rank_has_all(remote: Path, tmp_path: Path) -> None:
    dense, ranks = write_steps(tmp_path, CALLED, 2)
    layout = write_layout(tmp_path / "layout.json", CALLED)
    push(dense[0], remote)
    for number in range(RANKS):
        outcome = one_rank(ranks[1], remote, Rank(number, RANKS), layout=layout)
        assert isinstance(outcome, UnsupportedError) and "nobody has allowed" in str(outcome)
    assert not list(remote.glob("versions/*"))
    results(all_ranks(ranks[1], remote, RANKS, layout=layout, functions=[FUNCTION]))
    check_versions(remote, dense, tmp_path / "scratch")


@pytest.mark.usefixtures("module")
def test_a_base_that_a_piece_would_divide(remote: Path, tmp_path: Path) -> None:
    kinds = {"called": ((6, 8), "rows")}
    dense, ranks = write_steps(tmp_path, kinds, 2)
    base_layout = write_layout(tmp_path / "base-layout.json", kinds)
    plain = replace(masters_layout(kinds), rules={}, stored={})
    layout = tmp_path / "layout.json"
    layout.write_bytes(encode_layout(plain))
    push(dense[0], remote)
    options: dict[str, Any] = {"layout": layout, "base": ranks[0], "base_layout": base_layout, "functions": [FUNCTION]}
    outcome = one_rank(ranks[1], remote, Rank(1, RANKS), **options)
    assert isinstance(outcome, UnsupportedError)
    assert "is made of all of called, by rule python, which its piece divides" in str(outcome)


def test_replicas_that_differ_in_one_rank(remote: Path, tmp_path: Path) -> None:
    """A rank that has several shards compares what more than one of them holds, and says where in the tensor it is."""
    kinds = {"cast": ((40, 48), "rows")}
    dense = [write_dense(tmp_path / f"dense-{step}", kinds, step) for step in range(2)]
    layout, values = masters_layout(kinds), masters(kinds, 1)
    (ranks := tmp_path / "ranks").mkdir()
    shards = {}
    for number in range(4):
        held = rank_arrays(kinds, values, number // 2)
        if number == 3:
            held["cast"].view("u4")[7, 5] ^= 1
        data = {name: ("F32", array.shape, array.tobytes()) for name, array in held.items()}
        (ranks / path_of(number)).write_bytes(shard_bytes(data))
        shards[path_of(number)] = layout.shards[path_of(number // 2)]
    path = tmp_path / "layout.json"
    path.write_bytes(encode_layout(replace(layout, shards=shards)))
    push(dense[0], remote)
    outcome = one_rank(ranks, remote, Rank(1, 2), layout=path, wait=False)
    assert isinstance(outcome, DamagedError)
    assert "tensor cast: element [27, 5] is" in str(outcome) and "in cast of rank-3.safetensors" in str(outcome)
