"""The lock by which one process at a time follows a remote into a checkpoint, for as long as it lives.

What it does there it does under other locks, between which others may change the checkpoint too.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.locking import lock
from dcr_cli.receiver.survey import open_root

_LOCK = "follow-lock"


class FollowLock:
    """The lock of who follows into the checkpoint at `path`, or behind the link there; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._held: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self) -> None:
        """Take it where the checkpoint is now, unless it is held there; ConflictError if somebody else follows.

        Where no receiver has been yet there is nothing to lock; whoever comes first to a version there has it then.
        """
        if not os.path.isdir(self._path):
            return
        with ExitStack() as taken:
            root = taken.enter_context(open_root(os.path.realpath(self._path)))
            home = root.find_folder(STATE_FOLDER)
            if home is None:
                return
            taken.enter_context(home)
            status = os.fstat(home.fd)
            if self._held == (status.st_dev, status.st_ino):
                return
            taken.enter_context(lock(home, _LOCK))
            # It goes before the lock ends: then it is nobody else's.
            taken.callback(home.remove, _LOCK, missing_ok=True)
            # A link that was turned leads elsewhere now.
            self._stack.close()
            self._stack, self._held = taken.pop_all(), (status.st_dev, status.st_ino)
