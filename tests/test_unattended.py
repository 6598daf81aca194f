"""Push and pull as cron, timers and containers run them: with no environment, beside each other, stopped, held back."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.store import opening
from dcr_cli.store.backend import Backend
from published import build_all
from receivers import tree
from store_contract import Clock
from store_wrappers import Wrapped, wrapping
from strategies import write_tiny_steps


@dataclass
class Interlude:
    """What is run before the first request to a store that is meant."""

    is_meant: Callable[[str, str], bool]
    run: Callable[[], object]
    is_over: bool = False

    def called(self, name: str, key: str) -> None:
        if not self.is_over and self.is_meant(name, key):
            self.is_over = True
            self.run()

    def between(self) -> AbstractContextManager[None]:
        """Meanwhile it comes between the requests of whatever runs."""
        return wrapping(lambda backend: _Interrupted(backend, self))


class _Interrupted(Wrapped):
    def __init__(self, backend: Backend, interlude: Interlude) -> None:
        super().__init__(backend)
        self.called = interlude.called  # type: ignore[method-assign]


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 2)


@pytest.fixture
def remote(steps: list[Path], tmp_path: Path) -> Path:
    """A remote of two versions."""
    for step in steps:
        assert main(["push", str(step), str(tmp_path / "remote"), "-q"]) == 0
    return tmp_path / "remote"


@pytest.mark.parametrize("home", [None, "", "/nonexistent"])
def test_an_empty_environment_is_enough(home: str | None, steps: list[Path], tmp_path: Path) -> None:
    """As `env -i`, at the root, with nothing on standard input, in no locale."""
    environment = {"PATH": os.defpath} | ({"HOME": home} if home is not None else {})
    # Where dcr is not installed, this is how it is found.
    environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    remote, receiver = tmp_path / "remote-é", tmp_path / "receiver-é"
    for arguments in (("push", steps[0], remote), ("pull", remote, receiver)):
        ended = subprocess.run(
            [sys.executable, "-m", "dcr_cli", *arguments],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
    assert tree(receiver) == tree(steps[0])


def test_no_news_is_one_line_and_quiet_is_none(
    steps: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote, receiver = tmp_path / "remote", tmp_path / "receiver"
    push, pull = ["push", str(steps[0]), str(remote)], ["pull", str(remote), str(receiver)]
    assert main(push) == main(pull) == 0
    assert f"published: version 1 of {remote}\n" in capsys.readouterr().out
    assert main(push) == 0
    assert capsys.readouterr() == (f"nothing to publish: {remote} is at this state, version 1\n", "")
    assert main(pull) == 0
    assert capsys.readouterr() == (f"already there: {receiver} is at version 1\n", "")
    push[1] = str(steps[1])
    for arguments in (push, push, pull, pull):
        assert main([*arguments, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert tree(receiver) == tree(steps[1])


def test_what_overlaps_is_told_at_once_who_is_there(
    remote: Path, steps: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one runs while the first one is between two requests, and would wait for ever if it waited."""
    receiver = tmp_path / "receiver"
    pull, push = ["pull", str(remote), str(receiver)], ["push", str(steps[0]), str(remote)]
    for arguments, meant in ((pull, "read"), (push, "write")):
        codes: list[int] = []
        overlap = functools.partial(run_into, codes, arguments)
        interlude = Interlude(functools.partial(is_payload, meant), overlap)
        with interlude.between():
            assert main(arguments) == 0
        assert codes == [6]
        told = capsys.readouterr().err
        assert f"another dcr holds it: process {os.getpid()} on " in told and "hint: try again later" in told
    assert tree(receiver) == tree(steps[1])


def run_into(codes: list[int], arguments: list[str]) -> None:
    codes.append(main(arguments))


def is_payload(meant: str, name: str, key: str) -> bool:
    return name == meant and "/payloads/" in key


def is_last(countdown: Iterator[int], name: str, key: str) -> bool:
    return next(countdown) == 0


def stopped_at_every_call(run: Callable[[int], tuple[list[str], Callable[[], None]]]) -> int:
    """Send SIGTERM at request 0, 1, 2, ... of a command, and run it again: after how many requests it was done.

    `run` sets a place up and returns the command, and what has to be so after the second run.
    """
    for number in range(200):
        arguments, check = run(number)
        terminate = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
        interlude = Interlude(functools.partial(is_last, itertools.count(-number)), terminate)
        with interlude.between():
            code = main(arguments)
        if not interlude.is_over:
            assert code == 0
            return number
        assert code == 143
        assert main(arguments) == 0
        check()
    raise AssertionError("it never ends")


def test_what_sigterm_leaves_of_a_pull_the_next_one_finishes(
    remote: Path, steps: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(number: int) -> tuple[list[str], Callable[[], None]]:
        receiver = tmp_path / f"receiver-{number}"

        def check() -> None:
            assert tree(receiver) == tree(steps[1])

        return ["pull", str(remote), str(receiver)], check

    assert stopped_at_every_call(run) > 5
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"dcr: stopped: by signal SIGTERM; {tmp_path / 'receiver-0'} is as it was"
    assert set(told[1::2]) == {"hint: run the same command again"}


def test_what_sigterm_leaves_of_a_push_the_next_one_finishes(steps: list[Path], tmp_path: Path) -> None:
    def run(number: int) -> tuple[list[str], Callable[[], None]]:
        place = tmp_path / str(number)
        place.mkdir()
        remote, baseline = place / "remote", str(place / "baseline")
        assert main(["push", str(steps[0]), str(remote), "--baseline", baseline, "-q"]) == 0

        def check() -> None:
            assert build_all(remote, place / "scratch") == [tree(step) for step in steps]

        return ["push", str(steps[1]), str(remote), "--baseline", baseline, "-q"], check

    assert stopped_at_every_call(run) > 5


def test_a_limit_holds(
    remote: Path, steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten thousand bytes a second, by a clock that only waiting moves, but for the second that it may be ahead."""
    commands = {
        ("push", str(steps[0]), str(tmp_path / "other"), "--baseline", str(tmp_path / "b")): "uploaded_bytes",
        ("anchor", str(steps[1]), str(remote)): "uploaded_bytes",
        ("pull", str(remote), str(tmp_path / "receiver")): "downloaded_bytes",
        ("verify", "--remote", str(remote), "--deep"): "checked_bytes",
    }
    for arguments, counted in commands.items():
        clock = Clock()
        monkeypatch.setattr(opening, "Patience", clock.patience)
        assert main([*arguments, "--limit-rate", "10k", "--json"]) == 0
        seconds = json.loads(capsys.readouterr().out)[counted] / 10_000
        assert seconds > 2 and clock.now > seconds - 1, arguments


def test_who_only_looks_is_not_kept_waiting(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing listens: ten seconds before a screen, two minutes for what runs by itself or is worth a wait."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        looks = [["log", url], ["status", url], ["show", f"{url}@1"]]
        works = [
            ["show", f"{url}@1", "--deep"],
            ["verify", "--remote", url],
            ["pull", url, str(tmp_path / "receiver")],
            ["push", str(steps[0]), url],
            ["commit", url],
            ["prune", url],
        ]
        for arguments in looks + works:
            clock = Clock()
            monkeypatch.setattr(opening, "Patience", clock.patience)
            assert main([*arguments, "--json"]) == 7, arguments
            assert json.loads(capsys.readouterr().out)["error"]["retryable"] is True
            assert (5 < clock.now <= 10) if arguments in looks else (60 < clock.now <= 120), arguments


def test_json_is_one_document_whatever_is_asked_of_a_remote(
    remote: Path, steps: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a hook prints is no part of it. The other commands are in test_cli.py."""
    receiver = tmp_path / "receiver"
    for arguments in (
        ["push", steps[0], remote, "-n"],
        ["pull", remote, receiver, "-n"],
        ["pull", remote, receiver, "--exec", "echo noise"],
        ["pull", remote, receiver],
        ["pull", remote, receiver, "--version", "1"],
        ["verify", receiver, "--remote", remote, "--version", "1"],
        ["verify", "--remote", remote],
        ["verify", "--remote", remote, "--deep"],
        ["show", f"{remote}@1"],
        ["show", f"{remote}@2", "--deep"],
        ["prune", remote, "-n"],
        ["log", remote, "--all"],
    ):
        assert main([*map(str, arguments), "--json"]) == 0, arguments
        out, err = capfd.readouterr()
        assert json.loads(out)["command"] == arguments[0] and out.count("\n") == 1
        assert err == ("noise\n" if "--exec" in arguments else "")
