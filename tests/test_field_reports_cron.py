"""What users who run such tools from cron have reported, as scenarios: locks, torn files, full disks, signals."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import main
from dcr_cli.errors import IncompleteError
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.stopping import Stopped
from faults import watching
from published import build_all, commits
from receivers import fresh_copy, names_below, tree
from strategies import tensor_of, with_changes, write_checkpoint, write_tiny_steps

# A command that stops itself before step N of the disk.
STOPS_ITSELF = """
import os, signal, sys
from dcr_cli import durable
from dcr_cli.__main__ import main
left = int(sys.argv.pop(1))
def count(kind, path, other):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGSTOP)
durable.hooks.append(count)
sys.exit(main())
"""
PLAIN = "import sys\nfrom dcr_cli.__main__ import main\nsys.exit(main())"


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Three checkpoints; the first two are published to tmp_path/remote, tmp_path/start is at version 1."""
    found = write_tiny_steps(tmp_path, 3)
    for step in found[:2]:
        push(step, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    pull(tmp_path / "remote", tmp_path / "start", version=1, jobs=1)
    return found


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


# Locks


@pytest.mark.parametrize("number", [10, 60])
def test_a_pull_that_sleeps_keeps_others_out_whatever_the_clock_says(
    tmp_path: Path, steps: list[Path], number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pull is stopped with SIGSTOP; a second one, and one whose clock is a day behind, are told who has the lock."""
    arguments = ["pull", str(tmp_path / "remote"), str(tmp_path / "start"), "-j", "1"]
    with subprocess.Popen([sys.executable, "-c", STOPS_ITSELF, str(number), *arguments]) as first:
        _, status = os.waitpid(first.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert main(arguments) == 6
        assert f"process {first.pid} on " in capsys.readouterr().err
        monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
        assert main(arguments) == 6
        monkeypatch.undo()
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
    assert tree(tmp_path / "start") == tree(steps[1])


# Torn files


@pytest.mark.parametrize("torn", ["empty", "half", "gone"])
def test_torn_notes_of_a_receiver_are_never_believed(tmp_path: Path, steps: list[Path], torn: str) -> None:
    """After a power cut one of the files in `.dcr/` is empty, cut, or gone: the bytes say which version it is."""
    names = [path.name for path in (tmp_path / "start/.dcr").iterdir() if path.is_file()]
    assert len(names) >= 3
    for name in names:
        path = fresh_copy(tmp_path / "start", tmp_path / "r") / ".dcr" / name
        data = path.read_bytes()
        path.unlink()
        if torn != "gone":
            path.write_bytes(data[: len(data) // 2] if torn == "half" else b"")
        result = pull(tmp_path / "remote", tmp_path / "r", jobs=1)
        assert (result.from_version, result.version) == (1, 2)
        assert result.way is not None and result.way.anchor is None
        assert tree(tmp_path / "r") == tree(steps[1])


@pytest.mark.parametrize("torn", ["empty", "half"])
def test_torn_notes_of_a_publisher_are_never_believed(tmp_path: Path, steps: list[Path], torn: str) -> None:
    """The same in the baseline: the next push is a delta of what is published, or is refused and changes nothing."""
    names = [path.name for path in (tmp_path / "baseline/.dcr").iterdir() if path.is_file()]
    for name in names:
        remote = fresh_copy(tmp_path / "remote", tmp_path / "copy")
        path = fresh_copy(tmp_path / "baseline", tmp_path / "b") / ".dcr" / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if torn == "half" else b"")
        code = main(["push", str(steps[2]), str(remote), "--baseline", str(tmp_path / "b"), "-j", "1"])
        assert (code, len(commits(remote))) in ((0, 3), (5, 2)), name
        if code == 0:
            assert build_all(remote, tmp_path / "scratch")[2] == tree(steps[2])


# Disks


@pytest.mark.parametrize("command", ["pull", "push"])
def test_files_that_may_not_grow_are_told_and_nothing_is_changed(
    tmp_path: Path, steps: list[Path], command: str
) -> None:
    """A limit of file sizes that is smaller than a shard: 9, what was there stays, and without it all is done."""
    other = write_checkpoint(tmp_path / "other", {"w": tensor_of("BF16", (64, 64), 70)})
    if command == "pull":
        push(other, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
        arguments = ["pull", str(tmp_path / "remote"), str(tmp_path / "start")]
    else:
        arguments = ["push", str(other), str(tmp_path / "remote"), "--baseline", str(tmp_path / "baseline")]
    before = {name: tree(tmp_path / name) for name in ("start", "baseline")}
    published = commits(tmp_path / "remote")
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN, *arguments],
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode in (7, 9) and "Traceback" not in ran.stderr, ran.stderr
    assert {name: tree(tmp_path / name) for name in before} == before
    assert commits(tmp_path / "remote") == published
    assert main(arguments) == 0
    assert tree(tmp_path / ("start" if command == "pull" else "baseline")) == tree(other)


def test_the_temporary_folder_of_the_system_is_not_used(
    tmp_path: Path, steps: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR leads nowhere: whatever is staged lies beside what it is for."""
    for name in ("TMPDIR", "TMP", "TEMP"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile.gettempdir", None)
    push(steps[2], tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    for mode in ("replace", "in-place"):
        root = fresh_copy(tmp_path / "start", tmp_path / mode)
        pull(tmp_path / "remote", root, mode=mode, jobs=1)
        assert tree(root) == tree(steps[2])


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_pull_that_is_stopped_twice_tells_the_truth_and_is_finished(
    tmp_path: Path, steps: list[Path], number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal at a spread of steps, another during the next run, then a run to the end: nothing stray is left."""
    root = tmp_path / "r"
    arguments = ["pull", str(tmp_path / "remote"), str(root), "-j", "1"]
    for step in range(2 + number % 7, 400, 17):
        fresh_copy(tmp_path / "start", root)
        capsys.readouterr()
        code = stopped(step, number, arguments)
        assert code in (0, 128 + number)
        told = capsys.readouterr().err.partition("\n")[0]
        try:
            open_checkpoint(root)
            left = "as it was" if tree(root) == tree(steps[0]) else "at the target"
        except IncompleteError:
            left = "incomplete now"
        assert code == 0 or told == f"dcr: stopped: by signal {number.name}; {root} is {left}"
        assert stopped(3 + step % 11, number, arguments) in (0, 128 + number)
        assert main(arguments) == 0
        assert tree(root) == tree(steps[1])
        assert names_below(root / ".dcr") == ["lock", "remote.json", "state.json", "state.zst"]
        if code == 0:
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_push_that_is_stopped_twice_publishes_once(tmp_path: Path, steps: list[Path], number: signal.Signals) -> None:
    """The same for a push: the versions before stay, the new one is whole or not there, nothing stray is left."""
    for step in range(1 + number % 13, 400, 31):
        remote = fresh_copy(tmp_path / "remote", tmp_path / "copy")
        fresh_copy(tmp_path / "baseline", tmp_path / "b")
        arguments = ["push", str(steps[2]), str(remote), "--baseline", str(tmp_path / "b"), "-j", "1"]
        code = stopped(step, number, arguments)
        assert code in (0, 128 + number)
        assert len(commits(remote)) in (2, 3)
        assert stopped(5 + step % 13, number, arguments) in (0, 128 + number)
        assert main(arguments) == 0
        assert build_all(remote, tmp_path / "scratch") == [tree(each) for each in steps]
        assert tree(tmp_path / "b") == tree(steps[2])
        assert not [name for name in names_below(remote) if Path(name).name.startswith(".")]
        if code == 0:
            return


def stopped(step: int, number: signal.Signals, arguments: list[str]) -> int:
    """Run a command that gets a signal before a step of the disk, from 1: its exit code."""
    left = step

    def count(kind: str, path: str, other: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Stopped(number)

    with watching(count):
        return main(arguments)


# Output


def test_a_full_output_does_not_undo_a_pull(tmp_path: Path, steps: list[Path]) -> None:
    """Standard output is a device that is always full: the answer is an error, the checkpoint is at the version."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", PLAIN, "pull", str(tmp_path / "remote"), str(tmp_path / "start")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 9 and "Traceback" not in ran.stderr
    assert tree(tmp_path / "start") == tree(steps[1])
    assert pull(tmp_path / "remote", tmp_path / "start").already


def test_many_small_tensors_and_many_threads(tmp_path: Path) -> None:
    """Five hundred tensors of 1 KiB with as many jobs as may be, there and back: each thread has what it needs."""
    state = {f"t.{number:04}": tensor_of("BF16", (512,), number % 50) for number in range(500)}
    changed = {name: with_changes(tensor, [number % 512]) for number, (name, tensor) in enumerate(state.items())}
    found = [write_checkpoint(tmp_path / f"v{n}", each, shards=3) for n, each in enumerate((state, changed, state))]
    for checkpoint in found:
        push(checkpoint, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=16)
        pull(tmp_path / "remote", tmp_path / "r", jobs=16)
        assert tree(tmp_path / "r") == tree(checkpoint)
