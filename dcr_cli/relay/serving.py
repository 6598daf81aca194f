"""The server of a relay: sockets, TLS, limits on connections and time, and a graceful end.

What is answered is answering.py's matter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from dcr_cli.errors import LocalError, UsageError, hint_of
from dcr_cli.relay.answering import Answering

# A connection on which no whole request comes for so long is closed: an idle one, and one that sends a byte now and
# then.
IDLE_SECONDS = 75.0
_MOST_LINE_BYTES, _MOST_FIELD_BYTES, _MOST_FIELDS = 8190, 8190, 64
_BACKLOG = 1024
# What is open besides connections of children: files that are sent, and connections to parents.
_OTHER_FILES = 512


@dataclass(frozen=True, slots=True)
class Address:
    """Where a relay listens, and by which certificate; no more than so many connections at a time."""

    host: str
    port: int
    most_connections: int
    certificate: Path | None = None
    key: Path | None = None


class _Server(web.Server):
    """aiohttp's, with a limit on connections, of whose ends children.py hears."""

    def __init__(self, answering: Answering, most_connections: int) -> None:
        self._most_connections = most_connections
        self._children = answering.children
        super().__init__(
            answering.answer,
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=_MOST_LINE_BYTES,
            max_field_size=_MOST_FIELD_BYTES,
            max_headers=_MOST_FIELDS,
            auto_decompress=False,
            access_log=None,
            logger=_silent(),
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._most_connections:
            transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._children.ended(handler)


def _connections_for(wanted: int) -> int:
    """How many connections, up to so many, this process may have open beside the files that it needs."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if now != resource.RLIM_INFINITY and now < needed:
        now = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
    return wanted if now == resource.RLIM_INFINITY else max(1, min(wanted, now - _OTHER_FILES))


def _silent() -> logging.Logger:
    """What aiohttp is to log to: that requests are none, with what they are, is of no use to anybody."""
    logger = logging.getLogger("dcr.relay")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


@asynccontextmanager
async def listening(address: Address, answering: Answering, drain_seconds: float) -> AsyncIterator[str]:
    """Serve while inside: lends the address under which that is. At the end what has begun is sent, for so long."""
    context = _context(address)
    server = _Server(answering, _connections_for(address.most_connections))
    loop = asyncio.get_running_loop()
    try:
        sockets = await loop.create_server(server, address.host, address.port, ssl=context, backlog=_BACKLOG)
    except OSError as error:
        facts = f"cannot be listened at: {error.strerror or type(error).__name__}"
        raise LocalError(f"{address.host}:{address.port}", facts, hint=hint_of(error)) from error
    port = sockets.sockets[0].getsockname()[1]
    own = address.host or os.uname().nodename
    host = f"[{own}]" if ":" in own else own
    try:
        yield f"{'https' if context is not None else 'http'}://{host}:{port}"
    finally:
        sockets.close()
        answering.account.is_ending = True
        answering.library.news.end_waits()
        server.pre_shutdown()
        # It waits so long for what is sent, and as long again for what it has told to end.
        await server.shutdown(drain_seconds / 2)
        await sockets.wait_closed()


def _context(address: Address) -> ssl.SSLContext | None:
    if address.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(address.certificate, address.key)
    except ssl.SSLError as error:
        raise UsageError("--tls-cert", "holds no certificate, or --tls-key not its key, as PEM") from error
    except OSError as error:
        raise LocalError(str(address.certificate), f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    return context
