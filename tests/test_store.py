"""Stores: one contract over every backend, what they do when something fails, and that they tell no secrets."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    NotFoundError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from dcr_cli.store.backend import Backend
from dcr_cli.store.clouds import cloud_of
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.location import is_login, locate
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import MOST_CREATED_BYTES, Store
from paramiko_server import paramiko_server
from store_contract import BIG, MOST, Clock, Place, RaceOfProcesses, ReadContract, StoreContract
from store_servers import Bucket, bucket_server, file_server, moto_server
from store_wrappers import (
    DeniesTheAbsent,
    FailsCalls,
    IgnoresRanges,
    IgnoresTheCondition,
    ListsLate,
    LosesTheAnswer,
    Truncates,
    Wrapped,
)

SECRET = "hunter2SECRET"


class TestLocalPath(StoreContract, RaceOfProcesses):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(str(tmp_path / "new" / "remote"))

    def test_only_what_was_put_is_there(self, place: Place) -> None:
        with place.open() as store:
            store.put("a/b", io.BytesIO(b"1"))
            store.put_if_absent("a/c", b"1")
            store.put_if_absent("a/c", b"2")
        assert sorted(str(path.relative_to(place.url)) for path in Path(place.url).rglob("*")) == ["a", "a/b", "a/c"]

    def test_links_are_not_followed(self, place: Place, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "a").write_bytes(b"1")
        with place.open() as store:
            store.put("b", b"2")
            root = Path(place.url)
            (root / "folder").symlink_to(outside)
            (root / "file").symlink_to(outside / "a")
            works: list[Callable[[], object]] = [
                lambda: store.get("folder/a", most_bytes=MOST),
                lambda: store.get("file", most_bytes=MOST),
                lambda: store.put("folder/b", b""),
                lambda: store.put_if_absent("folder/b", b""),
            ]
            for work in works:
                with pytest.raises(DamagedError):
                    work()
            store.delete("folder/a")
            assert [entry.key for entry in store.list()] == ["b"]
        assert [path.name for path in outside.iterdir()] == ["a"]

    def test_a_root_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        with open_store(tmp_path / "link") as store:
            store.put("a", b"1")
        assert (tmp_path / "real" / "a").read_bytes() == b"1"


class TestFileUrl(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(f"file://{tmp_path}/remote/")


class TestMemory(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(f"memory://{tmp_path.name}/remote")


class TestPlainWebServer(ReadContract):
    """Python's own, which ignores ranges."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        with file_server(tmp_path) as url:
            yield Place(f"{url}/", writer=open_store(tmp_path))


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with bucket_server() as server:
        yield server


@pytest.fixture
def empty_bucket(bucket: Bucket) -> Bucket:
    bucket.objects.clear()
    bucket.faults.clear()
    bucket.requests.clear()
    bucket.conditional = True
    return bucket


S3_OPTIONS: dict[str, object] = {"key": "AKID", "secret": SECRET, "region_name": "us-east-1"}


def s3(bucket: Bucket) -> Place:
    return Place("s3://bucket/pre/fix", {**S3_OPTIONS, "endpoint_url": bucket.url})


class TestWebServerWithRanges(ReadContract):
    @pytest.fixture
    def place(self, empty_bucket: Bucket) -> Place:
        return Place(f"{empty_bucket.url}/bucket/pre/fix", writer=s3(empty_bucket).open())


class TestGoogleStandIn(StoreContract):
    rounds = 5

    @pytest.fixture
    def place(self, empty_bucket: Bucket) -> Place:
        return Place("gs://bucket/prefix", {"bearer_token": SECRET, "endpoint_url": empty_bucket.url})


class TestAzureStandIn(StoreContract):
    rounds = 5

    @pytest.fixture
    def place(self, empty_bucket: Bucket) -> Place:
        return Place("az://bucket/prefix", {"account_name": "a", "anon": True, "endpoint_url": empty_bucket.url})


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


class TestS3Mock(StoreContract):
    @pytest.fixture
    def place(self, moto: str, tmp_path: Path) -> Place:
        return Place(f"s3://bucket/{tmp_path.name}", {**S3_OPTIONS, "endpoint_url": moto})

    @pytest.mark.skip(reason="moto looks whether a key is free and then writes, in two steps, so that two may win")
    def test_threads_race(self, store: Store, place: Place) -> None:
        """Servers that do it in one step are raced for in test_store_servers.py."""

    def test_no_bucket_is_not_an_empty_one(self, moto: str) -> None:
        with open_store("s3://nowhere/a", {**S3_OPTIONS, "endpoint_url": moto}) as store:
            with pytest.raises(NotFoundError, match="no such bucket"):
                store.get("a", most_bytes=MOST)
            with pytest.raises(NotFoundError, match="no such bucket"):
                store.put("a", b"1")


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    with paramiko_server(tmp_path_factory.mktemp("sftp")) as options:
        yield options


class TestSftp(StoreContract):
    rounds = 10
    # Its parts have 8 MiB, and the server is a slow one.
    big = BIG[: (8 << 20) + 1]

    @pytest.fixture
    def place(self, sftp: dict[str, object], tmp_path: Path) -> Place:
        return Place(f"sftp://127.0.0.1{tmp_path}/new/remote", sftp)

    def test_only_what_was_put_is_there(self, place: Place, tmp_path: Path) -> None:
        with place.open() as store:
            store.put("a/b", io.BytesIO(b"1"))
            store.put("a/b", io.BytesIO(b"2"))
            store.put_if_absent("a/c", b"1")
            store.put_if_absent("a/c", b"2")
        root = tmp_path / "new" / "remote"
        assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["a", "a/b", "a/c"]

    def test_a_server_whose_key_is_not_known(self, place: Place, tmp_path: Path) -> None:
        (tmp_path / "none").write_text("")
        with (
            open_store(place.url, {**place.options, "known_hosts": str(tmp_path / "none")}) as store,
            pytest.raises(TransportError, match="host key is not known"),
        ):
            store.get("a", most_bytes=MOST)


# Faults of backends


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["local", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return LocalBackend(str(tmp_path)) if request.param == "local" else MemoryBackend(str(tmp_path))


def wrapped(backend: Wrapped, clock: Clock) -> Store:
    return Store(backend, "test://remote", patience=clock.patience())


class TestRetries:
    def test_what_may_pass_is_tried_again(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(FailsCalls(backend, 3), clock)
        store.put("a", b"12345")
        store.put("b", io.BytesIO(b"12345"))
        assert store.put_if_absent("c", b"12345")
        for key in "abc":
            assert store.get(key, most_bytes=MOST) == b"12345"
        assert store.get_range("a", 1, 2) == b"23"
        assert b"".join(store.stream("a")) == b"12345"
        assert store.stat("a") is not None
        assert [entry.key for entry in store.list()] == ["a", "b", "c"]
        store.delete("a")
        assert store.get("a", most_bytes=MOST) is None
        # Longer each time, whole waits as this test's dice say.
        assert clock.waits[:3] == [0.2, 0.4, 0.8]

    def test_not_for_ever(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(FailsCalls(backend, 1000), clock)
        works: list[Callable[[], object]] = [
            lambda: store.get("a", most_bytes=MOST),
            lambda: store.get_range("a", 0, 1),
            lambda: list(store.stream("a")),
            lambda: store.stat("a"),
            lambda: store.list(),
            lambda: store.put("a", b""),
            lambda: store.put_if_absent("a", b""),
            lambda: store.delete("a"),
        ]
        for work in works:
            clock.now = 0.0
            with pytest.raises(TransportError, match=r"503; tried 1\d times in 1\d\d s") as caught:
                work()
            assert caught.value.retryable
            assert clock.now <= 120

    def test_as_late_as_the_remote_asks(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(FailsCalls(backend, 1, after_seconds=33), clock)
        store.put("a", b"1")
        assert clock.waits == [33]

    def test_a_stream_has_its_time_from_each_progress(self, backend: Backend, clock: Clock) -> None:
        backend.write("a", BIG[:10_000], 10_000)
        store = wrapped(Truncates(backend, 1000, 100), clock)
        assert b"".join(store.stream("a", size=10_000)) == BIG[:10_000]
        assert clock.waits == [0.2] * 99


class TestLostAnswers:
    def test_what_we_created_is_ours(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(LosesTheAnswer(backend), clock)
        assert store.put_if_absent("a", b"ours")
        assert store.get("a", most_bytes=MOST) == b"ours"

    def test_what_others_created_is_not(self, backend: Backend, clock: Clock) -> None:
        backend.create("a", b"theirs")
        store = wrapped(LosesTheAnswer(backend), clock)
        assert not store.put_if_absent("a", b"ours")

    def test_what_went_away_is_created_again(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(LosesTheAnswer(backend, lambda: backend.remove("a")), clock)
        assert store.put_if_absent("a", b"ours")
        assert store.get("a", most_bytes=MOST) == b"ours"

    def test_what_others_wrote_meanwhile_stays(self, backend: Backend, clock: Clock) -> None:
        """Even where nothing would refuse to overwrite it: what is there is looked at first."""
        fault = LosesTheAnswer(IgnoresTheCondition(backend), lambda: backend.write("a", b"theirs", 6))
        assert not wrapped(fault, clock).put_if_absent("a", b"ours")
        assert backend.status("a") is not None
        assert wrapped(Wrapped(backend), clock).get("a", most_bytes=MOST) == b"theirs"

    def test_an_answer_that_says_nothing(self, empty_bucket: Bucket, clock: Clock) -> None:
        store = told(empty_bucket, s3(empty_bucket), clock, "mute")
        assert store.put_if_absent("a", b"ours")

    def test_a_put_is_done_again(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(LosesTheAnswer(backend), clock)
        store.put("a", io.BytesIO(BIG[:1000]))
        assert store.get("a", most_bytes=MOST) == BIG[:1000]

    def test_the_second_proof_is_not_taken_for_the_first(self, backend: Backend, clock: Clock) -> None:
        backend.create("a", b"ours")
        wrapped(LosesTheAnswer(backend), clock).prove_exclusive("a")


class TestBodies:
    def test_short_ones_are_tried_again(self, backend: Backend, clock: Clock) -> None:
        backend.write("a", b"12345", 5)
        for work in (
            lambda store: store.get("a", most_bytes=MOST),
            lambda store: store.get_range("a", 0, 5),
            lambda store: b"".join(store.stream("a")),
        ):
            assert work(wrapped(Truncates(backend, 1, 3), clock)) == b"12345"

    def test_short_ones_are_never_taken(self, backend: Backend, clock: Clock) -> None:
        backend.write("a", b"12345", 5)
        store = wrapped(Truncates(backend, 1000, 0), clock)
        with pytest.raises(TransportError, match="ended after 0 of 5 bytes"):
            store.get("a", most_bytes=MOST)
        with pytest.raises(TransportError, match="ended after 0 of 2 bytes"):
            store.get_range("a", 1, 2)
        with pytest.raises(TransportError, match="ended after 0 of 5 bytes"):
            list(store.stream("a"))

    def test_ranges_that_are_ignored(self, backend: Backend, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        backend.write("a", BIG, len(BIG))
        store = wrapped(IgnoresRanges(backend), clock)
        assert store.get_range("a", 3 << 20, 5) == BIG[3 << 20 : (3 << 20) + 5]
        assert b"".join(store.stream("a", begin=len(BIG) - 3)) == BIG[-3:]
        monkeypatch.setattr("dcr_cli.store.body.MOST_SKIPPED_BYTES", 1000)
        with pytest.raises(TransportError, match="ignores ranges"):
            store.get_range("a", 1001, 5)

    def test_an_object_that_is_replaced_while_it_is_read(self, backend: Backend, clock: Clock) -> None:
        backend.write("a", b"12345", 5)
        stream = wrapped(Truncates(backend, 1, 3), clock).stream("a")
        assert next(stream) == b"123"
        backend.write("a", b"abcdefg", 7)
        with pytest.raises(ConflictError, match="was replaced"):
            next(stream)


class TestAbsence:
    def test_denied_is_not_absent(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(DeniesTheAbsent(backend), clock)
        for work in (lambda: store.get("a", most_bytes=MOST), lambda: store.stat("a")):
            with pytest.raises(TransportError, match="access is denied: status 403") as caught:
                work()
            assert not caught.value.retryable
        assert clock.waits == []

    def test_unless_that_is_said(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(DeniesTheAbsent(backend), clock)
        assert store.get("a", most_bytes=MOST, is_denied_absent=True) is None
        assert store.stat("a", is_denied_absent=True) is None

    def test_nothing_is_listed_to_find_what_is_there(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(ListsLate(backend), clock)
        assert store.put_if_absent("a", b"1")
        store.prove_exclusive("a")
        assert store.get("a", most_bytes=MOST) == b"1" and store.stat("a") is not None and store.list() == ()


class TestExclusiveCreate:
    def test_a_store_that_ignores_the_condition_is_found_out(self, backend: Backend, clock: Clock) -> None:
        store = wrapped(IgnoresTheCondition(backend), clock)
        store.put_if_absent("dcr.json", b"ours")
        with pytest.raises(UnsupportedError, match="could be created again") as caught:
            store.prove_exclusive("dcr.json")
        assert "--single-writer" in (caught.value.hint or "")
        assert store.get("dcr.json", most_bytes=MOST) == b"ours"

    def test_unless_there_is_one_writer(self, backend: Backend) -> None:
        store = Store(IgnoresTheCondition(backend), "test://remote", is_single_writer=True)
        assert store.put_if_absent("dcr.json", b"ours")
        store.prove_exclusive("dcr.json")

    def test_a_protocol_without_one(self, tmp_path: Path) -> None:
        url = f"dir://{tmp_path}"
        options: dict[str, object] = {"path": str(tmp_path), "target_protocol": "file"}
        with open_store(url, options) as store:
            store.put("a", b"1")
            assert store.get("a", most_bytes=MOST) == b"1"
            with pytest.raises(UnsupportedError, match="has no way to create") as caught:
                store.put_if_absent("b", b"1")
            assert "--single-writer" in (caught.value.hint or "")
        with open_store(url, options, is_single_writer=True) as store:
            assert store.put_if_absent("b", b"1")
            assert not store.put_if_absent("b", b"2")

    def test_more_than_one_request_takes(self, backend: Backend, clock: Clock) -> None:
        with pytest.raises(ValueError, match="one request"):
            Store(backend, "test://remote").put_if_absent("a", bytes(MOST_CREATED_BYTES + 1))


# Faults on the wire


def told(bucket: Bucket, place: Place, clock: Clock, *faults: str) -> Store:
    bucket.faults[:] = faults
    return open_store(place.url, place.options, patience=clock.patience())


class TestOnTheWire:
    """What the bucket is told to get wrong, through the S3 and the HTTP client."""

    @pytest.fixture(params=["s3", "http"])
    def place(self, request: pytest.FixtureRequest, empty_bucket: Bucket) -> Place:
        empty_bucket.objects["/bucket/pre/fix/a"] = b"1234567890"
        return s3(empty_bucket) if request.param == "s3" else Place(f"{empty_bucket.url}/bucket/pre/fix")

    @pytest.mark.parametrize("fault", ["500", "502", "503", "429", "short"])
    def test_what_passes(self, empty_bucket: Bucket, place: Place, clock: Clock, fault: str) -> None:
        store = told(empty_bucket, place, clock, fault, fault)
        assert store.get("a", most_bytes=MOST) == b"1234567890"
        empty_bucket.faults[:] = [fault, fault]
        assert store.get_range("a", 2, 5) == b"34567"
        empty_bucket.faults[:] = [fault, fault]
        assert b"".join(store.stream("a", begin=1)) == b"234567890"

    @pytest.mark.parametrize("fault", ["400", "401", "405", "501", "302"])
    def test_what_does_not(self, empty_bucket: Bucket, place: Place, clock: Clock, fault: str) -> None:
        store = told(empty_bucket, place, clock, fault)
        with pytest.raises(TransportError) as caught:
            store.get("a", most_bytes=MOST)
        assert not caught.value.retryable and clock.waits == []

    def test_a_range_that_is_ignored(self, empty_bucket: Bucket, place: Place, clock: Clock) -> None:
        store = told(empty_bucket, place, clock, "whole")
        assert store.get_range("a", 2, 5) == b"34567"

    def test_another_range_than_asked_for(self, empty_bucket: Bucket, place: Place, clock: Clock) -> None:
        store = told(empty_bucket, place, clock, "other")
        with pytest.raises(TransportError):
            store.get_range("a", 2, 5)

    def test_words_of_an_address_are_no_news(self, clock: Clock) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        options = {**S3_OPTIONS, "endpoint_url": f"http://127.0.0.1:{port}"}
        store = open_store("s3://bucket/redirect/certificate", options, patience=clock.patience(deadline_seconds=1))
        with pytest.raises(TransportError) as caught:
            store.get("non-partial response", most_bytes=MOST)
        assert caught.value.retryable

    def test_nobody_is_there(self, place: Place, clock: Clock) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        options = {**place.options, "endpoint_url": f"http://127.0.0.1:{port}"} if place.options else {}
        url = place.url if place.options else f"http://127.0.0.1:{port}/a"
        with pytest.raises(TransportError) as caught:
            open_store(url, options, patience=clock.patience(deadline_seconds=1)).get("a", most_bytes=MOST)
        assert caught.value.retryable


class TestHttp:
    @pytest.fixture
    def place(self, empty_bucket: Bucket) -> Place:
        empty_bucket.objects["/bucket/a"] = b"1234567890"
        return Place(f"{empty_bucket.url}/bucket")

    @pytest.mark.parametrize(
        ("fault", "facts"),
        [("page", "a web page"), ("gzip", "encoded"), ("silent", "how long it is"), ("403", "denied")],
    )
    def test_what_is_no_answer(self, empty_bucket: Bucket, place: Place, clock: Clock, fault: str, facts: str) -> None:
        store = told(empty_bucket, place, clock, fault)
        with pytest.raises(TransportError, match=facts):
            store.get("a", most_bytes=MOST)

    def test_without_a_length_the_expected_one_decides(self, empty_bucket: Bucket, place: Place, clock: Clock) -> None:
        assert told(empty_bucket, place, clock, "silent").get("a", most_bytes=MOST, size=10) == b"1234567890"
        assert len(clock.waits) == 1

    def test_redirects(self, empty_bucket: Bucket, place: Place, clock: Clock) -> None:
        store = told(empty_bucket, place, clock, "to /bucket/a")
        assert store.get_range("b", 1, 2) == b"23"
        store = told(empty_bucket, place, clock, *["to /bucket/a"] * 20)
        with pytest.raises(TransportError, match="redirects too often"):
            store.get("a", most_bytes=MOST)
        store = told(empty_bucket, place, clock, "302")
        with pytest.raises(TransportError, match="or to nowhere"):
            store.get("a", most_bytes=MOST)
        store = told(empty_bucket, place, clock, "to file:///etc/passwd")
        with pytest.raises(TransportError):
            store.get("a", most_bytes=MOST)

    def test_credentials_go_to_no_other_server(self, empty_bucket: Bucket, place: Place, clock: Clock) -> None:
        with bucket_server() as other:
            other.objects["/x"] = b"1"
            empty_bucket.faults[:] = [f"to {other.url}/x", "to /bucket/a"]
            options: dict[str, object] = {"token": SECRET, "headers": {"X-Key": SECRET}}
            store = open_store(f"{place.url}?sig={SECRET}", options, patience=clock.patience())
            assert store.get("a", most_bytes=MOST) == b"1"
            assert SECRET not in str(other.requests) and other.requests
            assert store.get("a", most_bytes=MOST) == b"1234567890"
        assert [request[2]["authorization"] for request in empty_bucket.requests] == [f"Bearer {SECRET}"] * 3

    def test_nothing_is_written(self, empty_bucket: Bucket, place: Place) -> None:
        """By a server that says it takes nothing."""
        hint = "name it by where it lies, or a relay of it that may be written through"
        for is_single_writer in (False, True):
            with open_store(place.url, is_single_writer=is_single_writer) as store:
                for work in (lambda: store.put("b", b""), lambda: store.put_if_absent("b", b"")):
                    empty_bucket.faults[:] = ["405"]
                    with pytest.raises(UnsupportedError, match="over HTTP a remote can only be read") as caught:
                        work()
                    assert caught.value.hint == hint
                for never in (lambda: store.delete("a"), lambda: store.list()):
                    with pytest.raises(UnsupportedError):
                        never()
        assert set(empty_bucket.objects) == {"/bucket/a"}

    def test_creating_twice_cannot_be_tried(self, empty_bucket: Bucket, place: Place) -> None:
        with place.open() as store:
            empty_bucket.faults[:] = ["", "501"]
            with pytest.raises(UnsupportedError, match="over HTTP a remote can only be read"):
                store.prove_exclusive("a")


class TestS3OnTheWire:
    def test_a_lost_answer(self, empty_bucket: Bucket, clock: Clock) -> None:
        store = told(empty_bucket, s3(empty_bucket), clock, "lose")
        assert store.put_if_absent("a", b"ours")
        assert not store.put_if_absent("a", b"theirs")

    def test_a_bucket_that_ignores_the_condition(self, empty_bucket: Bucket, clock: Clock) -> None:
        empty_bucket.conditional = False
        store = told(empty_bucket, s3(empty_bucket), clock)
        assert store.put_if_absent("a", b"ours")
        with pytest.raises(UnsupportedError):
            store.prove_exclusive("a")

    def test_the_commit_is_one_request(self, empty_bucket: Bucket, clock: Clock) -> None:
        assert told(empty_bucket, s3(empty_bucket), clock).put_if_absent("a", bytes(MOST_CREATED_BYTES))
        (request,) = empty_bucket.requests
        assert request[:2] == ("PUT", "/bucket/pre/fix/a") and request[2]["if-none-match"] == "*"

    def test_one_request_says_that_nothing_is_there(self, empty_bucket: Bucket, clock: Clock) -> None:
        assert told(empty_bucket, s3(empty_bucket), clock).get("a", most_bytes=MOST) is None
        assert [request[:2] for request in empty_bucket.requests] == [("GET", "/bucket/pre/fix/a")]


# Addresses, options, credentials


class TestOpening:
    @pytest.mark.parametrize("url", ["", "file://relative", "s3://", "s3://b/../c", "http://[x/", "s3://b/a?x=1"])
    def test_addresses_that_make_no_sense(self, url: str) -> None:
        with pytest.raises(UsageError):
            open_store(url)

    @pytest.mark.parametrize(
        "url",
        [
            f"user:{SECRET}@host/path",
            f"user:{SECRET}@host:path",
            "git@host:path",
            "a@b:",
            f":{SECRET}@h",
            "a:b@c",
            f"u:a/{SECRET}@h",
        ],
    )
    def test_a_login_is_no_folder(self, url: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert (caught.value.hint or "").startswith("sftp://user@host/path")
        assert_no_secret(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            f"s3://AKIAX:/{SECRET}@bucket/p",
            f"sftp://u:12/{SECRET}@host/p",
            f"sftp://u@there:12/{SECRET}@host/p",
            f"https://u:12/{SECRET}@host/..",
        ],
    )
    def test_a_password_with_a_slash_is_no_path(self, url: str) -> None:
        with pytest.raises(UsageError, match="has an @ in its path behind a port") as caught:
            open_store(url)
        assert caught.value.what == f"{url.partition(':')[0]}://"
        assert_no_secret(caught.value)

    def test_unless_a_folder_has_that_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a:b@c").mkdir()
        for url in ("a:b@c", "a:b@c/d", "./new:b@c", Path("other@b:c"), "name@host/a:b", "./a:c/c@d", "a b:c@d"):
            with open_store(url) as store:
                store.put("e", b"1")
                assert (tmp_path / url / "e").is_file()
        (tmp_path / "run:1").mkdir()
        assert not is_login("run:1@3") and is_login("run:2@3")

    @pytest.mark.parametrize(
        "url", [f"s3://{SECRET}@bucket", f"s3://:{SECRET}@bucket", f"gs://u:{SECRET}@bucket", f"az://u:{SECRET}@box"]
    )
    def test_credentials_that_would_be_passed_over(self, url: str) -> None:
        with pytest.raises(UsageError, match=r"in front of its (bucket|account)") as caught:
            open_store(url)
        assert_no_secret(caught.value)

    def test_protocols_that_nobody_serves(self) -> None:
        with pytest.raises(UnsupportedError, match="no package that is known serves nosuch://") as caught:
            open_store("nosuch://a/b")
        assert caught.value.hint is not None and "s3" in caught.value.hint

    @pytest.mark.parametrize(
        ("url", "what", "hint"),
        [
            ("simplecache::s3://b/c", "remote: an address made of several", "by itself"),
            ("zip://a::http://h/b.zip", "remote: an address made of several", "by itself"),
            ("a::b", "remote: an address made of several", "by itself"),
            ("zip://a/b.zip", "zip://: looks into a file", "unpack it"),
            ("tar:///b.tar", "tar://: looks into a file", "unpack it"),
            ("simplecache://b/c", "simplecache://: keeps what it has seen", "give the address"),
        ],
    )
    def test_what_leads_through_something_else(self, url: str, what: str, hint: str) -> None:
        with pytest.raises(UsageError, match=f"^{what}") as caught:
            open_store(url)
        assert caught.value.hint is not None and hint in caught.value.hint

    @pytest.mark.parametrize("url", ["s3://b", "gs://b", "az://b", "http://h/a", "sftp://h/a", "memory://a", "/tmp"])
    def test_unknown_options_are_named(self, url: str) -> None:
        with pytest.raises(UsageError, match="bogus") as caught:
            open_store(url, {"bogus": SECRET})
        assert_no_secret(caught.value)

    @pytest.mark.parametrize(
        ("url", "package", "extra"),
        [
            ("s3://b/c", "obstore", "s3"),
            ("gs://b/c", "obstore", "gcs"),
            ("az://b/c", "obstore", "azure"),
            ("sftp://h/a", "paramiko", "sftp"),
        ],
    )
    def test_a_package_that_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
    ) -> None:
        for name in ("dcr_cli.store.objects", "dcr_cli.store.sftp"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UnsupportedError, match=f"needs {package}, which is not installed") as caught:
            open_store(url)
        assert caught.value.hint == f"pip install 'dcr-cli[{extra}]'"

    def test_libraries_are_imported_only_when_they_are_asked_for(self, tmp_path: Path) -> None:
        code = (
            "import sys; from dcr_cli.store.opening import open_store\n"
            f"open_store({str(tmp_path / 'a')!r}).put('a', b'1'); open_store('http://localhost/')\n"
            "assert not {'obstore', 'paramiko', 'fsspec', 'boto3', 'numpy'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_the_same_root_in_other_words(self, tmp_path: Path) -> None:
        for url in (f"{tmp_path}/a", f"{tmp_path}/a/", f"file://{tmp_path}/a", f"FILE://{tmp_path}/a//"):
            open_store(url).put("b", url.encode())
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


class TestCredentialsOfS3:
    def test_a_profile(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text(f"[default]\naws_access_key_id=A\naws_secret_access_key={SECRET}\n")
        (tmp_path / "config").write_text("[default]\nregion=eu-x\n[profile sso]\nsso_session=s\n")
        environment = {
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
            "AWS_CONFIG_FILE": str(tmp_path / "config"),
        }
        cloud = cloud_of(locate("s3://b/c/"), {}, environment)
        assert cloud.bucket == "b" and cloud.prefix == "c" and cloud.profile is None
        assert cloud.settings["secret_access_key"] == SECRET and cloud.settings["region"] == "eu-x"
        assert SECRET not in repr(cloud)
        assert cloud_of(locate("s3://b"), {"profile": "sso"}, environment).profile == "sso"
        with pytest.raises(UsageError, match="profile other"):
            cloud_of(locate("s3://b"), {"profile": "other"}, environment)
        # What the environment or options say comes first.
        assert "access_key_id" not in cloud_of(locate("s3://b"), {}, {**environment, "AWS_ACCESS_KEY_ID": "B"}).settings
        assert cloud_of(locate("s3://b"), {"key": "C", "secret": "d"}, environment).settings["access_key_id"] == "C"

    def test_other_ways_to_say_it(self) -> None:
        azure = cloud_of(locate("abfs://box@acc.dfs.core.windows.net/p"), {"sas_token": SECRET}, {})
        assert (azure.bucket, azure.prefix, azure.settings["account_name"]) == ("box", "p", "acc")
        text = f"AccountName=acc;AccountKey={SECRET};BlobEndpoint=http://127.0.0.1:1/acc"
        azure = cloud_of(locate("az://box"), {"connection_string": text}, {})
        assert azure.settings["account_key"] == SECRET and azure.client_options["allow_http"] is True


def assert_no_secret(error: BaseException) -> None:
    """None in what is printed of an error, nor in the variables of our own functions on the way."""
    assert isinstance(error, DcrError)
    shown = [str(error), repr(error), error.hint or "", *traceback.format_exception(error)]
    while error is not None:
        shown.append(repr(error.args))
        assert error.__context__ is None or isinstance(error.__context__, DcrError), repr(error.__context__)
        error = error.__context__  # type: ignore[assignment]
    assert SECRET not in "\n".join(shown)


class TestSecrets:
    """Planted in every place that an address and options have; every kind of failure is provoked."""

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            (f"http://user:{SECRET}@HOST/bucket?sig={SECRET}", {}),
            (f"http://HOST/{'bucket'}?token={SECRET}", {"token": SECRET, "headers": {"X-Api-Key": SECRET}}),
            (f"s3://AKID:{SECRET}@bucket/pre", {"endpoint_url": "http://HOST", "region": "us-east-1"}),
            ("s3://bucket/pre", {"secret": SECRET, "key": SECRET, "token": SECRET, "endpoint_url": "http://HOST"}),
            ("gs://bucket/pre", {"bearer_token": SECRET, "endpoint_url": "http://HOST"}),
            ("az://bucket/pre", {"account_name": "a", "sas_token": f"sig={SECRET}", "endpoint_url": "http://HOST"}),
            ("az://bucket/pre", {"account_name": "a", "account_key": "aHVudGVyMg==", "endpoint_url": "http://HOST"}),
            (f"sftp://user:{SECRET}@HOST/pre", {"look_for_keys": False, "allow_agent": False}),
        ],
    )
    def test_none_is_told(
        self,
        empty_bucket: Bucket,
        clock: Clock,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
        tmp_path: Path,
        url: str,
        options: dict[str, object],
    ) -> None:
        caplog.set_level(logging.DEBUG)
        host = f"127.0.0.1:{empty_bucket.server_port}"
        options = {
            name: each.replace("HOST", host) if isinstance(each, str) else each for name, each in options.items()
        }
        store = open_store(url.replace("HOST", host), options, patience=clock.patience(deadline_seconds=1))
        assert SECRET not in repr(store) + store.shown + repr(vars(store))
        for fault in ("401", "403", "503", "page", "short", "to http://x:y@nowhere/"):
            works: list[Callable[[], object]] = [
                lambda: store.get("a", most_bytes=1),
                lambda: store.get_range("a", 1, 9),
                lambda: list(store.stream("a", size=3)),
                lambda: store.put("a", b"1"),
                lambda: store.put_if_absent("a", b"1"),
                lambda: store.stat("a"),
                lambda: store.list(),
                lambda: store.delete("a"),
            ]
            empty_bucket.objects["/bucket/pre/a"] = b"12"
            empty_bucket.objects["/bucket/a"] = b"12"
            for work in works:
                empty_bucket.faults[:] = [fault] * 20
                try:
                    work()
                except DcrError as error:
                    assert_no_secret(error)
            if url.startswith("sftp"):
                break
        out = capfd.readouterr()
        assert SECRET not in caplog.text + out.out + out.err

    @pytest.mark.parametrize(
        "url",
        [
            f"s3://u:{SECRET}@b/a?x={SECRET}",
            f"s3://u:{SECRET}@b/../a",
            f"http://u:{SECRET}@[h/a",
            f"http://u:{SECRET}@h:port/a",
            f"nosuch://u:{SECRET}@h/a",
            f"s3://u:{SECRET}@/a",
            f"zip://a::http://u:{SECRET}@h/b.zip",
            f"ftp://u:{SECRET}@127.0.0.1:1/a",
            f"http://u:{SECRET}@h/a#{SECRET}",
        ],
    )
    def test_none_of_an_address_that_cannot_be_opened(self, url: str) -> None:
        with pytest.raises(DcrError) as caught:
            open_store(url)
        assert_no_secret(caught.value)
