"""One request to an HTTP server and its answer, over a connection of its own: all of it within one time and of bounded
size, whatever comes.

No proxy is used and no redirect followed: engines are near. What an answer means is calls.py's.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from dcr_cli.errors import one_line

_MOST_BYTES = 1 << 20
# How long an answer is waited for that nobody is to see any more.
_LAST_SECONDS = 10.0
# What a failure says besides its status is for people, and need not be all there.
_FAILURE_SECONDS = 2.0
_TICK_SECONDS = 0.1
# What a server can have the standard library raise; the last is for sizes that are none.
_FAULTS = (OSError, http.client.HTTPException, ValueError)


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent. With `is_waited_out`, whoever is interrupted meanwhile waits for the end of the answer, if not for
    long: the server does what it was told all the same, and what it is told next has to come after that."""

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = None
    is_waited_out: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and what came with it: of one that is no success perhaps not all."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class NoAnswerError(Exception):
    """There is no answer, or no whole one; it says why."""


def exchange(request: Request, end: float) -> Answer:
    """Send a request, once, and take its answer, by `end` of the monotonic clock. NoAnswerError if it does not come,
    whatever comes instead; TimeoutError if it has not come by then."""
    parts = urlsplit(request.url)
    try:
        with _connect(parts, end) as connected:
            line = _Line(connected, end)
            try:
                return _exchange(line, parts, request)
            except _FAULTS:
                raise
            except BaseException:
                if request.is_waited_out:
                    line.wait_out()
                raise
    except TimeoutError:
        raise
    except OSError as error:
        raise NoAnswerError(one_line(error.strerror or f"{type(error).__name__}: {error}")) from error
    except http.client.HTTPException as error:
        raise NoAnswerError(f"{type(error).__name__}: {one_line(str(error))}") from error
    except ValueError as error:
        # What the library says of a value may be that of a header.
        raise NoAnswerError("what came is no HTTP") from error


def _exchange(line: _Line, parts: SplitResult, request: Request) -> Answer:
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.sock = cast(socket.socket, line)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    connection.request(request.method, target, request.body, {**request.headers, "Connection": "close"})
    response = http.client.HTTPResponse(cast(socket.socket, line), method=request.method)
    response.begin()
    if line.is_at_end:
        # To the library, what a head has until then is all of it.
        raise http.client.HTTPException("the head of an answer breaks off")
    failure = Answer(response.status, b"")
    if not failure.is_success:
        line.hurry(_FAILURE_SECONDS)
    try:
        return Answer(response.status, _body_of(response))
    except _FAULTS:
        if failure.is_success:
            raise
        return failure


def _body_of(response: http.client.HTTPResponse) -> bytes:
    # With a size to it, no more is made room for, whatever the server says that there is.
    body = response.read(_MOST_BYTES)
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    return body


class _Line(io.RawIOBase):
    """What goes and comes over a connection: until `end`, then TimeoutError; and so much, then HTTPException."""

    def __init__(self, connected: socket.socket, end: float) -> None:
        self._connected = connected
        self._end = end
        self._left_bytes = _MOST_BYTES
        self.is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._recv_into(buffer)
        self.is_at_end = not count
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise http.client.HTTPException(f"more than {_MOST_BYTES} bytes")
        return count

    def _recv_into(self, buffer: Any) -> int:
        while True:
            self._connected.settimeout(min(_left(self._end), _TICK_SECONDS))
            try:
                return self._connected.recv_into(buffer)
            except TimeoutError:
                # Of signals that come together, the system may have another thread hear all, and not end this wait.
                continue

    def sendall(self, data: bytes) -> None:
        # The time that is set is that of the whole.
        self._connected.settimeout(_left(self._end))
        self._connected.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def hurry(self, seconds: float) -> None:
        """Wait for what comes no longer than that."""
        self._end = min(self._end, time.monotonic() + seconds)

    def wait_out(self) -> None:
        """Wait until the server has said all it has to say, but not for long."""
        self.hurry(_LAST_SECONDS)
        buffer = bytearray(1 << 12)
        with suppress(*_FAULTS):
            while self.readinto(buffer):
                pass


def _connect(parts: SplitResult, end: float) -> socket.socket:
    """Connect to a server by the first of its addresses that is answered at."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(_left(end))
            connected.connect(address)
            if parts.scheme == "https":
                return ssl.create_default_context().wrap_socket(connected, server_hostname=host)
            return connected
        except BaseException as error:
            connected.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
