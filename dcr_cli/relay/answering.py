"""From a request to its answer (FORMAT 15.1): the dialect that a relay speaks with its children.

What an object is, and whether it is right, is the library's matter; errors say nothing but what stands here.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import web

from dcr_cli.delta.document import FORMAT
from dcr_cli.delta.file_rules import RANGE_BYTES
from dcr_cli.relay.arrival import Arrival
from dcr_cli.relay.children import (
    MOST_STATUS_BYTES,
    RECEIVER_HEADER,
    RELAY_HEADER,
    Child,
    Children,
    read_status,
)
from dcr_cli.relay.kinds import Kind, Named, named
from dcr_cli.relay.library import Library
from dcr_cli.relay.parents import ForbiddenError, Parent, UnavailableError, WrongError
from dcr_cli.relay.publishing import Publishing, Put
from dcr_cli.relay.requests import is_ranged, key_of, length_of, range_of, wait_of
from dcr_cli.relay.rights import Right, Rights, needed_to_put
from dcr_cli.relay.sending import CutError, Sending
from dcr_cli.relay.spool import Kept
from dcr_cli.relay.telling import Access, Account
from dcr_cli.remote.keys import ACKNOWLEDGEMENTS, is_receiver
from dcr_cli.remote.listing import list_if_allowed
from dcr_cli.store.backend import Entry, Status

_IMMUTABLE = "max-age=31536000, immutable"
_PLAIN = {"Cache-Control": "no-store", "Server": "dcr"}
_RETRY_SECONDS = 2
# What is put has to come on within that time, and all of it in as much more as such a rate takes.
_STALLED_SECONDS, _LEAST_BYTES_PER_SECOND = 60.0, 64 << 10
# What the log says of an answer whose child has gone, and of one that was cut.
_GONE, _CUT = 499, 599
_METHODS = frozenset(("GET", "HEAD", "PUT"))
_STATUS = "status/"


class _RefusedError(Exception):
    """An answer other than success, with the relay's own words."""

    def __init__(self, status: HTTPStatus, words: str, **headers: str) -> None:
        self.status = status
        self.words = words
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(words)


@dataclass(slots=True)
class Answering:
    """Answers all requests of one relay. `log` is given a line for each."""

    library: Library
    children: Children
    account: Account
    rights: Rights
    log: Callable[[str], None]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, and account for it."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        address = request.remote or ""
        child = self.children.seen(request.headers.get(RELAY_HEADER), request.headers.get(RECEIVER_HEADER), address)
        before = child.sent_bytes
        status, trace = _GONE, None
        try:
            response = await self._answer(request, child)
            status = response.status
        except CutError:
            # The head has gone out with a length that is never reached.
            status, response = _CUT, _cut(request)
        except Exception:
            # A bug. What has begun is not taken for whole, and who looks after the relay reads of it.
            status, trace = HTTPStatus.INTERNAL_SERVER_ERROR, traceback.format_exc()
            response = _cut(request)
        finally:
            self.account.requests[_known(request.method), status] += 1
            sent, seconds = child.sent_bytes - before, loop.time() - begun
            access = Access(request.method, request.path, status, sent, seconds, child.name, address, trace)
            self.log(access.line())
        return response

    async def _answer(self, request: web.BaseRequest, child: Child) -> web.StreamResponse:
        try:
            return await self._dispatch(request, child)
        except _RefusedError as refused:
            status, words, headers = refused.status, refused.words, refused.headers
        except UnavailableError:
            status, words = HTTPStatus.SERVICE_UNAVAILABLE, "no parent answers, or there is no room"
            headers = {"Retry-After": str(_RETRY_SECONDS)}
        except WrongError:
            status, words, headers = HTTPStatus.BAD_GATEWAY, "what the parents have of it is not right", {}
        except ForbiddenError:
            words, headers = "the parents do not let this relay", {}
            status = HTTPStatus.FORBIDDEN if request.method == "PUT" else HTTPStatus.BAD_GATEWAY
        response = web.Response(status=status, text=f"{words}\n", headers={**_PLAIN, **headers})
        if request.method == "PUT" and not request.content.at_eof():
            # What else comes of it is of no use.
            response.force_close()
        return response

    async def _dispatch(self, request: web.BaseRequest, child: Child) -> web.StreamResponse:
        key = key_of(request.raw_path)
        if key == "healthz":
            return self._health()
        right = self.rights.of(request.headers.get("Authorization"))
        if right is Right.NOTHING:
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "a token is needed", WWW_Authenticate='Bearer realm="dcr"')
        if request.method not in _METHODS:
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "not here", Allow="GET, HEAD, PUT")
        if key == "status":
            return self._text(request, json.dumps(self.account.status()) + "\n", "application/json")
        if key == "metrics":
            return self._text(request, self.account.metrics(), "text/plain; version=0.0.4")
        if key is not None and key.startswith(_STATUS) and request.method == "PUT":
            return await self._take_status(request, child, key.removeprefix(_STATUS))
        if key is not None and _is_listed(key) and request.method == "GET":
            return await self._list(key)
        asked = named(key) if key is not None else None
        if asked is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such object")
        if request.method == "PUT":
            if right < needed_to_put(asked):
                raise _RefusedError(HTTPStatus.FORBIDDEN, "this token may only read")
            return await self._put(request, asked)
        if request.method == "HEAD":
            return await self._head(request, asked)
        return await self._get(request, child, asked)

    # How it is

    def _health(self) -> web.Response:
        fault = self.account.fault
        status = HTTPStatus.OK if fault is None else HTTPStatus.SERVICE_UNAVAILABLE
        return web.Response(status=status, text=f"{fault or 'ok'}\n", headers=_PLAIN)

    def _text(self, request: web.BaseRequest, text: str, kind: str) -> web.Response:
        if request.method == "PUT":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "not here", Allow="GET, HEAD")
        return web.Response(body=text.encode(), headers={"Content-Type": kind, **_PLAIN})

    async def _take_status(self, request: web.BaseRequest, child: Child, name: str) -> web.Response:
        """Keep what a child relay says of itself."""
        data = b"".join([part async for part in self._parts(request, MOST_STATUS_BYTES)[1]])
        document = read_status(data, name) if is_receiver(name) and child.name == name else None
        if document is None:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "that is no status of this child")
        if not self.children.take_status(child, document, len(data)):
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "there is no room for more of what children say")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    # Reading

    async def _get(self, request: web.BaseRequest, child: Child, asked: Named) -> web.StreamResponse:
        if asked.is_body:
            return await self._get_body(request, child, asked)
        data = await self.library.document(asked)
        if data is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such object")
        if asked.kind is Kind.COMMIT:
            child.version = max(child.version or 0, asked.number)
            self.library.spool.needed_from = self.children.needed_from(self.library.news.head)
        begin, end = self._range(request, len(data))
        self.children.sent(child, end - begin)
        status, headers = self._head_of(request, asked, len(data), (begin, end))
        return web.Response(status=status, body=data[begin:end], headers=headers)

    async def _get_body(self, request: web.BaseRequest, child: Child, asked: Named) -> web.StreamResponse:
        """Send a body; a file of an anchor range by range."""
        if asked.kind is Kind.ANCHOR_FILE:
            size = await self.library.size_of_file(asked)
            first = None
        else:
            first = await self.library.body(asked)
            size = first.size if first is not None else None
        try:
            if size is None:
                raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such object")
            begin, end = self._range(request, size)
            if first is None and begin < end:
                # Before the head goes out: what is not there is no answer that is cut.
                first = await self.library.body(asked, begin // RANGE_BYTES)
                if first is None:
                    raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such object")
            status, headers = self._head_of(request, asked, size, (begin, end))
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            sending = Sending(request, response, lambda sent: self.children.sent(child, sent))
            if begin < end:
                assert first is not None
                part_end = min(end, begin - begin % RANGE_BYTES + RANGE_BYTES) if _is_ranged(asked) else end
                found, first = first, None
                await self._send(sending, found, asked, (begin, part_end))
                for at in range(part_end, end, RANGE_BYTES):
                    await self._send(sending, await self._part(asked, at), asked, (at, min(at + RANGE_BYTES, end)))
            await response.write_eof()
        finally:
            if isinstance(first, Arrival):
                first.close()
        return response

    async def _part(self, asked: Named, at: int) -> Arrival | Kept:
        """The range of an anchor's file that begins at a byte; CutError if it cannot be had."""
        try:
            found = await self.library.body(asked, at // RANGE_BYTES)
        except (UnavailableError, ForbiddenError, WrongError) as error:
            raise CutError from error
        if found is None:
            raise CutError
        return found

    async def _send(self, sending: Sending, found: Arrival | Kept, asked: Named, span: tuple[int, int]) -> None:
        base = span[0] - span[0] % RANGE_BYTES if _is_ranged(asked) else 0
        begin, end = span[0] - base, span[1] - base
        if isinstance(found, Kept):
            await sending.send_kept(self.library.spool, found, begin, end)
            return
        try:
            await sending.send_coming(found, begin, end)
        finally:
            found.close()

    async def _head(self, request: web.BaseRequest, asked: Named) -> web.Response:
        """Answer as the parent says, or later, once there is something to say."""
        seconds = wait_of(request.headers.get("Prefer"))
        applied = {}
        if seconds is not None and self._is_waited_for(asked):
            applied = {"Preference-Applied": "wait"}
            news = self.library.news
            before = news.count
            if not await self._is_here(asked):
                if not self.account.is_ending:
                    await news.after(before, seconds)
                if self.account.is_ending:
                    raise UnavailableError
                if not await self._is_here(asked):
                    return web.Response(status=HTTPStatus.NOT_FOUND, headers={**_PLAIN, **applied})
            if asked.kind is Kind.COMMIT:
                return web.Response(headers={**_PLAIN, **applied})

        def question(parent: Parent) -> Status | None:
            return parent.store.stat(asked.key, is_denied_absent=True)

        status = await self.library.run(lambda: self.library.parents.ask(question))
        coming = self.library.coming(asked)
        size = status.size if status is not None else coming.size if applied and coming is not None else None
        if size is None:
            return web.Response(status=HTTPStatus.NOT_FOUND, headers={**_PLAIN, **applied})
        headers = {"Content-Length": str(size), **_PLAIN, **applied}
        if status is not None and status.modified is not None:
            headers["Last-Modified"] = formatdate(status.modified, usegmt=True)
        return web.Response(headers=headers)

    def _is_waited_for(self, asked: Named) -> bool:
        return asked.kind is Kind.COMMIT or (asked.kind is Kind.PAYLOAD and asked.place == self.library.news.making)

    async def _is_here(self, asked: Named) -> bool:
        """Whether what is waited for is there, or comes."""
        news = self.library.news
        if asked.kind is Kind.COMMIT:
            return asked.number <= news.head or await self.library.document(asked) is not None
        if asked.place != news.making or asked.number < news.payloads:
            return True
        found = await self.library.body(asked)
        if isinstance(found, Arrival):
            found.close()
        return found is not None

    async def _list(self, prefix: str) -> web.Response:
        def question(parent: Parent) -> tuple[Entry, ...] | None:
            return list_if_allowed(parent.store, prefix)

        entries = await self.library.run(lambda: self.library.parents.ask(question))
        if entries is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "the parents list nothing")
        document = {
            "format": FORMAT,
            "requires": [],
            "entries": [
                {"key": entry.key, "bytes": entry.size, "modified": entry.modified}
                for entry in entries
                if (found := named(entry.key)) is not None and found.kind is Kind.ACKNOWLEDGEMENT
            ],
        }
        headers = {"Content-Type": "application/json", **_PLAIN}
        return web.Response(body=json.dumps(document).encode(), headers=headers)

    # Writing

    async def _put(self, request: web.BaseRequest, asked: Named) -> web.Response:
        if self.account.is_ending:
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "this relay is ending", Retry_After="2")
        is_create = request.headers.get("If-None-Match", "").strip() == "*"
        size, parts = self._parts(request, asked.most_bytes)
        made = await Publishing(self.library).put(asked, size, parts, is_create=is_create)
        match made:
            case Put.DONE:
                status = HTTPStatus.CREATED if is_create else HTTPStatus.NO_CONTENT
                return web.Response(status=status, headers=_PLAIN)
            case Put.TAKEN if is_create:
                raise _RefusedError(HTTPStatus.PRECONDITION_FAILED, "the key is taken")
            case Put.TAKEN:
                raise _RefusedError(HTTPStatus.CONFLICT, "another object is there, which does not change")
            case Put.FULL:
                raise UnavailableError
            case Put.SHORT:
                raise _RefusedError(HTTPStatus.BAD_REQUEST, "it ended before its length")
            case _:
                raise _RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "that is not what its key says")

    def _parts(self, request: web.BaseRequest, most_bytes: int) -> tuple[int, AsyncIterator[bytes]]:
        """How long what is put is, and its bytes."""
        size = length_of(request.headers.get("Content-Length"))
        if size is None:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "how long it is has to be said")
        if size > most_bytes:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no object of this key is so large")
        return size, _hurried(request, size)

    # Heads

    def _range(self, request: web.BaseRequest, size: int) -> tuple[int, int]:
        span = range_of(request.headers.get("Range"), size)
        if span is None:
            outside = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            raise _RefusedError(outside, "it ends before that range", Content_Range=f"bytes */{size}")
        return span

    def _head_of(
        self, request: web.BaseRequest, asked: Named, size: int, span: tuple[int, int]
    ) -> tuple[HTTPStatus, dict[str, str]]:
        """Status and headers of an answer with bytes of an object."""
        cache = "no-store"
        if asked.is_immutable:
            cache = f"{'public' if self.rights.read_token is None else 'private'}, {_IMMUTABLE}"
        is_json = asked.key.endswith(".json")
        headers = {
            "Content-Type": "application/json" if is_json else "application/octet-stream",
            "Content-Length": str(span[1] - span[0]),
            "Accept-Ranges": "bytes",
            **_PLAIN,
            "Cache-Control": cache,
            "X-Content-Type-Options": "nosniff",
        }
        if not is_ranged(request.headers.get("Range")):
            return HTTPStatus.OK, headers
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
        return HTTPStatus.PARTIAL_CONTENT, headers


def _is_ranged(asked: Named) -> bool:
    return asked.kind is Kind.ANCHOR_FILE


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
    return web.Response(status=HTTPStatus.INTERNAL_SERVER_ERROR, headers=_PLAIN)


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
