"""Parts of ranks that hold their own shards: each sends what its shards own, and together it is what the checkpoint
would give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dcr_cli.cli import main
from dcr_cli.delta.commit import open_manifest
from dcr_cli.delta.manifest import Manifest
from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.push_part import PartResult, Rank
from dcr_cli.remote.version import decode_version
from dcr_cli.store.backend import Backend
from dcr_cli.verify import verify
from part_ranks import all_ranks, one_rank, results
from published import build_all, commits, version_folder
from ranks import RANKS, canonical, make_layout, path_of, write_canonical, write_layout, write_ranks
from receivers import fresh_copy, tree
from store_wrappers import KillsAtCall, wrapping

STEPS = 3
# Larger than a block, with rows that are digested as runs.
LARGE = (140, 4096)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path)


@pytest.fixture
def dense(tmp_path: Path) -> list[Path]:
    return [write_canonical(tmp_path / f"dense-{step}", canonical(step), step) for step in range(STEPS)]


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    return [write_ranks(tmp_path / f"ranks-{step}", canonical(step), step) for step in range(STEPS)]


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def apart(ranks: Path, number: int) -> Path:
    """The folder of a rank that sees its own shard alone; rank 0 has the other files too."""
    folder = ranks.parent / f"{ranks.name}-of-{number}"
    if not folder.exists():
        shutil.copytree(ranks, folder)
        for other in range(RANKS):
            if other != number:
                (folder / path_of(other)).unlink()
        if number:
            (folder / "config.json").unlink()
    return folder


def manifest_of(remote: Path, number: int) -> Manifest:
    document = commits(remote)[number - 1]
    version = decode_version((remote / f"commits/{number:010d}.json").read_bytes(), number, "commit").version
    assert version.delta is not None
    return open_manifest(version.delta, (version_folder(remote, document) / "manifest.zst").read_bytes(), "manifest")


def check_versions(remote: Path, dense: list[Path], scratch: Path) -> None:
    """Every version is the checkpoint of its step, and receivers come to the last one."""
    assert build_all(remote, scratch) == [tree(path) for path in dense]
    assert pull(str(remote), scratch / "pulled").version == len(dense)
    assert verify(scratch / "pulled", against=dense[-1]).matches
    assert verify(scratch / "pulled", remote=str(remote)).matches


# What is published


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_in_a_shared_folder(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path, count: int
) -> None:
    push(dense[0], remote)
    push(dense[0], tmp_path / "plain", baseline=tmp_path / "plain-baseline")
    for step in range(1, STEPS):
        plain = push(dense[step], tmp_path / "plain", baseline=tmp_path / "plain-baseline")
        found = results(all_ranks(ranks[step], remote, count, layout=layout))
        assert {(each.version, each.kind, each.target) for each in found} == {(step + 1, "delta", plain.target)}
        assert (found[0].changed_elements, found[0].changed_tensors) == (plain.changed_elements, plain.changed_tensors)
    check_versions(remote, dense, tmp_path / "scratch")
    assert push(ranks[-1], remote, layout=layout).kind == "same"


@pytest.mark.parametrize("base", ["shared", "own", "shards", "canonical"])
def test_ranks_that_see_their_own_shards(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path, base: str
) -> None:
    """With a baseline for all or for each, or with the shards, or the checkpoint, of the step before."""
    push(dense[0], remote, baseline=tmp_path / "baseline-0")
    for number in range(1, RANKS):
        shutil.copytree(tmp_path / "baseline-0", tmp_path / f"baseline-{number}")
    if base == "shared":
        (tmp_path / ".dcr-baseline").mkdir()
        (tmp_path / "baseline-0").rename(tmp_path / ".dcr-baseline" / commits(remote)[0]["history"])
    for step in range(1, STEPS):

        def own(number: int, step: int = step) -> dict[str, Any]:
            if base == "shards":
                return {"base": apart(ranks[step - 1], number), "base_layout": layout}
            if base == "canonical":
                return {"base": dense[step - 1]}
            return {"baseline": tmp_path / f"baseline-{number}"} if base == "own" else {}

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


def test_each_sends_what_its_shards_own(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path
) -> None:
    """Boxes of tensors that are shared; what both have is of the one that has less."""
    push(dense[0], remote)
    results(all_ranks(ranks[1], remote, RANKS, layout=layout))
    rows = {row.name: row for row in manifest_of(remote, 2).tensors}
    assert [piece.box and piece.box.starts for piece in rows["emb"].pieces] == [(0, 0), (15, 0)]
    assert [piece.box and piece.box.counts for piece in rows["down"].pieces] == [(8, 6), (8, 6)]
    assert [piece.box and piece.box.starts for piece in rows["wide"].pieces] == [(0, 0), (0, 25)]
    for name, owners in (("wide", [0, 1]), ("norm", [0]), ("small.0", [1])):
        pieces = rows[name].pieces
        assert [{run.payload % RANKS for run in piece.runs} for piece in pieces] == [{owner} for owner in owners]
    assert rows["norm"].pieces[0].box is None


@pytest.mark.parametrize("encoding", ["auto", "gap", "whole"])
def test_all_kinds_of_boxes(tmp_path: Path, remote: Path, encoding: str) -> None:
    """More than a block; a flat range that ends within a row; columns; every other row; one that nobody holds."""
    rng = np.random.default_rng(3)
    base: dict[str, NDArray[Any]] = {
        name: rng.integers(0, 1 << 16, LARGE, np.uint16) for name in ("columns", "flat", "rows", "skipped", "wide")
    }
    base |= {"none": np.zeros((0, 3), np.uint16), "one": np.array(5, np.uint16), "wide": base["wide"].astype("u8")}
    target = {name: tensor.copy() for name, tensor in base.items()}
    for name in ("columns", "flat", "rows", "wide"):
        target[name].reshape(-1)[rng.choice(LARGE[0] * LARGE[1], 5000, replace=False)] ^= 3
    target["one"] = np.array(6, np.uint16)
    rows, columns = LARGE
    half, odd = columns // 2, 100 * columns + 77
    total = rows * columns
    boxes = {
        "columns": [slice_box(LARGE, (0, half * rank), (rows, half)) for rank in range(2)],
        "flat": [Box.make([(odd, 1, 1)], 0, 0), Box.make([(total - odd, 1, 1)], odd, 0)],
        "rows": [
            Box.make([(rows // 2, 2 * columns, columns), (columns, 1, 1)], rank * columns, 0) for rank in range(2)
        ],
        # Transposed: an element of each row after the other.
        "wide": [Box.make([(rows, columns, 1), (half, 1, rows)], half * rank, 0) for rank in range(2)],
        "one": [whole_box(1), whole_box(1)],
    }
    kinds = {name: "U64" if name == "wide" else "U16" for name in base}
    shards = {
        path_of(rank): {
            name: LocalTensor(Form(kinds[name], (each[rank].elements,)), (Placement(name, each[rank]),))
            for name, each in boxes.items()
        }
        for rank in range(2)
    }
    forms = {name: Form(kinds[name], tensor.shape) for name, tensor in base.items()}
    layout = write_layout(tmp_path, Layout("boxes", forms, shards, frozenset({"skipped", "none"})))
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        held = {name: _held(target[name], each[rank]) for name, each in boxes.items()}
        save_file(held, ranks / path_of(rank))
    dense = [write_canonical(tmp_path / name, tensors) for name, tensors in (("base", base), ("target", target))]
    push(dense[0], remote)
    results(all_ranks(ranks, remote, 2, layout=layout, encoding=encoding))
    check_versions(remote, dense, tmp_path / "scratch")


def _held(tensor: NDArray[Any], box: Box) -> NDArray[Any]:
    held = np.empty(box.elements, tensor.dtype)
    numbers, local = box.find(np.arange(tensor.size))
    held[local] = tensor.reshape(-1)[numbers]
    return held


def test_a_checkpoint_after_shards(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path
) -> None:
    """Only the base is shards of ranks: then each rank has to see all of them."""
    push(dense[0], remote)
    results(all_ranks(dense[1], remote, 2, base=ranks[0], base_layout=layout))
    outcome = one_rank(dense[2], remote, Rank(1, 2), base=apart(ranks[1], 1), base_layout=layout)
    assert isinstance(outcome, DamagedError) and "missing" in str(outcome)
    results(all_ranks(dense[2], remote, 2, base=ranks[1], base_layout=layout))
    check_versions(remote, dense, tmp_path / "scratch")


def test_shards_that_say_it_themselves(tmp_path: Path, remote: Path) -> None:
    tensors = [canonical(step)["emb"] for step in range(2)]
    dense = [write_canonical(tmp_path / f"dense-{step}", {"emb": tensors[step]}) for step in range(2)]
    push(dense[0], remote)
    (ranks := tmp_path / "sharded").mkdir()
    for number, rows in enumerate((slice(0, 12), slice(12, None))):
        info = json.dumps({"emb": {"saved_offsets": [rows.start, 0]}})
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"emb": tensors[1][rows].copy()}, ranks / name, metadata={"DCP_SHARDING_INFO": info})
    results(all_ranks(ranks, remote, 2))
    check_versions(remote, dense, tmp_path / "scratch")


def test_the_command(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(dense[0], remote)
    options = ["--layout", str(layout), "--attempt", "1", "--base", str(ranks[0]), "--base-layout", str(layout)]
    for number in (1, 0):
        folder = str(apart(ranks[1], number))
        wait = ["--no-wait"] if number else []
        assert main(["push", folder, str(remote), "--part", f"{number}/{RANKS}", *wait, *options]) == 0
    assert "published: version 2" in capsys.readouterr().out
    assert main(["push", str(apart(ranks[2], 0)), str(remote), "--part", "0/2", "--layout", str(layout)]) == 2
    assert "--attempt" in capsys.readouterr().err


# What goes wrong


def test_nothing_names_the_step(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path
) -> None:
    push(dense[0], remote)
    for rank in (Rank(1, 2), Rank(1, 2, "run/0", is_launched=True)):
        outcome = one_rank(apart(ranks[1], 1), remote, rank, layout=layout)
        assert isinstance(outcome, UsageError) and "--attempt" in str(outcome)


def test_a_shard_of_its_own_is_missing(dense: list[Path], ranks: list[Path], layout: Path, remote: Path) -> None:
    push(dense[0], remote)
    outcome = one_rank(apart(ranks[1], 1), remote, Rank(0, 2, "a"), layout=layout)
    assert isinstance(outcome, DamagedError) and path_of(0) in str(outcome)
    outcome = one_rank(
        apart(ranks[1], 1), remote, Rank(1, 2, "a"), layout=layout, base=apart(ranks[0], 0), base_layout=layout
    )
    assert isinstance(outcome, UnsupportedError) and "lies in no shard that is there" in str(outcome)
    assert not list(remote.glob("versions/*"))


def test_a_layout_with_a_gap(dense: list[Path], ranks: list[Path], remote: Path, tmp_path: Path) -> None:
    """Found by every rank before anything is sent, whatever it reads."""
    push(dense[0], remote)
    layout = make_layout()
    shards = {path: dict(tensors) for path, tensors in layout.shards.items()}
    local = shards[path_of(1)]["emb"]
    shards[path_of(1)]["emb"] = LocalTensor(local.form, ())
    path = write_layout(tmp_path, Layout("gap", layout.tensors, shards))
    for number in range(2):
        outcome = one_rank(apart(ranks[1], number), remote, Rank(number, 2, "a"), layout=path)
        assert isinstance(outcome, DamagedError) and "in no shard" in str(outcome)
    assert not list(remote.glob("versions/*"))


def test_a_layout_that_others_do_not_have(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path
) -> None:
    """Then they are of another attempt."""
    push(dense[0], remote)
    one_rank(apart(ranks[1], 1), remote, Rank(1, 2, "a"), layout=layout, wait=False)
    layout.write_bytes(layout.read_bytes() + b"\n")
    outcome = one_rank(apart(ranks[1], 0), remote, Rank(0, 2, "a"), layout=layout, timeout_seconds=0.0)
    assert isinstance(outcome, ConflictError) and "not those of ranks 1" in str(outcome)


def test_tensors_that_lie_too_scattered(tmp_path: Path, remote: Path) -> None:
    """Packed ones have no pieces: a push without parts reads them all the same."""
    base = {"packed": np.arange(24, dtype=np.uint8)}
    (folder := tmp_path / "base").mkdir()
    save_file(base, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes().replace(b'"U8","shape":[24]', b'"F4","shape":[48]')
    (folder / "model.safetensors").write_bytes(data)
    push(folder, remote)
    (ranks := tmp_path / "ranks").mkdir()
    shards = {}
    for rank in range(2):
        save_file({"packed": base["packed"][12 * rank : 12 * rank + 12]}, ranks / path_of(rank))
        data = (ranks / path_of(rank)).read_bytes().replace(b'"U8","shape":[12]', b'"F4","shape":[24]')
        (ranks / path_of(rank)).write_bytes(data)
        placement = Placement("packed", Box.make([(12, 1, 1)], 12 * rank, 0))
        shards[path_of(rank)] = {"packed": LocalTensor(Form("F4", (24,)), (placement,))}
    layout = write_layout(tmp_path, Layout("packed", {"packed": Form("F4", (48,))}, shards))
    outcome = one_rank(ranks, remote, Rank(0, 2), layout=layout)
    assert isinstance(outcome, UnsupportedError) and "without --part" in str(outcome.hint)
    assert push(ranks, remote, layout=layout).kind == "same"


def test_another_base(dense: list[Path], ranks: list[Path], layout: Path, remote: Path) -> None:
    push(dense[0], remote)
    options: dict[str, Any] = {"layout": layout, "base": ranks[1], "base_layout": layout}
    one_rank(ranks[2], remote, Rank(1, 2), wait=False, **options)
    outcome = one_rank(ranks[2], remote, Rank(0, 2), **options)
    assert isinstance(outcome, WrongBaseError) and "another --base" in str(outcome.hint)
    assert len(commits(remote)) == 1


def test_shards_that_change_meanwhile(dense: list[Path], ranks: list[Path], layout: Path, remote: Path) -> None:
    push(dense[0], remote)

    def change(stage: str, done: int, total: int) -> None:
        shutil.copy(ranks[2] / path_of(1), ranks[1] / path_of(1))

    outcome = one_rank(ranks[1], remote, Rank(1, 2), layout=layout, progress=change)
    assert isinstance(outcome, ConflictError) and "changed while reading" in str(outcome)
    assert not list(remote.glob("versions/*/parts/*"))


def test_no_version_yet(dense: list[Path], ranks: list[Path], layout: Path, remote: Path) -> None:
    push(dense[0], remote)
    (remote / "commits/0000000001.json").unlink()
    shutil.rmtree(ranks[0].parent / ".dcr-baseline")
    outcome = one_rank(ranks[1], remote, Rank(1, 2), layout=layout, base=ranks[0], base_layout=layout)
    assert isinstance(outcome, WrongBaseError) and "without --part" in str(outcome.hint)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_is_killed_at_any_call(
    dense: list[Path], ranks: list[Path], layout: Path, remote: Path, tmp_path: Path, killed: int
) -> None:
    """Each sees its own shards, and the base is those of the step before."""
    push(dense[0], remote)
    kept = fresh_copy(remote, tmp_path / "kept")

    def own(number: int) -> dict[str, Any]:
        return {"base": apart(ranks[0], number), "base_layout": layout}

    call = 0
    while True:
        fresh_copy(kept, remote)
        shutil.rmtree(tmp_path / ".dcr-baseline", ignore_errors=True)
        killing: list[KillsAtCall] = []

        def kill(backend: Backend, call: int = call, killing: list[KillsAtCall] = killing) -> Backend:
            killing.append(KillsAtCall(backend, call, when="after" if call % 2 else "before"))
            return killing[0]

        folder = apart(ranks[1], killed)
        if killed == 0:
            one_rank(apart(ranks[1], 1), remote, Rank(1, 2, "1"), layout=layout, wait=False, **own(1))
        with wrapping(kill):
            one_rank(folder, remote, Rank(killed, 2, "1"), layout=layout, wait=False, **own(killed))
        outcomes = all_ranks(lambda number: apart(ranks[1], number), remote, 2, "1", layout=layout, own=own)
        assert {each.kind for each in results(outcomes)} == {"delta"}
        assert len(commits(remote)) == 2
        assert build_all(remote, tmp_path / "scratch")[1] == tree(dense[1])
        if killing[0].count <= call:
            break
        call += 1
    assert call > 5


def test_what_is_recovered(dense: list[Path], ranks: list[Path], layout: Path, remote: Path) -> None:
    push(dense[0], remote)
    results(all_ranks(ranks[1], remote, 2, layout=layout))
    again = one_rank(ranks[1], remote, Rank(1, 2), layout=layout)
    assert isinstance(again, PartResult) and again.recovered and again.tensors == len(canonical(0))
