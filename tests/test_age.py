"""Going on with what was sent: only while no prune can take it for given up, by the store's own clock."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dcr_cli.errors import ConflictError
from dcr_cli.prune import prune
from dcr_cli.push import PushResult, push
from dcr_cli.push_part import PartResult, Rank
from dcr_cli.store.backend import Backend, DeniedError, Status
from dcr_cli.verify_remote import verify_remote
from faults import StoppedError
from part_ranks import all_ranks, one_rank, results
from published import build_all, commits
from receivers import fresh_copy, tree
from store_wrappers import Wrapped, interrupting, wrapping
from strategies import write_halves, write_tiny_steps

HOUR = 3600.0


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 2)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


class KillsBeforeCommit(Wrapped):
    def called(self, name: str, key: str) -> None:
        if name == "create" and key.startswith("commits/"):
            raise StoppedError


class Later(Wrapped):
    """The store's clock tells a time so many hours later; None for none at all."""

    def __init__(self, backend: Backend, hours: float | None) -> None:
        super().__init__(backend)
        self.hours = hours

    def status(self, key: str) -> Status | None:
        status = super().status(key)
        if status is None or status.modified is None:
            return status
        return replace(status, modified=status.modified + self.hours * HOUR if self.hours is not None else None)


class KillsAfterRemoving(Wrapped):
    """The process is no more once it has removed so many objects of versions."""

    def __init__(self, backend: Backend, left: int) -> None:
        super().__init__(backend)
        self.left = left

    def done(self, name: str, key: str) -> None:
        if name == "remove" and key.startswith("versions/"):
            self.left -= 1
            if self.left == 0:
                raise StoppedError


class Silent(Wrapped):
    """Who publishes may not ask for the hint."""

    def status(self, key: str) -> Status | None:
        if key == "next.json":
            raise DeniedError("status 403")
        return super().status(key)


def stop(step: Path, remote: Path, hours: float | None = 0.0) -> str:
    """Stop a push of a step just before its commit: the id under which it was sent."""
    before = set(remote.glob("versions/*")) | set(remote.glob("anchors/*"))
    with (
        wrapping(lambda backend: KillsBeforeCommit(Later(backend, hours))),
        pytest.raises(StoppedError),
    ):
        push(step, remote)
    (found,) = {path.name[:43] for path in (set(remote.glob("versions/*")) | set(remote.glob("anchors/*"))) - before}
    return found.partition("-")[2]


def go_on(step: Path, remote: Path, hours: float | None) -> PushResult:
    with wrapping(lambda backend: Later(backend, hours)):
        return push(step, remote)


@pytest.mark.parametrize(("hours", "is_same"), [(11.9, True), (12.1, False), (-1.0, True), (-13.0, False)])
def test_a_delta(steps: list[Path], remote: Path, tmp_path: Path, hours: float, is_same: bool) -> None:
    push(steps[0], remote)
    begun = stop(steps[1], remote)
    result = go_on(steps[1], remote, hours)
    assert (result.id == begun) == is_same
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]


@pytest.mark.parametrize(("hours", "is_same"), [(11.9, True), (12.1, False)])
def test_an_anchor(steps: list[Path], remote: Path, tmp_path: Path, hours: float, is_same: bool) -> None:
    begun = stop(steps[0], remote)
    result = go_on(steps[0], remote, hours)
    assert (result.id == begun, result.version) == (is_same, 1)
    assert build_all(remote, tmp_path / "scratch") == [tree(steps[0])]


def test_a_store_without_times(steps: list[Path], remote: Path) -> None:
    """Nothing is pruned there that nobody has committed."""
    push(steps[0], remote)
    begun = stop(steps[1], remote, None)
    assert go_on(steps[1], remote, None).id == begun


@pytest.mark.parametrize(("first", "then"), [(None, 0.0), (0.0, None)])
def test_a_clock_that_is_not_always_told(
    steps: list[Path], remote: Path, first: float | None, then: float | None
) -> None:
    push(steps[0], remote)
    begun = stop(steps[1], remote, first)
    assert go_on(steps[1], remote, then).id != begun


def test_a_clock_that_may_not_be_asked(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    begun = stop(steps[1], remote)
    with wrapping(Silent):
        assert push(steps[1], remote).id != begun


@pytest.mark.parametrize("step", [0, 1])
def test_gone_on_with_while_it_is_pruned(steps: list[Path], remote: Path, tmp_path: Path, step: int) -> None:
    """At no call of a prune does it take away what a push goes on with that was stopped the day before."""
    for number in range(step):
        push(steps[number], remote)
    stop(steps[step], remote)
    (home,) = tmp_path.glob("steps/.dcr-baseline/*/.dcr/outgoing")
    begun = json.loads((home / "begun.json").read_text())
    (home / "begun.json").write_text(json.dumps({"modified": begun["modified"] - 25 * HOUR}))
    (remote / "next.json").unlink()
    old = time.time() - 25 * HOUR
    places = (remote, tmp_path / "steps/.dcr-baseline")
    kept = {path: fresh_copy(path, tmp_path / f"kept{path.name}") for path in places}
    call = 0
    while True:
        for path, copy in kept.items():
            fresh_copy(copy, path)
        for path in remote.glob("*/**/*"):
            os.utime(path, (old, old))
        done: list[PushResult] = []
        with interrupting(call, lambda done=done: done.append(push(steps[step], remote))):  # type: ignore[misc]
            prune(remote)
        if not done:
            break
        assert len(commits(remote)) == step + 1
        verify_remote(remote, deep=True)
        assert build_all(remote, tmp_path / "scratch")[step] == tree(steps[step])
        call += 1
    assert call > 5


def grow_old(remote: Path, hours: float) -> None:
    """Let all objects be so much older."""
    for path in remote.glob("**/*.*"):
        os.utime(path, (time.time() - hours * HOUR,) * 2)


@pytest.fixture
def halves(tmp_path: Path) -> list[Path]:
    """Two steps between which what each of two ranks compares has changed."""
    return write_halves(tmp_path)


@pytest.mark.parametrize(
    ("hours", "tells_time", "is_taken"),
    [(11.9, True, True), (12.1, True, False), (-1.0, True, True), (-13.0, True, False), (100.0, False, True)],
)
def test_a_part(
    halves: list[Path], remote: Path, tmp_path: Path, hours: float, tells_time: bool, is_taken: bool
) -> None:
    push(halves[0], remote)
    one_rank(halves[1], remote, Rank(1, 2), wait=False)
    before = tree(remote)
    grow_old(remote, hours)
    with wrapping(lambda backend: Later(backend, 0.0 if tells_time else None)):
        found = one_rank(halves[1], remote, Rank(1, 2), wait=False)
    assert isinstance(found, PartResult) and (found.recovered, found.uploaded_bytes == 0) == (is_taken, is_taken)
    assert tree(remote) == before
    results(all_ranks(halves[1], remote, 2))
    assert build_all(remote, tmp_path / "scratch")[1] == tree(halves[1])


def go_on_with_parts(step: Path, remote: Path, attempt: str = "0") -> bool:
    """Run both ranks, one after the other: whether there is a version; else it was given up."""
    done = [one_rank(step, remote, Rank(rank, 2, attempt), wait=False, timeout_seconds=0.0) for rank in (1, 0)]
    if isinstance(done[1], ConflictError):
        assert "given up" in str(done[1]) and "--attempt" in str(done[1].hint)
        return False
    assert [each.kind for each in results(done)] == ["part", "delta"]
    return True


def test_parts_gone_on_with_while_they_are_pruned(halves: list[Path], remote: Path, tmp_path: Path) -> None:
    """At no call of a prune does it take away what becomes a version of ranks that were stopped the day before."""
    push(halves[0], remote)
    one_rank(halves[1], remote, Rank(1, 2), wait=False)
    places = (remote, tmp_path / "steps/.dcr-baseline")
    kept = {path: fresh_copy(path, tmp_path / f"kept{path.name}") for path in places}
    call = 0
    while True:
        for path, copy in kept.items():
            fresh_copy(copy, path)
        grow_old(remote, 25.0)
        done: list[bool] = []
        with interrupting(call, lambda done=done: done.append(go_on_with_parts(halves[1], remote))):  # type: ignore[misc]
            prune(remote)
        if not done:
            break
        assert len(commits(remote)) == (2 if done[0] else 1)
        assert done[0] or go_on_with_parts(halves[1], remote)
        assert build_all(remote, tmp_path / "scratch")[1] == tree(halves[1])
        call += 1
    assert call > 5


@pytest.mark.parametrize("removed", [1, 2, 3])
def test_parts_gone_on_with_after_a_prune_that_was_killed(
    halves: list[Path], remote: Path, tmp_path: Path, removed: int
) -> None:
    push(halves[0], remote)
    one_rank(halves[1], remote, Rank(1, 2), wait=False)
    grow_old(remote, 25.0)
    with wrapping(lambda backend: KillsAfterRemoving(backend, removed)), pytest.raises(StoppedError):
        prune(remote)
    assert len(list(remote.glob("versions/*/*/*"))) == 3 - removed
    assert not go_on_with_parts(halves[1], remote)
    assert go_on_with_parts(halves[1], remote, "another")
    assert build_all(remote, tmp_path / "scratch")[1] == tree(halves[1])


def test_parts_of_which_another_prune_has_taken_some(halves: list[Path], remote: Path, tmp_path: Path) -> None:
    """One that gave nothing up, and was killed."""
    push(halves[0], remote)
    one_rank(halves[1], remote, Rank(1, 2), wait=False)
    next(remote.glob("versions/*/payloads/*")).unlink()
    assert go_on_with_parts(halves[1], remote)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(halves[1])
