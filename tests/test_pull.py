"""Pull: a receiver comes to the version that is asked for, from wherever it is, and never to anything else."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dcr_cli import advance as advance_module, journey
from dcr_cli.advance import advance
from dcr_cli.apply import ApplyResult, apply, apply_chain
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import blake3_text
from dcr_cli.checkpoint.in_progress import is_incomplete
from dcr_cli.commit import commit
from dcr_cli.delta.delta import Delta, open_delta
from dcr_cli.delta.document import CONTENT_LIMIT, WINDOW_LIMIT
from dcr_cli.delta.frame import stated_bytes
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.diff import diff
from dcr_cli.durable import open_folder
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    HookError,
    IncompleteError,
    NotFoundError,
    TransportError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.fetch import download, hook as hook_module
from dcr_cli.fetch.position import POSITION_NAME, read_position
from dcr_cli.fetch.spool import spool_of
from dcr_cli.fetch.wish import Wish
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.remote.acknowledgement import read_acknowledgement
from dcr_cli.remote.keys import APPLIED, STAGED, AcknowledgementPlace, Place, acknowledgement_key, commit_key
from dcr_cli.remote.signing import trust_in
from dcr_cli.store.backend import Backend, TransientError
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from dcr_cli.verify import verify
from faults import StoppedError, stopped_at, watching
from pushed import History, history, states
from receivers import fresh_copy, names_below, rich_tensors, tree
from store_contract import MOST
from store_wrappers import Allows, FailsCall, FlipsAByte, KillsAtCall, Records, Truncates, Wrapped, wrapping
from strategies import TensorData, tensor_of, write_checkpoint


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A remote of five versions, which no test changes."""
    return history(tmp_path_factory.mktemp("five"), 5)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A smaller one of three versions."""
    found = History(tmp_path_factory.mktemp("three"))
    for state in states(3, tensors=2):
        found.publish(state)
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two keys."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        make_key(folder / name)
    return folder


@pytest.fixture(scope="module")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    """A remote of three versions that are signed with the first key."""
    return history(tmp_path_factory.mktemp("signed"), 3, key=keys / "ours")


@contextmanager
def recorded_calls() -> Iterator[list[tuple[str, str]]]:
    """The calls of the stores that are opened meanwhile."""
    calls: list[tuple[str, str]] = []

    def wrap(backend: Backend) -> Records:
        wrapped = Records(backend)
        wrapped.calls = calls
        return wrapped

    with wrapping(wrap):
        yield calls


@contextmanager
def before_reading(*acts: tuple[str, Callable[[], object]]) -> Iterator[list[tuple[str, str]]]:
    """Meanwhile something happens before an object whose key matches a pattern is read, once; the calls."""
    left, calls = list(acts), list[tuple[str, str]]()

    class Acts(Wrapped):
        def called(self, name: str, key: str) -> None:
            calls.append((name, key))
            for pattern, act in left:
                if name == "read" and fnmatch(key, pattern):
                    left.remove((pattern, act))
                    act()
                    return

    with wrapping(Acts):
        yield calls
    assert not left


def in_passes(folder: Path, versions: int) -> History:
    """A remote whose deltas do not go in one pass: each version leaves out other files."""
    folder.mkdir()
    remote = History(folder)
    for number, state in enumerate(states(versions)):
        remote.publish(state, skip=[f"none-{number}"])
    return remote


def decoded_bytes(history: History, number: int) -> int:
    """What the documents of a version's delta decode to."""
    with history.open() as store:
        names = [entry.key for entry in store.list("versions/") if entry.key.startswith(f"versions/{number:010d}-")]
        objects = [store.get(name, most_bytes=MOST) for name in names if name.endswith((MANIFEST_NAME, DIGESTS_NAME))]
    return sum(stated_bytes(data, CONTENT_LIMIT, WINDOW_LIMIT) for data in objects if data is not None)


def at(history: History, number: int, path: Path) -> Path:
    """A receiver that was brought to a version."""
    pull(history.url, path, version=number, jobs=1)
    return path


def version_of(path: Path) -> int | None:
    """The version that a receiver says it is at."""
    with open_folder(path / ".dcr") as home:
        position = read_position(home)
    return position.version if position is not None else None


class TestGoing:
    def test_a_first_pull_makes_a_copy(self, five: History, tmp_path: Path) -> None:
        result = pull(five.url, tmp_path / "r")
        assert tree(tmp_path / "r") == tree(five.version(5))
        assert (result.from_version, result.version, result.applied) == (None, 5, (1, 2, 3, 4, 5))
        assert version_of(tmp_path / "r") == 5

    def test_the_next_versions_come_as_deltas(self, five: History, tmp_path: Path) -> None:
        root = at(five, 2, tmp_path / "r")
        with recorded_calls() as calls:
            result = pull(five.url, root)
        assert tree(root) == tree(five.version(5))
        assert (result.from_version, result.version, result.applied) == (2, 5, (3, 4, 5))
        assert not [key for _, key in calls if key.startswith("anchors/") or key == "dcr.json"]
        assert names_below(root / ".dcr") == ["lock", POSITION_NAME, "state.json", "state.zst"]

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_both_ways_of_changing_it_where_it_is(self, five: History, tmp_path: Path, mode: str) -> None:
        root = at(five, 1, tmp_path / "r")
        assert pull(five.url, root, mode=mode).changed
        assert tree(root) == tree(five.version(5))

    def test_aside_turns_the_link(self, five: History, tmp_path: Path) -> None:
        at(five, 4, tmp_path / "first")
        link = tmp_path / "r"
        link.symlink_to("first")
        result = pull(five.url, link, mode="aside", keep_previous=True)
        assert tree(link.resolve()) == tree(five.version(5))
        assert tree(tmp_path / "first") == tree(five.version(4))
        assert result.previous == str(tmp_path / "first")
        assert version_of(link) == 5
        assert pull(five.url, link, mode="aside").already

    @pytest.mark.parametrize("keep_previous", [True, False])
    def test_aside_goes_through_several_versions_at_once(
        self, five: History, tmp_path: Path, keep_previous: bool
    ) -> None:
        link = tmp_path / "r"
        pull(five.url, link, version=2, mode="aside")
        before = link.resolve()
        result = pull(five.url, link, mode="aside", keep_previous=keep_previous)
        assert result.applied == (3, 4, 5) and version_of(link) == 5
        assert tree(link.resolve()) == tree(five.version(5))
        assert before.exists() == keep_previous
        assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 1 + keep_previous

    @pytest.mark.parametrize("keep_previous", [True, False])
    def test_aside_nothing_is_fetched_twice_however_often_the_link_is_turned(
        self, tmp_path: Path, keep_previous: bool
    ) -> None:
        remote, link = in_passes(tmp_path / "remote", 5), tmp_path / "r"
        pull(remote.url, link, version=1, mode="aside", jobs=1)
        first, turns = link.resolve(), list[str]()

        def watch(kind: str, path: str, other: str) -> None:
            if kind == "rename" and other == str(link):
                turns.append(os.readlink(path))

        with recorded_calls() as calls, watching(watch):
            result = pull(remote.url, link, mode="aside", keep_previous=keep_previous, jobs=1)
        assert result.applied == (2, 3, 4, 5) and len(turns) == 4 and not result.reused_bytes
        keys = [key for _, key in calls if key.startswith("versions/")]
        assert len(keys) == len(set(keys)) and len([key for key in keys if "/payloads/" in key]) == 4
        assert tree(link.resolve()) == tree(remote.version(5)) and version_of(link) == 5
        assert result.previous == (str(first) if keep_previous else None)
        assert "fetched" not in names_below(link.resolve() / ".dcr")
        assert len(list(tmp_path.glob("r.dcr-*"))) == 1 + keep_previous

    @pytest.mark.parametrize("mode", ["replace", "in-place", "aside"])
    def test_only_so_many_deltas_are_open_at_once(
        self, five: History, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However far behind a receiver is, memory is needed for those, and nothing is fetched twice."""
        root, groups, opened = tmp_path / "r", list[int](), list[object]()
        pull(five.url, root, version=1, mode="aside" if mode == "aside" else "replace", jobs=1)

        def apply_some(deltas: Sequence[Delta], *arguments: Any, **options: Any) -> ApplyResult:
            groups.append(len(deltas))
            assert len(opened) == len(deltas)
            opened.clear()
            return apply_chain(deltas, *arguments, **options)

        def open_one(folder: Path) -> Delta:
            opened.append(folder)
            return open_delta(folder)

        monkeypatch.setattr(journey, "apply_chain", apply_some)
        monkeypatch.setattr(journey, "open_delta", open_one)
        sizes = [decoded_bytes(five, number) for number in range(2, 6)]
        monkeypatch.setattr(download, "AT_ONCE_BYTES", max(map(sum, pairwise(sizes))))
        with recorded_calls() as calls:
            result = pull(five.url, root, mode=mode, jobs=1)
        assert result.applied == (2, 3, 4, 5) and groups == [2, 2]
        keys = [key for _, key in calls if key.startswith("versions/")]
        assert len(keys) == len(set(keys)) and not result.reused_bytes
        assert tree(root.resolve()) == tree(five.version(5)) and version_of(root) == 5
        assert "fetched" not in names_below(root.resolve() / ".dcr")

    @pytest.mark.parametrize("mode", ["replace", "in-place", "aside"])
    def test_tensors_that_come_go_and_change_their_names(self, tmp_path: Path, mode: str) -> None:
        """Other shards, and chains that do not go in one pass."""
        remote = History(tmp_path)
        first, second = rich_tensors()
        third = {f"new.{name}": tensor for name, tensor in second.items()}
        flat = {name: (dtype, (math.prod(shape),), data) for name, (dtype, shape, data) in third.items()}
        for tensors in (first, second, third, dict[str, TensorData](flat), first):
            remote.publish(tensors)
        root = tmp_path / "r"
        pull(remote.url, root, version=1, mode="aside" if mode == "aside" else "replace")
        assert pull(remote.url, root, mode=mode).applied == (2, 3, 4, 5)
        assert tree(root.resolve()) == tree(remote.version(5))
        assert pull(remote.url, root, mode=mode).already

    def test_without_news_two_requests_are_made_and_nothing_is_written(self, five: History, tmp_path: Path) -> None:
        root = at(five, 5, tmp_path / "r")
        before = {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}
        with recorded_calls() as calls:
            result = pull(five.url, root)
        assert result.already and not result.changed and result.version == 5
        assert calls == [("read", "commits/0000000006.json"), ("read", "commits/0000000005.json")]
        assert {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]} == before

    def test_a_version_that_lies_behind_is_gone_to_only_when_asked_for(self, five: History, tmp_path: Path) -> None:
        root = at(five, 5, tmp_path / "r")
        assert pull(five.url, root, version=3).version == 3
        assert tree(root) == tree(five.version(3))
        assert pull(five.url, root).version == 5
        assert tree(root) == tree(five.version(5))

    def test_a_dry_run_says_the_way_and_changes_nothing(self, five: History, tmp_path: Path) -> None:
        root = at(five, 3, tmp_path / "r")
        before = names_below(root)
        result = pull(five.url, root, dry_run=True)
        sizes = [five.commit(number).version.bytes for number in (4, 5)]
        assert result.way is not None and (result.way.anchor, result.way.bytes) == (None, sum(sizes))
        assert result.dry_run and not result.changed and names_below(root) == before
        assert pull(five.url, tmp_path / "new", dry_run=True).applied == (1, 2, 3, 4, 5)
        assert not (tmp_path / "new").exists()

    def test_what_contradicts_itself_is_refused(self, five: History, tmp_path: Path) -> None:
        for options in ({"mode": "x"}, {"keep_previous": True}, {"version": 0}, {"hook": " "}, {"receiver": "a/b"}):
            with pytest.raises(UsageError):
                pull(five.url, tmp_path / "r", **options)


class TestWhatIsNotThere:
    def test_no_remote(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="holds no versions"):
            pull("memory://nothing-was-ever-there", tmp_path / "r")

    def test_no_such_version(self, five: History, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="no version 6"):
            pull(five.url, tmp_path / "r", version=6)

    def test_a_fault_is_no_absence(self, five: History, tmp_path: Path) -> None:
        """A receiver whose request fails never hears that there is nothing new."""
        root = at(five, 4, tmp_path / "r")
        for number in range(2):
            backend = FailsCall(MemoryBackend(five.name), number, TransientError("did not answer"))
            store = Store(backend, five.url, patience=Patience(deadline_seconds=0.0))
            with pytest.raises(TransportError):
                advance(store, root, Wish(Effort(1, None)))
        assert tree(root) == tree(five.version(4))

    def test_rights_to_get_alone_are_enough(self, five: History, tmp_path: Path) -> None:
        """Where missing keys are denied, and nothing may be listed."""
        root = at(five, 2, tmp_path / "r")
        with wrapping(lambda backend: Allows(backend, get=["*"], stat=[])):
            assert pull(five.url, root).version == 5
            assert pull(five.url, root).already
            assert pull(five.url, tmp_path / "new").version == 5
            with pytest.raises(NotFoundError, match="no version 6, or it may not be read"):
                pull(five.url, root, version=6)
        assert tree(root) == tree(tmp_path / "new") == tree(five.version(5))

    def test_access_to_nothing_is_no_log_that_went_backwards(self, five: History, tmp_path: Path) -> None:
        root = at(five, 5, tmp_path / "r")
        with wrapping(lambda backend: Allows(backend)), pytest.raises(TransportError, match="denied"):
            pull(five.url, root)


class TestGaps:
    """Deltas that were pruned."""

    def test_no_way_is_known_before_any_payload_is_fetched(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 5)
        root = at(remote, 1, tmp_path / "r")
        for number in (2, 3):
            remote.remove_delta(number)
        gap = r"version 2 is missing; no anchor at or"
        with recorded_calls() as calls, pytest.raises(WrongBaseError, match=gap) as caught:
            pull(remote.url, root)
        hint = f"dcr anchor CHECKPOINT {remote.url} makes one of the version that CHECKPOINT is at"
        assert caught.value.hint == hint
        assert not [key for name, key in calls if name == "read" and "/payloads/" in key]
        assert tree(root) == tree(remote.version(1))
        remote.anchor(4)
        assert pull(remote.url, root).applied == (4, 5)
        assert tree(root) == tree(remote.version(5))

    def test_a_first_pull_passes_over_deltas_that_are_gone(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3)
        remote.anchor(3)
        remote.remove_delta(2)
        assert pull(remote.url, tmp_path / "r").applied == (3,)
        with pytest.raises(NotFoundError, match="no anchor from which version 2"):
            pull(remote.url, tmp_path / "other", version=2)

    @pytest.mark.usefixtures("impatient")
    def test_a_payload_that_goes_while_it_is_read(self, tmp_path: Path) -> None:
        """The receiver is as it was, or comes another way."""
        remote = history(tmp_path / "remote", 3)
        root = at(remote, 2, tmp_path / "r")
        with remote.open() as store:
            for entry in store.list(f"versions/{remote.commit(3).version.place}/payloads/"):
                store.delete(entry.key)
        with pytest.raises(TransportError, match="version 3 is committed, but not all of it is there yet"):
            pull(remote.url, root)
        assert tree(root) == tree(remote.version(2)) and version_of(root) == 2

    @pytest.mark.usefixtures("impatient")
    def test_a_payload_that_is_gone_behind_an_anchor(self, tmp_path: Path) -> None:
        """The anchor was come to by then, and that is what is noted."""
        remote = history(tmp_path / "remote", 3)
        with remote.open() as store:
            for entry in store.list(f"versions/{remote.commit(3).version.place}/payloads/"):
                store.delete(entry.key)
        root = tmp_path / "r"
        with pytest.raises(TransportError, match="version 3 is committed, but not all of it is there yet"):
            pull(remote.url, root)
        assert tree(root) == tree(remote.version(1)) and version_of(root) == 1

    def test_another_way_behind_an_anchor(self, tmp_path: Path) -> None:
        """What goes after an anchor has come is gone around from there."""
        remote = history(tmp_path / "remote", 3)

        def prune_and_anchor() -> None:
            remote.remove_delta(3)
            remote.anchor(3)

        with before_reading(("versions/0000000003-*/payloads/*", prune_and_anchor)):
            result = pull(remote.url, tmp_path / "r", jobs=1)
        assert (result.from_version, result.applied, result.version) == (None, (1, 3), 3)
        assert result.way is not None and result.way.anchor == 3
        assert tree(tmp_path / "r") == tree(remote.version(3)) and version_of(tmp_path / "r") == 3

    @pytest.mark.parametrize("is_denied", [False, True])
    @pytest.mark.parametrize("jobs", [1, 3])
    def test_an_anchor_that_goes_while_it_is_fetched(self, tmp_path: Path, jobs: int, is_denied: bool) -> None:
        """Where missing keys are denied, too."""
        remote = history(tmp_path / "remote", 3)
        remote.anchor(3)
        rights = {"get": ["*"], "list": [] if is_denied else ["*"]}
        with (
            wrapping(lambda backend: Allows(backend, **rights)),
            before_reading(("anchors/0000000003-*/files/*", lambda: remove_anchor(remote, 3))),
        ):
            result = pull(remote.url, tmp_path / "r", jobs=jobs)
        assert result.applied == (1, 2, 3)
        assert tree(tmp_path / "r") == tree(remote.version(3))
        assert not list(tmp_path.glob(".r*"))

    def test_an_anchor_that_goes_for_a_newer_one(self, tmp_path: Path) -> None:
        """The way is looked for anew, to what is the newest then."""
        remote = history(tmp_path / "remote", 2)

        def overtake() -> None:
            remote.publish(states(3)[2])
            remote.anchor(3)
            remove_anchor(remote, 1)

        with before_reading(("anchors/0000000001-*/files/*", overtake)):
            result = pull(remote.url, tmp_path / "r", jobs=1)
        assert (result.applied, result.version) == ((3,), 3)
        assert tree(tmp_path / "r") == tree(remote.version(3))

    def test_the_only_anchor_goes_while_it_is_fetched(self, tmp_path: Path) -> None:
        """It is said what happened, and nothing is there."""
        remote = history(tmp_path / "remote", 2)
        said = "no anchor from which version 2 can be reached; the anchor of version 1 was removed while it was fetched"
        with (
            before_reading(("anchors/0000000001-*/files/*", lambda: remove_anchor(remote, 1))),
            pytest.raises(NotFoundError, match=said),
        ):
            pull(remote.url, tmp_path / "r", jobs=1)
        assert not (tmp_path / "r").exists()

    def test_ways_that_go_one_after_the_other_come_to_an_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote = history(tmp_path / "remote", 3)
        for number in (2, 3):
            remote.anchor(number)
        monkeypatch.setattr(advance_module, "_MOST_WAYS", 2)
        acts = [
            (f"anchors/000000000{number}-*/files/*", functools.partial(remove_anchor, remote, number))
            for number in (3, 1)
        ]
        with (
            before_reading(*acts),
            pytest.raises(WrongBaseError, match="the anchor of version 1 was removed while it was fetched"),
        ):
            pull(remote.url, tmp_path / "r", jobs=1)
        assert pull(remote.url, tmp_path / "r", jobs=1).applied == (2, 3)

    def test_an_anchor_that_takes_less_than_the_deltas(self, tmp_path: Path) -> None:
        remote = History(tmp_path)
        for seed in range(4):
            remote.publish({f"{name}.weight": tensor_of("BF16", (64, 64), 2 * seed + name) for name in (0, 1)})
        root = at(remote, 1, tmp_path / "r")
        remote.anchor(4)
        assert pull(remote.url, root).applied == (4,)
        assert tree(root) == tree(remote.version(4))

    def test_a_break_is_passed_by_its_anchor(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 2, tmp_path / "r")
        remote.publish({f"layers.{number}.weight": tensor_of("BF16", (64, 64), 77) for number in (0, 1)}, no_delta=True)
        remote.publish({f"layers.{number}.weight": tensor_of("BF16", (64, 64), 78) for number in (0, 1)})
        result = pull(remote.url, root)
        assert result.applied == (3, 4) and result.way is not None and result.way.anchor == 3
        assert tree(root) == tree(remote.version(4))


def remove_anchor(remote: History, number: int) -> None:
    """Remove a version's anchor, as prune does: its document first."""
    place = remote.commit(number).version.place
    # Whatever a puller may do.
    store = Store(MemoryBackend(remote.name), remote.url)
    store.delete(f"anchors/{place}.json")
    for entry in store.list(f"anchors/{place}/"):
        store.delete(entry.key)


class TestLogs:
    """A log that is not the one that the receiver has seen."""

    def test_one_that_ends_before(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3)
        root = at(remote, 3, tmp_path / "r")
        with remote.open() as store:
            store.delete("commits/0000000003.json")
        with pytest.raises(WrongBaseError, match="its log ends below version 3"):
            pull(remote.url, root)
        assert pull(remote.url, root, version=2).version == 2
        assert tree(root) == tree(remote.version(2))

    @pytest.mark.parametrize("is_repair", [False, True])
    def test_one_that_ends_before_what_was_seen_and_gone_back_from(self, tmp_path: Path, is_repair: bool) -> None:
        """A receiver that was told to go back has seen no less of its log."""
        remote = history(tmp_path / "remote", 4)
        root = at(remote, 4, tmp_path / "r")
        assert pull(remote.url, root, version=2, repair=is_repair, jobs=1).version == 2
        with remote.open() as store:
            last = store.get(commit_key(4), most_bytes=1 << 16)
            assert last is not None
            store.delete(commit_key(4))
        for _ in range(2):
            with pytest.raises(WrongBaseError, match="its log ends below version 4"):
                pull(remote.url, root, jobs=1)
            with remote.open() as store:
                store.put(commit_key(4), last)
            assert pull(remote.url, root, version=1, jobs=1).version == 1
            with remote.open() as store:
                store.delete(commit_key(4))
        assert tree(root) == tree(remote.version(1))
        # Whoever asks for a version of a log that has lost another one takes that log as it is.
        assert pull(remote.url, root, version=1, repair=is_repair, jobs=1).version == 1
        assert pull(remote.url, root, jobs=1).version == 3
        assert tree(root) == tree(remote.version(3))

    def test_one_that_was_gone_back_in_goes_on_from_there(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3)
        root = at(remote, 3, tmp_path / "r")
        assert pull(remote.url, root, version=1, jobs=1).version == 1
        note = json.loads((root / ".dcr" / POSITION_NAME).read_bytes())
        assert note["newer"] == {"version": 3, "commit": blake3_text(remote.commit(3).blake3)}
        assert pull(remote.url, root, jobs=1).applied == (2, 3)
        assert json.loads((root / ".dcr" / POSITION_NAME).read_bytes())["newer"] is None

    def test_one_with_another_commit(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 2, tmp_path / "r")
        with remote.open() as store:
            store.delete("commits/0000000002.json")
        other = History(tmp_path / "again", name=remote.name)
        other.folder.mkdir()
        baseline = tmp_path / "again" / "baseline"
        pull(remote.url, baseline, version=1)
        (baseline / ".dcr/baseline").write_bytes(b"")
        other.checkpoints = remote.checkpoints[:1]
        other.publish(states(3)[2])
        with pytest.raises(WrongBaseError, match="is another than the one"):
            pull(remote.url, root)
        assert tree(root) == tree(remote.version(2))

    def test_another_history_at_the_address(self, five: History, tmp_path: Path) -> None:
        root = at(five, 5, tmp_path / "r")
        other = history(tmp_path / "other", 2)
        with pytest.raises(WrongBaseError, match="follows history"):
            pull(other.url, root)
        assert pull(other.url, root, repair=True).version == 2
        assert tree(root) == tree(other.version(2))

    def test_an_empty_commit_is_damage(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 1, tmp_path / "r")
        with remote.open() as store:
            store.put("commits/0000000002.json", b"")
        with pytest.raises(DamagedError):
            pull(remote.url, root)
        assert tree(root) == tree(remote.version(1))


class TestInProgress:
    """Changes that were begun, by others too."""

    def test_what_it_leaves_alone_is_told_when_it_is_finished(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 1)
        root = at(remote, 1, tmp_path / "r")
        second = fresh_copy(remote.version(1), tmp_path / "second")
        shutil.rmtree(second / "tokenizer")
        push(second, remote.url, baseline=remote.folder / "baseline", no_delta=True, jobs=1)

        def stop(kind: str, path: str, other: str) -> None:
            if stopped or (kind == "unlink" and path.endswith("in-progress")):
                stopped.append(None)
                raise StoppedError

        stopped: list[None] = []
        with watching(stop), pytest.raises(StoppedError):
            pull(remote.url, root, jobs=1)
        (root / "tokenizer").mkdir()
        (root / "tokenizer/vocab.txt").write_bytes(b"mine")
        result = pull(remote.url, root, jobs=1)
        assert (result.recovered, result.already, result.version) == (True, True, 2)
        assert result.foreign == ("tokenizer/vocab.txt",)
        assert tree(root) == {**tree(second), "tokenizer/vocab.txt": b"mine"}

    def test_an_apply_that_was_stopped_is_not_overtaken(self, five: History, tmp_path: Path) -> None:
        root = at(five, 3, tmp_path / "r")
        diff(five.version(3), five.version(4), tmp_path / "delta")
        number = 0
        while not is_incomplete(root):
            stopped_at(number, functools.partial(apply, tmp_path / "delta", root, jobs=1))
            number += 10
        for dry_run in (False, True):
            with pytest.raises(IncompleteError, match="incomplete: an apply to it"):
                pull(five.url, root, dry_run=dry_run)
        assert pull(five.url, root, repair=True).version == 5
        assert tree(root) == tree(five.version(5))

    def test_what_was_fetched_for_it_is_gone(self, five: History, tmp_path: Path) -> None:
        root = at(five, 3, tmp_path / "r")
        number = 100
        while not is_incomplete(root):
            stopped_at(number, functools.partial(pull, five.url, root, jobs=1))
            number += 5
        shutil.rmtree(root / ".dcr/fetched")
        with pytest.raises(IncompleteError, match="not there any more"):
            pull(five.url, root)
        assert pull(five.url, root, repair=True).version == 5
        assert tree(root) == tree(five.version(5))


class TestAdoption:
    """A folder that nothing is noted of is what its bytes say."""

    def test_a_copy_of_a_version_is_brought_on_from_there(self, five: History, tmp_path: Path) -> None:
        root = fresh_copy(five.version(3), tmp_path / "r")
        (root / "mine.txt").write_text("not the publisher's")
        with recorded_calls() as calls:
            result = pull(five.url, root)
        assert result.adopted and (result.from_version, result.applied) == (3, (4, 5))
        assert tree(root) == tree(five.version(5)) | {"mine.txt": b"not the publisher's"}
        assert not [key for _, key in calls if key.startswith("anchors/")]

    def test_a_copy_of_the_newest_is_noted_and_read_only_once(self, five: History, tmp_path: Path) -> None:
        root = fresh_copy(five.version(5), tmp_path / "r")
        assert pull(five.url, root).already
        assert version_of(root) == 5
        told: list[str] = []
        assert pull(five.url, root, progress=lambda stage, done, total: told.append(stage)).already
        assert not told

    def test_a_receiver_may_have_shards_of_its_own(self, five: History, tmp_path: Path) -> None:
        sidecars = {path: data for path, data in tree(five.version(3)).items() if "safetensors" not in path}
        root = write_checkpoint(tmp_path / "r", states(3)[2], sidecars=sidecars)
        assert pull(five.url, root).from_version == 3
        assert sorted(path for path in tree(root) if path.endswith(".safetensors")) == ["model.safetensors"]
        assert verify(root, against=five.version(5)).matches
        with recorded_calls() as calls:
            assert pull(five.url, root).already
        assert len(calls) == 2

    def test_shards_of_its_own_need_the_sidecars_too(self, five: History, tmp_path: Path) -> None:
        sidecars = {path: data for path, data in tree(five.version(3)).items() if "safetensors" not in path}
        root = write_checkpoint(tmp_path / "r", states(3)[2], sidecars=sidecars | {"config.json": b"{}"})
        with pytest.raises(WrongBaseError, match="none of the versions"):
            pull(five.url, root)

    def test_anything_else_is_refused(self, five: History, tmp_path: Path) -> None:
        root = write_checkpoint(tmp_path / "r", {"other": tensor_of("BF16", (8, 8), 5)})
        before = tree(root)
        with pytest.raises(WrongBaseError, match="is none of the versions 1 to 5") as caught:
            pull(five.url, root)
        assert "--repair" in (caught.value.hint or "")
        assert tree(root) == before and not (root / ".dcr").exists()

    def test_what_was_changed_is_named(self, five: History, tmp_path: Path) -> None:
        root = at(five, 2, tmp_path / "r")
        (root / "config.json").unlink()
        (root / "tokenizer/vocab.txt").write_bytes(b"other")
        with pytest.raises(WrongBaseError) as caught:
            pull(five.url, root)
        assert caught.value.facts.endswith(
            f"of the versions 1 to 5 of {five.url}; since dcr left it, config.json is missing, "
            "tokenizer/vocab.txt was changed"
        )
        assert str(caught.value.hint).startswith(f"dcr verify {root} tells all that was changed; dcr pull --repair ")
        for shard in root.glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-1] + b"\xa5")
        with pytest.raises(WrongBaseError, match=r"changed, tensor layers\.\d\.weight was changed and 1 more$"):
            pull(five.url, root)
        assert not verify(root).matches

    def test_what_was_changed_in_a_trusted_receiver(self, signed: History, keys: Path, tmp_path: Path) -> None:
        trusted = [str(keys / "ours.pub")]
        pull(signed.url, tmp_path / "r", version=1, trusted_keys=trusted)
        (tmp_path / "r/config.json").write_bytes(b"{}")
        with pytest.raises(WrongBaseError, match=r"signed versions; since dcr left it, config\.json was changed$"):
            pull(signed.url, tmp_path / "r", trusted_keys=trusted)

    @pytest.mark.parametrize("torn", [b"", b'{"format": 1, "history": "', b"[]\n", b'{"format": 99}\n'])
    def test_a_torn_note_says_nothing(self, five: History, tmp_path: Path, torn: bytes) -> None:
        """Never that the receiver is at no version."""
        root = at(five, 4, tmp_path / "r")
        (root / ".dcr" / POSITION_NAME).write_bytes(torn)
        with recorded_calls() as calls:
            result = pull(five.url, root)
        assert (result.from_version, result.version) == (4, 5)
        assert not [key for _, key in calls if key.startswith("anchors/")]
        assert tree(root) == tree(five.version(5))

    def test_a_byte_that_changed_is_seen_without_news_too(self, five: History, tmp_path: Path) -> None:
        """Whatever its size and time say."""
        root = at(five, 5, tmp_path / "r")
        shard = next(root.glob("*.safetensors"))
        status, data = shard.stat(), bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(WrongBaseError, match="none of the versions"):
            pull(five.url, root)
        assert shard.read_bytes() == data

    def test_touched_files_are_read_again_and_counted(self, five: History, tmp_path: Path) -> None:
        root = at(five, 5, tmp_path / "r")
        for path in root.glob("*.safetensors"):
            path.touch()
        assert pull(five.url, root).already
        with recorded_calls() as calls:
            assert pull(five.url, root).already
        assert len(calls) == 2


class TestDamage:
    """What comes wrong is never applied, and nothing is changed by it."""

    @pytest.mark.parametrize("what", ["payloads/*", "manifest.zst", "digests.zst"])
    def test_a_byte_that_is_flipped_on_the_way(self, five: History, tmp_path: Path, what: str) -> None:
        """Tried once more, then refused; what is told is what is there."""
        root = at(five, 4, tmp_path / "r")
        calls: list[str] = []

        def flip(backend: Backend) -> FlipsAByte:
            wrapped = FlipsAByte(backend, f"versions/*/{what}", 30)
            wrapped.called = lambda name, key: calls.append(key)  # type: ignore[method-assign]
            return wrapped

        with wrapping(flip), pytest.raises(DamagedError):
            pull(five.url, root, jobs=1)
        assert tree(root) == tree(five.version(4)) and version_of(root) == 4
        assert len([key for key in calls if fnmatch(key, f"versions/*/{what}")]) == 2
        assert pull(five.url, root).version == 5
        assert tree(root) == tree(five.version(5))

    def test_what_comes_right_the_second_time_is_taken(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        with wrapping(lambda backend: Truncates(backend, 4, 10)):
            assert pull(five.url, root).version == 5
        assert tree(root) == tree(five.version(5))

    @pytest.mark.parametrize("cut", [4, 1000, 1 << 30])
    def test_payloads_of_another_size(self, tmp_path: Path, cut: int) -> None:
        """Cut, or with bytes behind it."""
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 1, tmp_path / "r")
        key = f"versions/{remote.commit(2).version.place}/payloads/000000.safetensors"
        with remote.open() as store:
            data = store.get(key, most_bytes=1 << 20)
            assert data is not None
            for changed in (data[:-cut], data + b"junk"):
                store.put(key, changed)
                with pytest.raises(DamagedError):
                    pull(remote.url, root)
                assert tree(root) == tree(remote.version(1))
            store.put(key, data)
        assert pull(remote.url, root).version == 2

    @pytest.mark.parametrize("is_of_its_size", [False, True])
    @pytest.mark.parametrize("name", ["manifest", "digests"])
    def test_a_web_page_in_place_of_a_document(self, tmp_path: Path, name: str, is_of_its_size: bool) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 1, tmp_path / "r")
        commit = remote.commit(2).version
        with remote.open() as store:
            key = f"versions/{commit.place}/{name}.zst"
            status = store.stat(key)
            assert status is not None
            store.put(key, b"<!DOCTYPE html><html>log in".ljust(status.size if is_of_its_size else 0))
        with pytest.raises(DamagedError, match=rf"{name}\.zst: looks like HTML"):
            pull(remote.url, root)
        assert tree(root) == tree(remote.version(1))

    def test_a_file_that_lies_where_a_payload_is_put(self, five: History, tmp_path: Path) -> None:
        """Right in size, all zeros."""
        root = at(five, 4, tmp_path / "r")
        place = five.commit(5).version.place
        with five.open() as store:
            data = store.get(f"versions/{place}/payloads/000000.safetensors", most_bytes=1 << 20)
        folder = root / ".dcr/fetched" / str(place) / "payloads"
        folder.mkdir(parents=True)
        (folder / "000000.safetensors").write_bytes(bytes(len(data or b"")))
        assert pull(five.url, root).version == 5
        assert tree(root) == tree(five.version(5))


class TestStops:
    """Stopped anywhere, a receiver is at a version or marked, and the next run brings it on."""

    def outcome(self, remote: History, root: Path) -> str:
        try:
            open_checkpoint(root)
        except IncompleteError:
            return "marked"
        found = tree(root)
        return next(str(number) for number in (1, 2, 3) if found == tree(remote.version(number)))

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_at_steps_of_the_disk_from_the_first_to_the_last(self, three: History, tmp_path: Path, mode: str) -> None:
        """Finished without the remote once it is marked, and stopped a second time meanwhile."""
        start = at(three, 1, tmp_path / "start")
        seen = set()
        number, is_done = 0 if mode == "replace" else 2, False
        while not is_done:
            root = fresh_copy(start, tmp_path / "r")
            run = functools.partial(pull, three.url, root, mode=mode, jobs=1)
            is_done = stopped_at(number, run)
            outcome = self.outcome(three, root)
            seen.add(outcome)
            if outcome == "marked":
                stopped_at(3 + number % 7, run)
            with wrapping(lambda backend: Allows(backend)), suppress(TransportError):
                # Nothing can be got; what is marked is finished all the same.
                run()
            assert self.outcome(three, root) != "marked"
            with recorded_calls() as calls:
                run()
            assert tree(root) == tree(three.version(3)), number
            assert not [key for _, key in calls if key.startswith("anchors/")], number
            assert version_of(root) == 3
            assert names_below(root / ".dcr") == ["lock", POSITION_NAME, "state.json", "state.zst"], number
            number += 7
        assert {"1", "marked", "3"} <= seen

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_with_few_deltas_at_once(
        self, three: History, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever was complete is not fetched again."""
        monkeypatch.setattr(download, "AT_ONCE_BYTES", 1)
        start = at(three, 1, tmp_path / "start")
        seen = set()
        number, is_done = 0, False
        while not is_done:
            root = fresh_copy(start, tmp_path / "r")
            run = functools.partial(pull, three.url, root, mode=mode, jobs=1)
            is_done = stopped_at(number, run)
            seen.add(self.outcome(three, root))
            complete = {path.name for path in root.glob(".dcr/fetched/*") if (path / COMMIT_NAME).exists()}
            with recorded_calls() as calls:
                run()
            again = {key.split("/")[1] for _, key in calls if "/payloads/" in key}
            assert not again & complete, number
            assert tree(root) == tree(three.version(3)) and version_of(root) == 3, number
            assert names_below(root / ".dcr") == ["lock", POSITION_NAME, "state.json", "state.zst"], number
            number += 13
        assert {"1", "2", "marked", "3"} <= seen

    def test_aside_is_old_or_new(self, three: History, tmp_path: Path) -> None:
        number, is_done = 0, False
        while not is_done:
            place = tmp_path / str(number)
            place.mkdir()
            link = place / "r"
            pull(three.url, link, version=1, mode="aside", jobs=1)
            run = functools.partial(pull, three.url, link, mode="aside", jobs=1)
            is_done = stopped_at(number, run)
            assert tree(link.resolve()) in (tree(three.version(1)), tree(three.version(3))), number
            run()
            assert tree(link.resolve()) == tree(three.version(3)), number
            assert version_of(link) == 3 and run().already
            # The folder before may be left until the link is turned once more.
            pull(three.url, link, version=1, mode="aside", jobs=1)
            assert [path.name for path in place.iterdir() if not path.is_symlink()] == [link.resolve().name], number
            number += 17

    def test_aside_in_passes_at_every_step(self, tmp_path: Path) -> None:
        """Whatever was complete is not fetched again, on whichever side of the link the run was stopped."""
        remote = in_passes(tmp_path / "remote", 3)
        number, is_done = 0, False
        while not is_done:
            link = tmp_path / str(number) / "r"
            link.parent.mkdir()
            pull(remote.url, link, version=1, mode="aside", jobs=1)
            run = functools.partial(pull, remote.url, link, mode="aside", jobs=1)
            with recorded_calls() as calls:
                is_done = stopped_at(number, run)
                complete = {path.name for path in link.parent.glob("*/.dcr/fetched/*") if (path / COMMIT_NAME).exists()}
                before = len(calls)
                run()
            again = {key.split("/")[1] for _, key in calls[before:] if "/payloads/" in key}
            assert not again & complete, number
            assert tree(link.resolve()) == tree(remote.version(3)) and version_of(link) == 3, number
            assert "fetched" not in names_below(link.resolve() / ".dcr"), number
            shutil.rmtree(link.parent)
            number += 7

    @pytest.mark.parametrize("is_new", [True, False])
    def test_an_anchor_is_gone_on_with(self, three: History, tmp_path: Path, is_new: bool) -> None:
        """What had come is not fetched again; once it is marked, nothing more has to come."""
        broken = at(three, 1, tmp_path / "broken")
        for path in broken.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        (broken / "config.json").write_bytes(b"!")
        number, is_done, was_marked = 0, False, False
        while not is_done:
            root = tmp_path / "r"
            shutil.rmtree(root, ignore_errors=True)
            if not is_new:
                fresh_copy(broken, root)
            run = functools.partial(pull, three.url, root, version=1, repair=not is_new, jobs=1)
            is_done = stopped_at(number, run)
            if root.exists() and is_incomplete(root):
                was_marked = True
                with wrapping(Allows), suppress(TransportError):
                    pull(three.url, root, jobs=1)
                assert tree(root) == tree(three.version(1)), number
            run()
            assert tree(root) == tree(three.version(1)) and version_of(root) == 1, number
            assert pull(three.url, root, version=1, jobs=1).already
            assert names_below(root / ".dcr") == ["lock", POSITION_NAME, "state.json", "state.zst"], number
            number += 5
        assert was_marked != is_new

    def test_at_every_request(self, three: History, tmp_path: Path) -> None:
        """What was complete is not fetched twice."""
        start = at(three, 1, tmp_path / "start")
        for when in ("before", "within", "after"):
            number, is_done = 0, False
            while not is_done:
                root = fresh_copy(start, tmp_path / "r")
                with wrapping(functools.partial(KillsAtCall, number=number, when=when)):
                    try:
                        pull(three.url, root, jobs=1)
                        is_done = True
                    except StoppedError:
                        assert tree(root) == tree(three.version(1))
                fetched = root / ".dcr/fetched"
                complete = {str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.suffix != ".part"}
                with recorded_calls() as again:
                    pull(three.url, root, jobs=1)
                keys = [key.removeprefix("versions/") for _, key in again if key.startswith("versions/")]
                assert not [key for key in keys if key in complete]
                assert tree(root) == tree(three.version(3)), number
                number += 1


class TestAtOnce:
    def test_a_second_pull_is_refused_and_told_by_whom(self, five: History, tmp_path: Path) -> None:
        """It need not wait, and names the process."""
        root = at(five, 4, tmp_path / "r")
        with spool_of(root), pytest.raises(ConflictError, match=rf"process {os.getpid()} on"):
            pull(five.url, root)
        assert pull(five.url, root).version == 5

    def test_an_apply_that_runs_is_not_disturbed(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        with open_folder(root) as folder, Receiver(folder), pytest.raises(ConflictError, match="another dcr holds it"):
            pull(five.url, root)
        assert pull(five.url, root).version == 5

    def test_one_that_was_faster_is_seen(self, five: History, tmp_path: Path) -> None:
        root = at(five, 3, tmp_path / "r")

        def overtake(backend: Backend) -> Records:
            wrapped = Records(backend)
            other = pull

            def called(name: str, key: str) -> None:
                nonlocal other
                once, other = other, lambda *given, **options: None  # type: ignore[assignment]
                once(five.url, root, version=4)

            wrapped.called = called  # type: ignore[method-assign]
            return wrapped

        slow = Store(overtake(MemoryBackend(five.name)), five.url)
        with pytest.raises(ConflictError, match="by another dcr just now"):
            advance(slow, root, Wish(Effort(1, None)))
        assert version_of(root) == 4 and pull(five.url, root).version == 5


class TestEnding:
    """Hooks and acknowledgements, which come when the bytes are in place."""

    def test_a_hook_is_told_what_it_needs(self, five: History, tmp_path: Path, capfd: Any) -> None:
        root = at(five, 4, tmp_path / "r")
        command = f'echo told; echo "$DCR_VERSION $DCR_CHECKPOINT $DCR_DIGEST" > {tmp_path}/told'
        pull(five.url, root, hook=command)
        target = five.commit(5).version.target
        assert (tmp_path / "told").read_text() == f"5 {root} {blake3_text(target.content)}\n"
        out, err = capfd.readouterr()
        assert "told" in err and not out
        (tmp_path / "told").unlink()
        assert pull(five.url, root, hook=command).already
        assert not (tmp_path / "told").exists()

    def test_a_hook_that_fails_is_run_again_until_it_succeeds_once(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        for command, facts in (("exit 3", "exited with 3"), ("kill -9 $$", "ended by signal 9")):
            with pytest.raises(HookError, match=facts):
                pull(five.url, root, hook=command, receiver="rollout-1")
            assert tree(root) == tree(five.version(5)) and version_of(root) == 5
            assert acknowledged(five, 5, "rollout-1") is None
        assert pull(five.url, root, hook=f"echo . >> {tmp_path}/runs", receiver="rollout-1").already
        assert pull(five.url, root, hook=f"echo . >> {tmp_path}/runs", receiver="rollout-1").already
        assert (tmp_path / "runs").read_text() == ".\n"
        assert acknowledged(five, 5, "rollout-1") is not None

    def test_nothing_is_said_before_the_hook(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        with pytest.raises(HookError):
            pull(five.url, root, hook="exit 1")
        (root / "model-00001-of-00002.safetensors").touch()
        assert pull(five.url, root, receiver="hasty").already
        assert acknowledged(five, 5, "hasty") is None

    def test_what_is_prepared_is_staged_once(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 2, tmp_path / "r")
        remote.publish(states(3)[2], prepare=True)
        assert pull(remote.url, root, receiver="a").staged == 3
        with recorded_calls() as calls:
            assert pull(remote.url, root, receiver="a").staged == 3
        assert len(calls) == 4 and not [key for _, key in calls if "/payloads/" in key]
        assert tree(root) == tree(remote.version(2))
        commit(remote.url, quorum=1)
        with recorded_calls() as calls:
            assert pull(remote.url, root, receiver="a").version == 3
        assert not [key for _, key in calls if key.startswith("versions/")]
        assert tree(root) == tree(remote.version(3))

    def test_what_is_prepared_and_cannot_be_staged_is_no_fault_of_what_was_applied(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 2)
        root = at(remote, 1, tmp_path / "r")
        remote.publish(states(3)[2], prepare=True)
        with wrapping(lambda backend: FlipsAByte(backend, "versions/0000000003-*/payloads/*", 300)):
            result = pull(remote.url, root, receiver="a")
            assert (result.from_version, result.version, result.changed, result.staged) == (1, 2, True, None)
            assert isinstance(result.staging_error, DamagedError)
            assert tree(root) == tree(remote.version(2)) and acknowledged(remote, 2, "a") is not None
            result = pull(remote.url, root, receiver="a")
            assert result.already and result.staging_error is not None
        result = pull(remote.url, root, receiver="a")
        assert (result.staged, result.staging_error) == (3, None)

    def test_a_hook_stays_due_for_the_version_that_it_failed_for(self, five: History, tmp_path: Path) -> None:
        root, command = at(five, 3, tmp_path / "r"), f"echo $DCR_VERSION >> {tmp_path}/runs"
        with pytest.raises(HookError):
            pull(five.url, root, version=4, hook="exit 1")
        assert pull(five.url, root, version=4).already
        assert pull(five.url, root, version=4, hook=command).already
        assert (tmp_path / "runs").read_text() == "4\n"

    def test_a_hook_that_is_given_up_holds_up_no_later_word(self, five: History, tmp_path: Path) -> None:
        root = at(five, 3, tmp_path / "r")
        with pytest.raises(HookError):
            pull(five.url, root, version=4, hook="exit 1", receiver="given-up")
        assert pull(five.url, root, version=4, receiver="given-up").already
        assert acknowledged(five, 4, "given-up") is None
        assert pull(five.url, root, receiver="given-up").version == 5
        assert acknowledged(five, 5, "given-up") is not None
        assert pull(five.url, root, hook=f"echo . >> {tmp_path}/runs", receiver="given-up").already
        assert not (tmp_path / "runs").exists()

    def test_a_receiver_that_gets_a_name_or_another_says_where_it_is(self, tmp_path: Path) -> None:
        remote, key = history(tmp_path / "remote", 2), make_key(tmp_path / "key")
        root = at(remote, 2, tmp_path / "r")
        for options in ({"receiver": "a"}, {"receiver": "b"}, {"receiver": "c", "receiver_key": key}):
            assert pull(remote.url, root, jobs=1, **options).already
            assert acknowledged(remote, 2, str(options["receiver"])) is not None
            before = tree(root / ".dcr")
            with recorded_calls() as calls:
                assert pull(remote.url, root, jobs=1, **options).already
            assert len(calls) == 3 and not [key for _, key in calls if key.startswith("acks/")]
            assert tree(root / ".dcr") == before

    def test_what_is_staged_is_said_by_each_name(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 1)
        root = at(remote, 1, tmp_path / "r")
        place = remote.publish(states(2)[1], prepare=True)
        assert pull(remote.url, root, receiver="a", jobs=1).staged == 2
        with recorded_calls() as calls:
            assert pull(remote.url, root, receiver="b", jobs=1).staged == 2
        assert not [key for _, key in calls if "/payloads/" in key]
        said = [AcknowledgementPlace(Place(2, str(place.id)), name, STAGED) for name in ("a", "b")]
        with remote.open() as store:
            assert all(read_acknowledgement(store, each) for each in said)

    def test_a_hook_has_only_so_much_time_and_takes_nothing_along(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        with pytest.raises(HookError, match="did not end within"):
            pull(five.url, root, hook="sleep 60 & echo $! > pid; wait", hook_seconds=0.3)
        pid = int(Path("pid").read_text())
        Path("pid").unlink()
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()

    def test_nobody_whom_a_hook_started_lives_on(
        self, five: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hook_module, "_GRACE_SECONDS", 0.2)
        root, pid = at(five, 4, tmp_path / "r"), tmp_path / "pid"
        deaf = f"sh -c 'trap \"\" TERM; echo $$ > {pid}; exec sleep 60'"
        with pytest.raises(HookError, match="did not end within"):
            pull(five.url, root, hook=f"{deaf} & wait", hook_seconds=2.0)
        status, until = Path(f"/proc/{pid.read_text().strip()}/status"), time.monotonic() + 20
        # Whoever was killed goes when the system comes to it.
        while time.monotonic() < until and status.exists() and "zombie" not in status.read_text():
            time.sleep(0.02)
        assert not status.exists() or "zombie" in status.read_text()

    def test_acknowledgements_are_written_once_and_signed(self, tmp_path: Path) -> None:
        remote, key = history(tmp_path / "remote", 2), make_key(tmp_path / "key")
        root = at(remote, 1, tmp_path / "r")
        pull(remote.url, root, receiver="a", receiver_key=key)
        found = acknowledged(remote, 2, "a")
        assert found is not None and found[0].stage == APPLIED
        assert trust_in([f"{key}.pub"]).signers(found[1], "acknowledgement")
        pull(remote.url, root, version=1)
        pull(remote.url, root, receiver="a")
        assert acknowledged(remote, 2, "a") == found

    def test_one_that_is_denied_undoes_nothing_and_is_due(self, five: History, tmp_path: Path) -> None:
        root = at(five, 4, tmp_path / "r")
        with wrapping(lambda backend: Allows(backend, get=["*"])), pytest.raises(TransportError, match="denied"):
            pull(five.url, root, receiver="denied")
        assert tree(root) == tree(five.version(5)) and version_of(root) == 5
        with wrapping(lambda backend: Allows(backend, get=["*"], put=["acks/*"])):
            assert pull(five.url, root, receiver="denied").already
        assert acknowledged(five, 5, "denied") is not None


class TestTrust:
    """Only what trusted keys have signed counts."""

    def test_what_is_signed_is_taken(self, signed: History, keys: Path, tmp_path: Path) -> None:
        ours = [f"{keys}/ours.pub"]
        pull(signed.url, tmp_path / "r", version=2, trusted_keys=ours)
        assert pull(signed.url, tmp_path / "r", trusted_keys=ours).from_version == 2
        assert tree(tmp_path / "r") == tree(signed.version(3))

    def test_what_is_not_is_refused(self, signed: History, five: History, keys: Path, tmp_path: Path) -> None:
        with pytest.raises(WrongBaseError, match="not signed by a trusted key"):
            pull(signed.url, tmp_path / "r", trusted_keys=[f"{keys}/theirs.pub"])
        with pytest.raises(WrongBaseError, match="not signed"):
            pull(five.url, tmp_path / "r", trusted_keys=[f"{keys}/ours.pub"])
        assert not (tmp_path / "r").exists()

    def test_a_base_that_nobody_vouches_for_is_none(self, signed: History, keys: Path, tmp_path: Path) -> None:
        ours = [f"{keys}/ours.pub"]
        for root in (at(signed, 2, tmp_path / "r"), fresh_copy(signed.version(2), tmp_path / "copy")):
            with pytest.raises(WrongBaseError, match="not known to be built from signed"):
                pull(signed.url, root, trusted_keys=ours)
            assert pull(signed.url, root, trusted_keys=ours, repair=True).version == 3
            assert tree(root) == tree(signed.version(3))
            assert pull(signed.url, root, trusted_keys=ours).already

    @pytest.mark.parametrize("way", ["new", "aside new", "aside by an anchor", "aside by deltas", "aside in passes"])
    @pytest.mark.parametrize("is_trusted", [True, False])
    def test_stopped_as_soon_as_it_can_be_seen(self, keys: Path, tmp_path: Path, way: str, is_trusted: bool) -> None:
        """What it was built from is known by then, and from which keys."""
        remote, path, ours = History(tmp_path / "remote", key=keys / "ours"), tmp_path / "r", [f"{keys}/ours.pub"]
        remote.folder.mkdir()
        for number, state in enumerate(states(3)):
            remote.publish(state, skip=[f"none-{number if way == 'aside in passes' else 0}"])
        mode = "aside" if "aside" in way else "replace"
        run = functools.partial(pull, remote.url, path, mode=mode, receiver="a", jobs=1)
        last = 1 if "new" in way else 2 if "passes" in way else 3
        if "new" not in way:
            run(version=1, trusted_keys=ours)
        if way == "aside by an anchor":
            remote.anchor(3)
            remote.remove_delta(2)
        with pytest.raises(StoppedError):
            run_until_seen(path, functools.partial(run, trusted_keys=ours if is_trusted else ()))
        assert tree(path.resolve()) == tree(remote.version(last))
        if not is_trusted:
            with pytest.raises(WrongBaseError, match="not known to be built from signed"):
                run(trusted_keys=ours)
        result = run(trusted_keys=ours if is_trusted else ())
        assert (result.from_version, result.version) == (last, 3) and not result.adopted
        assert tree(path.resolve()) == tree(remote.version(3)) and acknowledged(remote, 3, "a") is not None


def run_until_seen(path: Path, run: Callable[[], object]) -> None:
    """Run until something has got the name `path`, and no step further."""
    is_over = False

    def stop(kind: str, old: str, new: str) -> None:
        nonlocal is_over
        if is_over:
            raise StoppedError
        is_over = kind == "rename" and new == str(path)

    with watching(stop):
        run()


class TestRepair:
    def test_only_what_differs_is_fetched(self, five: History, tmp_path: Path) -> None:
        root = at(five, 1, tmp_path / "r")
        shards = sorted(root.glob("*.safetensors"))
        shards[0].write_bytes(shards[0].read_bytes()[:-1] + b"\xff")
        (root / "config.json").write_bytes(b"lost")
        with recorded_calls() as calls:
            assert pull(five.url, root, repair=True).applied == (1, 2, 3, 4, 5)
        fetched = [key.rpartition("/")[2] for _, key in calls if "/files/" in key]
        assert shards[0].name in fetched and shards[1].name not in fetched
        assert tree(root) == tree(five.version(5))


class TestDamagedObjects:
    """What is damaged in the remote is never applied, and gone around where something leads around it."""

    @pytest.mark.parametrize("what", ["payloads/000000.safetensors", "manifest.zst", "digests.zst"])
    @pytest.mark.parametrize("start", ["new", "behind", "repair", "edited"])
    def test_a_delta_with_an_anchor_behind_it(self, tmp_path: Path, what: str, start: str) -> None:
        remote = history(tmp_path / "remote", 6)
        remote.anchor(4)
        root = tmp_path / "r"
        if start != "new":
            at(remote, 1, root)
        if start == "edited":
            (root / "config.json").unlink()
        damaged = damage(remote, 2, what)
        result = pull(remote.url, root, jobs=1, repair=start in ("repair", "edited"))
        assert result.applied[-3:] == (4, 5, 6) and 2 not in result.applied
        assert result.way is not None and result.way.anchor == 4
        assert [text.partition(": ")[0] for text in result.damaged] == [f"{remote.url}/{damaged}"]
        assert tree(root) == tree(remote.version(6)) and version_of(root) == 6
        assert pull(remote.url, root).already

    @pytest.mark.parametrize("is_repair", [False, True])
    def test_where_nothing_leads_around_it(self, tmp_path: Path, is_repair: bool) -> None:
        """It is named, with what makes a way, and that does."""
        remote = history(tmp_path / "remote", 3)
        root = at(remote, 1, tmp_path / "r")
        damaged = damage(remote, 2, "payloads/000000.safetensors")
        with pytest.raises(DamagedError) as caught:
            pull(remote.url, root, repair=is_repair)
        assert caught.value.what == f"{remote.url}/{damaged}" and type(caught.value) is DamagedError
        assert f"dcr anchor CHECKPOINT {remote.url}, " in str(caught.value.hint)
        assert f"dcr verify --deep --remote {remote.url} " in str(caught.value.hint)
        assert tree(root) == tree(remote.version(1)) and version_of(root) == 1
        remote.anchor(3)
        assert pull(remote.url, root, repair=is_repair).applied == (3,)

    @pytest.mark.parametrize("what", ["files/model-00002-of-00002.safetensors", "files/config.json", ".json", "short"])
    def test_an_anchor(self, tmp_path: Path, what: str) -> None:
        remote = history(tmp_path / "remote", 3)
        remote.anchor(3)
        place = remote.commit(3).version.place
        key = f"anchors/{place}{what}" if what == ".json" else f"anchors/{place}/{what}"
        if what == "short":
            key = f"anchors/{place}/files/config.json"
        damage_key(remote, key, is_cut=what == "short")
        result = pull(remote.url, tmp_path / "r", jobs=1)
        assert result.applied == (1, 2, 3) and len(result.damaged) == 1
        assert result.damaged[0].startswith(f"{remote.url}/{key}: ")
        assert tree(tmp_path / "r") == tree(remote.version(3)) and version_of(tmp_path / "r") == 3
        remote.remove_delta(2)
        with pytest.raises(DamagedError, match=key):
            pull(remote.url, tmp_path / "other", jobs=1)
        assert not (tmp_path / "other").exists()

    def test_behind_an_anchor_with_nothing_around_it(self, tmp_path: Path) -> None:
        """The anchor's version was come to by then, and that is told."""
        remote = history(tmp_path / "remote", 2)
        damaged = damage(remote, 2, "payloads/000000.safetensors")
        root = tmp_path / "r"
        for told in (f"; {root} is at version 1", ""):
            with pytest.raises(DamagedError) as caught:
                pull(remote.url, root, version=2)
            facts = f"is not the payload that the manifest lists: its blake3 differs{told}"
            assert str(caught.value) == f"{remote.url}/{damaged}: {facts}"
            assert caught.value.details == ({"version": 1} if told else {})
            assert tree(root) == tree(remote.version(1)) and version_of(root) == 1

    def test_all_that_is_damaged_is_told(self, tmp_path: Path) -> None:
        """Several ways, one after the other."""
        remote = history(tmp_path / "remote", 5)
        root = at(remote, 1, tmp_path / "r")
        for number in (3, 5):
            remote.anchor(number)
        damaged = [
            damage(remote, 2, "manifest.zst"),
            f"anchors/{remote.commit(5).version.place}/files/model-00001-of-00002.safetensors",
        ]
        damage_key(remote, damaged[1])
        result = pull(remote.url, root, jobs=1)
        assert result.applied == (3, 4, 5)
        assert [text.partition(": ")[0] for text in result.damaged] == [f"{remote.url}/{key}" for key in damaged]
        assert tree(root) == tree(remote.version(5))

    def test_a_copy_is_known_though_the_newest_version_is_damaged(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3)
        remote.anchor(3)
        root = fresh_copy(remote.version(1), tmp_path / "r")
        damage(remote, 3, "manifest.zst")
        result = pull(remote.url, root)
        assert (result.from_version, result.applied) == (1, (3,))
        assert tree(root) == tree(remote.version(3))


def damage(remote: History, number: int, name: str) -> str:
    """Flip two bytes of an object of a version's delta, where it lies: its key."""
    key = f"versions/{remote.commit(number).version.place}/{name}"
    damage_key(remote, key)
    return key


def damage_key(remote: History, key: str, *, is_cut: bool = False) -> None:
    """Flip two bytes of an object, or cut them off."""
    with remote.open() as store:
        data = bytearray(store.get(key, most_bytes=1 << 20) or b"")
        if is_cut:
            del data[-2:]
        else:
            data[-4] ^= 1
            data[-3] ^= 1
        store.put(key, bytes(data))


def acknowledged(history: History, version: int, receiver: str) -> Any:
    place = AcknowledgementPlace(history.commit(version).version.place, receiver, APPLIED)
    with history.open() as store:
        return read_acknowledgement(store, place)


def make_key(path: Path) -> Path:
    """Make a private key at `path`, and its public one beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    Path(f"{path}.pub").write_text(key.public_key().public_bytes_raw().hex())
    return path


def test_a_checkpoint_lies_apart_from_the_remote(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    push(history(tmp_path / "other", 1).version(1), remote, baseline=tmp_path / "baseline")
    before = tree(tmp_path)
    for place in (remote, remote / "checkpoint", tmp_path):
        with pytest.raises(UsageError, match="cannot lie inside"):
            pull(remote, place)
    assert tree(tmp_path) == before


class TestAnchorsThatDoNotCount:
    """One anchor is damaged, or signed by nobody who is trusted: another way is taken, if there is one."""

    def test_an_unsigned_one_beside_a_signed_one(self, keys: Path, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3, key=keys / "ours")
        remote.key = None
        remote.anchor(3)
        result = pull(remote.url, tmp_path / "r", trusted_keys=[str(keys / "ours.pub")])
        assert result.applied == (1, 2, 3)
        assert version_of(tmp_path / "r") == 3

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        remote = history(tmp_path / "remote", 3)
        remote.anchor(3)
        with wrapping(lambda backend: FlipsAByte(backend, "anchors/0000000003-*.json", 40)):
            assert pull(remote.url, tmp_path / "r").applied == (1, 2, 3)
        remote.remove_delta(2)
        with (
            wrapping(lambda backend: FlipsAByte(backend, "anchors/0000000003-*.json", 40)),
            pytest.raises(DamagedError, match="0000000003"),
        ):
            pull(remote.url, tmp_path / "other")
        assert not (tmp_path / "other").exists()


class TestANoteIsNoMoreThanItSays:
    def test_the_weights_of_a_version_with_other_files(self, three: History, tmp_path: Path) -> None:
        root = at(three, 3, tmp_path / "r")
        other = fresh_copy(three.version(3), tmp_path / "other")
        (other / "config.json").write_text("{}")
        diff(three.version(3), other, tmp_path / "delta", jobs=1)
        apply(tmp_path / "delta", root, jobs=1)
        before = tree(root)
        with pytest.raises(WrongBaseError, match="what it holds"):
            pull(three.url, root)
        assert tree(root) == before
        assert pull(three.url, root, repair=True).changed
        assert tree(root) == tree(three.version(3))

    def test_one_that_does_not_say_what_was_seen(self, three: History, tmp_path: Path) -> None:
        root = at(three, 3, tmp_path / "r")
        path = root / ".dcr" / POSITION_NAME
        before = path.read_bytes()
        document = json.loads(before)
        del document["newer"]
        path.write_text(json.dumps(document))
        assert pull(three.url, root).already
        assert version_of(root) == 3

    @pytest.mark.parametrize("newer", [3, {}, {"version": 3, "commit": "0" * 64}, {"version": 4, "commit": "0"}])
    def test_one_that_has_seen_what_is_not_newer_says_nothing(self, three: History, tmp_path: Path, newer: Any) -> None:
        root = at(three, 3, tmp_path / "r")
        path = root / ".dcr" / POSITION_NAME
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"newer": newer}))
        assert version_of(root) is None
        assert pull(three.url, root).adopted

    def test_one_that_does_not_say_which_files(self, three: History, tmp_path: Path) -> None:
        root = at(three, 3, tmp_path / "r")
        path = root / ".dcr" / POSITION_NAME
        before = path.read_bytes()
        document = json.loads(before)
        del document["held_files"]
        path.write_text(json.dumps(document))
        assert pull(three.url, root).already
        assert json.loads(path.read_bytes()) == json.loads(before)

    @pytest.mark.parametrize("is_repair", [False, True])
    def test_a_log_that_went_backwards_under_a_change(self, tmp_path: Path, is_repair: bool) -> None:
        remote = history(tmp_path / "remote", 2)
        start, root = at(remote, 2, tmp_path / "start"), tmp_path / "r"
        remote.publish(states(3)[2])
        remote.anchor(3)
        number = 0
        while not (root.exists() and is_incomplete(root)):
            fresh_copy(start, root)
            assert not stopped_at(number, lambda: pull(remote.url, root, repair=True, jobs=1))
            number += 1
        # With what had come it would be finished without the remote.
        shutil.rmtree(root / ".dcr/fetched")
        with remote.open() as store:
            for version in (2, 3):
                store.delete(commit_key(version))
        with pytest.raises(WrongBaseError, match="its log ends below version 2"):
            pull(remote.url, root, repair=is_repair)
        assert pull(remote.url, root, repair=True, version=1).version == 1

    def test_what_came_without_trust_is_not_trusted_when_it_is_finished(
        self, signed: History, keys: Path, tmp_path: Path
    ) -> None:
        ours = [str(keys / "ours.pub")]
        start, root, number = tmp_path / "start", tmp_path / "r", 0
        pull(signed.url, start, version=1, trusted_keys=ours, jobs=1)
        while not (root.exists() and is_incomplete(root)):
            fresh_copy(start, root)
            assert not stopped_at(number, lambda: pull(signed.url, root, jobs=1))
            number += 1
        with pytest.raises(WrongBaseError, match="not known to be built from signed"):
            pull(signed.url, root, trusted_keys=ours, jobs=1)
        assert pull(signed.url, root, trusted_keys=ours, repair=True, jobs=1).version == 3


def test_a_receiver_whose_name_is_in_use(keys: Path, tmp_path: Path) -> None:
    """What somebody else has said by its name is not its word; what it has said itself before is."""
    remote = history(tmp_path / "remote", 1)
    key = acknowledgement_key(remote.commit(1).version.place, "host", APPLIED)
    pull(remote.url, tmp_path / "one", receiver="host", receiver_key=keys / "ours", jobs=1)
    pull(remote.url, tmp_path / "two", receiver="host", receiver_key=keys / "ours", jobs=1)
    pull(remote.url, tmp_path / "three", receiver="host", jobs=1)
    with pytest.raises(ConflictError, match="the name host is in use"):
        pull(remote.url, tmp_path / "four", receiver="host", receiver_key=keys / "theirs", jobs=1)
    assert tree(tmp_path / "four") == tree(remote.version(1))
    with remote.open() as store:
        store.put(key, b"{}")
    with pytest.raises(ConflictError, match="the name host is in use"):
        pull(remote.url, tmp_path / "five", receiver="host", jobs=1)
    with remote.open() as store:
        store.delete(key)
    assert pull(remote.url, tmp_path / "five", receiver="host", jobs=1).already
