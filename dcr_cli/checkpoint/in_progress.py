"""What a checkpoint's folder says of an apply in progress: whether there is one, whether it runs, what finishes it.

It reads `.dcr/` and changes nothing; making it, and taking the lock, is receiver/'s matter.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError, IncompleteError, LocalError

STATE_FOLDER = ".dcr"
IN_PROGRESS = f"{STATE_FOLDER}/in-progress"
LOCK_FILE = f"{STATE_FOLDER}/lock"
# So much of a marker is read to say how to finish, and so long a path is shown for it.
MAX_MARKER_BYTES = 1 << 16
_MAX_SHOWN_CHARACTERS = 1000
_MAX_LOCK_BYTES = 1 << 10


class Holder(NamedTuple):
    """A process, by its number, its start (- if that is not known) and its host, as a lock file names it."""

    pid: str
    start: str
    host: str

    @property
    def is_alive(self) -> bool | None:
        """Whether it runs; None if that cannot be told from here."""
        if self.host != socket.gethostname() or not self.pid.isdigit() or self.start == "-":
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


def is_incomplete(root: str | os.PathLike[str]) -> bool:
    """Whether an apply to the checkpoint at `root` was begun and not finished."""
    marker = Path(root) / IN_PROGRESS
    try:
        marker.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        facts = f"cannot tell whether an apply is in progress: {error.strerror}"
        hint = f"as its owner, let its readers in: chmod a+rx {shlex.quote(str(marker.parent))}"
        raise LocalError(str(marker), facts, hint=hint if error.errno == errno.EACCES else None) from error
    return True


def check_complete(folder: Path) -> None:
    """Raise IncompleteError if an apply to the checkpoint in `folder` is in progress; say whether it runs, as far as
    that can be told."""
    if not is_incomplete(folder):
        return
    facts = "incomplete: an apply to it was stopped"
    hint = f"{command_to_finish(_delta_of(folder), folder)} finishes it"
    try:
        holder = decode_holder(_read(folder / LOCK_FILE, _MAX_LOCK_BYTES))
    except PermissionError:
        facts += ", or is running"
    except OSError:
        # Without a lock file nobody runs.
        pass
    else:
        if holder is not None and holder.is_alive:
            facts = f"incomplete: an apply to it is running, process {holder.pid}"
            hint = "wait until it has ended"
        elif holder is not None and holder.is_alive is None:
            facts += f", or is running: process {holder.pid} on {holder.host}"
    raise IncompleteError(str(folder), facts, hint=hint)


def command_to_finish(delta: str, checkpoint: str | os.PathLike[str]) -> str:
    """The command that finishes an apply. Where its delta lay is what a marker says, which may be anything."""
    can_be_shown = 0 < len(delta) <= _MAX_SHOWN_CHARACTERS and delta.isprintable()
    return f"dcr apply {shlex.quote(delta) if can_be_shown else 'DELTA'} {shlex.quote(str(checkpoint))}"


def _delta_of(folder: Path) -> str:
    """What the marker in `folder` says of where the delta lay; nothing if it says nothing."""
    try:
        return str(strict_json(_read(folder / IN_PROGRESS, MAX_MARKER_BYTES), "marker")["delta"])
    except (OSError, DamagedError, TypeError, KeyError):
        return ""


def _read(path: Path, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _start_of(pid: int) -> str:
    """When a process started, in ticks since boot, and which boot that was; - if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"
    return f"{fields[19]}@{boot}" if fields[0] != "Z" else "-"
