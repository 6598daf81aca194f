"""A web server as a backend, by GET and HEAD, and a relay (FORMAT 15) by PUT too.

Caches between are asked to look again, for what is there and for what is not. A server that takes no PUT can only be
read; what it says of a PUT tells that, not what it is known to be.
"""

from __future__ import annotations

import http.client
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import quote

from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    FaultError,
    OutsideError,
    PermanentError,
    Readable,
    Status,
)
from dcr_cli.store.body import body
from dcr_cli.store.connections import Connections
from dcr_cli.store.http_answers import check_kind, entries_in, has_waited, length_of, modified_of, object_in
from dcr_cli.store.http_client import TIMEOUT_SECONDS, Client, Refusal
from dcr_cli.store.http_headers import Caller, address_of, headers_of
from dcr_cli.store.location import Location
from dcr_cli.store.sockets import Body

# What a relay lists, and nothing else is asked for.
_LISTED = "acks/"
_MOST_LISTING_BYTES = 64 << 20
# Of the page that comes with a success of a PUT, how much is read.
_MOST_PAGE_BYTES = 64 << 10
_PLACE_HINT = "name it by where it lies"
_RELAY_HINT = f"{_PLACE_HINT}, or a relay of it that may be written through"
_WRITTEN = frozenset((HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.NO_CONTENT))
# From a server that does not know what is asked of it.
_UNKNOWN = frozenset((HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.GONE, HTTPStatus.NOT_IMPLEMENTED))


class HttpBackend:
    """The objects below an address, asked for with the storage options of `headers_of`. `caller` is who asks; to
    connect takes `connect_seconds` at most."""

    # Not that every server could: `create` says so, which to be the only writer does not change.
    can_create = True

    def __init__(
        self,
        location: Location,
        options: Mapping[str, object],
        *,
        caller: Caller | None = None,
        connect_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._connections = Connections(connect_seconds=connect_seconds)
        self._shown = location.shown
        self._client = Client(self._connections, headers_of(location, options, caller))
        self._root = address_of(location)
        self._query = f"?{location.query}" if location.query else ""
        # At the latest with this object, or at exit: urllib's parts know each other in a circle.
        weakref.finalize(self, self._connections.close_idle)

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        is_ranged = begin > 0 or size is not None
        end = "" if size is None else begin + size - 1
        response = self._open(key, "GET", {"Range": f"bytes={begin}-{end}"} if is_ranged else {})
        try:
            return object_in(response, key, begin if is_ranged else None)
        except FaultError:
            response.close()
            raise

    def status(self, key: str) -> Status | None:
        try:
            with self._open(key, "HEAD", {}) as response:
                check_kind(response, key)
                size, modified = length_of(response.headers.get("Content-Length")), modified_of(response)
        except AbsentError:
            return None
        except (PermanentError, DeniedError):
            # Not every server knows HEAD, and a signature may be one for GET alone.
            try:
                with self._open(key, "GET", {"Range": "bytes=0-0"}) as response:
                    size, modified = object_in(response, key, 0).total, modified_of(response)
            except AbsentError:
                return None
            except OutsideError:
                # Of an empty object there is no first byte.
                size, modified = 0, None
        if size is None:
            raise PermanentError("the answer does not say how long it is")
        return Status(size, modified)

    def wait(self, key: str, seconds: int) -> bool:
        answer = self._client.ask(
            self._url(key), "HEAD", {"Prefer": f"wait={seconds}"}, seconds=seconds + TIMEOUT_SECONDS
        )
        if isinstance(answer, Refusal):
            fault = answer.fault
            if isinstance(fault, AbsentError):
                return has_waited(answer.headers)
            if isinstance(fault, DeniedError | PermanentError):
                # Not every server knows HEAD; what else there is to say of it, other requests will be told.
                return False
            raise fault
        with answer:
            return has_waited(answer.headers)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        answer = self._put(key, {}, Body(data, size))
        if isinstance(answer, Refusal) and answer.status == HTTPStatus.CONFLICT:
            raise ConflictError(
                f"{self._shown.rstrip('/')}/{key}",
                "is there already with other bytes, and what is there does not change",
                hint="another publisher may have put it; dcr status tells which version is being made",
            )
        self._check_put(answer)

    def create(self, key: str, data: bytes) -> bool:
        answer = self._put(key, {"If-None-Match": "*"}, Body(data, len(data)))
        if isinstance(answer, Refusal) and answer.status == HTTPStatus.PRECONDITION_FAILED:
            return False
        self._check_put(answer)
        if not isinstance(answer, Refusal) and answer.status != HTTPStatus.CREATED:
            # It may have been there before: a server that passes the condition over has no exclusive create.
            raise UnsupportedError(self._shown, "does not say whether it made an object", hint=_RELAY_HINT)
        return True

    def entries(self, prefix: str) -> Iterator[Entry]:
        return iter(self._entries(prefix))

    def remove(self, key: str) -> None:
        raise UnsupportedError(self._shown, "over HTTP nothing can be removed", hint=_PLACE_HINT)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        raise self._unlisted()

    def close(self) -> None:
        self._connections.close_idle()

    def _entries(self, prefix: str) -> tuple[Entry, ...]:
        if not prefix.startswith(_LISTED):
            raise self._unlisted()
        answer = self._client.ask(self._url(prefix), "GET", {})
        if isinstance(answer, Refusal):
            if answer.status in _UNKNOWN or (_is_denied(answer) and not answer.is_in_plain_words):
                raise self._unlisted()
            raise answer.fault
        found = bytearray()
        try:
            with answer:
                listing = object_in(answer, prefix, None)
                for chunk in body(listing, 0, listing.total):
                    found += chunk
                    if len(found) > _MOST_LISTING_BYTES:
                        raise self._unlisted()
        except PermanentError:
            # A page of links, for people.
            raise self._unlisted() from None
        try:
            return entries_in(bytes(found), prefix, f"{self._shown.rstrip('/')}/{prefix}")
        except DamagedError:
            raise self._unlisted() from None

    def _unlisted(self) -> UnsupportedError:
        return UnsupportedError(
            self._shown, "a web server lists nothing", hint="name it by where it lies, as what a relay hands on"
        )

    def _put(self, key: str, headers: dict[str, str], content: Body) -> http.client.HTTPResponse | Refusal:
        answer = self._client.ask(self._url(key), "PUT", headers, body=content)
        if not isinstance(answer, Refusal):
            # All that it says is its status; read to its end, for the connection to serve again.
            with answer, suppress(OSError, http.client.HTTPException):
                answer.read(_MOST_PAGE_BYTES)
        return answer

    def _check_put(self, answer: http.client.HTTPResponse | Refusal) -> None:
        """Raise what an answer to a PUT means unless it is a success."""
        if not isinstance(answer, Refusal):
            if answer.status not in _WRITTEN:
                raise PermanentError(f"answers with status {answer.status}")
            return
        if answer.status in _UNKNOWN or (_is_denied(answer) and not answer.is_in_plain_words):
            raise UnsupportedError(self._shown, "over HTTP a remote can only be read", hint=_RELAY_HINT)
        raise answer.fault

    def _url(self, key: str) -> str:
        return f"{self._root}/{quote(key)}{self._query}"

    def _open(self, key: str, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        answer = self._client.ask(self._url(key), method, headers)
        if isinstance(answer, Refusal):
            raise answer.fault
        return answer


def _is_denied(answer: Refusal) -> bool:
    return answer.status == HTTPStatus.FORBIDDEN
