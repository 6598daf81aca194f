"""Live receivers of loaders that nobody here wrote, transformers' and vLLM's: after each of 20 steps of training every
parameter and buffer is what a fresh load of the target gives.

vLLM needs an environment of its own, which DCR_TEST_VLLM names; test_layout_vllm_real.py says how it is made. It needs
what dcr needs besides: pip install blake3 fsspec zstandard.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli import diff
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.delta.delta import open_delta
from dcr_cli.live import Receiver, content_of
from live_modules import STRANGE, addresses, held, weights_in

PYTHON = os.environ.get("DCR_TEST_VLLM")
ROOT = Path(__file__).parents[2]
STEPS = 20
SECONDS = 1800
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
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 260}

pytestmark = pytest.mark.filterwarnings("ignore")


def make_model(root: Path, name: str) -> Path:
    """A small model of random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    options = GPT2 if name == "gpt2" else {**SMALL, **MODELS[name]}
    config = transformers.AutoConfig.for_model(name, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(root, max_shard_size="50KB")
    return root


def make_later(root: Path, before: Path, seed: int, strange: Sequence[int] = STRANGE) -> Path:
    """A model a step later: of some tensors nothing, of others few elements or many, some of them strange."""
    shutil.copytree(before, root)
    random = np.random.default_rng(seed)
    for shard in open_checkpoint(root).shards:
        path, begin = root / shard.path, len(shard.header.raw)
        data = np.fromfile(path, np.uint8)
        for tensor in shard.header.tensors:
            elements = data[begin + tensor.begin : begin + tensor.end].view("<u2")
            share = random.choice([0.0, 0.01, 0.2])
            elements ^= (random.random(len(elements)) < share).astype("<u2") * np.uint16(random.integers(1, 8))
            if share and strange:
                elements[random.integers(0, len(elements), 3)] = random.choice(strange, 3)
        data.tofile(path)
    return root


def make_steps(
    root: Path, name: str, encoding: str, steps: int = STEPS, strange: Sequence[int] = STRANGE
) -> tuple[list[Path], list[Path]]:
    checkpoints, deltas = [make_model(root / "step-0", name)], []
    for number in range(1, steps + 1):
        checkpoints.append(make_later(root / f"step-{number}", checkpoints[-1], number, strange))
        deltas.append(root / f"delta-{number}")
        diff(checkpoints[-2], checkpoints[-1], deltas[-1], encoding=encoding, jobs=1)
    return checkpoints, deltas


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_transformers(tmp_path: Path, name: str) -> None:
    """Its loader makes a new model; here it makes one of what it is given, and the old one gets its bits."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    checkpoints, deltas = make_steps(tmp_path, name, "auto")
    config = transformers.AutoConfig.from_pretrained(checkpoints[0])

    kind = type(transformers.AutoModelForCausalLM.from_config(config))

    def fresh(weights: Any) -> Any:
        return kind.from_pretrained(None, config=config, state_dict=dict(weights), dtype=torch.bfloat16)

    module = fresh(weights_in(checkpoints[0]))

    def load(weights: Any) -> None:
        made = fresh(weights)
        for mine, other in zip(module.parameters(), made.parameters(), strict=True):
            mine.data.copy_(other.data)

    before = addresses(module)
    receiver = Receiver(module, load, checkpoint=checkpoints[0])
    for delta, target in zip(deltas, checkpoints[1:], strict=True):
        assert receiver.stage(delta).loaded == ()
        receiver.apply()
        assert held(module) == held(transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16))
        assert content_of([receiver.digest()]) == open_delta(delta).commit.target.content
    assert addresses(module) == before


needs_vllm = pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_VLLM names no Python with vLLM")


@needs_vllm
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_vllm(tmp_path: Path, name: str, tensor: int, pipeline: int) -> None:
    run_ranks(tmp_path, make_steps(tmp_path, name, "gap"), (tensor, pipeline), with_patches=False)


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_patches_of_vllm_agree(tmp_path: Path, name: str) -> None:
    """Its own function takes no NaNs, and writes through its loader; where it can, it comes to the same bits."""
    run_ranks(tmp_path, make_steps(tmp_path, name, "gap", 4, ()), (2, 1), with_patches=True)


def run_ranks(
    tmp_path: Path, steps: tuple[list[Path], list[Path]], sizes: tuple[int, int], *, with_patches: bool
) -> None:
    """Have each rank bring its model through all steps, and see that their shares are each target's content digest."""
    (checkpoints, deltas), (tensor, pipeline) = steps, sizes
    told = {
        "with_patches": with_patches,
        "sizes": [tensor, pipeline],
        "checkpoints": list(map(str, checkpoints)),
        "deltas": list(map(str, deltas)),
        "may_lack": ["*"] if pipeline > 1 else [],
    }
    (tmp_path / "told.json").write_text(json.dumps(told))
    paths = [ROOT, ROOT / "kernels", ROOT / "tests", ROOT / "tests" / "slow"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        ranks = [
            subprocess.Popen(
                [str(PYTHON), str(ROOT / "tests/slow/vllm_live_rank.py"), str(rank), str(tmp_path)],
                stdout=output,
                stderr=output,
                env=environment,
            )
            for rank in range(tensor * pipeline)
        ]
        try:
            assert [rank.wait(SECONDS) for rank in ranks] == [0] * len(ranks), log.read_text()[-4000:]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    shares = [pickle.loads((tmp_path / f"shares-{rank}").read_bytes()) for rank in range(len(ranks))]
    for number, delta in enumerate(deltas):
        assert content_of([each[number] for each in shares]) == open_delta(delta).commit.target.content
