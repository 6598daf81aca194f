"""From a request to its answer (FORMAT 15.1): the dialect that a relay speaks with its children.

What an object is, and whether it is right, is the library's matter; errors say nothing but what stands here.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from dcr_cli.relay.children import (
    MOST_STATUS_BYTES,
    OTHER,
    RECEIVER_HEADER,
    RELAY_HEADER,
    Child,
    Children,
    read_status,
)
from dcr_cli.relay.kinds import Kind, Named, named
from dcr_cli.relay.library import Library
from dcr_cli.relay.parents import ForbiddenError, UnavailableError, WrongError
from dcr_cli.relay.publishing import Publishing, Put
from dcr_cli.relay.reading import Reading
from dcr_cli.relay.refusing import PLAIN, AnswerError, no_such_object
from dcr_cli.relay.requests import key_of
from dcr_cli.relay.rights import Right, Rights, needed_to_put
from dcr_cli.relay.sending import CutError
from dcr_cli.relay.telling import Access, Account
from dcr_cli.remote.keys import ACKNOWLEDGEMENTS, is_receiver
from dcr_cli.store.http_answers import length_of

_IMMUTABLE = "max-age=31536000, immutable"
_RETRY_SECONDS, _WRONG_RETRY_SECONDS = 2, 5
# What is put has to come on within that time, and all of it in as much more as such a rate takes.
_STALLED_SECONDS, _LEAST_BYTES_PER_SECOND = 60.0, 64 << 10
# What the log says of an answer whose child has gone, and of one that was cut.
_GONE, _CUT = 499, 599
_METHODS = frozenset(("GET", "HEAD", "PUT"))
_STATUS = "status/"


@dataclass(slots=True)
class Answering:
    """Answers all requests of one relay. `log` is given a line for each, unless nobody reads them."""

    library: Library
    children: Children
    account: Account
    rights: Rights
    log: Callable[[str], None] | None
    reading: Reading = field(init=False)
    publishing: Publishing = field(init=False)

    def __post_init__(self) -> None:
        self.reading = Reading(self.library, self.children, self.account, self.rights)
        self.publishing = Publishing(self.library)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, and account for it."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        address = request.remote or ""
        right = self.rights.of(request.headers.get("Authorization"))
        if right is Right.NOTHING:
            # Who may do nothing is no child.
            child = Child(address, OTHER, address)
        else:
            names = (request.headers.get(RELAY_HEADER), request.headers.get(RECEIVER_HEADER))
            connection = request.protocol if request.transport is not None else None
            child = self.children.seen(*names, address, connection=connection)
        child.asking += 1
        before = child.sent_bytes
        status, trace = _GONE, None
        try:
            response = await self._answer(request, child, right)
            status = response.status
        except CutError:
            # The head has gone out with a length that is never reached.
            status, response = _CUT, _cut(request)
        except ConnectionError:
            response = _cut(request)
        except Exception:
            # A bug. What has begun is not taken for whole, and who looks after the relay reads of it.
            status, trace = HTTPStatus.INTERNAL_SERVER_ERROR, traceback.format_exc()
            response = _cut(request)
        finally:
            child.asking -= 1
            self.account.requests[_known(request.method), status] += 1
            if self.log is not None:
                sent, seconds = child.sent_bytes - before, loop.time() - begun
                access = Access(request.method, request.path, status, sent, seconds, child.name, address, trace)
                self.log(access.line())
        return response

    async def _answer(self, request: web.BaseRequest, child: Child, right: Right) -> web.StreamResponse:
        try:
            return await self._dispatch(request, child, right)
        except AnswerError as refused:
            status, words, headers = refused.status, refused.words, refused.headers
        except UnavailableError:
            status, words = HTTPStatus.SERVICE_UNAVAILABLE, "no parent answers, or there is no room"
            headers = {"Retry-After": str(_RETRY_SECONDS)}
        except WrongError:
            status, words = HTTPStatus.BAD_GATEWAY, "what the parents have of it is not right"
            headers = {"Retry-After": str(_WRONG_RETRY_SECONDS)}
        except ForbiddenError:
            words, headers = "the parents do not let this relay", {}
            status = HTTPStatus.FORBIDDEN if request.method == "PUT" else HTTPStatus.BAD_GATEWAY
        response = web.Response(status=status, text=f"{words}\n", headers={**PLAIN, **headers})
        if request.method == "PUT" and not request.content.at_eof():
            # What else comes of it is of no use.
            response.force_close()
        return response

    async def _dispatch(self, request: web.BaseRequest, child: Child, right: Right) -> web.StreamResponse:
        key = key_of(request.raw_path)
        if key == "healthz" and request.method in ("GET", "HEAD"):
            return self._health()
        if right is Right.NOTHING:
            raise AnswerError(HTTPStatus.UNAUTHORIZED, "a token is needed", WWW_Authenticate='Bearer realm="dcr"')
        if request.method not in _METHODS:
            raise AnswerError(HTTPStatus.METHOD_NOT_ALLOWED, "not here", Allow="GET, HEAD, PUT")
        if key == "healthz":
            raise AnswerError(HTTPStatus.METHOD_NOT_ALLOWED, "not here", Allow="GET, HEAD")
        if key == "status":
            return self._text(request, json.dumps(self.account.status()) + "\n", "application/json")
        if key == "metrics":
            return self._text(request, self.account.metrics(), "text/plain; version=0.0.4")
        if key is not None and key.startswith(_STATUS) and request.method == "PUT":
            return await self._take_status(request, child, key.removeprefix(_STATUS))
        if key is not None and _is_listed(key) and request.method == "GET":
            return await self.reading.list(request, child, key)
        asked = named(key) if key is not None else None
        if asked is None:
            raise no_such_object()
        if request.method == "PUT":
            if right < needed_to_put(asked):
                raise AnswerError(HTTPStatus.FORBIDDEN, "this token may only read")
            return await self._put(request, asked)
        if request.method == "HEAD":
            return await self.reading.head(request, asked)
        return await self.reading.get(request, child, asked)

    # How it is

    def _health(self) -> web.Response:
        fault = self.account.fault
        status = HTTPStatus.OK if fault is None else HTTPStatus.SERVICE_UNAVAILABLE
        return web.Response(status=status, text=f"{fault or 'ok'}\n", headers=PLAIN)

    def _text(self, request: web.BaseRequest, text: str, kind: str) -> web.Response:
        if request.method == "PUT":
            raise AnswerError(HTTPStatus.METHOD_NOT_ALLOWED, "not here", Allow="GET, HEAD")
        return web.Response(body=text.encode(), headers={"Content-Type": kind, **PLAIN})

    async def _take_status(self, request: web.BaseRequest, child: Child, name: str) -> web.Response:
        """Keep what a child relay says of itself."""
        data = b"".join([part async for part in self._parts(request, MOST_STATUS_BYTES)[1]])
        document = read_status(data, name) if is_receiver(name) and child.name == name else None
        if document is None:
            raise AnswerError(HTTPStatus.BAD_REQUEST, "that is no status of this child")
        if not self.children.take_status(child, document, len(data)):
            raise AnswerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "there is no room for more of what children say")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    # Writing

    async def _put(self, request: web.BaseRequest, asked: Named) -> web.Response:
        if self.account.is_ending:
            raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, "this relay is ending", Retry_After="2")
        is_create = request.headers.get("If-None-Match", "").strip() == "*"
        size, parts = self._parts(request, asked.most_bytes)
        made = await self.publishing.put(asked, size, parts, is_create=is_create)
        match made:
            case Put.DONE:
                status = HTTPStatus.CREATED if is_create else HTTPStatus.NO_CONTENT
                return web.Response(status=status, headers=PLAIN)
            case Put.TAKEN if is_create:
                raise AnswerError(HTTPStatus.PRECONDITION_FAILED, "the key is taken")
            case Put.TAKEN:
                raise AnswerError(HTTPStatus.CONFLICT, "another object is there, which does not change")
            case Put.FULL:
                raise UnavailableError
            case Put.SHORT:
                raise AnswerError(HTTPStatus.BAD_REQUEST, "it ended before its length")
            case _:
                raise AnswerError(HTTPStatus.UNPROCESSABLE_ENTITY, "that is not what its key says")

    def _parts(self, request: web.BaseRequest, most_bytes: int) -> tuple[int, AsyncIterator[bytes]]:
        """How long what is put is, and its bytes."""
        size = length_of(request.headers.get("Content-Length"))
        if size is None:
            raise AnswerError(HTTPStatus.LENGTH_REQUIRED, "how long it is has to be said")
        if size > most_bytes:
            raise AnswerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no object of this key is so large")
        return size, _hurried(request, size)


def _is_listed(key: str) -> bool:
    """Whether a key ends as one of acknowledgements does, of all versions or of one."""
    if key == ACKNOWLEDGEMENTS:
        return True
    found = named(f"{key}name.applied") if key.endswith("/") else None
    return found is not None and found.kind is Kind.ACKNOWLEDGEMENT


def _known(method: str) -> str:
    """A method as it is counted: anybody may make up others."""
    return method if method in _METHODS else "other"


def _cut(request: web.BaseRequest) -> web.Response:
    """End the connection of a request; what is returned is sent nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=HTTPStatus.INTERNAL_SERVER_ERROR, headers=PLAIN)


async def _hurried(request: web.BaseRequest, size: int) -> AsyncIterator[bytes]:
    """What is put, as it comes; nothing more where it does not come on, or comes so slowly that it holds others up."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        # Whoever asks that waits a second for it, or for ever.
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    loop = asyncio.get_running_loop()
    end = loop.time() + _STALLED_SECONDS + size / _LEAST_BYTES_PER_SECOND
    while True:
        try:
            async with asyncio.timeout_at(min(end, loop.time() + _STALLED_SECONDS)):
                part = await request.content.readany()
        except (TimeoutError, web.RequestPayloadError, ConnectionError):
            return
        if not part:
            return
        yield part
