"""The steps that change a disk, as tests see them, and what the system refuses, as errors that name a path.

Nothing here changes anything.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dcr_cli.errors import DamagedError, LocalError, hint_of

# Called before each step with what is about to happen and to which path; "rename", "link" and "clone" have a second
# path.
hooks: list[Callable[[str, str, str], None]] = []

# Where a file cannot share another one's bytes, or have a second name; what is asked for can be had by copying.
NOT_HERE = frozenset(
    (
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.EINVAL,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
    )
)


class NoRoomError(LocalError):
    """The disk or a quota is full."""


def step(kind: str, path: Path, other: Path | str = "") -> None:
    """Tell the hooks of a change that is about to be made."""
    for hook in hooks:
        hook(kind, str(path), str(other))


@contextmanager
def translating(path: Path, facts: str) -> Iterator[None]:
    """Turn what the system refuses into an error that names `path`."""
    try:
        yield
    except OSError as error:
        raise translated(error, path, facts) from error


def check_mounted_to_write(path: Path, facts: str) -> None:
    """Raise LocalError if what may not be changed at `path` is a file system that is mounted read-only: no right, and
    no other user, helps there."""
    with translating(path, "its file system cannot be looked at"):
        flags = os.statvfs(path).f_flag
    if flags & os.ST_RDONLY:
        raise translated(OSError(errno.EROFS, os.strerror(errno.EROFS)), path, facts)


def translated(error: OSError, path: Path, facts: str) -> LocalError | DamagedError:
    """What the system refuses, as an error that names `path`."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return DamagedError(str(path), f"{facts}: it is, or is below, a link or a file where a folder should be")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        do = "raise the limit on file sizes, see ulimit -f," if error.errno == errno.EFBIG else "make room"
        return NoRoomError(str(path), f"{facts}: {error.strerror}", hint=f"{do} and run the same command again")
    return LocalError(str(path), f"{facts}: {error.strerror}", hint=hint_of(error))
