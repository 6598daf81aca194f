"""Push, stopped at any step of any disk or call to a remote, and then run again.

What was published stays readable, nothing is published twice or by halves, and what was sent is not sent again. Here a
spread of the steps is tried; slow/test_every_step.py tries all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dcr_cli.commit import commit
from dcr_cli.push import push
from dcr_cli.store.backend import Backend
from faults import stopped_at
from published import build_all, commits
from receivers import fresh_copy, tree
from store_wrappers import KillsAtCall, Records, wrapping
from strategies import write_tiny_steps

SPREAD = 17


@dataclass
class Scene:
    """A remote at version 2, its publisher's baseline, and what was there before each try."""

    root: Path
    steps: list[Path]
    remote: Path
    kept: dict[Path, Path] = field(default_factory=dict)

    @property
    def baseline(self) -> Path:
        return self.root / "baseline"

    def push(self, step: int, **options: object) -> None:
        push(self.steps[step], self.remote, baseline=self.baseline, jobs=1, **options)  # type: ignore[arg-type]

    def keep(self) -> None:
        for place in (self.remote, self.baseline):
            if place.exists():
                self.kept[place] = fresh_copy(place, self.root / f"kept-{place.name}")

    def restore(self) -> None:
        for place in (self.remote, self.baseline):
            shutil.rmtree(place, ignore_errors=True)
            if place in self.kept:
                fresh_copy(self.kept[place], place)

    def check(self, versions: list[int]) -> None:
        """What is published are these steps, and the baseline is at the last of them."""
        assert build_all(self.remote, self.root / "scratch") == [tree(self.steps[step]) for step in versions]
        assert tree(self.baseline) == tree(self.steps[versions[-1]])


def make_scene(root: Path) -> Scene:
    return Scene(root, write_tiny_steps(root, 4), root / "remote")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def first(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    return lambda: scene.push(0), [0]


def next_delta(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0)
    scene.push(1)
    return lambda: scene.push(2), [0, 1, 2]


def with_links(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0, baseline_link=True)
    return lambda: scene.push(1, baseline_link=True), [0, 1]


def with_anchor(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0)
    return lambda: scene.push(1, anchor_every=1), [0, 1]


def a_break(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0)
    return lambda: scene.push(1, no_delta=True), [0, 1]


def prepared(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0)

    def run() -> None:
        if len(commits(scene.remote)) < 2:
            scene.push(1, prepare=True)
            commit(scene.remote)
        scene.push(2)

    return run, [0, 1, 2]


def behind(scene: Scene) -> tuple[Callable[[], object], list[int]]:
    scene.push(0)
    fresh_copy(scene.baseline, scene.root / "other")
    push(scene.steps[1], scene.remote, baseline=scene.root / "other", jobs=1)
    return lambda: scene.push(2), [0, 1, 2]


SCENES = [first, next_delta, with_links, with_anchor, a_break, prepared, behind]


def check_stops(scene: Scene, make: Callable[[Scene], tuple[Callable[[], object], list[int]]], spread: int) -> None:
    """Stop at every `spread`-th step, then run again."""
    run, versions = make(scene)
    scene.keep()
    before = len(commits(scene.remote)) if scene.remote.exists() else 0
    number = 0
    while True:
        scene.restore()
        is_through = stopped_at(number, run)
        found = commits(scene.remote) if scene.remote.exists() else []
        assert before <= len(found) <= len(versions)
        built = build_all(scene.remote, scene.root / "scratch") if found else []
        assert built == [tree(scene.steps[step]) for step in versions[: len(found)]]
        run()
        scene.check(versions)
        if is_through:
            return
        number += spread


def check_kills(
    scene: Scene, make: Callable[[Scene], tuple[Callable[[], object], list[int]]], spread: int, when: str
) -> None:
    """Stop at every `spread`-th call to the remote, then run again and see what is sent."""
    run, versions = make(scene)
    scene.keep()
    number = 0
    while True:
        scene.restore()
        endings: list[KillsAtCall] = []

        def end(backend: Backend, number: int = number, endings: list[KillsAtCall] = endings) -> Backend:
            endings.append(KillsAtCall(backend, number if not endings else 1 << 30, when=when))
            return endings[-1]

        is_through = stopped_at(1 << 30, lambda end=end: _within(end, run))  # type: ignore[misc]
        done = _complete_objects(scene.remote)
        records: list[Records] = []

        def record(backend: Backend, records: list[Records] = records) -> Backend:
            records.append(Records(backend))
            return records[-1]

        with wrapping(record):
            run()
        scene.check(versions)
        again = {key for each in records for name, key in each.calls if name == "write" and "payloads" in key}
        # The one that was under way when the push was stopped may have to be sent again.
        assert len(again & done) <= 1
        if is_through:
            return
        number += spread


def _within(wrap: Callable[[Backend], Backend], run: Callable[[], object]) -> None:
    with wrapping(wrap):
        run()


def _complete_objects(remote: Path) -> set[str]:
    return {path for path in tree(remote) if "/." not in path} if remote.exists() else set()


@pytest.mark.parametrize("make", SCENES)
def test_stopped_at_a_step(scene: Scene, make: Callable[[Scene], tuple[Callable[[], object], list[int]]]) -> None:
    check_stops(scene, make, SPREAD)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [first, next_delta, prepared])
def test_stopped_at_a_call(
    scene: Scene, make: Callable[[Scene], tuple[Callable[[], object], list[int]]], when: str
) -> None:
    check_kills(scene, make, 2, when)
