"""A relay's dialect (FORMAT 15) served from memory, honestly unless it is told to misbehave. It is no relay: it has no
parent, checks nothing of what objects mean, and keeps everything.

`faults` are told to requests one after the other, and "" to one that is answered as it should be: a status, in plain
words; "page STATUS" (the same as a web server says it); "early STATUS" (before the body is read, which then is not),
"early close STATUS" (the same, and the connection is closed), "lose" (it is done, then no answer), "short" (half a
body), "to URL" (a redirect), "hang" (nothing, until the end), "at once" (a wait that says it was one, and was none).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from store_servers import running


class StandIn(ThreadingHTTPServer):
    """Objects by key, and who has asked for what. With `token`, nobody gets anything without it; `waits` says whether
    it waits when it is asked to, and `lists` whether it lists."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.objects: dict[str, bytes] = {}
        self.changing = {"next.json"}
        self.faults: list[str] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.token = ""
        self.waits = True
        self.lists = True
        self.listing: bytes | None = None
        self.kind = "application/json"
        self.connections = 0
        self.news = threading.Condition()
        self.waiting = 0
        self.is_over = False
        self.sockets: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, key: str, data: bytes) -> None:
        with self.news:
            self.objects[key] = data
            self.news.notify_all()

    def get_request(self) -> tuple[Any, Any]:
        self.connections += 1
        request, address = super().get_request()
        self.sockets.append(request)
        return request, address

    def end(self) -> None:
        """Let nobody wait any more."""
        with self.news:
            self.is_over = True
            self.news.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        key = unquote(self.path.partition("?")[0]).removeprefix("/")
        with self.server.news:
            self.server.requests.append((self.command, key, {k.lower(): v for k, v in self.headers.items()}))
            fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.startswith("early"):
            self.close_connection = True
            self._send(int(fault.rpartition(" ")[2]), b"no\n")
            if "close" not in fault:
                self._hang()
            return
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length or 0))
        if fault == "hang":
            self._hang()
            self.close_connection = True
        elif fault.startswith("to "):
            self._send(307, b"", Location=fault.removeprefix("to "))
        elif fault.startswith("page "):
            self._send(int(fault.removeprefix("page ")), b"<html>no</html>", **{"Content-Type": "text/html"})
        elif fault.isdigit():
            self._send(int(fault), b"no\n")
        elif self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send(401, b"a token is needed\n")
        elif self.command == "PUT":
            self._put(key, body, fault) if length is not None else self._send(411, b"how long?\n")
        elif key.endswith("/"):
            self._list(key, fault)
        else:
            self._get(key, fault)

    do_PUT = do_HEAD = do_GET  # noqa: N815

    def _hang(self) -> None:
        with self.server.news:
            self.server.news.wait_for(lambda: self.server.is_over, 30)

    def _put(self, key: str, body: bytes, fault: str) -> None:
        is_create = self.headers.get("If-None-Match") == "*"
        with self.server.news:
            held = self.server.objects.get(key)
            is_taken = held is not None and (is_create or (held != body and key not in self.server.changing))
            if not is_taken:
                self.server.objects[key] = body
                self.server.news.notify_all()
        if fault == "lose":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif is_taken:
            self._send(412 if is_create else 409, b"it is taken\n")
        else:
            self._send(201 if is_create else 204, b"")

    def _list(self, prefix: str, fault: str) -> None:
        if not self.server.lists:
            self._send(404, b"<html>no</html>", **{"Content-Type": "text/html"})
            return
        with self.server.news:
            entries = [
                {"key": key, "bytes": len(data), "modified": 1.5e9}
                for key, data in sorted(self.server.objects.items())
                if key.startswith(prefix)
            ]
        listing = json.dumps({"format": "dcr-1", "requires": [], "entries": entries}).encode()
        self._send(200, self.server.listing or listing, fault, **{"Content-Type": self.server.kind})

    def _get(self, key: str, fault: str) -> None:
        waited = {}
        word, _, seconds = self.headers.get("Prefer", "").partition("=")
        if self.command == "HEAD" and word == "wait" and self.server.waits:
            waited = {"Preference-Applied": "wait"}
            if fault != "at once":
                self._wait(key, min(float(seconds), 60))
        data = self.server.objects.get(key)
        if data is None:
            self._send(404, b"it is absent\n", **waited)
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, data, fault, **waited)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        if begin >= len(data):
            self._send(416, b"")
        else:
            self._send(206, data[begin:end], fault, **{"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    def _wait(self, key: str, seconds: float) -> None:
        with self.server.news:
            before = dict(self.server.objects)
            self.server.waiting += 1
            self.server.news.notify_all()
            self.server.news.wait_for(
                lambda: self.server.is_over or key in self.server.objects or self.server.objects != before, seconds
            )
            self.server.waiting -= 1

    def _send(self, status: int, body: bytes, fault: str = "", **headers: str) -> None:
        if status >= 400:
            headers = {"Content-Type": "text/plain", **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "short":
            body = body[: len(body) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def stand_in(port: int = 0) -> Iterator[StandIn]:
    """A stand-in that serves meanwhile; afterwards nobody answers at its port."""
    server = StandIn(port)
    with running(server):
        try:
            yield server
        finally:
            server.end()
            for each in server.sockets:
                _end_connection(each)


def _end_connection(connected: socket.socket) -> None:
    """End a connection, if it has not ended."""
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def until(is_so: Any, seconds: float = 10.0) -> None:
    """Return as soon as something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)
