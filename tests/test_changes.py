"""What deltas change, decoded by one pull and left for those who serve on its host."""

from __future__ import annotations

import json
import mmap
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from commands import Run, is_failure
from dcr_cli import apply, commit, follow, pull, push
from dcr_cli.advance import stage_next
from dcr_cli.changes import folder as folders, places
from dcr_cli.changes.index import Spot
from dcr_cli.checkpoint.digest import blake3_text, object_digest
from dcr_cli.delta.delta import open_delta
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.fetch import leaving
from dcr_cli.fetch.wish import make_wish
from dcr_cli.follow import Follower
from dcr_cli.live import Receiver, content_of
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.hint import read_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.log import Log
from dcr_cli.report.pulls import arrival_lines
from dcr_cli.store.opening import open_store
from live_modules import FORMS, Engine, Forms, held, loaded, new_bits, train, write
from part_ranks import all_ranks, results
from ranks import RANKS, canonical, write_canonical, write_layout, write_ranks

STEPS = 3


class Host:
    """A remote of deltas in one encoding, a checkpoint that is pulled from it, and where the changes go."""

    def __init__(self, root: Path, encoding: str = "context") -> None:
        self.encodings = [encoding, "whole"]
        self.root, self.remote = root, str(root / "remote")
        self.checkpoint, self.changes = root / "replica", root / "changes"
        self.changes.mkdir()
        self.bits = new_bits(FORMS)
        self.versions: list[Path] = []
        self.publish()
        pull(self.remote, self.checkpoint, jobs=1)

    def publish(self, **options: Any) -> Path:
        if self.versions:
            self.bits = train(self.bits, FORMS, len(self.versions))
        self.versions.append(write(self.root / f"v{len(self.versions) + 1}", FORMS, self.bits))
        push(
            self.versions[-1], self.remote, baseline=self.root / "baseline", encodings=self.encodings, jobs=1, **options
        )
        return self.versions[-1]

    def pull(self, **options: Any) -> list[Path]:
        pull(self.remote, self.checkpoint, publish_changes=self.changes, jobs=1, **options)
        return sorted(self.changes.iterdir())

    def names(self) -> list[str]:
        return [path.name.partition("-")[0] for path in sorted(self.changes.iterdir())]

    def content(self, version: int) -> bytes:
        with open_store(self.remote) as store:
            return Log(store, require_history(store).id).require(version).version.target.content


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("mode", ["replace", "in-place", "aside"])
def test_ranks_take_what_a_pull_has_decoded(tmp_path: Path, mode: str) -> None:
    host = Host(tmp_path)
    if mode == "aside":
        host.checkpoint.rename(tmp_path / "folder")
        host.checkpoint.symlink_to("folder")
    makers = [partial(Engine, rank, 2) for rank in range(2)]
    ranks = [loaded(make, host.versions[0]) for make in makers]
    receivers = [Receiver(rank, checkpoint=host.versions[0]) for rank in ranks]
    targets = [host.publish() for _ in range(STEPS)]
    with pytest.raises(UnsupportedError, match="is not all held here"):
        receivers[0].stage(f"{host.remote}@2")
    found = host.pull(mode=mode)
    assert [path.name.partition("-")[0] for path in found] == ["0000000002", "0000000003", "0000000004"]
    for number, (path, target) in enumerate(zip(found, targets, strict=True), 2):
        shares = [receiver.stage(path).shares for receiver in receivers]
        assert content_of(shares) == host.content(number)
        for receiver in receivers:
            receiver.apply()
        assert [held(rank) for rank in ranks] == [held(loaded(make, target)) for make in makers]
    with pytest.raises(WrongBaseError):
        receivers[0].stage(found[0])
    # Nothing comes of a pull that has nothing to do, and no payload lies there.
    assert host.pull(mode=mode) == found
    with pytest.raises(DamagedError):
        apply(found[0], host.versions[0], jobs=1)


@pytest.mark.parametrize("encoding", ["context", "gap"])
def test_what_is_published_is_what_differs(tmp_path: Path, encoding: str) -> None:
    host = Host(tmp_path, encoding)
    before, target = host.versions[0], host.publish()
    (path,) = host.pull()
    document = json.loads((path / folders.NAME).read_bytes())
    data = (path / folders.DATA_NAME).read_bytes()
    assert sorted(each.name for each in path.iterdir()) == [
        folders.DATA_NAME,
        folders.NAME,
        "commit.json",
        "digests.zst",
        "manifest.zst",
        "published.json",
    ]
    assert document["format"] == "dcr-changes-2" and document["bytes"] == len(data)
    old, new = (dict(_elements(each)) for each in (before, target))
    told = {}
    for name, (begin, count, width) in document["tensors"]:
        positions = np.frombuffer(data, f"<u{width}", count, begin)
        values = np.frombuffer(data, new[name].dtype, count, -(-(begin + count * width) // 8) * 8)
        expected = np.flatnonzero(old[name] != new[name])
        assert positions.tolist() == expected.tolist() and (values == new[name][expected]).all()
        told[name] = True
    assert set(told) == {name for name in old if (old[name] != new[name]).any()}


def _elements(root: Path) -> list[tuple[str, Any]]:
    from dcr_cli.checkpoint.checkpoint import open_checkpoint
    from dcr_cli.live.compared import read_kept

    checkpoint = open_checkpoint(root)
    return list(read_kept(checkpoint, [tensor.name for tensor in checkpoint.tensors]).items())


def test_the_command_and_who_follows(host: Host, run: Run) -> None:
    host.publish()
    command = ("pull", host.remote, host.checkpoint, "--publish-changes", host.changes)
    ran = run(*command)
    assert ran.code == 0, ran.err
    (second,) = host.changes.iterdir()
    assert f"\n  changes    of 1 version published: {second.name}\n" in ran.out
    for _ in range(2):
        host.publish()
    told = json.loads(run(*command, "--json").out)["published_changes"]
    assert told == sorted(path.name for path in host.changes.iterdir())[1:] and len(told) == 2
    again = run(*command)
    assert again.out.startswith("already there") and "changes" not in again.out.partition("\n")[2]
    assert json.loads(run(*command, "--json").out)["published_changes"] == []
    host.publish()
    arrivals = follow(host.remote, host.checkpoint, tell=print, publish_changes=host.changes, jobs=1)
    with closing(cast("Generator[Any, None, None]", arrivals)):
        arrival = next(arrivals)
    assert arrival.result.published_changes == (sorted(path.name for path in host.changes.iterdir())[-1],)
    assert "changes of 1 version published" in "".join(line.text for line in arrival_lines(arrival))
    laid = ("pull", host.remote, host.checkpoint, "--publish-changes", host.changes, "--layout", host.root / "layout")
    assert is_failure(run(*laid), 2, "needs a checkpoint in canonical form")


def test_only_the_newest_are_kept_and_nothing_that_a_stop_has_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEPT", 2)
    for name in (".new-0000000002-x", ".gone-0000000001-x"):
        (host.changes / name).mkdir()
        (host.changes / name / "changes.data").write_bytes(b"half")
    (host.changes / "notes").write_text("somebody's")
    for _ in range(STEPS):
        host.publish()
        host.pull()
    assert host.names() == ["0000000003", "0000000004", "notes"]
    # Back at a version before, the way is the one from there.
    pull(host.remote, host.checkpoint, version=1, jobs=1)
    host.pull(version=2)
    assert host.names() == ["0000000002", "notes"]
    host.pull()
    assert host.names() == ["0000000003", "0000000004", "notes"]


def test_what_is_not_applied_is_not_published(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.publish()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise LocalError("disk", "is full")

    with monkeypatch.context() as patched:
        patched.setattr("dcr_cli.journey.apply_chain", fail)
        with pytest.raises(LocalError, match="is full"):
            host.pull()
    assert list(host.changes.iterdir()) == []
    assert len(host.pull()) == 1


@pytest.mark.parametrize("mode", ["replace", "in-place", "aside"])
@pytest.mark.parametrize("receiver", [None, "host"])
def test_what_is_prepared_is_left_before_it_is_committed(tmp_path: Path, mode: str, receiver: str | None) -> None:
    host = Host(tmp_path)
    if mode == "aside":
        host.checkpoint.rename(tmp_path / "folder")
        host.checkpoint.symlink_to("folder")
    module = loaded(Engine, host.versions[0])
    host.publish(prepare=True)
    options: dict[str, Any] = {"mode": mode, "receiver": receiver, "publish_changes": host.changes, "jobs": 1}
    assert pull(host.remote, host.checkpoint, **options).staged == 2
    (given_up,) = host.changes.iterdir()
    assert given_up.name.startswith("prepared-0000000002-")
    # Another one takes its place; what was done is not done again.
    target = host.publish(prepare=True)
    assert pull(host.remote, host.checkpoint, **options).staged == 2
    (ahead,) = host.changes.iterdir()
    before = ahead.stat().st_mtime_ns
    assert ahead.name != given_up.name and pull(host.remote, host.checkpoint, **options).staged == 2
    live = Receiver(module, checkpoint=host.versions[0])
    assert live.stage(ahead).version == 2
    # It may be given up yet.
    live.apply()
    assert live.published is None
    module = loaded(Engine, host.versions[0])
    commit(host.remote, quorum=None if receiver is None else 1)
    name = ahead.name.removeprefix("prepared-")
    assert pull(host.remote, host.checkpoint, **options).published_changes == (name,)
    (path,) = host.changes.iterdir()
    assert (path.name, path.stat().st_mtime_ns) == (name, before)
    live = Receiver(module, checkpoint=host.versions[0])
    assert live.stage(path).version == 2
    live.apply()
    assert live.published is not None and live.published.version.number == 2
    assert held(module) == held(loaded(Engine, target))


def test_what_is_given_up_goes_with_the_next_version(host: Host) -> None:
    host.publish(prepare=True)
    assert [path.name.partition("-")[0] for path in host.pull()] == ["prepared"]
    host.publish()
    assert [path.name.partition("-")[0] for path in host.pull()] == ["0000000002"]


def test_who_follows_leaves_what_is_prepared_also_if_it_was_staged_before(host: Host) -> None:
    host.publish(prepare=True)
    assert pull(host.remote, host.checkpoint, receiver="host", jobs=1).staged == 2
    wish = make_wish(Effort(1, None), receiver="host", publish_changes=host.changes)
    with open_store(host.remote) as store:
        follower = Follower(store, host.checkpoint, wish, print)
        for _ in range(3):
            assert follower._round() is None
        (ahead,) = host.changes.iterdir()
        assert ahead.name.startswith("prepared-")
        commit(host.remote, quorum=1)
        arrival = follower._round()
        assert arrival is not None and arrival.result.published_changes == (ahead.name.removeprefix("prepared-"),)


def test_what_is_prepared_is_left_only_from_where_it_starts(host: Host) -> None:
    host.publish(prepare=True)
    with open_store(host.remote) as store:
        hint = read_hint(store)
    assert hint is not None
    pull(host.remote, host.checkpoint, receiver="host", jobs=1)
    delta = shutil.copytree(host.checkpoint / ".dcr/fetched" / str(hint.place), host.root / "delta")
    apply(delta, host.checkpoint, jobs=1)
    wish = make_wish(Effort(1, None), publish_changes=host.changes)
    with open_store(host.remote) as store, pytest.raises(WrongBaseError, match="is not in the state that version 2"):
        stage_next(store, host.checkpoint, wish)
    assert list(host.changes.iterdir()) == []


def test_what_was_stopped_gets_its_name_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint was brought to the version by a run that could say no more."""
    for is_newer_there in (False, True):
        host.publish(prepare=True)
        host.pull()
        commit(host.remote)
        (ahead,) = host.changes.glob("prepared-*")
        with monkeypatch.context() as patched:
            patched.setattr(leaving, "arrive", lambda *given: (_ for _ in ()).throw(LocalError("disk", "is gone")))
            with pytest.raises(LocalError):
                host.pull()
        if is_newer_there:
            host.publish()
        name = ahead.name.removeprefix("prepared-")
        told = pull(host.remote, host.checkpoint, publish_changes=host.changes, jobs=1).published_changes
        assert told[0] == name and len(told) == 1 + is_newer_there
        assert not ahead.exists() and (host.changes / name).is_dir()


def test_what_was_damaged_is_refused(host: Host) -> None:
    module = loaded(Engine, host.versions[0])
    receiver = Receiver(module, checkpoint=host.versions[0])
    host.publish()
    (path,) = host.pull()
    good, document = (path / folders.DATA_NAME).read_bytes(), json.loads((path / folders.NAME).read_bytes())

    def refuses(match: str, kind: type[Exception] = DamagedError, **members: Any) -> None:
        (path / folders.NAME).write_text(json.dumps({**document, **members}))
        with pytest.raises(kind, match=match):
            receiver.stage(path)

    (name, *blocks), *others = document["tensors"]
    begin, count, width = blocks[0]
    refuses("its format is not", format="x")
    refuses("has format dcr-changes-1", UnsupportedError, format="dcr-changes-1")
    refuses("requires", UnsupportedError, requires=["more"])
    for size in ("1", True, -1, None):
        refuses("no number", bytes=size)
    for block in ([0, 1, 3], [0, 1], [-1, 1, 4], [0, 0, 4], [0, 1 << 21, 4], [0, True, 4], [0, 1.0, 4], 1):
        refuses("no names with blocks", tensors=[[name, block]])
    refuses("no names with blocks", tensors=[[name]])
    refuses("names a tensor twice", tensors=[*document["tensors"], [name, *blocks]])
    refuses("none that the delta changes", tensors=[["other", *blocks], *others])
    refuses("none that the delta changes", tensors=[["ids", *blocks], *others])
    refuses("begins at byte", tensors=[[name, [begin, 1 << 20, width]], *others])
    # One more or less, where the data is as long.
    refuses("positions of a block do not ascend", tensors=[[name, [begin, count + 1, width]], *others])
    at = next(at for at, (name, (_, count, _)) in enumerate(others) if count % 4 == 2 and "up.weight" in name)
    second, (begin_2, count_2, width_2) = others[at]
    others[at] = [second, [begin_2, count_2 - 1, width_2]]
    refuses("more between positions and new bits than zeros", tensors=[[name, *blocks], *others])
    others[at] = [second, [begin_2, count_2, width_2]]
    for place in (8, len(good), 2**63, 2**64 - 8):
        refuses("begins at byte", tensors=[[name, [place, count, width]], *others])
    refuses("begins at byte", tensors=others)
    refuses("end at byte", tensors=document["tensors"][:-1])
    refuses("is not a digest", blake3="x")
    refuses("end at byte", bytes=len(good) - 1)
    # The data says what is not so, and its digest is right: what would come of it is not the target.
    wrong = bytearray(good)
    wrong[-8] ^= 1
    (path / folders.DATA_NAME).write_bytes(wrong)
    refuses("is not the data")
    with pytest.raises(NotFoundError, match="each in a folder of its own"):
        receiver.stage(host.changes)
    old = held(module)
    refuses("would not become", WrongBaseError, blake3=blake3_text(object_digest(bytes(wrong))))
    assert held(module) == old
    (path / folders.DATA_NAME).write_bytes(good[:-8])
    refuses("is not the data")


def _tamper(path: Path, positions: list[int], position_bytes: int) -> Path:
    """Say other positions of the first tensor, under the right digest."""
    document, data = json.loads((path / folders.NAME).read_bytes()), (path / folders.DATA_NAME).read_bytes()
    (name, block), *others = document["tensors"]
    old = Spot(*block)
    values = data[old.values_begin :][: len(positions) * 4].ljust(len(positions) * 4, b"\1")
    new = Spot(0, len(positions), position_bytes)
    head = np.array(positions, f"<u{position_bytes}").tobytes().ljust(new.values_begin, b"\0")
    head = (head + values).ljust(new.end(4), b"\0")
    moved = len(head) - old.end(4)
    rest = [[other, *([begin + moved, *size] for begin, *size in blocks)] for other, *blocks in others]
    data = head + data[old.end(4) :]
    told = {"bytes": len(data), "blake3": blake3_text(object_digest(data)), "tensors": [[name, [*new]], *rest]}
    (path / folders.DATA_NAME).write_bytes(data)
    (path / folders.NAME).write_text(json.dumps({**document, **told}))
    return path


@pytest.mark.parametrize(
    ("positions", "position_bytes", "match"),
    [
        ([0, 35], 4, "conv.weight: has position 35, and only 35 elements"),
        ([2**64 - 5], 8, "conv.weight: has position 18446744073709551611, and only 35"),
        ([3, 3], 4, "conv.weight: positions of a block do not ascend"),
        ([3, 1], 8, "conv.weight: positions of a block do not ascend"),
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_positions_that_are_none_are_refused_before_anything_is_staged(
    host: Host, positions: list[int], position_bytes: int, match: str, is_kept: bool
) -> None:
    host.publish()
    (path,) = host.pull()
    first = json.loads((path / folders.NAME).read_bytes())["tensors"][0]
    assert first[0] == "conv.weight"
    module = loaded(Exponential if is_kept else Engine, host.versions[0])
    receiver = Receiver(module, checkpoint=host.versions[0])
    with pytest.raises(DamagedError, match=match):
        receiver.stage(_tamper(path, positions, position_bytes))
    assert receiver.staged is None and held(module) == held(loaded(type(module), host.versions[0]))


class Exponential(Engine):
    """An engine that keeps of one tensor what it makes of it."""

    def load(self, name: str, weight: Any) -> None:
        super().load(name, weight.clamp(-1, 1).exp() if name == "conv.weight" else weight)


def test_what_was_dropped_is_told_of_with_what_is_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEPT", 2)
    receiver = Receiver(loaded(Engine, host.versions[0]), checkpoint=host.versions[0])
    host.publish()
    (second,) = host.pull()
    for _ in range(2):
        host.publish()
    third, _ = host.pull()
    there = "the changes of versions 3, 4 are there: load the module anew, at version 2 or later"
    with pytest.raises(NotFoundError, match="is not there") as told:
        receiver.stage(second)
    assert told.value.hint == there
    delta = open_delta(third)
    for name in (folders.DATA_NAME, folders.NAME, "commit.json"):
        (third / name).unlink()
        with pytest.raises(NotFoundError, match=f"its {name} is there no more") as told:
            folders.read_changes(delta)
        assert told.value.hint == there
    shutil.rmtree(third)
    with pytest.raises(NotFoundError, match="is there no more") as told:
        folders.read_changes(delta)
    assert told.value.hint is not None and "of version 4 are there" in told.value.hint


def test_what_is_read_is_mapped_and_stays_when_it_goes(host: Host) -> None:
    target = host.publish()
    (path,) = host.pull()
    before = _mapped(path)
    changes = folders.read_changes(open_delta(path))
    assert isinstance(changes.data.obj, mmap.mmap) and changes.data.readonly and _mapped(path) == before + 1
    shutil.rmtree(path)
    new = dict(_elements(target))
    for name in changes.spots:
        for flat, values, _ in changes.of(name):
            assert (new[name][flat] == values).all()


def _mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path / folders.DATA_NAME))


def test_changes_of_no_element_are_read(host: Host) -> None:
    same = write(host.root / "same", FORMS, host.bits)
    (same / "config.json").write_text('{"is": "all that changes"}')
    push(same, host.remote, baseline=host.root / "baseline", jobs=1)
    (path,) = host.pull()
    assert folders.read_changes(open_delta(path)).data.nbytes == 0


def test_memory_does_not_grow_with_what_changes(tmp_path: Path) -> None:
    forms: Forms = {"w": ("BF16", (3 << 20,))}
    versions = [write(tmp_path / f"v{step}", forms, {"w": np.full(3 << 20, step, "<u2")}) for step in range(2)]
    for version in versions:
        push(version, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    pull(tmp_path / "remote", tmp_path / "replica", version=1, jobs=1)
    (tmp_path / "changes").mkdir()
    tracemalloc.start()
    try:
        pull(tmp_path / "remote", tmp_path / "replica", publish_changes=tmp_path / "changes", jobs=1)
        peak = tracemalloc.get_traced_memory()[1]
        (path,) = (tmp_path / "changes").iterdir()
        size = (path / folders.DATA_NAME).stat().st_size
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        changes = folders.read_changes(open_delta(path))
        read_peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert size == 18 << 20 and len(changes.spots["w"]) == 12
    assert peak < size and read_peak < size // 8


def test_pieces_that_lie_between_each_other_are_published(tmp_path: Path) -> None:
    layout = write_layout(tmp_path)
    states = [write_canonical(tmp_path / f"dense-{step}", canonical(step), step) for step in range(2)]
    push(states[0], tmp_path / "remote", jobs=1)
    ranks = write_ranks(tmp_path / "ranks", canonical(1), 1)
    results(all_ranks(ranks, tmp_path / "remote", RANKS, layout=layout))
    pull(tmp_path / "remote", tmp_path / "replica", version=1, jobs=1)
    (tmp_path / "changes").mkdir()
    pull(tmp_path / "remote", tmp_path / "replica", publish_changes=tmp_path / "changes", jobs=2)
    (path,) = (tmp_path / "changes").iterdir()
    changes = folders.read_changes(open_delta(path))
    old, new = (dict(_elements(state)) for state in states)
    assert len(changes.spots["down"]) == RANKS
    for name in changes.spots:
        for flat, values, _ in changes.of(name):
            old[name][flat] = values
    assert all((old[name] == new[name]).all() for name in new)


def test_what_was_killed_half_way_is_removed_and_never_read(host: Host) -> None:
    host.publish()
    code = """if True:
        import os, sys
        from dcr_cli import durable, pull
        def stop(kind, path, other):
            if kind == "rename" and "/.new-" in path:
                os._exit(9)
        durable.hooks.append(stop)
        pull(sys.argv[1], sys.argv[2], publish_changes=sys.argv[3], jobs=1)
    """
    command = [sys.executable, "-c", code, host.remote, str(host.checkpoint), str(host.changes)]
    assert subprocess.run(command, check=False).returncode == 9
    (half,) = host.changes.iterdir()
    assert half.name.startswith(".new-0000000002-") and (half / folders.NAME).exists()
    # The checkpoint has come to it, and whoever follows the folder is told that nothing is there of it.
    host.publish()
    (third,) = host.pull()
    assert third.name.startswith("0000000003-")


def test_the_folder_lies_outside_of_what_is_pulled(host: Host, run: Run) -> None:
    host.publish()
    inside = host.checkpoint / "changes"
    inside.mkdir()
    for folder in (host.checkpoint, inside):
        ran = run("pull", host.remote, host.checkpoint, "--publish-changes", folder)
        assert is_failure(ran, 2, "the folder of changes cannot lie inside the checkpoint")
    with pytest.raises(UsageError, match="cannot lie inside the checkpoint"):
        next(iter(follow(host.remote, host.checkpoint, tell=print, publish_changes=inside)))
    with pytest.raises(UsageError, match="cannot lie inside the remote"):
        pull(host.remote, host.checkpoint, publish_changes=Path(host.remote) / "versions")
    assert list(inside.iterdir()) == []


def test_the_folder_is_made_for_this_user_alone(host: Host) -> None:
    host.publish()
    one, two = host.root / "one", host.root / "two"
    pull(host.remote, host.checkpoint, publish_changes=one, dry_run=True, jobs=1)
    assert not one.exists()
    pull(host.remote, host.checkpoint, publish_changes=one, jobs=1)
    assert [path.name.partition("-")[0] for path in one.iterdir()] == ["0000000002"]
    host.publish()
    next(iter(follow(host.remote, host.checkpoint, tell=print, publish_changes=two, jobs=1)))
    assert [path.stat().st_mode & 0o777 for path in (one, two)] == [0o700, 0o700]
    # One that is there stays as it is.
    one.chmod(0o755)
    pull(host.remote, host.checkpoint, publish_changes=one, jobs=1)
    assert one.stat().st_mode & 0o777 == 0o755


def test_what_cannot_be_published_is_refused(host: Host) -> None:
    (host.root / "file").write_text("")
    for nowhere in (host.root / "none/changes", host.root / "file"):
        with pytest.raises(UsageError, match="is no folder, and none that can be made"):
            pull(host.remote, host.checkpoint, publish_changes=nowhere, jobs=1)
    forms = {**FORMS, "new.weight": ("BF16", (4,))}
    bits = {**host.bits, "new.weight": np.arange(4, dtype="<u2")}
    path = write(host.root / "wider", forms, bits)
    push(path, host.remote, baseline=host.root / "baseline", jobs=1)
    with pytest.raises(UnsupportedError, match=r"new\.weight.*is new"):
        host.pull()
    pull(host.remote, host.checkpoint, jobs=1)
