"""Whose a folder of changes is, and the files in it (FORMAT 12.1): no signature covers what was decoded, so it counts
by who may have written it.

What it says is folder.py's matter.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TypeVar

from dcr_cli.durable import File, Folder, open_folder
from dcr_cli.errors import DamagedError

Opened = TypeVar("Opened", File, Folder)

_OTHERS_WRITE = 0o022


def fault_of(status: os.stat_result, path: Path) -> tuple[str, str] | None:
    """Why what has this status does not count, and what to do; None if it belongs to this process's user, or to root,
    and nobody else may write to it."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        facts = f"belongs to user {status.st_uid}, neither to this process's, {user}, nor to root"
        return facts, "have what pulls and what serves run as the same user"
    if status.st_mode & _OTHERS_WRITE:
        facts = f"others than its owner may write to it, by its mode {status.st_mode & 0o777:o}"
        return facts, f"if only the right ones have: chmod go-w {shlex.quote(str(path))}"
    return None


def check_own(fd: int, path: Path) -> None:
    """Raise DamagedError if what is open does not count."""
    fault = fault_of(os.fstat(fd), path)
    if fault is not None:
        raise DamagedError(str(path), fault[0], hint=fault[1])


def open_own(path: Path) -> Folder | None:
    """Open a folder, no link, that counts; None if it is not there, DamagedError if it does not count."""
    place = Path(os.path.abspath(path))
    with open_folder(place.parent) as above:
        folder = above.find_folder(place.name)
    return _counting(folder) if folder is not None else None


def open_own_file(root: Folder, name: str) -> File | None:
    """Open a file of a folder, no link, that counts, to read it; None if it is not there, DamagedError if it does not
    count."""
    file = root.open_to_read(name)
    return _counting(file) if file is not None else None


def _counting(opened: Opened) -> Opened:
    try:
        check_own(opened.fd, opened.path)
    except BaseException:
        opened.close()
        raise
    return opened
