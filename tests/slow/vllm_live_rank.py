"""One rank of vLLM on a processor, whose model is a live receiver: after each delta it has to be, bit for bit, what
vLLM's own loader makes of the target. What it is told is in a file of JSON; it leaves its shares of every step."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from vllm_rank import config_of, empty_model, load_checkpoint

Bits = dict[str, bytes]


def main(rank: int, folder: Path) -> None:
    import torch

    torch.accelerator.empty_cache = lambda: None
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    told = json.loads((folder / "told.json").read_bytes())
    tensor, pipeline = told["sizes"]
    base, *targets = map(Path, told["checkpoints"])
    config = config_of(str(base), tensor, pipeline)
    with set_current_vllm_config(config):
        meeting = f"file://{folder / 'meeting'}"
        init_distributed_environment(tensor * pipeline, rank, meeting, rank, "gloo")
        initialize_model_parallel(tensor, pipeline)
        module = loaded(config, base)
        run(module, told, lambda number: loaded(config, targets[number]), folder / f"shares-{rank}")


def loaded(config: Any, folder: Path) -> Any:
    config.compilation_config.static_forward_context.clear()
    model = empty_model(config)
    load_checkpoint(model, folder)
    return model


def run(module: Any, told: dict[str, Any], fresh: Any, shares: Path) -> None:
    from dcr_cli.live import Receiver
    from live_modules import addresses, held

    before, old = addresses(module), held(module)
    receiver = Receiver(module, checkpoint=told["checkpoints"][0], may_lack=told["may_lack"], jobs=1)
    found = []
    for number, delta in enumerate(told["deltas"]):
        receiver.stage(delta)
        assert held(module) == old, "staging has changed something"
        receiver.apply()
        old, expected = held(module), held(fresh(number))
        wrong = [name for name in expected if old.get(name) != expected[name]]
        assert old == expected, f"after step {number}: {wrong}"
        found.append(receiver.digest())
    assert addresses(module) == before
    shares.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
