"""Ranks of one engine, in processes of their own: whatever fails on one of them, none waits for it, and all fail
alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.errors import ConflictError, HookError, UsageError
from dcr_cli.serving.agreeing import Answer, Fault, Rank, ask_all, check_all, standing
from live_remotes import TrainedRemote

SCRIPT = Path(__file__).with_name("serving_rank.py")


def told(folder: Path, checkpoints: list[Path], steps: list[Any]) -> list[list[Any]]:
    """Tell two ranks all of these: for each what came of it, and which version's bits each holds then."""
    names = [str(path) for path in checkpoints]
    (folder / "told.json").write_text(json.dumps({"checkpoints": names, "steps": steps}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(folder)], env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    return [list(each) for each in zip(*found, strict=True)]


def test_all_ranks_do_it_or_none_does(tmp_path: Path) -> None:
    remote = TrainedRemote(tmp_path)
    for _ in range(3):
        remote.publish()
    good = {"remote": remote.url, "version": 1, "checkpoint": str(remote.versions[0]), "jobs": 1, "name": "engine"}
    init, finish = {"call": "init", "info": good}, {"call": "finish"}
    steps = [
        # What one cannot begin nobody has begun.
        ({**init, "fails": "other bits"}, "WrongBaseError: rank 1 of the engine, ", (1, 1)),
        ({"call": "update", "info": {"version": 2}}, "UsageError: rank 0 of the engine, dcr: is no receiver yet", None),
        (finish, "UsageError: rank 0 of the engine, dcr: is no receiver yet", None),
        (init, "done", (1, 1)),
        # What was begun goes on where it cannot be begun anew.
        (
            {"call": "init", "info": [good, {**good, "version": True}]},
            "UsageError: rank 1 of the engine, version",
            None,
        ),
        ({"call": "update", "info": [{"version": 2}, {}]}, "UsageError: rank 1 of the engine, message update", None),
        (finish, "UsageError: rank 0 of the engine: the update that was asked for last was not taken", (1, 1)),
        (
            {"call": "update", "info": [{"version": 2}, {"version": 3}]},
            "UsageError: engine: its ranks were told d",
            None,
        ),
        ({"call": "update", "info": {"version": 5}}, "done", None),
        (finish, "ConflictError: rank 0 of the engine, ", (1, 1)),
        ({"call": "update", "info": {"version": 4}}, "done", None),
        # A mixture is said on all of them, and finished; another update is refused by all.
        ({**finish, "fails": "stop writing"}, "HookError: rank 1 of the engine, dcr: MemoryError: no more; ", (2, 0)),
        ({"call": "update", "info": {"version": 2}}, "IncompleteError: rank 1 of the engine: holds a mixture", (2, 0)),
        ({**finish, "fails": "no remote"}, "TransportError: rank 1 of the engine, remote: did not answer; ", (3, 3)),
        ({"call": "init", "info": good}, "WrongBaseError: rank 0 of the engine, ", (3, 3)),
        (finish, "done", (4, 4)),
        (finish, "done", (4, 4)),
    ]
    found = told(tmp_path, remote.versions, [step for step, _, _ in steps])
    for (step, expected, versions), (one, other) in zip(steps, found, strict=True):
        assert one[0] == other[0], f"{step}: they do not fail alike"
        assert one[0].startswith(expected), step
        assert versions is None or (one[1], other[1]) == versions, step
    texts = [one[0] for one, _ in found]
    assert "@5: is not committed; all ranks are at version 1" in texts[9]
    assert texts[11].endswith("rank 0 is at version 2; rank 1 is at a mixture of versions 1 and 2")
    assert texts[13].endswith("all ranks are at version 3")
    said = sorted(path.name for path in Path(remote.url).glob("acks/*/*"))
    assert said == sorted(
        ["engine.rank-0.applied", "engine.rank-1.applied"] * 4 + ["engine.rank-0.staged", "engine.rank-1.staged"] * 3
    )


def test_what_ranks_say_of_each_other() -> None:
    fine = [Answer(0, "finish", 2), Answer(1, "finish", 2)]
    check_all(fine)
    assert standing(fine) == "all ranks are at version 2" and standing(fine[:1]) == "the module is at version 2"
    fault = Fault("ConflictError", "remote", "is busy", "try again")
    with pytest.raises(ConflictError, match=r"^rank 1 of the engine, remote: is busy; here$") as raised:
        check_all([fine[0], Answer(1, "finish", 2, fault=fault)], where="here")
    assert raised.value.hint == "try again"
    with pytest.raises(UsageError, match="told different things: finish, update"):
        check_all([fine[0], Answer(1, "update", 2)])

    def lost(answer: Answer) -> list[Answer]:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(HookError, match="rank 3 of the engine: cannot hear the other ranks: RuntimeError: connection"):
        ask_all(Rank(3, "", lost), fine[0])
