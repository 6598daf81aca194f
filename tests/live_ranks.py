"""Ranks of engines that nobody here wrote, each a process of an environment of its own whose model is a live receiver:
starting them, and what each of them does. What they are told is in a file of JSON; each leaves its shares of every
step."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr_cli.delta.delta import open_delta
from dcr_cli.live import Receiver, Shares, content_of
from live_modules import addresses, held

ROOT = Path(__file__).parents[1]
SECONDS = 1800

Bits = dict[str, bytes]
Steps = tuple[Sequence[Path], Sequence[Path]]
Told = Mapping[str, Any]


def run_ranks(folder: Path, steps: Steps, command: Sequence[str], *, ranks: int, told: Told) -> None:
    """Have each rank bring its model through all steps, and see that their shares are each target's content digest.

    A rank is `command`, given its number and the folder, in which all of them find what they are told.
    """
    checkpoints, deltas = (list(map(str, paths)) for paths in steps)
    (folder / "told.json").write_text(json.dumps({**told, "checkpoints": checkpoints, "deltas": deltas}))
    paths = [ROOT, ROOT / "kernels", ROOT / "tests", ROOT / "tests" / "slow"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as output:
        running = [
            subprocess.Popen([*command, str(rank), str(folder)], stdout=output, stderr=output, env=environment)
            for rank in range(ranks)
        ]
        try:
            assert [each.wait(SECONDS) for each in running] == [0] * ranks, log.read_text()[-4000:]
        finally:
            for each in running:
                each.kill()
                each.wait()
    shares = [pickle.loads((folder / f"shares-{rank}").read_bytes()) for rank in range(ranks)]
    for number, delta in enumerate(deltas):
        assert content_of([each[number] for each in shares]) == open_delta(delta).commit.target.content


def told_in(folder: Path) -> tuple[Told, Steps]:
    """What the ranks of a folder are told, and the steps that they are to go."""
    told: Told = json.loads((folder / "told.json").read_bytes())
    return told, (list(map(Path, told["checkpoints"])), list(map(Path, told["deltas"])))


def follow(
    receiver: Receiver, module: Any, steps: Steps, fresh: Callable[[Path], Any]
) -> Iterator[tuple[Bits, Shares]]:
    """Bring a module through all steps; after each it has to be, where it lies, what `fresh` loads of the target.

    Gives its bits, and its shares, after each step.
    """
    (_, *targets), deltas = steps
    before, old = addresses(module), held(module)
    for delta, target in zip(deltas, targets, strict=True):
        assert receiver.stage(delta).loaded == (), "something goes through the loader"
        assert held(module) == old, "staging has changed something"
        receiver.apply()
        old, expected = held(module), held(fresh(target))
        wrong = [name for name in expected if old.get(name) != expected[name]]
        assert old == expected, f"after {delta.name}: {wrong}"
        assert addresses(module) == before
        yield old, receiver.digest()


def leave(folder: Path, rank: int, shares: Sequence[Shares]) -> None:
    """Leave the shares of all steps to whoever has started the ranks."""
    (folder / f"shares-{rank}").write_bytes(pickle.dumps(list(shares)))
