"""A world of processes in which PyTorch shards tensors, takes a step of AdamW and writes both states. Run as a program.

    python dcp_world.py OUT WORLD

    OUT/before/sharded     the shards of all ranks, by torch.distributed.checkpoint
    OUT/before/joined      what torch makes of them
    OUT/before/gathered    what all ranks together hold, gathered and written by safetensors
    OUT/after/...          the same after the step

All is bfloat16, made from float32 masters that depend on the names alone, so that worlds of any size hold the same.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# How a tensor lies in a world of two dimensions: which axis is cut by the first and by the second one, None by neither.
Cut = tuple[int | None, int | None]
TENSORS: dict[str, tuple[tuple[int, ...], Cut]] = {
    "model.embed_tokens.weight": ((37, 10), (0, None)),
    "model.layers.0.mlp.down_proj.weight": ((9, 22), (None, 1)),
    "model.layers.0.mlp.gate_proj.weight": ((22, 9), (0, 0)),
    "model.layers.0.mlp.experts": ((5, 7, 6), (1, 2)),
    "model.layers.0.self_attn.q_proj.weight": ((16, 10), (0, 1)),
    "model.layers.0.self_attn.q_proj.bias": ((3,), (0, None)),
    "model.norm.weight": ((10,), (None, None)),
    "model.scale": ((), (None, None)),
}


def main(out: Path, world: int) -> None:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as scratch:
        spawn(_rank, args=(world, str(Path(scratch) / "store"), str(out)), nprocs=world)  # type: ignore[no-untyped-call]


def _rank(rank: int, world: int, store: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        shape = (world // 2, 2) if world % 2 == 0 else (world, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        masters = {name: _shard(_random(name, size), mesh, cut) for name, (size, cut) in TENSORS.items()}
        _write(masters, Path(out) / "before")
        for name, master in masters.items():
            master.requires_grad_()
            master.grad = _shard(_random(f"{name} gradient", TENSORS[name][0]), mesh, TENSORS[name][1])
        torch.optim.AdamW(masters.values(), lr=1e-4, foreach=False).step()
        _write({name: master.detach() for name, master in masters.items()}, Path(out) / "after")
    finally:
        dist.destroy_process_group()


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _shard(full: torch.Tensor, mesh: Any, cut: Cut) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if axis is None else Shard(axis) for axis in cut]
    # Every rank has all of it already.
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def _write(masters: dict[str, Any], out: Path) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import DTensor

    state = {}
    for name, master in masters.items():
        rounded = master.to_local().to(torch.bfloat16)
        # Of uneven parts DTensor cannot tell the whole.
        state[name] = DTensor.from_local(
            rounded, master.device_mesh, master.placements, shape=master.shape, stride=master.stride()
        )
    files = {name: 1 + number % 2 for number, name in enumerate(state)}
    sharded, joined, gathered = (str(out / name) for name in ("sharded", "joined", "gathered"))
    save(
        state,
        storage_writer=HuggingFaceStorageWriter(sharded, fqn_to_index_mapping=files, save_distributed=True),
    )
    whole = {name: tensor.full_tensor().contiguous() for name, tensor in state.items()}
    dist.barrier()
    if dist.get_rank() == 0:
        Path(joined).mkdir()
        consolidate_safetensors_files(sharded, joined, files)
        Path(gathered).mkdir()
        save_file(whole, f"{gathered}/model.safetensors", metadata={"format": "pt"})
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
