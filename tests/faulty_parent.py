"""A web server for tests that holds a remote's files, and answers some requests for them in a way that is not right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAULTS = ("flipped", "cut", "short", "long", "html", "error", "stalled", "silent")
_PAGE = b"<html><body>It works!</body></html>"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    root: Path
    fault: str
    pattern: str
    ended: threading.Event
    faults = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        path = self.server.root / self.path.lstrip("/")
        if path.is_file():
            self._head(200, path.stat().st_size)
        else:
            self._head(404, 0)

    def do_GET(self) -> None:
        key = self.path.lstrip("/")
        path = self.server.root / key
        if not path.is_file():
            self._head(404, 0)
            return
        data = path.read_bytes()
        begin, end, status, headers = 0, len(data), 200, {}
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(data)) if last else len(data), 206
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        part = data[begin:end]
        if fnmatchcase(key, self.server.pattern):
            self.server.faults += 1
            self._answer_wrongly(status, headers, part)
            return
        self._head(status, len(part), headers)
        self.wfile.write(part)

    def _answer_wrongly(self, status: int, headers: dict[str, str], part: bytes) -> None:
        half = len(part) // 2
        match self.server.fault:
            case "flipped":
                self._head(status, len(part), headers)
                self.wfile.write(part[:half] + bytes([part[half] ^ 1]) + part[half + 1 :])
            case "cut":
                self._head(status, len(part), headers)
                self.wfile.write(part[:half])
                self.close_connection = True
            case "short":
                self._head(200, half)
                self.wfile.write(part[:half])
            case "long":
                self._head(200, len(part) + 7)
                self.wfile.write(part + b"and more")
                self.close_connection = True
            case "html":
                self._head(200, len(_PAGE), {"Content-Type": "text/html"})
                self.wfile.write(_PAGE)
            case "error":
                self._head(500, len(_PAGE), {"Content-Type": "text/html"})
                self.wfile.write(_PAGE)
            case "stalled":
                self._head(status, len(part), headers)
                self.wfile.write(part[:half])
                self.wfile.flush()
                self.server.ended.wait()
            case "silent":
                self.server.ended.wait()

    def _head(self, status: int, size: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(size), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def faulty_parent(root: Path, fault: str, pattern: str) -> Iterator[_Server]:
    """Serve the files below `root`; those whose keys match `pattern` with a fault."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.root, server.fault, server.pattern, server.ended = root, fault, pattern, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        with suppress(OSError):
            server.server_close()
        thread.join()


def address_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"
