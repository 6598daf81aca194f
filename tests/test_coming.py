"""Versions whose commit is there before all that it binds, as a mirror may show them: waited for, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dcr_cli.advance import advance
from dcr_cli.errors import NotFoundError, WrongBaseError
from dcr_cli.fetch.coming import ComingError
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.wish import Wish
from dcr_cli.pull import pull
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from pushed import History, history, states
from receivers import tree
from store_contract import MOST

MOST_WAITS = 3


@dataclass
class Mirror:
    """A remote from which objects are taken, to come one after the other while a pull waits."""

    remote: History
    taken: list[tuple[str, bytes]] = field(default_factory=list)
    waits: int = 0

    def take(self, number: int, names: str) -> None:
        """Take the objects of a version's delta, or of its anchor, whose names have this in them."""
        place = self.remote.commit(number).version.place
        with self.remote.open() as store:
            for entry in [*store.list(f"versions/{place}/"), *store.list("anchors/")]:
                if str(place) in entry.key and names in entry.key:
                    data = store.get(entry.key, most_bytes=MOST)
                    assert data is not None
                    self.taken.append((entry.key, data))
                    store.delete(entry.key)
        assert self.taken

    def put(self) -> None:
        """Have the next object come."""
        with self.remote.open() as store:
            store.put(*self.taken.pop())

    def pull(self, root: Path, act: Callable[[], object], version: int | None = None) -> PullResult:
        """Pull with an act in each wait, of which there are only so many."""

        def wait(seconds: float) -> None:
            self.waits += 1
            act()

        patience = Patience(MOST_WAITS, 0.0, 0.0, sleep=wait, clock=lambda: float(self.waits))
        store = Store(MemoryBackend(self.remote.name), self.remote.url, patience=patience)
        return advance(store, root, Wish(Effort(1, None), version=version))


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(history(tmp_path / "remote", 3))


def nothing() -> None:
    pass


@pytest.mark.parametrize("names", ["manifest", "digests", "payloads/"])
@pytest.mark.parametrize("own", [None, 1, 2])
def test_what_comes_in_time_is_waited_for(mirror: Mirror, tmp_path: Path, names: str, own: int | None) -> None:
    root = tmp_path / "r"
    if own is not None:
        pull(mirror.remote.url, root, version=own)
    mirror.take(3, names)
    assert mirror.pull(root, mirror.put).version == 3
    assert mirror.waits == 1 and tree(root) == tree(mirror.remote.version(3))


def test_several_versions_that_come_one_after_the_other(mirror: Mirror, tmp_path: Path) -> None:
    root = tmp_path / "r"
    pull(mirror.remote.url, root, version=1)
    mirror.take(3, "manifest")
    mirror.take(2, "manifest")
    assert mirror.pull(root, mirror.put).applied == (2, 3)
    assert mirror.waits == 2


@pytest.mark.parametrize("names", [".json", "files/"])
def test_an_anchor_alone(tmp_path: Path, names: str) -> None:
    remote = History(tmp_path)
    remote.publish(states(1)[0])
    mirror = Mirror(remote)
    mirror.take(1, names)

    def put_all() -> None:
        while mirror.taken:
            mirror.put()

    assert mirror.pull(tmp_path / "r", put_all).applied == (1,)
    assert mirror.waits == 1


@pytest.mark.parametrize("version", [None, 3])
def test_what_does_not_come_is_a_remote_that_does_not_answer(
    mirror: Mirror, tmp_path: Path, version: int | None
) -> None:
    root = tmp_path / "r"
    pull(mirror.remote.url, root, version=2)
    mirror.take(3, "payloads/")
    said = r"version 3 is committed, but not all of it is there yet; tried \d+ times in \d+ s"
    with pytest.raises(ComingError, match=said) as caught:
        mirror.pull(root, nothing, version)
    assert (caught.value.exit_code, caught.value.retryable, caught.value.class_name) == (7, True, "TransportError")
    assert caught.value.hint is not None and "run the same command again later" in caught.value.hint
    assert mirror.waits > 1 and tree(root) == tree(mirror.remote.version(2))


@pytest.mark.parametrize(("number", "version"), [(2, None), (2, 2)])
def test_a_gap_with_a_whole_version_after_it_is_none_that_closes(
    mirror: Mirror, tmp_path: Path, number: int, version: int | None
) -> None:
    mirror.take(number, "manifest")
    root = tmp_path / "r"
    with pytest.raises(NotFoundError, match=f"no anchor from which version {version or 3}"):
        mirror.pull(root, nothing, version)
    pull(mirror.remote.url, root, version=1)
    with pytest.raises(WrongBaseError, match="version 2 is missing; no anchor at or after it"):
        mirror.pull(root, nothing, version)
    assert not mirror.waits
