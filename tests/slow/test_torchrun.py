"""Parts under a real torchrun: a rank is killed, all are started again, and the version comes all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dcr_cli.push import push
from published import build_all, commits
from ranks import RANKS as RANKS_OF_SHARDS, canonical, write_canonical, write_layout
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


def run_ranks(folder: Path, text: str, ranks: int, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a program in so many ranks of torchrun, which starts all of them again once."""
    program = folder / "rank.py"
    program.write_text(text)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", *launcher, program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("call", [0, 3, 5, 7])
def test_a_rank_is_killed_and_all_start_again(tmp_path: Path, call: int) -> None:
    pytest.importorskip("torch")
    steps = write_tiny_steps(tmp_path, 2)
    remote = tmp_path / "remote"
    push(steps[0], remote)
    done = run_ranks(tmp_path, PROGRAM, RANKS, [str(call), steps[1], remote])
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert len(commits(remote)) == 2
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


# The same where each process writes its own shard to a folder of its own, and has that of the step before as its base.
SHARDS_PROGRAM = """
import os, sys
from contextlib import nullcontext
from pathlib import Path
from safetensors.numpy import save_file
from dcr_cli.cli import main
from ranks import canonical, path_of, rank_tensors
from store_wrappers import KillsAtCall, wrapping

call, disks, remote, layout = int(sys.argv[1]), *sys.argv[2:]
rank = int(os.environ["RANK"])
own = Path(disks) / str(rank)
for step in range(2):
    (own / f"step-{step}").mkdir(parents=True, exist_ok=True)
    save_file(rank_tensors(canonical(step), rank), own / f"step-{step}" / path_of(rank))
options = ["--part", "auto", "--attempt", "step-1", "--layout", layout, "--base-layout", layout, "--base"]
is_killed = (rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, "0")
with wrapping(lambda backend: KillsAtCall(backend, call, signal=9)) if is_killed else nullcontext():
    sys.exit(main(["push", str(own / "step-1"), remote, *options, str(own / "step-0"), "--timeout", "60s", "-j", "1"]))
"""


@pytest.mark.parametrize("call", [0, 4, 7])
def test_each_process_writes_its_own_shard(tmp_path: Path, call: int) -> None:
    pytest.importorskip("torch")
    dense = [write_canonical(tmp_path / f"dense-{step}", canonical(step)) for step in range(2)]
    remote, layout = tmp_path / "remote", write_layout(tmp_path)
    push(dense[0], remote)
    done = run_ranks(tmp_path, SHARDS_PROGRAM, RANKS_OF_SHARDS, [str(call), tmp_path / "disks", remote, layout])
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert build_all(remote, tmp_path / "scratch") == [tree(path) for path in dense]
