"""What a rank of Megatron-Core runs: the mapping classes of megatron-bridge fill its local tensors, and read them back.

It knows nothing of dcr. Arguments: rank, ranks, a folder. There, cases.json says what to run, and local-RANK.npz is
what came out. Elements are integers, so that each is another one.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import mpu

PARENTS = ("bridge", "bridge.models", "bridge.models.conversion", "bridge.utils")


def load_mappings() -> Any:
    """The module of the mapping classes alone: what is around it needs packages of CUDA."""
    [site] = [Path(place) for place in sys.path if (Path(place) / "megatron" / "bridge").is_dir()][:1]
    for name in PARENTS:
        parent = types.ModuleType(f"megatron.{name}")
        parent.__path__ = [str(site / "megatron" / name.replace(".", "/"))]
        sys.modules[parent.__name__] = parent
    stub: Any = types.ModuleType("megatron.bridge.utils.common_utils")
    stub.extract_expert_number_from_param = lambda name: int(name.rpartition("weight")[2])
    sys.modules[stub.__name__] = stub
    mappings: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    mappings.get_module_and_param_from_name = lambda module, name: (module, module.weight)
    return mappings


def module_of(case: dict[str, Any]) -> Any:
    """A module of the class that the mapping looks for, with a weight of the local shape."""
    module: Any = type(case["module"], (torch.nn.Module,), {})()
    module.config = types.SimpleNamespace(**case["config"])
    module.weight = torch.nn.Parameter(torch.full(case["local"], -1, dtype=torch.int32), requires_grad=False)
    return module


def main(rank: int, size: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    mpu.initialize_model_parallel(tensor_model_parallel_size=size, expert_tensor_parallel_size=size)
    # The number of the device that a tensor on a CPU has.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: None
    mappings = load_mappings()
    cases = json.loads((folder / "cases.json").read_text())
    dense = np.load(folder / "dense.npz")
    found = {}
    for name, case in cases.items():
        keys = case["keys"]
        arrays = {key: torch.from_numpy(dense[f"{name}/{key}"]) for key in keys}
        given: Any = arrays if len(keys) > 1 else arrays[keys[0]]
        names: Any = {key: key for key in keys} if len(keys) > 1 else {"hf_param": keys[0]}
        mapping = getattr(mappings, case["class"])(case["parameter"], **names)
        module = module_of(case)
        local = mapping.hf_to_megatron(given, module).contiguous()
        found[f"{name}/local"] = local.numpy()
        if case["is_read_back"]:
            for key, each in mapping.megatron_to_hf(local, module).items():
                found[f"{name}/{key}"] = each.numpy()
    np.savez(folder / f"local-{rank}.npz", **found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
