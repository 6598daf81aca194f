"""Answers to those who read: objects, parts of them, what is known of them, and what is listed (FORMAT 15.1 to 15.3).

Bytes go out by sending.py; what they are is the library's matter.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus

from aiohttp import web

from dcr_cli.delta.document import FORMAT
from dcr_cli.delta.file_rules import RANGE_BYTES
from dcr_cli.relay.arrival import Arrival
from dcr_cli.relay.children import Child, Children
from dcr_cli.relay.kinds import Kind, Named, named
from dcr_cli.relay.library import Library
from dcr_cli.relay.parents import ForbiddenError, UnavailableError, WrongError
from dcr_cli.relay.refusing import PLAIN, AnswerError, no_such_object
from dcr_cli.relay.requests import is_ranged, range_of, wait_of
from dcr_cli.relay.rights import Rights
from dcr_cli.relay.sending import CutError, Sending
from dcr_cli.relay.spool import Kept
from dcr_cli.relay.telling import Account
from dcr_cli.store.backend import Entry

_IMMUTABLE = "max-age=31536000, immutable"
_WAITED = {"Preference-Applied": "wait"}

# Sends bytes from one to before another.
_Send = Callable[[Sending, int, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Answers to reads of one relay."""

    library: Library
    children: Children
    account: Account
    rights: Rights

    async def get(self, request: web.BaseRequest, child: Child, asked: Named) -> web.StreamResponse:
        """Send an object, or the part of it that is asked for."""
        if asked.kind is Kind.ANCHOR_FILE:
            return await self._get_file(request, child, asked)
        if asked.is_body:
            return await self._get_body(request, child, asked)
        data = await self.library.documents.get(asked)
        if data is None:
            raise no_such_object()
        if asked.kind is Kind.COMMIT:
            child.version = max(child.version or 0, asked.number)
            self.library.spool.needed_from = self.children.needed_from(self.library.news.head)
        return await self._answer(request, child, asked, (len(data), _bytes_of(data)))

    async def head(self, request: web.BaseRequest, asked: Named) -> web.Response:
        """Say what the parent says, or later, once there is something to say."""
        seconds = wait_of(request.headers.get("Prefer"))
        is_waited_for = asked.kind is Kind.COMMIT or self._is_being_made(asked)
        if seconds is None or not is_waited_for:
            return await self._head(asked, {})
        news = self.library.news
        before = news.count
        if not await self._is_here(asked):
            if not self.account.is_ending:
                await news.after(before, seconds)
            if self.account.is_ending:
                raise UnavailableError
            if not await self._is_here(asked):
                return web.Response(status=HTTPStatus.NOT_FOUND, headers={**PLAIN, **_WAITED})
        return await self._head(asked, _WAITED)

    async def list(self, request: web.BaseRequest, child: Child, prefix: str) -> web.StreamResponse:
        """List the acknowledgements below a prefix."""

        def find() -> bytes:
            entries = self.library.parents.ask(lambda parent: parent.store.list(prefix))
            listed = [_entry(entry) for entry in entries if _is_acknowledgement(entry)]
            document = {"format": FORMAT, "requires": [], "entries": listed}
            return json.dumps(document).encode()

        try:
            data = await self.library.look(find)
        except ForbiddenError:
            raise AnswerError(HTTPStatus.NOT_FOUND, "the parents list nothing") from None
        return await self._answer(request, child, None, (len(data), _bytes_of(data)))

    async def _get_body(self, request: web.BaseRequest, child: Child, asked: Named) -> web.StreamResponse:
        found = await self.library.body(asked)
        try:
            if found is None or found.size is None:
                raise no_such_object()
            return await self._answer(request, child, asked, (found.size, self._body_of(found)))
        finally:
            if isinstance(found, Arrival):
                found.close()

    async def _get_file(self, request: web.BaseRequest, child: Child, asked: Named) -> web.StreamResponse:
        """Send a file of an anchor, range by range."""
        size = await self.library.size_of_file(asked)
        if size is None:
            raise no_such_object()
        span = range_of(request.headers.get("Range"), size)
        first = None
        if span is not None and span[0] < span[1]:
            # Before the head goes out: what is not there is no answer that is cut.
            first = await self.library.body(asked, span[0] // RANGE_BYTES)
            if first is None:
                raise no_such_object()
        ranges = _Ranges(self, asked, first)
        try:
            return await self._answer(request, child, asked, (size, ranges.send))
        finally:
            ranges.close()

    async def _answer(
        self, request: web.BaseRequest, child: Child, asked: Named | None, whole: tuple[int, _Send]
    ) -> web.StreamResponse:
        """Send what is asked for of an object, or of a listing, whose size is given with how it is sent."""
        size, send = whole
        span = range_of(request.headers.get("Range"), size)
        if span is None:
            outside = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            raise AnswerError(outside, "it ends before that range", Content_Range=f"bytes */{size}")
        begin, end = span
        is_json = asked is None or asked.key.endswith(".json")
        headers = {
            **PLAIN,
            "Content-Type": "application/json" if is_json else "application/octet-stream",
            "Content-Length": str(end - begin),
            "Accept-Ranges": "bytes",
            "X-Content-Type-Options": "nosniff",
        }
        if asked is not None and asked.is_immutable:
            headers["Cache-Control"] = f"{'public' if self.rights.read_token is None else 'private'}, {_IMMUTABLE}"
        is_part = is_ranged(request.headers.get("Range"))
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
        sending = Sending(request, status, headers, partial(self.children.sent, child))
        if begin < end:
            await send(sending, begin, end)
        return await sending.end()

    def _body_of(self, found: Arrival | Kept) -> _Send:
        """How a body is sent, or a range of an anchor's file."""

        async def send(sending: Sending, begin: int, end: int) -> None:
            if isinstance(found, Kept):
                await sending.send_kept(self.library.spool, found, begin, end)
            else:
                await sending.send_coming(found, begin, end)

        return send

    async def _head(self, asked: Named, applied: dict[str, str]) -> web.Response:
        headers = {**PLAIN, **applied}
        if applied and asked.kind is Kind.COMMIT:
            data = await self.library.documents.get(asked)
            size, modified = len(data) if data is not None else None, None
        else:
            status = await self.library.look(
                lambda: self.library.parents.ask(lambda parent: parent.store.stat(asked.key, is_denied_absent=True))
            )
            coming = self.library.coming(asked) if applied else None
            size = status.size if status is not None else coming.size if coming is not None else None
            modified = status.modified if status is not None else None
        if size is None:
            return web.Response(status=HTTPStatus.NOT_FOUND, headers=headers)
        headers["Content-Length"] = str(size)
        if modified is not None:
            headers["Last-Modified"] = formatdate(modified, usegmt=True)
        return web.Response(headers=headers)

    def _is_being_made(self, asked: Named) -> bool:
        return asked.kind is Kind.PAYLOAD and asked.place == self.library.news.making

    async def _is_here(self, asked: Named) -> bool:
        """Whether what is waited for is there, or comes, or is waited for in vain."""
        if asked.kind is Kind.COMMIT:
            return await self.library.documents.get(asked) is not None
        if not self._is_being_made(asked) or self.library.news.has_payload(asked.number):
            return True
        found = await self.library.body(asked)
        if isinstance(found, Arrival):
            found.close()
        return found is not None


@dataclass(slots=True)
class _Ranges:
    """The ranges of a file of an anchor, which are fetched and sent one after the other; `first` is the first one that
    is wanted."""

    reading: Reading
    asked: Named
    first: Arrival | Kept | None

    async def send(self, sending: Sending, begin: int, end: int) -> None:
        at = begin
        while at < end:
            base = at - at % RANGE_BYTES
            up_to = min(base + RANGE_BYTES, end)
            found, self.first = self.first or await self._range(base // RANGE_BYTES), None
            try:
                await self.reading._body_of(found)(sending, at - base, up_to - base)
            finally:
                if isinstance(found, Arrival):
                    found.close()
            at = up_to

    def close(self) -> None:
        """Let go of what was not sent."""
        if isinstance(self.first, Arrival):
            self.first.close()

    async def _range(self, number: int) -> Arrival | Kept:
        """A range, once the head of the answer has gone out; CutError if it cannot be had."""
        try:
            found = await self.reading.library.body(self.asked, number)
        except (UnavailableError, ForbiddenError, WrongError) as error:
            raise CutError from error
        if found is None:
            raise CutError
        return found


def _bytes_of(data: bytes) -> _Send:
    """How a document is sent."""

    async def send(sending: Sending, begin: int, end: int) -> None:
        await sending.send_bytes(data[begin:end])

    return send


def _is_acknowledgement(entry: Entry) -> bool:
    found = named(entry.key)
    return found is not None and found.kind is Kind.ACKNOWLEDGEMENT


def _entry(entry: Entry) -> dict[str, str | int | float | None]:
    return {"key": entry.key, "bytes": entry.size, "modified": entry.modified}
