"""A vLLM server on a processor that takes versions of a remote through its backend `dcr` while it answers: then it
answers as one that was started on the target, and nothing lies elsewhere than before. test_engine_vllm_real.py says
what it needs.

On some processors vLLM packs weights once they are loaded; a plugin of this test has it take its own other way, which
leaves them as they are on CUDA. What it does without that is shown, too, with F32, which it packs on all: it is
refused.
"""

from __future__ import annotations

import json
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_engine_vllm_real import PYTHON, answer_of, make_model, serving

from dcr_cli import commit, pull, push
from dcr_cli.engine.engines import parse_reload
from live_steps import make_later

ROOT = Path(__file__).parents[2]
PLUGINS = """
def keep_weights():
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *arguments: False


class Looking:
    def addresses(self):
        model = self.model_runner.get_model()
        return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PYTHON is None, reason="DCR_TEST_VLLM names no Python with vLLM"),
]


def make_plugins(root: Path, *, keeps_weights: bool) -> list[Path]:
    """Folders by which a Python finds dcr, and what an installed one names as its plugins."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = dict(groups["vllm.general_plugins"])
    if keeps_weights:
        entries["keep_weights"] = "dcr_test_plugins:keep_weights"
    info = root / "dcr_cli-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dcr-cli\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    (root / "dcr_test_plugins.py").write_text(PLUGINS)
    return [root, ROOT, ROOT / "kernels"]


def post(url: str, path: str, body: Any = None) -> Any:
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read() or b"null")


def addresses_in(url: str) -> Any:
    return post(url, "/collective_rpc", {"method": "addresses"})["results"]


class Asking:
    """Somebody who asks a server, again and again, while it is used: what was answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers: list[Any] = []
        self.errors: list[Exception] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            try:
                self.answers.append(answer_of(self._url))
            except Exception as error:
                self.errors.append(error)


def finish(url: str, version: int) -> float:
    """Have an update written while nothing is computed: for how many seconds that was."""
    begin = time.monotonic()
    post(url, "/pause?mode=keep")
    post(url, "/finish_weight_update", {"weight_version": str(version)})
    assert post(url, "/reset_prefix_cache?reset_running_requests=true")["success"] is True
    post(url, "/resume")
    return time.monotonic() - begin


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_takes_versions_while_it_answers(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    remote, baseline, replica = str(tmp_path / "remote"), tmp_path / "baseline", tmp_path / "replica"
    checkpoints = [make_model(tmp_path / "v1")]
    push(checkpoints[0], remote, baseline=baseline, encodings=["gap", "whole"])
    paths = make_plugins(tmp_path / "plugins", keeps_weights=True)
    options = ["--weight-transfer-config", '{"backend": "dcr"}', "--tensor-parallel-size", str(ranks)]
    options += ["--worker-extension-cls", "dcr_test_plugins.Looking"]
    (tmp_path / "layouts").mkdir()
    info = {"remote": remote, "version": 1, "name": "server", "layouts": str(tmp_path / "layouts"), "jobs": 1}
    with serving(checkpoints[0], tmp_path / "log", options, paths) as url:
        first, before = answer_of(url), addresses_in(url)
        # Refused on all ranks, and the answers after it are those of the calls that were made.
        with pytest.raises(urllib.error.HTTPError):
            post(url, "/init_weight_transfer_engine", {"init_info": {**info, "version": 9}})
        assert addresses_in(url) == before
        post(url, "/init_weight_transfer_engine", {"init_info": info})
        assert len(list((tmp_path / "layouts").iterdir())) == ranks
        assert answer_of(url) == first
        # The second time nothing is learnt.
        post(url, "/init_weight_transfer_engine", {"init_info": info})
        with Asking(url) as asking:
            for number in (2, 3, 4):
                checkpoints.append(make_later(tmp_path / f"v{number}", checkpoints[-1], number, strange=()))
                push(checkpoints[-1], remote, baseline=baseline, encodings=["gap", "whole"], prepare=True)
                post(url, "/start_weight_update")
                post(url, "/update_weights", {"update_info": {"version": number}})
                # With more ranks vLLM takes what those after the first one answer for answers to its next call.
                if number == 2 and ranks == 1:
                    # Before it is committed it is not written, and nothing is the matter with the server.
                    with pytest.raises(urllib.error.HTTPError):
                        post(url, "/finish_weight_update")
                    assert answer_of(url) == first
                # That all ranks have staged it is what the commit waits for.
                assert commit(remote, quorum=ranks, timeout_seconds=120).version == number
                seconds = finish(url, number)
                print(f"version {number}: paused for {seconds:.3f} s")
        assert asking.errors == [] and len(asking.answers) > 3
        assert addresses_in(url) == before
        after, sums = answer_of(url), post(url, "/weight_checker", {"action": "checksum"})
        said = [path for path in (tmp_path / "remote").glob("acks/*/*") if "server.rank-" in str(path)]
        assert len(said) == ranks * 7, said
        pull(remote, replica)
        wanted = parse_reload([f"vllm={url}"], 300)
        assert wanted is not None
        (reloaded,) = wanted.run(replica, "4", lambda: None)
        print(f"reload from disk: paused for {reloaded.pause_seconds:.3f} s")
    with serving(checkpoints[-1], tmp_path / "fresh.log", options, paths) as url:
        assert post(url, "/weight_checker", {"action": "checksum"}) == sums
        assert answer_of(url) == after != first


def test_what_is_not_as_it_was_loaded_is_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "v1")
    push(base, tmp_path / "remote", baseline=tmp_path / "baseline")
    paths = make_plugins(tmp_path / "plugins", keeps_weights=False)
    options = ["--weight-transfer-config", '{"backend": "dcr"}', "--dtype", "float32"]
    with serving(base, tmp_path / "log", options, paths) as url:
        before = answer_of(url)
        info = {"remote": str(tmp_path / "remote"), "version": 1}
        with pytest.raises(urllib.error.HTTPError):
            post(url, "/init_weight_transfer_engine", {"init_info": info})
        assert answer_of(url) == before
    log = (tmp_path / "log").read_text()
    assert "its loader failed" in log or "outside its parameters" in log
