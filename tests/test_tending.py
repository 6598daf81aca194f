"""log, status, prune, show and verify of a remote as people and scripts call them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.cli import main
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.remote.hint import PREPARED
from dcr_cli.remote.keys import STAGED, Place, manifest_key, payload_key
from dcr_cli.report.durations import duration
from dcr_cli.report.remotes import ranges
from histories import Publisher, id_of, new_remote
from receivers import fresh_copy, tree
from strategies import tensor_of, with_changes, write_checkpoint

WEEKS_AGO = 30 * 24 * 3600.0


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A remote in a folder: 1 whole, 2 and 3 deltas, 3 with an anchor too; written weeks ago, but for what is said of
    it."""
    tensors = {"a": tensor_of("BF16", (300,), 1), "b": tensor_of("U8", (33,), 3)}
    states = [write_checkpoint(tmp_path / "v1", tensors, sidecars={"config.json": b"{}"})]
    for number in (2, 3):
        tensors["a"] = with_changes(tensors["a"], [number])
        states.append(write_checkpoint(tmp_path / f"v{number}", tensors, sidecars={"config.json": b"{}"}))
    objects = new_remote()
    publisher = Publisher(objects)
    publisher.whole(states[0])
    publisher.delta(states[0], states[1], tmp_path)
    publisher.delta(states[1], states[2], tmp_path)
    publisher.add_anchor(3, states[2])
    before = set(objects.objects)
    publisher.acknowledge(2, "rollout-1")
    publisher.begin(Place(4, "e" * 32), PREPARED, is_prepared=True)
    publisher.acknowledge(4, "rollout-2", STAGED, own="e" * 32)
    folder = tmp_path / "remote"
    for key, (data, _) in objects.objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
        if key in before:
            past = os.stat(folder / key).st_mtime - WEEKS_AGO
            os.utime(folder / key, (past, past))
    return folder


def test_a_remote_without_versions_is_not_whole(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(remote / "commits")
    code, document = run(capsys, "verify", "--remote", str(remote))
    assert code == 3 and document["error"]["message"] == f"{remote}: holds no versions yet"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code and document["ok"] == (code == 0)
    return code, document


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_log(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(capsys, "log", str(remote))
    assert code == 0 and [each["version"] for each in document["versions"]] == [3, 2, 1]
    assert document["versions"][0]["target"]["content"].startswith("blake3:")
    told = text(capsys, "log", str(remote), "--lines", "2")
    assert told.splitlines()[0] == f"{remote}: version 3 is the newest"
    assert "and 1 older version; --all lists all" in told and "signed by" not in told
    assert len(run(capsys, "log", str(remote), "-N", "1")[1]["versions"]) == 1
    assert len(run(capsys, "log", str(remote), "--all")[1]["versions"]) == 3
    assert run(capsys, "log", str(remote), "--all", "-N", "1")[0] == 2
    assert run(capsys, "log", str(remote.parent / "nothing"))[0] == 3


def test_log_says_who_signed(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    assert "nobody trusted" in text(capsys, "log", str(remote), "--trusted-key", "0" * 64)


@pytest.mark.parametrize("version", ["007", "-1", "2.0", "9223372036854775808"])
def test_a_version_has_one_form(remote: Path, capsys: pytest.CaptureFixture[str], version: str) -> None:
    root = str(remote.parent / "v2")
    for arguments in (
        ["pull", str(remote), root, f"--version={version}"],
        ["anchor", root, str(remote), f"--version={version}"],
        ["verify", root, "--remote", str(remote), f"--version={version}"],
        ["commit", "--", str(remote), version],
        *([["show", f"{remote}@{version}"]] if version.isdigit() else []),
    ):
        if arguments[0] == "commit":
            assert main(arguments) == 2 and "ersion: a version is a number from 1" in capsys.readouterr().err
            continue
        code, document = run(capsys, *arguments)
        assert code == 2 and "ersion: a version is a number from 1" in document["error"]["message"]


def test_status(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(capsys, "status", str(remote))
    assert code == 0 and (document["head"], document["anchors"], document["deltas"]) == (3, [1, 3], [2, 3, 4])
    assert [(each["receiver"], each["version"], each["lag"]) for each in document["receivers"]] == [
        ("rollout-1", 2, 1), ("rollout-2", 4, 0),
    ]  # fmt: skip
    told = text(capsys, "status", str(remote))
    assert "version 4 (eeeeeeee): prepared, staged by 1 receiver" in told and "of versions 1, 3" in told
    assert "rollout-1" in told


def test_prune(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry = text(capsys, "prune", str(remote), "--keep", "1", "-n", "--lease", "0s")
    assert "nothing was removed" in dry and "deltas of version" in dry
    # What the receiver needs that was seen lately.
    code, document = run(capsys, "prune", str(remote), "--keep", "1")
    assert code == 0 and document["outlived"] == [
        {"what": "version", "version": 2, "id": id_of(2), "objects": 3, "bytes": document["freed_bytes"]}
    ]
    assert document["receivers"][0] == {"receiver": "rollout-1", "version": 2}
    assert not (remote / manifest_key(Place(2, id_of(2)))).exists()
    assert (remote / f"acks/{Place(2, id_of(2))}/rollout-1.applied").exists()
    assert text(capsys, "prune", str(remote)).startswith(f"nothing to prune in {remote}\n")
    assert run(capsys, "prune", str(remote), "--keep", "0")[0] == 2
    assert run(capsys, "prune", str(remote), "--keep-within", "1x")[0] == 2
    (remote / "prune.json").write_bytes(b"another")
    code, document = run(capsys, "prune", str(remote))
    assert (code, document["error"]["class"], document["error"]["retryable"]) == (6, "ConflictError", True)


def test_prune_tells_each(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = text(capsys, "prune", str(remote), "--keep", "1", "--lease", "0s", "-v")
    assert told.startswith("removed ") and f"version        2  {id_of(2)[:8]}" in told


def test_verify_and_show(remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    third = str(remote.parent / "v3")
    assert run(capsys, "verify", third, "--remote", str(remote))[1]["matches"]
    assert run(capsys, "verify", third, "--remote", str(remote), "--version", "2")[0] == 1
    code, document = run(capsys, "verify", "--remote", str(remote), "--deep")
    assert code == 0 and document["checked_deltas"] == 2 and document["is_deep"]
    assert run(capsys, "show", f"{remote}@2", "--deep")[1]["version"]["version"] == 2
    assert run(capsys, "show", f"{remote}@1")[1]["files"]
    payload = remote / payload_key(Place(3, id_of(3)), 0)
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    assert run(capsys, "verify", "--remote", str(remote))[0] == 0
    code, document = run(capsys, "verify", "--remote", str(remote), "--deep")
    assert code == 4 and len(document["damages"]) == 1
    assert "1 fault" in text(capsys, "verify", "--remote", str(remote), "--deep")
    assert run(capsys, "show", f"{remote}@3", "--deep")[0] == 4


def test_what_push_publishes(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = tmp_path / "remote"
    source = shutil.copytree(tiny_pair[0], tmp_path / "source")
    for number in range(4):
        fresh_copy(tiny_pair[number % 2], source)
        push(source, remote, anchor_every=2)
    assert [each["has_anchor"] for each in run(capsys, "log", str(remote))[1]["versions"]] == [False, True, False, True]
    code, document = run(capsys, "verify", "--remote", str(remote), "--deep")
    assert code == 0 and (document["checked_deltas"], document["checked_anchors"]) == (3, 2)
    assert run(capsys, "verify", str(tiny_pair[1]), "--remote", str(remote))[0] == 0
    assert run(capsys, "show", f"{remote}@2", "--deep")[1]["changed_elements"] == 5
    code, document = run(capsys, "prune", str(remote), "--keep", "1", "--keep-within", "0s")
    assert [(each["what"], each["version"]) for each in document["outlived"]] == [("version", 3), ("version", 2)]
    assert run(capsys, "verify", "--remote", str(remote), "--deep")[0] == 0
    found = run(capsys, "status", str(remote))[1]
    assert (found["deltas"], found["anchors"], found["unknown"]) == ([4], [1, 3], [])


def test_receivers_go_on_beside_a_prune(
    tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is behind and was seen lately by deltas alone, one that nobody has seen and a new one by the anchor."""
    remote, source = tmp_path / "remote", tmp_path / "source"
    receivers = [tmp_path / name for name in ("seen", "unseen", "new")]
    for version in range(1, 8):
        push(fresh_copy(tiny_pair[version % 2], source), remote, anchor_every=3)
        if version == 5:
            pull(remote, receivers[0], receiver="seen")
            assert run(capsys, "verify", str(receivers[0]), "--remote", str(remote))[1]["reference"].startswith(
                "version 5"
            )
        if version == 2:
            pull(remote, receivers[1])
    assert [each["lag"] for each in run(capsys, "status", str(remote))[1]["receivers"]] == [2]
    code, document = run(capsys, "prune", str(remote), "--keep", "1", "--keep-within", "0s")
    assert code == 0 and (document["kept"], document["anchors"]) == ([6, 7], [4, 7])
    results = [pull(remote, receiver) for receiver in receivers]
    assert [result.version for result in results] == [7, 7, 7]
    assert results[0].downloaded_bytes < min(result.downloaded_bytes for result in results[1:])
    assert all(tree(receiver) == tree(tiny_pair[1]) for receiver in receivers)


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify"],
        ["verify", "--deep"],
        ["verify", "x", "--version", "1"],
        ["verify", "x", "--remote", "y", "--deep"],
        ["verify", "x", "--remote", "y", "--delta", "z"],
        ["verify", "--remote", "y", "--version", "1"],
        ["verify", "--against", "y"],
        ["show", ""],
    ],
)
def test_what_makes_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *arguments)[0] == 2


def test_numbers_for_people() -> None:
    assert [ranges(each) for each in ([], [3], [1, 2, 3], [1, 3, 4, 9])] == ["none", "3", "1 to 3", "1, 3 to 4, 9"]
    assert [duration(each) for each in (0, 119, 120, 7199, 7200, 172800)] == [
        "0 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "2 d",
    ]
