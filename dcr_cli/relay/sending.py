"""Sends bodies to children: from the disk by the kernel where they are kept, else as they come.

A child that takes nothing for a while is let go. What is not right is cut: the connection ends before the last byte.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from dcr_cli.durable import File
from dcr_cli.errors import DcrError
from dcr_cli.relay.arrival import Arrival
from dcr_cli.relay.spool import Kept, Spool

# A child has to take so much within that time.
_STALLED_SECONDS = 60.0
_STEP_BYTES = 4 << 20
_READ_BYTES = 256 << 10
# Of so little it costs less to read it than to have the kernel send it.
_LITTLE_BYTES = 64 << 10


class CutError(Exception):
    """The rest of an answer cannot be sent."""


@dataclass(slots=True)
class Sending:
    """One answer, whose head goes out with the first bytes of its body; `count` is told of the bytes that are sent."""

    request: web.BaseRequest
    status: HTTPStatus
    headers: dict[str, str]
    count: Callable[[int], None]
    _response: web.StreamResponse | None = None

    async def send_kept(self, spool: Spool, kept: Kept, begin: int, end: int) -> None:
        """Send bytes of what is kept. CutError if it has gone meanwhile."""
        file = spool.open(kept)
        if file is None:
            raise CutError
        try:
            await self._send_file(file, begin, end)
        finally:
            spool.close(kept)

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes that are in memory."""
        if self._response is None and len(data) <= _LITTLE_BYTES and self.headers["Content-Length"] == str(len(data)):
            # In one piece, head and all.
            response = self._response = web.Response(status=self.status, headers=self.headers, body=data)
            async with _hurried():
                await response.prepare(self.request)
                await response.write_eof()
            self.count(len(data))
            return
        begun = await self._begun()
        for at in range(0, len(data), _READ_BYTES):
            part = data[at : at + _READ_BYTES]
            async with _hurried():
                await begun.write(part)
            self.count(len(part))

    async def send_coming(self, arrival: Arrival, begin: int, end: int) -> None:
        """Send bytes of what comes. CutError if it turns out not to be right."""
        response = await self._begun()
        at = begin
        while at < end:
            up_to = await arrival.reach(at, end)
            if up_to <= at:
                raise CutError
            while at < up_to:
                data = arrival.read(at, min(_READ_BYTES, up_to - at))
                if not data:
                    raise CutError
                async with _hurried():
                    await response.write(data)
                at += len(data)
                self.count(len(data))

    async def end(self) -> web.StreamResponse:
        """End the answer, all of whose bytes were sent."""
        response = await self._begun()
        await response.write_eof()
        return response

    async def _begun(self) -> web.StreamResponse:
        """The answer, whose head has gone out."""
        if self._response is None:
            self._response = web.StreamResponse(status=self.status, headers=self.headers)
            await self._response.prepare(self.request)
        return self._response

    async def _send_file(self, file: File, begin: int, end: int) -> None:
        transport = self.request.transport
        is_plain = transport is not None and transport.get_extra_info("sslcontext") is None
        if is_plain and end - begin > _LITTLE_BYTES:
            await self._send_by_kernel(file, begin, end)
            return
        for at in range(begin, end, _READ_BYTES):
            data = bytearray(min(_READ_BYTES, end - at))
            try:
                file.read_into(at, memoryview(data))
            except DcrError as error:
                raise CutError from error
            await self.send_bytes(bytes(data))

    async def _send_by_kernel(self, file: File, begin: int, end: int) -> None:
        await self._begun()
        transport = _open_transport(self.request)
        if transport.get_write_buffer_size():
            # What the kernel is to send may not come before the head.
            transport.set_write_buffer_limits(0)
            async with _hurried():
                await self.request.writer.drain()
        loop = asyncio.get_running_loop()
        # Under a number of its own, which stays that of this socket when the connection ends meanwhile.
        fd = os.dup(transport.get_extra_info("socket").fileno())
        try:
            for at in range(begin, end, _STEP_BYTES):
                up_to, until = min(at + _STEP_BYTES, end), loop.time() + _STALLED_SECONDS
                while True:
                    _open_transport(self.request)
                    sent = _sent_by_kernel(fd, file, at, up_to)
                    self.count(sent)
                    at += sent
                    if at == up_to:
                        break
                    async with _hurried(until):
                        await _writable(fd)
                if at < end:
                    # A child that takes as fast as this is not the only one.
                    await asyncio.sleep(0)
        finally:
            os.close(fd)


def _open_transport(request: web.BaseRequest) -> asyncio.Transport:
    """The transport of a connection; ConnectionResetError if that has ended."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError
    return transport


def _sent_by_kernel(fd: int, file: File, begin: int, end: int) -> int:
    """Have the kernel send what a socket has room for, perhaps nothing: how much. CutError if the file cannot be read,
    or ends."""
    try:
        sent = os.sendfile(fd, file.fd, begin, end - begin)
    except BlockingIOError:
        return 0
    except ConnectionError:
        raise
    except OSError as error:
        raise CutError from error
    if not sent:
        raise CutError
    return sent


async def _writable(fd: int) -> None:
    """Wait until a socket has room."""
    loop = asyncio.get_running_loop()
    room = loop.create_future()
    loop.add_writer(fd, _settle, room)
    try:
        await room
    finally:
        loop.remove_writer(fd)


def _settle(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)


@asynccontextmanager
async def _hurried(until: float | None = None) -> AsyncIterator[None]:
    """Let a child have no more time than it may take; CutError if it takes more."""
    end = until if until is not None else asyncio.get_running_loop().time() + _STALLED_SECONDS
    try:
        async with asyncio.timeout_at(end):
            yield
    except TimeoutError as error:
        raise CutError from error
