"""Parts under a real torchrun: a rank is killed, all are started again, and the version comes all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_cli.push import push
from published import build_all, commits
from receivers import tree
from strategies import write_tiny_steps

RANKS = 3
TESTS = Path(__file__).parents[1]
# What each rank runs; rank 1 of the first start is killed at a call to the store.
PROGRAM = """
import os, sys
from contextlib import nullcontext
from dcr_cli.cli import main
from store_wrappers import KillsAtCall, wrapping

call = int(sys.argv[1])
is_killed = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")
with wrapping(lambda backend: KillsAtCall(backend, call, signal=9)) if is_killed else nullcontext():
    sys.exit(main(["push", *sys.argv[2:], "--part", "auto", "--timeout", "60s", "-j", "1"]))
"""


@pytest.mark.parametrize("call", [0, 3, 5, 7])
def test_a_rank_is_killed_and_all_start_again(tmp_path: Path, call: int) -> None:
    pytest.importorskip("torch")
    steps = write_tiny_steps(tmp_path, 2)
    remote = tmp_path / "remote"
    push(steps[0], remote)
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *launcher, program, str(call), steps[1], remote],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert len(commits(remote)) == 2
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])
