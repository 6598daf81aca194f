"""Servers that follow the routes of vLLM and of SGLang, note all that they are asked, and misbehave where told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# What a misbehaviour does with a request: (status, answer), None to go on as usual, or "drop" to close the connection.
Answer = tuple[int, Any] | str | None
Misbehave = Callable[[str, int], Answer]


@dataclass
class Engine:
    """What a server knows: `asked` are the requests in order, `weights` the folders that were loaded, one for each
    time."""

    kind: str
    url: str = ""
    misbehave: Misbehave = lambda path, number: None
    token: str | None = None
    asked: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    label: str = "default"
    is_paused: bool = False
    is_broken: bool = False
    has_cache: bool = True
    on_load: Callable[[str], object] = lambda folder: None

    @property
    def address(self) -> str:
        return f"{self.kind}={self.url}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        route = f"{method} {path}"
        if self.is_broken and path not in ("/health", "/is_paused"):
            return 500, "EngineDeadError"
        if self.kind == "vllm":
            return self._vllm(route, body)
        return self._sglang(route, body)

    def _vllm(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        if route == "GET /is_paused":
            return 200, {"is_paused": self.is_paused}
        if route == "POST /pause":
            self.is_paused = True
            return 200, {"status": "paused"}
        if route == "POST /resume":
            self.is_paused = False
            return 200, {"status": "resumed"}
        if route == "POST /collective_rpc" and body["method"] == "reload_weights":
            assert self.is_paused
            self._load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if route == "POST /reset_prefix_cache":
            self.has_cache = False
            return 200, {"success": True}
        if route == "POST /update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True}
        if route == "GET /weight_info":
            return 200, {"weight_version": self.label}
        return 404, {"detail": "Not Found"}

    def _sglang(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        if route == "GET /model_info":
            return 200, {"model_path": "/model", "weight_version": self.label}
        if route == "POST /pause_generation":
            self.is_paused = True
            return 200, {"status": "ok"}
        if route == "POST /continue_generation":
            self.is_paused = False
            return 200, {"status": "ok"}
        if route == "POST /flush_cache":
            assert self.is_paused
            self.has_cache = False
            return 200, "Cache flushed."
        if route == "POST /update_weights_from_disk":
            assert self.is_paused
            self._load(body["model_path"])
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if route == "POST /update_weight_version":
            assert body["abort_all_requests"] is False
            self.label = body["new_version"]
            return 200, {"success": True, "message": "", "new_version": self.label}
        return 404, {"detail": "Not Found"}

    def _load(self, folder: str) -> None:
        self.on_load(folder)
        self.weights.append(folder)
        self.has_cache = True


@contextmanager
def serving(kind: str) -> Iterator[Engine]:
    """A server of an engine, as long as it is needed."""
    engine = Engine(kind)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            engine.asked.append(f"{method} {self.path}")
            number = sum(urlsplit(each.partition(" ")[2]).path == path for each in engine.asked)
            if engine.token is not None and self.headers.get("Authorization") != f"Bearer {engine.token}":
                self._send(401, {"error": "Unauthorized"})
                return
            answer = engine.misbehave(path, number)
            if isinstance(answer, str):
                self.close_connection = True
                return
            self._send(*(answer or engine.answer(method, path, json.loads(data or b"{}"))))

        def _send(self, status: int, answer: Any) -> None:
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            # Whoever has asked may have been stopped meanwhile.
            with suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
