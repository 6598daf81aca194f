"""Runs a command and measures it: wall and processor seconds, and its highest resident memory, mapped pages included.

What the kernel reports of a finished process includes the memory of the process that started it, up to the moment of
its start. So a small process of its own, this file run as a script, stands between the benchmark and the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended with exit code 0."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document it printed."""
        document: dict[str, Any] = json.loads(self.output)
        return document


class CommandError(Exception):
    """A command failed; says which, how, and what it said."""


def run(*command: str) -> Finished:
    """Run `command` to its end. CommandError if it fails."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as facts_stream:
        try:
            code, output, complaint = _run_to_end(
                [sys.executable, "-I", "-S", __file__, str(write_end), *command], write_end
            )
        finally:
            os.close(write_end)
        facts = facts_stream.read()
    if code or not facts:
        raise CommandError(f"{' '.join(command)}: exit code {code}: {complaint.strip()}")
    seconds, cpu_seconds, peak_bytes = json.loads(facts)
    return Finished(seconds, cpu_seconds, peak_bytes, output)


def dcr(*arguments: str, jobs: int) -> Finished:
    """Run a command of dcr, as JSON and without progress."""
    return run(sys.executable, "-m", "dcr_cli", *arguments, "--json", "--no-progress", "--jobs", str(jobs))


def _run_to_end(command: list[str], descriptor: int) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[descriptor], process_group=0
    )
    try:
        output, complaint = process.communicate()
    except BaseException:
        # The command too has to end before the folder it writes to is removed.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output, complaint


def _measure(descriptor: int, command: list[str]) -> int:
    os.set_inheritable(descriptor, False)
    start = time.perf_counter()
    process = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - start
    # Kibibytes on Linux, bytes on macOS.
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    os.write(descriptor, json.dumps([seconds, usage.ru_utime + usage.ru_stime, peak_bytes]).encode())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_measure(int(sys.argv[1]), sys.argv[2:]))
