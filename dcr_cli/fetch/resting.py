"""A checkpoint's folder at rest, for as long as others load it: no dcr changes it meanwhile, and what else has changed
it is seen.

Where nothing can be locked, as in a folder that is not dcr's or cannot be written, all is seen at the end alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.folder import Identity, scan
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD_SUFFIX, WEIGHT_MAP_SUFFIX
from dcr_cli.errors import ConflictError, DcrError, LocalError
from dcr_cli.fetch.situation import look
from dcr_cli.locking import lock
from dcr_cli.receiver.receiver import LOCK
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.log import Known

_AGAIN = "run the same command again"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the folder is, behind links, the version that it was brought to, and its files."""

    folder: str
    known: Known | None
    files: Mapping[str, Identity]


@contextmanager
def at_rest(path: Path) -> Iterator[Callable[[], None]]:
    """Keep other dcrs from changing the checkpoint at `path`, or behind the link there; ConflictError if one does so
    now. What is given raises ConflictError if the folder is not the one any more that it was in the beginning."""
    with ExitStack() as stack:
        _lock(path, stack)
        before = _see(path)
        yield lambda: _check(path, before)


def _lock(path: Path, stack: ExitStack) -> None:
    """Take a receiver's own lock, where there is one to take."""
    root = stack.enter_context(open_root(os.path.realpath(path)))
    home = root.find_folder(STATE_FOLDER)
    if home is None:
        return
    stack.enter_context(home)
    is_new = home.status(LOCK) is None
    try:
        stack.enter_context(lock(home, LOCK))
    except LocalError:
        # Who may not write there can still see whether others do.
        return
    if is_new:
        # It goes before the lock ends: then it is nobody else's.
        stack.callback(home.remove, LOCK, missing_ok=True)


def _see(path: Path) -> _Seen:
    situation = look(path)
    if situation.is_marked:
        raise ConflictError(str(path), "a change of it was begun just now", hint=_AGAIN)
    folder = os.path.realpath(path)
    known = situation.position.known if situation.position is not None else None
    return _Seen(folder, known, scan(Path(folder), strangers=[]))


def _check(path: Path, before: _Seen) -> None:
    try:
        how = _change(before, _see(path))
    except DcrError as error:
        raise ConflictError(str(path), f"was changed while it was loaded: {error}", hint=_AGAIN) from error
    if how is not None:
        raise ConflictError(str(path), f"was changed while it was loaded: {how}", hint=_AGAIN)


def _change(before: _Seen, now: _Seen) -> str | None:
    """What is not as it was, if something is not. What an engine leaves there besides is no part of what it loads."""
    if now.folder != before.folder:
        return f"it leads to {shown(now.folder)} now"
    if now.known != before.known:
        return "it was brought to another version"
    for path, identity in before.files.items():
        if now.files.get(path) != identity:
            return f"{shown(path)} is {'another one' if path in now.files else 'gone'}"
    new = now.files.keys() - before.files.keys()
    come = sorted(path for path in new if path.endswith((SHARD_SUFFIX, WEIGHT_MAP_SUFFIX)))
    return f"{shown(come[0])} is new" if come else None
