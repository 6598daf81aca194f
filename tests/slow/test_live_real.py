"""Live receivers of loaders that nobody here wrote, transformers' and vLLM's: after each of 20 steps of training every
parameter and buffer is what a fresh load of the target gives.

vLLM needs an environment of its own, which DCR_TEST_VLLM names; test_layout_vllm_real.py says how it is made. It needs
what dcr and these tests need besides: pip install blake3 fsspec hypothesis zstandard.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.delta.delta import open_delta
from dcr_cli.live import Receiver, content_of
from live_modules import STRANGE, weights_in
from live_ranks import follow, run_ranks
from live_steps import SMALL, STEPS, make_steps

PYTHON = os.environ.get("DCR_TEST_VLLM")
RANK = Path(__file__).with_name("vllm_live_rank.py")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 260}

pytestmark = pytest.mark.filterwarnings("ignore")


def options_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **(GPT2 if name == "gpt2" else {**SMALL, **MODELS[name]})}


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_transformers(tmp_path: Path, name: str) -> None:
    """Its loader makes a new model; here it makes one of what it is given, and the old one gets its bits."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    checkpoints, deltas = make_steps(tmp_path, options_of(name), "auto")
    config = transformers.AutoConfig.from_pretrained(checkpoints[0])

    kind = type(transformers.AutoModelForCausalLM.from_config(config))

    def fresh(weights: Any) -> Any:
        return kind.from_pretrained(None, config=config, state_dict=dict(weights), dtype=torch.bfloat16)

    module = fresh(weights_in(checkpoints[0]))

    def load(weights: Any) -> None:
        made = fresh(weights)
        for mine, other in zip(module.parameters(), made.parameters(), strict=True):
            mine.data.copy_(other.data)

    def load_anew(target: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)

    receiver = Receiver(module, load, checkpoint=checkpoints[0])
    for delta, (_, shares) in zip(deltas, follow(receiver, module, (checkpoints, deltas), load_anew), strict=True):
        assert content_of([shares]) == open_delta(delta).commit.target.content


needs_vllm = pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_VLLM names no Python with vLLM")


@needs_vllm
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_vllm(tmp_path: Path, name: str, tensor: int, pipeline: int) -> None:
    run_vllm(tmp_path, name, (tensor, pipeline), with_patches=False)


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_patches_of_vllm_agree(tmp_path: Path, name: str) -> None:
    """Its own function takes no NaNs, and writes through its loader; where it can, it comes to the same bits."""
    run_vllm(tmp_path, name, (2, 1), with_patches=True)


def run_vllm(folder: Path, name: str, sizes: tuple[int, int], *, with_patches: bool) -> None:
    count, strange = (4, ()) if with_patches else (STEPS, STRANGE)
    steps = make_steps(folder, options_of(name), "gap", count, strange)
    tensor, pipeline = sizes
    told = {"sizes": sizes, "with_patches": with_patches, "may_lack": ["*"] if pipeline > 1 else []}
    run_ranks(folder, steps, [str(PYTHON), str(RANK)], ranks=tensor * pipeline, told=told)
