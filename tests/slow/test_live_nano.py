"""Live receivers of nano-vllm's own loader, which fuses and slices: on each of its ranks, after each of 20 steps of
training, every parameter and buffer is what a fresh load of the target gives.

It needs an environment with it, which DCR_TEST_NANO_VLLM names by its Python; on a processor that is, in one that has
torch, transformers and what dcr and these tests need (blake3, fsspec, hypothesis, zstandard):

    pip install --no-deps nano-vllm-fork==20260210 xxhash
    DCR_TEST_NANO_VLLM=that/environment/bin/python scripts/test tests/slow/test_live_nano.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from live_ranks import run_ranks
from live_steps import SMALL, make_steps

PYTHON = os.environ.get("DCR_TEST_NANO_VLLM")
RANK = Path(__file__).with_name("nano_live_rank.py")
# Each of four ranks has heads of keys and values of its own, since nano-vllm has no replicas of them.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Its one class of models takes Qwen2's weights too: biases of queries, keys and values, and no norms of them.
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"model_type": "qwen3", "head_dim": 16},
    "tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "biased": {"model_type": "qwen2"},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_NANO_VLLM names no Python with nano-vllm"),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_nano_vllm(tmp_path: Path, name: str, ranks: int) -> None:
    """A rank alone holds all that any encoding needs; slices are decoded from gaps."""
    steps = make_steps(tmp_path, {**SMALL, **HEADS, **MODELS[name]}, "auto" if ranks == 1 else "gap")
    run_ranks(tmp_path, steps, [str(PYTHON), str(RANK)], ranks=ranks, told={"ranks": ranks})
