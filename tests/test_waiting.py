"""What is waited for, and who hears of it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from dcr_cli import waiting
from dcr_cli.cli import main
from dcr_cli.errors import ConflictError, TransportError
from dcr_cli.publisher.part_waiting import Patience as PartPatience, too_late
from dcr_cli.publisher.quorum import Quorum
from dcr_cli.report.waits import Waits
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.store import Store
from dcr_cli.waiting import Wait
from store_contract import Clock
from store_wrappers import FailsCalls
from strategies import write_tiny_steps


def test_a_line_after_some_seconds_and_then_each_minute() -> None:
    lines: list[str] = []
    now = 0.0
    waits = Waits(lines.append, clock=lambda: now)
    for second in range(0, 180, 2):
        now = float(second)
        waits.hear(Wait("remote", "does not\nanswer", now, 300.0 - now))
    waits.hear(Wait("other", "is away", 7.0, -1.0))
    assert lines == [
        "waiting: remote: does not\\nanswer; waited for 6 s, for 294 s more at most\n",
        "waiting: remote: does not\\nanswer; waited for 66 s, for 234 s more at most\n",
        "waiting: remote: does not\\nanswer; waited for 126 s, for 174 s more at most\n",
        "waiting: other: is away; waited for 7 s, for 0 s more at most\n",
    ]


def test_a_remote_that_does_not_answer() -> None:
    clock, heard = Clock(), list[Wait]()
    store = Store(FailsCalls(MemoryBackend("waiting"), 1000), "test://remote", patience=clock.patience())
    with waiting.heard_by(heard.append), pytest.raises(TransportError):
        store.get("key", most_bytes=1)
    told = len(heard)
    assert {wait.what for wait in heard} == {"test://remote"}
    assert heard[0].waited_seconds == 0 and 100 < heard[-1].waited_seconds < 120
    assert all(wait.waited_seconds + wait.left_seconds == 120 for wait in heard)
    with pytest.raises(TransportError):
        store.get("key", most_bytes=1)
    assert len(heard) == told


def test_parts_that_do_not_come() -> None:
    clock, heard = Clock(), list[Wait]()
    store = Store(MemoryBackend("waiting"), "test://remote")
    patience = PartPatience(10.0, clock=lambda: clock.now, sleep=clock.sleep)
    with waiting.heard_by(heard.append), pytest.raises(ConflictError, match=r"1 of 2 parts, and time is up$"):
        patience.wait(lambda: None, lambda: too_late(store, "1 of 2 parts"))
    assert [heard[-1].what, heard[-1].facts] == ["test://remote", "1 of 2 parts"]


@pytest.mark.parametrize("option", [None, "-q", "--no-progress"])
def test_a_quorum_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str | None
) -> None:
    clock = Clock()
    quick = partial(Quorum, clock=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(import_module("dcr_cli.commit"), "Quorum", quick)
    remote, steps = tmp_path / "remote", write_tiny_steps(tmp_path, 2)
    main(["push", str(steps[0]), str(remote), "-q"])
    main(["push", str(steps[1]), str(remote), "-q", "--prepare"])
    capsys.readouterr()
    assert main(["commit", str(remote), "--quorum", "1", *([option] if option else [])]) == 6
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting: ")]
    if option is not None:
        assert not told
    else:
        assert told[0].startswith(f"waiting: {remote}: 0 of 1 receivers have staged version 2; waited for 6 s, for 89")
