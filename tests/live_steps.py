"""Steps of training of models that transformers makes and saves, for tests of live receivers against loaders that
nobody here wrote."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli import diff
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from live_modules import STRANGE

STEPS = 20
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def make_model(root: Path, options: Mapping[str, Any]) -> Path:
    """A small model of random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(root, max_shard_size="50KB")
    return root


def make_later(root: Path, before: Path, seed: int, strange: Sequence[int] = STRANGE) -> Path:
    """A model a step later: of some tensors nothing, of others few elements or many; all of the strange ones are among
    what is new."""
    shutil.copytree(before, root)
    random, planted = np.random.default_rng(seed), set[int]()
    for shard in open_checkpoint(root).shards:
        path, begin = root / shard.path, len(shard.header.raw)
        data = np.fromfile(path, np.uint8)
        for tensor in shard.header.tensors:
            elements = data[begin + tensor.begin : begin + tensor.end].view("<u2")
            share = random.choice([0.0, 0.01, 0.2])
            old = elements.copy()
            elements ^= (random.random(len(elements)) < share).astype("<u2") * np.uint16(random.integers(1, 8))
            if share and strange:
                elements[random.integers(0, len(elements), 3)] = random.choice(strange, 3)
            planted.update(elements[elements != old].tolist())
        data.tofile(path)
    assert planted.issuperset(strange)
    return root


def make_steps(
    root: Path, options: Mapping[str, Any], encoding: str, steps: int = STEPS, strange: Sequence[int] = STRANGE
) -> tuple[list[Path], list[Path]]:
    """The checkpoints of a model before and after each step, and the delta of each."""
    checkpoints, deltas = [make_model(root / "step-0", options)], []
    for number in range(1, steps + 1):
        checkpoints.append(make_later(root / f"step-{number}", checkpoints[-1], number, strange))
        deltas.append(root / f"delta-{number}")
        diff(checkpoints[-2], checkpoints[-1], deltas[-1], encoding=encoding, jobs=1)
    return checkpoints, deltas
