"""One of two ranks of an engine, in a process of its own, that is told things as SGLang tells them: what came of each.

Which it is told, by test_serving_ranks.py, is the same for both, but for what fails on one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dcr_cli.errors import DcrError, TransportError
from dcr_cli.live import Member
from dcr_cli.live.bits import HostPatch
from dcr_cli.serving.sglang import load, message
from live_modules import Engine, held, loaded


def main(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'meeting'}"
    # Whoever waits for one that does not come fails long before the test does.
    torch.distributed.init_process_group("gloo", store, timedelta(seconds=30), 2, rank)
    said = json.loads((folder / "told.json").read_text())
    model = loaded(lambda: Engine(rank, 2), Path(said["checkpoints"][0]))
    wanted = [held(loaded(lambda: Engine(rank, 2), Path(path))) for path in said["checkpoints"]]
    told = []
    for step in said["steps"]:
        undo = FAILURES[step["fails"]](model) if step.get("fails") and rank == step.get("rank", 1) else None
        infos = step.get("info", {})
        info = infos[rank] if isinstance(infos, list) else infos
        try:
            load(model, message(step["call"], **info))
            found = "done"
        except DcrError as error:
            found = f"{type(error).__name__}: {error}"
        except Exception as error:
            found = f"raw {type(error).__name__}: {error}"
        if undo is not None:
            undo()
        now = held(model)
        told.append([found, wanted.index(now) + 1 if now in wanted else 0])
    (folder / f"found-{rank}.json").write_text(json.dumps(told))
    # Its threads would end the process otherwise, if they are in the middle of something.
    torch.distributed.destroy_process_group()


def _other_bits(model: Any) -> Callable[[], None]:
    kept = model.norm.detach().clone()
    model.norm.data[0] += 1

    def undo() -> None:
        model.norm.data.copy_(kept)

    return undo


def _patched(owner: Any, name: str, found: Callable[..., Any]) -> Callable[[], None]:
    kept = getattr(owner, name)
    setattr(owner, name, found)
    return lambda: setattr(owner, name, kept)


def _stop_writing(model: Any) -> Callable[[], None]:
    write, count = HostPatch.write, []

    def stop(patch: HostPatch) -> None:
        count.append(patch)
        if len(count) == 2:
            raise MemoryError("no more")
        write(patch)

    return _patched(HostPatch, "write", stop)


def _no_remote(model: Any) -> Callable[[], None]:
    stage = Member.stage_next

    def fail(member: Member) -> Any:
        if member.version == 3:
            raise TransportError("remote", "did not answer")
        return stage(member)

    return _patched(Member, "stage_next", fail)


FAILURES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "other bits": _other_bits,
    "stop writing": _stop_writing,
    "no remote": _no_remote,
}

if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
