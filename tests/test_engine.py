"""Engines that load a folder again: what they are told, and what becomes of it when they fail at any point."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Run
from dcr_cli import pull, reload
from dcr_cli.checkpoint.in_progress import IN_PROGRESS
from dcr_cli.engine import calls
from dcr_cli.engine.engines import parse_reload
from dcr_cli.errors import DamagedError, HookError, IncompleteError, NotFoundError, UsageError
from dcr_cli.fetch.wish import make_wish
from dcr_cli.follow import Follower, Pace
from dcr_cli.receiver.install.gather import Effort
from engine_servers import Engine, serving
from pushed import history, states

KINDS = ["vllm", "sglang"]
RELOADS = {
    "vllm": [
        "GET /is_paused",
        "GET /weight_info",
        "POST /pause?mode=keep",
        "GET /is_paused",
        "POST /collective_rpc",
        "POST /reset_prefix_cache?reset_running_requests=true",
        "POST /update_weight_version",
        "GET /weight_info",
        "POST /resume",
        "GET /is_paused",
    ],
    "sglang": [
        "GET /model_info",
        "POST /pause_generation",
        "POST /flush_cache",
        "POST /update_weights_from_disk",
        "POST /update_weight_version",
        "GET /model_info",
        "POST /continue_generation",
    ],
}
LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}
PAUSE = {"vllm": "/pause", "sglang": "/pause_generation"}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_WAIT_SECONDS", 0.001)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with serving(request.param) as found:
        yield found


def test_a_pull_has_engines_load_what_it_brought(engine: Engine, tmp_path: Path) -> None:
    remote = history(tmp_path, 2)
    checkpoint = tmp_path / "checkpoint"
    seen = []
    engine.on_load = lambda folder: seen.append((Path(folder) / "config.json").read_text())
    result = pull(remote.url, checkpoint, engines=[engine.address], receiver="one", jobs=1)
    assert engine.asked == RELOADS[engine.kind]
    assert (engine.weights, engine.label, engine.is_paused) == ([str(checkpoint)], "2", False)
    assert '"step": 2' in seen[0]
    (reloaded,) = result.reloaded
    assert (reloaded.engine, reloaded.label) == (engine.address, "2")
    assert 0 < reloaded.load_seconds < reloaded.pause_seconds < 60
    # Without news nothing is loaded again.
    assert pull(remote.url, checkpoint, engines=[engine.address], receiver="one", jobs=1).reloaded == ()
    assert len(engine.weights) == 1
    remote.publish(states(3)[2])
    assert pull(remote.url, checkpoint, engines=[engine.address], jobs=1).reloaded[0].label == "3"
    assert len(engine.weights) == 2


def applied(remote: Any) -> list[str]:
    with remote.open() as store:
        return [entry.key for entry in store.list("acks/") if entry.key.endswith(".applied")]


@pytest.mark.parametrize("number", range(10))
def test_a_reload_that_fails_anywhere_is_no_applied_version(engine: Engine, tmp_path: Path, number: int) -> None:
    """Each request in turn is answered with 500, and the next pull does all of it again."""
    if number >= len(RELOADS[engine.kind]):
        return
    remote = history(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint"
    engine.misbehave = lambda path, count: (500, "out of luck") if len(engine.asked) == number + 1 else None
    options: dict[str, Any] = {"engines": [engine.address], "receiver": "one", "jobs": 1}
    with pytest.raises(HookError, match="failed: HTTP 500: out of luck") as caught:
        pull(remote.url, checkpoint, **options)
    assert caught.value.exit_code == 10 and applied(remote) == []
    path = RELOADS[engine.kind][number].split(" ")[1].partition("?")[0]
    loading = RELOADS[engine.kind].index(f"POST {LOAD[engine.kind]}")
    if f"POST {PAUSE[engine.kind]}" not in RELOADS[engine.kind][number] and number < 2:
        assert not engine.is_paused and engine.weights == []
    elif number < loading:
        # It had not been told to load: it goes on with what it has.
        assert not engine.is_paused and engine.weights == []
        assert caught.value.hint is not None and "tries it again" in caught.value.hint
    elif number >= loading and path not in (RESUME[engine.kind], "/is_paused"):
        assert engine.is_paused
        assert caught.value.hint is not None and "start it anew" in caught.value.hint
    engine.misbehave = lambda path, count: None
    engine.asked.clear()
    result = pull(remote.url, checkpoint, **options)
    assert (result.already, len(result.reloaded)) == (True, 1)
    assert engine.asked == RELOADS[engine.kind]
    assert len(applied(remote)) == 1 and engine.label == "1" and not engine.is_paused


def test_what_may_be_sent_twice_is_tried_again(engine: Engine, tmp_path: Path) -> None:
    remote = history(tmp_path, 1)
    engine.misbehave = lambda path, number: (
        None if path == LOAD[engine.kind] or number > 2 else "drop" if number % 2 else (503, "busy")
    )
    pull(remote.url, tmp_path / "checkpoint", engines=[engine.address], jobs=1)
    assert len(engine.weights) == 1 and not engine.is_paused


@pytest.mark.parametrize("answer", ["drop", (503, "busy"), (504, "timeout")])
def test_a_load_is_sent_once(engine: Engine, tmp_path: Path, answer: Any) -> None:
    remote = history(tmp_path, 1)
    engine.misbehave = lambda path, number: answer if path == LOAD[engine.kind] else None
    with pytest.raises(HookError, match=f"{LOAD[engine.kind]} failed"):
        pull(remote.url, tmp_path / "checkpoint", engines=[engine.address], jobs=1)
    assert sum(LOAD[engine.kind] in each for each in engine.asked) == 1
    assert engine.is_paused


def test_a_load_that_takes_too_long(engine: Engine, tmp_path: Path) -> None:
    import threading

    remote = history(tmp_path, 1)
    released = threading.Event()

    def wait(folder: str) -> None:
        released.wait(30)

    engine.on_load = wait
    try:
        with pytest.raises(HookError, match=r"no answer within 0.2 s|TimeoutError|timed out"):
            pull(remote.url, tmp_path / "checkpoint", engines=[engine.address], engine_seconds=0.2, jobs=1)
    finally:
        released.set()


@pytest.mark.parametrize(
    ("kind", "path", "answer", "message"),
    [
        ("vllm", "/collective_rpc", {"results": []}, "null of each worker expected"),
        ("vllm", "/collective_rpc", {"detail": "x"}, "null of each worker expected"),
        ("vllm", "/reset_prefix_cache", {"success": False}, "/reset_prefix_cache says success False, True expected"),
        ("vllm", "/weight_info", {"weight_version": "0"}, "/weight_info says weight_version 0, 1 expected"),
        ("vllm", "/resume", {"status": "no"}, "/is_paused says is_paused True, False expected"),
        ("vllm", "/collective_rpc", [1], "which is no object"),
        ("sglang", "/update_weights_from_disk", {"success": False, "message": "bad shape"}, "failed: bad shape"),
        ("sglang", "/model_info", {"weight_version": "0"}, "/model_info says weight_version 0, 1 expected"),
    ],
)
def test_what_an_engine_says_has_to_be_right(tmp_path: Path, kind: str, path: str, answer: Any, message: str) -> None:
    remote = history(tmp_path, 1)
    with serving(kind) as engine:
        engine.misbehave = lambda asked, number: (200, answer) if asked == path else None
        with pytest.raises(HookError, match=message):
            pull(remote.url, tmp_path / "checkpoint", engines=[engine.address], jobs=1)
        assert path == "/resume" or engine.is_paused


def test_a_dead_engine_says_that_it_is_healthy(tmp_path: Path) -> None:
    """As vLLM does after a reload that has failed."""
    remote = history(tmp_path, 1)
    with serving("vllm") as engine:

        def die(folder: str) -> None:
            engine.is_broken = True
            raise OSError("no such file")

        engine.on_load = die
        checkpoint = tmp_path / "checkpoint"
        for expected in ("/collective_rpc failed", "/weight_info failed: HTTP 500: EngineDeadError"):
            with pytest.raises(HookError, match=expected):
                pull(remote.url, checkpoint, engines=[engine.address], receiver="one", jobs=1)
        assert applied(remote) == []


def test_an_engine_without_the_routes_is_left_alone(tmp_path: Path) -> None:
    remote = history(tmp_path, 1)
    with serving("sglang") as engine:
        with pytest.raises(HookError, match="has no /is_paused") as caught:
            pull(remote.url, tmp_path / "checkpoint", engines=[f"vllm={engine.url}"], jobs=1)
        assert caught.value.hint is not None and "VLLM_SERVER_DEV_MODE=1" in caught.value.hint
        assert engine.asked == ["GET /is_paused"]


@pytest.mark.parametrize(
    ("kind", "path", "answer", "message"),
    [
        ("vllm", "/weight_info", (404, {"detail": "Not Found"}), "has no /weight_info"),
        ("vllm", "/weight_info", (200, {}), "/weight_info has no weight_version"),
        ("sglang", "/model_info", (404, {"detail": "Not Found"}), "has no /model_info"),
        ("sglang", "/model_info", (200, {"model_path": "/model"}), "/model_info has no weight_version"),
    ],
)
def test_an_older_engine_is_refused_before_it_is_paused(
    tmp_path: Path, kind: str, path: str, answer: tuple[int, Any], message: str
) -> None:
    """It would load, and could not be told to go on."""
    remote = history(tmp_path, 1)
    with serving(kind) as engine:
        engine.misbehave = lambda asked, number: answer if asked == path else None
        with pytest.raises(HookError, match=message) as caught:
            pull(remote.url, tmp_path / "checkpoint", engines=[engine.address], jobs=1)
        assert caught.value.hint is not None and "needs a newer version" in caught.value.hint
        assert all(each.startswith("GET ") for each in engine.asked) and not engine.is_paused


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_not_up(tmp_path: Path, kind: str) -> None:
    remote = history(tmp_path, 1)
    with serving(kind) as engine:
        address = engine.address
    with pytest.raises(HookError, match=r"/(is_paused|model_info) failed: Connection refused$") as caught:
        pull(remote.url, tmp_path / "checkpoint", engines=[address], jobs=1)
    assert caught.value.hint is not None and " is up, at this address" in caught.value.hint
    assert ("VLLM_SERVER_DEV_MODE=1" in caught.value.hint) == (kind == "vllm")


def test_engines_one_after_the_other_and_a_token(tmp_path: Path) -> None:
    remote = history(tmp_path, 1)
    with serving("vllm") as one, serving("sglang") as two:
        one.token = two.token = "secret"
        addresses = [one.address, two.address]
        with pytest.raises(HookError, match="HTTP 401") as caught:
            pull(remote.url, tmp_path / "checkpoint", engines=addresses, jobs=1)
        assert "secret" not in str(caught.value)
        assert two.asked == []
        result = pull(remote.url, tmp_path / "checkpoint", engines=addresses, engine_token="secret", jobs=1)
        assert [each.engine for each in result.reloaded] == addresses
        assert "secret" not in repr(parse_reload(addresses, 3, "secret"))


def test_a_follower_reloads_each_version(engine: Engine, tmp_path: Path) -> None:
    remote = history(tmp_path, 1)
    told: list[str] = []
    wish = make_wish(Effort(1, None), engines=[engine.address], receiver="one")
    engine.misbehave = lambda path, number: (500, "no") if path == LOAD[engine.kind] and number == 1 else None
    with remote.open() as store:
        pace = Pace(sleep=lambda seconds: None)
        follower = Follower(store, tmp_path / "checkpoint", wish, lambda error: told.append(str(error)), pace)
        arrivals = follower.arrivals()
        next(arrivals)
        assert len(told) == 1 and "failed: HTTP 500: no" in told[0]
        assert engine.weights == [str(tmp_path / "checkpoint")] and engine.label == "1"
        remote.publish(states(2)[1])
        assert next(arrivals).result.reloaded[0].label == "2"
    assert len(applied(remote)) == 2


def test_reload(engine: Engine, tmp_path: Path, run: Run) -> None:
    remote = history(tmp_path, 2)
    checkpoint = tmp_path / "checkpoint"
    pull(remote.url, checkpoint, jobs=1)
    assert reload(checkpoint, [engine.address]).label == "2" == engine.label
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    ran = run("reload", link, "--engine", engine.address, "--label", "mine", "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["command"], document["label"]) == (0, "reload", "mine")
    assert document["reloaded"][0]["engine"] == engine.address and document["reloaded"][0]["pause_seconds"] > 0
    # Whoever turns the link has it loaded through the link.
    assert engine.weights[-1] == str(link)
    ran = run("reload", checkpoint, "--engine", engine.address)
    assert ran.code == 0 and "done: 1 engine at 2" in ran.out and f"{engine.address}, paused for " in ran.out
    engine.misbehave = lambda path, number: (500, "no")
    assert run("reload", checkpoint, "--engine", engine.address).code == 10


def test_nothing_is_sent_for_what_is_no_checkpoint(engine: Engine, tmp_path: Path) -> None:
    remote = history(tmp_path, 2)
    with pytest.raises(NotFoundError):
        reload(tmp_path / "none", [engine.address])
    plain = tmp_path / "plain"
    shutil.copytree(remote.version(1), plain)
    with pytest.raises(UsageError, match="nothing says which state this is"):
        reload(plain, [engine.address])
    (plain / "model-00001-of-00002.safetensors").write_bytes(b"no")
    with pytest.raises(DamagedError):
        reload(plain, [engine.address], label="x")
    stopped = tmp_path / "stopped"
    pull(remote.url, stopped, jobs=1)
    (stopped / IN_PROGRESS).write_text("{}")
    with pytest.raises(IncompleteError):
        reload(stopped, [engine.address])
    assert engine.asked == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://host", "one of vllm, sglang, = and an address expected"),
        ("trt=http://host", "one of vllm, sglang, = and an address expected"),
        ("vllm=host:80", "its address is none of http or https"),
        ("vllm=http://", "its address is none of http or https"),
        ("vllm=http://host:99999", "its address is none of http or https"),
        ("vllm=http://host/?a=b", "its address is none of http or https"),
        ("vllm=http://me:secret@host", "its address has credentials"),
    ],
)
def test_what_is_no_engine(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_reload([text], 3)
    assert "secret" not in str(caught.value)


def test_contradictions(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is given twice"):
        parse_reload(["vllm=http://a", "vllm=http://a/"], 3)
    with pytest.raises(UsageError, match="a time above 0 expected"):
        parse_reload([], 0)
    ran = run("pull", "memory://x", tmp_path / "c", "--exec", "true", "--engine", "vllm=http://a")
    assert ran.code == 2 and "--exec and --engine exclude each other" in ran.err
    assert run("reload", tmp_path).code == 2
    assert os.listdir(tmp_path) == []
