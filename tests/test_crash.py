"""Apply, and diff, stopped at any step, by a raised stop, a real SIGKILL, a failing call or a loss of power.

The checkpoint is then the base, the target, or says that it is incomplete, and the next run, itself stopped anywhere,
brings it to the target.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.durable import NoRoomError
from dcr_cli.errors import DamagedError, IncompleteError, LocalError, UnsupportedError, WrongBaseError
from dcr_cli.receiver.beside.link import LinkIdentity
from dcr_cli.verify import verify
from faults import PowerLoss, failing_at, killed_at, steps, stopped_at, watching
from receivers import claim, fresh_copy, make_delta, names_below, state_of, tree, write_rich_pair, write_turned_pair
from strategies import tiny_tensors, write_checkpoint, write_tiny_pair

Stop = Callable[[int, Callable[[], object]], bool]


class Case:
    """A pair, its delta, and a way to apply it to a copy of the base."""

    def __init__(self, folder: Path, pair: str, way: str) -> None:
        write = {"tiny": write_tiny_pair, "rich": write_rich_pair, "turned": write_turned_pair}
        self.base, self.target = write[pair](folder)
        self.delta = make_delta(self.base, self.target, folder / "delta")
        self.work = folder / "work"
        self.saved = folder / "saved"
        self.way = way

    def reset(self) -> None:
        """Begin with a fresh copy of the base."""
        shutil.rmtree(self.work, ignore_errors=True)
        fresh_copy(self.base, self.work / "receiver")
        if self.way == "aside":
            (self.work / "link").symlink_to("receiver")
            claim(self.work / "link")

    def save(self) -> None:
        fresh_copy(self.work, self.saved)

    def restore(self) -> None:
        fresh_copy(self.saved, self.work)

    def run(self) -> object:
        receiver = self.work / "receiver"
        match self.way:
            case "to":
                return apply(self.delta, receiver, to=self.work / "out", jobs=1)
            case "aside":
                return apply(self.delta, self.work / "link", mode="aside", jobs=1)
            case mode:
                return apply(self.delta, receiver, mode=mode, jobs=1)

    def check(self) -> str:
        """Say what the state is; anything but base, target or marked is an error."""
        receiver = self.work / "receiver"
        match self.way:
            case "to":
                assert tree(receiver) == tree(self.base)
                assert not (receiver / ".dcr").exists()
                out = self.work / "out"
                return state_of(out, self.base, self.target) if out.exists() else "base"
            case "aside":
                state = state_of(self.work / "link", self.base, self.target)
                assert state != "marked"
                return state
            case _:
                state = state_of(receiver, self.base, self.target)
                if state == "marked":
                    with pytest.raises(IncompleteError):
                        verify(receiver, against=self.target)
                return state

    def check_end(self) -> None:
        """The target is there, and nothing of the way to it."""
        assert self.check() == "target"
        if self.way == "to":
            assert sorted(os.listdir(self.work)) == ["out", "receiver"]
        elif self.way == "aside":
            assert sorted(os.listdir(self.work)) == sorted(["link", os.readlink(self.work / "link")])
        root = {"to": self.work / "out", "aside": self.work / "link"}.get(self.way, self.work / "receiver")
        claims = {"link"} if self.way == "aside" else set()
        assert set(os.listdir(root / ".dcr")) == {"lock", "state.json", "state.zst"} | claims


def finish(case: Case) -> None:
    """Run to the end; to a folder that is there already, nothing is built again."""
    if case.way != "to" or not (case.work / "out").exists():
        case.run()
    case.check_end()


WAYS = ("replace", "in-place", "aside", "to")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of applies need not wait for a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="dcr-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", ["tiny", "rich", "turned"])
def test_stopped_at_every_step(place: Path, pair: str, way: str) -> None:
    case = Case(place, pair, way)
    seen = set()
    for number in steps(1 if pair == "tiny" else 7):
        case.reset()
        if stopped_at(number, case.run):
            break
        seen.add(case.check())
        finish(case)
    case.check_end()
    assert number > 20
    expected = {"base", "target"} if way in ("aside", "to") else {"base", "marked", "target"}
    assert seen == expected if pair == "tiny" else seen <= expected


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_shards_of_its_own_stopped_at_every_step(place: Path, mode: str) -> None:
    case = Case(place, "tiny", mode)
    (case.base / "old").mkdir()
    (case.base / "old/notes.txt").write_bytes(b"old")
    case.delta = make_delta(case.base, case.target, place / "shorter")
    sidecars = {path: data for path, data in tree(case.base).items() if not path.startswith("model")}
    case.base = write_checkpoint(place / "own", tiny_tensors()[0], shards=3, sidecars=sidecars)
    for number in steps(2):
        case.reset()
        receiver = case.work / "receiver"
        is_done = stopped_at(number, case.run)
        try:
            found = tree(receiver)
            assert verify(receiver, against=case.target).matches or found == tree(case.base)
        except IncompleteError:
            pass
        case.run()
        assert verify(receiver, against=case.target).matches
        assert not (receiver / "old").exists()
        if is_done:
            break
    assert number > 20


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_every_step(place: Path, way: str) -> None:
    case = Case(place, "tiny", way)
    for number in steps(7):
        case.reset()
        if killed_at(number, case.run):
            break
        case.check()
        finish(case)
    case.check_end()


@pytest.fixture
def copies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take links and folders for those that they are copies of."""
    monkeypatch.setattr("dcr_cli.receiver.beside.link.link_identity", lambda status: LinkIdentity(1, 1))
    monkeypatch.setattr("receivers.link_identity", lambda status: LinkIdentity(1, 1))
    monkeypatch.setattr("dcr_cli.receiver.beside.carry.place_of", lambda status: (0, 0))
    monkeypatch.setattr("dcr_cli.receiver.beside.aside.place_of", lambda status: (0, 0))


@pytest.mark.usefixtures("copies_count")
@pytest.mark.parametrize("way", WAYS)
def test_stopped_while_it_recovers(place: Path, way: str) -> None:
    """Every eleventh step of the first run, every fourth of the second, then to the end; the offsets move on."""
    case = Case(place, "tiny", way)
    for number in count(1, 11):
        case.reset()
        if stopped_at(number, case.run):
            break
        case.save()
        for again in count(number % 4, 4):
            case.restore()
            if way == "to" and (case.work / "out").exists():
                break
            if stopped_at(again, case.run):
                break
            case.check()
            finish(case)
        case.check_end()


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_stopped_between_shards_that_go_in_turn(place: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one shard at a time, some are the target's already and some are still the base's."""
    monkeypatch.setattr("dcr_cli.receiver.places.has_room", lambda folder, needed, files: False)
    monkeypatch.setattr("dcr_cli.receiver.change.has_room", lambda folder, needed, files: False)
    case = Case(place, "tiny", mode)
    for number in steps(2):
        case.reset()
        if stopped_at(number, case.run):
            break
        case.check()
        if number % 5 == 0:
            # Room may have come back, or gone, before the next run.
            with monkeypatch.context() as patch:
                patch.setattr("dcr_cli.receiver.change.has_room", lambda folder, needed, files: True)
                finish(case)
        else:
            finish(case)
    case.check_end()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_every_step_fails_once(place: Path, way: str, error: int) -> None:
    """A full disk or a broken one: an error that says so, or none where it does not matter, and then it is finished."""
    case = Case(place, "tiny", way)
    failed = []
    for number in steps(2):
        case.reset()
        try:
            if failing_at(number, error, case.run):
                break
        except NoRoomError:
            failed.append(errno.ENOSPC)
        except LocalError:
            failed.append(errno.EIO)
        case.check()
        finish(case)
    case.check_end()
    assert len(failed) > number // 4 and set(failed) == {error}


@pytest.mark.usefixtures("copies_count")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", ["tiny", "rich", "turned"])
def test_power_is_lost_at_every_step(place: Path, pair: str, way: str) -> None:
    case = Case(place, pair, way)
    ways = [("nothing", 0), ("names", 0), ("some", 1), ("some", 2)]
    for number in steps(5 if pair == "tiny" else 19):
        case.reset()
        loss = PowerLoss(case.work)
        is_done = loss.lost_at(number, case.run)
        for kind, seed in ways:
            shutil.rmtree(case.saved, ignore_errors=True)
            case.saved.mkdir()
            loss.survivors(case.saved, kind, seed + number)
            # What is left is found where it was.
            kept = case.work.rename(place / "kept")
            case.saved.rename(case.work)
            try:
                state = case.check()
                if is_done:
                    assert state == "target"
                finish(case)
            except BaseException as failure:
                failure.add_note(f"{way}, step {number}, {kind} survives, seed {seed + number}")
                raise
            finally:
                shutil.rmtree(case.work)
                kept.rename(case.work)
        if is_done:
            break


def test_power_is_lost_at_every_step_of_a_diff(place: Path) -> None:
    """What has a commit is the whole delta; what has none is taken for none, and the next diff may have its name."""
    base, target = write_tiny_pair(place)
    whole = tree(make_delta(base, target, place / "whole"))
    seen = set()
    for number in steps(5):
        shutil.rmtree(place / "work", ignore_errors=True)
        (place / "work").mkdir()
        loss = PowerLoss(place / "work")
        is_done = loss.lost_at(number, lambda: make_delta(base, target, place / "work/delta"))
        for kind, seed in [("nothing", 0), ("names", 0), ("all", 0), *(("some", seed) for seed in range(20))]:
            shutil.rmtree(place / "left", ignore_errors=True)
            (place / "left").mkdir()
            loss.survivors(place / "left", kind, seed + number)
            delta = place / "left/delta"
            has_commit = (delta / "commit.json").exists()
            assert has_commit or not is_done
            seen.add(has_commit)
            if not has_commit:
                make_delta(base, target, delta)
            found = tree(delta)
            found.pop(".dcr-lock", None)
            assert found == whole, f"step {number}, {kind} survives, seed {seed + number}"
        if is_done:
            break
    assert number > 10 and seen == {False, True}


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_another_delta_meanwhile(place: Path, mode: str) -> None:
    case = Case(place, "tiny", mode)
    other = make_delta(case.base, case.base, place / "other")
    _stop_when_marked(case)
    before = names_below(case.work)
    with pytest.raises(IncompleteError) as error:
        apply(other, case.work / "receiver")
    assert str(case.delta) in str(error.value.hint)
    assert names_below(case.work) == before
    marker = case.work / "receiver/.dcr/in-progress"
    text = marker.read_bytes()
    for delta, shown in (("$(rm -rf x); y", "'$(rm -rf x); y'"), ("x" * 10_000, "DELTA"), ("a\nb", "DELTA")):
        marker.write_text(json.dumps({**json.loads(text), "delta": delta}))
        (case.work / "link").unlink(missing_ok=True)
        (case.work / "link").symlink_to("receiver")
        for way, path in (("replace", "receiver"), ("aside", "link")):
            with pytest.raises(IncompleteError) as error:
                apply(other, case.work / path, mode=way)
            assert str(error.value.hint) == f"finish it first: dcr apply {shown} {case.work / path}"
            assert len(str(error.value)) < 2000
    marker.write_bytes(text)
    finish(case)


@pytest.mark.parametrize("other", ["in-place", "replace"])
def test_finished_as_it_was_begun(place: Path, other: str) -> None:
    """The mode that is asked for now does not count, nor where the delta lies."""
    for mode in ("replace", "in-place"):
        (place / mode).mkdir()
        case = Case(place / mode, "tiny", mode)
        _stop_when_marked(case)
        moved = place / f"moved-{mode}"
        case.delta.rename(moved)
        result = apply(moved, case.work / "receiver", mode=other)
        assert (result.recovered, result.mode) == (True, mode)
        case.check_end()


def test_not_beside_or_elsewhere_while_incomplete(place: Path) -> None:
    case = Case(place, "tiny", "replace")
    _stop_when_marked(case)
    receiver = case.work / "receiver"
    with pytest.raises(IncompleteError):
        apply(case.delta, receiver, to=place / "out")
    (place / "link").symlink_to(receiver)
    with pytest.raises(IncompleteError):
        apply(case.delta, place / "link", mode="aside")
    assert case.check() == "marked"
    finish(case)


def test_a_marker_of_a_newer_dcr(place: Path) -> None:
    case = Case(place, "tiny", "replace")
    _stop_when_marked(case)
    marker = case.work / "receiver/.dcr/in-progress"
    text = marker.read_bytes()
    marker.write_bytes(text.replace(b'"format": 1', b'"format": 4'))
    with pytest.raises(UnsupportedError, match="format 4"):
        case.run()
    for broken in (b"", b"{}", b"nonsense", text[:40]):
        marker.write_bytes(broken)
        with pytest.raises(DamagedError):
            case.run()
        assert case.check() == "marked"
    marker.write_bytes(text)
    finish(case)


def test_what_is_needed_to_finish_is_gone(place: Path) -> None:
    case = Case(place, "tiny", "replace")
    _stop_when_marked(case)
    (case.work / "receiver/.dcr/journal/base").unlink()
    with pytest.raises(DamagedError, match="cannot be finished"):
        case.run()
    assert case.check() == "marked"


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_what_was_staged_is_gone(place: Path, mode: str) -> None:
    """It is staged again, as long as what it is made from is there."""
    case = Case(place, "tiny", mode)
    stage = case.work / "receiver/.dcr/stage"
    marked = 0
    for number in count():
        case.reset()
        if stopped_at(number, case.run):
            break
        if case.check() == "marked":
            marked += 1
            shutil.rmtree(stage, ignore_errors=True)
        finish(case)
    assert marked > 10


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_names_in_the_journal_that_are_nobodys(place: Path, mode: str) -> None:
    case = Case(place, "tiny", mode)
    _stop_when_marked(case)
    journal = case.work / "receiver/.dcr/journal"
    for name in (
        "abc.commit",
        ".commit",
        ".done",
        "000001.commit.x",
        "\u0661\u0661\u0661\u0661\u0661\u0661.done",
        "7.done",
    ):
        (journal / name).write_bytes(b"x")
    (journal / "abc.done").mkdir()
    finish(case)


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_a_marker_that_somebody_removed(place: Path, mode: str) -> None:
    """A config that was held is put back, whatever else is the matter."""
    case = Case(place, "tiny", mode)
    receiver = case.work / "receiver"
    seen = set()
    for number in count():
        case.reset()
        if stopped_at(number, case.run):
            break
        if case.check() != "marked":
            continue
        (receiver / ".dcr/in-progress").unlink()
        try:
            case.run()
        except WrongBaseError:
            seen.add("neither")
            assert tree(receiver).keys() == tree(case.base).keys()
        else:
            seen.add("done")
            assert case.check() == "target"
        assert (receiver / "config.json").read_bytes() == (case.base / "config.json").read_bytes()
    assert seen == {"neither", "done"}


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_somebody_changes_what_was_committed(place: Path, mode: str) -> None:
    """What a stopped batch left is read again, and not believed."""
    case = Case(place, "tiny", mode)
    for number in count():
        case.reset()
        assert not stopped_at(number, case.run)
        receiver = case.work / "receiver"
        if (
            list((receiver / ".dcr").glob("journal/*.commit"))
            and state_of(receiver, case.base, case.target) == "marked"
        ):
            shard = receiver / "model-00002-of-00002.safetensors"
            if shard.read_bytes() == (case.target / shard.name).read_bytes():
                break
    content = bytearray(shard.read_bytes())
    # An element that the delta does not change, so that no journal repairs it.
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedError, match="is not what it was to become"):
        case.run()
    assert case.check() == "marked"


def test_a_failed_sync_is_not_trusted(place: Path) -> None:
    """After a shard could not be synced, no batch may say that it was."""
    case = Case(place, "tiny", "replace")
    case.reset()
    failed = False

    def fail(kind: str, path: str, other: str) -> None:
        nonlocal failed
        if kind == "sync" and "/stage/" in path:
            failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert not (failed and path.endswith(".commit"))

    with watching(fail), pytest.raises(LocalError):
        case.run()
    assert case.check() == "base"
    finish(case)


def _stop_when_marked(case: Case) -> None:
    for number in count(30):
        case.reset()
        assert not stopped_at(number, case.run)
        try:
            open_checkpoint(case.work / "receiver")
        except IncompleteError:
            return
