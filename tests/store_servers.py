"""Servers on loopback that are no real ones: a bucket that speaks like three clouds and can be told to fail, and moto.

The bucket is a stand-in, for what a real server does only now and then. `faults` are told to requests one after the
other: a status; "lose" (it is done, then no answer), "short" (half a body), "page" (status 200, HTML), "whole" (a range
is ignored), "other" (another range than asked for), "silent" (no length, then half a body), "gzip" (said to be), "mute"
(it is done, then a page instead of an answer), "to URL" (a redirect), "long to URL" (the same, with a page of 1 GiB
that breaks off), "leave" (the connection is closed after the answer, which does not say so), "length TEXT" (half a
body, said to be so long).
"""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# The body of an error: a code, a message, and what repeats something of who asked.
_TOLD = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>Told</Code><Message>You may not, it&apos;s ours.</Message><Key>hunter2SECRET</Key></Error>"
)


class Bucket(ThreadingHTTPServer):
    """Objects by path, as /BUCKET/KEY."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _BucketHandler)
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.conditional = True
        # How long it takes to begin to read what is sent.
        self.delay_seconds = 0.0
        self.parts: dict[tuple[str, str], bytes] = {}
        # How many were accepted.
        self.connections = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def get_request(self) -> tuple[Any, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of these tests."""


class _BucketHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET  # noqa: N815

    def _serve(self) -> None:
        time.sleep(self.server.delay_seconds)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        with self.server.lock:
            self.server.requests.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
            fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "leave":
            self.close_connection, fault = True, ""
        if fault.isdigit():
            self._send(int(fault), _TOLD)
        elif fault.startswith("to "):
            self._send(302, b"", Location=fault[3:])
        elif fault.startswith("long to "):
            self.close_connection = True
            self.send_response(302)
            self.send_header("Location", fault.removeprefix("long to "))
            self.send_header("Content-Length", str(1 << 30))
            self.end_headers()
            self.wfile.write(bytes(1 << 17))
        elif self.command == "POST" or "partNumber" in query or query.get("comp", ["list"])[0] != "list":
            self._put_parts(path, query, split.query, body)
        elif self.command == "PUT":
            self._put(path, body, fault)
        elif self.command == "DELETE":
            with self.server.lock:
                self.server.objects.pop(path, None)
            self._send(202 if "x-ms-version" in self.headers else 204, b"")
        elif "list" in query.get("comp", []) or "list-type" in query:
            self._list(path, query)
        else:
            self._get(path, fault)

    def _put(self, path: str, body: bytes, fault: str) -> None:
        is_create = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        with self.server.lock:
            is_taken = is_create and self.server.conditional and path in self.server.objects
            if not is_taken:
                self.server.objects[path] = body
        if fault == "lose":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "mute":
            self._send(200, b"<html>welcome</html>")
        elif is_taken:
            self._send(
                409 if "x-ms-version" in self.headers else 412, b"<Error><Code>PreconditionFailed</Code></Error>"
            )
        else:
            self._send(201 if "x-ms-version" in self.headers else 200, b"", ETag='"1"')

    def _put_parts(self, path: str, query: dict[str, list[str]], words: str, body: bytes) -> None:
        """The multipart uploads of S3 and Google, the blocks and batches of Azure."""
        parts = self.server.parts
        if words.startswith("uploads"):
            self._send(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        elif "partNumber" in query:
            parts[path, f"{int(query['partNumber'][0]):05}"] = body
            self._send(200, b"", ETag='"1"')
        elif query.get("comp") == ["block"]:
            parts[path, query["blockid"][0]] = body
            self._send(201, b"", ETag='"1"')
        elif query.get("comp") == ["batch"]:
            for key in re.findall(r"^DELETE (\S+) ", body.decode(), re.MULTILINE):
                self.server.objects.pop(unquote(urlsplit(key).path), None)
            head = "Content-Type: application/http\r\nContent-ID: 0\r\n\r\n"
            answer = f"--b\r\n{head}HTTP/1.1 202 Accepted\r\n\r\n\r\n--b--\r\n"
            self._send(202, answer.encode(), **{"Content-Type": "multipart/mixed; boundary=b"})
        else:
            names = re.findall(r"<(?:Latest|Uncommitted)>([^<]+)<", body.decode())
            names = names or sorted(name for each, name in parts if each == path)
            self.server.objects[path] = b"".join(parts.pop((path, name)) for name in names)
            result = b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
            self._send(201 if "x-ms-version" in self.headers else 200, result, ETag='"1"')

    def _get(self, path: str, fault: str) -> None:
        with self.server.lock:
            data = self.server.objects.get(path)
        if data is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        known = {"ETag": f'"{hash(data)}"', "Last-Modified": formatdate(usegmt=True)}
        wanted = self.headers.get("Range")
        if fault == "page":
            self._send(200, b"<html>please log in</html>", **{"Content-Type": "text/html"})
        elif fault == "gzip":
            self._send(200, data, **{"Content-Encoding": "gzip"})
        elif fault.startswith("length "):
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", fault.removeprefix("length "))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        elif fault == "silent":
            self.close_connection = True
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        elif wanted is not None and fault != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
            if begin >= len(data):
                self._send(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
                return
            if fault == "other":
                begin, end = begin + 1, end
            place = f"bytes {begin}-{end - 1}/{len(data)}"
            self._send(206, data[begin:end], fault, **{"Content-Range": place}, **known)
        else:
            self._send(200, data, fault, **known)

    def _list(self, path: str, query: dict[str, list[str]]) -> None:
        bucket = "/" + path.strip("/") + "/"
        prefix = bucket + query.get("prefix", [""])[0]
        with self.server.lock:
            found = sorted((k[len(bucket) :], len(v)) for k, v in self.server.objects.items() if k.startswith(prefix))
        now = formatdate(usegmt=True)
        if "comp" in query:
            blobs = "".join(
                f"<Blob><Name>{escape(k)}</Name><Properties><Last-Modified>{now}</Last-Modified><Content-Length>{n}"
                f"</Content-Length><Content-Type>a/b</Content-Type><Etag>1</Etag></Properties></Blob>"
                for k, n in found
            )
            body = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        else:
            body = "".join(
                f"<Contents><Key>{escape(k)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><Size>{n}</Size>"
                f"<ETag>1</ETag></Contents>"
                for k, n in found
            )
            body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{body}</ListBucketResult>"
        self._send(200, body.encode(), **{"Content-Type": "application/xml"})

    def _send(self, status: int, body: bytes, fault: str = "", **headers: str) -> None:
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


class _FileServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """As of the bucket."""


class _QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def bucket_server() -> Iterator[Bucket]:
    server = Bucket()
    with running(server):
        yield server


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Python's own web server of a folder, which knows no ranges; its address."""

    def handler(*arguments: Any) -> _QuietFiles:
        return _QuietFiles(*arguments, directory=str(folder))

    server = _FileServer(("127.0.0.1", 0), handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def moto_server() -> Iterator[str]:
    """A mock of S3 with the bucket `bucket`; its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).close()
        yield url
    finally:
        server.stop()
