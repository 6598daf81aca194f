"""A vLLM server on a processor that is told to load again what a pull has patched: it answers as one that was started
on the target. test_layout_vllm_real.py says how vLLM's environment, which DCR_TEST_VLLM names, is made; to serve it
needs besides, and perhaps what else it names when it does not start: pip install --no-deps uvicorn h11 click httptools
watchfiles prometheus-fastapi-instrumentator python-multipart compressed-tensors loguru jmespath
model-hosting-container-standards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dcr_cli import pull, push
from dcr_cli.engine.engines import parse_reload
from dcr_cli.errors import HookError
from live_steps import make_later

PYTHON = os.environ.get("DCR_TEST_VLLM")
START_SECONDS = 400
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 260,
    "max_position_embeddings": 128,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_VLLM names no Python with vLLM"),
]


@contextmanager
def serving(model: Path, log: Path, options: Sequence[str] = (), paths: Sequence[Path] = ()) -> Iterator[str]:
    """A server of a model, with more options, and folders where it finds plugins: its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_DIST_IDENT": "dcr",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    plain = ["--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "64"]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *plain, *options, "--host", "127.0.0.1", "--served-model-name", "tiny"],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not is_up(url):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-8000:]
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def answer_of(url: str) -> Any:
    """What a server says after some tokens, with the logarithms of its chances."""
    body = {
        "model": "tiny",
        "prompt": [5, 17, 200, 31, 8],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 3,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        (choice,) = json.loads(response.read())["choices"]
    return choice["token_ids"], choice["logprobs"]


def make_model(root: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("qwen3", **MODEL)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root)
    return root


def test_a_server_answers_as_one_that_was_started_on_the_target(tmp_path: Path) -> None:
    remote, replica = str(tmp_path / "remote"), tmp_path / "replica"
    base = make_model(tmp_path / "base")
    target = make_later(tmp_path / "target", base, 1, strange=())
    push(base, remote, baseline=tmp_path / "baseline")
    pull(remote, replica)
    with serving(replica, tmp_path / "log") as url:
        before = answer_of(url)
        push(target, remote, baseline=tmp_path / "baseline")
        result = pull(remote, replica, engines=[f"vllm={url}"], mode="in-place")
        (reloaded,) = result.reloaded
        print(f"paused for {reloaded.pause_seconds:.3f} s, {reloaded.load_seconds:.3f} s of them loading")
        after = answer_of(url)
        assert pull(remote, replica, engines=[f"vllm={url}"]).reloaded == ()
        # What it cannot load kills it, whatever its /health says; the version is not applied, then or later.
        (replica / "config.json").rename(tmp_path / "config.json")
        for path in replica.glob("*.safetensors"):
            path.write_bytes(b"no")
        wanted = parse_reload([f"vllm={url}"], 60)
        assert wanted is not None
        with pytest.raises(HookError):
            wanted.run(replica, "broken", lambda: None)
    with serving(target, tmp_path / "fresh.log") as url:
        fresh = answer_of(url)
    assert after == fresh != before
