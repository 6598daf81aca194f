"""Models for slow tests, of a size that the environment says: DCR_MODEL_MB (16)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strategies import TensorData, write_checkpoint

MODEL_BYTES = int(os.environ.get("DCR_MODEL_MB", "16")) * 1_000_000
TENSORS, SHARDS = 16, 4

Elements = list[NDArray[np.uint16]]


def new_model(rng: np.random.Generator, model_bytes: int = MODEL_BYTES) -> Elements:
    count = model_bytes // TENSORS // 2
    return [(rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype("<u2") for _ in range(TENSORS)]


def train(model: Elements, rng: np.random.Generator, share: float) -> None:
    for tensor in model:
        tensor += (rng.random(len(tensor), np.float32) < share).astype("<u2")


def write(model: Elements, folder: Path) -> Path:
    tensors: dict[str, TensorData] = {
        f"layers.{number}.weight": ("BF16", (len(tensor),), tensor.tobytes()) for number, tensor in enumerate(model)
    }
    return write_checkpoint(folder, tensors, shards=SHARDS, sidecars={"config.json": b"{}"})
