"""What is at the place that a pull is to bring to a version, before anything is asked of a remote."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.in_progress import STATE_FOLDER, is_incomplete
from dcr_cli.fetch.held import Held, recorded
from dcr_cli.fetch.position import Position, read_position
from dcr_cli.receiver.survey import open_root


@dataclass(frozen=True, slots=True)
class Situation:
    """A place: whether a change in it is in progress, what is noted of it, and what its record says, if that counts.

    `is_new`: there is no folder, or none with anything in it.
    """

    path: Path
    is_new: bool = True
    is_marked: bool = False
    position: Position | None = None
    held: Held | None = None

    @property
    def is_at_position(self) -> bool:
        """Whether the record says that the receiver is where it was brought to, with the files that it had then."""
        return (
            self.position is not None
            and self.held is not None
            and self.held.content == self.position.target.content
            and self.held.files_digest == self.position.held_files
            and not self.is_marked
        )

    @property
    def bytes(self) -> int:
        """About how many bytes a receiver has."""
        if self.is_new:
            return 0
        with os.scandir(self.path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())


def look(path: Path) -> Situation:
    """Look at a place; LocalError or NotFoundError if it is something else than a folder."""
    if not os.path.exists(path):
        return Situation(path)
    with open_root(path) as root:
        names = [name for name in root.names() if name != STATE_FOLDER]
        home = root.find_folder(STATE_FOLDER)
        position = None
        if home is not None:
            with home:
                position = read_position(home)
        is_marked = is_incomplete(path)
        if not names and not is_marked:
            return Situation(path)
        return Situation(path, False, is_marked, position, recorded(root))
