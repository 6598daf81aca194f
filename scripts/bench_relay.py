"""How fast does one relay send what it keeps, to 1 child and to 8, and what does that cost, beside nginx?

Both send the same payloads of one version, over loopback, from a warm cache, each with one process; neither writes an
access log. Children are processes of bench_taker.py. First each object is fetched from both and compared with the
remote's, byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_child import dcr
from bench_pairs import Pair
from bench_report import BenchError, Report, at_least

CHILDREN = (1, 8)
GIB, MIB = 1 << 30, 1 << 20
START_SECONDS = 60.0
TAKER = Path(__file__).with_name("bench_taker.py")
PLACES = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: where, and its processes."""

    name: str
    url: str
    process: int

    def cpu_seconds(self) -> float:
        """The processor time that its processes have taken."""
        ticks = 0
        for process in self._processes():
            words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """The highest resident memory of its processes, added up."""
        lines = [Path(f"/proc/{process}/status").read_text() for process in self._processes()]
        return sum(int(text.split("VmHWM:")[1].split()[0]) << 10 for text in lines)

    def _processes(self) -> list[int]:
        below = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        return [self.process, *map(int, below)]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one server did for so many children."""

    bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.bytes / 1e9 / self.seconds


def relay(report: Report, place: Path, pair: Pair, *, sent_bytes: int, rounds: int) -> None:
    """Add the rows: the servers in turn, the best of `rounds`. `sent_bytes` is what children get each time in all."""
    if not Path("/proc/self/stat").exists():
        report.leave_out("relay: what processes take is read from /proc, which is not here")
        return
    remote = place / "remote"
    for checkpoint in (pair.base, pair.target):
        dcr("push", str(checkpoint), str(remote), "--baseline", str(place / "baseline"), jobs=1)
    keys = sorted(str(path.relative_to(remote)) for path in remote.glob("versions/*/payloads/*"))
    size = sum((remote / key).stat().st_size for key in keys)
    with ExitStack() as stack:
        servers = [stack.enter_context(_relay_server(place, remote))]
        nginx = shutil.which("nginx", path=PLACES)
        if nginx is None:
            report.leave_out("relay beside nginx: nginx is not installed: apt-get install nginx-light")
        else:
            servers.append(stack.enter_context(_nginx_server(nginx, place, remote)))
        for server in servers:
            _check(server, remote, keys)
        report.begin(
            "relay", f"{len(keys)} payloads, {size / MIB:.0f} MiB, one process, best of {rounds} rounds in turn"
        )
        for children in CHILDREN:
            times = max(1, round(sent_bytes / size / children))
            done: dict[str, list[Sent]] = {server.name: [] for server in servers}
            for _ in range(rounds):
                for server in servers:
                    done[server.name].append(_send(server, keys, size, children, times))
            _add(report, children, servers, done)
    for folder in (remote, place / "baseline", place / "spool"):
        shutil.rmtree(folder, ignore_errors=True)


def _add(report: Report, children: int, servers: Sequence[Server], done: dict[str, list[Sent]]) -> None:
    word = "1 child" if children == 1 else f"{children} children"
    best = {name: max(runs, key=lambda run: run.rate) for name, runs in done.items()}
    if len(servers) > 1:
        report.add(f"dcr relay / nginx, {word}", best["relay"].rate / best["nginx"].rate, "x", at_least(0.8))
    for server in servers:
        run = best[server.name]
        cost = min(each.cpu_seconds / (each.bytes / 1e9) for each in done[server.name])
        note = f"processors {cost:.2f} s a GB, peak {server.peak_bytes() / MIB:.0f} MiB"
        report.add(f"{server.name}, {word}", run.rate, "GB/s", None, note)


@contextmanager
def _relay_server(place: Path, remote: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "dcr_cli", "relay", str(remote), "--spool", str(place / "spool")]
    command += ["--listen", "127.0.0.1:0", "--json", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError("dcr relay did not start")
            yield Server("relay", json.loads(line)["address"], process.pid)
        finally:
            process.send_signal(signal.SIGKILL)


@contextmanager
def _nginx_server(nginx: str, place: Path, remote: Path) -> Iterator[Server]:
    folder = place / "nginx"
    folder.mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    temporary = " ".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors; {user} events {{}} "
        f"http {{ {temporary} access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; "
        f"server {{ listen 127.0.0.1:{port}; root {remote}; }} }}"
    )
    command = [nginx, "-e", f"{folder}/errors", "-c", f"{folder}/conf"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield Server("nginx", f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise BenchError("nginx does not listen") from None
            time.sleep(0.02)


def _check(server: Server, remote: Path, keys: Sequence[str]) -> None:
    """See that a server sends what the remote holds; a relay keeps it from then on."""
    for key in keys:
        with urllib.request.urlopen(f"{server.url}/{key}", timeout=START_SECONDS) as answer:
            if answer.read() != (remote / key).read_bytes():
                raise BenchError(f"{server.name} sends another {key} than the remote holds")


def _send(server: Server, keys: Sequence[str], size: int, children: int, times: int) -> Sent:
    """Have so many children fetch all objects so many times, at once."""
    command = [sys.executable, "-I", "-S", str(TAKER), server.url, str(times), *keys]
    with ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(children)
        ]
        for child in running:
            assert child.stdin is not None and child.stdout is not None
            # They have connected; then they all begin.
            child.stdout.readline()
        cpu, begun = server.cpu_seconds(), time.perf_counter()
        for child in running:
            assert child.stdin is not None
            child.stdin.close()
        got = 0
        for child in running:
            assert child.stdout is not None
            got += int(child.stdout.readline() or 0)
        seconds, cpu = time.perf_counter() - begun, server.cpu_seconds() - cpu
    if got != size * times * children:
        raise BenchError(f"{server.name}: children got {got:,} bytes, {size * times * children:,} expected")
    return Sent(got, seconds, cpu)
