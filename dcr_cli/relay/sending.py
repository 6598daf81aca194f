"""Sends bodies to children: from the disk by the kernel where they are kept, else as they come.

A child that takes nothing for a while is let go. What is not right is cut: the connection ends before the last byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from aiohttp import web

from dcr_cli.durable import File
from dcr_cli.relay.arrival import Arrival
from dcr_cli.relay.spool import Kept, Spool

# A child has to take so much within that time.
_STALLED_SECONDS = 60.0
_STEP_BYTES = 4 << 20
_READ_BYTES = 256 << 10


class CutError(Exception):
    """The rest of an answer cannot be sent."""


@dataclass(frozen=True, slots=True)
class Sending:
    """One answer that has begun; `count` is told of the bytes that are sent."""

    request: web.BaseRequest
    response: web.StreamResponse
    count: Callable[[int], None]

    async def send_kept(self, spool: Spool, kept: Kept, begin: int, end: int) -> None:
        """Send bytes of what is kept. CutError if it has gone meanwhile, or the child has."""
        file = spool.open(kept)
        if file is None:
            raise CutError
        try:
            await self._send_file(file, begin, end)
        finally:
            spool.close(kept, file)

    async def send_bytes(self, data: bytes) -> None:
        """Send a document."""
        for at in range(0, len(data), _READ_BYTES):
            part = data[at : at + _READ_BYTES]
            async with _hurried():
                await self.response.write(part)
            self.count(len(part))

    async def send_coming(self, arrival: Arrival, begin: int, end: int) -> None:
        """Send bytes of what comes. CutError if it turns out not to be right."""
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
                    await self.response.write(data)
                at += len(data)
                self.count(len(data))

    async def _send_file(self, file: File, begin: int, end: int) -> None:
        # The head of an answer may go out with its first bytes alone.
        first = bytearray(min(_READ_BYTES, end - begin))
        file.read_into(begin, memoryview(first))
        async with _hurried():
            await self.response.write(bytes(first))
        self.count(len(first))
        loop = asyncio.get_running_loop()
        with open(file.fd, "rb", buffering=0, closefd=False) as opened:
            for at in range(begin + len(first), end, _STEP_BYTES):
                transport = self.request.transport
                if transport is None:
                    raise CutError
                size = min(_STEP_BYTES, end - at)
                async with _hurried():
                    await loop.sendfile(cast(asyncio.WriteTransport, transport), cast(BinaryIO, opened), at, size)
                self.count(size)


@asynccontextmanager
async def _hurried() -> AsyncIterator[None]:
    """Let a child have no more time than it may take; CutError if it takes more, or is gone."""
    try:
        async with asyncio.timeout(_STALLED_SECONDS):
            yield
    except (TimeoutError, ConnectionError, RuntimeError) as error:
        raise CutError from error
