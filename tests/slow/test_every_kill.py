"""Pull, commit and prune, killed by SIGKILL at every call to a remote and at every step of the disk, then run again.

    DCR_STRIDE=1 scripts/test tests/slow/test_every_kill.py

DCR_STRIDE (3): only one of so many of them. The killed are processes that this one has forked. Nothing is lost, nothing
is wrong, what had come is not fetched again, and what is left lies where the next run finds it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dcr_cli.anchor import anchor
from dcr_cli.checkpoint.in_progress import is_incomplete
from dcr_cli.commit import commit
from dcr_cli.prune import prune
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.store.backend import Answer, Backend
from dcr_cli.verify_remote import verify_remote
from faults import killed_at
from published import build_all, commits, version_folder
from receivers import fresh_copy, names_below, tree
from store_wrappers import KillsAtCall, Wrapped, wrapping
from strategies import write_tiny_steps

STRIDE = int(os.environ.get("DCR_STRIDE", "3"))
WHEN = ("before", "within", "after")
NEVER = 1 << 30
VERSIONS, ANCHORED = 5, 4
DAY = 86400.0


class Traffic(Wrapped):
    """The bytes that were read of each payload and of each file of an anchor, and what was written of payloads."""

    def __init__(self, backend: Backend, read: dict[str, int], written: list[str]) -> None:
        super().__init__(backend)
        self.bytes_read = read
        self.written = written

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if "/payloads/" in key or "/files/" in key:
            self.bytes_read[key] = self.bytes_read.get(key, 0) + (answer.announced or 0)
        return answer

    def called(self, name: str, key: str) -> None:
        if name == "write" and "/payloads/" in key:
            self.written.append(key)


@dataclass
class Read:
    """What a run read of payloads and files."""

    bytes_read: dict[str, int]
    written: list[str]

    @property
    def total(self) -> int:
        return sum(self.bytes_read.values())


def recording(run: Callable[[], object]) -> Read:
    found = Read({}, [])
    with wrapping(lambda backend: Traffic(backend, found.bytes_read, found.written)):
        run()
    return found


def killed_at_call(number: int, when: str, run: Callable[[], object]) -> bool:
    """As killed_at, at call `number` of the first store that is opened."""

    def run_wrapped() -> None:
        endings: list[KillsAtCall] = []

        def end(backend: Backend) -> Backend:
            endings.append(KillsAtCall(backend, NEVER if endings else number, when=when, signal=9))
            return endings[-1]

        with wrapping(end):
            run()

    return killed_at(NEVER, run_wrapped)


def kill_everywhere(run: Callable[[], object], attempt: Callable[[str, Callable[[], bool]], bool]) -> None:
    """Have a run killed in each way, one later than the other, until it is through before; each by an attempt."""
    kills = 0
    for kind in (*WHEN, "step"):
        for number in range(0, NEVER, STRIDE):
            end = partial(killed_at, number, run) if kind == "step" else partial(killed_at_call, number, kind, run)
            if attempt(f"{kind} {number}", end):
                break
            kills += 1
    print(f"\n{kills} kills")


@dataclass
class Remote:
    """A remote in a folder, of VERSIONS versions, and what they were published from."""

    folder: Path
    steps: list[Path]

    @property
    def path(self) -> Path:
        return self.folder / "remote"

    def version(self, number: int) -> dict[str, bytes]:
        return tree(self.steps[number - 1])


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Remote:
    folder = tmp_path_factory.mktemp("published")
    found = Remote(folder, write_tiny_steps(folder, VERSIONS))
    for step in found.steps:
        push(step, found.path, baseline=folder / "baseline", jobs=1)
    return found


@pytest.fixture(scope="module")
def gapped(remote: Remote) -> Remote:
    """The same with an anchor of version ANCHORED, and without the deltas of versions 2 and 3, as after a prune."""
    found = Remote(remote.folder / "gapped", remote.steps)
    fresh_copy(remote.path, found.path)
    anchor(found.steps[ANCHORED - 1], found.path, version=ANCHORED, jobs=1)
    for document in commits(found.path)[1:3]:
        shutil.rmtree(version_folder(found.path, document))
    return found


# Pull


@dataclass(frozen=True)
class Way:
    """How a receiver is brought from one version, or from nothing, to the newest; over the anchor of which one."""

    start: int | None
    mode: str = "replace"
    over: int | None = None


WAYS = {
    "first": Way(None, over=1),
    "one-delta": Way(VERSIONS - 1),
    "three-deltas": Way(VERSIONS - 3),
    "anchor": Way(1, over=ANCHORED),
    "in-place": Way(VERSIONS - 3, "in-place"),
    "aside": Way(VERSIONS - 3, "aside"),
}


@pytest.mark.parametrize("name", WAYS)
def test_pull(remote: Remote, gapped: Remote, tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    source = gapped if way.over == ANCHORED else remote
    place, start = tmp_path / "place", tmp_path / "start"
    root = place / "receiver"

    def run() -> None:
        pull(source.path, root, mode=way.mode, jobs=1)

    place.mkdir()
    if way.start is not None:
        pull(remote.path, root, version=way.start, mode=way.mode, jobs=1)
    shutil.copytree(place, start, symlinks=True)
    whole = recording(run)
    usual = names_of(root)

    def attempt(kill: str, end: Callable[[], bool]) -> bool:
        fresh_copy(start, place)
        is_through = end()
        check_between(source, root, way, kill)
        had = fetched(source, place)
        again = recording(run)
        assert tree(root.resolve()) == source.version(VERSIONS), kill
        assert names_of(root) <= usual, (kill, names_below(place))
        assert again.total <= max(whole.total - had, 0), (kill, again.bytes_read)
        if is_through:
            assert again.total == 0, kill
        assert pull(source.path, root, mode=way.mode, jobs=1).already, kill
        return is_through

    kill_everywhere(run, attempt)


def names_of(root: Path) -> set[str]:
    """What a receiver keeps beside its checkpoint."""
    return set(names_below(root.resolve() / ".dcr"))


def check_between(source: Remote, root: Path, way: Way, kill: str) -> None:
    """What others see after a kill is the old state or the new one, or says that it is neither."""
    if not root.exists():
        assert way.start is None, kill
    elif way.mode == "aside" or not is_incomplete(root):
        old = source.version(way.start) if way.start is not None else {}
        # The way of some leads over an anchor, whose version is one too.
        between = source.version(way.over) if way.over is not None else old
        assert tree(root.resolve()) in (old, between, source.version(VERSIONS)), kill


def fetched(source: Remote, place: Path) -> int:
    """The bytes of payloads of the way that a killed pull has left under their names, complete."""
    found = 0
    for path in place.rglob("fetched/*/payloads/*.safetensors"):
        version, name = path.parent.parent.name, path.name
        whole = source.path / "versions" / version / "payloads" / name
        if path.read_bytes() == whole.read_bytes():
            found += path.stat().st_size
    return found


# Commit


def test_commit_of_a_quorum(remote: Remote, tmp_path: Path) -> None:
    kept, place = tmp_path / "kept", tmp_path / "remote"
    baseline = fresh_copy(remote.folder / "baseline", tmp_path / "baseline")
    fresh_copy(remote.path, kept)
    push(remote.steps[0], kept, baseline=baseline, prepare=True, jobs=1)
    pull(kept, tmp_path / "receiver", receiver="r", jobs=1)
    expected = [*map(tree, remote.steps), tree(remote.steps[0])]

    def run() -> None:
        commit(place, quorum=1, timeout_seconds=60)

    def attempt(kill: str, end: Callable[[], bool]) -> bool:
        fresh_copy(kept, place)
        is_through = end()
        count = len(commits(place))
        assert count in (VERSIONS, VERSIONS + 1), kill
        again = recording(run)
        assert not again.written and not again.total, kill
        assert commit(place).already, kill
        if is_through:
            assert count == VERSIONS + 1
        assert build_all(place, tmp_path / "scratch") == expected, kill
        return is_through

    kill_everywhere(run, attempt)
    result = pull(place, tmp_path / "receiver", receiver="r", jobs=1)
    assert result.reused_bytes > 0 and result.version == VERSIONS + 1


# Prune


def test_prune(remote: Remote, tmp_path: Path) -> None:
    kept, place = tmp_path / "kept", tmp_path / "remote"
    fresh_copy(remote.path, kept)
    anchor(remote.steps[1], kept, version=2, jobs=1)
    anchor(remote.steps[ANCHORED - 1], kept, version=ANCHORED, jobs=1)

    def run() -> None:
        prune(place, keep=1, keep_within=0, lease=0)

    fresh_copy(kept, place)
    run()
    expected = tree(place)

    def attempt(kill: str, end: Callable[[], bool]) -> bool:
        fresh_copy(kept, place)
        is_through = end()
        assert verify_remote(place, deep=True).matches, kill
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        pull(place, tmp_path / "fresh", jobs=1)
        assert tree(tmp_path / "fresh") == remote.version(VERSIONS), kill
        # Beside one that may be alive no other prunes, and what is half written may be what it writes.
        age(place)
        run()
        assert tree(place) == expected, kill
        return is_through

    kill_everywhere(run, attempt)


def age(place: Path) -> None:
    then = time.time() - 2 * DAY
    for path in place.rglob("*"):
        os.utime(path, (then, then))
