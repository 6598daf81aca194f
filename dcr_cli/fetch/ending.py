"""What comes when the bytes of a version are in place: the note of where the receiver is, its hook, or the engines
that load it again, its word.

What is not done yet is noted before it is begun, so that the next pull does it if this one is stopped.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from dcr_cli.checkpoint.digest import blake3_text
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.durable import PRIVATE_FOLDER_MODE
from dcr_cli.engine.engines import Reload, Reloaded
from dcr_cli.fetch.held import recorded
from dcr_cli.fetch.hook import Hook, run_hook
from dcr_cli.fetch.position import Position, position_at, read_position, write_position
from dcr_cli.fetch.resting import at_rest
from dcr_cli.fetch.wish import Wish
from dcr_cli.fetch.words import Word, say
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.keys import APPLIED
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


def arrival_at(
    published: Published, remote: str, trusted: tuple[str, ...], wish: Wish, before: Position | None
) -> Position:
    """The note of a receiver that has come to a version: the hook that is wished for is due, and nothing of what was
    due for the version before. The newest version that it has seen stays that."""
    position = replace(position_at(published, remote, trusted), is_hook_due=wish.hook is not None)
    return position.after(before.newest) if before is not None else position


def note(path: Path, position: Position) -> None:
    """Note, durably, where the receiver at `path` is, and what its record says that it has, unless that is noted."""
    with open_root(path) as root:
        held = recorded(root)
        position = replace(position, held_files=held.files_digest if held is not None else None)
        if root.make_folder(STATE_FOLDER, PRIVATE_FOLDER_MODE, exist_ok=True):
            root.sync()
        with root.open_folder(STATE_FOLDER) as home:
            if read_position(home) != position:
                write_position(home, position)


def is_due(position: Position, wish: Wish) -> bool:
    """Whether something is left to do for the version that a receiver is at."""
    if position.is_hook_due:
        return wish.hook is not None
    return wish.speaker is not None and wish.speaker.voice != position.acknowledged


def end(store: Store, path: Path, position: Position, wish: Wish) -> tuple[Reloaded, ...]:
    """Run the hook that is due, or reload engines, then say that the version is applied: what was reloaded. HookError,
    TransportError, or ConflictError (somebody has changed what engines were loading), if that fails; then it is due
    again."""
    reloaded: tuple[Reloaded, ...] = ()
    if position.is_hook_due and isinstance(wish.hook, Reload):
        with at_rest(path) as check:
            reloaded = wish.hook.run(path, str(position.version), check)
    elif position.is_hook_due and isinstance(wish.hook, Hook):
        environment = {
            "DCR_VERSION": str(position.version),
            "DCR_CHECKPOINT": os.path.abspath(path),
            "DCR_DIGEST": blake3_text(position.target.content),
        }
        run_hook(wish.hook, environment)
    if position.is_hook_due and wish.hook is not None:
        position = replace(position, is_hook_due=False)
        note(path, position)
    if wish.speaker is not None and is_due(position, wish):
        word = Word(position.history, position.place, position.target, APPLIED)
        say(store, wish.speaker, word, time.time())
        note(path, replace(position, acknowledged=wish.speaker.voice))
    return reloaded
