"""Bringing a receiver to a state given as plain files: what is fetched, what is reused, what stays, what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from anchors import ORIGIN, BreaksAt, FlipsAByte, FromFolder, Gone, Sizes, bring, wanted_of
from dcr_cli.apply import apply
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State, files_digest, object_digest
from dcr_cli.checkpoint.parts import SHARD, WEIGHT_MAP
from dcr_cli.delta import file_rules
from dcr_cli.durable import NoRoomError
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    IncompleteError,
    LocalError,
    NotFoundError,
    TransportError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.receiver import places
from dcr_cli.receiver.install.install import wanted_in_progress
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.wanted import Wanted, check_wanted, decode_wanted, encode_wanted
from dcr_cli.verify import verify
from faults import PowerLoss, StoppedError, killed_at, stopped_at, watching
from receivers import CONFIG, claim, fresh_copy, make_delta, names_below, tree, write_rich_pair, write_turned_pair
from strategies import INDEX, shard_name, tiny_tensors, write_checkpoint, write_tiny_pair

RANGE = 2000


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that files of tests have several of."""
    monkeypatch.setattr(file_rules, "RANGE_BYTES", RANGE)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_rich_pair(tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="dcr-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def size_of(root: Path) -> int:
    return sum(map(len, tree(root).values()))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def check_at(root: Path, source: Path) -> None:
    """The folder is byte for byte the source, and says so itself."""
    assert tree(root) == tree(source)
    assert verify(root).matches
    check_tidy(root, source)


def check_tidy(root: Path, source: Path) -> None:
    assert tree(root) == tree(source)
    assert set(os.listdir(root / ".dcr")) <= {"lock", "state.json", "state.zst", "link"}


class TestNewFolder:
    def test_that_does_not_exist(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        source = FromFolder(pair[1])
        result = bring(tmp_path / "out", wanted_of(pair[1]), source, jobs=3)
        check_at(tmp_path / "out", pair[1])
        assert (result.mode, result.fetched_bytes, result.reused_bytes) == ("new", size_of(pair[1]), 0)
        assert set(result.files_changed) == set(tree(pair[1]))
        assert len(set(source.asked)) == len(source.asked)
        assert names_below(tmp_path / "out")[0] == ".dcr"
        assert not list(tmp_path.glob(".out*"))

    def test_has_the_modes_of_new_files(self, tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
        before = os.umask(0o027)
        try:
            bring(tmp_path / "out", wanted_of(tiny_pair[1]), FromFolder(tiny_pair[1]))
        finally:
            os.umask(before)
        modes = {path: stat.S_IMODE((tmp_path / "out" / path).stat().st_mode) for path in ("", "config.json")}
        assert modes == {"": 0o750, "config.json": 0o640}

    def test_an_empty_one(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        (tmp_path / "out").mkdir()
        bring(tmp_path / "out", wanted_of(pair[1]), FromFolder(pair[1]))
        check_at(tmp_path / "out", pair[1])

    def test_behind_a_link(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        (tmp_path / "link").symlink_to("out")
        bring(tmp_path / "link", wanted_of(pair[1]), FromFolder(pair[1]))
        assert (tmp_path / "link").is_symlink()
        check_at(tmp_path / "out", pair[1])

    def test_goes_on_after_an_error(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        wanted, broken, source = wanted_of(pair[1]), BreaksAt(pair[1], 4), FromFolder(pair[1])
        with pytest.raises(TransportError):
            bring(tmp_path / "out", wanted, broken)
        assert not (tmp_path / "out").exists()
        result = bring(tmp_path / "out", wanted, source)
        check_at(tmp_path / "out", pair[1])
        assert set(broken.asked) & set(source.asked) == {broken.asked[-1]}
        assert result.reused_bytes == sum(size for _, _, size in broken.asked[:-1])

    def test_begins_anew_for_another_state(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        with pytest.raises(TransportError):
            bring(tmp_path / "out", wanted_of(pair[0]), BreaksAt(pair[0], 4))
        bring(tmp_path / "out", wanted_of(pair[1]), FromFolder(pair[1]))
        check_at(tmp_path / "out", pair[1])

    def test_after_an_apply_to_it_that_was_stopped(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        delta = make_delta(*pair, tmp_path / "delta")
        stopped_at(40, lambda: apply(delta, pair[0], to=tmp_path / "out"))
        assert (tmp_path / ".out.dcr-partial").exists()
        bring(tmp_path / "out", wanted_of(pair[1]), FromFolder(pair[1]))
        check_at(tmp_path / "out", pair[1])
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) & 0o077

    def test_nothing_is_left_where_nothing_was_fetched(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        with pytest.raises(LocalError, match="there is no folder"):
            bring(tmp_path / "no/out", wanted_of(pair[1]), Gone())
        assert sorted(os.listdir(tmp_path)) == ["base", "target"]

    def test_dry_run(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        result = bring(tmp_path / "out", wanted, Gone(), dry_run=True)
        assert (result.dry_run, result.fetched_bytes) == (True, size_of(pair[1]))
        assert sorted(os.listdir(tmp_path)) == ["base", "target"]
        with pytest.raises(TransportError):
            bring(tmp_path / "out", wanted, BreaksAt(pair[1], 4))
        before = names_below(tmp_path)
        result = bring(tmp_path / "out", wanted, Gone(), dry_run=True)
        assert 0 < result.reused_bytes < size_of(pair[1])
        assert names_below(tmp_path) == before


class TestReplace:
    def test_from_another_version(self, pair: tuple[Path, Path]) -> None:
        base, target = pair
        (base / "model.log").write_bytes(b"mine")
        (base / "kept/merges.txt").chmod(0o600)
        inode = (base / "kept/merges.txt").stat().st_ino
        result = bring(base, wanted_of(target), FromFolder(target), known=("old/notes.txt", "../outside"), jobs=3)
        assert tree(base).pop("model.log") == b"mine"
        (base / "model.log").unlink()
        check_at(base, target)
        assert (base / "kept/merges.txt").stat().st_ino == inode
        assert not (base / "old").exists()
        assert result.foreign == ("model.log",)
        assert set(result.files_removed) == {"old/notes.txt", *(shard_name(number, 3) for number in range(3))}
        assert result.reused_bytes == len(b"m")

    def test_what_nobody_names_is_foreign(self, pair: tuple[Path, Path]) -> None:
        result = bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]))
        assert result.foreign == ("old/notes.txt",)
        assert (pair[0] / "old/notes.txt").read_bytes() == b"old"

    def test_the_record_names_what_was_its_own(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        out = tmp_path / "out"
        bring(out, wanted_of(pair[0]), FromFolder(pair[0]))
        bring(out, wanted_of(pair[1]), FromFolder(pair[1]))
        check_at(out, pair[1])

    def test_own_shards(self, tmp_path: Path) -> None:
        _, target = write_tiny_pair(tmp_path)
        sidecars = {path: data for path, data in tree(target).items() if not path.startswith("model")}
        own = write_checkpoint(tmp_path / "own", tiny_tensors()[0], shards=1, index=False, sidecars=sidecars)
        bring(own, wanted_of(target), FromFolder(target))
        check_at(own, target)

    def test_at_it_already(self, pair: tuple[Path, Path]) -> None:
        result = bring(pair[1], wanted_of(pair[1]), Gone())
        assert result.already and not result.files_changed
        check_at(pair[1], pair[1])
        before = names_below(pair[1])
        assert bring(pair[1], wanted_of(pair[1]), Gone()).already
        assert names_below(pair[1]) == before

    def test_the_next_apply_need_not_read_it(self, tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
        delta = make_delta(*tiny_pair, tmp_path / "delta")
        bring(tmp_path / "out", wanted_of(tiny_pair[0]), FromFolder(tiny_pair[0]))
        assert not apply(delta, tmp_path / "out").already
        assert tree(tmp_path / "out") == tree(tiny_pair[1])

    @pytest.mark.parametrize("jobs", [1, 3])
    def test_a_flipped_byte_costs_its_range(self, tmp_path: Path, pair: tuple[Path, Path], jobs: int) -> None:
        out = fresh_copy(pair[1], tmp_path / "out")
        shard = out / shard_name(1, 2)
        flip(shard, RANGE + 7)
        source = FromFolder(pair[1])
        result = bring(out, wanted_of(pair[1]), source, repair=True, jobs=jobs)
        check_at(out, pair[1])
        assert source.asked == [(shard.name, RANGE, RANGE)]
        assert (result.fetched_bytes, result.files_changed) == (RANGE, (shard.name,))

    @pytest.mark.parametrize(
        "damage",
        [
            lambda out: os.truncate(out / shard_name(0, 2), RANGE + 1),
            lambda out: os.truncate(out / shard_name(0, 2), 3),
            lambda out: (out / shard_name(1, 2)).unlink(),
            lambda out: (out / INDEX).unlink(),
            lambda out: (out / INDEX).write_bytes(b"{"),
            lambda out: (out / "config.json").unlink(),
            lambda out: flip(out / shard_name(0, 2), 0),
            lambda out: (out / shard_name(0, 2)).write_bytes(b""),
            lambda out: (out / "kept/merges.txt").write_bytes(b"mm"),
            lambda out: shutil.rmtree(out / "new"),
        ],
    )
    def test_damage(self, tmp_path: Path, pair: tuple[Path, Path], damage: Callable[[Path], object]) -> None:
        out = fresh_copy(pair[1], tmp_path / "out")
        damage(out)
        result = bring(out, wanted_of(pair[1]), FromFolder(pair[1]), repair=True)
        check_at(out, pair[1])
        assert result.reused_bytes > 0

    @pytest.mark.parametrize("name", ["extra.safetensors", "other.safetensors.index.json"])
    def test_an_unknown_shard_is_refused(self, pair: tuple[Path, Path], name: str) -> None:
        (pair[0] / name).write_bytes(b"?")
        before = names_below(pair[0])
        with pytest.raises(WrongBaseError, match="no part of the checkpoint"):
            bring(pair[0], wanted_of(pair[1]), Gone())
        assert names_below(pair[0]) == before
        bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]), known=(name, INDEX, *(map_shards(3))))
        assert not (pair[0] / name).exists()

    def test_shards_without_their_weight_map_are_nobodys(self, pair: tuple[Path, Path]) -> None:
        (pair[0] / INDEX).write_bytes(b"{")
        with pytest.raises(WrongBaseError, match="no part of the checkpoint"):
            bring(pair[0], wanted_of(pair[1]), Gone())
        bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]), known=(*map_shards(3), "old/notes.txt"))
        check_at(pair[0], pair[1])

    def test_a_folder_of_something_else(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home/letter.txt").write_bytes(b"dear")
        with pytest.raises(NotFoundError, match="holds no checkpoint"):
            bring(tmp_path / "home", wanted_of(pair[1]), Gone())
        assert names_below(tmp_path / "home") == ["letter.txt"]

    def test_links_are_replaced_and_not_written_through(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        shutil.copytree(pair[0], blobs)
        for path in tree(pair[0]):
            (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / path).symlink_to(os.path.relpath(blobs / path, (snapshot / path).parent))
        bring(snapshot, wanted_of(pair[1]), FromFolder(pair[1]), known=("old/notes.txt",))
        assert tree(blobs) == tree(pair[0])
        check_at(snapshot, pair[1])
        assert (snapshot / "kept/merges.txt").is_symlink()
        assert not (snapshot / "config.json").is_symlink()

    def test_modes_stay(self, pair: tuple[Path, Path]) -> None:
        (pair[0] / "vocab.txt").chmod(0o640)
        bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]))
        assert stat.S_IMODE((pair[0] / "vocab.txt").stat().st_mode) == 0o640

    def test_files_become_folders(self, tmp_path: Path) -> None:
        base, target = write_turned_pair(tmp_path)
        old = tuple(tree(base))
        bring(base, wanted_of(target), FromFolder(target), known=old)
        check_at(base, target)

    def test_a_foreign_file_in_the_way_of_a_folder(self, pair: tuple[Path, Path]) -> None:
        (pair[0] / "new").write_bytes(b"mine")
        with pytest.raises(WrongBaseError, match="stands where the target has a folder"):
            bring(pair[0], wanted_of(pair[1]), Gone())

    @pytest.mark.parametrize("mine", ["e/mine", "e/.mine", "e/sub/mine", "e/empty/"])
    @pytest.mark.parametrize("dry_run", [True, False])
    def test_what_is_foreign_in_a_folder_that_becomes_a_file(self, tmp_path: Path, mine: str, dry_run: bool) -> None:
        base, target = write_turned_pair(tmp_path)
        old = tuple(tree(base))
        (base / mine).parent.mkdir(exist_ok=True)
        if mine.endswith("/"):
            (base / mine).mkdir()
        else:
            (base / mine).write_bytes(b"mine")
        before = names_below(base)
        with pytest.raises(WrongBaseError, match="stands where the target has a file") as caught:
            bring(base, wanted_of(target), Gone(), known=old, dry_run=dry_run)
        assert caught.value.what == str(base / mine) and caught.value.hint == "move it away"
        assert names_below(base) == before

    def test_dry_run(self, pair: tuple[Path, Path]) -> None:
        before = names_below(pair[0])
        result = bring(pair[0], wanted_of(pair[1]), Gone(), dry_run=True)
        assert names_below(pair[0]) == before
        done = bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]), mode="in-place")
        assert replace(result, dry_run=False, bytes_written=done.bytes_written) == done

    def test_a_config_that_is_no_part_stays(self, tmp_path: Path) -> None:
        base, target = write_tiny_pair(tmp_path)
        (target / "config.json").unlink()
        result = bring(base, wanted_of(target), FromFolder(target))
        assert result.foreign == ("config.json",)
        assert (base / "config.json").exists()

    def test_no_room(self, monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
        monkeypatch.setattr(places, "free_bytes", lambda folder: 5000)
        before = names_below(pair[0])
        with pytest.raises(NoRoomError, match="of room"):
            bring(pair[0], wanted_of(pair[1]), Gone())
        assert names_below(pair[0]) == before

    def test_somebody_has_it(self, pair: tuple[Path, Path]) -> None:
        def meanwhile(kind: str, path: str, other: str) -> None:
            if kind == "rename" and path.endswith("whole-0000002"):
                with pytest.raises(ConflictError, match="another dcr holds it"):
                    bring(pair[0], wanted_of(pair[1]), Gone())

        with watching(meanwhile):
            bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]))

    def test_a_file_that_stays_is_changed_meanwhile(self, pair: tuple[Path, Path]) -> None:
        def meanwhile(kind: str, path: str, other: str) -> None:
            if kind == "rename" and other.endswith("in-progress"):
                (pair[0] / "kept/merges.txt").write_bytes(b"M")

        with watching(meanwhile), pytest.raises(ConflictError, match="changed while reading"):
            bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]))
        open_checkpoint(pair[0])


def map_shards(shards: int) -> tuple[str, ...]:
    return tuple(shard_name(number, shards) for number in range(shards))


class TestFetching:
    def test_a_wrong_range_is_fetched_once_more(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        source = FlipsAByte(pair[1], shard_name(0, 2), 1)
        result = bring(tmp_path / "out", wanted_of(pair[1]), source)
        check_at(tmp_path / "out", pair[1])
        assert len(source.asked) - len(set(source.asked)) == 1
        assert result.fetched_bytes == size_of(pair[1]) + RANGE

    @pytest.mark.parametrize("jobs", [1, 3])
    def test_but_not_twice(self, tmp_path: Path, pair: tuple[Path, Path], jobs: int) -> None:
        source = FlipsAByte(pair[1], shard_name(0, 2), 1 << 30)
        with pytest.raises(DamagedError, match="were fetched 2 times and are other ones"):
            bring(tmp_path / "out", wanted_of(pair[1]), source, jobs=jobs)
        assert not (tmp_path / "out").exists()
        bring(tmp_path / "out", wanted_of(pair[1]), FromFolder(pair[1]))
        check_at(tmp_path / "out", pair[1])

    @pytest.mark.parametrize("more", [-1, 1, 5000])
    def test_other_sizes_than_asked_for(self, pair: tuple[Path, Path], more: int) -> None:
        before = tree(pair[0])
        with pytest.raises(DamagedError, match="other ones"):
            bring(pair[0], wanted_of(pair[1]), Sizes(pair[1], more))
        assert tree(pair[0]) == before
        bring(pair[0], wanted_of(pair[1]), FromFolder(pair[1]), known=("old/notes.txt",))
        check_at(pair[0], pair[1])

    def test_ranges_of_other_content_than_stated(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        lying = replace(wanted, state=State(object_digest(b"?"), wanted.state.files))
        with pytest.raises(DamagedError, match="another content"):
            bring(pair[0], lying, FromFolder(pair[1]))
        assert not (pair[0] / ".dcr").exists()
        with pytest.raises(DamagedError, match="another content"):
            bring(tmp_path / "out", lying, FromFolder(pair[1]))
        assert sorted(os.listdir(tmp_path)) == ["base", "target"]

    def test_files_that_make_no_checkpoint(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        flip(pair[1] / shard_name(0, 2), 0)
        shard = (pair[1] / shard_name(0, 2)).read_bytes()
        ranges = tuple(object_digest(shard[begin : begin + RANGE]) for begin in range(0, len(shard), RANGE))
        files = tuple(replace(file, ranges=ranges) if file.path == shard_name(0, 2) else file for file in wanted.files)
        with pytest.raises(DamagedError, match="shard model-00001"):
            bring(tmp_path / "out", replace(wanted, files=files), FromFolder(pair[1]))

    def test_ranges_of_the_real_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_rules, "RANGE_BYTES", 1 << 26)
        source = write_checkpoint(tmp_path / "source", {"w": ("U8", ((1 << 26) + 5,), bytes((1 << 26) + 5))})
        out = fresh_copy(source, tmp_path / "out")
        flip(out / "model.safetensors", 1 << 26)
        fetcher = FromFolder(source, at_once=1 << 20)
        bring(out, wanted_of(source), fetcher, jobs=2)
        assert [size for _, _, size in fetcher.asked] == [(source / "model.safetensors").stat().st_size - (1 << 26)]
        assert verify(out, against=source).matches


class TestDiskThatFails:
    """What cannot be read where it is, is fetched."""

    @pytest.mark.parametrize("mode", ["replace", "aside"])
    @pytest.mark.parametrize("jobs", [1, 3])
    def test_ranges_that_are_lost(
        self, tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, mode: str, jobs: int
    ) -> None:
        root, source, name = fresh_copy(pair[1], tmp_path / "root"), FromFolder(pair[1]), shard_name(0, 2)
        link = root
        if mode == "aside":
            link = tmp_path / "link"
            link.symlink_to("root")
        (root / "vocab.txt").write_bytes(b"lost")
        with monkeypatch.context() as patched:
            lose(patched, root / name, errno.EIO)
            result = bring(link, wanted_of(pair[1]), source, mode=mode, jobs=jobs, known=(name,))
        assert sorted(path for path, _, _ in source.asked) == [name, "vocab.txt"]
        assert [begin for path, begin, _ in source.asked if path == name] == [RANGE]
        assert result.unreadable == (name,)
        check_at(link.resolve(), pair[1])

    def test_that_fails_between_the_look_and_the_copy(
        self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root, source, name = pair[0], FromFolder(pair[1]), shard_name(0, 2)
        shutil.copytree(pair[1], root, dirs_exist_ok=True)
        wanted = wanted_of(pair[1])
        flip(root / name, 0)

        def fail(kind: str, path: str, other: str) -> None:
            if kind == "create" and "whole-" in path:
                lose(patched, root / name, errno.EIO)

        with monkeypatch.context() as patched, watching(fail):
            bring(root, wanted, source, known=tuple(tree(root)))
        assert sorted(begin for path, begin, _ in source.asked if path == name) == [0, RANGE]
        check_at(root, pair[1])

    def test_what_is_not_the_disk_ends_it(self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Too many open files say nothing of this one."""
        lose(monkeypatch, pair[1] / shard_name(0, 2), errno.ENOMEM)
        with pytest.raises(LocalError, match="cannot be read"):
            bring(pair[1], wanted_of(pair[1]), Gone())


def lose(patched: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Have the second range of a file unreadable."""
    inode, plain = path.stat().st_ino, os.preadv

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == inode and RANGE <= offset < 2 * RANGE:
            raise OSError(number, os.strerror(number))
        return plain(fd, buffers, offset)

    patched.setattr(os, "preadv", read)


def with_file(wanted: Wanted, changed: str, **members: object) -> Wanted:
    """A wanted state in which one file says something else, and that stands by it."""
    rows = [replace(file, **members) if file.path == changed else file for file in wanted.files]  # type: ignore[arg-type]
    files = tuple(sorted(rows, key=lambda file: file.path))
    with suppress(ValueError):
        digest = files_digest((file.path, file.kind, file.blake3) for file in files)
        return replace(wanted, state=State(wanted.state.content, digest), files=files)
    return replace(wanted, files=files)


class TestWanted:
    def test_its_text(self, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        check_wanted(wanted, "it")
        assert decode_wanted(encode_wanted(wanted), "it") == wanted

    @pytest.mark.parametrize(
        ("path", "members", "facts"),
        [
            ("vocab.txt", {"path": "../vocab.txt"}, "unsafe name"),
            ("vocab.txt", {"path": ".dcr/lock"}, "unsafe name"),
            ("vocab.txt", {"path": "/etc/passwd"}, "unsafe name"),
            ("vocab.txt", {"path": "a\\b"}, "unsafe name"),
            ("vocab.txt", {"path": "config.json"}, "canonical order"),
            ("vocab.txt", {"path": "config.json/vocab.txt"}, "as if it were a folder"),
            ("vocab.txt", {"path": "second.bin"}, "by its name"),
            ("vocab.txt", {"path": "second.safetensors"}, "by its name"),
            ("vocab.txt", {"kind": SHARD}, "is no shard"),
            ("vocab.txt", {"kind": WEIGHT_MAP}, "by its name"),
            ("vocab.txt", {"kind": 7}, "by its name"),
            ("vocab.txt", {"size": 3000}, "ranges"),
            ("vocab.txt", {"size": -1}, "ranges"),
            ("vocab.txt", {"ranges": ()}, "ranges"),
            ("vocab.txt", {"blake3": bytes(32)}, "not that of the file"),
            ("vocab.txt", {"blake3": b""}, "not of 32 bytes"),
            (shard_name(0, 2), {"size": 7}, "ranges"),
            (shard_name(0, 2), {"path": "vocab2.txt"}, "is no shard"),
            (INDEX, {"path": "sub/index.json"}, "by its name"),
        ],
    )
    def test_what_is_refused_unseen(
        self, tmp_path: Path, pair: tuple[Path, Path], path: str, members: dict[str, object], facts: str
    ) -> None:
        wanted = with_file(wanted_of(pair[1]), path, **members)
        with pytest.raises(DamagedError, match=facts):
            bring(tmp_path / "out", wanted, Gone())
        assert sorted(os.listdir(tmp_path)) == ["base", "target"]

    def test_a_list_that_is_not_that_of_its_state(self, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        with pytest.raises(DamagedError, match="do not have the files digest"):
            check_wanted(replace(wanted, state=State(wanted.state.content, bytes(32))), "it")
        with pytest.raises(DamagedError, match="is no checkpoint"):
            check_wanted(replace(wanted, files=()), "it")

    def test_patterns_that_leave_its_own_files_out(self, pair: tuple[Path, Path]) -> None:
        with pytest.raises(DamagedError, match="leave out"):
            check_wanted(replace(wanted_of(pair[1]), skipped=("vocab*",)), "it")

    def test_sizes_that_lie(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        wanted = wanted_of(pair[1])
        shard = next(file for file in wanted.files if file.path == shard_name(0, 2))
        assert shard.size % RANGE
        longer = with_file(wanted, shard.path, size=shard.size + 1)

        class Pads(FromFolder):
            def fetch(self, path: str, begin: int, size: int):  # type: ignore[no-untyped-def]
                data = b"".join(super().fetch(path, begin, size - 1 if begin + size > shard.size else size))
                yield data + bytes(size - len(data))

        with pytest.raises(DamagedError):
            bring(tmp_path / "out", longer, Pads(pair[1]))
        assert not (tmp_path / "out").exists()

    def test_modes_and_options(self, pair: tuple[Path, Path]) -> None:
        for manner in ({"mode": "sideways"}, {"keep_previous": True}):
            with pytest.raises(UsageError):
                bring(pair[0], wanted_of(pair[1]), Gone(), **manner)

    def test_a_link_in_a_circle(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        (tmp_path / "circle").symlink_to("circle")
        with pytest.raises(LocalError, match="leads in a circle") as caught:
            bring(tmp_path / "circle", wanted_of(pair[1]), Gone())
        assert "readlink" in str(caught.value.hint)


class TestInProgress:
    """What others are told between the first and the last step of a change, and how it ends."""

    def stopped(self, root: Path, source: Path) -> None:
        """Stop replacing when some files are the new ones."""

        def stop(kind: str, path: str, other: str) -> None:
            if (kind == "rename" and other == str(root / "vocab.txt")) or stop_now:
                stop_now.append(None)
                raise StoppedError

        stop_now: list[None] = []
        with watching(stop), pytest.raises(StoppedError):
            bring(root, wanted_of(source), FromFolder(source), known=("old/notes.txt",))

    def test_readers_are_told(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        delta = make_delta(*pair, tmp_path / "delta")
        self.stopped(pair[0], pair[1])
        # This process, which had it, lives on.
        os.truncate(pair[0] / ".dcr/lock", 0)
        for call in (lambda: open_checkpoint(pair[0]), lambda: apply(delta, pair[0])):
            with pytest.raises(IncompleteError, match="a pull to it was stopped") as caught:
                call()
            assert f"dcr pull {ORIGIN} {pair[0]}" in str(caught.value.hint)
        assert not (pair[0] / "config.json").exists()

    def test_it_is_finished_without_a_remote(self, pair: tuple[Path, Path]) -> None:
        self.stopped(pair[0], pair[1])
        found = wanted_in_progress(pair[0])
        assert found == (wanted_of(pair[1]), ORIGIN)
        result = bring(pair[0], found[0], Gone())
        assert result.recovered and not result.fetched_bytes
        check_at(pair[0], pair[1])
        assert wanted_in_progress(pair[0]) is None

    def test_what_was_staged_is_lost(self, pair: tuple[Path, Path]) -> None:
        self.stopped(pair[0], pair[1])
        (pair[0] / ".dcr/stage/whole-0000006").unlink()
        source = FromFolder(pair[1])
        bring(pair[0], wanted_of(pair[1]), source)
        assert [path for path, _, _ in source.asked] == ["vocab.txt"]
        check_at(pair[0], pair[1])

    def test_another_state_has_to_overtake_it(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        third = fresh_copy(pair[0], tmp_path / "third")
        (third / "vocab.txt").write_bytes(b"third")
        self.stopped(pair[0], pair[1])
        with pytest.raises(IncompleteError, match="a pull to it was stopped"):
            bring(pair[0], wanted_of(third), Gone())
        result = bring(pair[0], wanted_of(third), FromFolder(third), repair=True)
        assert result.recovered
        check_at(pair[0], third)

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_an_apply_that_was_stopped_is_overtaken(self, tmp_path: Path, mode: str) -> None:
        pair = write_rich_pair(tmp_path)
        delta = make_delta(*pair, tmp_path / "delta")
        wanted = wanted_of(pair[0])
        marked = 0
        for number in count(1, 5):
            work = fresh_copy(pair[0], tmp_path / "work")
            if stopped_at(number, lambda work=work: apply(delta, work, mode=mode, jobs=1)):  # type: ignore[misc]
                break
            try:
                open_checkpoint(work)
            except IncompleteError:
                marked += 1
                with pytest.raises(IncompleteError, match="an apply to it was stopped"):
                    bring(work, wanted, Gone())
            bring(work, wanted, FromFolder(pair[0]), repair=True, known=tuple(tree(pair[1])))
            assert tree(work) == tree(pair[0])
            open_checkpoint(work)
        assert marked > 3


class TestNamesThatGo:
    """What lies at a name that goes when a stopped run is gone on with, and is not what went, stays."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        """A receiver at one state, and the other one."""
        base, target = write_rich_pair(tmp_path)
        bring(tmp_path / "root", wanted_of(base), FromFolder(base))
        return tmp_path / "root", target

    def begin(self, root: Path, wanted: Wanted, source: Path, at: Callable[[str, str, str], bool]) -> None:
        """Begin to bring the folder to a wanted state, and stop before a step."""

        def stop(kind: str, path: str, other: str) -> None:
            if stopped or at(kind, path, other):
                stopped.append(None)
                raise StoppedError

        stopped: list[None] = []
        with watching(stop), pytest.raises(StoppedError):
            bring(root, wanted, FromFolder(source))

    @staticmethod
    def put(path: Path, content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    @pytest.mark.parametrize(
        "at",
        [
            lambda kind, path, other: other.endswith("in-progress"),
            lambda kind, path, other: kind == "rename" and path.endswith("root/config.json"),
            lambda kind, path, other: kind == "unlink" and path.endswith("notes.txt"),
            lambda kind, path, other: kind == "rename" and other.endswith("vocab.txt"),
            lambda kind, path, other: kind == "unlink" and path.endswith("held/config.json"),
        ],
        ids=["noted", "marked", "removing", "placing", "ending"],
    )
    @pytest.mark.parametrize("name", ["config.json", "old/notes.txt"])
    def test_another_file(
        self, tmp_path: Path, pair: tuple[Path, Path], at: Callable[[str, str, str], bool], name: str
    ) -> None:
        """Also when that is stopped, at every seventh step."""
        root, target = pair
        (target / "config.json").unlink()
        wanted = wanted_of(target)
        mine = b"new" if name == "old/notes.txt" else CONFIG.upper()
        self.begin(root, wanted, target, at)
        self.put(root / name, mine)
        saved = fresh_copy(root, tmp_path / "saved")
        results: list[InstallResult] = []

        def go_on() -> None:
            results.append(bring(root, wanted, FromFolder(target)))

        for number in count(0, 7):
            fresh_copy(saved, root)
            is_whole = stopped_at(number, go_on)
            if not is_whole:
                go_on()
            [result] = results
            results.clear()
            assert (root / name).read_bytes() == mine
            assert result.foreign == (name,) and name not in result.files_removed
            (root / name).unlink()
            if name == "old/notes.txt":
                (root / "old").rmdir()
            check_tidy(root, target)
            if is_whole:
                break
        assert number

    def test_another_shard_is_refused(self, pair: tuple[Path, Path]) -> None:
        root, target = pair
        wanted, name = wanted_of(target), shard_name(0, 3)
        self.begin(root, wanted, target, lambda kind, path, other: other.endswith("vocab.txt"))
        self.put(root / name, b"mine")
        with pytest.raises(WrongBaseError, match="no part of the checkpoint"):
            bring(root, wanted, Gone())
        assert (root / name).read_bytes() == b"mine"
        (root / name).unlink()
        bring(root, wanted, Gone())
        check_at(root, target)

    def test_a_shard_that_came_before_the_change(self, pair: tuple[Path, Path]) -> None:
        """Until then the checkpoint says itself which shards are its own."""
        root, target = pair
        wanted = wanted_of(target)
        self.begin(root, wanted, target, lambda kind, path, other: other.endswith("in-progress"))
        os.utime(root / shard_name(0, 3), ns=(1, 1))
        bring(root, wanted, Gone())
        check_at(root, target)

    def test_another_shard_is_not_overtaken(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        root, target = pair
        third = fresh_copy(target, tmp_path / "third")
        (third / "vocab.txt").write_bytes(b"third")
        self.begin(root, wanted_of(target), target, lambda kind, path, other: other.endswith("vocab.txt"))
        self.put(root / shard_name(0, 3), b"mine")
        with pytest.raises(WrongBaseError, match="no part of the checkpoint"):
            bring(root, wanted_of(third), Gone(), repair=True)
        assert (root / shard_name(0, 3)).read_bytes() == b"mine"

    def test_what_is_overtaken(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        root, target = pair
        third = fresh_copy(target, tmp_path / "third")
        (third / "vocab.txt").write_bytes(b"third")
        (third / "config.json").unlink()
        self.begin(root, wanted_of(target), target, lambda kind, path, other: other.endswith("vocab.txt"))
        self.put(root / "old/notes.txt", b"new")
        result = bring(root, wanted_of(third), FromFolder(third), repair=True)
        assert result.recovered and result.foreign == ("old/notes.txt",)
        assert tree(root) == {**tree(third), "old/notes.txt": b"new"}

    def test_it_is_overtaken_and_stopped(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        """A config that was held by the run before goes as it would have gone then."""
        root, target = pair
        third = fresh_copy(target, tmp_path / "third")
        (third / "vocab.txt").write_bytes(b"third")
        (third / "config.json").unlink()
        self.begin(root, wanted_of(target), target, lambda kind, path, other: other.endswith("vocab.txt"))
        with watching(lambda kind, path, other: stop_at(other.endswith("vocab.txt"))), pytest.raises(StoppedError):
            bring(root, wanted_of(third), FromFolder(third), repair=True)
        assert bring(root, wanted_of(third), Gone()).foreign == ()
        check_at(root, third)

    def test_a_note_of_names_alone(self, pair: tuple[Path, Path]) -> None:
        """What cannot be recognised is not removed."""
        root, target = pair
        before = tree(root)
        wanted = wanted_of(target)
        self.begin(root, wanted, target, lambda kind, path, other: kind == "unlink" and path.endswith(".safetensors"))
        note = root / ".dcr/journal/wanted"
        state, going, _ = note.read_bytes().split(b"\n", 2)
        text = b"\n".join([state, json.dumps(list(json.loads(going))).encode()])
        note.write_bytes(b"\n".join([text, object_digest(text).hex().encode(), b""]))
        with pytest.raises(WrongBaseError, match="no part of the checkpoint"):
            bring(root, wanted, Gone())
        assert {**tree(root), "config.json": CONFIG} == before
        for number in range(3):
            (root / shard_name(number, 3)).unlink()
        assert bring(root, wanted, Gone()).foreign == ("old/notes.txt",)
        assert tree(root) == {**tree(target), "old/notes.txt": b"old"}

    def test_another_file_while_it_fetches(self, pair: tuple[Path, Path]) -> None:
        root, target = pair
        before = tree(root)

        class Puts(FromFolder):
            def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
                os.utime(root / "old/notes.txt", ns=(1, 1))
                return super().fetch(path, begin, size)

        with pytest.raises(ConflictError, match="where a file of the checkpoint goes"):
            bring(root, wanted_of(target), Puts(target))
        assert tree(root) == before
        open_checkpoint(root)
        assert bring(root, wanted_of(target), Gone()).foreign == ("old/notes.txt",)


def stop_at(is_there: bool) -> None:
    if is_there:
        raise StoppedError


class TestAside:
    def test_the_first_time_and_the_second(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        link, source = tmp_path / "link", FromFolder(pair[0])
        result = bring(link, wanted_of(pair[0]), source, mode="aside")
        assert link.is_symlink()
        check_at(link, pair[0])
        first = os.readlink(link)
        assert (result.mode, result.previous, result.fetched_bytes) == ("aside", None, size_of(pair[0]))
        (link / "mine.txt").write_bytes(b"mine")
        inode = (link / "kept/merges.txt").stat().st_ino
        (link / "kept").chmod(0o750)
        result = bring(link, wanted_of(pair[1]), FromFolder(pair[1]), mode="aside", jobs=3)
        assert os.readlink(link) != first and not (tmp_path / first).exists()
        assert (link / "mine.txt").read_bytes() == b"mine"
        (link / "mine.txt").unlink()
        check_at(link, pair[1])
        assert (link / "kept/merges.txt").stat().st_ino == inode
        assert stat.S_IMODE((link / "kept").stat().st_mode) == 0o750
        assert (result.foreign, result.previous, result.reused_bytes) == (("mine.txt",), None, 1)
        assert bring(link, wanted_of(pair[1]), Gone(), mode="aside").already
        assert sorted(os.listdir(tmp_path)) == sorted(["base", "target", "link", os.readlink(link)])

    def test_keep_previous(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        link = tmp_path / "link"
        bring(link, wanted_of(pair[0]), FromFolder(pair[0]), mode="aside")
        before = link.resolve()
        result = bring(link, wanted_of(pair[1]), FromFolder(pair[1]), mode="aside", keep_previous=True)
        assert result.previous == str(before)
        check_at(before, pair[0])
        # What was kept is turned back to without fetching anything.
        bring(link, wanted_of(pair[0]), Gone(), mode="aside")
        assert link.resolve() == before
        check_at(link, pair[0])

    def test_a_folder_that_somebody_made_stays(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        (tmp_path / "link").symlink_to("base")
        result = bring(tmp_path / "link", wanted_of(pair[1]), FromFolder(pair[1]), mode="aside")
        assert result.previous == str(pair[0])
        assert tree(pair[0])["old/notes.txt"] == b"old"

    def test_no_link(self, pair: tuple[Path, Path]) -> None:
        with pytest.raises(UsageError, match="is not a link"):
            bring(pair[0], wanted_of(pair[1]), Gone(), mode="aside")

    def test_what_is_shared_is_not_written_through(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        """A second name in the stage of a file that has changed since is not the place to write its new bytes to."""
        link, wanted = tmp_path / "link", wanted_of(pair[1])
        bring(link, wanted_of(pair[0]), FromFolder(pair[0]), mode="aside")
        old = link.resolve()

        def stop(kind: str, path: str, other: str) -> None:
            if kind == "sync-folder" and path.endswith("stage"):
                raise StoppedError

        with watching(stop), pytest.raises(StoppedError):
            bring(link, wanted, FromFolder(pair[1]), mode="aside")
        with open(old / "kept/merges.txt", "r+b") as file:
            file.write(b"X")
        bring(link, wanted, FromFolder(pair[1]), mode="aside", keep_previous=True)
        assert (old / "kept/merges.txt").read_bytes() == b"X"
        check_at(link, pair[1])

    def test_dry_run(self, tmp_path: Path, pair: tuple[Path, Path]) -> None:
        link = tmp_path / "link"
        assert bring(link, wanted_of(pair[0]), Gone(), mode="aside", dry_run=True).fetched_bytes == size_of(pair[0])
        assert not link.exists()
        bring(link, wanted_of(pair[0]), FromFolder(pair[0]), mode="aside")
        before = names_below(tmp_path)
        result = bring(link, wanted_of(pair[1]), Gone(), mode="aside", dry_run=True)
        assert names_below(tmp_path) == before
        done = bring(link, wanted_of(pair[1]), FromFolder(pair[1]), mode="aside")
        assert replace(result, dry_run=False, bytes_written=done.bytes_written) == done


class Case:
    """A receiver that is brought from one state to another in one of the ways."""

    def __init__(self, folder: Path, way: str, write: Callable[[Path], tuple[Path, Path]]) -> None:
        self.base, self.target = write(folder)
        self.wanted, self.way = wanted_of(self.target), way
        self.known = tuple(path for path in tree(self.base) if path not in tree(self.target))
        self.work = folder / "work"
        self.asked: list[tuple[str, int, int]] = []

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.asked.clear()
        if self.way in ("replace", "damaged", "aside"):
            fresh_copy(self.base, self.work / "receiver")
        if self.way == "damaged":
            os.truncate(next((self.work / "receiver").glob("*.safetensors")), 5)
        if self.way == "aside":
            (self.work / "link").symlink_to("receiver")
            claim(self.work / "link")

    @property
    def place(self) -> Path:
        return self.work / {"new": "out", "aside": "link", "first": "link"}.get(self.way, "receiver")

    def run(self) -> None:
        fetcher = FromFolder(self.target, asked=self.asked)
        mode = "aside" if self.way in ("aside", "first") else "replace"
        bring(self.place, self.wanted, fetcher, mode=mode, known=self.known)

    def check(self) -> None:
        """It is as it was, at the target, or marked; in the ways that make a new folder, never marked."""
        if self.way in ("new", "first") and not self.place.exists():
            return
        try:
            open_checkpoint(self.place)
        except IncompleteError:
            assert self.way in ("replace", "damaged")
            return
        except DamagedError:
            assert self.way == "damaged" and tree(self.place).keys() == tree(self.base).keys()
            return
        assert tree(self.place) in (tree(self.base), tree(self.target))

    def check_end(self) -> None:
        check_tidy(self.place, self.target)
        left = {self.place.name, os.readlink(self.place)} if self.place.is_symlink() else {self.place.name}
        assert set(os.listdir(self.work)) == left
        # All but the range in flight were fetched once.
        assert len(self.asked) - len(set(self.asked)) <= 1


WAYS = ("new", "replace", "damaged", "aside", "first")


@pytest.mark.parametrize(
    ("way", "write", "apart"),
    [
        ("replace", write_tiny_pair, 1),
        ("aside", write_tiny_pair, 1),
        ("new", write_tiny_pair, 2),
        ("first", write_tiny_pair, 3),
        ("damaged", write_rich_pair, 3),
        ("replace", write_turned_pair, 4),
        ("aside", write_turned_pair, 8),
    ],
)
def test_stopped_at_every_step(place: Path, way: str, write: Callable[[Path], tuple[Path, Path]], apart: int) -> None:
    """Or at some of them, where others have been at all."""
    case = Case(place, way, write)
    for number in count(0, apart):
        case.reset()
        if stopped_at(number, case.run):
            break
        case.check()
        case.run()
        case.check_end()
    case.check_end()
    assert verify(case.place).matches
    assert number > 20


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_every_seventh_step(place: Path, way: str) -> None:
    case = Case(place, way, write_tiny_pair)
    for number in count(0, 7):
        case.reset()
        if killed_at(number, case.run):
            break
        case.check()
        case.run()
        check_tidy(case.place, case.target)


def test_stopped_while_it_recovers(place: Path) -> None:
    case = Case(place, "replace", write_tiny_pair)
    for number in count(1, 13):
        case.reset()
        if stopped_at(number, case.run):
            break
        fresh_copy(case.work, place / "saved")
        for again in count(number % 9, 9):
            fresh_copy(place / "saved", case.work)
            if stopped_at(again, case.run):
                break
            case.check()
            case.run()
            check_tidy(case.place, case.target)


@pytest.mark.parametrize("lost", ["nothing", "names", "some"])
def test_power_is_lost(place: Path, lost: str) -> None:
    case = Case(place, "replace", write_tiny_pair)
    for number in count(0, 4):
        case.reset()
        power = PowerLoss(case.work)
        if power.lost_at(number, case.run):
            break
        (place / "after").mkdir()
        power.survivors(place / "after", lost, number)
        fresh_copy(place / "after", case.work)
        shutil.rmtree(place / "after")
        case.check()
        case.run()
        check_tidy(case.place, case.target)
