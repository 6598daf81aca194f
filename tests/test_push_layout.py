"""Pushes of shards of ranks: what goes out is what the checkpoint gives that they are parts of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from dcr_cli.cli import main
from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.push import push
from dcr_cli.verify import verify
from published import build_all, commits, version_folder
from ranks import canonical, path_of, write_canonical, write_layout, write_ranks
from receivers import tree

STEPS = 3


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path)


@pytest.fixture
def dense(tmp_path: Path) -> list[Path]:
    """A checkpoint at each of some steps."""
    return [write_canonical(tmp_path / f"dense-{step}", canonical(step), step) for step in range(STEPS)]


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    """The same as the files of two ranks."""
    return [write_ranks(tmp_path / f"ranks-{step}", canonical(step), step) for step in range(STEPS)]


def objects(remote: Path, number: int) -> dict[str, bytes]:
    """What was sent of a version, but for its commit."""
    return tree(version_folder(remote, commits(remote)[number - 1]))


@pytest.fixture
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that is published have one id, so that the same delta is the same bytes."""
    for module in ("publication", "pushing"):
        monkeypatch.setattr(f"dcr_cli.publisher.{module}.new_id", lambda: "0" * 32)


# What is published


@pytest.mark.usefixtures("same_ids")
def test_it_is_what_the_checkpoint_gives(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        push(dense[0], place, baseline=f"{place}-baseline")
    for step in range(1, STEPS):
        plain = push(dense[step], places[0], baseline=f"{places[0]}-baseline")
        sharded = push(ranks[step], places[1], layout=layout, baseline=f"{places[1]}-baseline")
        assert (sharded.target, sharded.base, sharded.delta_bytes) == (plain.target, plain.base, plain.delta_bytes)
        assert (sharded.changed_elements, sharded.tensors) == (plain.changed_elements, plain.tensors)
        assert objects(places[1], step + 1) == objects(places[0], step + 1)
        # The baseline was moved by what was sent, and is a checkpoint in canonical form.
        assert tree(Path(f"{places[1]}-baseline")) == tree(dense[step])
        assert verify(f"{places[1]}-baseline", remote=str(places[1])).matches
    assert build_all(places[1], tmp_path / "scratch") == [tree(path) for path in dense]


def test_the_baseline_beside_the_first_checkpoint_is_found(
    dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path
) -> None:
    push(dense[0], tmp_path / "remote")
    before = tree(ranks[1])
    assert push(ranks[1], tmp_path / "remote", layout=layout).version == 2
    assert push(ranks[1], tmp_path / "remote", layout=layout).kind == "same"
    assert tree(ranks[1]) == before


def test_files_of_its_own(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")
    (ranks[1] / "config.json").unlink()
    (ranks[1] / "training.json").write_text("{}")
    push(ranks[1], tmp_path / "remote", layout=layout)
    expected = tree(dense[1]) | {"config.json": tree(dense[0])["config.json"], "training.json": b"{}"}
    assert build_all(tmp_path / "remote", tmp_path / "scratch")[1] == expected


def test_an_anchor_is_added(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")
    assert push(ranks[1], tmp_path / "remote", layout=layout, anchor_every=1).anchor == 2
    (anchor,) = (tmp_path / "remote/anchors").glob("0000000002-*/files")
    assert tree(anchor) == tree(dense[1])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_base_that_is_kept(
    dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path, is_sharded: bool
) -> None:
    """The step before, as a checkpoint or as shards of ranks: then its files are those of the version."""
    remote = tmp_path / "remote"
    push(dense[0], remote)
    shutil.rmtree(tmp_path / ".dcr-baseline")
    for step in range(1, STEPS):
        base = {"base": ranks[step - 1], "base_layout": layout} if is_sharded else {"base": dense[step - 1]}
        rehearsed = push(ranks[step], remote, layout=layout, dry_run=True, **base)  # type: ignore[arg-type]
        result = push(ranks[step], remote, layout=layout, **base)  # type: ignore[arg-type]
        assert (result.kind, result.version, result.target) == ("delta", step + 1, rehearsed.target)
        again = push(ranks[step], remote, layout=layout, **base)  # type: ignore[arg-type]
        assert (again.kind, again.version) == ("same", step + 1)
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]


def test_a_checkpoint_after_shards(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    """The source is a checkpoint, and the base shards of ranks."""
    remote = tmp_path / "remote"
    push(dense[0], remote)
    push(ranks[1], remote, layout=layout)
    assert push(dense[2], remote, base=ranks[1], base_layout=layout).kind == "delta"
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]


def test_shards_that_say_it_themselves(tmp_path: Path) -> None:
    """As PyTorch's distributed checkpoint writes them, no option is needed."""
    tensors = [canonical(step)["emb"] for step in range(2)]
    remote, sharded = tmp_path / "remote", tmp_path / "sharded"
    push(write_canonical(tmp_path / "dense-0", {"emb": tensors[0]}), remote)
    write_canonical(tmp_path / "dense-1", {"emb": tensors[1]})
    sharded.mkdir()
    for number, first in enumerate((0, 12)):
        info = json.dumps({"emb": {"saved_offsets": [first, 0]}})
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        part = tensors[1][first : 12 if not first else None]
        save_file({"emb": part.copy()}, sharded / name, metadata={"DCP_SHARDING_INFO": info})
    assert push(sharded, remote).kind == "delta"
    assert build_all(remote, tmp_path / "scratch")[1] == tree(tmp_path / "dense-1")


def test_a_stopped_push_is_gone_on_with(
    dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit is there, and the baseline was not moved."""
    remote = tmp_path / "remote"
    push(dense[0], remote)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dcr_cli.publisher.moving.apply_chain", stop)
        with pytest.raises(KeyboardInterrupt):
            push(ranks[1], remote, layout=layout)
    assert len(commits(remote)) == 2
    result = push(ranks[1], remote, layout=layout)
    assert (result.kind, result.recovered) == ("same", True)
    assert push(ranks[2], remote, layout=layout).version == 3
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]


def test_the_command(
    dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = str(tmp_path / "remote")
    push(dense[0], remote)
    assert main(["push", str(ranks[1]), remote, "--layout", str(layout), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2
    base = ["--base", str(ranks[1]), "--base-layout", str(layout)]
    assert main(["push", str(ranks[2]), remote, "--layout", str(layout), *base]) == 0
    assert "version 3" in capsys.readouterr().out
    assert main(["push", str(ranks[2]), remote, "--layout", str(layout), *base[2:]]) == 2


# What goes wrong


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_first_version_is_a_checkpoint(
    dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path, dry_run: bool
) -> None:
    remote = tmp_path / "remote"
    with pytest.raises(UnsupportedError, match="shards of ranks") as caught:
        push(ranks[1], remote, layout=layout, dry_run=dry_run)
    assert "dcr push CHECKPOINT" in str(caught.value.hint) and not remote.exists()
    push(dense[0], remote)
    with pytest.raises(UnsupportedError, match="shards of ranks"):
        push(ranks[1], remote, layout=layout, no_delta=True, dry_run=dry_run)
    assert len(commits(remote)) == 1


def test_what_contradicts_it(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    push(dense[0], remote)
    with pytest.raises(UsageError, match="--baseline-link"):
        push(ranks[1], remote, layout=layout, baseline_link=True)
    with pytest.raises(UsageError, match="--anchor-every"):
        push(ranks[1], remote, layout=layout, base=dense[0], anchor_every=2)
    with pytest.raises(UsageError, match="--base-layout"):
        push(dense[1], remote, base_layout=layout)
    assert len(commits(remote)) == 1


def test_no_baseline(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")
    shutil.rmtree(tmp_path / ".dcr-baseline")
    for dry_run in (False, True):
        with pytest.raises(WrongBaseError, match="neither a baseline") as caught:
            push(ranks[1], tmp_path / "remote", layout=layout, dry_run=dry_run)
        assert "--base" in str(caught.value.hint) and "--no-delta" not in str(caught.value.hint)


def test_another_base(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    push(dense[0], remote)
    with pytest.raises(WrongBaseError, match="not at version 1"):
        push(ranks[2], remote, layout=layout, base=ranks[1], base_layout=layout)
    assert len(commits(remote)) == 1


def test_a_shard_is_missing(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")
    (ranks[1] / path_of(1)).unlink()
    with pytest.raises(DamagedError, match="missing"):
        push(ranks[1], tmp_path / "remote", layout=layout)
    assert len(commits(tmp_path / "remote")) == 1


def test_replicas_that_differ(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")
    shutil.copy(ranks[2] / path_of(1), ranks[1] / path_of(1))
    with pytest.raises(DamagedError, match="norm"):
        push(ranks[1], tmp_path / "remote", layout=layout)


def test_a_layout_of_other_tensors(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    tensors = canonical(0)
    del tensors["wide"]
    push(write_canonical(tmp_path / "other", tensors), tmp_path / "remote")
    with pytest.raises(DamagedError, match="wide"):
        push(ranks[1], tmp_path / "remote", layout=layout)


def test_shards_that_change_meanwhile(dense: list[Path], ranks: list[Path], layout: Path, tmp_path: Path) -> None:
    push(dense[0], tmp_path / "remote")

    def change(stage: str, done: int, total: int) -> None:
        shutil.copy(ranks[2] / path_of(0), ranks[1] / path_of(0))

    with pytest.raises(ConflictError, match="changed while reading"):
        push(ranks[1], tmp_path / "remote", layout=layout, progress=change)
    assert len(commits(tmp_path / "remote")) == 1
