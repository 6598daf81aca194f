"""Connections to web servers: kept between requests, made again when the server has closed them, never shared."""

from __future__ import annotations

import datetime
import os
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from dcr_cli.errors import TransportError
from dcr_cli.store.http import HttpBackend
from dcr_cli.store.location import locate
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from store_contract import BIG, MOST, Clock
from store_servers import Bucket, bucket_server, running


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with bucket_server() as server:
        server.objects["/a"] = b"1234567890"
        server.objects["/big"] = BIG
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(bucket: Bucket, clock: Clock) -> Iterator[Store]:
    with open_store(bucket.url, patience=clock.patience()) as store:
        yield store


def test_one_serves_all_requests(bucket: Bucket, store: Store) -> None:
    for _ in range(3):
        assert store.get("a", most_bytes=MOST) == b"1234567890"
        assert store.get_range("a", 3, 2) == b"45"
        assert store.stat("a") is not None
        assert store.get("nothing", most_bytes=MOST) is None
        assert store.stat("nothing") is None
        assert b"".join(store.stream("big", begin=7)) == BIG[7:]
    bucket.faults[:] = ["to /a", "", "503", "503"]
    assert store.get_range("b", 1, 2) == b"23"
    assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert bucket.connections == 1
    assert all("connection" not in headers for _, _, headers in bucket.requests)


def test_of_the_page_with_a_redirect_not_all_is_read(bucket: Bucket, store: Store, clock: Clock) -> None:
    bucket.faults[:] = ["long to /a"]
    assert store.get("b", most_bytes=MOST) == b"1234567890"
    assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert [path for _, path, _ in bucket.requests] == ["/b", "/a", "/a"]
    assert bucket.connections == 2
    assert clock.waits == []


def test_one_that_the_server_has_closed_is_made_again(bucket: Bucket, store: Store, clock: Clock) -> None:
    """At once, and as no failure."""
    for number in range(1, 4):
        bucket.faults[:] = ["leave"]
        assert store.get("a", most_bytes=MOST) == b"1234567890"
        assert bucket.connections == number
    assert clock.waits == []


def test_one_that_is_forgotten_on_the_way_costs_one_wait(bucket: Bucket, store: Store, clock: Clock) -> None:
    """Where nothing comes in time, nothing would come on the others either."""
    first, second = store.stream("big"), store.stream("big")
    next(first), next(second)
    list(first), list(second)
    idle = store._backend._backend._connections._idle  # type: ignore[attr-defined]
    assert len(idle) == 2

    def never() -> None:
        raise TimeoutError

    for _, _, connection in idle:
        connection.getresponse = never
    assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert bucket.connections == 3
    assert len(clock.waits) == 1


def test_what_is_not_read_to_its_end_is_not_in_the_next_answer(bucket: Bucket, store: Store) -> None:
    for fault in ("whole", "short", ""):
        bucket.faults[:] = [fault] if fault else []
        assert store.get_range("big", 5, 100) == BIG[5:105]
        stream = store.stream("big")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert store.get("a", most_bytes=MOST) == b"1234567890"


def test_each_thread_reads_from_its_own(bucket: Bucket, store: Store) -> None:
    first, second = store.stream("big"), store.stream("big")
    begun = next(first), next(second)
    assert begun[1] + b"".join(second) == begun[0] + b"".join(first) == BIG
    assert bucket.connections == 2
    list(store.stream("big"))
    assert bucket.connections == 2


def test_an_idle_one_is_given_up(bucket: Bucket) -> None:
    clock = Clock()
    backend = HttpBackend(locate(bucket.url), {})
    backend._connections._clock = lambda: clock.now
    for wait, made in ((0, 1), (29, 1), (31, 2)):
        clock.now += wait
        assert backend.status("a") is not None
        assert bucket.connections == made
    backend.close()
    assert backend.status("a") is not None
    assert bucket.connections == 3
    backend.close()


def test_none_is_left_of_a_store_that_nobody_closed(bucket: Bucket) -> None:
    """ResourceWarning would be an error here."""
    store = open_store(bucket.url)
    store.stat("a")
    connections = store._backend._backend._connections  # type: ignore[attr-defined]
    ((_, _, connection),) = connections._idle
    del store, connections
    assert connection.sock is None


def test_a_fork_shares_none(bucket: Bucket, store: Store) -> None:
    store.stat("a")
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            with pytest.raises(RuntimeError):
                store.stat("a")
            store.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert bucket.connections == 1


def test_only_so_many_are_kept(bucket: Bucket, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_cli.store.connections._MOST_IDLE", 2)
    streams = [store.stream("big") for _ in range(4)]
    for stream in streams:
        next(stream)
    for stream in streams:
        list(stream)
    assert bucket.connections == 4
    assert len(store._backend._backend._connections._idle) == 2  # type: ignore[attr-defined]


# Through proxies, and in TLS


def test_through_a_proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", bucket.url.replace("//", "//user:word@"))
    with open_store("http://nowhere.invalid") as store:
        for _ in range(2):
            assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert bucket.connections == 1
    assert {headers["proxy-authorization"] for _, _, headers in bucket.requests} == {"Basic dXNlcjp3b3Jk"}
    assert {headers["host"] for _, _, headers in bucket.requests} == {"nowhere.invalid"}
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with open_store(bucket.url) as store:
        assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert "proxy-authorization" not in bucket.requests[-1][2]


@pytest.fixture
def secure(bucket: Bucket, tmp_path: Path) -> Iterator[tuple[Bucket, str, Path]]:
    """The bucket in TLS: its address, and the file of the certificate that vouches for it."""
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    write_certificate(certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Bucket()
    server.objects = bucket.objects
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield server, f"https://127.0.0.1:{server.server_port}", certificate


def test_in_tls(secure: tuple[Bucket, str, Path], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    server, url, certificate = secure
    with (
        open_store(url, patience=clock.patience()) as store,
        pytest.raises(TransportError, match="its certificate is not to be trusted"),
    ):
        store.get("a", most_bytes=MOST)
    assert clock.waits == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    before = server.connections
    with open_store(url, patience=clock.patience()) as store:
        for _ in range(3):
            assert store.get("a", most_bytes=MOST) == b"1234567890"
        assert server.connections == before + 1
        server.faults[:] = ["leave"]
        for _ in range(2):
            assert store.get_range("a", 1, 2) == b"23"
        assert server.connections == before + 2
    assert clock.waits == []


def test_in_tls_through_a_proxy(secure: tuple[Bucket, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, url, certificate = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with tunnelling() as proxy:
        monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{proxy.server_address[1]}")
        with open_store(url) as store:
            for _ in range(3):
                assert store.get("a", most_bytes=MOST) == b"1234567890"
    assert server.connections == 1
    (head,) = proxy.heads
    assert head.startswith(f"CONNECT {url.removeprefix('https://')} ".encode())
    assert b"Basic dXNlcjp3b3Jk" in head
    assert all("proxy-authorization" not in headers for _, _, headers in server.requests)


class _Tunnel(socketserver.StreamRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        self.server.heads.append(head)
        host, _, port = head.split()[1].decode().partition(":")
        with socket.create_connection((host, int(port))) as there:
            self.connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            ways = {self.connection: there, there: self.connection}
            while True:
                for each in select.select(list(ways), [], [])[0]:
                    data = each.recv(65536)
                    if not data:
                        return
                    ways[each].sendall(data)


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.heads: list[bytes] = []


@contextmanager
def tunnelling() -> Iterator[_Proxy]:
    """A proxy that makes tunnels, and remembers how it was asked for them."""
    server = _Proxy()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_certificate(certificate: Path, key: Path) -> None:
    """Make a certificate of 127.0.0.1 that vouches for itself."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dcr-test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
