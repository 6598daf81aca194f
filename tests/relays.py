"""Relays for tests: in a thread of this process, and in a process of their own."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from dcr_cli.relay import relay as relays, watching
from dcr_cli.relay.relay import RelayResult, Setting
from dcr_cli.relay.rights import Rights
from dcr_cli.relay.serving import Address
from dcr_cli.store.backend import Backend
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store

IMPATIENT = Patience(deadline_seconds=0.0)
_START_SECONDS = 60.0


@dataclass
class Running:
    """A relay that runs: its address, what it has logged, and the answers of plain requests to it."""

    url: str
    lines: list[str] = field(default_factory=list)

    def ask(
        self, method: str, key: str, body: bytes | None = None, /, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one request, on a connection of its own."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, f"/{key}", body=body, headers=named)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, key: str, **headers: str) -> bytes:
        """The body of an answer that is a success."""
        status, _, data = self.ask("GET", key, **headers)
        assert status in (200, 206), (key, status, data)
        return data

    def status(self, **headers: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("status", **headers))
        return found

    def open(self, **options: Any) -> Store:
        """The relay as a remote."""
        return open_store(self.url, patience=IMPATIENT, **options)


def store_of(folder: Path, wrap: Callable[[Backend], Backend] = lambda backend: backend) -> Store:
    """A folder as a parent."""
    return Store(wrap(LocalBackend(str(folder))), f"folder {folder.name}", patience=IMPATIENT)


@contextmanager
def relaying(
    parents: Sequence[Store], spool: Path, *, limit: int = 1 << 30, rights: Rights | None = None, **options: Any
) -> Iterator[Running]:
    """Run a relay in a thread."""
    address = Address("127.0.0.1", 0, options.pop("most_connections", 256))
    setting = Setting(options.pop("name", spool.name), address, spool, limit, rights or Rights(is_open=True), **options)
    started = threading.Event()
    running = Running("")
    ends: list[Callable[[], object]] = []

    @contextmanager
    def ending() -> Iterator[asyncio.Future[int]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        ends.append(lambda: loop.call_soon_threadsafe(future.set_result, 0))
        yield future

    def heard(result: RelayResult) -> None:
        running.url = result.address
        started.set()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            relays.serve(parents, setting, started=heard, log=running.lines.append, ending=ending)
        except BaseException as error:
            errors.append(error)
            started.set()

    # At the end of one in a thread nobody interrupts what waits at its parent.
    with mock.patch.object(watching, "_WAIT_SECONDS", 1):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(_START_SECONDS)
        try:
            if errors:
                raise errors[0]
            yield running
        finally:
            for end in ends[:1]:
                if thread.is_alive():
                    end()
            thread.join(_START_SECONDS)
            assert not thread.is_alive()


@contextmanager
def chained(folder: Path, spools: Path, count: int) -> Iterator[list[Running]]:
    """So many relays, each the parent of the next, the first of which hands on a folder."""
    with ExitStack() as stack:
        found: list[Running] = []
        for number in range(count):
            parent = open_store(found[-1].url, patience=IMPATIENT) if found else store_of(folder)
            found.append(stack.enter_context(relaying([parent], spools / f"relay-{number}")))
        yield found


@contextmanager
def relay_process(
    parents: Sequence[str | Path], spool: Path, *arguments: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `dcr relay` in a process of its own: its address, and the process, which is killed at the end."""
    command = [sys.executable, "-m", "dcr_cli", "relay", *map(str, parents), "--spool", str(spool), "--json"]
    if "--listen" not in arguments:
        command += ["--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    with process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield json.loads(line)["address"], process
        finally:
            process.kill()


def certificate_for_this_host(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    made = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    its = f"-addext subjectAltName=IP:127.0.0.1 -out {certificate} -keyout {key}"
    subprocess.run(f"openssl req {made} {its}".split(), check=True, capture_output=True)
    return certificate, key
