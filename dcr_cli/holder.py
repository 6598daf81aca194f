"""The process that holds a lock, as its lock file names it, and whether that process lives.

Taking and giving up a lock is locking.py's matter.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

# So much of a lock file is read.
MAX_HOLDER_BYTES = 1 << 10


class Holder(NamedTuple):
    """A process, by its number, its start (- if that is not known) and its host, as a lock file names it."""

    pid: str
    start: str
    host: str

    @property
    def is_alive(self) -> bool | None:
        """Whether it runs; None if that cannot be told from here."""
        if self.host != socket.gethostname() or not (self.pid.isascii() and self.pid.isdigit()) or self.start == "-":
            return None
        return _start_of(int(self.pid)) == self.start


def this_process() -> Holder:
    return Holder(str(os.getpid()), _start_of(os.getpid()), socket.gethostname())


def decode_holder(text: bytes) -> Holder | None:
    """Read what a holder has written into its lock file; None if it has not, or has gone as it should."""
    fields = text.decode(errors="replace").split()
    return Holder(*fields[:3]) if len(fields) >= 3 else None


def encode_holder(holder: Holder) -> bytes:
    return f"{' '.join(holder)}\n".encode()


def _start_of(pid: int) -> str:
    """When a process started, in ticks since boot, and which boot that was; - if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"
    return f"{fields[19]}@{boot}" if fields[0] != "Z" else "-"
