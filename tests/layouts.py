"""Shards of ranks and layouts for tests, cut and described by NumPy, so that no code under test has a part in them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from strategies import TensorData, Tensors, shard_bytes

# In a layout's JSON: tensor, canonical offset, local offset, axes.
BoxMember = list[Any]
Cut = tuple[str, Sequence[int], Sequence[int]]


def array_of(tensor: TensorData) -> NDArray[Any]:
    """The elements of a tensor as unsigned integers; those of a packed one are bytes in a row."""
    dtype, shape, data = tensor
    elements = np.frombuffer(data, f"<u{DTYPES[dtype].width}")
    return elements if DTYPES[dtype].is_packed else elements.reshape(shape)


def part_of(tensor: TensorData, starts: Sequence[int], shape: Sequence[int]) -> TensorData:
    """The part of a tensor that begins at `starts`."""
    if tuple(shape) == tuple(tensor[1]):
        return tensor
    part = array_of(tensor)[tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))]
    return tensor[0], tuple(shape), part.tobytes()


def dcp_name(rank: int) -> str:
    """What PyTorch calls the shard of a rank, counted from 1."""
    return f"shard-{rank:05}-model-00001-of-00001.safetensors"


def dcp_metadata(offsets: Mapping[str, Any]) -> dict[str, str]:
    """The metadata that PyTorch writes where tensors begin at `offsets`."""
    info = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}


def write_dcp(root: Path, tensors: Tensors, ranks: Sequence[Sequence[Cut]]) -> Path:
    """Write, for each rank, the parts (tensor, where it begins, shape) of `tensors` that it holds."""
    root.mkdir()
    for rank, cuts in enumerate(ranks, 1):
        parts = {name: part_of(tensors[name], starts, shape) for name, starts, shape in cuts}
        metadata = dcp_metadata({name: starts for name, starts, _ in cuts})
        (root / dcp_name(rank)).write_bytes(shard_bytes(parts, metadata))
    return root


def cut_rows(name: str, shape: Sequence[int], ranks: int) -> list[Cut]:
    """A tensor's rows dealt to ranks as FSDP does: the same number to each, and what is left to the last ones."""
    rows = -(-shape[0] // ranks)
    starts = [min(rank * rows, shape[0]) for rank in range(ranks)]
    return [(name, (start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:])) for start in starts]


def form(tensor: TensorData) -> dict[str, Any]:
    """A tensor's dtype and shape, as a layout's JSON has them."""
    return {"dtype": tensor[0], "shape": list(tensor[1])}


def local(tensor: TensorData, boxes: Sequence[BoxMember], **more: Any) -> dict[str, Any]:
    """A local tensor, as a layout's JSON has it."""
    return {**form(tensor), "boxes": list(boxes), **more}


def layout_document(tensors: Tensors, shards: Mapping[str, Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A layout of canonical `tensors` whose local ones are described already."""
    forms = {name: form(tensor) for name, tensor in tensors.items()}
    return {"format": "dcr-layout-1", "requires": [], "tensors": forms, "shards": shards, **more}


def layout_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


def run_world(out: Path, world: int) -> Path:
    """Have PyTorch write what tests/dcp_world.py says, in a world of so many processes; skip without PyTorch."""
    pytest.importorskip("torch")
    program = Path(__file__).with_name("dcp_world.py")
    done = subprocess.run(
        [sys.executable, program, out, str(world)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out
