"""A receiver's own folder: its lock, its record, and what limits of the system do to an apply."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType
from typing import Any, ClassVar

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.durable import open_folder
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    IncompleteError,
    LocalError,
    NotFoundError,
    WrongBaseError,
)
from dcr_cli.locking import lock
from dcr_cli.process import signals_raised
from dcr_cli.receiver.marker import Marker, decode_marker, encode_marker
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import Record, read_record
from dcr_cli.stopping import Stopped
from dcr_cli.verify import verify
from faults import StoppedError, in_child, watching
from receivers import fresh_copy, make_delta, names_below, state_of, tree, write_rich_pair
from strategies import INDEX, tensor_of, tiny_tensors, with_changes, write_checkpoint, write_tiny_pair

Folders = tuple[Path, Path, Path]


@pytest.fixture
def tiny(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> Folders:
    """A receiver at the base, its target, and the delta."""
    base, target = tiny_pair
    delta = make_delta(base, target, tmp_path / "delta")
    return fresh_copy(base, tmp_path / "receiver"), target, delta


class TestRecordOfWhatIsThereAlready:
    """A checkpoint that an apply finds at the target gets the record that the apply would have left."""

    @pytest.fixture(params=["replace", "in-place", "aside"])
    def copy(self, request: pytest.FixtureRequest, tiny: Folders, tmp_path: Path) -> tuple[str, Path, Path]:
        """A way, a full copy of the target, and what an apply is given to find it."""
        _, target, _ = tiny
        folder = fresh_copy(target, tmp_path / "copy")
        (tmp_path / "link").symlink_to("copy")
        return request.param, folder, tmp_path / "link" if request.param == "aside" else folder

    def test_verify_needs_nothing_else(self, tiny: Folders, copy: tuple[str, Path, Path]) -> None:
        mode, folder, checkpoint = copy
        (folder / "mine.txt").write_text("mine")
        with pytest.raises(NotFoundError) as error:
            verify(folder)
        assert "--delta DELTA" in str(error.value.hint)
        assert apply(tiny[2], checkpoint, mode=mode, dry_run=True).already
        assert ".dcr" not in os.listdir(folder)
        assert apply(tiny[2], checkpoint, mode=mode).foreign == ("mine.txt",)
        assert verify(folder, skip=["mine.txt"]).matches
        names = names_below(folder)
        before = {path: path.stat().st_mtime_ns for path in (folder / ".dcr").iterdir() if path.name != "lock"}
        os.utime(folder / "config.json")
        assert apply(tiny[2], checkpoint, mode=mode).already
        assert names_below(folder) == names
        assert before.keys() == {path for path in (folder / ".dcr").iterdir() if path.name != "lock"}
        with (folder / "config.json").open("ab") as file:
            file.write(b" ")
        assert [sidecar.path for sidecar in verify(folder, skip=["mine.txt"]).sidecars] == ["config.json"]

    def test_where_it_cannot_be_written_there_is_none(self, tiny: Folders, copy: tuple[str, Path, Path]) -> None:
        mode, folder, checkpoint = copy

        def refuse(kind: str, path: str, other: str) -> None:
            if "state." in path:
                raise LocalError(path, "cannot be written")

        with watching(refuse):
            assert apply(tiny[2], checkpoint, mode=mode).already
        assert ".dcr" not in os.listdir(folder)

    def test_stopped_at_any_step(self, tiny: Folders, copy: tuple[str, Path, Path]) -> None:
        mode, folder, checkpoint = copy
        for last in count(1):
            fresh_copy(tiny[1], folder)
            steps = count(1)

            def stop(kind: str, path: str, other: str, steps: Iterator[int] = steps, last: int = last) -> None:
                if next(steps) >= last:
                    raise StoppedError

            with watching(stop), suppress(StoppedError):
                apply(tiny[2], checkpoint, mode=mode)
                break
            with suppress(NotFoundError):
                assert verify(folder).matches
            assert apply(tiny[2], checkpoint, mode=mode).already
            assert verify(folder).matches
            assert tree(folder) == tree(tiny[1])
        assert last > 10


class TestAFolderThatMayNotBeChanged:
    """A dry run refuses it in the words of a run; at the target, neither has to change anything."""

    def run_as_other(self, delta: Path, receiver: Path, text: str, *, dry_run: bool) -> int:
        """Apply as a user who may not; `text` is in the refusal, if there is to be one."""
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        receiver.chmod(0o755)
        _open_to_all(receiver)

        def as_other() -> None:
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(DcrError) if text else nullcontext() as error:
                apply(delta, receiver, dry_run=dry_run)
            if error is not None:
                assert text in f"{error.value} {error.value.hint}"

        return in_child(as_other)

    @pytest.mark.parametrize("dry_run", [True, False])
    @pytest.mark.parametrize("has_record", [True, False])
    def test_at_the_base(self, tiny: Folders, *, dry_run: bool, has_record: bool) -> None:
        receiver, _, delta = tiny
        if has_record:
            (receiver / ".dcr").mkdir()
        text = "receiver: is a folder in which this process may not change names run as a user who may"
        assert self.run_as_other(delta, receiver, text, dry_run=dry_run) == 0

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_at_the_target(self, tiny: Folders, *, dry_run: bool) -> None:
        receiver, target, delta = tiny
        fresh_copy(target, receiver)
        assert self.run_as_other(delta, receiver, "", dry_run=dry_run) == 0
        assert ".dcr" not in os.listdir(receiver)

    def test_closed_to_this_user(self, tiny: Folders) -> None:
        receiver, _, delta = tiny
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        _open_to_all(receiver)
        receiver.chmod(0o700)

        def as_other() -> None:
            os.setuid(65534)
            with pytest.raises(LocalError) as error:
                verify(receiver, delta=delta)
            assert error.value.what == str(receiver)
            assert str(error.value.hint).endswith(f"chmod a+rx {receiver}")

        assert in_child(as_other) == 0


def _interrupted_at(number: int, run: Callable[[], object]) -> bool:
    """Run with an interrupt before instruction `number` of the modules that take locks; whether `run` ended before."""
    steps = count()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if "__del__" in (frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back is not None else ""):
            # Python lets nothing out of there.
            return None
        frame.f_trace_opcodes = frame.f_globals["__name__"] in ("dcr_cli.locking", "dcr_cli.receiver.receiver")
        if event == "opcode" and next(steps) == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        run()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


class TestLock:
    def test_one_at_a_time(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        (receiver / ".dcr").mkdir()
        with open_folder(receiver / ".dcr") as home, lock(home, "lock"):
            with pytest.raises(ConflictError) as error:
                apply(delta, receiver)
            assert f"process {os.getpid()} on {socket.gethostname()}" in str(error.value)
            assert error.value.retryable
        apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_readers_take_none(self, tiny: Folders) -> None:
        receiver, _, _ = tiny
        with open_folder(receiver) as home, lock(home, "lock.txt"):
            open_checkpoint(receiver)

    def test_readers_see_that_it_is_held(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        seen = []

        def read(kind: str, path: str, other: str) -> None:
            if (receiver / ".dcr/in-progress").exists():
                with pytest.raises(IncompleteError) as error:
                    verify(receiver, against=target)
                seen.append(error.value.facts)

        with watching(read):
            apply(delta, receiver)
        assert set(seen) == {f"incomplete: an apply to it is running, process {os.getpid()}"}

    def test_it_dies_with_its_process(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            folder = open_folder(receiver)
            folder.make_folder(".dcr")
            _held = lock(folder.open_folder(".dcr"), "lock")
            os.write(go, b"x")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        with pytest.raises(ConflictError):
            apply(delta, receiver)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(ConflictError):
            apply(delta, receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        apply(delta, receiver)
        assert tree(receiver) == tree(target)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_an_interrupt_anywhere_leaves_none(self, tmp_path: Path, is_there: bool) -> None:
        """Whoever uses the library and goes on after Ctrl-C can take it again."""
        if is_there:
            (tmp_path / ".dcr").mkdir()

        def open_and_close() -> None:
            with open_folder(tmp_path) as root, Receiver(root):
                pass

        for number in count():
            if _interrupted_at(number, open_and_close):
                break
            open_and_close()
            shutil.rmtree(tmp_path / ".dcr", ignore_errors=True)
            if is_there:
                (tmp_path / ".dcr").mkdir()
        assert number > 100

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
    def test_a_mount_without_locks(self, tiny: Folders, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        receiver, _, delta = tiny
        names = names_below(receiver)

        def refuse(fd: int, operation: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(LocalError, match="gives no locks"):
            apply(delta, receiver)
        assert names_below(receiver) == names
        # What is not its own stays.
        (receiver / ".dcr").mkdir()
        (receiver / ".dcr/lock").touch()
        with pytest.raises(LocalError, match="gives no locks"):
            apply(delta, receiver)
        assert names_below(receiver) == sorted([*names, ".dcr", ".dcr/lock"])

    def test_a_mount_that_grants_a_lock_twice(self, tiny: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seen on one host, because the holder wrote which process it is; dead holders do not count."""
        receiver, target, delta = tiny
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            folder = open_folder(receiver)
            folder.make_folder(".dcr")
            _held = lock(folder.open_folder(".dcr"), "lock")
            os.write(go, b"x")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        with pytest.raises(ConflictError, match=f"process {child}"):
            apply(delta, receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_a_holder_that_lives_on(self, tiny: Folders, tmp_path: Path) -> None:
        """It is no holder any more, for other processes too."""
        receiver, target, delta = tiny
        apply(delta, receiver)
        assert (receiver / ".dcr/lock").read_bytes() == b""
        assert in_child(lambda: apply(delta, receiver)) == 0
        assert tree(receiver) == tree(target)

    def test_a_process_number_used_again(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        (receiver / ".dcr").mkdir()
        (receiver / ".dcr/lock").write_text(f"1 12345@another-boot {socket.gethostname()}\n")
        apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_a_lock_file_that_was_removed_meanwhile(self, tiny: Folders) -> None:
        receiver, _, _ = tiny
        (receiver / ".dcr").mkdir()
        with open_folder(receiver / ".dcr") as home:
            opened = 0

            def remove(kind: str, path: str, other: str) -> None:
                nonlocal opened
                opened += kind == "create"

            flock = fcntl.flock

            def remove_first(fd: int, operation: int) -> None:
                if opened == 1:
                    os.unlink(receiver / ".dcr/lock")
                flock(fd, operation)

            with pytest.MonkeyPatch.context() as patch, watching(remove):
                patch.setattr(fcntl, "flock", remove_first)
                with lock(home, "lock"):
                    assert opened == 2
                    with pytest.raises(ConflictError):
                        lock(home, "lock")


class TestTwoStart:
    """Another process makes or removes the state folder at the worst time: that is no error."""

    def at(self, step: tuple[str, str], act: Callable[[], object]) -> Callable[[str, str, str], None]:
        todo = [act]

        def hook(kind: str, path: str, other: str) -> None:
            if kind == step[0] and path.endswith(step[1]) and todo:
                todo.pop()()

        return hook

    def test_it_is_made_by_another(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        with watching(self.at(("mkdir", "/.dcr"), lambda: (receiver / ".dcr").mkdir())):
            apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_it_is_removed_by_another(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        with watching(self.at(("create", "/.dcr/lock"), lambda: (receiver / ".dcr").rmdir())):
            apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_it_is_used_by_another(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        fresh_copy(target, receiver)
        with watching(self.at(("rmdir", "/.dcr"), lambda: (receiver / ".dcr/lock").touch())):
            assert apply(delta, receiver).already
        shutil.rmtree(receiver / ".dcr")
        with watching(self.at(("rmdir", "/.dcr"), lambda: shutil.rmtree(receiver / ".dcr"))):
            assert apply(delta, receiver).already


class TestRecord:
    @pytest.fixture
    def settled(self, tiny: Folders, monkeypatch: pytest.MonkeyPatch) -> Folders:
        """A receiver at the target whose record counts, as it does two seconds after the last change."""
        receiver, _, delta = tiny
        apply(delta, receiver)
        monkeypatch.setattr("dcr_cli.receiver.record.SETTLE_NS", 0)
        return tiny

    def read_bytes(self, receiver: Path, delta: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        """How many bytes of shards an apply reads to see that nothing is to be done."""
        total = 0
        preadv = os.preadv

        def add_up(fd: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal total
            size = preadv(fd, buffers, offset)
            total += size if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors") else 0
            return size

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", add_up)
            assert apply(delta, receiver).already
        return total

    def test_it_saves_reading(self, settled: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        receiver, _, delta = settled
        payload_bytes = sum(path.stat().st_size for path in delta.glob("payloads/*"))
        assert self.read_bytes(receiver, delta, monkeypatch) <= 2 * payload_bytes
        for spoil in (
            lambda home: (home / "state.json").write_text(""),
            lambda home: (home / "state.json").write_text((home / "state.json.old").read_text()[:100]),
            lambda home: (home / "state.json").write_text((home / "state.json.old").read_text().replace("1", "2")),
            lambda home: (home / "state.zst").write_bytes(b"x"),
            lambda home: (home / "state.zst").unlink(),
            lambda home: shutil.rmtree(home),
        ):
            home = receiver / ".dcr"
            saved = fresh_copy(home, receiver.parent / "saved")
            shutil.copy(home / "state.json", home / "state.json.old")
            spoil(home)
            assert self.read_bytes(receiver, delta, monkeypatch) > 4 * 64 * 64 * 2
            shutil.rmtree(home, ignore_errors=True)
            shutil.copytree(saved, home)

    def test_two_seconds_have_to_pass(self, tiny: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        receiver, _, delta = tiny
        apply(delta, receiver)
        assert self.read_bytes(receiver, delta, monkeypatch) > 4 * 64 * 64 * 2

    def test_a_run_that_reads_all_renews_it(self, tiny: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once, and then there is nothing to write."""
        receiver, _, delta = tiny
        apply(delta, receiver)
        settled = 300_000_000
        monkeypatch.setattr("dcr_cli.receiver.record.SETTLE_NS", settled)
        time.sleep(1.2 * settled / 1e9)
        written: list[str] = []
        with watching(lambda kind, path, other: written.extend([path] * (kind == "rename"))):
            assert self.read_bytes(receiver, delta, monkeypatch) > 4 * 64 * 64 * 2
            assert [os.path.basename(path) for path in written] == ["state.zst.new", "state.json.new"]
            payload_bytes = sum(path.stat().st_size for path in delta.glob("payloads/*"))
            assert self.read_bytes(receiver, delta, monkeypatch) <= 2 * payload_bytes
        assert len(written) == 2

    def test_files_beside_the_shards_may_be_new(self, tiny: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are always read; `config.json` gets its name just before the record is written."""
        receiver, _, delta = tiny
        settled = 300_000_000
        monkeypatch.setattr("dcr_cli.receiver.record.SETTLE_NS", settled)

        def wait(kind: str, path: str, other: str) -> None:
            if kind == "rename" and path.endswith("000000.commit"):
                time.sleep(1.2 * settled / 1e9)

        with watching(wait):
            apply(delta, receiver)
        record = _record_of(receiver)
        assert record is not None
        assert record.is_current(open_checkpoint(receiver).identities)
        assert self.read_bytes(receiver, delta, monkeypatch) < 4 * 64 * 64 * 2

    def test_any_changed_shard_ends_it(self, settled: Folders) -> None:
        receiver, _, _ = settled
        record = _record_of(receiver)
        assert record is not None
        identities = open_checkpoint(receiver).identities
        assert record.is_current(identities)
        for path in [path for path in tree(receiver) if path.endswith(".safetensors")]:
            before = (receiver / path).stat()
            os.utime(receiver / path, ns=(before.st_atime_ns, before.st_mtime_ns))
            changed = open_checkpoint(receiver).identities[path]
            assert not record.is_current({**identities, path: changed})

    def test_a_copy_of_it_does_not_count(self, settled: Folders, tmp_path: Path) -> None:
        receiver, _, delta = settled
        other = fresh_copy(receiver, tmp_path / "other")
        shard = other / "model-00001-of-00002.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        with pytest.raises(WrongBaseError):
            apply(delta, other)

    def test_it_names_the_state(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        result = apply(delta, receiver)
        record = _record_of(receiver)
        assert record is not None
        assert record.state == result.target
        assert [row.name for row in record.tensors] == sorted(open_checkpoint(target).by_name)
        assert {file.path for file in record.files} == set(tree(target))

    def test_nothing_in_it_is_a_shard(self, tiny: Folders) -> None:
        receiver, _, delta = tiny
        seen: list[str] = []
        with watching(lambda kind, path, other: seen.append(path)):
            apply(delta, receiver)
        inside = [path for path in seen if "/.dcr/" in path]
        assert inside
        assert not [path for path in inside if path.endswith(".safetensors")]


class TestReaders:
    """Whoever may read a checkpoint may see whether it is complete; what is staged is the owner's alone."""

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
    @pytest.mark.parametrize(("way", "mask"), [("replace", 0o022), ("replace", 0o077), ("aside", 0o022), ("to", 0o022)])
    def test_another_user(self, way: str, mask: int) -> None:
        with TemporaryDirectory(prefix="dcr-test-") as folder:
            root = Path(folder)
            root.chmod(0o755)
            base, target = write_rich_pair(root)
            delta = make_delta(base, target, root / "delta")
            found = {"replace": base, "aside": root / "link", "to": root / "out"}[way]
            (root / "link").symlink_to("base")
            (base / ".dcr").mkdir(mode=0o700)
            before = os.umask(mask)
            try:
                with watching(_stop_when(base / ".dcr/held/config.json")), suppress(StoppedError):
                    apply(delta, found if way == "aside" else base, to=found if way == "to" else None, **_mode(way))
            finally:
                os.umask(before)

            def read() -> None:
                os.setgroups([])
                os.setgid(2345)
                os.setuid(1234)
                verify(found, against=target)

            assert in_child(read) == (4 if way == "replace" else 0)
            if way == "replace":
                assert apply(delta, base).recovered
                assert in_child(read) == 0
            assert {path.name: path.stat().st_mode & 0o77 for path in (found / ".dcr").iterdir()}["lock"] == 0

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
    @pytest.mark.parametrize("mask", [0o022, 0o077])
    def test_the_record(self, mask: int) -> None:
        with TemporaryDirectory(prefix="dcr-test-") as folder:
            root = Path(folder)
            root.chmod(0o755)
            base, target = write_tiny_pair(root)
            delta = make_delta(base, target, root / "delta")
            before = os.umask(mask)
            try:
                apply(delta, base)
            finally:
                os.umask(before)

            def read() -> None:
                os.setgid(2345)
                os.setuid(1234)
                assert verify(base).matches

            assert in_child(read) == 0
            (base / ".dcr/state.json").chmod(0o600)
            assert in_child(read) == 9
            (base / ".dcr").chmod(0o700)
            assert in_child(read) == 9

    @pytest.mark.parametrize("mask", [0o022, 0o077])
    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o600, 0o444])
    def test_as_much_of_the_record_as_of_the_files(self, tiny: Folders, mode: int, mask: int) -> None:
        receiver, _, delta = tiny
        (receiver / "tokenizer/vocab.txt").chmod(mode)
        before = os.umask(mask)
        try:
            apply(delta, receiver)
        finally:
            os.umask(before)
        for name in ("state.json", "state.zst"):
            assert (receiver / ".dcr" / name).stat().st_mode & 0o777 == 0o600 | mode & 0o44

    @pytest.mark.parametrize("mode", [0o755, 0o750, 0o700])
    def test_no_more_than_the_checkpoint(self, tiny: Folders, mode: int) -> None:
        receiver, _, delta = tiny
        receiver.chmod(mode)
        seen: dict[str, int] = {}

        def look(kind: str, path: str, other: str) -> None:
            for name in ("stage", "journal", "held"):
                if (receiver / ".dcr" / name).exists():
                    seen[name] = (receiver / ".dcr" / name).stat().st_mode & 0o777

        with watching(look):
            apply(delta, receiver)
        assert (receiver / ".dcr").stat().st_mode & 0o777 == mode
        assert seen == dict.fromkeys(("stage", "journal", "held"), 0o700)


def _mode(way: str) -> dict[str, Any]:
    return {"mode": "aside"} if way == "aside" else {}


def _stop_when(path: Path) -> Callable[[str, str, str], None]:
    def stop(kind: str, at: str, other: str) -> None:
        if path.exists():
            raise StoppedError

    return stop


class TestChangedMeanwhile:
    """Another process changes a file after it was read: the change stops, or nothing is said about that file."""

    KEPT, CHANGED = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Folders:
        """A receiver with one shard to be changed and one to be kept, its target, and the delta."""
        old = {f"w{number}": tensor_of("U8", (5_000,), number) for number in range(2)}
        files = {"config.json": b"{}", "notes.txt": b"n"}
        base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars=files)
        new = old | {"w0": with_changes(old["w0"], [1, 2])}
        target = write_checkpoint(tmp_path / "target", new, shards=2, sidecars=files)
        delta = make_delta(base, target, tmp_path / "delta")
        return fresh_copy(base, tmp_path / "receiver"), target, delta

    def flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    def at(self, step: str, act: Callable[[], object]) -> Callable[[str, str, str], None]:
        """A hook that acts once, before the first rename of a path that ends so."""
        todo = [act]

        def hook(kind: str, path: str, other: str) -> None:
            if kind == "rename" and (path.endswith(step) or other.endswith(step)) and todo:
                todo.pop()()

        return hook

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    @pytest.mark.parametrize("name", [KEPT, CHANGED, "config.json", "notes.txt"])
    def test_before_the_marker(self, pair: Folders, mode: str, name: str) -> None:
        receiver, _, delta = pair
        names = names_below(receiver)
        hook = self.at("in-progress.new", lambda: self.flip(receiver / name))
        with watching(hook), pytest.raises(ConflictError, match="changed while reading"):
            apply(delta, receiver, mode=mode)
        assert names_below(receiver) == names
        self.flip(receiver / name)
        open_checkpoint(receiver)
        assert not apply(delta, receiver, mode=mode).recovered

    @pytest.mark.parametrize("name", [KEPT, "config.json", "notes.txt"])
    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_after_the_marker(self, pair: Folders, mode: str, name: str) -> None:
        """What is there at the end is read again before anything is said about it."""
        receiver, target, delta = pair
        where = ".dcr/held/config.json" if name == "config.json" else name
        hook = self.at("000000.done", lambda: self.flip(receiver / where))
        with watching(hook), pytest.raises(ConflictError, match="changed while"):
            apply(delta, receiver, mode=mode)
        with pytest.raises(IncompleteError):
            open_checkpoint(receiver)
        with pytest.raises((DamagedError, ConflictError), match=r"is not what it was to become|changed since"):
            apply(delta, receiver, mode=mode)
        self.flip(receiver / name)
        assert apply(delta, receiver, mode=mode).recovered
        assert tree(receiver) == tree(target)
        record = _record_of(receiver)
        assert record is not None
        assert record.identities == open_checkpoint(receiver).identities

    @pytest.mark.parametrize("step", ["in-progress.new", "held/config.json"])
    def test_another_name_is_not_written_through(self, pair: Folders, tmp_path: Path, step: str) -> None:
        receiver, target, delta = pair
        other = tmp_path / "other"
        before = (receiver / self.CHANGED).read_bytes()
        hook = self.at(step, lambda: os.link(receiver / self.CHANGED, other))
        with watching(hook), pytest.raises(ConflictError):
            apply(delta, receiver, mode="in-place")
        assert other.read_bytes() == before
        other.unlink()
        apply(delta, receiver, mode="in-place")
        assert tree(receiver) == tree(target)


class TestFinishing:
    """What a stopped run had done already is not done twice."""

    def stop_at(self, end: str, run: Callable[[], object]) -> None:
        def hook(kind: str, path: str, other: str) -> None:
            if kind == "rename" and other.endswith(end):
                raise StoppedError

        with watching(hook), pytest.raises(StoppedError):
            run()

    def test_a_weight_map_grows_once(self, tmp_path: Path) -> None:
        old = {f"w{number}": tensor_of("U8", (50,), number) for number in range(2)}
        new = old | {"x": tensor_of("U8", (70,), 9)}
        config = {"config.json": b"{}"}
        base = write_checkpoint(tmp_path / "base", old, shards=1, sidecars=config)
        delta = make_delta(base, write_checkpoint(tmp_path / "target", new, shards=1, sidecars=config), tmp_path / "d")
        whole = write_checkpoint(tmp_path / "whole", old, shards=2, sidecars=config)
        index = json.loads((whole / INDEX).read_text())
        (whole / INDEX).write_text(json.dumps({"metadata": {"total_size": 100}, **index}))
        stopped = fresh_copy(whole, tmp_path / "stopped")
        apply(delta, whole)
        assert json.loads((whole / INDEX).read_text())["metadata"]["total_size"] == 170
        self.stop_at("stopped/config.json", lambda: apply(delta, stopped))
        assert apply(delta, stopped).recovered
        assert tree(stopped) == tree(whole)

    def test_what_is_locked_for_something_else_can_be_finished(self, tiny: Folders) -> None:
        root, target, delta = tiny

        def stop(kind: str, path: str, other: str) -> None:
            if kind == "sync-folder" and path == str(root) and (root / ".dcr/in-progress").exists():
                raise StoppedError

        with pytest.raises(StoppedError), watching(stop):
            apply(delta, root)
        with open_folder(root) as folder, Receiver(folder):
            pass
        assert apply(delta, root).recovered
        assert tree(root) == tree(target)

    def test_modes_stay(self, tiny: Folders) -> None:
        receiver, target, delta = tiny
        names = {path.name for path in receiver.iterdir()}
        for name in names:
            (receiver / name).chmod(0o600)
        self.stop_at("model-00001-of-00002.safetensors", lambda: apply(delta, receiver))
        assert not (receiver / "config.json").exists()
        apply(delta, receiver)
        assert tree(receiver) == tree(target)
        assert {(receiver / name).stat().st_mode & 0o777 for name in names} == {0o600}


class TestPutThereSinceItStopped:
    """What somebody puts into a checkpoint after an apply to it was stopped is neither removed nor replaced."""

    BASE: ClassVar = {"config.json": b"{}", "old.txt": b"old", "notes.txt": b"1", "d/x.json": b"x"}
    TARGET: ClassVar = {"config.json": b"{}", "notes.txt": b"2", "d": b"a file now"}
    # Before anything is changed, and when all but the files beside the shards is done.
    STEPS = ("held/config.json", "000000.done")

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Folders:
        old, new = tiny_tensors()
        base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars=self.BASE)
        target = write_checkpoint(tmp_path / "target", new, shards=1, index=False, sidecars=self.TARGET)
        return fresh_copy(base, tmp_path / "receiver"), target, make_delta(base, target, tmp_path / "delta")

    def stop(self, receiver: Path, delta: Path, step: str, mode: str) -> None:
        def hook(kind: str, path: str, other: str) -> None:
            if kind == "rename" and other.endswith(step):
                raise StoppedError

        with watching(hook), pytest.raises(StoppedError):
            apply(delta, receiver, mode=mode)
        with pytest.raises(IncompleteError):
            open_checkpoint(receiver)

    def put(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    @pytest.mark.parametrize("step", STEPS)
    def test_where_the_delta_removes_a_file(self, pair: Folders, step: str, mode: str) -> None:
        receiver, target, delta = pair
        self.stop(receiver, delta, step, mode)
        self.put(receiver / "old.txt", b"mine")
        result = apply(delta, receiver, mode=mode)
        assert result.recovered and result.foreign == ("old.txt",)
        assert tree(receiver) == tree(target) | {"old.txt": b"mine"}
        record = _record_of(receiver)
        assert record is not None and {file.path for file in record.files} == set(tree(target))

    @pytest.mark.parametrize("step", STEPS)
    def test_the_base_file_put_back_is_removed(self, pair: Folders, step: str) -> None:
        receiver, target, delta = pair
        self.stop(receiver, delta, step, "replace")
        self.put(receiver / "old.txt", b"old")
        assert apply(delta, receiver).foreign == ()
        assert tree(receiver) == tree(target)

    def test_at_the_last_moment_of_the_first_run(self, pair: Folders) -> None:
        receiver, target, delta = pair

        def hook(kind: str, path: str, other: str) -> None:
            if kind == "rename" and other.endswith("held/config.json"):
                (receiver / "old.txt").write_bytes(b"mine")

        with watching(hook):
            result = apply(delta, receiver)
        assert not result.recovered and result.foreign == ("old.txt",)
        assert tree(receiver) == tree(target) | {"old.txt": b"mine"}

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    @pytest.mark.parametrize(
        ("step", "name", "hint"),
        [
            *((step, name, "move it away") for step in STEPS for name in ("notes.txt", "d/mine.txt", "d/x.json")),
            *((step, INDEX, "move it away to keep it") for step in STEPS),
            ("000000.done", "model-00001-of-00002.safetensors", "move it away to keep it"),
        ],
    )
    def test_what_is_in_the_way_is_refused(self, pair: Folders, step: str, name: str, hint: str, mode: str) -> None:
        receiver, target, delta = pair
        self.stop(receiver, delta, step, mode)
        self.put(receiver / name, b"mine")
        before = names_below(receiver), tree(receiver)
        with pytest.raises(WrongBaseError) as caught:
            apply(delta, receiver, mode=mode)
        assert caught.value.what == str(receiver / name) and caught.value.hint == hint
        assert (names_below(receiver), tree(receiver)) == before
        (receiver / name).unlink()
        apply(delta, receiver, mode=mode)
        assert tree(receiver) == tree(target)

    def test_a_config(self, pair: Folders) -> None:
        receiver, target, delta = pair
        self.stop(receiver, delta, "000000.done", "replace")
        self.put(receiver / "config.json", b"mine")
        with pytest.raises(WrongBaseError, match=r"config\.json: was put there since the change began"):
            apply(delta, receiver)
        (receiver / "config.json").unlink()
        apply(delta, receiver)
        assert tree(receiver) == tree(target)

    def test_a_config_that_is_changed_before_it_is_put_away(self, pair: Folders) -> None:
        receiver, target, delta = pair
        self.stop(receiver, delta, "held/config.json", "replace")
        self.put(receiver / "config.json", b"mine")
        with pytest.raises(ConflictError, match=r"config\.json: was changed since the change began"):
            apply(delta, receiver)
        assert (receiver / "config.json").read_bytes() == b"mine"
        self.put(receiver / "config.json", b"{}")
        apply(delta, receiver)
        assert tree(receiver) == tree(target)


def test_markers() -> None:
    marker = Marker(
        (b"c" * 32,),
        ("/a/d\u00e9lta \udcff",),
        State(b"1" * 32, b"2" * 32),
        State(b"3" * 32, b"4" * 32),
        "m",
        True,
        b"5" * 32,
    )
    assert decode_marker(encode_marker(replace(marker, deltas=("/a/d\u00e9lta",))), "it").deltas == ("/a/d\u00e9lta",)
    # A path that is not UTF-8 is only shown.
    assert decode_marker(encode_marker(marker), "it").target == marker.target
    assert json.loads(encode_marker(replace(marker, deltas=("x",))))["format"] == 1


class TestLimits:
    """What the system refuses, met for real."""

    def test_a_limit_on_file_sizes(self, tmp_path: Path) -> None:
        """ulimit -f: the shard does not fit, nothing has changed, and later it works."""
        old = {"w": tensor_of("U8", (300_000,))}
        base = write_checkpoint(tmp_path / "base", old)
        target = write_checkpoint(tmp_path / "target", {"w": with_changes(old["w"], [7])})
        delta = make_delta(base, target, tmp_path / "delta")
        before, names = tree(base), names_below(base)

        def limited() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            apply(delta, base)

        assert in_child(limited) == 9
        assert tree(base) == before
        assert names_below(base) == names
        apply(delta, base)
        assert tree(base) == tree(target)

    @pytest.mark.parametrize("order", [(1, 300), (300, 1), (300, 300)])
    def test_a_limit_that_some_shards_exceed(self, tmp_path: Path, order: tuple[int, ...]) -> None:
        """Going in turn helps against a quota, but not against this; nothing has changed then."""
        old = {f"w{number}": tensor_of("U8", (1_000 * size,), number) for number, size in enumerate(order)}
        new = {name: with_changes(tensor, [7]) for name, tensor in old.items()}
        base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars={"config.json": b"{}"})
        target = write_checkpoint(tmp_path / "target", new, shards=2, sidecars={"config.json": b"{}"})
        delta = make_delta(base, target, tmp_path / "delta")
        before, names = tree(base), names_below(base)

        def limited() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            apply(delta, base)

        assert in_child(limited) == 9
        assert tree(base) == before
        assert names_below(base) == names
        apply(delta, base)
        assert tree(base) == tree(target)

    @pytest.mark.parametrize("is_marked", [False, True])
    def test_a_quota_for_one_shard(self, tmp_path: Path, is_marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which nothing tells before: one shard goes after the other, also when a stopped run is finished."""
        old = {f"w{number}": tensor_of("U8", (5_000,), number) for number in range(4)}
        new = {name: with_changes(tensor, [7]) for name, tensor in old.items()}
        files = {"config.json": b"{}"}
        base = write_checkpoint(tmp_path / "base", old, shards=4, sidecars=files)
        target = write_checkpoint(tmp_path / "target", new, shards=4, sidecars={**files, "more.txt": b"more"})
        delta = make_delta(base, target, tmp_path / "delta")
        resize = os.ftruncate

        def refuse(fd: int, size: int) -> None:
            if size and len(list((base / ".dcr/stage").glob("0*"))) > 1:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            resize(fd, size)

        def stop(kind: str, path: str, other: str) -> None:
            if is_marked and path.endswith("000001.commit.new"):
                raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", refuse)
            if is_marked:
                with watching(stop), pytest.raises(StoppedError):
                    apply(delta, base)
            assert apply(delta, base).recovered == is_marked
        assert tree(base) == tree(target)

    def test_few_open_files(self, tmp_path: Path) -> None:
        """ulimit -n 64, with more shards than that."""
        old = {f"w{number:03}": tensor_of("F32", (4,), number) for number in range(100)}
        new = {name: with_changes(tensor, [1]) for name, tensor in old.items()}
        base = write_checkpoint(tmp_path / "base", old, shards=100)
        target = write_checkpoint(tmp_path / "target", new, shards=100)
        delta = make_delta(base, target, tmp_path / "delta")
        for mode in ("replace", "in-place"):
            receiver = fresh_copy(base, tmp_path / mode)

            def limited(receiver: Path = receiver, mode: str = mode) -> None:
                os.closerange(3, 1024)
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                apply(delta, receiver, mode=mode, jobs=8)

            assert in_child(limited) == 0
            assert tree(receiver) == tree(target)

    def test_a_small_mount(self, tmp_path: Path) -> None:
        """A file system with room for the checkpoint and little else."""
        place = tmp_path / "mount"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], capture_output=True).returncode:
            pytest.skip("cannot mount here")
        try:
            old = {f"w{number}": tensor_of("U8", (1_000_000,), number) for number in range(3)}
            base = write_checkpoint(place / "base", old, shards=3)
            target = write_checkpoint(
                tmp_path / "target", {name: with_changes(tensor, [5]) for name, tensor in old.items()}, shards=3
            )
            delta = make_delta(base, target, tmp_path / "delta")
            (place / "ballast").write_bytes(bytes(1_200_000))
            before = tree(base)
            with pytest.raises(LocalError, match=r"needs 2\.\d+ MB of room \([\d,]+ bytes\), 1\.\d+ MB are free"):
                apply(delta, base)
            assert tree(base) == before
            assert not (base / ".dcr").exists()
            # In place, little room is enough.
            (place / "ballast").write_bytes(bytes(200_000))
            back = make_delta(target, base, tmp_path / "back")
            apply(delta, base, mode="in-place")
            assert tree(base) == tree(target)
            apply(back, base, mode="in-place")
            (place / "ballast").unlink()
            # With room for two shards but not for three, they go in turn.
            apply(delta, base)
            assert tree(base) == tree(target)
        finally:
            subprocess.run(["umount", place], check=True)

    @pytest.mark.parametrize("what", ["folder", "mount", "attribute"])
    def test_what_may_not_be_written(self, tiny: Folders, what: str) -> None:
        receiver, _, delta = tiny
        before, names = tree(receiver), names_below(receiver)

        def undo() -> None:
            match what:
                case "folder":
                    receiver.chmod(0o755)
                case "mount":
                    subprocess.run(["umount", receiver], check=True)
                case "attribute":
                    subprocess.run(["chattr", "-i", shard], check=True)

        shard = receiver / "model-00002-of-00002.safetensors"
        user = os.geteuid()
        match what:
            case "folder":
                receiver.chmod(0o555)
                user = user or 65534
                if os.geteuid() == 0:
                    _open_to_all(receiver)
            case "mount":
                place = str(receiver)
                commands = (["mount", "--bind", place, place], ["mount", "-o", "remount,ro,bind", place])
                if any(subprocess.run(command, capture_output=True).returncode for command in commands):
                    pytest.skip("cannot mount here")
            case "attribute":
                if subprocess.run(["chattr", "+i", shard], capture_output=True).returncode:
                    pytest.skip("no such attribute here")
        try:
            for mode in ("replace", "in-place"):

                def limited(mode: str = mode) -> None:
                    if user != os.geteuid():
                        os.setgid(user)
                        os.setuid(user)
                    apply(delta, receiver, mode=mode)

                assert in_child(limited) == 9
                assert tree(receiver) == before
                assert names_below(receiver) == names
        finally:
            undo()

    @pytest.mark.parametrize(
        "what",
        ["config has attribute", "folder has attribute", "config", "shard", "removed", "new folder", "state folder"],
    )
    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_names_that_cannot_be_changed(self, tmp_path: Path, mode: str, what: str) -> None:
        """What root may write, but not rename: attributes and mounts; found before the first change."""
        base, target = write_rich_pair(tmp_path)
        if what.startswith("config"):
            # Also if it does not change, it is away for a while.
            shutil.copy(base / "config.json", target / "config.json")
        delta = make_delta(base, target, tmp_path / "delta")
        for path in (base / "new", base / ".dcr"):
            path.mkdir()
        do, undo = ["mount", "--bind"], ["umount"]
        place = base / {"removed": "old/notes.txt", "new folder": "new", "state folder": ".dcr"}.get(
            what, "config.json"
        )
        if what == "shard":
            place = base / "model-00001-of-00003.safetensors"
        elif what.endswith("attribute"):
            place = base if what.startswith("folder") else place
            sign = "a" if what.startswith("folder") else "i"
            do, undo = ["chattr", f"+{sign}"], ["chattr", f"-{sign}"]
        before, names = tree(base), names_below(base)
        if subprocess.run([*do, *([place] if do[0] == "mount" else []), place], capture_output=True).returncode:
            pytest.skip("cannot do that here")
        try:
            for dry_run in (True, False):
                run = functools.partial(apply, delta, base, mode=mode, dry_run=dry_run)
                assert in_child(run) == 9
                assert tree(base) == before
                assert set(names_below(base)) - {".dcr/lock"} == set(names)
                assert state_of(base, base, target) == "base"
        finally:
            subprocess.run([*undo, place], check=True)
        assert in_child(lambda: apply(delta, base, mode=mode)) == 0
        assert tree(base) == tree(target)

    def test_a_folder_on_another_device(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where mounts have no numbers, their devices tell."""
        base, target = write_rich_pair(tmp_path)
        delta = make_delta(base, target, tmp_path / "delta")
        (base / "new").mkdir()
        before, inode, real = tree(base), (base / "new").stat().st_ino, os.stat

        def stat_with_devices(path: Any, **how: Any) -> os.stat_result:
            status = real(path, **how)
            return os.stat_result((*status[:2], 77, *status[3:])) if status.st_ino == inode else status

        with monkeypatch.context() as patch:
            patch.delattr(os, "O_PATH", raising=False)
            patch.setattr(os, "stat", stat_with_devices)
            with pytest.raises(LocalError, match="a mount lies between them"):
                apply(delta, base)
        assert tree(base) == before
        apply(delta, base)
        assert tree(base) == tree(target)

    def test_a_mount_that_is_left_empty_stays(self, tmp_path: Path) -> None:
        base, target = write_rich_pair(tmp_path)
        delta = make_delta(base, target, tmp_path / "delta")
        if subprocess.run(["mount", "--bind", base / "old", base / "old"], capture_output=True).returncode:
            pytest.skip("cannot mount here")
        try:
            apply(delta, base)
            assert tree(base) == tree(target)
            assert (base / "old").is_dir()
        finally:
            subprocess.run(["umount", base / "old"], check=True)

    def test_files_of_another_user(self, tiny: Folders) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make them")
        receiver, target, delta = tiny
        shard = receiver / "model-00002-of-00002.safetensors"
        os.chown(shard, 12345, 12345)
        receiver.chmod(0o777)
        _open_to_all(receiver)
        before, names = tree(receiver), names_below(receiver)

        def as_other() -> None:
            os.setgid(65534)
            os.setuid(65534)
            apply(delta, receiver)

        assert in_child(as_other) == 9
        assert tree(receiver) == before
        assert names_below(receiver) == names
        apply(delta, receiver)
        assert tree(receiver) == tree(target)
        assert (shard.stat().st_uid, shard.stat().st_gid) == (12345, 12345)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_signals(tiny: Folders, tmp_path: Path, mode: str, number: signal.Signals) -> None:
    """A signal at some steps: the process ends soon, and what it leaves is as after any other stop."""
    receiver, target, delta = tiny
    base = fresh_copy(receiver, tmp_path / "before")
    for step in (3, 20, 33, 41, 50):
        fresh_copy(base, receiver)
        child = os.fork()
        if child == 0:
            steps = count(1)

            def send(kind: str, path: str, other: str, step: int = step, steps: Iterator[int] = steps) -> None:
                if next(steps) == step:
                    os.kill(os.getpid(), number)

            code = 99
            try:
                with signals_raised(), watching(send):
                    apply(delta, receiver, mode=mode, jobs=1 + step % 2)
            except Stopped as stopped:
                code = stopped.number
            finally:
                os._exit(code)
        began = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == number
        assert time.monotonic() - began < 5
        state_of(receiver, base, target)
        apply(delta, receiver, mode=mode)
        assert tree(receiver) == tree(target)
        assert set(os.listdir(receiver / ".dcr")) == {"lock", "state.json", "state.zst"}


def test_what_was_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a record that counts, shards in which nothing changes are not read."""
    old = {f"w{number}": tensor_of("U8", (50_000,), number) for number in range(3)}
    first = write_checkpoint(tmp_path / "0", old, shards=3)
    second = write_checkpoint(tmp_path / "1", old | {"w0": with_changes(old["w0"], [1])}, shards=3)
    third = write_checkpoint(tmp_path / "2", old | {"w0": with_changes(old["w0"], [1, 2])}, shards=3)
    apply(make_delta(first, second, tmp_path / "d1"), first)
    monkeypatch.setattr("dcr_cli.receiver.record.SETTLE_NS", 0)
    from dcr_cli.checkpoint.folder import Files

    read: set[str] = set()
    original = Files.read_path_into

    def note(self: Files, path: str, offset: int, buffer: memoryview) -> None:
        read.add(path)
        original(self, path, offset, buffer)

    delta = make_delta(second, third, tmp_path / "d2")
    monkeypatch.setattr(Files, "read_path_into", note)
    apply(delta, first)
    assert {path for path in read if path.startswith("model-")} == {"model-00001-of-00003.safetensors"}
    assert tree(first) == tree(third)


def _record_of(receiver: Path) -> Record | None:
    with open_folder(receiver / ".dcr") as home:
        return read_record(home)


def _open_to_all(path: Path) -> None:
    """Let other users reach a folder of pytest's."""
    for above in path.parents:
        if Path(gettempdir()) in above.parents:
            above.chmod(above.stat().st_mode | 0o755)
    for where, _, _ in os.walk(path.parent):
        os.chmod(where, os.stat(where).st_mode | 0o555)
