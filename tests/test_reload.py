"""What a reload does with the folder that engines load, and with engines in the middle of it, whatever is raised."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import Run
from dcr_cli import apply, diff, pull, reload, stopping
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, LOCK_FILE
from dcr_cli.engine import calls
from dcr_cli.engine.routes import Load, reload as reload_by
from dcr_cli.errors import ConflictError, HookError, IncompleteError, LocalError, UsageError
from dcr_cli.fetch import resting
from dcr_cli.process import explain
from dcr_cli.stopping import Stopped
from engine_servers import Engine, serving
from pushed import History, history

RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}
LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_WAIT_SECONDS", 0.001)


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with serving(request.param) as found:
        yield found


@pytest.fixture
def vllm() -> Iterator[Engine]:
    with serving("vllm") as found:
        yield found


@pytest.fixture
def remote(tmp_path: Path) -> History:
    return history(tmp_path, 2)


@pytest.fixture
def replica(remote: History, tmp_path: Path) -> Path:
    """A receiver that is behind."""
    pull(remote.url, tmp_path / "replica", version=1, jobs=1)
    return tmp_path / "replica"


def refused(act: Callable[[], object], told: list[str]) -> Callable[[str], None]:
    """Try something while an engine loads, and note what is said of it."""

    def on_load(folder: str) -> None:
        try:
            act()
        except ConflictError as error:
            told.append(str(error))

    return on_load


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_no_dcr_changes_what_is_loaded(engine: Engine, remote: History, replica: Path, mode: str) -> None:
    told: list[str] = []
    engine.on_load = refused(lambda: pull(remote.url, replica, mode=mode, jobs=1), told)
    assert reload(replica, [engine.address]).label == "1" == engine.label
    assert len(told) == 1 and f"another dcr holds it: process {os.getpid()} " in told[0]
    assert not engine.is_paused
    assert pull(remote.url, replica, mode=mode, jobs=1).applied == (2,)


def test_nor_by_an_apply_while_a_pull_has_it_loaded(
    engine: Engine, remote: History, replica: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    diff(remote.version(2), remote.version(1), output=tmp_path / "back")
    engine.on_load = refused(lambda: apply(tmp_path / "back", replica, jobs=1), told)
    pull(remote.url, replica, engines=[engine.address], jobs=1)
    assert len(told) == 1 and "another dcr holds it" in told[0]
    assert engine.label == "2"


def test_nothing_is_sent_while_another_dcr_changes_it(engine: Engine, replica: Path) -> None:
    with resting.at_rest(replica), pytest.raises(ConflictError, match="another dcr holds it"):
        reload(replica, [engine.address])
    assert engine.asked == []


def test_the_lock_leaves_nothing(engine: Engine, replica: Path) -> None:
    (replica / LOCK_FILE).unlink(missing_ok=True)
    before = sorted(os.listdir(replica / ".dcr"))
    reload(replica, [engine.address])
    assert sorted(os.listdir(replica / ".dcr")) == before


def test_a_hook_may_reload(engine: Engine, remote: History, replica: Path) -> None:
    """As the command of --exec, for which the pull keeps other pulls away."""
    command = f"{sys.executable} -m dcr_cli reload $DCR_CHECKPOINT --engine {engine.address}"
    pull(remote.url, replica, hook=command, jobs=1)
    assert engine.label == "2" and not engine.is_paused


def rewrite(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(path.read_bytes() + b" ")


def bring_shard(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder / "another.safetensors")


CHANGES: dict[str, Callable[[Path], object]] = {
    "config.json is another one": rewrite,
    f"{SHARD} is another one": lambda folder: os.utime(folder / SHARD),
    "config.json is gone": lambda folder: (folder / "config.json").unlink(),
    "another.safetensors is new": bring_shard,
    "No such file|is gone|no folder": shutil.rmtree,
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_others_change_meanwhile_gets_no_label(engine: Engine, remote: History, tmp_path: Path, how: str) -> None:
    """In a folder that is nobody's receiver, too."""
    plain = tmp_path / "plain"
    shutil.copytree(remote.version(1), plain)
    engine.on_load = lambda folder: CHANGES[how](plain)
    with pytest.raises(ConflictError, match="was changed while it was loaded: ") as caught:
        reload(plain, [engine.address], label="mine")
    assert re.search(how, str(caught.value)) or "No such" in how
    assert str(caught.value).endswith(f"; engine {engine.address} stays paused")
    assert engine.label == "default" and engine.is_paused and len(engine.weights) == 1
    assert RESUME[engine.kind] not in "".join(engine.asked)


def test_the_same_command_mends_it(engine: Engine, remote: History, replica: Path) -> None:
    changed = {"ever": False}

    def change_once(folder: str) -> None:
        if not changed["ever"]:
            rewrite(replica)
        changed["ever"] = True

    engine.on_load = change_once
    wish: dict[str, Any] = {"engines": [engine.address], "receiver": "one", "jobs": 1}
    with pytest.raises(ConflictError, match="was changed while it was loaded") as caught:
        pull(remote.url, replica, **wish)
    assert caught.value.exit_code == 6 and applied(remote, 2) == []
    assert reload(replica, [engine.address], label="x").label == engine.label == "x" and not engine.is_paused


def applied(remote: History, version: int) -> list[str]:
    with remote.open() as store:
        keys = [entry.key for entry in store.list("acks/")]
    return [key for key in keys if key.endswith(".applied") and f"{version}-" in key]


def test_a_link_that_is_turned_meanwhile(engine: Engine, remote: History, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(remote.version(1))

    def turn(folder: str) -> None:
        link.unlink()
        link.symlink_to(remote.version(2))

    engine.on_load = turn
    with pytest.raises(ConflictError, match=r"it leads to .* now"):
        reload(link, [engine.address], label="x")


def test_what_engines_leave_there_is_no_change(engine: Engine, remote: History, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(remote.version(1), plain)
    engine.on_load = lambda folder: (Path(folder) / "cache.bin").touch()
    reload(plain, [engine.address], label="x")
    assert engine.label == "x" and os.listdir(plain).count(".dcr") == 0


def test_a_folder_that_cannot_be_written(
    engine: Engine, remote: History, replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise LocalError("lock", "cannot be opened: Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(resting, "lock", refuse)
        assert reload(replica, [engine.address]).label == "1" == engine.label
        engine.on_load = lambda folder: pull(remote.url, replica, jobs=1)
        with pytest.raises(ConflictError, match="it was brought to another version"):
            reload(replica, [engine.address])
        assert engine.label == "1"


def test_a_change_that_begins_meanwhile(engine: Engine, replica: Path) -> None:
    engine.on_load = lambda folder: (replica / IN_PROGRESS).write_text("{}")
    with pytest.raises(ConflictError, match="a change of it was begun just now"):
        reload(replica, [engine.address])
    with pytest.raises(IncompleteError):
        reload(replica, [engine.address])


class Scripted:
    """Routes that raise at one of their steps, and perhaps when they are to go on."""

    what = "engine x"

    def __init__(self, **raised: BaseException) -> None:
        self._raised = raised
        self.done: list[str] = []

    def _do(self, step: str) -> None:
        self.done.append(step)
        if step in self._raised:
            raise self._raised[step]

    def look(self) -> None:
        self._do("look")

    def pause(self) -> None:
        self._do("pause")

    def load(self, load: Load) -> None:
        self._do("load")

    def settle(self, label: str) -> None:
        self._do("settle")

    def resume(self) -> None:
        self._do("resume")


STOPS: list[Callable[[], BaseException]] = [KeyboardInterrupt, lambda: Stopped(signal.SIGTERM), RuntimeError]
NOT_KNOWN = "engine x stays paused, and what it holds is not known"


def run_scripted(routes: Scripted, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught:
        reload_by(routes, Load("folder", "1", 1), lambda: routes._do("check"))
    return caught.value


@pytest.mark.parametrize("number", range(len(STOPS)))
def test_whatever_is_raised_before_it_is_told_to_load_it_goes_on(number: int) -> None:
    stop = STOPS[number]()
    routes = Scripted(pause=stop)
    assert run_scripted(routes, type(stop)) is stop
    assert routes.done == ["look", "pause", "resume"]
    assert not hasattr(stop, "__notes__") and stopping.left() == ""


@pytest.mark.parametrize("step", ["load", "check", "settle"])
@pytest.mark.parametrize("number", range(len(STOPS)))
def test_later_it_stays_paused_and_that_is_said(step: str, number: int) -> None:
    stop = STOPS[number]()
    routes = Scripted(**{step: stop})
    assert run_scripted(routes, type(stop)) is stop
    assert "resume" not in routes.done
    assert stop.__notes__ == [NOT_KNOWN] and stopping.left() == NOT_KNOWN
    stopping.leave("")


def test_and_by_errors() -> None:
    fault = HookError("engine x", "/load failed")
    assert str(run_scripted(Scripted(load=fault), HookError)) == "engine x: /load failed; it stays paused"
    error = run_scripted(Scripted(pause=HookError("engine x", "no")), HookError)
    assert str(error) == "engine x: no; it serves what it served before"
    routes = Scripted(pause=HookError("engine x", "no"), resume=HookError("engine x", "nor this"))
    assert str(run_scripted(routes, HookError)) == "engine x: no; it may be paused: nor this"
    error = run_scripted(Scripted(resume=HookError("engine x", "no")), HookError)
    assert str(error) == "engine x: no; it has loaded, and may be paused"
    stopping.leave("")


def test_an_engine_that_cannot_go_on_is_named() -> None:
    stop = KeyboardInterrupt()
    run_scripted(Scripted(pause=stop, resume=HookError("engine x", "no")), KeyboardInterrupt)
    assert stop.__notes__ == ["engine x may be paused, with what it served before"] == [stopping.left()]
    # And where another interrupt comes between.
    again = KeyboardInterrupt()
    assert run_scripted(Scripted(pause=KeyboardInterrupt(), resume=again), KeyboardInterrupt) is again
    assert again.__notes__ == ["engine x may be paused"]
    stopping.leave("")


def test_what_has_taken_the_label_is_told_once_more_to_go_on() -> None:
    stop = KeyboardInterrupt()
    routes = Scripted(resume=stop)
    # The second time, too.
    assert run_scripted(routes, KeyboardInterrupt) is stop
    assert routes.done[-3:] == ["settle", "resume", "resume"]
    assert stop.__notes__ == ["engine x may be paused"]
    stopping.leave("")


def test_a_stop_says_what_is_noted_of_it() -> None:
    stop = Stopped(signal.SIGTERM)
    stop.add_note(NOT_KNOWN)
    assert explain(stop).message == f"stopped: by signal SIGTERM; {NOT_KNOWN}"
    assert explain(stop, lambda: "c is as it was").message.endswith(f"{NOT_KNOWN}; c is as it was")


@contextmanager
def reloading(engine: Engine, checkpoint: Path, path: str) -> Iterator[tuple[Any, threading.Event]]:
    """A command that reloads, in the middle of a request; what is done with it ends with an event."""
    reached, going_on = threading.Event(), threading.Event()

    def hold(asked: str, number: int) -> None:
        if asked == path:
            reached.set()
            going_on.wait(60)

    engine.misbehave = hold
    command = [sys.executable, "-m", "dcr_cli", "reload", str(checkpoint), "--engine", engine.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert reached.wait(60)
        yield process, going_on
    finally:
        going_on.set()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_pauses(engine: Engine, replica: Path, number: signal.Signals) -> None:
    path = {"vllm": "/pause", "sglang": "/pause_generation"}[engine.kind]
    with reloading(engine, replica, path) as (process, going_on):
        process.send_signal(number)
        # It waits until the engine has done what it was told.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        going_on.set()
        _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number and told.startswith(f"dcr: stopped: by signal {number.name}\n")
    assert not engine.is_paused and engine.weights == []
    assert f"POST {RESUME[engine.kind]}" in engine.asked


def test_a_signal_while_it_loads(engine: Engine, replica: Path) -> None:
    with reloading(engine, replica, LOAD[engine.kind]) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 143 and f"POST {RESUME[engine.kind]}" not in engine.asked
    left = f"engine {engine.address} stays paused, and what it holds is not known"
    assert told.splitlines()[0] == f"dcr: stopped: by signal SIGTERM; {left}"


def test_a_second_signal_says_what_it_leaves(engine: Engine, replica: Path) -> None:
    path = {"vllm": "/pause", "sglang": "/pause_generation"}[engine.kind]
    with reloading(engine, replica, path) as (process, _):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (
        143,
        f"dcr: engine {engine.address} may be paused, with what it served before\n",
    )


def misbehaving(path: str, answer: Any) -> Callable[[str, int], Any]:
    return lambda asked, number: (200, answer) if asked == path else None


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/pause_generation", {"success": False, "message": "no"}, "/pause_generation says status None, ok expected"),
        ("/pause_generation", "<html>", "/pause_generation says status None, ok expected"),
        ("/flush_cache", {"success": False, "message": "running"}, "/flush_cache failed: running"),
        ("/update_weight_version", {"success": False}, "/update_weight_version says success False"),
        ("/continue_generation", {"success": False}, "/continue_generation says status None, ok expected"),
        ("/continue_generation", "<html>", "/continue_generation says status None, ok expected"),
    ],
)
def test_sglang_says_that_it_has_failed(replica: Path, path: str, answer: Any, message: str) -> None:
    with serving("sglang") as engine:
        engine.misbehave = misbehaving(path, answer)
        with pytest.raises(HookError, match=message):
            reload(replica, [engine.address])


@pytest.mark.parametrize("results", [[False], ["Error: out of memory"], [None, {"error": "x"}], "None"])
def test_a_worker_of_vllm_says_that_it_has_failed(vllm: Engine, replica: Path, results: Any) -> None:
    vllm.misbehave = misbehaving("/collective_rpc", {"results": results})
    with pytest.raises(HookError, match="null of each worker expected; it stays paused"):
        reload(replica, [vllm.address])
    assert vllm.is_paused and vllm.label == "default"
    vllm.misbehave = misbehaving("/collective_rpc", {"results": [None, None]})
    assert reload(replica, [vllm.address]).label == vllm.label


@pytest.mark.parametrize("token", ["s3cret\n", "s3 cret", "s3cret\N{EN DASH}", "\ts3cret", "s3cret\0"])
def test_a_token_that_cannot_be_shown(vllm: Engine, replica: Path, remote: History, token: str) -> None:
    for call in (
        lambda: reload(replica, [vllm.address], engine_token=token),
        lambda: pull(remote.url, replica, engines=[vllm.address], engine_token=token),
    ):
        with pytest.raises(UsageError, match="DCR_ENGINE_TOKEN: is no token") as caught:
            call()
        assert "s3" not in str(caught.value) + str(caught.value.hint)
    assert vllm.asked == []
    # Whoever has no engine has no use for it.
    pull(remote.url, replica, engine_token=token, jobs=1)


def test_a_token_from_the_environment(vllm: Engine, replica: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_ENGINE_TOKEN", "s3cret\n")
    ran = run("reload", replica, "--engine", vllm.address)
    assert ran.code == 2 and "DCR_ENGINE_TOKEN" in ran.err and "s3cret" not in ran.err + ran.out
    monkeypatch.setenv("DCR_ENGINE_TOKEN", "")
    assert run("reload", replica, "--engine", vllm.address).code == 0


@pytest.mark.parametrize(
    "address",
    [
        "http://h/a b",
        "http://h/\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        "http://h/a\tb",
        "http://h\n",
        "http://a..b:8",
        f"http://{'a' * 300}.com",
        "http://h:0",
        "http://h?",
        "http://[::1",
        "http://a b:80",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="its address is none of http or https"):
        reload("checkpoint", [f"vllm={address}"])


def test_no_address_is_repeated_that_may_hold_a_password() -> None:
    for text in ("trt=http://me:s3cret@h", "http://me:s3cret@h", "vllm=http://me:s3cret@h h", "vllm=me:s3cret@h"):
        with pytest.raises(UsageError) as caught:
            reload("checkpoint", [text])
        assert "s3cret" not in str(caught.value)
