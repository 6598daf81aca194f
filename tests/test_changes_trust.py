"""Whose word it is that a version changes this and that: signatures of commits, and owners of folders and files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Run, is_failure
from dcr_cli import pull
from dcr_cli.changes.folder import read_changes
from dcr_cli.delta.delta import open_delta
from dcr_cli.diff import diff
from dcr_cli.errors import ConflictError, DamagedError, WrongBaseError
from dcr_cli.live import Member, Receiver
from dcr_cli.remote.version import PUBLISHED_NAME
from live_modules import Engine, held, loaded
from live_remotes import TrainedRemote

STRANGER = 54321


class Host:
    """A remote that one key signs, what a pull has decoded of its second version, and a module at the first one."""

    def __init__(self, root: Path, keys: tuple[Path, Path]) -> None:
        self.key, self.other_key = (str(key.with_suffix(".pub")) for key in keys)
        self.remote = TrainedRemote(root)
        self.first = self.remote.versions[0]
        self.checkpoint, self.changes = root / "replica", root / "changes"
        self.changes.mkdir(0o700)
        pull(self.remote.url, self.checkpoint, jobs=1)
        self.target = self.remote.publish(sign_key=keys[0])
        pull(self.remote.url, self.checkpoint, publish_changes=self.changes, jobs=1)
        (self.path,) = self.changes.iterdir()
        self.module = loaded(Engine, self.first)

    def receiver(self, *trusted: str) -> Receiver:
        return Receiver(self.module, checkpoint=self.first, trusted_keys=trusted)

    def stage(self, *trusted: str) -> None:
        self.receiver(*trusted).stage(self.path)


@pytest.fixture
def host(tmp_path: Path, keys: tuple[Path, Path]) -> Host:
    return Host(tmp_path, keys)


def test_a_folder_counts_by_the_signature_of_its_commit(host: Host, tmp_path: Path) -> None:
    unsigned = tmp_path / "delta"
    diff(host.first, host.target, unsigned, encoding="gap")
    host.receiver().stage(unsigned)
    for receiver in (host.receiver(host.key), host.receiver(host.key, host.other_key)):
        with pytest.raises(WrongBaseError, match=r"is not signed: it has no published\.json") as told:
            receiver.stage(unsigned)
        assert told.value.hint is not None and "REMOTE@N" in told.value.hint
        assert receiver.staged is None and held(host.module) == held(loaded(Engine, host.first))
    with pytest.raises(WrongBaseError, match="is not signed by a trusted key"):
        host.stage(host.other_key)
    # The commit of another delta, and then the right one, under which somebody has written something else.
    whole = (host.path / PUBLISHED_NAME).read_bytes()
    (unsigned / PUBLISHED_NAME).write_bytes(whole)
    with pytest.raises(DamagedError, match=r"is not the commit that commit\.json is"):
        host.receiver(host.key).stage(unsigned)
    line, signature = whole.splitlines(keepends=True)
    (host.path / PUBLISHED_NAME).write_bytes(line + signature[:-2] + (b"0\n" if signature[-2:-1] != b"0" else b"1\n"))
    with pytest.raises(WrongBaseError, match="is not one of this commit"):
        host.stage(host.key)
    (host.path / PUBLISHED_NAME).write_bytes(whole)
    receiver = host.receiver(host.key)
    receiver.stage(host.path)
    receiver.apply()
    assert held(host.module) == held(loaded(Engine, host.target))


def test_a_receiver_s_keys_count_whoever_brings_it_versions(host: Host) -> None:
    for changes in (None, host.changes):
        receiver = host.receiver(host.other_key)
        with (
            Member(receiver, host.remote.url, version=1, changes=changes) as member,
            pytest.raises(WrongBaseError, match="is not signed by a trusted key"),
        ):
            member.stage_next()
        assert receiver.staged is None


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file or folder, and at most all that this user has, belong to another user than this process's."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def _open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def _open_to_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | 0o1002)


Spoil = Callable[[Path, pytest.MonkeyPatch], None]
FAULTS: dict[Spoil, str] = {
    _give_away: "belongs to user",
    _open: "others than its owner may write",
    _open_to_all: "others than its owner may write",
}


@pytest.mark.parametrize("spoil", FAULTS)
def test_what_others_may_have_written_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    with Member(host.receiver(), host.remote.url, version=1, changes=host.changes) as member:
        for name in ("", "commit.json", "changes.json", "changes.data"):
            path = host.path / name
            status = path.stat()
            with monkeypatch.context() as patched:
                spoil(path, patched)
                for trusted in ((), (host.key,)):
                    with pytest.raises(DamagedError, match=FAULTS[spoil]) as told:
                        host.stage(*trusted)
                    assert told.value.hint is not None
                    assert told.value.what == str(path) or os.geteuid() == STRANGER
                with pytest.raises(DamagedError, match=FAULTS[spoil]):
                    member.stage_next()
            path.chmod(status.st_mode & 0o7777)
            os.chown(path, status.st_uid, -1)
        assert member.stage_next() is not None


@pytest.mark.parametrize("spoil", FAULTS)
def test_the_folder_of_all_versions_is_this_user_s_too(
    host: Host, monkeypatch: pytest.MonkeyPatch, run: Run, spoil: Spoil
) -> None:
    host.remote.publish()
    with Member(host.receiver(), host.remote.url, version=1, changes=host.changes) as member:
        spoil(host.changes, monkeypatch)
        with pytest.raises(DamagedError, match=FAULTS[spoil]):
            member.stage_next()
    ran = run("pull", host.remote.url, host.checkpoint, "--publish-changes", host.changes)
    assert is_failure(ran, 2, FAULTS[spoil])
    assert [path.name for path in host.changes.iterdir()] == [host.path.name]


def test_links_are_not_followed(host: Host) -> None:
    for name in ("commit.json", "changes.json", "changes.data"):
        aside = host.path.parent.parent / name
        (host.path / name).rename(aside)
        (host.path / name).symlink_to(aside)
        with pytest.raises(DamagedError, match="is, or is below, a link"):
            host.stage()
        aside.replace(host.path / name)
    host.stage()
    moved = host.path.rename(host.path.parent.parent / "moved")
    host.path.symlink_to(moved)
    with pytest.raises(DamagedError, match="is, or is below, a link"):
        host.stage()


def test_the_documents_are_those_that_were_opened(host: Host) -> None:
    opened = open_delta(host.path)
    shutil.move(host.path, host.path.with_name("old"))
    host.remote.publish()
    pull(host.remote.url, host.checkpoint, publish_changes=host.changes, jobs=1)
    (third,) = host.changes.glob("0000000003-*")
    third.rename(host.path)
    with pytest.raises(ConflictError, match="became that of another version"):
        read_changes(opened)


@pytest.mark.parametrize(("mask", "folder_mode", "file_mode"), [(0, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_nobody_else_may_write_to_what_is_published(host: Host, mask: int, folder_mode: int, file_mode: int) -> None:
    host.remote.publish()
    before = os.umask(mask)
    try:
        pull(host.remote.url, host.checkpoint, publish_changes=host.changes, jobs=1)
    finally:
        os.umask(before)
    (third,) = host.changes.glob("0000000003-*")
    assert third.stat().st_mode & 0o7777 == folder_mode
    assert {path.stat().st_mode & 0o7777 for path in third.iterdir()} == {file_mode}
