"""What a checkpoint's folder says of a change in progress: whether there is one, whether it runs, what finishes it.

It reads `.dcr/` and changes nothing; making it is receiver/'s matter, taking the lock locking.py's.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError, IncompleteError, LocalError, hint_of
from dcr_cli.holder import MAX_HOLDER_BYTES, decode_holder

STATE_FOLDER = ".dcr"
IN_PROGRESS = f"{STATE_FOLDER}/in-progress"
LOCK_FILE = f"{STATE_FOLDER}/lock"
# How a receiver stores its tensors, if not as they are.
LAYOUT_NOTE = f"{STATE_FOLDER}/layout.json"
# The mode of a marker of a pull that brings a checkpoint to a state given as plain files.
INSTALL = "install"
# A marker is no larger. No longer path, and no more of them, is shown to say how to finish.
MAX_MARKER_BYTES = 1 << 20
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
    deltas, remote = _origin_of(folder)
    facts = f"incomplete: {change_of(remote)} to it was stopped"
    hint = f"{command_to_finish(deltas, remote, folder)} finishes it"
    try:
        holder = decode_holder(_read(folder / LOCK_FILE, MAX_HOLDER_BYTES))
    except PermissionError:
        facts += ", or is running"
    except OSError:
        # Without a lock file nobody runs.
        pass
    else:
        if holder is not None and holder.is_alive:
            facts = f"incomplete: {change_of(remote)} to it is running, process {holder.pid}"
            hint = "wait until it has ended"
        elif holder is not None and holder.is_alive is None:
            facts += f", or is running: process {holder.pid} on {holder.host}"
    raise IncompleteError(str(folder), facts, hint=hint)


def change_of(remote: str | None) -> str:
    """What people call a change whose marker says that it came from this remote, if from one."""
    return "an apply" if remote is None else "a pull"


def command_to_finish(deltas: Sequence[str], remote: str | None, checkpoint: str | os.PathLike[str]) -> str:
    """The command that finishes an apply. Where its deltas lay, or came from, is what a marker says, which may be
    anything."""
    command, given, stands_in = ("apply", deltas, "DELTA") if remote is None else ("pull", [remote], "REMOTE")
    can_be_shown = sum(map(len, given)) <= _MAX_SHOWN_CHARACTERS
    sources = [_argument(text) if can_be_shown and text and text.isprintable() else stands_in for text in given]
    return " ".join(["dcr", command, *(sources or [stands_in]), _argument(str(checkpoint))])


def _argument(path: str) -> str:
    """A path as it is typed, and taken for no option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _origin_of(folder: Path) -> tuple[list[str], str | None]:
    """What the marker in `folder` says of where the deltas lay and came from; nothing if it says nothing."""
    try:
        document = strict_json(_read(folder / IN_PROGRESS, MAX_MARKER_BYTES), "marker")
        remote = str(document["remote"]) if "remote" in document else None
        return list(map(str, document.get("deltas", [document["delta"]]))), remote
    except (OSError, DamagedError, TypeError, KeyError, AttributeError):
        return [], None


def _read(path: Path, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
