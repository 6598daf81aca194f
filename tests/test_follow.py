"""Following: each new version at once, what is being made ahead of its commit, and no end by what passes by itself."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.errors import ConflictError, DamagedError, DcrError, TransportError, WrongBaseError
from dcr_cli.fetch.ahead import Ahead
from dcr_cli.fetch.coming import ComingError
from dcr_cli.fetch.hook import Hook
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.spool import spool_of
from dcr_cli.fetch.wish import Wish
from dcr_cli.fetch.words import Speaker
from dcr_cli.follow import _CHECK_EVERY, Arrival, Follower, Pace
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.change import REPLACE
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.acknowledgement import read_acknowledgement
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, STREAMING, Hint, write_hint
from dcr_cli.remote.keys import STAGED, AcknowledgementPlace, Place, commit_key, manifest_key, payload_key, prepared_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Version, encode_version
from dcr_cli.store.backend import Backend, TransientError
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from pushed import states
from receivers import names_below, tree
from remotes import HISTORY, Remote, place_of, version
from store_wrappers import Records
from strategies import write_checkpoint


class EndError(Exception):
    """The scene is over."""


@dataclass
class Scene:
    """A remote whose publisher acts while its follower waits, and the receiver that follows it."""

    folder: Path
    name: str = field(default_factory=lambda: uuid4().hex)
    backend: Records = field(default_factory=lambda: Records(MemoryBackend("")))
    told: list[DcrError] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.checkpoints = [
            write_checkpoint(self.folder / f"v{number}", state, shards=2, sidecars={"config.json": b"{}"})
            for number, state in enumerate(states(4), start=1)
        ]
        self.backend.backend = MemoryBackend(self.name)
        self.remote = Remote(Store(MemoryBackend(self.name), "memory://remote"), self.folder)
        self.remote.publish(self.checkpoints[0])
        self.root = self.folder / "r"

    def publish(self) -> None:
        number = len(self.remote.log)
        self.remote.publish(self.checkpoints[number], self.checkpoints[number - 1])

    def put_payloads(self, number: int) -> Version:
        """Put all of a delta but its commit; what that will say."""
        parts = self.remote.put_delta(self.checkpoints[number - 2], self.checkpoints[number - 1], place_of(number))
        return version(number, previous=self.remote.log[-1].blake3, anchor=1, parts=parts)

    def play(self, acts: list[Callable[[], object]], wish: Wish | None = None, **pace: Any) -> list[Arrival]:
        """Follow while one act after the other is done in the waits, and one wait more."""
        left: Iterator[Callable[[], object]] = iter([*acts, nothing])

        def wait(seconds: float) -> None:
            self.waits.append(seconds)
            self.now += seconds
            act = next(left, None)
            if act is None:
                raise EndError
            act()

        store = Store(self.backend, "memory://remote", patience=Patience(deadline_seconds=0.0))
        paces = Pace(sleep=wait, clock=lambda: self.now, dice=lambda: 1.0, **pace)
        follower = Follower(store, self.root, wish or Wish(Effort(1, None)), self.told.append, paces)
        found = []
        try:
            for arrival in follower.arrivals():
                found.append(arrival)
        except EndError:
            pass
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def nothing() -> None:
    pass


def test_each_version_comes_when_it_is_there(scene: Scene) -> None:
    """Whoever published it, and whatever was asked for before."""
    found = scene.play([nothing, scene.publish, scene.publish, nothing])
    assert [arrival.result.version for arrival in found] == [1, 2, 3]
    assert [arrival.result.from_version for arrival in found] == [None, 1, 2]
    assert tree(scene.root) == tree(scene.checkpoints[2])
    assert found[1].at.endswith("+00:00")


def test_how_long_after_its_commit_a_version_came_is_told_by_one_clock(scene: Scene) -> None:
    """At most: since it was looked for last and was not there. What was there from the start tells nothing."""
    found = scene.play([nothing, nothing, scene.publish, nothing, nothing], shortest_seconds=1.0)
    assert [arrival.within_seconds for arrival in found] == [None, 4.0]


def test_how_long_it_took_counts_from_before_what_went_wrong(scene: Scene) -> None:
    """Nobody looked while the remote did not answer."""
    faults = iter([False, False, True, True, *[False] * 100])

    def fail(name: str, key: str) -> None:
        if key == commit_key(2) and next(faults):
            raise TransientError("did not answer")

    scene.backend.called = fail  # type: ignore[method-assign]
    found = scene.play([nothing, nothing, scene.publish, nothing], shortest_seconds=1.0)
    assert [arrival.within_seconds for arrival in found] == [None, 1.0 + 2.0 + 4.0]


def test_what_has_come_is_told_though_the_remote_went_away_just_then(scene: Scene) -> None:
    faults = iter([True, True])

    def fail(name: str, key: str) -> None:
        is_there = scene.root.exists() and tree(scene.root) == tree(scene.checkpoints[1])
        if is_there and key == commit_key(2) and next(faults, False):
            raise TransientError("did not answer")

    scene.backend.called = fail  # type: ignore[method-assign]
    found = scene.play([nothing, scene.publish, nothing, nothing, scene.publish, nothing])
    assert [type(error) for error in scene.told] == [TransportError]
    assert [(arrival.result.from_version, arrival.result.version) for arrival in found] == [(None, 1), (1, 2), (2, 3)]


def test_waits_grow_while_nothing_comes_and_are_short_after_news(scene: Scene) -> None:
    scene.play([*[nothing] * 6, scene.publish, nothing], shortest_seconds=1.0, longest_seconds=8.0)
    assert scene.waits == [1, 2, 4, 8, 8, 8, 8, 1, 2, 4]


def test_a_log_that_is_another_one_is_noticed_sooner_or_later(scene: Scene) -> None:
    def change() -> None:
        scene.remote.store.put(commit_key(1), encode_version(replace(scene.remote.log[0].version, publisher="another")))
        scene.backend.calls.clear()

    with pytest.raises(WrongBaseError, match="another than the one"):
        scene.play([nothing, change, *[nothing] * 20])
    keys = [key for _, key in scene.backend.calls]
    assert keys.count(commit_key(1)) == 1 < keys.count(commit_key(2))


def test_what_is_being_made_is_fetched_before_it_is_committed(scene: Scene) -> None:
    made: list[Version] = []

    def make() -> None:
        made.append(scene.put_payloads(2))
        scene.remote.hint(2, STREAMING)

    def commit() -> None:
        scene.remote.store.put(commit_key(2), encode_version(made[0]))
        scene.backend.calls.clear()

    found = scene.play([make, nothing, commit])
    parts = made[0].delta
    assert parts is not None and found[1].result.fetched_before_commit_bytes == parts.payload_bytes
    assert not [key for _, key in scene.backend.calls if "/payloads/000000" in key]
    assert tree(scene.root) == tree(scene.checkpoints[1])
    assert "fetched" not in names_below(scene.root / ".dcr")


def test_a_hint_that_nobody_goes_on_with_is_looked_at_less_often(scene: Scene) -> None:
    """Whoever was killed leaves it; when something moves again, so does the follower."""

    def again() -> None:
        write_hint(scene.remote.store, Hint(HISTORY, place_of(2), STREAMING, "another time"))

    hint = functools.partial(scene.remote.hint, 2, STREAMING)
    put = functools.partial(scene.put_payloads, 2)
    acts: list[Callable[[], object]]
    acts = [nothing, hint, *[nothing] * 3, again, *[nothing] * 4, put, nothing, nothing]
    scene.play(acts, shortest_seconds=1.0, longest_seconds=8.0, patient_seconds=3.0)
    moved = [1.0] * 3
    # What moves is seen after the wait in which it does.
    assert scene.waits == [1.0, 2.0, *moved, 2.0, *moved, 2.0, 4.0, *moved, 2.0]


def test_a_payload_that_is_not_what_the_commit_lists_is_fetched_again(scene: Scene) -> None:
    made: list[Version] = []

    def make_another() -> None:
        made.append(scene.put_payloads(2))
        scene.remote.hint(2, STREAMING)
        key = payload_key(place_of(2), 0)
        right = scene.remote.store.get(key, most_bytes=1 << 20)
        other = Scene(scene.folder / "other")
        other.checkpoints[1] = scene.checkpoints[3]
        other.put_payloads(2)
        wrong = other.remote.store.get(key, most_bytes=1 << 20)
        assert right is not None and wrong is not None and right != wrong
        scene.remote.store.put(key, wrong)
        made_right.append(right)

    made_right: list[bytes] = []

    def commit() -> None:
        scene.remote.store.put(payload_key(place_of(2), 0), made_right[0])
        scene.remote.store.put(commit_key(2), encode_version(made[0]))

    found = scene.play([make_another, commit])
    assert found[1].result.fetched_before_commit_bytes == 0
    assert tree(scene.root) == tree(scene.checkpoints[1])


def test_what_is_no_payload_of_that_version_is_not_kept(scene: Scene) -> None:
    def mislead() -> None:
        """A payload of the right version, but of another id than the hint's."""
        other = Place(2, "f" * 32)
        scene.put_payloads(2)
        made = scene.remote.store.get(payload_key(place_of(2), 0), most_bytes=1 << 20)
        scene.remote.store.put(payload_key(other, 0), made or b"")
        write_hint(scene.remote.store, Hint(HISTORY, other, STREAMING, ""))

    def mislead_again() -> None:
        assert not list(scene.root.glob(".dcr/fetched/*/payloads/*"))
        scene.remote.store.put(payload_key(place_of(2), 0), b"<html>")
        scene.remote.hint(2, STREAMING)

    scene.play([mislead, nothing, mislead_again, nothing])
    assert not list(scene.root.glob(".dcr/fetched/*/payloads/*"))


def test_a_version_that_is_given_up_leaves_nothing(scene: Scene) -> None:
    def make() -> None:
        scene.put_payloads(2)
        scene.remote.hint(2, STREAMING)

    scene.play([make, nothing, functools.partial(scene.remote.hint, 2, GIVEN_UP)])
    assert "fetched" not in names_below(scene.root / ".dcr")


def test_a_prepared_version_is_staged_and_said_so_once(scene: Scene) -> None:
    made: list[Version] = []
    wish = Wish(Effort(1, None), speaker=Speaker("rollout-1"))
    place = AcknowledgementPlace(place_of(2), "rollout-1", STAGED)

    def prepare() -> None:
        made.append(scene.put_payloads(2))
        scene.remote.store.put(prepared_key(place_of(2)), encode_version(made[0]))
        scene.remote.hint(2, PREPARED)

    def check() -> None:
        assert read_acknowledgement(scene.remote.store, place) is not None
        assert tree(scene.root) == tree(scene.checkpoints[0])
        scene.remote.store.put(commit_key(2), encode_version(made[0]))

    found = scene.play([prepare, nothing, nothing, check], wish)
    assert [arrival.result.version for arrival in found] == [1, 2]
    creates = [key for name, key in scene.backend.calls if name == "create" and key.endswith(STAGED)]
    assert len(creates) == 1
    assert tree(scene.root) == tree(scene.checkpoints[1])


@pytest.mark.parametrize("is_taken", [True, False])
def test_aside_all_is_built_but_the_link_turned(scene: Scene, is_taken: bool) -> None:
    made: list[Version] = []
    wish = Wish(Effort(1, None), speaker=Speaker("rollout-1"), mode="aside")
    place = AcknowledgementPlace(place_of(2), "rollout-1", STAGED)

    def folders() -> dict[str, int]:
        return {each.name: each.stat().st_ino for each in scene.folder.glob("r.dcr-*")}

    def prepare() -> None:
        made.append(scene.put_payloads(2))
        scene.remote.store.put(prepared_key(place_of(2)), encode_version(made[0]))
        scene.remote.hint(2, PREPARED)

    before: list[dict[str, int]] = []

    def check() -> None:
        said = read_acknowledgement(scene.remote.store, place)
        assert said is not None and said[0].is_built
        assert tree(scene.root.resolve()) == tree(scene.checkpoints[0])
        before.append(folders())
        assert len(before[0]) == 2
        # Nothing has to be read again.
        assert recorded_at(scene.root) == 1
        if is_taken:
            scene.remote.store.put(commit_key(2), encode_version(made[0]))
        else:
            shutil.rmtree(scene.folder / str(place_of(2)))
            scene.checkpoints[1] = scene.checkpoints[2]
            scene.publish()

    scene.play([prepare, nothing, check], wish)
    assert tree(scene.root.resolve()) == tree(scene.checkpoints[1])
    left = folders()
    assert len(left) == 1 and (left.items() <= before[0].items()) == is_taken


def recorded_at(root: Path) -> int | None:
    """The version that a receiver is known to be at without reading it."""
    situation = look(root)
    return situation.position.version if situation.position is not None and situation.is_at_position else None


def test_what_is_prepared_wrongly_is_not_said_to_be_staged(scene: Scene) -> None:
    """It does not follow the version that the receiver is at."""
    wish = Wish(Effort(1, None), speaker=Speaker("rollout-1"))

    def prepare() -> None:
        made = replace(scene.put_payloads(2), previous=b"\5" * 32)
        scene.remote.store.put(prepared_key(place_of(2)), encode_version(made))
        scene.remote.hint(2, PREPARED)

    scene.play([prepare, nothing], wish)
    place = AcknowledgementPlace(place_of(2), "rollout-1", STAGED)
    assert read_acknowledgement(scene.remote.store, place) is None


def test_what_is_prepared_and_refused_ends_nothing(scene: Scene) -> None:
    """It is not signed: only of what is committed that counts."""
    wish = Wish(Effort(1, None), speaker=Speaker("rollout-1"))

    def prepare() -> None:
        scene.remote.store.put(prepared_key(place_of(2)), encode_version(scene.put_payloads(2)))
        scene.remote.hint(2, PREPARED)
        # The receiver has come to the first version: who asks from now on is refused.
        monkey.setattr(Trust, "check", refuse)

    def refuse(self: Trust, signed: object, kind: str, what: str) -> None:
        raise WrongBaseError(what, "is not signed by a trusted key")

    with pytest.MonkeyPatch.context() as monkey:
        scene.play([prepare, nothing, nothing, nothing], wish)
    assert [str(error) for error in scene.told] == [
        f"memory://remote/{prepared_key(place_of(2))}: is not signed by a trusted key"
    ]
    assert read_acknowledgement(scene.remote.store, AcknowledgementPlace(place_of(2), "rollout-1", STAGED)) is None


def test_what_is_fetched_ahead_is_bounded(scene: Scene) -> None:
    """A hint may be a lie, and payloads may have no end."""
    scene.play([])
    place = place_of(2)
    identity = {"history": HISTORY, "version": "2", "id": place.id}

    def put(name: str, data: bytes) -> None:
        scene.remote.store.put(f"versions/{place}/{name}", data)

    for number in range(100):
        writer = PayloadWriter(put, identity=identity, first=number)
        writer.begin_piece()
        writer.add_block(b"block")
        writer.end_piece()
        writer.finish()
    with spool_of(scene.root) as spool:
        ahead = Ahead(HISTORY, place, 1 << 30)
        assert [ahead.fetch(scene.remote.store, spool) for _ in range(3)] == [64, 36, 0]
        assert Ahead(HISTORY, place, 1).fetch(scene.remote.store, spool) == 1


def test_a_remote_that_does_not_answer_is_told_of_once_and_ends_nothing(scene: Scene) -> None:
    faults = iter([False, *[True] * 5, *[False] * 100])

    def fail(name: str, key: str) -> None:
        scene.backend.calls.append((name, key))
        if key == commit_key(2) and next(faults):
            raise TransientError("did not answer")

    scene.backend.called = fail  # type: ignore[method-assign]
    found = scene.play([*[nothing] * 8, scene.publish, nothing])
    assert [arrival.result.version for arrival in found] == [1, 2]
    assert [type(error) for error in scene.told] == [TransportError]


def test_a_hook_that_fails_is_told_of_and_run_again(scene: Scene) -> None:
    wish = Wish(Effort(1, None), hook=Hook(f"echo . >> {scene.folder}/runs; test $(wc -l < {scene.folder}/runs) -gt 2"))
    found = scene.play([nothing] * 5, wish)
    assert (scene.folder / "runs").read_text() == ".\n" * 3
    # The version has been there since the first time.
    assert [(arrival.result.from_version, arrival.result.applied) for arrival in found] == [(None, (1,))]
    assert [type(error).__name__ for error in scene.told] == ["HookError"]


def follows(scene: Scene, wish: Wish) -> Iterator[Arrival]:
    """Another follower of the same checkpoint."""
    store = Store(MemoryBackend(scene.name), "memory://remote", patience=Patience(deadline_seconds=0.0))
    return Follower(store, scene.root, wish, scene.told.append, Pace(sleep=lambda seconds: None)).arrivals()


@pytest.mark.parametrize("mode", [REPLACE, ASIDE])
def test_two_that_follow_into_one_checkpoint(scene: Scene, mode: str) -> None:
    """The second one is told at once that there is one, wherever a link leads by then, and the first goes on."""
    wish = Wish(Effort(1, None), mode=mode)

    def refused() -> None:
        with pytest.raises(ConflictError, match="follow-lock: another dcr holds it: process"):
            next(follows(scene, wish))

    found = scene.play([refused, scene.publish, refused, refused], wish)
    assert [arrival.result.version for arrival in found] == [1, 2]
    assert scene.told == [] and list(scene.folder.rglob("follow-lock")) == []
    # Whoever comes later, when nobody follows any more, follows.
    scene.publish()
    assert next(follows(scene, wish)).result.version == 3


def test_two_that_follow_to_where_nothing_was(scene: Scene) -> None:
    wish = Wish(Effort(1, None))
    other = follows(scene, wish)
    assert next(other).result.version == 1

    def refused() -> None:
        with pytest.raises(ConflictError, match="another dcr holds it"):
            next(other)

    assert [arrival.result.version for arrival in scene.play([refused, scene.publish], wish)] == [2]


def test_damage_ends_it(scene: Scene) -> None:
    def damage() -> None:
        scene.remote.store.put(commit_key(2), b"")

    with pytest.raises(DamagedError):
        scene.play([damage, nothing])


class Waits(Records):
    """A remote that waits, in which something happens in each wait: how long it takes, and whether it was one."""

    def __init__(self, backend: Backend, happens: Callable[[], tuple[float, bool]]) -> None:
        super().__init__(backend)
        self.happens = happens

    def wait(self, key: str, seconds: int) -> bool:
        self.called("wait", key)
        took, is_applied = self.happens()
        scene = self.scene
        scene.now += took
        return is_applied

    scene: Scene


class TestRemotesThatWait:
    @pytest.fixture
    def acts(self) -> list[Callable[[], tuple[float, bool]]]:
        return []

    @pytest.fixture
    def waiting(self, tmp_path: Path, acts: list[Callable[[], tuple[float, bool]]]) -> Scene:
        """One whose waits are `acts`, after which it is over."""

        def happens() -> tuple[float, bool]:
            if not acts:
                raise EndError
            return acts.pop(0)()

        backend = Waits(MemoryBackend(""), happens)
        backend.scene = Scene(tmp_path, backend=backend)
        return backend.scene

    def test_a_version_comes_when_the_wait_ends(
        self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]
    ) -> None:
        """Nothing else is waited for, however quiet it was."""

        def publish() -> tuple[float, bool]:
            waiting.publish()
            return 7.0, True

        acts += [lambda: (30.0, True), lambda: (30.0, True), publish, publish]
        found = waiting.play([])
        assert [arrival.result.version for arrival in found] == [1, 2, 3]
        assert waiting.waits == []
        keys = [key for name, key in waiting.backend.calls if name == "wait"]
        assert keys == [commit_key(number) for number in (2, 2, 2, 3, 4)]
        assert found[1].within_seconds == 7.0

    def test_what_is_being_made_is_fetched_when_it_is_news(
        self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]
    ) -> None:
        """Though it comes at once each time."""
        made: list[Version] = []

        def make() -> tuple[float, bool]:
            made.append(waiting.put_payloads(2))
            waiting.remote.hint(2, STREAMING)
            return 0.0, True

        def commit() -> tuple[float, bool]:
            waiting.remote.store.put(commit_key(2), encode_version(made[0]))
            return 0.0, True

        acts += [make, commit]
        found = waiting.play([])
        parts = made[0].delta
        assert parts is not None and found[1].result.fetched_before_commit_bytes == parts.payload_bytes
        assert waiting.waits == []

    def test_one_that_always_has_news_is_left_alone(
        self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]
    ) -> None:
        """As long between as if it could not wait."""
        acts += [lambda: (0.0, True)] * 4
        waiting.play([nothing] * 9, shortest_seconds=1.0, longest_seconds=8.0)
        assert waiting.waits == [1.0, 2.0, 4.0, 8.0]

    def test_one_that_has_waited_once_starts_anew(
        self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]
    ) -> None:
        acts += [lambda: (0.0, True), lambda: (0.0, True), lambda: (30.0, True), lambda: (0.0, True)]
        waiting.play([nothing] * 9, shortest_seconds=1.0, longest_seconds=8.0)
        assert waiting.waits == [1.0, 2.0, 1.0]

    def test_one_that_does_not_wait_is_seldom_asked(
        self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]
    ) -> None:
        acts += [lambda: (0.0, False)] * 2
        waiting.play([nothing] * 50, longest_seconds=1.0)
        assert len(waiting.waits) == 2 * _CHECK_EVERY

    def test_one_that_fails_while_it_waits(self, waiting: Scene, acts: list[Callable[[], tuple[float, bool]]]) -> None:
        """The next round says so, if it is still so."""

        def fail() -> tuple[float, bool]:
            raise TransientError("the connection broke")

        def publish() -> tuple[float, bool]:
            waiting.publish()
            return 7.0, True

        acts += [fail, publish]
        found = waiting.play([nothing] * 3)
        assert [arrival.result.version for arrival in found] == [1, 2]
        assert len(waiting.waits) == 1 and waiting.told == []


def test_a_version_that_is_not_all_there_yet_ends_nothing(scene: Scene) -> None:
    """As a mirror may show it: the commit before what it binds."""
    taken: list[tuple[str, bytes]] = []
    store = Store(MemoryBackend(scene.name), "memory://remote")

    def publish() -> None:
        scene.publish()
        key = manifest_key(scene.remote.log[-1].version.place)
        taken.append((key, store.get(key, most_bytes=1 << 20) or b""))
        store.delete(key)

    found = scene.play([publish, nothing, lambda: store.put(*taken.pop())])
    assert [arrival.result.version for arrival in found] == [1, 2]
    assert [type(error) for error in scene.told] == [ComingError]
