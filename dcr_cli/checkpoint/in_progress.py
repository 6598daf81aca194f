"""What a checkpoint's folder says of an apply in progress: whether there is one, whether it runs, what finishes it.

It reads `.dcr/` and changes nothing; making it is receiver/'s matter, taking the lock locking.py's.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError, IncompleteError, LocalError, hint_of
from dcr_cli.holder import MAX_HOLDER_BYTES, decode_holder

STATE_FOLDER = ".dcr"
IN_PROGRESS = f"{STATE_FOLDER}/in-progress"
LOCK_FILE = f"{STATE_FOLDER}/lock"
# A marker is no larger. No longer path is shown to say how to finish.
MAX_MARKER_BYTES = 1 << 16
_MAX_SHOWN_CHARACTERS = 1000


def is_incomplete(root: str | os.PathLike[str]) -> bool:
    """Whether an apply to the checkpoint at `root` was begun and not finished."""
    marker = Path(root) / IN_PROGRESS
    try:
        marker.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        facts = f"cannot tell whether an apply is in progress: {error.strerror}"
        closed = marker.parent if os.access(root, os.X_OK, effective_ids=True) else Path(root)
        hint = f"as its owner, let its readers in: chmod a+rx {shlex.quote(str(closed))}"
        if error.errno != errno.EACCES:
            raise LocalError(str(marker), facts, hint=hint_of(error)) from error
        raise LocalError(str(closed), facts, hint=hint) from error
    return True


def check_complete(folder: Path) -> None:
    """Raise IncompleteError if an apply to the checkpoint in `folder` is in progress; say whether it runs, as far as
    that can be told."""
    if not is_incomplete(folder):
        return
    facts = "incomplete: an apply to it was stopped"
    hint = f"{command_to_finish(_delta_of(folder), folder)} finishes it"
    try:
        holder = decode_holder(_read(folder / LOCK_FILE, MAX_HOLDER_BYTES))
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
    return f"dcr apply {_argument(delta) if can_be_shown else 'DELTA'} {_argument(str(checkpoint))}"


def _argument(path: str) -> str:
    """A path as it is typed, and taken for no option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


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
