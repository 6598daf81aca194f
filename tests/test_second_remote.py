"""Remotes as the modules of this package write them, read by a second reader that knows FORMAT.md alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_cli.errors import DcrError
from dcr_cli.remote.anchor import open_anchor
from dcr_cli.remote.keys import anchor_key, commit_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.store.opening import open_store
from receivers import tree, write_rich_pair
from remotes import HISTORY, Remote, signing_key
from second_reader import MalformedError
from second_remote import read_acknowledgements, read_anchor, read_log, read_version
from strategies import write_tiny_pair

KEY = signing_key()


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def is_signed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def published(folder: Path, *, is_signed: bool) -> tuple[Remote, list[Path]]:
    """A remote of four versions: an anchor, two deltas with an anchor of the second, and a break."""
    (folder / "rich").mkdir()
    base, target = write_rich_pair(folder / "rich")
    tiny = write_tiny_pair(folder)[0]
    remote = Remote(open_store(folder / "remote"), folder / "scratch", KEY if is_signed else None)
    (folder / "scratch").mkdir()
    remote.publish(base)
    second = remote.publish(target, base)
    remote.acknowledge(second, "host-1", "staged", is_built=True)
    remote.acknowledge(second, "host-1", "applied")
    remote.acknowledge(second, "host-2", "staged")
    third = remote.publish(base, target)
    remote.put_anchor(base, third.version.place)
    remote.publish(tiny)
    remote.hint(5, "streaming")
    return remote, [base, target, base, tiny]


def test_every_version_is_read(tmp_path: Path, is_signed: bool) -> None:
    _, checkpoints = published(tmp_path, is_signed=is_signed)
    root, trusted = tmp_path / "remote", [KEY.public.hex()] if is_signed else []
    log = read_log(root, trusted)
    assert [commit.members["kind"] for commit in log] == ["anchor", "delta", "delta", "anchor"]
    for number, way in enumerate(([0], [0, 1], [0, 1, 2], [2], [3])):
        folder = read_version(root, [log[index] for index in way], tmp_path / f"way-{number}", trusted)
        assert tree(folder) == tree(checkpoints[way[-1]])
    assert read_acknowledgements(root, log[1], trusted) == {"staged": {"host-1", "host-2"}, "applied": {"host-1"}}
    assert read_acknowledgements(root, log[2], trusted) == {"staged": set(), "applied": set()}
    with pytest.raises(MalformedError, match="over a break"):
        read_version(root, log, tmp_path / "over", trusted)


def test_both_readers_agree(tmp_path: Path, is_signed: bool) -> None:
    remote, _ = published(tmp_path, is_signed=is_signed)
    root, trust = tmp_path / "remote", Trust(frozenset([KEY.public]) if is_signed else frozenset())
    log = Log(remote.store, HISTORY, trust)
    first = log.require(1)
    commits = [first, *log.following(first, log.newest(1))]
    assert [f"blake3:{commit.blake3.hex()}" for commit in commits] == [commit.blake3 for commit in read_log(root)]
    for commit in (commits[0], commits[2], commits[3]):
        data = remote.store.get(anchor_key(commit.version.place), most_bytes=1 << 20)
        assert data is not None
        opened = open_anchor(commit.version, data, "anchor", trust)
        assert opened.target == commit.version.target
        assert opened.bytes == sum(file.size for file in opened.files)


def test_keys_that_signed_nothing_are_refused_by_both(tmp_path: Path) -> None:
    remote, _ = published(tmp_path, is_signed=True)
    other = signing_key(1).public
    with pytest.raises(MalformedError, match="not signed"):
        read_log(tmp_path / "remote", [other.hex()])
    with pytest.raises(DcrError, match="not signed"):
        Log(remote.store, HISTORY, Trust(frozenset([other]))).require(1)
    log = read_log(tmp_path / "remote")
    with pytest.raises(MalformedError, match="not signed"):
        read_anchor(tmp_path / "remote", log[2], tmp_path / "to", [other.hex()])
    assert read_acknowledgements(tmp_path / "remote", log[1], [other.hex()]) == {"staged": set(), "applied": set()}


def test_what_one_refuses_the_other_does(tmp_path: Path) -> None:
    """Bits of commits and of an anchor's document are flipped, here and there."""
    remote, _ = published(tmp_path, is_signed=False)
    root = tmp_path / "remote"
    log = Log(remote.store, HISTORY)
    first = log.require(1)
    place = first.version.place
    for key in (commit_key(2), commit_key(3), anchor_key(place)):
        data = (root / key).read_bytes()
        for at in range(3, len(data), 37):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 7
            (root / key).write_bytes(changed)
            if key == anchor_key(place):
                with pytest.raises(DcrError):
                    open_anchor(first.version, bytes(changed), "anchor", Trust())
                with pytest.raises(MalformedError):
                    read_version(root, read_log(root)[:1], tmp_path / "to")
            else:
                with pytest.raises(DcrError):
                    log.following(first, 4)
                with pytest.raises(MalformedError):
                    read_log(root)
        (root / key).write_bytes(data)
    assert len(read_log(root)) == 4
