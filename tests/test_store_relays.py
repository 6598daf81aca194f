"""Stores over a relay's dialect: what is written by PUT, created once, listed, and waited for."""

from __future__ import annotations

import io
import json
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any, Literal

import pytest

from dcr_cli import stopping
from dcr_cli.errors import ConflictError, DcrError, LocalError, TransportError, UnsupportedError, UsageError
from dcr_cli.store import http as http_module, sockets
from dcr_cli.store.backend import Entry
from dcr_cli.store.http_answers import has_waited
from dcr_cli.store.http_headers import Caller
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from relay_stand_in import StandIn, stand_in, until
from store_contract import BIG, MOST, Clock, Place, ReadContract, StoreContract
from store_servers import bucket_server
from test_connections import write_certificate

SECRET = "hunter2SECRET"


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with stand_in() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(relay: StandIn, clock: Clock) -> Iterator[Store]:
    with open_store(relay.url, patience=clock.patience(deadline_seconds=5)) as store:
        yield store


class TestContract(ReadContract):
    """All of it but what a relay does not do: another object in an object's place, other listings, removing."""

    rounds = 20

    @pytest.fixture
    def place(self, relay: StandIn) -> Place:
        return Place(relay.url)

    test_a_stream_is_put_from_where_it_stands = StoreContract.test_a_stream_is_put_from_where_it_stands
    test_put_if_absent = StoreContract.test_put_if_absent
    test_exclusive_create_is_proved = StoreContract.test_exclusive_create_is_proved
    test_threads_race = StoreContract.test_threads_race


class TestWriting:
    def test_what_is_there_does_not_change(self, relay: StandIn, store: Store, clock: Clock) -> None:
        store.put("versions/a", b"1")
        store.put("versions/a", b"1")
        with pytest.raises(ConflictError, match=f"{relay.url}/versions/a: is there already with other bytes"):
            store.put("versions/a", b"2")
        assert relay.objects == {"versions/a": b"1"}
        store.put("next.json", b"1")
        store.put("next.json", b"2")
        assert relay.objects["next.json"] == b"2"
        assert clock.waits == []

    def test_what_a_request_is(self, relay: StandIn, store: Store) -> None:
        assert store.put_if_absent("commits/1", b"12345")
        store.put("versions/b", io.BytesIO(b"123"))
        (create, put, stat) = relay.requests
        assert create[:2] == ("PUT", "commits/1") and create[2]["if-none-match"] == "*"
        assert create[2]["content-length"] == "5" and "transfer-encoding" not in create[2]
        assert put[:2] == ("PUT", "versions/b") and "if-none-match" not in put[2]
        assert put[2]["content-length"] == "3" and put[2]["content-type"] == "application/octet-stream"
        assert stat[:2] == ("HEAD", "versions/b")

    def test_each_has_a_fresh_connection_that_serves_again(self, relay: StandIn, store: Store) -> None:
        for number in range(1, 4):
            store.put(f"versions/{number}", bytes(10))
            assert store.get(f"versions/{number}", most_bytes=MOST) == bytes(10)
            assert relay.connections == number

    @pytest.mark.parametrize("data", [b"ours", io.BytesIO(BIG)])
    def test_an_answer_that_is_lost(self, relay: StandIn, store: Store, clock: Clock, data: Any) -> None:
        relay.faults[:] = ["lose"]
        store.put("versions/a", data)
        assert relay.objects["versions/a"] == (data if isinstance(data, bytes) else BIG)
        assert len(clock.waits) == 1
        relay.faults[:] = ["lose"]
        assert store.put_if_absent("commits/a", b"ours")
        relay.faults[:] = ["lose"]
        assert not store.put_if_absent("commits/a", b"theirs")

    def test_a_create_that_is_not_read_back(self, relay: StandIn, store: Store) -> None:
        assert store.create("commits/a", b"ours")
        assert not store.create("commits/a", b"ours")
        relay.faults[:] = ["lose"]
        assert not store.create("commits/b", b"ours")
        assert relay.objects["commits/b"] == b"ours"
        assert {method for method, _, _ in relay.requests} == {"PUT"}
        with pytest.raises(ValueError, match="cannot be created in one request"):
            store.create("commits/c", bytes(MOST + 1))

    @pytest.mark.parametrize("how", ["early", "early close"])
    @pytest.mark.parametrize(
        ("status", "facts"), [(401, "asks who we are"), (403, "access is denied"), (413, "status 413")]
    )
    def test_an_answer_before_the_end_counts(
        self, relay: StandIn, store: Store, clock: Clock, how: str, status: int, facts: str
    ) -> None:
        """And at once, though nobody reads what is sent."""
        relay.faults[:] = [f"{how} {status}"]
        began = time.monotonic()
        with pytest.raises(TransportError, match=facts) as caught:
            store.put("versions/a", io.BytesIO(bytes(64 << 20)))
        assert not caught.value.retryable and clock.waits == []
        assert status != 401 or "--storage-option token_file=FILE" in (caught.value.hint or "")
        assert store.get("versions/a", most_bytes=MOST) is None
        assert time.monotonic() - began < 5

    def test_a_success_before_the_end_does_not(self, relay: StandIn, store: Store, clock: Clock) -> None:
        relay.faults[:] = ["early 204"]
        store.put("versions/a", io.BytesIO(BIG))
        assert relay.objects["versions/a"] == BIG
        assert len(clock.waits) == 1

    @pytest.mark.parametrize("fault", ["503", "502", "408"])
    def test_what_passes(self, relay: StandIn, store: Store, clock: Clock, fault: str) -> None:
        relay.faults[:] = [fault, fault]
        store.put("versions/a", io.BytesIO(b"12345"))
        relay.faults[:] = [fault]
        assert store.put_if_absent("commits/a", b"12345")
        assert relay.objects == {"versions/a": b"12345", "commits/a": b"12345"}
        assert len(clock.waits) == 3

    @pytest.mark.parametrize("fault", ["404", "405", "501", "page 403", "page 404", "page 405"])
    def test_a_server_that_is_no_relay(self, relay: StandIn, store: Store, clock: Clock, fault: str) -> None:
        works: list[Callable[[], object]] = [
            lambda: store.put("versions/a", b"1"),
            lambda: store.put_if_absent("commits/a", b"1"),
            lambda: store.create("commits/a", b"1"),
        ]
        for work in works:
            relay.faults[:] = [fault]
            with pytest.raises(UnsupportedError, match="over HTTP a remote can only be read") as caught:
                work()
            assert caught.value.hint is not None and "a relay of it" in caught.value.hint
        assert clock.waits == [] and relay.objects == {}

    def test_a_server_that_passes_the_condition_over_has_no_exclusive_create(self, clock: Clock) -> None:
        with bucket_server() as bucket, open_store(bucket.url, patience=clock.patience()) as store:
            with pytest.raises(UnsupportedError, match="does not say whether it made an object"):
                store.put_if_absent("a", b"1")
            bucket.conditional = False
            with pytest.raises(UnsupportedError):
                store.prove_exclusive("a")

    def test_nothing_that_is_written_is_redirected(self, relay: StandIn, clock: Clock) -> None:
        with stand_in() as other:
            for to in (f"{other.url}/a", "/versions/b", "https://other.invalid/"):
                relay.faults[:] = [f"to {to}"]
                with (
                    open_store(relay.url, {"token": SECRET}, patience=clock.patience()) as store,
                    pytest.raises(TransportError, match="redirects what is to be written") as caught,
                ):
                    store.put("versions/a", b"1")
                assert not caught.value.retryable
            assert other.requests == [] and other.objects == relay.objects == {}

    def test_a_source_that_shrinks(self, relay: StandIn, store: Store) -> None:
        class Shrinks(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                return super().read(size) if self.tell() < 2 << 20 else b""

        with pytest.raises(ConflictError, match="shorter while it was sent"):
            store.put("versions/a", Shrinks(BIG))
        assert relay.objects == {}

    def test_a_server_that_takes_nothing(self, relay: StandIn, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counted is how long it takes nothing, not how long all of it takes."""
        monkeypatch.setattr("dcr_cli.store.http_client.Client.ask.__kwdefaults__", {"body": None, "seconds": 0.2})
        patience = clock.patience(deadline_seconds=0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with (
                open_store(url, patience=patience) as store,
                pytest.raises(TransportError, match="did not answer in 0 s"),
            ):
                store.put("versions/a", io.BytesIO(bytes(64 << 20)))

    def test_through_a_proxy(self, relay: StandIn, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", relay.url.replace("//", "//user:word@"))
        with open_store("http://nowhere.invalid", patience=clock.patience()) as store:
            store.put("versions/a", io.BytesIO(BIG))
        assert relay.objects == {"http://nowhere.invalid/versions/a": BIG}
        assert relay.requests[0][2]["proxy-authorization"] == "Basic dXNlcjp3b3Jk"

    def test_nothing_is_removed(self, store: Store) -> None:
        with pytest.raises(UnsupportedError, match="nothing can be removed"):
            store.delete("versions/a")
        with pytest.raises(UnsupportedError):
            store.leftovers()

    @pytest.mark.parametrize("is_refused", [False, True])
    def test_in_tls(self, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
        certificate, key = tmp_path / "certificate", tmp_path / "key"
        write_certificate(certificate, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with stand_in() as server:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            url = f"https://127.0.0.1:{server.server_port}"
            with open_store(url, patience=clock.patience(deadline_seconds=0)) as store:
                if is_refused:
                    server.faults[:] = ["early close 403"]
                    with pytest.raises(TransportError):
                        store.put("versions/a", io.BytesIO(BIG))
                else:
                    store.put("versions/a", io.BytesIO(BIG))
                    assert store.wait("versions/a", 20)
            assert server.objects == ({} if is_refused else {"versions/a": BIG})


class TestListing:
    def test_acknowledgements(self, relay: StandIn, store: Store) -> None:
        for key in ("acks/p/b.staged", "acks/p/a.staged", "acks/q/a.applied", "versions/a"):
            relay.put(key, b"12")
        assert store.list("acks/p/") == (
            Entry("acks/p/a.staged", 2, 1.5e9),
            Entry("acks/p/b.staged", 2, 1.5e9),
        )
        assert len(store.list("acks/")) == 3
        assert store.list("acks/r/") == ()
        assert [key for _, key, _ in relay.requests] == ["acks/p/", "acks/", "acks/r/"]

    def test_nothing_else_is_asked_for(self, relay: StandIn, store: Store) -> None:
        for prefix in ("", "versions/", "commits/"):
            with pytest.raises(UnsupportedError, match="lists nothing"):
                store.list(prefix)
        assert relay.requests == []

    def test_what_passes(self, relay: StandIn, store: Store, clock: Clock) -> None:
        relay.put("acks/a", b"1")
        relay.faults[:] = ["503", "short"]
        assert len(store.list("acks/")) == 1
        assert len(clock.waits) == 2

    @pytest.mark.parametrize("fault", ["404", "405", "501", "page 403", "page 404", "page 200"])
    def test_a_server_that_does_not_know_it(self, relay: StandIn, store: Store, fault: str) -> None:
        relay.faults[:] = [fault]
        with pytest.raises(UnsupportedError, match="lists nothing"):
            store.list("acks/")

    @pytest.mark.parametrize("fault", ["401", "403"])
    def test_one_that_refuses_to(self, relay: StandIn, store: Store, fault: str) -> None:
        relay.faults[:] = [fault]
        with pytest.raises(TransportError):
            store.list("acks/")

    @pytest.mark.parametrize(
        "change",
        [
            lambda document: [document],
            lambda document: {},
            lambda document: {**document, "format": "dcr-2"},
            lambda document: {**document, "requires": ["a"]},
            lambda document: {**document, "entries": {}},
            lambda document: {**document, "entries": document["entries"] * 2},
            *[
                lambda document, changes=changes: {**document, "entries": [{**document["entries"][0], **changes}]}
                for changes in (
                    {"key": "versions/a"},
                    {"key": "acks/../a"},
                    {"key": "acks//a"},
                    {"key": "acks/"},
                    {"key": 1},
                    {"bytes": -1},
                    {"bytes": True},
                    {"bytes": 1.5},
                    {"bytes": None},
                    {"bytes": 1 << 63},
                    {"modified": "1"},
                    {"modified": -1},
                    {"modified": True},
                    {"modified": 1e300},
                )
            ],
            lambda document: {**document, "entries": ["acks/a"]},
        ],
    )
    def test_what_is_no_listing(self, relay: StandIn, store: Store, change: Callable[[Any], Any]) -> None:
        right = {
            "format": "dcr-1",
            "requires": [],
            "entries": [{"key": "acks/a", "bytes": 1, "modified": None, "more": 1}],
            "more": 1,
        }
        relay.listing = json.dumps(right).encode()
        assert store.list("acks/") == (Entry("acks/a", 1, None),)
        relay.listing = json.dumps(change(right)).encode()
        with pytest.raises(UnsupportedError, match="lists nothing"):
            store.list("acks/")

    def test_one_that_never_ends(self, relay: StandIn, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_module, "_MOST_LISTING_BYTES", 1000)
        relay.put("acks/a", b"1")
        assert len(store.list("acks/")) == 1
        relay.listing = b" " * 1001
        with pytest.raises(UnsupportedError, match="lists nothing"):
            store.list("acks/")


class TestOptions:
    def test_a_token_in_a_file(self, relay: StandIn, clock: Clock, tmp_path: Path) -> None:
        """It is read each time that a store is opened."""
        relay.token = "first"
        relay.put("a", b"1")
        path = tmp_path / "token"
        for text in ("first", "first\n", "first\r\nsecond\n", " first \n"):
            path.write_text(text)
            with open_store(relay.url, {"token_file": str(path)}) as store:
                assert store.get("a", most_bytes=MOST) == b"1"
        relay.token = "second"
        path.write_text("second")
        with open_store(relay.url, {"token_file": path}) as store:
            assert store.get("a", most_bytes=MOST) == b"1"

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\n",
            b"\xff" + SECRET.encode(),
            SECRET.encode() + b"\0",
            b"two " + SECRET.encode(),
            SECRET.encode() * 2000,
        ],
    )
    def test_a_file_that_holds_none(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "token"
        path.write_bytes(data)
        with pytest.raises(UsageError) as caught:
            open_store("http://h/a", {"token_file": str(path)})
        assert str(path) in str(caught.value) and SECRET not in str(caught.value)

    def test_a_file_that_never_ends(self) -> None:
        with pytest.raises(UsageError, match="is larger than the 16384 bytes"):
            open_store("http://h/a", {"token_file": "/dev/zero"})

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path, "a\0b"):
            with pytest.raises(LocalError, match="the token in it cannot be read"):
                open_store("http://h/a", {"token_file": str(path)})
        for options in ({"token_file": ""}, {"token_file": "a", "token": SECRET}):
            with pytest.raises(UsageError) as caught:
                open_store("http://h/a", options)
            assert SECRET not in str(caught.value)

    @pytest.mark.parametrize(("kind", "header"), [("receiver", "dcr-receiver"), ("relay", "dcr-relay")])
    def test_who_asks(self, relay: StandIn, kind: Literal["receiver", "relay"], header: str) -> None:
        """All requests say so, but to the server itself alone."""
        with stand_in() as other:
            other.put("a", b"1")
            relay.faults[:] = ["", "", "", f"to {other.url}/a"]
            with open_store(relay.url, caller=Caller(kind, "eu-1")) as store:
                store.put_if_absent("a", b"1")
                store.stat("a")
                store.wait("a", 1)
                store.get("a", most_bytes=MOST)
            assert [headers[header] for _, _, headers in relay.requests] == ["eu-1"] * 4
            assert all(header not in headers for _, _, headers in other.requests) and other.requests


class TestWaiting:
    def test_until_it_is_there(self, relay: StandIn, store: Store) -> None:
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(store.wait, "commits/1", 30)
            until(lambda: relay.waiting)
            assert not waited.done()
            relay.put("commits/1", b"1")
            assert waited.result(10)
        ((method, key, headers),) = relay.requests
        assert (method, key, headers["prefer"]) == ("HEAD", "commits/1", "wait=30")
        assert store.wait("commits/1", 30)

    def test_until_there_is_other_news_or_time_is_over(self, relay: StandIn, store: Store) -> None:
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(store.wait, "commits/1", 30)
            until(lambda: relay.waiting)
            relay.put("next.json", b"1")
            assert waited.result(10)
        relay.faults[:] = ["at once"]
        assert store.wait("commits/1", 30)
        assert store.stat("commits/1") is None

    def test_a_server_that_does_not(self, relay: StandIn, store: Store, clock: Clock) -> None:
        relay.waits = False
        assert not store.wait("commits/1", 30)
        relay.put("commits/1", b"1")
        assert not store.wait("commits/1", 30)
        for fault in ("401", "403", "405", "501"):
            relay.faults[:] = [fault]
            assert not store.wait("commits/1", 30)
        assert clock.waits == []

    def test_a_fault_is_raised_and_not_tried_again(self, relay: StandIn, store: Store, clock: Clock) -> None:
        relay.faults[:] = ["503"]
        with pytest.raises(TransportError, match="status 503") as caught:
            store.wait("commits/1", 30)
        assert caught.value.retryable
        assert clock.waits == [] and len(relay.requests) == 1

    def test_other_stores_do_not_and_are_not_asked(self, tmp_path: Path) -> None:
        for store in (open_store(tmp_path), Store(MemoryBackend("a"), "test://remote")):
            assert not store.may_be_relay
            assert not store.wait("commits/1", 30)
            assert store.traffic.requests == 0

    def test_a_thread_ends_while_it_waits(self, relay: StandIn, store: Store) -> None:
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(store.wait, "commits/1", 30)
            until(lambda: relay.waiting)
            began = time.monotonic()
            try:
                stopping.ask(signal.SIGTERM)
                with pytest.raises(stopping.Stopped):
                    waited.result(10)
            finally:
                stopping.ask(0)
        assert time.monotonic() - began < 2

    @pytest.mark.parametrize("applied", ["wait", "Wait=30", "return=minimal, wait", "wait; a=b"])
    def test_what_says_that_it_was_waited_for(self, applied: str) -> None:
        assert has_waited(_headers(applied))

    @pytest.mark.parametrize("applied", ["", "waiting", "return=minimal", "respond-async; wait"])
    def test_what_does_not(self, applied: str) -> None:
        assert not has_waited(_headers(applied))


def _headers(applied: str) -> Message:
    headers = Message()
    headers["Preference-Applied"] = applied
    return headers


def test_waits_on_sockets_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(sockets.SilentError) as caught:
            sockets.wait_for(ours, select.POLLIN, 0.05)
        assert caught.value.seconds == 0.05
        thread = threading.Timer(0.1, lambda: theirs.send(b"1"))
        thread.start()
        assert sockets.wait_for(ours, select.POLLIN, 10) & select.POLLIN
        thread.join()


def test_no_error_shows_a_secret(relay: StandIn, clock: Clock) -> None:
    for fault in ("401", "403", "404", "409", "412", "413", "500", "page 403", "to http://x:y@nowhere/", "lose"):
        options = {"token": SECRET, "headers": {"X-Key": SECRET}}
        with open_store(f"{relay.url}?sig={SECRET}", options, patience=clock.patience(deadline_seconds=0)) as store:
            for work in (lambda: store.put("versions/a", b"1"), lambda: store.create("versions/a", b"1")):
                relay.faults[:] = [fault]
                told = ""
                try:
                    work()
                except DcrError as error:
                    told = f"{error} {error.hint}"
                assert SECRET not in told
