"""Pushes of shards of ranks whose layout has rules: what goes out is what the checkpoint gives that they make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.verify import verify
from masters import BLOCKS, CALLED, FUNCTION, HELD, masters, put_on_path, rank_arrays, write_layout, write_steps
from published import build_all, commits, version_folder
from receivers import tree
from strategies import shard_bytes

STEPS = 3


@pytest.fixture
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that is published have one id, so that the same delta is the same bytes."""
    for module in ("publication", "pushing"):
        monkeypatch.setattr(f"dcr_cli.publisher.{module}.new_id", lambda: "0" * 32)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


def objects(remote: Path, number: int) -> dict[str, bytes]:
    """What was sent of a version, but for its commit."""
    return tree(version_folder(remote, commits(remote)[number - 1]))


@pytest.mark.usefixtures("same_ids")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kinds", [HELD, BLOCKS], ids=["elements", "blocks"])
def test_rules_from_end_to_end(kinds: dict[str, tuple[tuple[int, ...], str]], is_kept: bool, tmp_path: Path) -> None:
    """From a baseline, or from the shards of the step before, which make the base by the same rules."""
    dense, ranks = write_steps(tmp_path, kinds, STEPS)
    layout, remote = write_layout(tmp_path / "layout.json", kinds), tmp_path / "remote"
    push(dense[0], remote)
    dense_remote, baseline = tmp_path / "dense-remote", tmp_path / "dense-baseline"
    push(dense[0], dense_remote, baseline=baseline)
    for step in range(1, STEPS):
        plain = push(dense[step], dense_remote, baseline=baseline)
        base = {"base": ranks[step - 1], "base_layout": layout} if is_kept else {}
        rehearsed = push(ranks[step], remote, layout=layout, dry_run=True, **base)  # type: ignore[arg-type]
        found = push(ranks[step], remote, layout=layout, **base)  # type: ignore[arg-type]
        assert (found.kind, found.version, found.target) == ("delta", step + 1, plain.target)
        assert found.changed_elements == plain.changed_elements == rehearsed.changed_elements > 100
        assert rehearsed.target == found.target
        assert objects(remote, step + 1) == objects(dense_remote, step + 1)
        if not is_kept:
            assert push(ranks[step], remote, layout=layout).kind == "same"
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]
    pull(str(remote), tmp_path / "pulled")
    assert verify(tmp_path / "pulled", against=ranks[-1], against_layout=layout).matches
    assert verify(ranks[-1], against=tmp_path / "pulled", layout=layout).matches
    assert not verify(ranks[0], against=tmp_path / "pulled", layout=layout).matches


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--part", "0/1", "--attempt", "a"]])
def test_a_function_is_allowed_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    dense, ranks = write_steps(tmp_path, CALLED, 2)
    layout, remote = write_layout(tmp_path / "layout.json", CALLED), tmp_path / "remote"
    push(dense[0], remote)
    command = ["push", str(ranks[1]), str(remote), "--layout", str(layout), *more]
    assert main(command) == 8
    assert f"hint: if you trust it, --function {FUNCTION}, or functions=" in capsys.readouterr().err
    assert FUNCTION.partition(":")[0] not in sys.modules
    assert main([*command, "--function", "mirror"]) == 2
    capsys.readouterr()
    assert main([*command, "--function", FUNCTION, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "delta"
    if "--dry-run" in more:
        assert len(commits(remote)) == 1
        return
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]


@pytest.mark.usefixtures("module")
def test_a_function_makes_the_base_too(tmp_path: Path) -> None:
    dense, ranks = write_steps(tmp_path, CALLED, 2)
    layout, remote = write_layout(tmp_path / "layout.json", CALLED), tmp_path / "remote"
    push(dense[0], remote)
    with pytest.raises(UnsupportedError, match="nobody has allowed"):
        push(dense[1], remote, base=ranks[0], base_layout=layout)
    assert push(dense[1], remote, base=ranks[0], base_layout=layout, functions=[FUNCTION]).kind == "delta"
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]


def test_masters_that_differ(tmp_path: Path) -> None:
    """Replicas are compared as they are stored, even where both would make the same."""
    dense, ranks = write_steps(tmp_path, HELD, 2)
    layout, remote = write_layout(tmp_path / "layout.json", HELD), tmp_path / "remote"
    push(dense[0], remote)
    held = rank_arrays(HELD, masters(HELD, 1), 1)
    held["bias"].view("u4")[3] ^= 1
    (ranks[1] / "rank-1.safetensors").write_bytes(
        shard_bytes({name: ("F32", array.shape, array.tobytes()) for name, array in held.items()})
    )
    with pytest.raises(DamagedError, match=r"tensor bias: element 3 is .* in bias of rank-0"):
        push(ranks[1], remote, layout=layout)
    assert len(commits(remote)) == 1
