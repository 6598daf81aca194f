"""Real servers on loopback, where they are installed: OpenSSH's, nginx, and Azurite; and the remote that is named.

Each is started for a test and ended after it, by an ordinary user too. One that is not there skips its tests and says
how it is had.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

from dcr_cli.errors import TransportError
from dcr_cli.store.opening import open_store

# Azurite's account, which its documentation names; its key is no secret.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SERVICES = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"
_START_SECONDS = 30.0


@contextmanager
def openssh_server(folder: Path) -> Iterator[dict[str, object]]:
    """OpenSSH's server for this user, its own files in `folder`: the storage options that reach it."""
    sshd = shutil.which("sshd", path=_SERVICES)
    if sshd is None:
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    if os.geteuid() == 0:
        # Of root's own it demands that it exists; an ordinary user's separates no privileges.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = _free_port()
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "key.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "MaxStartups": "100",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    with _running([sshd, "-D", "-e", "-f", str(folder / "conf")], folder / "log", port):
        host_key = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
        reached: dict[str, object] = {
            "port": port,
            "username": _user(),
            "key_filename": str(folder / "key"),
            "known_hosts": str(folder / "known_hosts"),
            "look_for_keys": False,
            "allow_agent": False,
        }
        try:
            with open_store(f"sftp://127.0.0.1{folder}", reached) as store:
                store.stat("conf")
        except TransportError:
            if "not allowed because" in (folder / "log").read_text():
                pytest.skip(f"sshd lets {_user()} not in, as to an account whose password is locked")
            raise
        yield reached


@contextmanager
def nginx_server(folder: Path, root: Path) -> Iterator[str]:
    """nginx, with the files of `root` and its own in `folder`: its address."""
    nginx = shutil.which("nginx", path=_SERVICES)
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    port = _free_port()
    temporary = " ".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = f"user {_user()};" if os.geteuid() == 0 else ""
    places = (
        "location = /denied { deny all; } location = /busy { return 503; } "
        "location = /page { default_type text/html; return 200 '<html></html>'; } "
        "location /zipped/ { gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any; }"
    )
    (folder / "conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/errors; {user} events {{}} "
        f"http {{ {temporary} access_log off; server {{ listen 127.0.0.1:{port}; root {root}; {places} }} }}"
    )
    with _running([nginx, "-e", f"{folder}/errors", "-c", f"{folder}/conf"], folder / "log", port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def azurite_server(folder: Path) -> Iterator[dict[str, object]]:
    """Azurite with the container `box`: the storage options that reach it."""
    paths = os.pathsep.join([str(Path(sys.prefix) / "azurite/node_modules/.bin"), os.environ.get("PATH", "")])
    azurite = shutil.which("azurite-blob", path=paths)
    if azurite is None:
        pytest.skip("azurite is not installed: scripts/setup azurite, which needs npm")
    port = _free_port()
    options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder)]
    command = [azurite, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with _running(command, folder / "log", port):
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        _make_container(endpoint, "box")
        yield {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY, "endpoint_url": endpoint}


def named_remote() -> str:
    """The address of the remote that the environment variable DCR_TEST_REMOTE names."""
    url = os.environ.get("DCR_TEST_REMOTE")
    if not url:
        pytest.skip("DCR_TEST_REMOTE names no remote to test")
    return url.rstrip("/")


@contextmanager
def _running(command: Sequence[str], log: Path, port: int) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        process.wait()


def _make_container(endpoint: str, name: str) -> None:
    """Ask for a container, signed as the service wants it; obstore makes none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    path = f"/{ACCOUNT}/{name}"
    signed = "PUT\n" + "\n" * 11 + "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed += f"/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    # Without a body, and so without a type of one, which would have to be signed too.
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{process.args!r} does not listen: {log.read_text(errors='replace')}") from None
            time.sleep(0.02)
