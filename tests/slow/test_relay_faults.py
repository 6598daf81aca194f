"""What goes wrong around a relay: every receiver ends with the publisher's bytes, and nothing wrong is served.

    scripts/test -s tests/slow/test_relay_faults.py

Parents that answer wrongly, a full disk, slow and idle children, tokens, clocks that jump, and a spool that a crash has
left. What is killed is test_relay_kills.py's matter. A full disk needs root, for a little tmpfs.
"""

from __future__ import annotations

import http.client
import itertools
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import pytest

from dcr_cli.errors import TransportError
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.relay import library
from dcr_cli.relay.rights import Rights
from dcr_cli.relay.serving import IDLE_SECONDS
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.retry import Patience
from faulty_parent import FAULTS, address_of, faulty_parent
from models import new_model, write
from receivers import tree
from relays import IMPATIENT, Running, relaying, store_of
from store_wrappers import FailsCalls, Records

VERSIONS, MODEL_BYTES = 3, 8_000_000
PATIENT = Patience(deadline_seconds=300.0)
READ, WRITE = "reads-0123456789abcdef", "writes-0123456789abcdef"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with some versions, the payloads of which are large, and the checkpoint of the last."""
    folder = tmp_path_factory.mktemp("published")
    rng = np.random.default_rng(0)
    model = new_model(rng, MODEL_BYTES)
    for number in range(VERSIONS):
        for tensor in model[: len(model) * number // 2]:
            tensor[:] = rng.integers(0, 1 << 16, len(tensor), np.uint16)
        push(write(model, folder / "checkpoint"), folder / "remote", baseline=folder / "baseline", jobs=1)
    return folder / "remote", folder / "checkpoint"


def keys_of(remote: Path) -> list[str]:
    return sorted(str(path.relative_to(remote)) for path in remote.rglob("*") if path.is_file())


def largest_payload(remote: Path) -> str:
    return max((key for key in keys_of(remote) if "/payloads/" in key), key=lambda key: (remote / key).stat().st_size)


def check_all(relay: Running, remote: Path, *, must: bool) -> None:
    """Ask for every object: what comes whole is right; all come, some after others have failed, if they `must`."""
    for key in keys_of(remote):
        end = time.monotonic() + (30 if must else 0)
        times = 0
        while (times := times + 1) <= 6 or time.monotonic() < end:
            if times > 6:
                time.sleep(0.2)
            try:
                status, _, data = relay.ask("GET", key)
            except (OSError, http.client.HTTPException):
                continue
            assert status != 404, key
            if status == 200:
                assert data == (remote / key).read_bytes(), key
                break
        else:
            assert not must, key


def check_pull(relay: Running, folder: Path, checkpoint: Path) -> None:
    """A receiver that begins with nothing, and one that comes by deltas."""
    folder.mkdir(exist_ok=True)
    for name, versions in (("whole", (VERSIONS,)), ("deltas", range(1, VERSIONS + 1))):
        for version in versions:
            pull(relay.url, folder / name, version=version, jobs=1)
        assert tree(folder / name) == tree(checkpoint)


class TestParents:
    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("pattern", ["versions/*", "anchors/*", "*.json"])
    def test_one_that_answers_wrongly_beside_one_that_does_not(
        self, published: tuple[Path, Path], tmp_path: Path, fault: str, pattern: str
    ) -> None:
        remote, checkpoint = published
        with (
            faulty_parent(remote, fault, pattern) as server,
            relaying(
                [open_store(address_of(server), patience=IMPATIENT), store_of(remote)], tmp_path / "spool"
            ) as relay,
        ):
            check_pull(relay, tmp_path, checkpoint)
            check_all(relay, remote, must=True)
            assert server.faults

    @pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("stalled", "silent")])
    def test_one_alone(self, published: tuple[Path, Path], tmp_path: Path, fault: str) -> None:
        remote, checkpoint = published
        with faulty_parent(remote, fault, "versions/*") as server:
            parent = open_store(address_of(server), patience=IMPATIENT)
            # That something was wrong is remembered for a while, which need not be waited for.
            forgets = mock.patch.object(library, "_WRONG_SECONDS", 0.0)
            with forgets, relaying([parent], tmp_path / "spool") as relay:
                check_all(relay, remote, must=False)
                assert server.faults
                # It gets well.
                server.pattern = ""
                check_all(relay, remote, must=True)
                check_pull(relay, tmp_path, checkpoint)


class TestSpool:
    @pytest.fixture
    def little_disk(self, tmp_path: Path) -> Iterator[Path]:
        """A disk with less room than the largest payload needs."""
        if os.geteuid() != 0:
            pytest.skip("mounting a little tmpfs needs root")
        place = tmp_path / "disk"
        place.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"this machine mounts no tmpfs: {made.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=True)

    def test_a_full_disk(self, published: tuple[Path, Path], tmp_path: Path, little_disk: Path) -> None:
        remote, checkpoint = published
        for number in range(2):
            # The second one finds what the first has left.
            with relaying([store_of(remote)], little_disk / "spool") as relay:
                check_all(relay, remote, must=True)
                check_pull(relay, tmp_path / f"{number}", checkpoint)
                with ThreadPoolExecutor(8) as pool:
                    key = largest_payload(remote)
                    for data in pool.map(relay.get, [key] * 8):
                        assert data == (remote / key).read_bytes()

    def test_a_limit_below_what_an_object_needs(self, published: tuple[Path, Path], tmp_path: Path) -> None:
        remote, checkpoint = published
        with relaying([store_of(remote)], tmp_path / "spool", limit=1 << 20) as relay:
            check_all(relay, remote, must=True)
            check_pull(relay, tmp_path, checkpoint)
            assert relay.status()["spool"]["bytes"] <= 1 << 20

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "longer", "folder", "other name", "half-written"])
    def test_a_restart_with_what_a_crash_has_left(
        self, published: tuple[Path, Path], tmp_path: Path, damage: str
    ) -> None:
        remote, checkpoint = published
        spool = tmp_path / "spool"
        with relaying([store_of(remote)], spool) as relay:
            check_all(relay, remote, must=True)
        for path in sorted((spool / "kept").iterdir()):
            data = path.read_bytes()
            half = len(data) // 2
            match damage:
                case "cut":
                    path.write_bytes(data[:half])
                case "flipped":
                    path.write_bytes(data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :])
                case "empty":
                    path.write_bytes(b"")
                case "longer":
                    path.write_bytes(data + b"?")
                case "folder":
                    path.unlink()
                    (path / "below").mkdir(parents=True)
                case "other name":
                    path.rename(path.with_name(path.name[:-1] + ("0" if path.name[-1] != "0" else "1")))
                case "half-written":
                    (spool / "new").mkdir(exist_ok=True)
                    path.rename(spool / "new" / path.name)
        records = Records(LocalBackend(str(remote)))
        with relaying([store_of(remote, lambda _: records)], spool) as relay:
            check_all(relay, remote, must=True)
            check_pull(relay, tmp_path, checkpoint)
        bodies = [key for name, key in records.calls if name == "read" and "/payloads/" in key]
        assert sorted(bodies) == [key for key in keys_of(remote) if "/payloads/" in key]
        # What is kept now is right, without any parent.
        with relaying([store_of(remote, lambda each: FailsCalls(each, 10**6))], spool) as relay:
            key = largest_payload(remote)
            assert relay.get(key) == (remote / key).read_bytes()


class TestChildren:
    def test_slow_ones_do_not_slow_their_sisters(self, published: tuple[Path, Path], tmp_path: Path) -> None:
        remote, _ = published
        key = largest_payload(remote)
        expected = (remote / key).read_bytes()
        seconds: dict[str, list[float]] = {}
        for name, slow_ones in (("alone", 0), ("beside 50 slow ones", 50)):
            seconds[name] = []
            for number in range(5):
                with ExitStack() as stack:
                    # While it comes, and once it is kept.
                    spool = tmp_path / f"spool-{slow_ones}-{number}"
                    relay = stack.enter_context(relaying([store_of(remote)], spool))
                    for _ in range(slow_ones):
                        stack.enter_context(slow_child(relay, key))
                    for _ in range(2):
                        begun = time.monotonic()
                        assert relay.get(key) == expected
                        seconds[name].append(time.monotonic() - begun)
        best = {name: min(found) for name, found in seconds.items()}
        print(f"\n{len(expected):,} bytes: " + ", ".join(f"{name} {each:.3f} s" for name, each in best.items()))
        assert best["beside 50 slow ones"] < 3 * best["alone"] + 0.2

    def test_idle_ones_and_such_that_send_a_byte_now_and_then(
        self, published: tuple[Path, Path], tmp_path: Path
    ) -> None:
        remote, checkpoint = published
        begun = time.monotonic()
        with relaying([store_of(remote)], tmp_path / "spool", most_connections=1024) as relay, ExitStack() as stack:
            place = urlsplit(relay.url).hostname, urlsplit(relay.url).port
            connections = [stack.enter_context(socket.create_connection(place)) for _ in range(700)]
            dribbling = connections[500:]
            for connection in dribbling[:100]:
                connection.sendall(b"GET /dcr.json HTTP/1.1\r\nHost: x\r\nX: ")
            for connection in dribbling[100:]:
                connection.sendall(b"PUT /next.json HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
            check_pull(relay, tmp_path, checkpoint)
            pulled = time.monotonic() - begun
            left = list(connections)
            while left:
                assert time.monotonic() < begun + 2 * IDLE_SECONDS, len(left)
                for connection in dribbling:
                    if connection in left:
                        send_a_byte(connection)
                time.sleep(1)
                assert relay.get("healthz") == b"ok\n"
                left = [connection for connection in left if not has_ended(connection)]
        closed = time.monotonic() - begun
        print(f"\npulled beside 700 connections in {pulled:.1f} s; the last was closed after {closed:.0f} s")


@contextmanager
def slow_child(relay: Running, key: str) -> Iterator[None]:
    """Somebody who has asked for an object, and takes 16 KiB of it each tenth of a second."""
    ended = threading.Event()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    connection.connect((urlsplit(relay.url).hostname, urlsplit(relay.url).port))
    connection.sendall(f"GET /{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def take() -> None:
        while not ended.wait(0.1) and connection.recv(16 << 10):
            pass

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        connection.close()


def send_a_byte(connection: socket.socket) -> None:
    try:
        connection.send(b"x")
    except OSError:
        return


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


class TestRights:
    def test_tokens_that_are_missing_wrong_or_only_read(self, published: tuple[Path, Path], tmp_path: Path) -> None:
        remote, checkpoint = published
        before = {key: (remote / key).read_bytes() for key in keys_of(remote)}
        with relaying([store_of(remote)], tmp_path / "spool", rights=Rights(READ, WRITE)) as relay:
            for token in (None, "", "x" * 20, READ[:-1], READ + "x", WRITE[::-1]):
                headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
                for key in keys_of(remote):
                    assert relay.ask("GET", key, **headers)[0] == 401
                    assert relay.ask("PUT", key, b"x", **headers)[0] == 401
            for key in keys_of(remote):
                assert relay.ask("GET", key, Authorization=f"Bearer {READ}")[0] == 200
                assert relay.ask("PUT", key, b"x", Authorization=f"Bearer {READ}")[0] == 403
            for wrong in ({}, {"token": "x" * 20}):
                with pytest.raises(TransportError):
                    pull(relay.url, tmp_path / "none", storage_options=wrong, jobs=1)
            options = {"token": READ}
            assert pull(relay.url, tmp_path / "copy", storage_options=options, jobs=1).version == VERSIONS
            assert tree(tmp_path / "copy") == tree(checkpoint)
            with pytest.raises(TransportError):
                push(tmp_path / "copy", relay.url, baseline=tmp_path / "b", storage_options=options, jobs=1)
        assert {key: (remote / key).read_bytes() for key in keys_of(remote)} == before


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """What `time.time` says in this process, and so in relay, publisher and receiver, is a year off each time."""
    dice = random.Random(0)
    ahead = itertools.cycle([0.0, 366 * 86400.0, -366 * 86400.0])
    real = time.time

    def jumping() -> float:
        return real() + next(ahead) * dice.random()

    rng = np.random.default_rng(0)
    model = new_model(rng, 1_000_000)
    with (
        mock.patch("time.time", jumping),
        relaying([store_of(tmp_path / "remote")], tmp_path / "root") as root,
        relaying([open_store(root.url, patience=PATIENT)], tmp_path / "spool") as relay,
    ):
        for version in range(1, 6):
            model[version][:] = rng.integers(0, 1 << 16, len(model[version]), np.uint16)
            checkpoint = write(model, tmp_path / "checkpoint")
            assert push(checkpoint, root.url, baseline=tmp_path / "baseline", jobs=1).version == version
            assert pull(relay.url, tmp_path / "copy", receiver="r", jobs=1).version == version
            assert tree(tmp_path / "copy") == tree(checkpoint)
        assert relay.status()["head"] == root.status()["head"] == 5
