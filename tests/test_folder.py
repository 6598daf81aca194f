from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcr_cli.checkpoint import folder
from dcr_cli.checkpoint.folder import Files, check_same, pattern_of, scan
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.errors import ConflictError, DamagedError, LocalError


def fill(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())
    return root


# Scanning


def test_files_are_found_in_canonical_order(tmp_path: Path) -> None:
    fill(tmp_path, "b", "a/z", "a.txt", "é", "a/b/c", "Z")
    assert list(scan(tmp_path)) == ["Z", "a.txt", "a/b/c", "a/z", "b", "é"]
    assert scan(tmp_path)["a/z"].size == 3
    assert scan(tmp_path)["a/z"].inode == (tmp_path / "a/z").stat().st_ino


def test_names_that_start_with_a_dot_are_not_part(tmp_path: Path) -> None:
    fill(tmp_path, ".hidden", ".dcr/state.json", ".git/config", "a/.x/y", "a/.z", "a/b")
    assert list(scan(tmp_path)) == ["a/b"]


def test_links_to_files_are_files(tmp_path: Path) -> None:
    fill(tmp_path, "blobs/.0123", "root/real")
    (tmp_path / "root/link").symlink_to("../blobs/.0123")
    found = scan(tmp_path / "root")
    assert list(found) == ["link", "real"]
    assert found["link"].inode == (tmp_path / "blobs/.0123").stat().st_ino


def test_links_that_lead_to_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in ("nowhere", "link", "folder", "/dev/null/x"):
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(DamagedError, match="link") as caught:
            scan(tmp_path)
        assert str(tmp_path / "link") in str(caught.value)
        assert list(scan(tmp_path, skip=["link"])) == []
        (tmp_path / "link").unlink()


def test_what_is_no_file_is_not_part_unless_its_name_claims_it(tmp_path: Path) -> None:
    fill(tmp_path, "a")
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    assert list(scan(tmp_path)) == ["a"]
    with pytest.raises(DamagedError, match=r"x\.safetensors: is a FIFO"):
        scan(tmp_path, must_be_files=(".safetensors",))
    (tmp_path / "x.safetensors").unlink()
    (tmp_path / "y" / "x.safetensors").mkdir(parents=True)
    with pytest.raises(DamagedError, match=r"x\.safetensors: is a directory") as caught:
        scan(tmp_path, must_be_files=(".safetensors",))
    assert caught.value.hint == "leave it out with --skip 'y/x.safetensors'"


def test_a_very_deep_folder_is_scanned(tmp_path: Path) -> None:
    deep = "/".join(["d"] * 1500)
    path = tmp_path
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(1500):
            os.mkdir("d", dir_fd=descriptor)
            inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        os.close(os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor))
    finally:
        os.close(descriptor)
    assert list(scan(path)) == [deep + "/x"]


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LocalError, match="cannot be listed: Permission denied") as caught:
        scan(tmp_path)
    assert caught.value.hint == "run as a user who may, or have its mode changed"


# Skipping


def test_skipped_files_and_folders_are_not_looked_at(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b.bin", "original/x", "original/y/z")
    (tmp_path / "original/loop").symlink_to(".")
    assert list(scan(tmp_path, skip=["*.bin", "original/"])) == ["a"]


@pytest.mark.parametrize("path", ["a", "a\nb", "[x]", "a*b?", "a b", "a\\b", "\udce9", "\u202e"])
def test_pattern_of_matches_its_path(path: str) -> None:
    assert Patterns([pattern_of(path)]).match(path)
    assert pattern_of(path).isprintable()


# Reading


def read_at(files: Files, path: str, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    files.read_path_into(path, offset, buffer)
    return bytes(buffer)


def test_reading(tmp_path: Path) -> None:
    fill(tmp_path, "a/b", "empty")
    (tmp_path / "empty").write_bytes(b"")
    with Files(tmp_path, scan(tmp_path)) as files:
        assert read_at(files, "a/b", 1, 2) == b"/b"
        assert read_at(files, "a/b", 3, 0) == b""
        assert files.read_file("a/b") == b"a/b"
        assert files.read_file("empty") == b""
        assert list(files.parts_of("empty")) == []
    with pytest.raises(ValueError, match="closed"):
        files.read_file("a/b")


def test_a_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "READ_AT_ONCE_BYTES", 7)
    for size in (1, 6, 7, 8, 14, 100):
        (tmp_path / "x").write_bytes(bytes(range(size)))
        with Files(tmp_path, scan(tmp_path)) as files:
            assert b"".join(bytes(part) for part in files.parts_of("x")) == bytes(range(size))


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "abcdef")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:1]], offset))
    with Files(tmp_path, scan(tmp_path)) as files:
        assert files.read_file("abcdef") == b"abcdef"


@pytest.mark.parametrize("change", ["append", "truncate", "rewrite", "touch", "replace", "remove", "fifo", "folder"])
def test_a_changed_file_is_a_conflict(tmp_path: Path, change: str) -> None:
    path = fill(tmp_path, "abcdef") / "abcdef"
    before = scan(tmp_path)
    match change:
        case "append":
            path.write_bytes(b"abcdefg")
        case "truncate":
            os.truncate(path, 3)
        case "rewrite":
            path.write_bytes(b"abcdeX")
            os.utime(path, ns=(0, before["abcdef"].mtime_ns))
        case "touch":
            os.utime(path)
        case "replace":
            (tmp_path / "new").write_bytes(b"abcdef")
            os.utime(tmp_path / "new", ns=(0, before["abcdef"].mtime_ns))
            (tmp_path / "new").replace(path)
        case "remove":
            path.unlink()
        case "fifo":
            path.unlink()
            os.mkfifo(path)
        case _:
            path.unlink()
            path.mkdir()
    with Files(tmp_path, before) as files, pytest.raises(ConflictError, match="abcdef: changed while reading"):
        files.read_file("abcdef")
    with pytest.raises(ConflictError, match="abcdef: changed while reading"):
        check_same(tmp_path, before, scan(tmp_path))


def test_a_file_that_shrinks_between_reads_is_a_conflict(tmp_path: Path) -> None:
    fill(tmp_path, "abcdef")
    with Files(tmp_path, scan(tmp_path)) as files:
        assert read_at(files, "abcdef", 0, 2) == b"ab"
        os.truncate(tmp_path / "abcdef", 4)
        assert read_at(files, "abcdef", 2, 2) == b"cd"
        with pytest.raises(ConflictError, match="became shorter"):
            read_at(files, "abcdef", 3, 2)


def test_a_read_error_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, views: object, offset: int) -> int:
        raise OSError(5, "Input/output error")

    fill(tmp_path, "a")
    with Files(tmp_path, scan(tmp_path)) as files:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(LocalError, match="cannot be read: Input/output error"):
            files.read_file("a")


def test_check_same_names_what_came_and_went(tmp_path: Path) -> None:
    before = scan(fill(tmp_path, "a", "b"))
    check_same(tmp_path, before, scan(tmp_path))
    (tmp_path / "b").unlink()
    with pytest.raises(ConflictError, match="b: changed while reading: it is gone"):
        check_same(tmp_path, before, scan(tmp_path))
    fill(tmp_path, "Z")
    with pytest.raises(ConflictError, match="Z: changed while reading: it is new"):
        check_same(tmp_path, before, scan(tmp_path))


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.usefixtures("few_descriptors")
def test_many_threads_read_many_files_with_few_descriptors(tmp_path: Path) -> None:
    names = [f"{n:03}" for n in range(300)]
    fill(tmp_path, *names)
    before = open_descriptors()
    with (
        Files(tmp_path, scan(tmp_path)) as files,
        Files(tmp_path, scan(tmp_path)) as others,
        ThreadPoolExecutor(40) as pool,
    ):
        assert list(pool.map(files.read_file, names * 5)) == [name.encode() for name in names * 5]
        assert list(pool.map(others.read_file, names)) == [name.encode() for name in names]
        assert open_descriptors() <= before + 2 * folder.MAX_OPEN_FILES
    assert open_descriptors() == before


def test_with_all_descriptors_lent_the_next_reader_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MAX_OPEN_FILES", 1)
    fill(tmp_path, "a", "b")
    with Files(tmp_path, scan(tmp_path)) as files, ThreadPoolExecutor(1) as pool:
        with files.opened("a"):
            assert files.read_file("a") == b"a"
            waiting = pool.submit(files.read_file, "b")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.05)
        assert waiting.result(timeout=10) == b"b"


def test_a_lent_descriptor_outlives_close(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    before = open_descriptors()
    files = Files(tmp_path, scan(tmp_path))
    files.read_file("b")
    with files.opened("a") as fd:
        closer = threading.Thread(target=files.close)
        closer.start()
        closer.join()
        assert os.pread(fd, 1, 0) == b"a"
        assert open_descriptors() == before + 1
    assert open_descriptors() == before
