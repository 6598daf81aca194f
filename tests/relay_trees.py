"""Trees of relays and receivers for slow tests: processes of their own that may be killed, and begun again where they
were."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

# One, two below it, two below each of these; and two receivers below each of the last four.
WIDTHS = (1, 2, 4)
RELAYS, LEAVES = sum(WIDTHS), range(3, 7)
RECEIVERS = 2 * len(LEAVES)
START_SECONDS = 60.0


@dataclass
class Process:
    """A command of dcr that runs until it is stopped: its output and what it says on standard error in files."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    # What runs the command, such as `ip netns exec NAME`.
    prefix: tuple[str, ...] = ()
    running: subprocess.Popen[bytes] | None = None
    files: list[IO[bytes]] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.out"

    @property
    def errors(self) -> Path:
        return self.folder / f"{self.name}.errors"

    def start(self) -> None:
        self.files = [self.output.open("ab"), self.errors.open("ab")]
        command = [*self.prefix, sys.executable, "-m", "dcr_cli", *self.arguments]
        out, errors = self.files
        self.running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal, if it runs."""
        if self.running is not None:
            self.running.send_signal(number)
            self.running.wait()
            for file in self.files:
                file.close()
            # What it was writing when it was killed is no line.
            for path in (self.output, self.errors):
                with path.open("ab") as file:
                    file.write(b"\n")
        self.running = None

    def check_alive(self) -> None:
        assert self.running is None or self.running.poll() is None, f"{self.name} ended: {self.said()}"

    def said(self) -> str:
        return self.errors.read_text(errors="replace")[-4000:]

    def documents(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of a file that are whole, and JSON."""
        for line in path.read_bytes().split(b"\n")[:-1]:
            if line.startswith(b"{") and line.endswith(b"}"):
                yield json.loads(line)


@dataclass
class Relay(Process):
    """`dcr relay`, at an address that it keeps."""

    url: str = ""
    spool: Path = Path()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        count = len(list(self.documents(self.output))) if self.output.exists() else 0
        super().start()
        until(lambda: len(list(self.documents(self.output))) > count, self)

    def requests(self) -> list[dict[str, Any]]:
        """What its access log says."""
        return [line for line in self.documents(self.errors) if "method" in line]


@dataclass
class Receiver(Process):
    """`dcr pull --follow`."""

    root: Path = Path()

    def arrivals(self) -> list[dict[str, Any]]:
        return [line for line in self.documents(self.output) if "result" in line]

    def version(self) -> int:
        """The version that it says it has come to."""
        return max((arrival["result"]["version"] for arrival in self.arrivals()), default=0)


def new_relay(
    name: str,
    folder: Path,
    upstreams: Sequence[str | Path],
    listen: str,
    *options: str,
    prefix: Sequence[str] = (),
) -> Relay:
    spool = folder / f"{name}.spool"
    places = "--listen", listen, "--spool", str(spool), "--name", name, "--json"
    arguments = ("relay", *map(str, upstreams), *places, *options)
    return Relay(name, folder, arguments, tuple(prefix), url=f"http://{listen}", spool=spool)


def new_receiver(name: str, folder: Path, remotes: Sequence[str], *, prefix: Sequence[str] = ()) -> Receiver:
    """One that follows the first of `remotes`, and falls back to the others."""
    fallbacks = [word for remote in remotes[1:] for word in ("--fallback", remote)]
    root = folder / f"{name}.model"
    options = ("--follow", "--json", "--no-progress", "-j", "1", "--receiver", name, *fallbacks)
    return Receiver(name, folder, ("pull", *options, remotes[0], str(root)), tuple(prefix), root=root)


def new_tree(
    folder: Path, upstream: str | Path, listens: Sequence[str], *options: str, prefix: Sequence[str] = ()
) -> list[Relay]:
    """Relays of WIDTHS at the places that are named; each of the leaves has a second parent."""
    relays: list[Relay] = []
    for number, listen in enumerate(listens):
        parent = (number - 1) // 2
        above: list[str | Path] = [upstream]
        if number > 0:
            above = [relays[parent].url]
        if number in LEAVES:
            above.append(relays[3 - parent].url)
        relays.append(new_relay(f"relay-{number}", folder, above, listen, *options, prefix=prefix))
    return relays


def new_receivers(folder: Path, relays: Sequence[Relay], *, prefix: Sequence[str] = ()) -> list[Receiver]:
    """Two at each leaf of a tree, with the next leaf as a fallback."""
    return [
        new_receiver(
            f"receiver-{number}",
            folder,
            [relays[LEAVES[at % len(LEAVES)]].url for at in (number // 2, number // 2 + 1)],
            prefix=prefix,
        )
        for number in range(RECEIVERS)
    ]


@contextmanager
def running(processes: Sequence[Process]) -> Iterator[None]:
    """Run all of them, and kill them in the end."""
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.end)
            process.start()
        yield


def until(is_so: Callable[[], bool], *processes: Process, seconds: float = START_SECONDS) -> None:
    """Wait until something is so, as long as all of these live."""
    end = time.monotonic() + seconds
    while not is_so():
        for process in processes:
            process.check_alive()
        assert time.monotonic() < end, [process.said() for process in processes]
        time.sleep(0.02)


def free_listens(count: int) -> list[str]:
    """So many places of this host at which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
