"""Which versions' changes lie in a folder (FORMAT 12.1): what comes and goes there as a checkpoint comes to versions,
and where whoever serves finds what it needs next.

What one of them is made of is folder.py's matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dcr_cli.changes.folder import hint_beside, write_changes
from dcr_cli.changes.owned import check_own
from dcr_cli.changes.taking import Put
from dcr_cli.delta.delta import Delta
from dcr_cli.durable import PRIVATE_FOLDER_MODE, Folder, open_folder
from dcr_cli.errors import NotFoundError, WrongBaseError
from dcr_cli.remote.keys import Place, place_named

# So many versions are kept: whoever serves, and comes later, is loaded anew.
KEPT = 8
# Before the name of a version that the checkpoint could come to, and has not.
_AHEAD = "prepared-"
_SAME = "give the folder that dcr pull --publish-changes has of the same remote"
_NEW, _GONE = ".new-", ".gone-"


@contextmanager
def publishing(folder: Path, place: Place, delta: Delta, take: Callable[[Put], None]) -> Iterator[str]:
    """Write what a version changes below `folder`, and give it its name, which is yielded, if nothing is raised within.

    `take` is called to put them, before that. Then what is older than the newest ones goes, and what the checkpoint has
    left by going back. What a stopped run has left goes first. Whoever reads what goes finds it gone, or has it open.
    Raises LocalError, DamagedError if others may write to the folder, and what `take` raises.
    """
    with _opened(folder) as root, _writing(root, place, delta, take) as new:
        yield str(place)
        _come_to(root, new, place)


def leave_ahead(folder: Path, place: Place, delta: Delta, take: Callable[[Put], None]) -> None:
    """Write what a version changes that is prepared, instead of any other such one. Raises what `publishing`
    raises."""
    with _opened(folder) as root, _writing(root, place, delta, take) as new:
        _drop_ahead(root)
        root.rename(new, root, f"{_AHEAD}{place}")
        root.sync()


def make_place(folder: Path) -> None:
    """Make the folder of all versions, of this user alone, unless it is there. Raises LocalError."""
    place = Path(os.path.abspath(folder))
    with open_folder(place.parent) as above:
        is_there = above.status(place.name) is not None
        if not is_there and above.make_folder(place.name, PRIVATE_FOLDER_MODE, exist_ok=True):
            above.sync()


def has_ahead(folder: Path, place: Place) -> bool:
    """Whether the changes of a version are there that the checkpoint is not known to have come to."""
    with _opened(folder) as root:
        return root.status(f"{_AHEAD}{place}") is not None


def is_ahead(changes: Path) -> bool:
    """Whether changes have the name of those of a version that is prepared, and may never be one."""
    return os.path.basename(os.path.abspath(changes)).startswith(_AHEAD)


def arrive(folder: Path, place: Place) -> str | None:
    """Give the changes that were left ahead of a version its name, which is returned, as the checkpoint has come to it;
    None if there are none. Raises LocalError."""
    with _opened(folder) as root:
        if root.status(f"{_AHEAD}{place}") is None:
            return None
        _tidy(root)
        _come_to(root, f"{_AHEAD}{place}", place)
        return str(place)


def holds_versions(folder: Path) -> bool:
    """Whether what lies in a folder are the changes of versions, each in a folder of its own."""
    with open_folder(folder) as root:
        return any(place_named(name.removeprefix(_AHEAD)) is not None for name in root.names())


def find(folder: Path, before: Place, place: Place) -> Path | None:
    """Where the changes of a version lie that follows the one at `before`; None if the checkpoint has not come to it.

    NotFoundError if it has gone past it, and they are not there; WrongBaseError if it is of another history;
    DamagedError if others may write to the folder.
    """
    with _opened(folder) as root:
        names = root.names()
    there = {each for each in map(place_named, names) if each is not None}
    ahead = {each for each in (place_named(name.removeprefix(_AHEAD)) for name in names) if each is not None} - there
    if place in there:
        return folder / str(place)
    if place in ahead:
        return folder / f"{_AHEAD}{place}"
    for known in (before, place):
        others = [each for each in there if each.version == known.version]
        if others and known not in others:
            facts = f"has changes of another version {known.version}, {others[0].id}, than the remote, {known.id}"
            raise WrongBaseError(str(folder), facts, hint=_SAME)
    newest = max((each.version for each in there | ahead), default=0)
    if newest > place.version:
        facts = f"has no changes of version {place.version}, and is at version {newest}: the newest {KEPT} stay, and "
        facts += "there are none of a version that a pull came to by an anchor, or was stopped in"
        raise NotFoundError(str(folder), facts, hint=hint_beside(folder))
    return None


@contextmanager
def _opened(folder: Path) -> Iterator[Folder]:
    """Open the folder of all versions; DamagedError if others may have written to it."""
    with open_folder(folder) as root:
        check_own(root.fd, root.path)
        yield root


@contextmanager
def _writing(root: Folder, place: Place, delta: Delta, take: Callable[[Put], None]) -> Iterator[str]:
    """Write a folder that has no name yet; it goes if it was given none."""
    _tidy(root)
    new = f"{_NEW}{place}"
    root.make_folder(new)
    try:
        write_changes(root, new, delta, take)
        root.sync(new)
        yield new
    finally:
        root.remove_tree(new, missing_ok=True)


def _come_to(root: Folder, name: str, place: Place) -> None:
    """Give the changes of the version that the checkpoint has come to their name."""
    _drop(root, str(place))
    root.rename(name, root, str(place))
    root.sync()
    found = sorted(each for each in map(place_named, root.names()) if each is not None)
    before = [each for each in found if each.version < place.version]
    for each in found:
        if each not in before[1 - KEPT :] and each != place:
            _drop(root, str(each))
    _drop_ahead(root)


def _drop_ahead(root: Folder) -> None:
    """Remove what was prepared: it has become a version under its name, or never will."""
    for name in root.names():
        if name.startswith(_AHEAD):
            _drop(root, name)


def _drop(root: Folder, name: str) -> None:
    """Remove a folder, which nobody finds with a part of what was in it."""
    if root.status(name) is not None:
        root.rename(name, root, f"{_GONE}{name}")
        root.remove_tree(f"{_GONE}{name}")


def _tidy(root: Folder) -> None:
    for name in root.names():
        if name.startswith((_NEW, _GONE)):
            root.remove_tree(name)
