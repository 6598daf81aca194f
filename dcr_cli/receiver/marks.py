"""What tells that a file, or a link, is still the one that it was when it was looked at, without reading it.

What becomes of one that is another is its callers' business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dcr_cli.durable import Folder


class Mark(NamedTuple):
    """What a file, or a link itself, is known by; a second name or a copy of the folder changes none of it."""

    size: int
    mtime_ns: int


# None is for a file that was known once and has changed, or of which no more than the name is known.
Known = dict[str, Mark | None]


def mark_of(status: os.stat_result) -> Mark:
    return Mark(status.st_size, status.st_mtime_ns)


def marks_at(root: Folder, paths: Iterable[str]) -> Known:
    """What lies at some paths; None where it is nothing, or a folder."""
    known: Known = dict.fromkeys(paths)
    for path in known:
        status = root.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            known[path] = mark_of(status)
    return known


def replaced(root: Folder, known: Mapping[str, Mark | None]) -> list[str]:
    """The paths at which something lies that is no folder, and not what is known."""
    return [path for path, mark in marks_at(root, known).items() if mark is not None and mark != known[path]]


def decode_known(members: Any) -> Known:
    """Read marks that were written as JSON; TypeError, ValueError or AttributeError if they are none."""
    return {path: Mark(*map(int, mark)) if mark is not None else None for path, mark in members.items()}
