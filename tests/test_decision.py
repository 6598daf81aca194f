"""Committing a prepared version beside giving it up: of all who decide at once, each is told what became of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import Run
from dcr_cli.commit import commit
from dcr_cli.errors import ConflictError, DcrError, NotFoundError
from dcr_cli.prune import prune
from dcr_cli.pull import pull
from dcr_cli.push import PushResult, push
from dcr_cli.push_part import Rank, push_part
from dcr_cli.remote.decision import ABORT, COMMIT, decide
from dcr_cli.remote.hint import PREPARED, STREAMING, Hint, encode_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import Place, new_id
from dcr_cli.store.backend import AbsentError, Backend
from dcr_cli.store.opening import open_store
from dcr_cli.verify_remote import verify_remote
from faults import StoppedError
from published import build_all, commits
from receivers import fresh_copy, tree
from store_wrappers import KillsAtCall, Wrapped, interrupting, wrapping
from strategies import write_tiny_steps

COMMITTED, GIVEN_UP, REFUSED = "committed", "given up", "refused"


def refused(error: DcrError, *reasons: str) -> str:
    """That it was refused, and for one of these reasons."""
    assert any(reason in str(error) for reason in reasons), error
    return REFUSED


@dataclass
class Scene:
    """A remote at version 1 whose version 2 is prepared, and what was there before each try."""

    root: Path
    steps: list[Path]
    prepared: PushResult

    @property
    def remote(self) -> Path:
        return self.root / "remote"

    @property
    def baseline(self) -> Path:
        return self.root / "baseline"

    def restore(self) -> None:
        for name in ("remote", "baseline"):
            fresh_copy(self.root / f"kept-{name}", self.root / name)

    def commit(self) -> str:
        try:
            commit(self.remote, 2)
        except (ConflictError, NotFoundError) as error:
            return refused(error, "given up", "taken", "no version 2 is prepared")
        return COMMITTED

    def abort(self) -> str:
        try:
            result = commit(self.remote, 2, abort=True)
        except ConflictError as error:
            return refused(error, "is committed", "taken")
        return COMMITTED if result.committed else GIVEN_UP

    def push(self, step: int, **options: object) -> PushResult:
        return push(self.steps[step], self.remote, baseline=self.baseline, jobs=1, **options)  # type: ignore[arg-type]

    def id_of_2(self) -> str | None:
        found = commits(self.remote)
        return found[1]["id"] if len(found) > 1 else None


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    steps = write_tiny_steps(tmp_path, 3)
    remote, baseline = tmp_path / "remote", tmp_path / "baseline"
    push(steps[0], remote, baseline=baseline)
    prepared = push(steps[1], remote, baseline=baseline, prepare=True)
    for place in (remote, baseline):
        fresh_copy(place, tmp_path / f"kept-{place.name}")
    return Scene(tmp_path, steps, prepared)


def both(scene: Scene, first: Callable[[], str], second: Callable[[], str]) -> set[tuple[str, str]]:
    """What both came to, for each call of the first one before which the second one happens."""
    outcomes: set[tuple[str, str]] = set()
    number = 0
    while True:
        scene.restore()
        others: list[str] = []
        with interrupting(number, lambda others=others: others.append(second())):  # type: ignore[misc]
            outcome = first()
        if not others:
            return outcomes
        outcomes.add((outcome, others[0]))
        is_there = scene.id_of_2() == scene.prepared.id
        assert is_there == (COMMITTED in (outcome, others[0])), (number, outcome, others)
        assert not (is_there and GIVEN_UP in (outcome, others[0])), (number, outcome, others)
        number += 1


def test_given_up_while_it_is_committed(scene: Scene) -> None:
    assert both(scene, scene.commit, scene.abort) == {(REFUSED, GIVEN_UP), (COMMITTED, REFUSED)}


def test_committed_while_it_is_given_up(scene: Scene) -> None:
    assert both(scene, scene.abort, scene.commit) == {(COMMITTED, COMMITTED), (GIVEN_UP, REFUSED), (REFUSED, COMMITTED)}


def test_two_commit_at_once(scene: Scene) -> None:
    assert both(scene, scene.commit, scene.commit) == {(COMMITTED, COMMITTED)}


def test_given_up_while_its_publisher_commits_it(scene: Scene) -> None:
    def publish() -> str:
        try:
            result = scene.push(1)
        except ConflictError as error:
            return refused(error, "given up")
        # Under another id it is another version.
        return COMMITTED if result.id == scene.prepared.id else REFUSED

    outcomes = both(scene, publish, scene.abort)
    assert (COMMITTED, REFUSED) in outcomes and (REFUSED, GIVEN_UP) in outcomes
    scene.restore()
    assert scene.push(1).id == scene.prepared.id


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["commit", "abort", "same", "other", "prepare"])
def test_who_commits_is_killed(scene: Scene, when: str, way: str) -> None:
    """Whoever comes next can go on, whatever he wants."""
    number = 0
    while True:
        scene.restore()
        killing: list[KillsAtCall] = []

        def kill(backend: Backend, number: int = number, killing: list[KillsAtCall] = killing) -> Backend:
            killing.append(KillsAtCall(backend, number, when=when))
            return killing[0]

        with wrapping(kill):
            try:
                scene.commit()
            except StoppedError:
                pass
            else:
                return
        was_there = len(commits(scene.remote)) == 2
        is_decided = was_there or any(scene.remote.glob("versions/*/decision.json"))
        if way == "commit":
            assert scene.commit() == COMMITTED and scene.id_of_2() == scene.prepared.id
        elif way == "abort":
            expected = COMMITTED if was_there else REFUSED if is_decided else GIVEN_UP
            assert scene.abort() == expected
            assert scene.commit() == (COMMITTED if is_decided else REFUSED)
        elif way == "same":
            result = scene.push(1)
            assert (result.version, result.id) == (2, scene.prepared.id)
        elif way == "other":
            scene.push(2)
            states = [0, 1, 2] if was_there else [0, 2]
            assert build_all(scene.remote, scene.root / "scratch") == [tree(scene.steps[step]) for step in states]
            assert scene.commit() == (COMMITTED if was_there else REFUSED)
        elif not was_there:
            assert scene.push(1, prepare=True).id == scene.prepared.id
            assert scene.commit() == COMMITTED
        number += 1


def test_what_is_decided_needs_no_quorum_again(scene: Scene) -> None:
    with pytest.raises(ConflictError, match="0 of 1"):
        commit(scene.remote, quorum=1)
    place = Place(2, str(scene.prepared.id))
    document: dict[str, object] = {"format": "dcr-1", "requires": [], "history": scene.prepared.history}
    document |= {"version": 2, "id": place.id, "decision": "commit"}
    line = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    (scene.remote / f"versions/{place}/decision.json").write_bytes(line)
    assert commit(scene.remote, quorum=1).committed


@contextmanager
def once_counted(act: Callable[[], object]) -> Iterator[None]:
    """Meanwhile something happens, once, when the receivers that have staged a version were counted."""
    left = [act]

    class Acts(Wrapped):
        def done(self, name: str, key: str) -> None:
            if name == "entries" and key.startswith("acks/") and left:
                left.pop()()

    with wrapping(Acts):
        yield
    assert not left


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_committed_by_somebody_else_while_receivers_are_waited_for(scene: Scene, seconds: float) -> None:
    with once_counted(scene.commit):
        result = commit(scene.remote, quorum=1, timeout_seconds=seconds)
    assert (result.committed, result.already, result.id) == (True, True, scene.prepared.id)


def test_decided_by_somebody_else_while_receivers_are_waited_for(scene: Scene) -> None:
    """Whoever decided was stopped before the commit."""

    def decide_it() -> None:
        with open_store(scene.remote) as store:
            decide(store, scene.prepared.history, Place(2, str(scene.prepared.id)), COMMIT)

    with once_counted(decide_it):
        result = commit(scene.remote, quorum=1, timeout_seconds=600.0)
    assert (result.committed, result.already) == (True, False)


def test_given_up_or_overtaken_while_receivers_are_waited_for(scene: Scene) -> None:
    fresh_copy(scene.baseline, scene.root / "other")

    def overtake() -> None:
        push(scene.steps[2], scene.remote, baseline=scene.root / "other", jobs=1)

    for act, facts in ((overtake, "version 2 was taken"), (scene.abort, "was given up")):
        scene.restore()
        with once_counted(act), pytest.raises(ConflictError, match=facts):
            commit(scene.remote, quorum=1, timeout_seconds=600.0)


def test_a_word_that_is_listed_before_it_can_be_got(scene: Scene) -> None:
    pull(scene.remote, scene.root / "r", receiver="eu", jobs=1)
    left = [AbsentError()]

    class Late(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "read" and key.startswith("acks/") and left:
                raise left.pop()

    with wrapping(Late):
        assert commit(scene.remote, quorum=1, timeout_seconds=600.0).staged == ("eu",)
    assert not left


def test_pruned_while_it_is_committed(scene: Scene) -> None:
    """What was prepared, and what nobody has touched for a day, is a version and whole, or given up."""
    old = time.time() - 25 * 3600
    for path in scene.root.glob("kept-remote/versions/**/*"):
        os.utime(path, (old, old))
    hint = Hint(scene.prepared.history, Place(2, new_id()), STREAMING, "")
    (scene.root / "kept-remote/next.json").write_bytes(encode_hint(hint))

    def prune_it() -> str:
        prune(scene.remote)
        return REFUSED

    for first, second in ((prune_it, scene.commit), (scene.commit, prune_it)):
        number = 0
        while True:
            scene.restore()
            for path in scene.remote.glob("versions/**/*"):
                os.utime(path, (old, old))
            others: list[str] = []
            with interrupting(number, lambda others=others, second=second: others.append(second())):  # type: ignore[misc]
                try:
                    outcome = first()
                except DcrError as error:
                    raise AssertionError((number, error)) from error
            if not others:
                break
            assert (scene.id_of_2() is not None) == (COMMITTED in (outcome, others[0]))
            verify_remote(scene.remote, deep=True)
            if scene.id_of_2() is not None:
                assert build_all(scene.remote, scene.root / "scratch") == [tree(step) for step in scene.steps[:2]]
            number += 1
        assert number > 5


class TestPreparedAgain:
    """What receivers may have staged stays what it is, whatever its publisher does with it again."""

    def rank(self, scene: Scene, **options: Any) -> None:
        """Publish step 2 as a rank alone does."""
        rank = Rank(0, 1)
        result = push_part(scene.steps[2], scene.remote, rank, baseline=scene.baseline, jobs=1, **options)
        assert result.version == 3

    def publish(self, scene: Scene, kind: str, **options: Any) -> None:
        if kind == "part":
            self.rank(scene, **options)
        else:
            assert scene.push(2, **options).version == 3

    def to_be(self, scene: Scene) -> Path:
        (found,) = scene.remote.glob("versions/0000000003-*/commit.json")
        return found

    @pytest.fixture(params=["push", "part"])
    def kind(self, request: pytest.FixtureRequest, scene: Scene) -> str:
        scene.restore()
        assert scene.commit() == COMMITTED
        kind: str = request.param
        self.publish(scene, kind, prepare=True)
        return kind

    def test_the_same_bytes_are_prepared_and_committed(self, scene: Scene, kind: str) -> None:
        path = self.to_be(scene)
        data = path.read_bytes()
        self.publish(scene, kind, prepare=True)
        assert self.to_be(scene) == path and path.read_bytes() == data
        self.publish(scene, kind)
        assert (scene.remote / "commits/0000000003.json").read_bytes() == data
        assert build_all(scene.remote, scene.root / "scratch")[2] == tree(scene.steps[2])

    def test_receivers_are_told_so_all_the_time(self, scene: Scene, kind: str) -> None:
        states = []

        class Reads(Wrapped):
            def done(self, name: str, key: str) -> None:
                if (name, key) == ("write", "next.json"):
                    states.append(json.loads((scene.remote / key).read_bytes())["state"])

        with wrapping(Reads):
            self.publish(scene, kind, prepare=True)
        assert set(states) == {PREPARED}

    @pytest.mark.parametrize("prepare", [True, False])
    def test_another_commit_is_refused(self, scene: Scene, kind: str, keys: tuple[Path, Path], prepare: bool) -> None:
        """One that is signed, where nobody signed what is prepared; or one that somebody has changed."""
        data = self.to_be(scene).read_bytes()
        if kind == "push":
            with pytest.raises(ConflictError, match="prepared otherwise"):
                self.publish(scene, kind, prepare=prepare, sign_key=keys[0])
        other = data.replace(b'"bytes":', b'"bytes":1')
        self.to_be(scene).write_bytes(other)
        with pytest.raises(ConflictError, match="prepared otherwise"):
            self.publish(scene, kind, prepare=prepare)
        assert self.to_be(scene).read_bytes() == other and len(commits(scene.remote)) == 2


def test_a_dry_run_says_what_would_become_of_it_and_changes_nothing(tmp_path: Path) -> None:
    remote, steps = tmp_path / "remote", write_tiny_steps(tmp_path, 2)
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    pull(remote, tmp_path / "r", receiver="eu-1")
    before = tree(remote)
    result = commit(remote, quorum=1, dry_run=True)
    assert (result.version, result.committed, result.dry_run, result.staged) == (2, False, True, ("eu-1",))
    with pytest.raises(ConflictError, match="1 of 2 receivers have staged version 2"):
        # Nobody is waited for.
        commit(remote, quorum=2, timeout_seconds=1000, dry_run=True)
    assert not commit(remote, abort=True, dry_run=True).committed
    assert tree(remote) == before
    assert commit(remote, quorum=1).committed
    there = commit(remote, dry_run=True)
    assert (there.committed, there.already, there.dry_run) == (True, True, True)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_dry_run_is_refused_what_was_decided_otherwise(tmp_path: Path, is_given_up: bool) -> None:
    remote, steps = tmp_path / "remote", write_tiny_steps(tmp_path, 2)
    push(steps[0], remote)
    place = Place(2, push(steps[1], remote, prepare=True).id or "")
    with open_store(remote) as store:
        history = require_history(store).id
        decide(store, history, place, ABORT if is_given_up else COMMIT)
    said = "version 2 was given up" if is_given_up else "cannot be given up: it is decided that it is committed"
    with pytest.raises(ConflictError, match=said):
        commit(remote, abort=not is_given_up, dry_run=True)


def test_people_are_told_what_would_be(tmp_path: Path, run: Run) -> None:
    remote, steps = tmp_path / "remote", write_tiny_steps(tmp_path, 2)
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    assert f"would commit version 2 of {remote}; nothing was changed" in run("commit", remote, "-n").out
    assert f"would give up version 2 of {remote}; nothing was changed" in run("commit", remote, "-n", "--abort").out
    assert f"committed: version 2 of {remote}" in run("commit", remote).out
    before = tree(remote)
    assert f"would add an anchor: version 2 of {remote}; nothing was sent" in run("anchor", steps[1], remote, "-n").out
    assert tree(remote) == before
    document = run("anchor", steps[1], remote, "-n", "--json").json
    assert (document["dry_run"], document["already"], document["uploaded_bytes"]) == (True, False, 0)
    assert run("anchor", steps[1], remote).code == 0
    assert "anchor has one already" in run("anchor", steps[1], remote, "-n").out
    assert run("anchor", steps[0], remote, "--version", "2", "-n").code == 5
