"""Push: what a remote holds afterwards, whatever happened on the way."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.anchor import anchor
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.cli import main
from dcr_cli.commit import commit
from dcr_cli.content import Workers, read_state
from dcr_cli.durable import Folder
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    LocalError,
    NotFoundError,
    TransportError,
    UnsupportedError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.publisher import moving
from dcr_cli.publisher.baseline import Baseline, KeptBaseline
from dcr_cli.publisher.committing import Author, Outcome, create_commit
from dcr_cli.pull import pull
from dcr_cli.push import PushResult, push
from dcr_cli.remote.acknowledgement import Acknowledgement, encode_acknowledgement
from dcr_cli.remote.hint import decode_hint
from dcr_cli.remote.keys import APPLIED, STAGED, Place, acknowledgement_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import load_signing_key
from dcr_cli.store.backend import Backend, DeniedError, PermanentError, TransientError
from dcr_cli.store.opening import open_store
from faults import StoppedError
from published import anchor_folder, build_all, commits, version_folder
from receivers import fresh_copy, tree
from store_wrappers import Allows, FailsCall, IgnoresTheCondition, Wrapped, recording, wrapping
from strategies import write_tiny_steps

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Successive checkpoints of two shards, a few elements apart."""
    return write_tiny_steps(tmp_path, 5)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def baseline_of(step: Path) -> Path:
    (found,) = (step.parent / ".dcr-baseline").iterdir()
    return found


def state_of(checkpoint: Path) -> State:
    opened = open_checkpoint(checkpoint)
    with Workers(1, "test", None) as workers, opened.reader() as reader:
        return read_state(workers, opened, reader)[0]


def snapshot(remote: Path) -> dict[str, bytes]:
    """All that anyone reads of a remote."""
    return {path: data for path, data in tree(remote).items() if path != "next.json"} if remote.exists() else {}


# What is published


def test_versions_build_the_steps(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    results = [push(step, remote, jobs=2) for step in steps]
    assert [(r.version, r.kind, r.base_version) for r in results] == [
        (1, "anchor", None),
        (2, "delta", 1),
        (3, "delta", 2),
        (4, "delta", 3),
        (5, "delta", 4),
    ]
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]
    assert tree(baseline_of(steps[0])) == tree(steps[-1])
    assert all(result.target == state_of(step) for result, step in zip(results, steps, strict=True))
    assert all(result.base == before.target for result, before in zip(results[1:], results, strict=False))


def test_a_delta_takes_what_changed(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    result = push(steps[1], remote)
    folder = version_folder(remote, commits(remote)[1])
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert result.delta_bytes == taken + (remote / "commits/0000000002.json").stat().st_size
    assert result.uploaded_bytes == result.delta_bytes < result.dense_bytes
    assert result.changed_elements == 5


def test_a_commit_says_when_it_was_made(steps: list[Path], remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its push began: followers tell by it how late they are."""
    push(steps[0], remote)
    times = iter(f"2031-02-03T04:05:0{second}.000Z" for second in range(10))
    monkeypatch.setattr(Author, "now", lambda self: next(times))
    push(steps[1], remote)
    hint = decode_hint((remote / "next.json").read_bytes())
    assert hint is not None and hint.created < commits(remote)[1]["created"]


def test_a_commit_that_an_earlier_try_has_made(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    data = (remote / "commits/0000000001.json").read_bytes()
    created = commits(remote)[0]["created"].encode()
    with open_store(remote) as store:
        log = Log(store, commits(remote)[0]["history"])
        again = create_commit(store, log, data.replace(created, b"2031-02-03T04:05:06Z"), 1)
    assert again[0] is Outcome.WON and again[1].data == data


def test_payloads_say_whose_they_are(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote)
    document = commits(remote)[1]
    data = (version_folder(remote, document) / "payloads/000000.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (header["history"], header["version"], header["id"]) == (document["history"], "2", document["id"])


def test_the_same_again_is_nothing(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote)
    before = tree(remote)
    again = push(steps[1], remote, encoding="gap", jobs=1)
    assert (again.kind, again.version, again.uploaded_bytes) == ("same", 2, 0)
    assert tree(remote) == before


def test_an_older_checkpoint_is_a_new_version(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    for step in (steps[0], steps[1], steps[0]):
        push(step, remote)
    assert build_all(remote, tmp_path / "scratch")[2] == tree(steps[0])


def test_only_a_sidecar_is_a_version(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    (steps[0] / "config.json").write_text('{"new": true}')
    (steps[0] / "chat_template.json").write_text("{}")
    result = push(steps[0], remote)
    assert (result.version, result.changed_elements) == (2, 0)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[0])


def test_a_byte_changed_and_its_time_restored(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    shard = next(steps[0].glob("*.safetensors"))
    status = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert push(steps[0], remote).changed_elements == 1


def test_spellings_of_a_remote_are_one(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], f"{remote}/")
    push(steps[2], f"file://{remote}")
    assert len(commits(remote)) == 3


def test_encodings_of_a_remote(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote, encodings=["gap", "whole"])
    assert json.loads((remote / "dcr.json").read_text())["encodings"] == ["gap", "whole"]
    push(steps[1], remote)
    with pytest.raises(UsageError, match="allows gap,whole"):
        push(steps[2], remote, encoding="context")
    with pytest.raises(UsageError, match="gap,whole"):
        push(steps[2], remote, encodings=["context", "whole"])
    with pytest.raises(UsageError, match="whole and any") as caught:
        push(steps[2], remote, encodings=["context"])
    assert (
        caught.value.hint == "such as context,gap,whole, which is the default, or gap,whole: each needs whole beside it"
    )


def everything(root: Path) -> dict[Path, tuple[bytes, int]]:
    """All that lies there, state folders and empty folders too, with the time at which each was changed."""
    paths = sorted(root.rglob("*"))
    return {path: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns) for path in paths}


@contextmanager
def changing_nothing(root: Path) -> Iterator[None]:
    before = everything(root)
    with recording() as calls:
        yield
    assert everything(root) == before
    assert {name for name, _ in calls} <= {"read", "status", "entries"}


def test_a_dry_run_changes_nothing(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    with changing_nothing(tmp_path):
        assert push(steps[0], remote, dry_run=True).kind == "anchor"
    push(steps[0], remote)
    ways: list[dict[str, Any]] = [{}, {"base": steps[0]}, {"baseline": baseline_of(steps[0])}]
    for options in ways:
        with changing_nothing(tmp_path):
            result = push(steps[1], remote, dry_run=True, **options)
        assert (result.kind, result.version, result.base_version, result.changed_elements) == ("delta", None, 1, 5)
        assert (result.uploaded_bytes, result.dry_run) == (0, True) and result.delta_bytes > 0
    with changing_nothing(tmp_path):
        assert push(steps[0], remote, dry_run=True).kind == "same"
        assert push(steps[1], remote, dry_run=True, no_delta=True).kind == "anchor"
    with changing_nothing(tmp_path), pytest.raises(UsageError, match="cannot be prepared"):
        push(steps[1], remote, dry_run=True, no_delta=True, prepare=True)


def test_a_baseline_that_cannot_be_opened_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Folder, name: str, data: bytes) -> None:
        raise LocalError(name, "cannot be written")

    (tmp_path / ".dcr").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedError):
        KeptBaseline(tmp_path)
    monkeypatch.setattr(Folder, "replace_file", refused)
    with pytest.raises(LocalError):
        Baseline(tmp_path / "new")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_dry_run_says_what_a_push_would_have_to_do_first(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    baseline = baseline_of(steps[0])
    kept = fresh_copy(baseline, tmp_path / "kept")
    push(steps[1], remote)
    with changing_nothing(tmp_path), pytest.raises(WrongBaseError, match="is behind version 2"):
        push(steps[2], remote, dry_run=True, baseline=kept)
    # One that has lost its note is found by its record.
    (baseline / ".dcr/remote.json").unlink()
    with changing_nothing(tmp_path):
        assert push(steps[2], remote, dry_run=True).base_version == 2
    shutil.rmtree(baseline)
    with changing_nothing(tmp_path):
        assert push(steps[1], remote, dry_run=True).kind == "same"
    with changing_nothing(tmp_path), pytest.raises(WrongBaseError, match="is behind version 2"):
        push(steps[0], remote, dry_run=True)
    with changing_nothing(tmp_path), pytest.raises(WrongBaseError, match="neither a baseline"):
        push(steps[2], remote, dry_run=True)


# The baseline


def test_no_baseline_and_a_known_checkpoint(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    for step in steps[:3]:
        push(step, remote)
    shutil.rmtree(steps[0].parent / ".dcr-baseline")
    assert push(steps[2], remote).kind == "same"
    assert push(steps[3], remote).version == 4
    assert build_all(remote, tmp_path / "scratch")[3] == tree(steps[3])


def test_no_baseline_and_an_unknown_checkpoint(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    shutil.rmtree(steps[0].parent / ".dcr-baseline")
    before = tree(remote)
    with pytest.raises(WrongBaseError, match="neither a baseline") as caught:
        push(steps[1], remote)
    assert caught.value.hint is not None and "--no-delta" in caught.value.hint
    assert tree(remote) == before


def test_a_baseline_that_is_behind(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    push(steps[1], remote, baseline=tmp_path / "two")
    push(steps[2], remote, baseline=tmp_path / "two")
    result = push(steps[3], remote, baseline=tmp_path / "one")
    assert (result.version, result.base_version) == (4, 3)
    assert tree(tmp_path / "one") == tree(steps[3])
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:4]]


def test_a_baseline_that_has_lost_its_note(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    (baseline_of(steps[0]) / ".dcr/remote.json").unlink()
    assert push(steps[1], remote).version == 2


def test_a_baseline_that_is_half_made(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    baseline = baseline_of(steps[0])
    next(baseline.glob("*.safetensors")).unlink()
    (baseline / ".dcr/filling").write_bytes(b"")
    (baseline / ".dcr/remote.json").unlink()
    assert push(steps[1], remote).version == 2
    assert tree(baseline) == tree(steps[1])


def test_a_break(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    shutil.rmtree(steps[0].parent / ".dcr-baseline")
    assert push(steps[1], remote, no_delta=True).kind == "anchor"
    assert push(steps[2], remote).kind == "delta"
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_a_kept_checkpoint_as_base(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, base=steps[0])
    push(steps[2], remote, base=steps[1])
    with pytest.raises(WrongBaseError, match="version 3"):
        push(steps[3], remote, base=steps[0])
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_a_push_from_a_base_that_came_through_and_is_run_again(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, base=steps[0])
    before = snapshot(remote)["commits/0000000002.json"]
    rehearsed = push(steps[1], remote, base=steps[0], dry_run=True)
    again = push(steps[1], remote, base=steps[0])
    assert [(each.kind, each.changed_elements) for each in (rehearsed, again)] == [("same", 0)] * 2
    assert (again.version, commits(remote)[-1]["version"]) == (2, 2)
    assert snapshot(remote)["commits/0000000002.json"] == before
    hint = decode_hint((remote / "next.json").read_bytes())
    assert hint is not None and (hint.place.version, hint.state) == (3, "given up")
    assert push(steps[2], remote, base=steps[1]).version == 3
    with pytest.raises(WrongBaseError, match="is not at version 3"):
        push(steps[3], remote, base=steps[1])
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_a_base_that_is_not_there(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    """Also where no base is needed yet."""
    with changing_nothing(tmp_path):
        assert main(["push", str(steps[0]), str(remote), "--base", str(tmp_path / "missing"), "-q"]) == 3
        assert main(["push", str(steps[0]), str(remote), "--base", str(tmp_path / "missing"), "--dry-run", "-q"]) == 3


def test_a_baseline_of_links(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    for step in steps[:3]:
        push(step, remote, baseline_link=True)
        shard = next(baseline_of(step).glob("*.safetensors"))
        assert os.path.samefile(shard, step / shard.name)
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]
    # What was linked is not what is patched.
    push(steps[3], remote)
    assert build_all(remote, tmp_path / "scratch")[2] == tree(steps[2])


def test_a_baseline_elsewhere(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    push(steps[0], remote, baseline=place)
    push(steps[1], remote, baseline=place)
    assert tree(place) == tree(steps[1])
    assert not (steps[0].parent / ".dcr-baseline").exists()


def test_a_folder_that_is_no_baseline(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    place = fresh_copy(steps[0], tmp_path / "mine")
    with pytest.raises(ConflictError, match="no baseline"):
        push(steps[0], remote, baseline=place)
    assert tree(place) == tree(steps[0])
    assert not remote.exists()


def test_a_place_where_no_baseline_can_be(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError) as caught:
        push(steps[0], remote, baseline=tmp_path / "file/baseline")
    assert caught.value.hint is not None and "--baseline" in caught.value.hint
    assert not remote.exists()


def test_a_damaged_baseline_is_seen(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    shard = next(baseline_of(steps[0]).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    before = snapshot(remote)
    with pytest.raises(WrongBaseError, match="not at version 1"):
        push(steps[1], remote)
    assert commits(remote) and {p: d for p, d in snapshot(remote).items() if p in before} == before


def test_a_log_that_went_backwards(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote)
    (remote / "commits/0000000002.json").unlink()
    with pytest.raises(WrongBaseError, match="ends below version 2"):
        push(steps[2], remote)


def test_another_history(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    place = tmp_path / "baseline"
    push(steps[0], remote, baseline=place)
    push(steps[1], tmp_path / "other", baseline=tmp_path / "other-baseline")
    with pytest.raises(WrongBaseError, match="history"):
        push(steps[2], tmp_path / "other", baseline=place)


def test_a_skip_pattern_that_comes_late(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    with pytest.raises(UsageError, match="has"):
        push(steps[1], remote, skip=["config.json"])
    push(steps[1], remote, skip=["*.bin"])
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


# Sources


def test_ready_and_settled(steps: list[Path], remote: Path) -> None:
    with pytest.raises(ConflictError, match="not ready"):
        push(steps[0], remote, ready="DONE")
    with pytest.raises(ConflictError, match="of rest"):
        push(steps[0], remote, settle_seconds=3600)
    assert not remote.exists()
    (steps[0] / "DONE").write_text("")
    for path in steps[0].iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert push(steps[0], remote, ready="DONE", settle_seconds=3600).version == 1


def test_a_source_that_changes_is_not_published(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)

    def touch(stage: str, done: int, total: int) -> None:
        (steps[1] / "config.json").write_text('{"changed": 1}')

    with pytest.raises(ConflictError, match="changed while reading"):
        push(steps[1], remote, progress=touch)
    assert len(commits(remote)) == 1
    assert push(steps[1], remote).version == 2


def test_a_history_does_not_begin_where_a_disk_is_missing(steps: list[Path], tmp_path: Path) -> None:
    for dry_run in (True, False):
        with pytest.raises(NotFoundError, match="there is no folder"):
            push(steps[0], tmp_path / "mount/run", dry_run=dry_run)
    assert not (tmp_path / "mount").exists() and not (steps[0].parent / ".dcr-baseline").exists()


def test_a_checkpoint_for_a_remote(steps: list[Path]) -> None:
    before = tree(steps[1])
    with pytest.raises(UsageError, match="is no remote"):
        push(steps[0], steps[1])
    assert tree(steps[1]) == before


def test_nothing_there(tmp_path: Path, remote: Path) -> None:
    with pytest.raises(NotFoundError):
        push(tmp_path / "nothing", remote)
    assert not remote.exists()


# Others who publish


def test_two_race_for_a_version(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    barrier = threading.Barrier(2)

    class Meets(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "create" and key == "commits/0000000002.json":
                barrier.wait(60)

    outcomes: list[PushResult | DcrError] = []

    def publish(step: Path, place: Path) -> None:
        try:
            outcomes.append(push(step, remote, baseline=place))
        except DcrError as error:
            outcomes.append(error)

    with wrapping(Meets):
        threads = [
            threading.Thread(target=publish, args=pair)
            for pair in ((steps[1], tmp_path / "one"), (steps[2], tmp_path / "two"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    won = [outcome for outcome in outcomes if isinstance(outcome, PushResult)]
    lost = [outcome for outcome in outcomes if isinstance(outcome, ConflictError)]
    assert len(won) == len(lost) == 1
    assert won[0].id is not None and won[0].id in str(lost[0])
    assert [document["id"] for document in commits(remote)][1:] == [won[0].id]
    assert build_all(remote, tmp_path / "scratch")[1] in (tree(steps[1]), tree(steps[2]))


def test_two_publish_the_same(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    taken: list[PushResult] = []

    class Overtakes(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "create" and key.startswith("commits/") and not taken:
                taken.append(push_elsewhere())

    def push_elsewhere() -> PushResult:
        taken.append(None)  # type: ignore[arg-type]
        with wrapping(lambda backend: backend):
            return push(steps[1], remote, baseline=tmp_path / "two")

    with wrapping(Overtakes):
        result = push(steps[1], remote, baseline=tmp_path / "one")
    assert (result.kind, result.version) == ("same", 2)
    assert tree(tmp_path / "one") == tree(steps[1])
    assert len(commits(remote)) == 2


def test_a_first_version_that_was_taken(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    """Who loses the race for it has a baseline of what nobody has published, and publishes the version after it."""
    is_taken: list[bool] = []

    class Overtakes(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "create" and key.startswith("commits/") and not is_taken:
                is_taken.append(True)
                push(steps[0], remote, baseline=tmp_path / "one")

    with wrapping(Overtakes), pytest.raises(ConflictError, match="version 1 was taken"):
        push(steps[1], remote, baseline=tmp_path / "two")
    result = push(steps[2], remote, baseline=tmp_path / "two")
    assert (result.version, result.kind) == (2, "delta")
    assert tree(tmp_path / "two") == tree(steps[2])
    assert build_all(remote, tmp_path / "scratch") == [tree(steps[0]), tree(steps[2])]


class KillsBeforeCommit(Wrapped):
    def called(self, name: str, key: str) -> None:
        if name == "create" and key.startswith("commits/"):
            raise StoppedError


def test_a_break_that_was_not_published(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    with wrapping(KillsBeforeCommit), pytest.raises(StoppedError):
        push(steps[1], remote, no_delta=True)
    result = push(steps[2], remote)
    assert (result.version, result.kind) == (2, "delta")
    assert build_all(remote, tmp_path / "scratch") == [tree(steps[0]), tree(steps[2])]


def test_a_push_that_runs_has_the_baseline(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    inner: list[DcrError] = []

    class PushesToo(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "create" and key.startswith("commits/") and not inner:
                with pytest.raises(ConflictError) as caught:
                    push(steps[2], remote)
                inner.append(caught.value)

    with wrapping(PushesToo):
        push(steps[1], remote)
    assert f"process {os.getpid()}" in str(inner[0])


# What goes wrong on the way


def test_any_call_fails_once(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    places = {"remote": remote, "baselines": steps[0].parent / ".dcr-baseline"}
    kept = {name: fresh_copy(path, tmp_path / f"kept-{name}") for name, path in places.items()}
    call = 0
    while True:
        for name, path in places.items():
            fresh_copy(kept[name], path)
        failing: list[FailsCall] = []

        def fail(backend: Backend, call: int = call, failing: list[FailsCall] = failing) -> Backend:
            failing.append(FailsCall(backend, call))
            return failing[0]

        with wrapping(fail):
            result = push(steps[1], remote, jobs=1)
        assert (result.kind, result.version) == ("delta", 2)
        assert len(commits(remote)) == 2
        assert tree(baseline_of(steps[0])) == tree(steps[1])
        if failing[0].next_call() <= call:
            break
        call += 1
    assert call > 8


def test_the_answer_to_a_write_is_lost(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    class LosesAnswers(Wrapped):
        def done(self, name: str, key: str) -> None:
            if name in ("write", "create") and key not in seen:
                seen.add(key)
                raise TransientError("did not answer in 30 s")

    seen: set[str] = set()
    with wrapping(LosesAnswers):
        for step in steps[:3]:
            push(step, remote)
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_a_remote_that_is_gone(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)

    with wrapping(lambda backend: FailsCall(backend, 0, PermanentError("status 401"))), pytest.raises(TransportError):
        push(steps[1], remote)
    assert push(steps[1], remote).version == 2


def test_no_exclusive_create(steps: list[Path], remote: Path) -> None:
    with wrapping(IgnoresTheCondition), pytest.raises(UnsupportedError, match="created again"):
        push(steps[0], remote)
    assert not (remote / "commits").exists()
    with wrapping(IgnoresTheCondition):
        assert push(steps[0], remote, single_writer=True).version == 1


def test_the_rights_that_a_push_needs(steps: list[Path], remote: Path) -> None:
    def few(backend: Backend) -> Allows:
        return Allows(
            backend,
            get=["dcr.json", "commits/*"],
            create=["dcr.json", "commits/*"],
            put=["versions/*", "anchors/*", "next.json"],
            stat=["versions/*", "anchors/*"],
        )

    with wrapping(few):
        for step in steps[:3]:
            push(step, remote, anchor_every=2)
    assert len(commits(remote)) == 3


# What goes wrong when the version is there


@pytest.mark.parametrize("link", [False, True])
def test_published_but_the_baseline_has_no_room(
    steps: list[Path], remote: Path, tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def no_room(*arguments: object, **options: object) -> None:
        raise LocalError("the baseline", "no space left on device", hint="make room")

    push(steps[0], remote, baseline_link=link)
    with monkeypatch.context() as patch:
        patch.setattr(Baseline, "relink", no_room)
        patch.setattr(moving, "apply_chain", no_room)
        more = ["--baseline-link"] if link else []
        assert main(["push", str(steps[1]), str(remote), "--json", *more]) == 9
    document = json.loads(capsys.readouterr().out)
    assert (document["committed"], document["version"]) == (True, 2)
    assert document["error"]["message"].endswith("no space left on device; version 2 is published all the same")
    assert document["error"]["hint"] == "make room; then the same command again brings the baseline to it"
    assert len(commits(remote)) == 2
    result = push(steps[1], remote, baseline_link=link)
    assert (result.version, result.kind, result.recovered) == (2, "same", True)
    assert tree(baseline_of(steps[1])) == tree(steps[1])
    assert push(steps[2], remote, baseline_link=link).base_version == 2
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_published_but_its_anchor_is_not(steps: list[Path], remote: Path) -> None:
    class Refuses(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "write" and key.startswith("anchors/0000000002"):
                raise PermanentError("quota exceeded")

    push(steps[0], remote)
    with wrapping(Refuses), pytest.raises(TransportError, match="version 2 is published all the same") as caught:
        push(steps[1], remote, anchor_every=1)
    assert caught.value.hint is not None and caught.value.hint.endswith("dcr anchor adds its anchor")
    assert caught.value.details == {"committed": True, "version": 2}
    assert push(steps[1], remote).kind == "same" and not anchor(steps[1], remote).already


# Prepared versions


def acknowledge(remote: Path, result: PushResult, receiver: str, stage: str, key: Path | None = None) -> None:
    assert result.version is not None and result.id is not None
    place = Place(result.version, result.id)
    word = Acknowledgement(result.history, place, receiver, stage, result.target, False, "")
    path = remote / acknowledgement_key(place, receiver, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_acknowledgement(word, load_signing_key(key) if key is not None else None))


def test_prepared_and_committed(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    prepared = push(steps[1], remote, prepare=True)
    assert (prepared.kind, prepared.version) == ("prepared", 2)
    assert len(commits(remote)) == 1 and tree(baseline_of(steps[0])) == tree(steps[0])
    hint = decode_hint((remote / "next.json").read_bytes())
    assert hint is not None and (hint.state, hint.place.id) == ("prepared", prepared.id)
    with pytest.raises(ConflictError, match="0 of 1") as caught:
        commit(remote, quorum=1)
    assert caught.value.details == {"committed": False}
    acknowledge(remote, prepared, "host-1", STAGED)
    acknowledge(remote, prepared, "host-2", APPLIED)
    assert commit(remote, quorum=2).staged == ("host-1", "host-2")
    assert commit(remote).already
    result = push(steps[2], remote)
    assert (result.recovered, result.version) == (True, 3)
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_prepared_and_given_up(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    for _ in range(2):
        assert not commit(remote, abort=True).committed
        with pytest.raises(ConflictError, match="version 2 was given up"):
            commit(remote)
    push(steps[2], remote)
    assert build_all(remote, tmp_path / "scratch") == [tree(steps[0]), tree(steps[2])]


def test_prepared_and_overtaken(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    push(steps[1], remote, baseline=tmp_path / "one", prepare=True)
    push(steps[2], remote, baseline=tmp_path / "two")
    with pytest.raises((ConflictError, NotFoundError)):
        commit(remote, 2)
    assert len(commits(remote)) == 2


def test_only_listed_receivers_count(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    push(steps[0], remote)
    prepared = push(steps[1], remote, prepare=True)
    acknowledge(remote, prepared, "stranger", STAGED, keys[1])
    acknowledge(remote, prepared, "nobody", STAGED)
    with pytest.raises(ConflictError, match="0 of 1"):
        commit(remote, quorum=1, receivers=[str(keys[0].with_suffix(".pub"))])
    acknowledge(remote, prepared, "host", STAGED, keys[0])
    acknowledge(remote, prepared, "host-again", APPLIED, keys[0])
    newer = remote / "acks" / f"{Place(2, str(prepared.id))}" / "newer.staged"
    newer.write_bytes(b'{"format":"dcr-2","requires":[]}\n')
    with pytest.raises(UsageError, match="2 receivers cannot sign with 1 keys"):
        commit(remote, quorum=2, receivers=[str(keys[0].with_suffix(".pub"))])
    with pytest.raises(ConflictError, match="1 of 2"):
        commit(remote, quorum=2, receivers=[str(keys[0].with_suffix(".pub")), "0" * 64])
    assert commit(remote, quorum=1, receivers=[str(keys[0].with_suffix(".pub"))]).staged == ("host-again",)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_first_push_that_fails_leaves_nothing(
    steps: list[Path], remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    class WritesNothing(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name in ("create", "write"):
                raise DeniedError("status 403")

    given = tmp_path / "own"
    options: dict[str, Any] = {"baseline": given} if is_given else {}
    place = given if is_given else steps[0].parent / ".dcr-baseline"
    with wrapping(WritesNothing), pytest.raises(TransportError, match="denied"):
        push(steps[0], remote, **options)
    assert not place.exists()
    # What somebody else has made stays there.
    place.mkdir()
    with wrapping(WritesNothing), pytest.raises(TransportError, match="denied"):
        push(steps[0], remote, **options)
    assert list(place.iterdir()) == []

    def no_room(*_: object) -> None:
        raise LocalError("baseline", "no room")

    with monkeypatch.context() as patched:
        patched.setattr(Baseline, "check_room", no_room)
        patched.setattr(Baseline, "can_clone", lambda *_: False)
        with pytest.raises(LocalError, match="no room"):
            push(steps[0], remote, **options)
    assert list(place.iterdir()) == []
    with wrapping(IgnoresTheCondition), pytest.raises(UnsupportedError, match="could be created again"):
        push(steps[0], remote, **options)
    assert list(place.iterdir()) == []
    assert push(steps[0], remote, single_writer=True, **options).version == 1


def test_waiting_for_receivers(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    with pytest.raises(ConflictError, match="0 of 1") as caught:
        push(steps[1], remote, wait_applied=1, timeout_seconds=0)
    assert caught.value.details == {"committed": True}
    assert len(commits(remote)) == 2
    with pytest.raises(ConflictError, match="0 of 1"):
        push(steps[1], remote, wait_applied=1, timeout_seconds=0)
    with pytest.raises(UsageError, match="nobody can be at"):
        push(steps[1], remote, wait_applied=1, prepare=True)
    with pytest.raises(UsageError, match="found 0"):
        push(steps[1], remote, wait_applied=0)


def test_a_quorum_that_is_none(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    with pytest.raises(UsageError, match="found -1"):
        commit(remote, quorum=-1)
    with pytest.raises(UsageError, match="nobody is waited for"):
        commit(remote, receivers=["0" * 64])
    with pytest.raises(UsageError, match="exclude each other"):
        commit(remote, quorum=1, abort=True)
    assert len(commits(remote)) == 1


def test_given_up_and_prepared_again_is_another_attempt(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    first = push(steps[1], remote, prepare=True)
    assert push(steps[1], remote, prepare=True).id == first.id
    acknowledge(remote, first, "host", STAGED)
    commit(remote, abort=True)
    # The receiver has let go of what it had staged.
    again = push(steps[1], remote, prepare=True)
    assert again.id != first.id
    with pytest.raises(ConflictError, match="0 of 1"):
        commit(remote, quorum=1)
    acknowledge(remote, again, "host", STAGED)
    assert commit(remote, quorum=1).id == again.id


def test_given_up_while_receivers_are_waited_for(steps: list[Path], remote: Path) -> None:
    class GivesUp(Wrapped):
        """Somebody gives the version up as soon as its receivers have been counted."""

        def done(self, name: str, key: str) -> None:
            if name == "entries" and key.startswith("acks/") and prepared.exists():
                prepared.unlink()

    push(steps[0], remote)
    result = push(steps[1], remote, prepare=True)
    (prepared,) = remote.glob("versions/*/commit.json")
    acknowledge(remote, result, "host", STAGED)
    with wrapping(GivesUp), pytest.raises(ConflictError, match="was given up"):
        commit(remote, quorum=1)
    assert len(commits(remote)) == 1


def test_a_prepared_version_from_another_state(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    (prepared,) = remote.glob("versions/*/commit.json")
    document = json.loads(prepared.read_bytes())
    document["base"]["content"] = document["target"]["content"]
    prepared.write_bytes(json.dumps(document).encode() + b"\n")
    with pytest.raises(DamagedError, match="from another state than that of version 1"):
        commit(remote)
    assert len(commits(remote)) == 1


def test_another_base_leaves_the_baseline_at_its_version(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, base=steps[0])
    assert push(steps[2], remote).version == 3
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_a_damaged_baseline_is_mended_as_the_hint_says(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    shard = next(baseline_of(steps[0]).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(WrongBaseError, match="is not at version 1") as caught:
        push(steps[1], remote)
    assert caught.value.hint == f"dcr pull --repair {remote} {baseline_of(steps[0])} mends the baseline"
    pull(remote, baseline_of(steps[0]), repair=True)
    assert push(steps[1], remote).version == 2


def test_two_begin_at_the_same_time(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    class Overtakes(Wrapped):
        def called(self, name: str, key: str) -> None:
            if (name, key) == ("create", "commits/0000000001.json") and not others:
                others.append(1)
                push(steps[1], remote, baseline=tmp_path / "other")

    others: list[int] = []
    with wrapping(Overtakes), pytest.raises(ConflictError, match="version 1 was taken") as caught:
        push(steps[0], remote)
    assert caught.value.hint == "run the same command again: it will publish the version after it"
    assert push(steps[0], remote).version == 2
    assert build_all(remote, tmp_path / "scratch") == [tree(steps[1]), tree(steps[0])]


# Anchors


def test_anchors_now_and_then(steps: list[Path], remote: Path) -> None:
    results = [push(step, remote, anchor_every=2) for step in steps]
    assert [result.anchor for result in results] == [1, 1, 3, 3, 5]
    for number in (1, 3, 5):
        assert tree(anchor_folder(remote, commits(remote)[number - 1])) == tree(steps[number - 1])
    assert [document["anchor"] for document in commits(remote)] == [1, 1, 1, 3, 3]


def test_an_anchor_later(steps: list[Path], remote: Path) -> None:
    for step in steps[:3]:
        push(step, remote)
    assert anchor(steps[1], remote).version == 2
    assert anchor(steps[1], remote).already
    assert tree(anchor_folder(remote, commits(remote)[1])) == tree(steps[1])
    with pytest.raises(WrongBaseError, match="none of the newest"):
        anchor(steps[4], remote)
    with pytest.raises(WrongBaseError, match="version 3"):
        anchor(steps[1], remote, version=3)
    assert push(steps[3], remote).anchor == 1


def test_an_anchor_that_is_not_whole_comes_again(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    push(steps[0], remote)
    push(steps[1], remote)
    anchor(steps[1], remote)
    (file,) = (remote / "anchors").glob("0000000002-*/files/model-00001-*")
    for spoil in (file.unlink, lambda: file.write_bytes(b"cut")):
        spoil()
        assert not anchor(steps[1], remote).already
        assert anchor(steps[1], remote).already
    (document,) = (remote / "anchors").glob("0000000002-*.json")
    document.write_bytes(document.read_bytes()[:-2])
    assert not anchor(steps[1], remote).already
    assert not anchor(steps[1], remote, sign_key=keys[0]).already
    assert anchor(steps[1], remote, sign_key=keys[0]).already
    assert anchor(steps[1], remote).already


def test_an_anchor_that_a_commit_binds_stays_what_it_is(
    steps: list[Path], remote: Path, keys: tuple[Path, Path]
) -> None:
    push(steps[0], remote)
    (document,) = (remote / "anchors").glob("0000000001-*.json")
    before = document.read_bytes()
    document.unlink()
    with pytest.raises(WrongBaseError, match="another than the commit"):
        anchor(steps[0], remote, sign_key=keys[0])
    assert not document.exists()
    assert not anchor(steps[0], remote).already
    assert document.read_bytes() == before


def test_signed_versions(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    push(steps[0], remote, sign_key=keys[0])
    push(steps[1], remote, sign_key=keys[0])
    for number in (1, 2):
        line, signature, end = (remote / f"commits/{number:010d}.json").read_bytes().split(b"\n")
        assert signature.startswith(b"ed25519:") and line and not end
    with pytest.raises(UsageError, match="a private one is needed"):
        push(steps[2], remote, sign_key=keys[0].with_suffix(".pub"))


def test_only_signed_versions_are_followed(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    own: dict[str, Any] = {"sign_key": keys[0], "trusted_keys": [str(keys[0].with_suffix(".pub"))]}
    other: dict[str, Any] = {"trusted_keys": [str(keys[1].with_suffix(".pub"))]}
    push(steps[0], remote, **own)
    push(steps[1], remote, **own)
    with changing_nothing(remote.parent), pytest.raises(WrongBaseError, match="signed"):
        push(steps[2], remote, dry_run=True, **other)
    before = snapshot(remote)
    with pytest.raises(WrongBaseError, match="signed"):
        push(steps[2], remote, **other)
    assert snapshot(remote) == before
    push(steps[2], remote, **own)


@pytest.mark.parametrize("way", ["its note", "no note", "no baseline"])
def test_a_baseline_is_brought_over_what_was_signed(
    steps: list[Path], remote: Path, tmp_path: Path, keys: tuple[Path, Path], way: str
) -> None:
    trusting: dict[str, Any] = {"trusted_keys": [str(keys[0].with_suffix(".pub"))], "baseline": tmp_path / "own"}
    theirs: dict[str, Any] = {"sign_key": keys[0], "baseline": tmp_path / "theirs"}
    push(steps[0], remote, **theirs)
    if way != "no baseline":
        fresh_copy(tmp_path / "theirs", tmp_path / "own")
    push(steps[1], remote, **theirs)
    if way == "no note":
        (tmp_path / "own/.dcr/remote.json").unlink()
    checkpoint = steps[0] if way == "no baseline" else steps[2]
    result = push(checkpoint, remote, sign_key=keys[0], **trusting)
    assert (result.version, result.base_version) == (3, 2) and tree(tmp_path / "own") == tree(checkpoint)


def test_a_baseline_is_not_brought_over_what_nobody_signed(
    steps: list[Path], remote: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    trusting: dict[str, Any] = {"trusted_keys": [str(keys[0].with_suffix(".pub"))], "baseline": tmp_path / "own"}
    push(steps[0], remote, sign_key=keys[0], **trusting)
    push(steps[1], remote, baseline=fresh_copy(tmp_path / "own", tmp_path / "theirs"))
    before = snapshot(remote)
    with pytest.raises(WrongBaseError, match="signed"):
        push(steps[2], remote, sign_key=keys[0], **trusting)
    assert snapshot(remote) == before and tree(tmp_path / "own") == tree(steps[0])


def test_what_is_written_lies_apart_from_what_is_read(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    own = fresh_copy(steps[0], tmp_path / "own")
    # As one that an apply has changed: only the state folder tells a baseline from any other folder.
    (own / ".dcr").mkdir()
    before = tree(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(own)
    for checkpoint, where, baseline in (
        (own, own, None),
        (own, own / "remote", None),
        (own, tmp_path, None),
        (own, remote, own),
        (own, remote, link),
        (own, remote, own / "baseline"),
        (own, remote, tmp_path),
        (own, remote, remote / "baseline"),
    ):
        with pytest.raises(UsageError, match="cannot lie inside"):
            push(checkpoint, where, baseline=baseline)
    link.unlink()
    assert tree(tmp_path) == before


def test_a_receiver_is_no_baseline(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    pull(remote, tmp_path / "receiver")
    with pytest.raises(ConflictError, match="no baseline"):
        push(steps[1], remote, baseline=tmp_path / "receiver", no_delta=True)
    assert tree(tmp_path / "receiver") == tree(steps[0])
