"""What users of object stores have reported, as scenarios: absence, races, short answers, rights, secrets."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock
from uuid import uuid4

import pytest

from dcr_cli.cli import main
from dcr_cli.errors import ConflictError, UnsupportedError
from dcr_cli.publish import Publisher
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.store import opening, retry
from dcr_cli.store.backend import Answer, Backend, PermanentError, TransientError
from published import build_all, commits
from receivers import fresh_copy, tree
from store_servers import bucket_server, moto_server
from store_wrappers import (
    Allows,
    FailsCall,
    IgnoresTheCondition,
    Wrapped,
    recording,
    wrapping,
)
from strategies import tensor_of, write_checkpoint, write_tiny_pair, write_tiny_steps

SECRET = "hunter2"
KEYS = ["key=AKID", f"secret={SECRET}", "region=us-east-1"]


@pytest.fixture
def impatient() -> Iterator[None]:
    """Nothing is tried for longer than a moment."""
    defaults = retry.Patience.__init__.__defaults__
    assert defaults is not None
    with (
        mock.patch.object(retry.Patience.__init__, "__defaults__", (0.05, 0.01, 0.01, *defaults[3:])),
        mock.patch.object(opening, "LOOK_SECONDS", 0.05),
    ):
        yield


def options_of(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--storage-option", setting)]


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


# What is there, and what is not


def test_a_version_that_is_listed_late_is_found_all_the_same(tmp_path: Path) -> None:
    """One process pulls again and again, another publishes; listings never show it: keys that are known are read."""
    steps = write_tiny_steps(tmp_path, 3)
    push(steps[0], tmp_path / "remote", jobs=1)

    class ListsNothing(Wrapped):
        def called(self, name: str, key: str) -> None:
            assert name != "entries"

    for number in (1, 2, 3):
        with wrapping(ListsNothing):
            assert pull(tmp_path / "remote", tmp_path / "r").version == number
            if number < 3:
                push(steps[number], tmp_path / "remote", jobs=1)


@pytest.mark.parametrize("command", ["push", "pull"])
def test_a_fault_at_any_call_is_never_taken_for_absence(tmp_path: Path, impatient: None, command: str) -> None:
    """The k-th request fails: no history is begun anew, nothing is up to date, no first version is published."""
    steps = write_tiny_steps(tmp_path, 2)
    push(steps[0], tmp_path / "kept", baseline=tmp_path / "kept-baseline", jobs=1)
    for number in range(0, 100, 3):
        remote = fresh_copy(tmp_path / "kept", tmp_path / "remote")
        fresh_copy(tmp_path / "kept-baseline", tmp_path / "baseline")
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        failing: list[FailsCall] = []

        def fail(backend: Backend, number: int = number, failing: list[FailsCall] = failing) -> Backend:
            failing.append(FailsCall(backend, number, PermanentError("status 401")))
            return failing[-1]

        arguments = {
            "push": ("push", steps[1], remote, "--baseline", tmp_path / "baseline", "-j", "1"),
            "pull": ("pull", remote, tmp_path / "r", "-j", "1"),
        }[command]
        with wrapping(fail):
            code = run(*arguments)
        assert (remote / "dcr.json").read_bytes() == (tmp_path / "kept/dcr.json").read_bytes()
        assert commits(remote)[0] == commits(tmp_path / "kept")[0] and len(commits(remote)) <= 2
        if failing[0].next_call() <= number:
            assert code == 0
            return
        assert code == 7
        assert run(*arguments) == 0


def test_rights_to_get_alone_serve_all_that_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing keys are denied and nothing may be listed: pull, log, show, verify work, an absent version says why."""
    steps = write_tiny_steps(tmp_path, 2)
    remote = tmp_path / "remote"
    for step in steps:
        push(step, remote, jobs=1)
    calls: list[tuple[str, str]] = []

    class GetsOnly(Allows):
        def __init__(self, backend: Backend) -> None:
            super().__init__(backend, get=["*"])

        def called(self, name: str, key: str) -> None:
            calls.append((name, key))
            super().called(name, key)

    with wrapping(GetsOnly):
        for arguments in (
            ("pull", remote, tmp_path / "r", "--version", "1"),
            ("pull", remote, tmp_path / "r"),
            ("show", f"{remote}@2"),
            ("verify", tmp_path / "r", "--remote", remote),
        ):
            assert run(*arguments) == 0
        assert {name for name, _ in calls} <= {"read", "status"}
        assert run("log", remote) == 0
        capsys.readouterr()
        assert run("pull", remote, tmp_path / "r", "--version", "3") == 3
    assert "there is no version 3, or it may not be read" in capsys.readouterr().err


# Who may create


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_of_two_pushes_at_once_one_wins_in_every_store(tmp_path: Path, kind: str) -> None:
    """Two publishers create the same version at the same moment: one is told that it was taken, and by whom."""
    steps = write_tiny_steps(tmp_path, 3)
    with bucket_server() as bucket:
        options = {"key": "a", "secret": "b", "region": "us-east-1", "endpoint_url": bucket.url} if kind == "s3" else {}
        remote = "s3://bucket/race" if kind == "s3" else f"memory://{uuid4().hex}"
        push(steps[0], remote, baseline=tmp_path / "one", storage_options=options, jobs=1)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        barrier = threading.Barrier(2)
        outcomes: list[str | None] = []

        class Meets(Wrapped):
            def called(self, name: str, key: str) -> None:
                if name == "create" and key == "commits/0000000002.json":
                    barrier.wait(60)

        def publish(step: Path, baseline: Path) -> None:
            try:
                outcomes.append(push(step, remote, baseline=baseline, storage_options=options, jobs=1).id)
            except ConflictError as error:
                outcomes.append(str(error).rpartition("version 2 was taken by ")[2])

        with wrapping(Meets):
            threads = [
                threading.Thread(target=publish, args=(step, tmp_path / name))
                for step, name in ((steps[1], "one"), (steps[2], "two"))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(outcomes) == 2 and outcomes[0] == outcomes[1] and outcomes[0]
        pull(remote, tmp_path / "r", storage_options=options)
        assert tree(tmp_path / "r") in (tree(steps[1]), tree(steps[2]))


def test_a_store_that_ignores_the_condition_is_refused_at_every_push(tmp_path: Path) -> None:
    """Whatever the first push was told, or found: the next one, and a publisher in memory, prove it themselves."""
    steps = write_tiny_steps(tmp_path, 2)
    remote = tmp_path / "remote"
    with wrapping(IgnoresTheCondition):
        push(steps[0], remote, baseline=tmp_path / "baseline", single_writer=True)
        before = tree(remote)
        with pytest.raises(UnsupportedError, match="could be created again"):
            push(steps[1], remote, baseline=tmp_path / "baseline")
        with Publisher(remote, tmp_path / "baseline") as publisher, pytest.raises(UnsupportedError):
            publisher.begin()
        assert tree(remote) == before
        assert push(steps[1], remote, baseline=tmp_path / "baseline", single_writer=True).version == 2


# On the way


@pytest.mark.parametrize("published", [0, 1])
def test_a_source_that_cannot_be_read_leaves_no_short_object(tmp_path: Path, published: int) -> None:
    """The disk fails at the k-th read of the checkpoint, during the first push or a later one."""
    steps = write_tiny_steps(tmp_path, 2)
    for step in steps[:published]:
        push(step, tmp_path / "kept", baseline=tmp_path / "kept-baseline", jobs=1)
    (tmp_path / "kept").mkdir(exist_ok=True)
    (tmp_path / "kept-baseline").mkdir(exist_ok=True)
    plain = os.preadv
    for number in range(1, 100, 5):
        remote = fresh_copy(tmp_path / "kept", tmp_path / "remote")
        fresh_copy(tmp_path / "kept-baseline", tmp_path / "baseline")
        left = number

        def fail(fd: int, *arguments: object) -> int:
            nonlocal left
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(steps[1])):
                left -= 1
                if left == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return plain(fd, *arguments)  # type: ignore[arg-type]

        arguments = ("push", steps[1], remote, "--baseline", tmp_path / "baseline", "-j", "1")
        with mock.patch("os.preadv", fail):
            code = run(*arguments)
        assert (code, len(commits(remote))) in ((9, published), (0, published + 1))
        assert run(*arguments) == 0
        assert build_all(remote, tmp_path / "scratch")[-1] == tree(steps[1])
        if code == 0:
            return


class BreaksOff(Wrapped):
    """The first body of a payload breaks off; what is asked for then begins so many bytes too late, or too early."""

    def __init__(self, backend: Backend, shift: int) -> None:
        super().__init__(backend)
        self.shift = shift
        self.is_broken = False

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        if "/payloads/" not in key:
            return super().read(key, begin, size)
        if begin:
            return replace(super().read(key, begin + self.shift, size), begin=begin)
        answer = super().read(key, begin, size)
        if self.is_broken:
            return answer
        self.is_broken = True
        return replace(answer, chunks=self._part(answer.chunks))

    def _part(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(iter(chunks))[:4096]
        raise TransientError("the connection broke")


@pytest.mark.parametrize("shift", [0, 1, -16])
def test_a_download_that_is_resumed_at_another_byte_is_not_taken(tmp_path: Path, impatient: None, shift: int) -> None:
    """The connection drops once; the rest comes right, from a byte later, or with 16 bytes repeated."""
    base = write_checkpoint(tmp_path / "a", {"w": tensor_of("BF16", (64, 256), 1)})
    target = write_checkpoint(tmp_path / "b", {"w": tensor_of("BF16", (64, 256), 2)})
    for checkpoint in (base, target):
        push(checkpoint, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    pull(tmp_path / "remote", tmp_path / "r", version=1)
    with wrapping(lambda backend: BreaksOff(backend, shift)):
        code = run("pull", tmp_path / "remote", tmp_path / "r", "-j", "1")
    assert code in ((0,) if shift == 0 else (0, 4, 7))
    assert tree(tmp_path / "r") == tree(target if code == 0 else base)
    assert pull(tmp_path / "remote", tmp_path / "r").version == 2
    assert tree(tmp_path / "r") == tree(target)


def test_a_payload_that_is_written_anew_while_it_is_read_is_not_mixed(tmp_path: Path, impatient: None) -> None:
    """Between two ranges of a payload its object is replaced: refused, and right when the object is."""
    base = write_checkpoint(tmp_path / "a", {"w": tensor_of("BF16", (64, 256), 1)})
    target = write_checkpoint(tmp_path / "b", {"w": tensor_of("BF16", (64, 256), 2)})
    for checkpoint in (base, target):
        push(checkpoint, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    (path,) = (tmp_path / "remote/versions").rglob("*.safetensors")
    data = path.read_bytes()
    pull(tmp_path / "remote", tmp_path / "r", version=1)

    class Rewrites(BreaksOff):
        def _part(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
            yield next(iter(chunks))[:4096]
            path.write_bytes(data[:5000] + bytes(len(data) - 5000))
            raise TransientError("the connection broke")

    with wrapping(lambda backend: Rewrites(backend, 0)):
        assert run("pull", tmp_path / "remote", tmp_path / "r", "-j", "1") in (4, 6)
    assert tree(tmp_path / "r") == tree(base)
    path.write_bytes(data)
    assert pull(tmp_path / "remote", tmp_path / "r").version == 2
    assert tree(tmp_path / "r") == tree(target)


@pytest.mark.parametrize("fault", ["short", "silent", "page", "gzip", "whole", "other"])
@pytest.mark.parametrize("what", ["manifest.zst", "/payloads/", "commits/0000000002"])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_answers_that_are_not_the_object_change_nothing(
    tmp_path: Path, impatient: None, scheme: str, what: str, fault: str
) -> None:
    """Short bodies with and without a length, a login page, an encoding, another range: for each kind of object."""
    steps = write_tiny_steps(tmp_path, 2)
    with bucket_server() as bucket:
        settings = options_of(*KEYS, f"endpoint_url={bucket.url}")
        for step in steps:
            assert run("push", step, "s3://bucket/p", *settings, "-j", "1") == 0
        remote = (f"{bucket.url}/bucket/p",) if scheme == "http" else ("s3://bucket/p", *settings)
        assert run("pull", *remote, tmp_path / "r", "--version", "1") == 0

        class Tells(Wrapped):
            def called(self, name: str, key: str) -> None:
                bucket.faults[:] = [fault] * 9 if what in f"/{key}" else []

        with wrapping(Tells):
            code = run("pull", *remote, tmp_path / "r", "-j", "1")
        bucket.faults.clear()
        assert code in (0, 4, 6, 7)
        assert tree(tmp_path / "r") == tree(steps[1] if code == 0 else steps[0])
        assert run("pull", *remote, tmp_path / "r") == 0
        assert tree(tmp_path / "r") == tree(steps[1])


def test_spellings_of_a_bucket_are_one_history(tmp_path: Path) -> None:
    """Version after version is pushed to an address with and without slashes at its end, and pulled from each."""
    steps = write_tiny_steps(tmp_path, 3)
    with moto_server() as url:
        settings = options_of(*KEYS, f"endpoint_url={url}")
        for step, end in zip(steps, ("", "/", "//"), strict=True):
            assert run("push", step, f"s3://bucket/p{end}", *settings, "-j", "4") == 0
        for end in ("", "/"):
            assert run("pull", f"s3://bucket/p{end}", tmp_path / f"r{len(end)}", *settings) == 0
            assert tree(tmp_path / f"r{len(end)}") == tree(steps[2])


@pytest.mark.parametrize("reason", ["status 400 ExpiredToken", "status 403 RequestTimeTooSkewed"])
def test_what_was_sent_before_a_token_ran_out_is_not_sent_again(tmp_path: Path, reason: str) -> None:
    """The store refuses from the third write on; the next push goes on with the same version where it stopped."""
    steps = write_tiny_steps(tmp_path, 2)
    push(steps[0], tmp_path / "remote", jobs=1)
    sent: list[str] = []

    class RunsOut(Wrapped):
        def called(self, name: str, key: str) -> None:
            if name == "write" and len(sent) == 3:
                raise PermanentError(reason)

        def done(self, name: str, key: str) -> None:
            if name == "write":
                sent.append(key)

    with wrapping(RunsOut):
        assert run("push", steps[1], tmp_path / "remote", "-j", "1") == 7
    assert len(commits(tmp_path / "remote")) == 1
    with recording() as calls:
        assert run("push", steps[1], tmp_path / "remote", "-j", "1") == 0
    again = {key for name, key in calls if name == "write"} & set(sent)
    assert again <= {"next.json"}


# Secrets


def assert_untold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The secret is in nothing that was printed and in no file."""
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    for path in folder.rglob("*"):
        assert path.is_symlink() or not path.is_file() or SECRET.encode() not in path.read_bytes()


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_DEBUG", "1")


@pytest.mark.parametrize(
    "address",
    [f"http://user:{SECRET}@HOST/bucket/p", f"http://HOST/bucket/p?X-Amz-Signature={SECRET}", "s3://bucket/p"],
)
def test_no_command_tells_a_secret_of_its_remote(
    tmp_path: Path, impatient: None, debugging: None, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    """Password, signature and storage options; every remote command, each class of failure, tracebacks asked for."""
    steps = write_tiny_steps(tmp_path, 2)
    with bucket_server() as bucket:
        settings = options_of(*KEYS, f"endpoint_url={bucket.url}")
        for step in steps:
            assert run("push", step, "s3://bucket/p", "-j", "1", *settings) == 0
        remote = address.replace("HOST", f"127.0.0.1:{bucket.server_port}")
        given = [*(settings if address.startswith("s3") else []), "--json"]
        assert run("pull", remote, tmp_path / "r", "--version", "1", *given) == 0
        assert run("pull", remote, tmp_path / "r", "--exec", "exit 3", *given) == 10
        other = write_checkpoint(tmp_path / "else", {"w": tensor_of("BF16", (8, 8))})
        codes = set()
        for fault in ("", "401", "page", "short", f"to http://u:{SECRET}@nowhere.invalid/"):
            for command in (
                ("pull", remote, tmp_path / "new"),
                ("pull", remote, tmp_path / "r", "--version", "9"),
                ("pull", remote, other),
                ("push", steps[0], remote, "--baseline", tmp_path / "other"),
                ("log", remote),
                ("status", remote),
                ("prune", remote),
                ("show", f"{remote}@2"),
                ("show", remote),
                ("verify", tmp_path / "r", "--remote", remote),
                ("verify", "--remote", remote, "--deep"),
                ("commit", remote),
                ("anchor", steps[0], remote),
            ):
                bucket.faults[:] = [fault] * 50 if fault else []
                codes.add(run(*command, *given))
        assert codes >= {0, 2, 3, 5, 7} and 70 not in codes
        assert_untold(tmp_path, capsys)
        assert SECRET not in str(bucket.objects)


def test_an_address_in_the_place_of_something_else_is_not_repeated(
    tmp_path: Path, debugging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments in the wrong order, one too many, an option before the command: the address is in no message."""
    base, target = write_tiny_pair(tmp_path)
    address = f"http://user:{SECRET}@127.0.0.1:1/a b?sig={SECRET}"
    for arguments in (
        ("push", address, base),
        ("pull", tmp_path / "remote", address),
        ("pull", address, tmp_path / "r", address),
        ("pull", address, tmp_path / "r", "--version", address),
        ("diff", address, base),
        ("diff", base, target, "-o", address),
        ("apply", address, base),
        ("verify", base, "--against", address),
        ("verify", address),
        ("inspect", address),
        ("show", address),
        ("log", address, address),
        ("push", base, tmp_path / "remote", "--base", address),
        ("push", base, tmp_path / "remote", "--sign-key", f"-----BEGIN PRIVATE KEY-----\n{SECRET}"),
        ("pull", address, tmp_path / "r", f"--storage-optoin=secret={SECRET}"),
        (f"--storage-option=secret={SECRET}", "pull", address, tmp_path / "r"),
        (address,),
    ):
        for more in ((), ("--json",)):
            assert run(*arguments, *more) in (2, 3), arguments
    assert_untold(tmp_path, capsys)
