"""One rank of vLLM on a processor, whose model is a live receiver: after each delta it has to be, bit for bit, what
vLLM's own loader makes of the target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vllm_rank import config_of, empty_model, load_checkpoint

from dcr_cli.live import Receiver
from live_modules import held
from live_ranks import follow, leave, told_in


def main(rank: int, folder: Path) -> None:
    import torch

    torch.accelerator.empty_cache = lambda: None
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    told, steps = told_in(folder)
    checkpoints, _ = steps
    tensor, pipeline = told["sizes"]
    config = config_of(str(checkpoints[0]), tensor, pipeline)
    with set_current_vllm_config(config):
        meeting = f"file://{folder / 'meeting'}"
        init_distributed_environment(tensor * pipeline, rank, meeting, rank, "gloo")
        initialize_model_parallel(tensor, pipeline)
        module = loaded(config, checkpoints[0])
        other = loaded(config, checkpoints[0]) if told["with_patches"] else None
        receiver = Receiver(module, checkpoint=checkpoints[0], may_lack=told["may_lack"], jobs=1)
        found = []
        for number, (bits, shares) in enumerate(follow(receiver, module, steps, lambda path: loaded(config, path))):
            if other is not None:
                patch(other, *checkpoints[number : number + 2])
                assert held(other) == bits, f"vLLM's own patches make something else of step {number}"
            found.append(shares)
        leave(folder, rank, found)


def loaded(config: Any, folder: Path) -> Any:
    config.compilation_config.static_forward_context.clear()
    model = empty_model(config)
    load_checkpoint(model, folder)
    return model


def patch(module: Any, before: Path, target: Path) -> None:
    """Have vLLM change a model by its own function for patches in a checkpoint's coordinates."""
    import torch
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = []
    for path in sorted(target.glob("*.safetensors")):
        old = load_file(before / path.name)
        for name, tensor in load_file(path).items():
            bits, others = tensor.view(torch.int16).reshape(-1), old[name].view(torch.int16).reshape(-1)
            indices = torch.nonzero(bits != others).reshape(-1)
            if len(indices):
                values = tensor.reshape(-1)[indices]
                patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, indices))
    with torch.no_grad():
        load_checkpoint_weight_patches(module, patches)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
