"""Publishing and receiving with nothing between but a relay's dialect, and no store behind it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.commit import commit
from dcr_cli.log import log
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.status import status
from dcr_cli.verify_remote import verify_remote
from pushed import states
from receivers import tree
from relay_stand_in import StandIn, stand_in, until
from strategies import write_checkpoint


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with stand_in() as server:
        yield server


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    return [
        write_checkpoint(tmp_path / f"v{number}", state, shards=2, sidecars={"config.json": b"{}"})
        for number, state in enumerate(states(3), start=1)
    ]


def test_all_of_it(relay: StandIn, checkpoints: list[Path], tmp_path: Path) -> None:
    """Versions, one of them prepared, acknowledgements and quorums, and what looks at them."""
    relay.token = "word"
    options = {"token": "word"}
    baseline = tmp_path / "baseline"
    root = tmp_path / "r"
    assert push(checkpoints[0], relay.url, baseline=baseline, storage_options=options).version == 1
    assert push(checkpoints[1], relay.url, baseline=baseline, storage_options=options).version == 2
    assert pull(relay.url, root, storage_options=options, receiver="eu-1").version == 2
    push(checkpoints[2], relay.url, baseline=baseline, storage_options=options, prepare=True)
    assert pull(relay.url, root, storage_options=options, receiver="eu-1").staged == 3
    assert commit(relay.url, quorum=1, storage_options=options).version == 3
    assert pull(relay.url, root, storage_options=options, receiver="eu-1").version == 3
    assert tree(root) == tree(checkpoints[2])
    assert [each.version for each in log(relay.url, storage_options=options).versions] == [3, 2, 1]
    found = status(relay.url, storage_options=options)
    assert found.receivers is not None and [(each.receiver, each.version) for each in found.receivers] == [("eu-1", 3)]
    assert set(found.not_listed) == {"commits/", "versions/", "anchors/"}
    assert verify_remote(relay.url, deep=True, storage_options=options).matches
    names = {headers["dcr-receiver"] for _, _, headers in relay.requests if "dcr-receiver" in headers}
    assert names == {"eu-1"}


def test_of_two_that_publish_one_wins(relay: StandIn, checkpoints: list[Path], tmp_path: Path) -> None:
    push(checkpoints[0], relay.url, baseline=tmp_path / "a")
    push(checkpoints[0], relay.url, baseline=tmp_path / "b")
    assert push(checkpoints[1], relay.url, baseline=tmp_path / "a").version == 2
    assert push(checkpoints[2], relay.url, baseline=tmp_path / "b").version == 3
    assert push(checkpoints[2], relay.url, baseline=tmp_path / "a").kind == "same"
    assert [key for key in relay.objects if key.startswith("commits/")] == [
        f"commits/{number:010d}.json" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("fault", ["lose", "early close 503"])
def test_faults_of_any_request_of_a_push(
    relay: StandIn, checkpoints: list[Path], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published twice, and nothing is lost."""
    monkeypatch.setattr("dcr_cli.store.retry.Patience.__init__.__defaults__", _quick())
    push(checkpoints[0], relay.url, baseline=tmp_path / "baseline")
    first = dict(relay.objects)
    for number in range(100):
        baseline = shutil.copytree(tmp_path / "baseline", tmp_path / f"baseline-{number}")
        relay.objects = dict(first)
        relay.faults[:] = [*[""] * number, fault]
        assert push(checkpoints[1], relay.url, baseline=baseline).version == 2
        if relay.faults:
            break
        assert [key for key in relay.objects if key.startswith("commits/")][1:] == ["commits/0000000002.json"]
    assert number > 5
    pull(relay.url, tmp_path / "r")
    assert tree(tmp_path / "r") == tree(checkpoints[1])


def _quick() -> tuple[object, ...]:
    """What patience is by default, but without waits."""
    from dcr_cli.store.retry import Patience

    before = Patience.__init__.__defaults__
    assert before is not None
    return tuple(0.001 if value in (0.2, 15.0) else value for value in before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_who_follows_is_woken_and_ends_by_a_signal(
    relay: StandIn, checkpoints: list[Path], tmp_path: Path, number: int, code: int
) -> None:
    push(checkpoints[0], relay.url, baseline=tmp_path / "baseline")
    arguments = ["pull", relay.url, str(tmp_path / "r"), "--follow", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "dcr_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert json.loads(process.stdout.readline())["result"]["version"] == 1
            until(lambda: relay.waiting)
            push(checkpoints[1], relay.url, baseline=tmp_path / "baseline")
            assert json.loads(process.stdout.readline())["result"]["version"] == 2
            until(lambda: relay.waiting)
            began = time.monotonic()
            process.send_signal(number)
            assert process.wait(20) == code
            assert time.monotonic() - began < 3
            assert "stopped: by signal" in process.stderr.read()
        finally:
            process.kill()
    assert tree(tmp_path / "r") == tree(checkpoints[1])
    # Once for each time that there was something to wait for.
    waits = [key for method, key, headers in relay.requests if "prefer" in headers]
    assert waits[-1] == "commits/0000000003.json" and len(waits) < 12


def test_a_server_that_is_only_read_cannot_be_pushed_to(
    relay: StandIn, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relay.faults[:] = ["", *["page 405"] * 9]
    assert main(["push", str(checkpoints[0]), relay.url, "--baseline", str(tmp_path / "baseline")]) == 8
    told = capsys.readouterr().err
    assert "over HTTP a remote can only be read" in told and "a relay of it" in told
