"""Changes to local disk: nothing is lost to short writes, nothing is written through links, every step is seen."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli import durable
from dcr_cli.apply import apply
from dcr_cli.diff import diff
from dcr_cli.durable import Folder, NoRoomError, open_folder
from dcr_cli.errors import ConflictError, DamagedError, LocalError, UnsupportedError
from dcr_cli.receiver.room import free_bytes
from faults import PowerLoss, StoppedError, stopped_at, watching


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "root").mkdir()
    return open_folder(tmp_path / "root")


class TestRenamingIfFree:
    """A file takes a name only if nothing has it, with and without hard links."""

    @pytest.fixture(params=[None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
    def links(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object, **more: object) -> None:
            raise OSError(request.param, os.strerror(request.param))

        if request.param is not None:
            monkeypatch.setattr(os, "link", refuse)

    def test_a_name_that_is_free(self, folder: Folder, links: None) -> None:
        folder.write_file("new", b"1")
        assert folder.rename_if_free("new", "name")
        assert folder.names() == ["name"] and folder.read("name", 1) == b"1"

    def test_a_name_that_is_taken(self, folder: Folder, links: None) -> None:
        folder.write_file("new", b"1")
        folder.write_file("name", b"2")
        assert not folder.rename_if_free("new", "name")
        assert folder.names() == ["name", "new"] and folder.read("name", 1) == b"2"

    def test_an_answer_that_was_lost(self, folder: Folder) -> None:
        folder.write_file("new", b"1")
        folder.link_file(folder, "new", "name")
        assert folder.rename_if_free("new", "name")
        assert folder.names() == ["name"]

    def test_neither_way(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object, **more: object) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr("dcr_cli.durable.folder._rename_no_replace", refuse)
        folder.write_file("new", b"1")
        with pytest.raises(UnsupportedError, match="only if none is there"):
            folder.rename_if_free("new", "name")
        assert folder.names() == ["new"]


class TestWriting:
    def test_short_writes(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
        folder.write_file("a", bytes(range(100)))
        assert folder.read("a", 100) == bytes(range(100))

    def test_a_busy_file_system(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        pwrite, calls = os.pwrite, []

        def busy(fd: int, data: memoryview, offset: int) -> int:
            calls.append(offset)
            if len(calls) % 2:
                raise BlockingIOError(errno.EAGAIN, "again")
            return pwrite(fd, data[:1], offset)

        monkeypatch.setattr(os, "pwrite", busy)
        folder.write_file("a", b"abc")
        assert folder.read("a", 3) == b"abc"

    def test_a_write_of_nothing_does_not_hang(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
        with pytest.raises(LocalError, match="took no byte"):
            folder.write_file("a", b"abc")

    @pytest.mark.parametrize("width", [1, 2, 4, 8])
    def test_arrays(self, folder: Folder, width: int) -> None:
        data = np.arange(10, dtype=f"<u{width}")
        with folder.create_file("a") as file:
            file.write_at(5, data)
            file.write_at(0, np.zeros(0, data.dtype))
            back = bytearray(10 * width)
            file.read_into(5, memoryview(back))
        assert bytes(back) == data.tobytes()

    def test_reading_past_the_end(self, folder: Folder) -> None:
        folder.write_file("a", b"abc")
        with folder.open_file("a") as file, pytest.raises(ConflictError, match="shorter"):
            file.read_into(0, memoryview(bytearray(4)))

    def test_replacing(self, folder: Folder) -> None:
        for content in (b"one", b"two, longer", b""):
            folder.replace_file("a", content)
            assert folder.read("a", 100) == content
        assert folder.names() == ["a"]

    @pytest.mark.parametrize(("mask", "new"), [(0, 0o644), (0o077, 0o600)])
    def test_modes_of_what_is_promised_do_not_depend_on_the_umask(self, folder: Folder, mask: int, new: int) -> None:
        before = os.umask(mask)
        try:
            folder.write_file("new", b"")
            folder.replace_file("private", b"")
            folder.replace_file("shared", b"", 0o644)
            folder.open_or_create("lock").close()
        finally:
            os.umask(before)
        modes = {name: os.stat(folder.path / name).st_mode & 0o777 for name in folder.names()}
        assert modes == {"new": new, "private": 0o600, "shared": 0o644, "lock": 0o600}


class TestLinks:
    @pytest.mark.parametrize("text", ["../outside", "/nowhere", "loop"])
    def test_nothing_is_opened_through_a_link(self, folder: Folder, tmp_path: Path, text: str) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/file").write_bytes(b"precious")
        os.symlink(text, folder.path / "link")
        os.symlink("../outside/file", folder.path / "file")
        if text == "loop":
            os.symlink("link", folder.path / "loop")
        for refused in (
            lambda: folder.open_file("file"),
            lambda: folder.open_or_create("file"),
            lambda: folder.create_file("file"),
            lambda: folder.create_file("link/new"),
            lambda: folder.open_folder("link"),
            lambda: folder.make_folder("link/new"),
            lambda: folder.make_folder("link", exist_ok=True),
            lambda: folder.make_parents("link/new/file"),
            lambda: folder.remove("link/file"),
            lambda: folder.read("file", 100),
            lambda: folder.rename("file", folder, "link/file"),
        ):
            with pytest.raises((DamagedError, LocalError)):
                refused()
        assert os.listdir(tmp_path / "outside") == ["file"]
        assert (tmp_path / "outside/file").read_bytes() == b"precious"

    def test_trees_are_removed_without_following(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/file").write_bytes(b"precious")
        (folder.path / "tree/deep").mkdir(parents=True)
        (folder.path / "tree/deep/file").write_bytes(b"")
        os.symlink(tmp_path / "outside", folder.path / "tree/link")
        os.mkfifo(folder.path / "tree/fifo")
        folder.remove_tree("tree")
        folder.remove_tree("tree", missing_ok=True)
        assert folder.names() == []
        assert (tmp_path / "outside/file").exists()

    def test_a_fifo_does_not_hang(self, folder: Folder) -> None:
        os.mkfifo(folder.path / "fifo")
        with pytest.raises(DamagedError, match="not a regular file"):
            folder.open_or_create("fifo")
        with pytest.raises(DamagedError, match="not a regular file"):
            folder.read("fifo", 100)


class TestErrors:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_no_room(self, folder: Folder, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int, data: memoryview, offset: int) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(NoRoomError, match=r"root/a: cannot be written") as error:
            folder.write_file("a", b"abc")
        assert error.value.exit_code == 9
        assert ("ulimit" if number == errno.EFBIG else "make room") in str(error.value.hint)

    @pytest.mark.parametrize(
        ("call", "change"),
        [
            ("fsync", lambda folder: folder.write_file("a", b"x")),
            ("fsync", lambda folder: folder.sync()),
            ("rename", lambda folder: folder.rename("there", folder, "b")),
            ("unlink", lambda folder: folder.remove("there")),
            ("mkdir", lambda folder: folder.make_folder("b")),
            ("ftruncate", lambda folder: folder.create_file("b").resize(10)),
            ("symlink", lambda folder: folder.make_link("x", "b")),
        ],
    )
    def test_what_the_system_refuses_names_the_path(
        self, folder: Folder, call: str, change: Callable[[Folder], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder.write_file("there", b"")

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(LocalError, match=r"root.*Input/output error"):
            change(folder)

    def test_a_quota_that_speaks_at_close(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        file = folder.create_file("a")

        def full(fd: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", full)
            with pytest.raises(NoRoomError):
                file.close()

    def test_folders_that_cannot_be_synced(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(fd: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "fsync", refuse)
        folder.sync()


class TestSharing:
    def test_a_clone_is_a_copy_or_is_refused(self, folder: Folder) -> None:
        folder.write_file("a", b"abc" * 10_000)
        with folder.open_linked("a") as source, folder.create_file("b") as file:
            if not file.clone_from(source):
                assert file.copy_from(source) == 30_000
        assert folder.read("b", 30_000) == b"abc" * 10_000

    def test_links_across_devices_are_refused(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.write_file("a", b"abc")
        assert folder.link_file(folder, "a", "b")
        assert os.stat(folder.path / "b").st_nlink == 2

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refuse)
        assert not folder.link_file(folder, "a", "c")


class TestRoom:
    def test_a_file_system(self, folder: Folder) -> None:
        assert 0 < free_bytes(folder) < 1 << 60

    def test_one_in_memory_counts_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no file system in memory here")
        monkeypatch.setattr("dcr_cli.receiver.room._free_memory", lambda: 1000)
        with open_folder("/dev/shm") as folder:
            assert free_bytes(folder) == 500


class TestSteps:
    def test_every_change_is_a_step(self, folder: Folder) -> None:
        seen: list[str] = []
        with watching(lambda kind, path, other: seen.append(kind)):
            folder.make_folder("f")
            folder.write_file("f/a", b"abc")
            folder.rename("f/a", folder, "b")
            folder.link_file(folder, "b", "c")
            folder.make_link("b", "d")
            folder.remove("c")
            folder.remove_folder("f")
            folder.sync()
        assert seen == [
            "mkdir",
            "create",
            "write",
            "sync",
            "rename",
            "link",
            "symlink",
            "unlink",
            "rmdir",
            "sync-folder",
        ]
        assert durable.hooks == []

    def test_a_stopped_process_does_nothing_more(self, folder: Folder) -> None:
        def run() -> None:
            try:
                folder.write_file("a", b"abc")
            finally:
                folder.write_file("b", b"abc")

        assert not stopped_at(1, run)
        assert folder.names() == ["a"]
        assert folder.read("a", 10) == b""

    def test_only_durable_changes_the_disk(self) -> None:
        """No other package calls what changes it."""
        owner = Path(durable.__file__).parent
        calls = ["os.rename", "os.replace", "os.unlink", "os.remove", "os.mkdir", "os.write", "os.pwrite", "os.symlink"]
        calls += ["os.link(", "os.truncate", "os.ftruncate", "os.fsync", "shutil.", "tempfile", ".write_bytes("]
        calls += [".write_text(", "os.makedirs", "os.rmdir", "os.chmod", "os.fchmod", "O_CREAT"]
        for path in owner.parent.rglob("*.py"):
            if path.parent != owner:
                text = path.read_text()
                assert [call for call in calls if call in text] == [], path.name


class TestPowerLoss:
    """The model itself: it must lose what was not synced, and keep what was."""

    @pytest.mark.parametrize("way", ["nothing", "names", "some", "all"])
    def test_what_is_synced_survives(self, folder: Folder, tmp_path: Path, way: str) -> None:
        loss = PowerLoss(folder.path)
        with watching(loss):
            folder.replace_file("a", b"one")
            folder.replace_file("a", b"two")
        (tmp_path / "left").mkdir()
        loss.survivors(tmp_path / "left", way)
        assert {path.name: path.read_bytes() for path in (tmp_path / "left").iterdir()} == {"a": b"two"}

    def test_what_is_not_synced_may_be_lost(self, folder: Folder, tmp_path: Path) -> None:
        folder.write_file("old", b"old")
        loss = PowerLoss(folder.path)
        with watching(loss):
            with folder.create_file("unsynced") as file:
                file.write_at(0, b"x" * 5000)
            with folder.open_file("old") as file:
                file.write_at(0, b"new")
            folder.rename("old", folder, "renamed")
        found = {}
        for way in ("nothing", "names", "all"):
            (tmp_path / way).mkdir()
            loss.survivors(tmp_path / way, way)
            found[way] = {path.name: path.read_bytes() for path in (tmp_path / way).iterdir()}
        assert found["nothing"] == {"old": b"old"}
        assert found["names"] == {"renamed": b"old", "unsynced": b""}
        assert found["all"] == {"renamed": b"new", "unsynced": b"x" * 5000}

    def test_a_stop_raises_for_ever(self, folder: Folder) -> None:
        with pytest.raises(StoppedError), watching(_raise_stop):
            folder.sync()


@pytest.mark.parametrize("command", ["apply", "diff"])
def test_a_disk_that_is_mounted_read_only_is_called_so(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    base, target = tiny_pair
    diff(base, target, tmp_path / "delta")
    real = os.statvfs(tmp_path)
    mounted = os.statvfs_result((*real[:8], os.ST_RDONLY, real[9]))
    monkeypatch.setattr(os, "access", lambda *given, **more: False)
    monkeypatch.setattr(os, "statvfs", lambda path: mounted)
    with pytest.raises(LocalError, match="Read-only file system") as caught:
        apply(tmp_path / "delta", base) if command == "apply" else diff(base, target, tmp_path / "other")
    assert caught.value.hint == "its file system is mounted read-only; choose another place"


def _raise_stop(kind: str, path: str, other: str) -> None:
    raise StoppedError
