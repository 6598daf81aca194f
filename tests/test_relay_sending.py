"""relay/sending: whole bodies and parts of them, whoever takes them and however; and those who do not."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import pytest
from aiohttp import web

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.relay import sending
from dcr_cli.relay.sending import CutError, Sending
from dcr_cli.relay.spool import Kept, Label, Spool
from relays import certificate_for_this_host

# More than a socket holds, and several steps of the kernel's.
BODY = os.urandom(1 << 20) * 9
LABEL = Label("key", 0, 1)


@dataclass
class Scene:
    """A server that sends one body as it is kept, or a part of it, and what became of each answer."""

    spool: Spool
    kept: Kept
    port: int = 0
    sent_bytes: int = 0
    endings: list[BaseException | None] = field(default_factory=list)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        begin, end = map(int, request.path[1:].split("-"))
        found = Sending(request, HTTPStatus.OK, {"Content-Length": str(end - begin)}, self.count)
        try:
            await found.send_kept(self.spool, self.kept, begin, end)
            response = await found.end()
            self.endings.append(None)
        except (CutError, ConnectionError) as error:
            self.endings.append(error)
            if request.transport is not None:
                request.transport.abort()
            response = web.Response()
        finally:
            self.has_ended.set()
        return response

    def count(self, size: int) -> None:
        self.sent_bytes += size

    async def ask(self, *spans: tuple[int, int], context: ssl.SSLContext | None = None) -> list[bytes]:
        """The bodies of answers, on one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        found = []
        for begin, end in spans:
            writer.write(f"GET /{begin}-{end} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and f"Content-Length: {end - begin}\r\n".encode() in head
            found.append(await reader.readexactly(end - begin))
        writer.close()
        await writer.wait_closed()
        return found

    def silent(self) -> socket.socket:
        """A child that has asked for everything, and takes nothing."""
        child = socket.create_connection(("127.0.0.1", self.port))
        child.sendall(f"GET /0-{len(BODY)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return child


@asynccontextmanager
async def serving(
    place: Path, context: ssl.SSLContext | None = None, *, held_bytes: int | None = None
) -> AsyncIterator[Scene]:
    """Serve while inside, on connections that hold so much."""
    with Spool(place / "spool", 1 << 30) as spool:
        draft = spool.begin(len(BODY))
        draft.file.write_at(0, BODY)
        kept = spool.keep(draft, LABEL, len(BODY), object_digest(BODY))
        draft.file.close()
        scene = Scene(spool, kept)
        server = web.Server(scene.answer)
        listener = socket.create_server(("127.0.0.1", 0))
        if held_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, held_bytes)
        listening = await asyncio.get_running_loop().create_server(server, sock=listener, ssl=context)
        scene.port = listener.getsockname()[1]
        try:
            yield scene
        finally:
            listening.close()
            await server.shutdown(1)


SPANS = [(0, len(BODY)), (0, 1), (5, 5), (7, 65_543), (7, 65_544), (3, (8 << 20) + 3), (len(BODY) - 300_000, len(BODY))]


def test_children_are_given_what_they_ask_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as scene:
            for found in await asyncio.gather(*(scene.ask(*SPANS) for _ in range(3))):
                assert [BODY[begin:end] for begin, end in SPANS] == found
            assert scene.sent_bytes == 3 * sum(end - begin for begin, end in SPANS)
            assert scene.endings == [None] * 3 * len(SPANS)
            assert not scene.kept.readers

    asyncio.run(run())


def test_over_tls(tmp_path: Path) -> None:
    certificate, key = certificate_for_this_host(tmp_path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(certificate))
    server.load_cert_chain(certificate, key)

    async def run() -> None:
        async with serving(tmp_path, server) as scene:
            assert await scene.ask(*SPANS, context=client) == [BODY[begin:end] for begin, end in SPANS]

    asyncio.run(run())


def test_the_head_comes_first_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, held_bytes=16_384) as scene:
            with socket.socket() as child:
                child.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                child.connect(("127.0.0.1", scene.port))
                child.setblocking(False)
                # The first answer is kept back in part, and so is the head of the second.
                spans = [(0, 65_536), (9, 1 << 20)]
                asked = "".join(f"GET /{begin}-{end} HTTP/1.1\r\nHost: x\r\n\r\n" for begin, end in spans)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(child, asked.encode())
                await scene.has_ended.wait()
                reader, writer = await asyncio.open_connection(sock=child)
                for begin, end in spans:
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
                    assert await reader.readexactly(end - begin) == BODY[begin:end]
                writer.close()
                await writer.wait_closed()

    asyncio.run(run())


def test_who_takes_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_STALLED_SECONDS", 0.05)

    async def run() -> None:
        async with serving(tmp_path) as scene:
            with scene.silent():
                await scene.has_ended.wait()
            assert isinstance(scene.endings[0], CutError) and 0 < scene.sent_bytes < len(BODY)
            assert not scene.kept.readers

    asyncio.run(run())


@pytest.mark.parametrize("is_orderly", [True, False])
def test_who_goes_away_is_let_go(tmp_path: Path, is_orderly: bool) -> None:
    async def run() -> None:
        async with serving(tmp_path) as scene:
            child = scene.silent()
            while not scene.sent_bytes:
                await asyncio.sleep(0)
            if is_orderly:
                child.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.01)
            child.close()
            await scene.has_ended.wait()
            assert isinstance(scene.endings[0], ConnectionError)
            assert not scene.kept.readers

    asyncio.run(run())


def test_a_file_that_became_shorter_is_cut(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as scene:
            with scene.silent() as child:
                while not scene.sent_bytes:
                    await asyncio.sleep(0)
                (path,) = (tmp_path / "spool" / "kept").iterdir()
                os.truncate(path, 1000)
                reader, writer = await asyncio.open_connection(sock=child)
                await reader.read()
                await scene.has_ended.wait()
                writer.close()
            assert isinstance(scene.endings[0], CutError)

    asyncio.run(run())
