"""What each kind of backend must not get wrong, and the rest of the contract does not show."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import paramiko
import pytest
from fsspec.implementations.local import LocalFileSystem

from dcr_cli import stopping
from dcr_cli.errors import ConflictError, LocalError, TransportError, UnsupportedError, UsageError
from dcr_cli.store import objects
from dcr_cli.store.backend import Backend, is_leftover, new_name
from dcr_cli.store.clouds import cloud_of
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.location import locate
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.sftp import SftpBackend
from dcr_cli.store.store import Store
from faults import StoppedError, watching
from paramiko_server import paramiko_server, taking_at_most
from store_contract import BIG, MOST, Clock
from store_servers import Bucket, bucket_server
from store_wrappers import DeniesTheAbsent, FailsCalls, Truncates

S3_OPTIONS: dict[str, object] = {"key": "AKID", "secret": "secret", "region_name": "us-east-1"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    with paramiko_server(tmp_path_factory.mktemp("sftp")) as options:
        yield options


def s3(bucket: Bucket, clock: Clock) -> Store:
    return open_store("s3://bucket/pre", {**S3_OPTIONS, "endpoint_url": bucket.url}, patience=clock.patience())


class TestLargePuts:
    @pytest.mark.parametrize("size", [objects.MOST_SINGLE_PUT_BYTES + 1, 5 << 30, 300 << 30, objects.MOST_OBJECT_BYTES])
    def test_parts_are_few_and_fit_memory(self, size: int) -> None:
        part_bytes, concurrent_parts = objects.parts_of(size)
        assert 5 << 20 <= part_bytes <= 5 << 30
        assert -(-size // part_bytes) <= 10_000
        assert concurrent_parts >= 1
        assert concurrent_parts * part_bytes <= max(256 << 20, part_bytes)

    def test_one_that_is_too_large_is_refused_before_its_first_byte(self, clock: Clock, bucket: Bucket) -> None:
        class Huge(io.BytesIO):
            def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
                return objects.MOST_OBJECT_BYTES + 1 if whence == os.SEEK_END else super().seek(offset, whence)

        with pytest.raises(UnsupportedError, match="an object at most"):
            s3(bucket, clock).put("a", Huge())
        assert bucket.requests == []

    def test_a_body_may_take_longer_than_an_answer(
        self, clock: Clock, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(objects._READING, "read_timeout", timedelta(seconds=0.3))
        bucket.delay_seconds = 0.8
        s3(bucket, clock).put("a", bytes(2 << 20))
        assert clock.waits == [] and len(bucket.requests) == 1

    def test_an_upload_that_the_store_forgot_is_done_again(self, clock: Clock, bucket: Bucket) -> None:
        """As when the answer to its end was lost, and it was ended once more."""
        bucket.faults[:] = ["", "", "", "", "404"]
        s3(bucket, clock).put("a", io.BytesIO(BIG))
        assert bucket.objects["/bucket/pre/a"] == BIG
        assert len(clock.waits) == 1


class TestSources:
    """What goes wrong with what is put is not the remote's fault, and nothing of it is there."""

    @pytest.fixture(params=["local", "memory", "s3", "sftp", "other"])
    def store(
        self,
        request: pytest.FixtureRequest,
        bucket: Bucket,
        sftp: dict[str, object],
        clock: Clock,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Store:
        # So that the larger ones go up in parts there too.
        monkeypatch.setattr("dcr_cli.store.other.MOST_WHOLE_BYTES", 1 << 20)
        url, options = {
            "local": (str(tmp_path / "a"), {}),
            "memory": (f"memory://{tmp_path.name}", {}),
            "s3": ("s3://bucket/pre", {**S3_OPTIONS, "endpoint_url": bucket.url}),
            "sftp": (f"sftp://127.0.0.1{tmp_path}/b", sftp),
            "other": (f"dir://{tmp_path}", {"path": str(tmp_path), "target_protocol": "file", "auto_mkdir": True}),
        }[request.param]
        return open_store(url, options, patience=clock.patience())

    @pytest.mark.parametrize("size", [1000, len(BIG)])
    def test_one_that_shrinks(self, store: Store, clock: Clock, size: int) -> None:
        class Shrinking(io.BytesIO):
            def read(self, count: int | None = -1) -> bytes:
                return super().read(count) if self.tell() == 0 and size > MOST else b""

        with pytest.raises(ConflictError, match="shorter while it was sent"):
            store.put("a", Shrinking(BIG[:size]))
        assert store.get("a", most_bytes=MOST) is None and clock.waits == []
        assert store.leftovers() == ()

    def test_one_that_grows_is_cut(self, store: Store) -> None:
        class Growing(io.BytesIO):
            def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
                return 1000 if whence == os.SEEK_END else super().seek(offset, whence)

        store.put("a", Growing(BIG[:5000]))
        assert store.get("a", most_bytes=MOST) == BIG[:1000]

    def test_one_that_cannot_be_read(self, store: Store, clock: Clock) -> None:
        class Broken(io.BytesIO):
            def read(self, count: int | None = -1) -> bytes:
                raise OSError(5, "Input/output error")

        with pytest.raises(LocalError, match="Input/output error"):
            store.put("a", Broken(BIG))
        assert store.get("a", most_bytes=MOST) is None and clock.waits == []


class TestPatience:
    def test_what_works_slowly_is_not_given_up(self, clock: Clock) -> None:
        """Time is counted from the first failure: not while the reader is at work, nor while a body comes."""
        backend = MemoryBackend("slowly")
        backend.write("a", b"1234567890", 10)
        found = b""
        for chunk in Store(Truncates(backend, 3, 2), "test://remote", patience=clock.patience()).stream("a"):
            found += chunk
            clock.now += 1000
        assert found == b"1234567890"

    def test_who_may_not_list_creates_again_too(self, tmp_path: Path, clock: Clock) -> None:
        backend = LocalBackend(str(tmp_path))
        store = Store(FailsCalls(DeniesTheAbsent(backend), 1), "test://remote", patience=clock.patience())
        assert store.put_if_absent("a", b"ours")
        assert not store.put_if_absent("a", b"theirs")


class TestLeftovers:
    @pytest.fixture(params=["local", "sftp"])
    def store(self, request: pytest.FixtureRequest, sftp: dict[str, object], tmp_path: Path) -> Store:
        return open_store(tmp_path) if request.param == "local" else open_store(f"sftp://127.0.0.1{tmp_path}", sftp)

    def test_they_are_told_from_all_else(self, store: Store, tmp_path: Path) -> None:
        store.put("a/b", b"1")
        names = [new_name("c"), new_name("a/d"), new_name("a/e/f")]
        (tmp_path / "a" / "e").mkdir()
        others = [".hidden", "a/.0123456789abcdef.old", "a/x.0123456789abcdef.new", ".0123456789ABCDEF.new", ".g/.h"]
        (tmp_path / ".g").mkdir()
        for name in names + others:
            (tmp_path / name).write_bytes(b"12")
            os.utime(tmp_path / name, (1e9, 1e9))
        assert [entry.key for entry in store.list()] == ["a/b", "a/x.0123456789abcdef.new"]
        assert [(entry.key, entry.size, entry.modified) for entry in store.leftovers()] == [
            (name, 2, 1e9) for name in sorted(names)
        ]
        assert [entry.key for entry in store.leftovers("a/")] == sorted(names[1:])
        for name in names:
            store.delete_leftover(name)
            store.delete_leftover(name)
        for name in [*others, "a/b"]:
            with pytest.raises(ValueError, match="no name of a leftover"):
                store.delete_leftover(name)
        assert store.leftovers() == ()
        assert all((tmp_path / name).exists() for name in [*others, "a/b"])

    @pytest.mark.parametrize("key", ["../.0123456789abcdef.new", "/.0123456789abcdef.new", "a/.0123456789abcdef.new\n"])
    def test_none_is_outside(self, store: Store, key: str) -> None:
        with pytest.raises(ValueError, match="no name of a leftover"):
            store.delete_leftover(key)

    def test_no_key_is_the_name_of_one(self) -> None:
        for key in ("a", "a/b", "a/b/c.new"):
            assert is_leftover(new_name(key)) and not is_leftover(key)
            assert new_name(key) != new_name(key)


class TestSftp:
    def opened(self, options: Mapping[str, object], path: Path, clock: Clock) -> Store:
        return open_store(f"sftp://127.0.0.1{path}", options, patience=clock.patience(deadline_seconds=1))

    @pytest.mark.parametrize("name", ["key_filename", "known_hosts"])
    @pytest.mark.parametrize("content", [None, "no key at all", "[127.0.0.1]:1 ssh-rsa !!!"])
    def test_files_of_keys_that_are_no_use_are_not_absence(
        self, sftp: dict[str, object], tmp_path: Path, clock: Clock, name: str, content: str | None
    ) -> None:
        (tmp_path / "a").write_bytes(b"1")
        if content is not None:
            (tmp_path / "file").write_text(content)
        options = {**sftp, name: str(tmp_path / "file")}
        if name == "key_filename":
            del options["password"]
        store = self.opened(options, tmp_path, clock)
        for work in (
            lambda: store.get("a", most_bytes=MOST, is_denied_absent=True),
            lambda: store.stat("a", is_denied_absent=True),
            lambda: store.list(),
        ):
            with pytest.raises(TransportError) as caught:
                work()
            assert not caught.value.retryable

    def test_options_of_a_command_line_are_text(self, sftp: dict[str, object], tmp_path: Path, clock: Clock) -> None:
        told = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in sftp.items()}
        with self.opened(told, tmp_path, clock) as store:
            store.put("a", b"1")
        for name, value in (("port", "ssh"), ("allow_agent", "perhaps")):
            with pytest.raises(UsageError, match=name):
                self.opened({**told, name: value}, tmp_path, clock)

    @pytest.mark.parametrize("work", ["put", "stream", "create"])
    @pytest.mark.parametrize("most_bytes", [0, 100_000, 900_000])
    def test_a_full_disk(
        self, sftp: dict[str, object], tmp_path: Path, clock: Clock, work: str, most_bytes: int
    ) -> None:
        """A refusal is heard wherever in the body it comes, and nothing is left of it."""
        store = self.opened(sftp, tmp_path, clock)
        works: dict[str, Callable[[], object]] = {
            "put": lambda: store.put("a/b", BIG[:MOST]),
            "stream": lambda: store.put("a/b", io.BytesIO(BIG[:MOST])),
            "create": lambda: store.put_if_absent("a/b", BIG[:MOST]),
        }
        with taking_at_most(most_bytes), pytest.raises(TransportError, match="disk or a quota is full") as caught:
            works[work]()
        assert not caught.value.retryable and clock.waits == []
        assert list((tmp_path / "a").iterdir()) == []
        works[work]()
        assert (tmp_path / "a" / "b").read_bytes() == BIG[:MOST]

    def test_a_connection_that_broke_is_made_again(self, sftp: dict[str, object], tmp_path: Path, clock: Clock) -> None:
        store = self.opened(sftp, tmp_path, clock)
        store.put("a", b"1")
        store._backend._backend._sessions._client.get_transport().sock.close()  # type: ignore[attr-defined]
        assert store.get("a", most_bytes=MOST) == b"1"
        store.close()

    def test_a_connection_that_only_looks_alive_is_made_again(
        self, sftp: dict[str, object], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.opened(sftp, tmp_path, clock)
        store.put("a", b"1")
        sessions = store._backend._backend._sessions  # type: ignore[attr-defined]
        first, plain = sessions._client, paramiko.SFTPClient.open

        def silent(session: paramiko.SFTPClient, *arguments: Any) -> Any:
            if sessions._client is first:
                raise TimeoutError
            return plain(session, *arguments)

        monkeypatch.setattr(paramiko.SFTPClient, "open", silent)
        assert store.get("a", most_bytes=MOST) == b"1"
        assert not first.get_transport() and len(clock.waits) == 1


class TestHttp:
    def test_addresses_that_need_quoting(self, bucket: Bucket, clock: Clock) -> None:
        bucket.objects["/a folder/ü/b c"] = b"1"
        for path in ("a folder/ü", "a%20folder/%C3%BC"):
            store = open_store(f"{bucket.url}/{path}", patience=clock.patience())
            assert store.get("b c", most_bytes=MOST) == b"1"
        for url in ("http://", "http://a b/c", f"http://{'x' * 70}/a"):
            with pytest.raises(UsageError):
                open_store(url)

    def test_headers(self, bucket: Bucket) -> None:
        bucket.objects["/a"] = b"1"
        for given in ({"X-Key": "value"}, "X-Key: value"):
            assert open_store(bucket.url, {"headers": given}).get("a", most_bytes=MOST) == b"1"
            assert bucket.requests[-1][2]["x-key"] == "value"
        for options in (
            {"headers": "no colon"},
            {"headers": 3},
            {"headers": {"a": "b\nc"}},
            {"headers": {"a b": "c"}},
            {"headers": ": c"},
            {"token": "naïve"},
            {"token": "with blank"},
            {"token": "line\n"},
            {"token": ""},
        ):
            with pytest.raises(UsageError) as caught:
                open_store(bucket.url, options)
            assert "blank'" not in str(caught.value) and "naïve" not in str(caught.value)

    def test_no_cache_answers_for_the_server(self, bucket: Bucket) -> None:
        """Not where it redirects to, either; unless headers are given that say something else."""
        bucket.objects["/a"] = b"12345"
        with bucket_server() as other, open_store(bucket.url) as store:
            other.objects["/a"] = b"12345"
            bucket.faults[:] = ["", "", "", "", "", f"to {other.url}/a"]
            assert store.get("b", most_bytes=MOST) is None
            assert store.stat("b") is None and store.stat("a") is not None
            assert store.get_range("a", 1, 2) == b"23"
            assert b"".join(store.stream("a")) == b"12345"
            assert store.get("a", most_bytes=MOST) == b"12345"
            asked = [*bucket.requests, *other.requests]
        assert [headers.get("cache-control") for _, _, headers in asked] == ["no-cache"] * 7
        with open_store(bucket.url, {"headers": {"cache-control": "max-age=60"}}) as store:
            store.stat("a")
        assert bucket.requests[-1][2]["cache-control"] == "max-age=60"

    @pytest.mark.parametrize("status", ["400", "401", "403", "503"])
    @pytest.mark.parametrize("is_s3", [False, True])
    def test_an_object_store_says_what_is_wrong(self, bucket: Bucket, clock: Clock, status: str, is_s3: bool) -> None:
        """Its code and message, and nothing that its answer repeats of us."""
        options = {"key": "AKID", "secret": "1", "region_name": "here", "endpoint_url": bucket.url}
        patience = clock.patience(deadline_seconds=0)
        with open_store(*(("s3://bucket", options) if is_s3 else (bucket.url,)), patience=patience) as store:
            bucket.faults[:] = [status]
            with pytest.raises(TransportError, match=f"status {status} Told: You may not, it's ours") as caught:
                store.get("a", most_bytes=MOST)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"

    @pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "0x10", "\xb2", ""])
    def test_lengths_that_are_none(self, bucket: Bucket, clock: Clock, length: str) -> None:
        bucket.objects["/a"] = b"12345"
        bucket.faults[:] = [f"length {length}"]
        store = open_store(bucket.url, patience=clock.patience(deadline_seconds=1))
        with pytest.raises(TransportError):
            store.get("a", most_bytes=MOST)

    @pytest.mark.parametrize("fault", ["403", "405"])
    def test_a_server_that_answers_no_head(self, bucket: Bucket, clock: Clock, fault: str) -> None:
        bucket.objects |= {"/a": b"12345", "/empty": b""}
        store = open_store(bucket.url, patience=clock.patience())
        for key, size in (("a", 5), ("empty", 0)):
            bucket.faults[:] = [fault]
            status = store.stat(key)
            assert status is not None and status.size == size
        bucket.faults[:] = [fault]
        assert store.stat("b") is None
        bucket.faults[:] = ["403", "403"]
        with pytest.raises(TransportError, match="access is denied"):
            store.stat("a")

    @pytest.mark.parametrize("to", ["http://[::1/", "http://a b/", "http://x:port/"])
    def test_redirects_to_what_is_no_address(self, bucket: Bucket, clock: Clock, to: str) -> None:
        bucket.faults[:] = [f"to {to}"]
        with pytest.raises(TransportError) as caught:
            open_store(bucket.url, patience=clock.patience(deadline_seconds=1)).get("a", most_bytes=MOST)
        assert to not in str(caught.value)
        # Nothing is left open until somebody collects garbage.
        gc.collect()


class TestObjects:
    def test_bytes_that_are_said_to_be_encoded(self, bucket: Bucket, clock: Clock) -> None:
        bucket.objects["/bucket/pre/a"] = b"1234567890"
        store = s3(bucket, clock)
        bucket.faults[:] = ["gzip"]
        assert store.get("a", most_bytes=MOST) == b"1234567890"

    def test_names_that_no_object_of_ours_has(self, bucket: Bucket, clock: Clock) -> None:
        for key in ("a", "b\\c", ".d"):
            bucket.objects[f"/bucket/pre/{key}"] = b"1"
        store = s3(bucket, clock)
        assert [entry.key for entry in store.list()] == ["a"]
        bucket.objects["/bucket/pre/e//f"] = b"1"
        with pytest.raises(TransportError, match="cannot be listed"):
            store.list()

    @pytest.mark.parametrize("size", [1, len(BIG)])
    def test_signals_are_heard_while_a_server_is_silent(self, bucket: Bucket, clock: Clock, size: int) -> None:
        def stop(number: int, frame: object) -> None:
            raise StoppedError

        bucket.delay_seconds = 3.0
        before = signal.signal(signal.SIGALRM, stop)
        began = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(StoppedError):
                s3(bucket, clock).put("a", io.BytesIO(BIG[:size]))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 2.5

    def test_other_threads_end_too_while_a_server_is_silent(self, bucket: Bucket, clock: Clock) -> None:
        bucket.delay_seconds = 3.0
        store, began = s3(bucket, clock), time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(store.put, "a", io.BytesIO(BIG))
            try:
                time.sleep(0.2)
                stopping.ask(signal.SIGTERM)
                with pytest.raises(stopping.Stopped):
                    asked.result()
            finally:
                stopping.ask(0)
        assert time.monotonic() - began < 2.5

    def test_how_long_a_body_may_take(self) -> None:
        seconds = [objects.sending_seconds(size) for size in (1, 1 << 20, 8 << 20, 16 << 20, 1 << 30)]
        assert seconds == [31, 46, 158, 286, 16414]

    def test_an_upload_without_an_answer_is_given_up(
        self, bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(objects, "sending_seconds", lambda size: 1)
        bucket.delay_seconds = 5.0
        options, began = {**S3_OPTIONS, "endpoint_url": bucket.url}, time.monotonic()
        store = open_store("s3://bucket/pre", options, patience=clock.patience(deadline_seconds=0))
        with pytest.raises(TransportError):
            store.put("a", BIG[: 2 << 20])
        assert time.monotonic() - began < 4.5

    def test_what_a_head_cannot_say_is_asked_again(self, bucket: Bucket, clock: Clock) -> None:
        bucket.objects["/bucket/pre/a"] = b"12345"
        store = s3(bucket, clock)
        bucket.faults[:] = ["403"]
        status = store.stat("a")
        assert status is not None and status.size == 5
        assert [request[0] for request in bucket.requests] == ["HEAD", "GET"]
        bucket.faults[:] = ["404", "403"]
        with pytest.raises(TransportError, match="access is denied"):
            store.stat("b")

    def test_a_public_bucket_of_google(self, bucket: Bucket, clock: Clock) -> None:
        bucket.objects["/bucket/a"] = b"1"
        with open_store("gs://bucket", {"token": "anon", "endpoint_url": bucket.url}) as store:
            assert store.get("a", most_bytes=MOST) == b"1"
        assert "authorization" not in bucket.requests[0][2]
        assert "application_credentials" not in cloud_of(locate("gs://b"), {"token": "google_default"}, {}).settings

    def test_a_connection_string_of_the_environment(self) -> None:
        environment = {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;AccountKey=aGk=;EndpointSuffix=core.test"}
        cloud = cloud_of(locate("az://box"), {}, environment)
        assert dict(cloud.settings) == {
            "account_name": "acc",
            "account_key": "aGk=",
            "endpoint": "https://acc.blob.core.test",
        }
        assert "account_key" not in cloud_of(locate("az://box"), {"account_name": "other"}, environment).settings

    @pytest.mark.parametrize("name", ["client_kwargs", "client_options"])
    def test_options_that_are_not_made_of_options(self, name: str) -> None:
        with pytest.raises(UsageError, match=name):
            open_store("s3://bucket", {**S3_OPTIONS, name: "text"})


@pytest.mark.parametrize("url", ["s3:/b/a", "gs:b", "https:/h/a", "sftp:h", "file:/tmp/a", "S3:/b"])
def test_an_address_with_slashes_missing_is_no_folder(url: str) -> None:
    with pytest.raises(UsageError, match="begins with"):
        open_store(url)
    assert locate(f"./{url}").protocol == "file"
    assert locate("az").protocol == "file" and locate("disk:/a").protocol == "file"


def test_a_listing_that_fails_in_a_folder_is_no_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"path": str(tmp_path), "target_protocol": "file", "auto_mkdir": True}
    store = open_store(f"dir://{tmp_path}", options, patience=Clock().patience())
    store.put("a/b", b"1")
    store.put("c", b"1")
    assert [entry.key for entry in store.list()] == ["a/b", "c"]
    assert [entry.key for entry in store.list("a/")] == ["a/b"]
    assert store.list("c/") == () and store.list("d/") == ()
    plain = LocalFileSystem.ls

    def broken(self: LocalFileSystem, path: str, **options: Any) -> Any:
        if path.endswith("/a"):
            raise ConnectionResetError
        return plain(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", broken)
    with pytest.raises(TransportError, match="connection broke"):
        store.list()


FORKED = """
import os, sys
from dcr_cli.errors import TransportError
from dcr_cli.store.opening import open_store
store = open_store(sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:]))
store.put("a", b"1")
child = os.fork()
if child == 0:
    try:
        store.get("a", most_bytes=1)
    except RuntimeError:
        try:
            open_store(sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])).get("a", most_bytes=1)
            print("works", flush=True)
        except TransportError as error:
            print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.get("a", most_bytes=1) == b"1"
"""


class TestForks:
    """A store is its process's, and says so rather than hang; what another one is opened for depends on its library."""

    def run(self, url: str, options: Mapping[str, object]) -> str:
        told = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
        command = [sys.executable, "-W", "ignore", "-c", FORKED, url, *told]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def test_a_folder(self, tmp_path: Path) -> None:
        assert self.run(str(tmp_path), {}) == "works\n"

    def test_an_object_store(self, bucket: Bucket) -> None:
        assert "made by fork" in self.run("s3://bucket/pre", {**S3_OPTIONS, "endpoint_url": bucket.url})

    def test_a_server_of_files(self, sftp: dict[str, object], tmp_path: Path) -> None:
        assert self.run(f"sftp://127.0.0.1{tmp_path}", sftp) == "works\n"


MEMORY = """
import resource, sys
from dcr_cli.store.opening import open_store
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
store = open_store(sys.argv[1])
store.put("small", b"1")
before = peak()
with open(sys.argv[2], "rb") as file:
    store.put("a", file)
assert sum(map(len, store.stream("a"))) == 256 << 20
print(peak() - before)
"""


def test_large_files_take_little_memory(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 256 << 20)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "remote"), str(tmp_path / "large")]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 20


def test_a_put_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    class Ends(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            raise KeyboardInterrupt

    backend: Backend = LocalBackend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        Store(backend, "test://remote").put("a", Ends(b"1"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["put", "create"])
def test_a_folder_that_is_emptied_while_something_is_put_there(tmp_path: Path, clock: Clock, way: str) -> None:
    """Whatever step of it another process is at: what was there is gone, and what comes is there."""
    backend = LocalBackend(str(tmp_path))
    store = Store(backend, "test://remote", patience=clock.patience())
    key, other = "a/b/c/new", "a/b/c/old"
    number = 0
    while True:
        store.delete(key)
        store.put(other, b"old")
        left = number

        def empty(kind: str, path: str, to: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                backend.remove(other)

        with watching(empty):
            if way == "put":
                store.put(key, b"new")
            else:
                assert store.put_if_absent(key, b"new")
        assert store.get(key, most_bytes=3) == b"new"
        if left >= 0:
            break
        assert store.get(other, most_bytes=3) is None
        number += 1
    assert number > 3


@pytest.mark.parametrize("way", ["put", "create"])
@pytest.mark.parametrize(("before", "key"), [("open", "a/b/new"), ("mkdir", "a/b/c/new")])
def test_a_folder_of_a_server_that_is_emptied_while_something_is_put_there(
    sftp: dict[str, object], tmp_path: Path, clock: Clock, way: str, before: str, key: str
) -> None:
    store = open_store(f"sftp://127.0.0.1{tmp_path}", sftp, patience=clock.patience())
    store.put("a/b/old", b"old")
    called: Callable[..., Any] = getattr(paramiko.SFTPClient, before)

    def empty_first(session: paramiko.SFTPClient, *arguments: Any) -> Any:
        store.delete("a/b/old")
        return called(session, *arguments)

    with mock.patch.object(paramiko.SFTPClient, before, empty_first):
        if way == "put":
            store.put(key, b"new")
        else:
            assert store.put_if_absent(key, b"new")
    assert store.get(key, most_bytes=3) == b"new" and store.get("a/b/old", most_bytes=3) is None


@pytest.mark.parametrize("kind", ["local", "sftp"])
def test_folders_go_with_the_last_that_is_in_them(sftp: dict[str, object], tmp_path: Path, kind: str) -> None:
    location = locate(f"sftp://127.0.0.1{tmp_path}")
    backend = LocalBackend(str(tmp_path)) if kind == "local" else SftpBackend(location, sftp)
    for key in ("a/b/c/d", "a/b/e"):
        backend.write(key, b"1", 1)
    backend.remove("a/b/c/d")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "e"]
    backend.remove("a/b/e")
    # Those that are at the root stay: whoever lists them need not tell an empty one from none.
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
