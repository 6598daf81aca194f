"""Requests to engines, whatever comes instead of an answer: always one kind of error, in time, and of bounded size."""

from __future__ import annotations

import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dcr_cli.engine import wire
from dcr_cli.engine.calls import CallError, Server
from dcr_cli.engine.wire import Request, exchange
from dcr_cli.stopping import Stopped

HUGE = 1 << 62


def take_request(connected: socket.socket) -> bytes:
    """Read all of a request, or what begins TLS: what is left unread when a connection is closed resets it."""
    data = b""
    while (part := connected.recv(1 << 16)) and not part.startswith(b"\x16"):
        data += part
        head, end, body = data.partition(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        if end and len(body) >= (int(size[1]) if size is not None else 0):
            break
    return data


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request and does with the connection what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connected, _ = server.accept()
                except OSError:
                    return
                with connected:
                    try:
                        take_request(connected)
                        answer(connected)
                    except OSError:
                        # Whoever asked has had enough.
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def reset(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def saying(text: bytes, *, then_resets: bool = False) -> Callable[[socket.socket], None]:
    def say(connected: socket.socket) -> None:
        connected.sendall(text)
        if then_resets:
            reset(connected)

    return say


def head(status: int, *headers: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} X", *headers, "")).encode()


CHUNKED = "Transfer-Encoding: chunked"
BROKEN = {
    "nothing": b"",
    "no HTTP": b"garbage\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": head(200, "Content-Length: 100") + b"{}",
    "a chunk of no size": head(200, CHUNKED) + b"ZZZ\r\nhello",
    "a chunk below none": head(200, CHUNKED) + b"-5\r\nhello",
    "a chunk without end": head(200, CHUNKED) + b"%x\r\nhello" % HUGE,
    "a body of any size": head(200, f"Content-Length: {HUGE}") + b"hello",
    "a long line": head(200, "X: " + "x" * (1 << 17)),
    "many heads": b"HTTP/1.1 100 Continue\r\n\r\n" * 60_000,
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("then_resets", [False, True])
def test_what_is_no_answer(kind: str, then_resets: bool) -> None:
    with answering(saying(BROKEN[kind], then_resets=then_resets)) as url:
        with pytest.raises(CallError, match="engine x: /load failed: ") as caught:
            Server("engine x", url).post_once("/load", {}, 20)
        assert caught.value.exit_code == 10 and caught.value.code is None
        waits: list[float] = []
        with pytest.raises(CallError):
            Server("engine x", url, sleep=waits.append).get("/load")
        assert len(waits) == 3


@pytest.mark.parametrize("body", [b"", b"hello", b"ZZZ\r\n", b"-1\r\n"])
@pytest.mark.parametrize("then_resets", [False, True])
@pytest.mark.parametrize("header", ["Content-Length: 100", CHUNKED])
def test_a_failure_whose_text_breaks_off_is_that_failure(header: str, then_resets: bool, body: bytes) -> None:
    with answering(saying(head(500, header) + body, then_resets=then_resets)) as url:
        # What resets may do so before anything has come.
        with pytest.raises(CallError, match=r"failed: HTTP 500: no text|reset by peer") as caught:
            Server("engine x", url).get("/x")
        assert caught.value.code == 500 or then_resets


def test_what_a_failure_says_besides_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_FAILURE_SECONDS", 0.2)
    stopped = threading.Event()

    def hang(connected: socket.socket) -> None:
        connected.sendall(head(500, "Content-Length: 100"))
        stopped.wait(15)

    with answering(hang) as url:
        begin = time.monotonic()
        try:
            with pytest.raises(CallError, match="failed: HTTP 500: no text"):
                Server("engine x", url).post_once("/load", {}, 900)
            assert time.monotonic() - begin < 10
        finally:
            stopped.set()


def drip(begin: bytes, stopped: threading.Event) -> Callable[[socket.socket], None]:
    def send(connected: socket.socket) -> None:
        connected.sendall(begin)
        until = time.monotonic() + 15
        while not stopped.wait(0.02) and time.monotonic() < until:
            connected.sendall(b" ")

    return send


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        (b"", "no answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\nX: ", "no answer within 0.3 s"),
        (head(200, "Content-Length: 100000"), "no answer within 0.3 s"),
        (head(200), "no answer within 0.3 s"),
        (head(500, "Content-Length: 100000"), "HTTP 500: no text"),
    ],
)
def test_an_answer_that_drips_has_its_time(begin: bytes, told: str) -> None:
    stopped = threading.Event()
    with answering(drip(begin, stopped)) as url:
        began = time.monotonic()
        try:
            with pytest.raises(CallError, match=told):
                Server("engine x", url).post_once("/x", {}, 0.3)
        finally:
            stopped.set()
        assert time.monotonic() - began < 10


def test_all_tries_together_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_cli.engine.calls.SHORT_SECONDS", 0.3)
    stopped = threading.Event()
    with answering(drip(b"", stopped)) as url:
        began = time.monotonic()
        try:
            with pytest.raises(CallError, match="no answer within"):
                Server("engine x", url).get("/x")
        finally:
            stopped.set()
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("header", ["", f"Content-Length: {2 << 20}", CHUNKED])
def test_an_answer_is_no_larger_than_any_that_is_right(header: str) -> None:
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n" if header == CHUNKED else b" " * (1 << 20)
    with (
        answering(saying(head(200, *([header] if header else ())) + 3 * chunk)) as url,
        pytest.raises(CallError, match="more than 1048576 bytes"),
    ):
        Server("engine x", url).post_once("/x", {}, 20)


def test_an_answer_in_chunks_or_to_the_end() -> None:
    for text in (
        head(200, CHUNKED) + b'4\r\n{"a"\r\n3\r\n: 1\r\n1\r\n}\r\n0\r\n\r\n',
        head(200) + b'{"a": 1}',
        head(200, "Content-Length: 8") + b'{"a": 1}',
    ):
        with answering(saying(text)) as url:
            assert Server("engine x", url).get("/x?y=z") == {"a": 1}


def test_what_is_sent() -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            connected, _ = server.accept()
            with connected:
                asked.append(take_request(connected))
                connected.sendall(head(200))

        thread = threading.Thread(target=serve)
        thread.start()
        assert Server("engine x", f"{url}/below", "secret").post("/x?y=z") == {}
        thread.join()
    lines = asked[0].decode().split("\r\n")
    assert lines[0] == "POST /below/x?y=z HTTP/1.1"
    assert {"Content-Length: 0", "Authorization: Bearer secret", "Connection: close"} <= set(lines)


def test_nobody_there_and_no_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for host in (f"127.0.0.1:{port}", "nobody.invalid"):
        with pytest.raises(CallError, match="failed: "):
            Server("engine x", f"http://{host}", sleep=lambda seconds: None).get("/x")


def test_https_with_what_does_not_speak_it() -> None:
    with answering(saying(b"HTTP/1.1 400 X\r\n\r\n")) as url, pytest.raises(CallError, match=r"failed: .*SSL"):
        Server("engine x", url.replace("http:", "https:")).post_once("/x", {}, 20)


def test_no_token_is_ever_told() -> None:
    server = Server("engine x", "http://127.0.0.1:9", "secret")
    assert "secret" not in repr(server)
    with answering(saying(head(200))) as url:
        for token in ("secret\n", "secret\N{EN DASH}"):
            with pytest.raises(CallError) as caught:
                Server("engine x", url, token).post_once("/x", {}, 20)
            assert "secret" not in str(caught.value)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has Stopped raised in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGUSR1, stop)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("is_waited_out", [True, False])
def test_who_is_interrupted_waits_for_what_is_being_done(interrupt: Callable[[], None], is_waited_out: bool) -> None:
    done, left = [], threading.Event()

    def do(connected: socket.socket) -> None:
        interrupt()
        # Whoever does not wait is away by then.
        left.wait(30 if not is_waited_out else 0.3)
        done.append("all")
        connected.sendall(head(200))

    with answering(do) as url:
        with pytest.raises(Stopped):
            exchange(Request("POST", f"{url}/x", {}, b"", is_waited_out), time.monotonic() + 20)
        assert len(done) == is_waited_out
        left.set()


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]) -> None:
    monkeypatch.setattr(wire, "_LAST_SECONDS", 0.1)
    left = threading.Event()

    def do(connected: socket.socket) -> None:
        interrupt()
        left.wait(30)

    with answering(do) as url:
        began = time.monotonic()
        with pytest.raises(Stopped):
            exchange(Request("POST", f"{url}/x", {}, b"", True), time.monotonic() + 25)
        assert time.monotonic() - began < 10
        left.set()
