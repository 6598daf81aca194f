"""Connections to web servers, kept open between requests: urllib's own handler makes one for each.

What is asked and what an answer means is the backend's matter. What a server does not answer on a connection that it
has closed meanwhile is asked again; so what sends a body has a fresh one, and nothing else but GET and HEAD may go this
way.
"""

from __future__ import annotations

import errno
import functools
import http.client
import os
import select
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from dcr_cli.store.sockets import Body, SilentError, send_body, wait_for

# What was idle for longer, something between may have forgotten, which shows only when nothing comes in time.
_IDLE_SECONDS = 30.0
_MOST_IDLE = 16
# What goes on more slowly than that, behind a server that has taken all of it, counts as failed.
_LEAST_BYTES_PER_SECOND = 64 << 10
# A server that takes no more of a body has said why by then, if it says anything.
_LATE_SECONDS = 1.0


class _Place(NamedTuple):
    """What a connection leads to: a server, or through a proxy to one behind it."""

    kind: type[http.client.HTTPConnection]
    host: str
    behind: str | None


class _Response(http.client.HTTPResponse):
    """An answer that says, when it is closed, whether all of it was read, so that the connection serves again."""

    give_back: Callable[[bool], None] | None = None

    def close(self) -> None:
        give_back, self.give_back = self.give_back, None
        is_read = self.isclosed() if self.chunked else self.length == 0
        super().close()
        if give_back is not None:
            give_back(is_read and not self.will_close)


class Connections(urllib.request.AbstractHTTPHandler):
    """Opens http and https for urllib; an answer has to be closed, and a second request may then use its connection.

    To connect takes `connect_seconds` at most. `clock` is there for tests. Any number of threads may use it; each has
    connections of its own while it reads.
    """

    def __init__(self, *, connect_seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._connect_seconds = connect_seconds
        self._clock = clock
        # Again by the same thread: a collection of garbage may close an answer at any moment.
        self._lock = threading.RLock()
        self._idle: list[tuple[_Place, float, http.client.HTTPConnection]] = []
        self._trusted: ssl.SSLContext | None = None

    def close_idle(self) -> None:
        """Close all connections on which nothing is read."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()

    # The names that urllib asks a handler for.
    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        with self._lock:
            if self._trusted is None:
                # Reading all certificates takes as long as many requests do.
                self._trusted = ssl.create_default_context()
                self._trusted.set_alpn_protocols(["http/1.1"])
        return self._open(http.client.HTTPSConnection, request, context=self._trusted)

    def _open(
        self, kind: type[http.client.HTTPConnection], request: urllib.request.Request, **arguments: Any
    ) -> http.client.HTTPResponse:
        behind = getattr(request, "_tunnel_host", None)
        place = _Place(kind, request.host, behind)
        headers = {name.title(): value for name, value in request.header_items()}
        to_proxy = {} if behind is None else _taken_out(headers, "Proxy-Authorization")
        kept = self._take(place) if request.data is None else None
        if kept is not None:
            try:
                return self._asked(place, kept, request, headers)
            except (OSError, http.client.HTTPException) as error:
                # The server has closed it, or something between has forgotten it, and perhaps all others.
                self.close_idle()
                if isinstance(error, TimeoutError):
                    # Or it is slow: how often it is waited for is decided elsewhere.
                    raise
        seconds = min(self._connect_seconds, request.timeout or self._connect_seconds)
        connection = kind(request.host, timeout=seconds, **arguments)
        connection.response_class = _Response
        if behind is not None:
            connection.set_tunnel(behind, headers=to_proxy)
        try:
            connection.connect()
        except TimeoutError:
            connection.close()
            raise SilentError(seconds) from None
        except BaseException:
            connection.close()
            raise
        return self._asked(place, connection, request, headers)

    def _asked(
        self,
        place: _Place,
        connection: http.client.HTTPConnection,
        request: urllib.request.Request,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        seconds = request.timeout or self._connect_seconds
        try:
            connection.sock.settimeout(seconds)
            connection.request(request.get_method(), request.selector, headers=headers)
            if isinstance(request.data, Body):
                response = _sent(connection, request.data, seconds)
            else:
                wait_for(connection.sock, select.POLLIN, seconds)
                response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        assert isinstance(response, _Response)
        response.give_back = functools.partial(self._give_back, place, connection)
        # As urllib's own handler does, for those that come after it.
        response.url = request.full_url
        response.msg = response.reason  # type: ignore[assignment]
        return response

    def _take(self, place: _Place) -> http.client.HTTPConnection | None:
        """The connection to a place that was used last, if it was lately."""
        oldest = self._clock() - _IDLE_SECONDS
        found = None
        old = []
        with self._lock:
            # The longest idle is the first.
            while self._idle and self._idle[0][1] < oldest:
                old.append(self._idle.pop(0)[2])
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == place:
                    found = self._idle.pop(at)[2]
                    break
        for connection in old:
            connection.close()
        return found

    def _give_back(self, place: _Place, connection: http.client.HTTPConnection, is_good: bool) -> None:
        with self._lock:
            is_kept = is_good and len(self._idle) < _MOST_IDLE
            if is_kept:
                self._idle.append((place, self._clock(), connection))
        if not is_kept:
            connection.close()


def _sent(connection: http.client.HTTPConnection, body: Body, seconds: float) -> http.client.HTTPResponse:
    """The answer to a request whose head has been sent, and its body is to be; one that comes before the end of that
    counts, if it is a refusal."""
    broken: OSError | None = None
    try:
        is_sent = send_body(connection.sock, body, seconds)
    except OSError as error:
        # It may have been refused, and the rest of it not been taken any more.
        is_sent, broken = False, error
    if is_sent:
        # What has to go on from there, to a store behind, may take as long again.
        wait_for(connection.sock, select.POLLIN, seconds + body.size / _LEAST_BYTES_PER_SECOND)
        return connection.getresponse()
    connection.sock.settimeout(_LATE_SECONDS)
    try:
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise broken or error from None
    if response.status < 400:
        response.close()
        raise broken or OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
    # The server may take the rest of the body for another request.
    response.will_close = True
    return response


def _taken_out(headers: dict[str, str], name: str) -> dict[str, str]:
    """One of the headers alone, which is among the others no more."""
    return {name: headers.pop(name)} if name in headers else {}
