"""dcr relay: a process that serves until it is stopped, and what it refuses to begin with."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from commands import Run
from dcr_cli.push import push
from dcr_cli.store.opening import open_store
from relays import certificate_for_this_host, relay_process
from test_relay import checkpoints, until

TOKEN = "a-token-of-32-characters-or-more"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A remote with one version."""
    push(checkpoints(tmp_path / "sources", 1)[0], tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    return tmp_path / "remote"


class TestRunning:
    def test_it_ends_gracefully_by_a_signal(self, tmp_path: Path, remote: Path) -> None:
        key = sorted(remote.glob("anchors/*/files/*.safetensors"))[0].relative_to(remote)
        with relay_process([remote], tmp_path / "spool") as (url, process), ExitStack() as stack:
            assert fetched(f"{url}/healthz") == b"ok\n"
            # What it learns at its start is news too.
            until(lambda: json.loads(fetched(f"{url}/status"))["head"] == 1)
            place = urlsplit(url).netloc
            idle, waiting, reading = (
                stack.enter_context(closing(http.client.HTTPConnection(place, timeout=60))) for _ in range(3)
            )
            idle.request("GET", "/healthz")
            idle.getresponse().read()
            waiting.request("HEAD", "/commits/0000000002.json", headers={"Prefer": "wait=60"})
            reading.request("GET", f"/{key}")
            answer = reading.getresponse()
            process.send_signal(signal.SIGTERM)
            assert answer.read() == (remote / key).read_bytes()
            # Of absence it says nothing more.
            assert waiting.getresponse().status == 503
            out, err = process.communicate(timeout=60)
            assert process.returncode == 143 and json.loads(out)["error"]["class"] == "Stopped"
        lines = [line for line in err.splitlines() if not line.startswith(("dcr: ", "hint: "))]
        logged = [json.loads(line) for line in lines]
        assert sorted((line["method"], line["status"]) for line in logged if line["path"] != "/status") == [
            ("GET", 200),
            ("GET", 200),
            ("GET", 200),
            ("HEAD", 503),
        ]

    def test_over_tls(self, tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        certificate, key = certificate_for_this_host(tmp_path)
        tokens = tmp_path / "token"
        tokens.write_text(f"{TOKEN}\n")
        arguments = ("--tls-cert", certificate, "--tls-key", key, "--read-token-file", tokens)
        with relay_process([remote], tmp_path / "spool", *map(str, arguments)) as (url, _):
            assert url.startswith("https://127.0.0.1:")
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                fetched(f"{url}/healthz")
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            with open_store(url, {"token_file": str(tokens)}) as store:
                assert store.get("dcr.json", most_bytes=1 << 16) == (remote / "dcr.json").read_bytes()
            with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as plain:
                plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert b"200" not in plain.recv(64)

    def test_tokens_from_the_environment_and_no_secret_in_sight(
        self, tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DCR_READ_TOKEN", TOKEN)
        with relay_process([remote], tmp_path / "spool", "--name", "me") as (url, process):
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                fetched(f"{url}/status")
            refused.value.close()
            request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {TOKEN}"})
            assert json.loads(fetched(request))["relay"] == "me"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 130 and TOKEN not in err

    def test_it_is_killed_and_started_again(self, tmp_path: Path, remote: Path) -> None:
        key = sorted(remote.glob("anchors/*/files/*.safetensors"))[0].relative_to(remote)
        with relay_process([remote], tmp_path / "spool") as (url, _):
            data = fetched(f"{url}/{key}")
            until(lambda: any(path.stat().st_size == len(data) for path in (tmp_path / "spool" / "kept").iterdir()))
        # Killed, with something on its way.
        (tmp_path / "spool" / "new" / "1").write_bytes(b"half")
        with relay_process([remote], tmp_path / "spool") as (url, _):
            assert fetched(f"{url}/{key}") == data

    def test_without_its_library(self, tmp_path: Path, remote: Path) -> None:
        program = "import sys; sys.modules['aiohttp'] = None; from dcr_cli.cli import main; sys.exit(main())"
        listen = ("--listen", "127.0.0.1:0", "--spool", str(tmp_path / "spool"))
        ran = subprocess.run(
            [sys.executable, "-c", program, "relay", str(remote), *listen], capture_output=True, text=True
        )
        assert ran.returncode == 8
        assert ran.stderr == ("dcr: relay: needs aiohttp, which is not installed\nhint: pip install 'dcr-cli[relay]'\n")


class TestRefused:
    @pytest.mark.parametrize(
        ("listen", "code"),
        [
            ("0.0.0.0:0", 2),
            (":8080", 2),
            ("[::]:8080", 2),
            ("10.0.0.1:1", 2),
            ("example.org:80", 2),
            ("127.0.0.1", 2),
            ("127.0.0.1:70000", 2),
            ("127.0.0.1:x", 2),
            ("::1:80", 2),
        ],
    )
    def test_where_to_listen(self, tmp_path: Path, run: Run, remote: Path, listen: str, code: int) -> None:
        ran = run("relay", remote, "--listen", listen, "--spool", tmp_path / "spool")
        assert ran.code == code and ran.err.startswith("dcr: --listen: ") and "\nhint: " in ran.err
        assert not (tmp_path / "spool").exists()

    def test_a_port_that_is_taken(self, tmp_path: Path, run: Run, remote: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ran = run("relay", remote, "--listen", f"127.0.0.1:{port}", "--spool", tmp_path / "spool", "--json")
            assert (ran.code, ran.json["error"]["class"]) == (9, "LocalError")

    def test_what_is_not_there(self, tmp_path: Path, run: Run, remote: Path) -> None:
        listen = ("--listen", "127.0.0.1:0", "--spool")
        assert run("relay", tmp_path / "a" / "b", *listen, tmp_path / "spool").code == 3
        assert run("relay", remote, *listen, tmp_path / "a" / "spool").code == 9
        assert run("relay", remote, *listen, remote / "spool").code == 2
        assert run("relay", *listen, tmp_path / "spool").code == 2
        assert run("relay", remote, "--json").code == 2

    @pytest.mark.parametrize("text", ["", "short", "with space in its middle", "x" * 600, "\xe4" * 20])
    def test_tokens_that_are_none(self, tmp_path: Path, run: Run, remote: Path, text: str) -> None:
        token = tmp_path / "token"
        token.write_text(text)
        ran = run("relay", remote, "--listen", "127.0.0.1:0", "--spool", tmp_path / "s", "--write-token-file", token)
        assert ran.code == 2 and (not text or text not in ran.err)

    def test_other_options(self, tmp_path: Path, run: Run, remote: Path) -> None:
        start = ("relay", remote, "--listen", "127.0.0.1:0", "--spool", tmp_path / "spool")
        for options in (
            ("--name", "a b"),
            ("--tls-key", "x"),
            ("--spool-limit", "much"),
            ("--drain", "soon"),
            ("--max-connections", "0"),
            ("--storage-option", "token"),
        ):
            assert run(*start, *options).code == 2, options
        (tmp_path / "no.pem").write_text("none")
        assert run(*start, "--tls-cert", tmp_path / "no.pem").code == 2
        assert run(*start, "--tls-cert", tmp_path / "absent.pem").code == 9
        assert run(*start, "--read-token-file", tmp_path / "absent").code == 9


def fetched(asked: str | urllib.request.Request) -> bytes:
    with urllib.request.urlopen(asked) as answer:
        data: bytes = answer.read()
        return data
