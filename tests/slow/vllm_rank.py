"""One rank of vLLM on a processor, without its engine: it loads checkpoints with vLLM's own loaders and saves what it
holds. Each line of its input is a command, in JSON; each gets a line as its answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_DIST_IDENT"] = "dcr"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(rank: int, ranks: int, meeting: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.accelerator.empty_cache = lambda: None
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    is_started = False
    for line in sys.stdin:
        command = json.loads(line)
        config = config_of(command["model"], ranks)
        with set_current_vllm_config(config):
            if not is_started:
                init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
                initialize_model_parallel(ranks, 1)
                is_started = True
            model = empty_model(config)
            if command["from"] is None:
                load_checkpoint(model, Path(command["model"]))
            else:
                load_sharded_state(model, config, command["from"])
            save(model, command["to"])
        print("done", file=answers, flush=True)


def config_of(model: str, ranks: int, stages: int = 1) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        tokenizer=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()


def empty_model(config: Any) -> Any:
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config=config, model_config=config.model_config)


def load_checkpoint(model: Any, folder: Path) -> None:
    """As the engine does from Hugging Face's files."""
    from safetensors.torch import load_file

    model.load_weights(item for path in sorted(folder.glob("*.safetensors")) for item in load_file(path).items())


def load_sharded_state(model: Any, config: Any, folder: str) -> None:
    """As the engine does from files of its own."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    config.model_config.model_weights = folder
    ShardedStateLoader(LoadConfig(load_format="sharded_state")).load_weights(model, config.model_config)


def save(model: Any, folder: str) -> None:
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    Path(folder).mkdir(parents=True, exist_ok=True)
    ShardedStateLoader.save_model(model, folder, max_size=30_000)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
