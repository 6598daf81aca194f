"""What a user is told, on a line of its own, of what may be a mistake: by diff, and by push."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcr_cli.cli import main
from strategies import Tensors, write_checkpoint, write_tiny_steps

Capture = pytest.CaptureFixture[str]

WHOLE: Tensors = {"a": ("U8", (4,), b"abcd"), "b": ("U8", (2, 2), b"efgh"), "c": ("U8", (1,), b"i")}
HALF: Tensors = {"a": ("U8", (2,), b"ab"), "b": ("U8", (4,), b"efgh"), "d": ("U8", (3,), b"xyz")}
FORM_NOTE = "note: 2 tensors have another shape or dtype, 1 tensor is new, 1 tensor is gone, config.json goes"


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 4)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def told(capsys: Capture, *arguments: object) -> list[str]:
    """The notes among the lines of a command that succeeds."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


def test_half_of_a_model(tmp_path: Path, remote: Path, capsys: Capture) -> None:
    whole = write_checkpoint(tmp_path / "whole", WHOLE, sidecars={"config.json": b"{}"})
    half = write_checkpoint(tmp_path / "half", HALF)
    assert told(capsys, "diff", whole, half) == [FORM_NOTE]
    assert told(capsys, "diff", whole, whole) == []
    main(["push", str(whole), str(remote), "-q"])
    assert told(capsys, "push", half, remote, "-n") == [FORM_NOTE]
    assert main(["push", str(half), str(remote), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = ("added", "removed", "reshaped", "files_removed")
    assert [document[name] for name in names] == [["d"], ["c"], ["a", "b"], ["config.json"]]


def test_a_tensor_of_another_name(tmp_path: Path, capsys: Capture) -> None:
    base = write_checkpoint(tmp_path / "base", WHOLE)
    target = write_checkpoint(tmp_path / "target", {"a": WHOLE["a"], "b": WHOLE["b"], "z": WHOLE["c"]})
    assert told(capsys, "diff", base, target) == ["note: 1 tensor has another name"]


def test_values_alone_are_worth_no_note(steps: list[Path], remote: Path, capsys: Capture) -> None:
    main(["push", str(steps[0]), str(remote), "-q"])
    assert told(capsys, "push", steps[1], remote) == []


def test_weights_that_were_there_before(steps: list[Path], remote: Path, capsys: Capture) -> None:
    assert told(capsys, "push", steps[0], remote, "-n") == [f"note: would begin a new history in {remote}"]
    assert told(capsys, "push", steps[0], remote) == [f"note: begins a new history in {remote}"]
    for step in steps[1:3]:
        assert told(capsys, "push", step, remote) == []
    for more in ("-n", "-v"):
        assert told(capsys, "push", steps[1], remote, more) == ["note: these are the weights of version 2"]
    assert told(capsys, "push", steps[2], remote, "--no-delta") == ["note: these are the weights of version 3"]
    # Only a file beside the shards is another one.
    (steps[2] / "config.json").write_bytes(b"{}")
    assert told(capsys, "push", steps[2], remote) == []


def test_an_old_version_that_cannot_be_read_is_not_known(steps: list[Path], remote: Path, capsys: Capture) -> None:
    for step in steps[:3]:
        main(["push", str(step), str(remote), "-q"])
    (remote / "commits/0000000001.json").write_bytes(b"{")
    assert told(capsys, "push", steps[0], remote) == []


def test_what_was_prepared_is_given_up_aloud(steps: list[Path], remote: Path, capsys: Capture) -> None:
    main(["push", str(steps[0]), str(remote), "-q"])
    assert told(capsys, "push", steps[1], remote, "--prepare") == []
    assert told(capsys, "push", steps[1], remote, "--prepare") == []
    gives_up = "note: gives up the prepared version 2, which was another state"
    assert told(capsys, "push", steps[2], remote, "--prepare") == [gives_up]
    assert told(capsys, "push", steps[3], remote) == [gives_up]
    assert main(["commit", str(remote)]) == 3
    assert "no version is prepared: a push has published version 2" in capsys.readouterr().err
    assert main(["commit", str(remote), "2"]) == 6
    assert "and what was prepared is given up" in capsys.readouterr().err
    assert told(capsys, "push", steps[0], remote) != [gives_up]


def test_what_was_prepared_stays_where_nothing_is_published(steps: list[Path], remote: Path, capsys: Capture) -> None:
    main(["push", str(steps[0]), str(remote), "-q"])
    told(capsys, "push", steps[1], remote, "--prepare")
    assert told(capsys, "push", steps[0], remote) == []
    assert main(["commit", str(remote), "-q"]) == 0
