"""The command pull: what it prints, its exit codes, and how it ends when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.push import push
from pushed import states
from receivers import tree
from strategies import Tensors, write_checkpoint


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A remote in a folder, with two versions."""
    for number, state in enumerate(states(2), start=1):
        push(publication(tmp_path, number, state), tmp_path / "remote", baseline=tmp_path / "baseline")
    return tmp_path / "remote"


def publication(folder: Path, number: int, state: Tensors) -> Path:
    return write_checkpoint(folder / f"v{number}", state, sidecars={"config.json": b"{}"})


def run(*arguments: str | Path) -> int:
    return main(["pull", *map(str, arguments)])


def test_what_people_read(remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "r"
    assert run("-n", remote, root) == 0
    assert "would bring" in capsys.readouterr().out and not root.exists()
    assert run(remote, root, "--version", "1") == 0
    assert run(remote, root) == 0
    told = capsys.readouterr().out
    assert f"done: {root} is at version 2" in told and "from       version 1" in told and "1 delta" in told
    assert run(remote, root) == 0
    assert f"already there: {root} is at version 2" in capsys.readouterr().out
    assert tree(root) == tree(tmp_path / "v2")


def test_what_programs_read(remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(remote, tmp_path / "r", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    expected = {"command": "pull", "exit_code": 0, "from_version": None, "version": 2, "applied": [1, 2]}
    assert {key: document[key] for key in expected} == expected
    assert document["way"]["anchor"] == 1 and document["downloaded_bytes"] > 0 and document["changed"] is True


def test_what_is_damaged_and_was_gone_around(remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told on standard error, beside a result as of any other pull."""
    root = tmp_path / "r"
    assert run(remote, root, "--version", "1") == 0
    assert main(["anchor", str(tmp_path / "v2"), str(remote)]) == 0
    payload = next(remote.glob("versions/0000000002-*/payloads/*"))
    payload.write_bytes(payload.read_bytes()[:-2] + b"\xff\xfe")
    capsys.readouterr()
    assert run(remote, root, "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["ok"], document["applied"]) == (True, [2])
    assert err == (
        f"dcr: {document['damaged'][0]}; another way led around it\n"
        f"hint: dcr verify --deep --remote {remote} tells what else is damaged\n"
    )
    assert document["damaged"][0].startswith(f"{payload}: is not the payload that the manifest lists")
    assert tree(root) == tree(tmp_path / "v2")


def test_damage_that_nothing_leads_around(remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = next(remote.glob("versions/0000000002-*/payloads/*"))
    payload.write_bytes(payload.read_bytes()[:-2] + b"\xff\xfe")
    assert run(remote, tmp_path / "r", "--json") == 4
    document = json.loads(capsys.readouterr().out)
    error = document["error"]
    assert document["version"] == 1 and error["message"].endswith(f"; {tmp_path / 'r'} is at version 1")
    assert error["class"] == "DamagedError" and str(payload) in error["message"] and "dcr anchor " in error["hint"]


def test_what_could_not_be_staged_does_not_make_what_was_applied_look_failed(
    remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told apart: the result first, as of a pull that succeeded, then the error."""
    root = tmp_path / "r"
    push(publication(tmp_path, 3, states(3)[2]), remote, baseline=tmp_path / "baseline", prepare=True)
    manifest = next(remote.glob("versions/0000000003-*/manifest.zst"))
    manifest.write_bytes(bytes(manifest.stat().st_size))
    assert run(remote, root, "--receiver", "a") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"done: {root} is at version 2") and "not staged" in out
    assert err.startswith("dcr: ") and "manifest.zst" in err and err.count("\ndcr: ") == 0
    assert "what is prepared was not staged" in err
    assert list(remote.glob("acks/0000000002-*/a.applied"))
    assert run(remote, root, "--receiver", "a", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["ok"], document["version"], document["staged"]) == (True, 2, None)
    assert document["staging_error"]["class"] == "DamagedError" and document["staging_error"]["retryable"] is False
    assert document["staging_error"]["message"] in err
    assert run(remote, root, "--receiver", "a", "-q") == 0
    out, err = capsys.readouterr()
    assert not out and "what is prepared was not staged" in err


def test_exit_codes(remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "r"
    assert run(tmp_path / "nothing", root) == 3
    assert run(remote, root, "--version", "9") == 3
    assert run(remote, root, "--exec", "exit 1") == 10
    assert "the next pull runs it again" in capsys.readouterr().err
    assert run(remote, root, "--exec", "exit 0") == 0
    (root / "model.safetensors").write_bytes(b"")
    assert run(remote, root) in (4, 5)
    for wrong in (
        ["--in-place", "--aside"],
        ["--keep-previous"],
        ["--follow", "-n"],
        ["--follow", "--repair"],
        ["--receiver-key", "x"],
        ["--exec-timeout", "15x"],
        ["--limit-rate", "fast"],
        ["--trusted-key", "none"],
    ):
        assert run(remote, root, *wrong) == 2, wrong


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_following_ends_by_a_signal(remote: Path, tmp_path: Path, number: int, code: int) -> None:
    root = tmp_path / "r"
    process = subprocess.Popen(
        [sys.executable, "-m", "dcr_cli", "pull", remote, root, "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        first = json.loads(process.stdout.readline())
        assert first["result"]["version"] == 2
        publication(tmp_path, 3, states(3)[2])
        push(tmp_path / "v3", remote, baseline=tmp_path / "baseline")
        assert json.loads(process.stdout.readline())["result"]["applied"] == [3]
        process.send_signal(number)
        assert process.wait(20) == code
        assert "stopped: by signal" in process.stderr.read()
    assert tree(root) == tree(tmp_path / "v3")
