"""Checks, before anything is changed, that every name that a plan changes can be changed; and what the names are.

It changes nothing; whether there is room is asked here too.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Collection, Iterable

from dcr_cli.checkpoint.header import file_kind
from dcr_cli.checkpoint.names import shown
from dcr_cli.durable import Folder, NoRoomError
from dcr_cli.errors import DamagedError, LocalError, WrongBaseError
from dcr_cli.receiver.plan import Action, Base, Plan, room_at_once, room_in_turn
from dcr_cli.receiver.room import free_bytes

# For the marker, the record and other small files, and for what file systems round up.
_SLACK_BYTES = 1 << 20
_SLACK_PER_FILE_BYTES = 1 << 12


def changed_paths(plan: Plan) -> list[str]:
    """All paths of a receiver that a plan writes or removes, but for its weight map."""
    return [
        *(shard.path for shard in plan.shards if shard.action is not Action.KEEP),
        *(path for part in plan.components for path in part.removed),
        *(row.path for row in plan.written_files),
        *plan.removed_files,
    ]


def folders_of(paths: Iterable[str]) -> list[str]:
    """The folders that the paths lie in, each once; "" is the root."""
    return list(dict.fromkeys(path.rpartition("/")[0] for path in paths))


def check_places(root: Folder, paths: Collection[str]) -> None:
    """Raise DamagedError or LocalError if one of `paths` could not be replaced or removed by this process."""
    for path in paths:
        status = root.status(path)
        if status is None:
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise DamagedError(str(root.path / path), f"is {file_kind(status.st_mode)}, where a file has to be")
        if stat.S_ISREG(status.st_mode):
            _check_file(root, path, status)
    seen: set[str] = set()
    for folder in folders_of(paths):
        _check_folder(root, folder, seen)


def check_changeable(folder: Folder) -> None:
    """Raise LocalError if this process may not change the names in a folder."""
    _check_folder(folder, "", set())


def check_names(root: Folder, paths: Iterable[str]) -> None:
    """Raise DamagedError if two of `paths` are one name to the file system, which does not tell small letters from
    large.

    It is asked by a name that is there.
    """
    folded: dict[str, str] = {}
    for path in paths:
        other = folded.setdefault(unicodedata.normalize("NFC", path).casefold(), path)
        if other != path and _folds_names(root):
            facts = f"cannot hold both {shown(other)} and {shown(path)}: its file system takes them for one name"
            raise DamagedError(str(root.path), facts)


def _folds_names(root: Folder) -> bool:
    for name in root.names():
        status, swapped = root.status(name), root.status(name.swapcase())
        if name != name.swapcase() and status is not None:
            return swapped is not None and (status.st_dev, status.st_ino) == (swapped.st_dev, swapped.st_ino)
    return False


def _check_file(root: Folder, path: str, status: os.stat_result) -> None:
    if root.is_fixed(path):
        raise LocalError(str(root.path / path), "has an attribute that forbids changing it", hint="see chattr -i, -a")
    user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    if user != 0 and (status.st_uid != user or status.st_gid not in groups):
        owner = f"{status.st_uid}:{status.st_gid}"
        facts = f"belongs to {owner}, and this process cannot give what replaces it to another owner"
        raise LocalError(str(root.path / path), facts, hint="run as its owner")


def _check_folder(root: Folder, folder: str, seen: set[str]) -> None:
    """A new name needs a folder that may be written, or one above that may be."""
    while folder not in seen:
        seen.add(folder)
        status = root.status(folder) if folder else os.fstat(root.fd)
        if status is None:
            folder = folder.rpartition("/")[0]
            continue
        where = root.path / folder
        if not stat.S_ISDIR(status.st_mode):
            raise DamagedError(str(where), f"is {file_kind(status.st_mode)}, where a folder has to be")
        if (folder and root.is_fixed(folder)) or not os.access(
            folder or ".", os.W_OK | os.X_OK, dir_fd=root.fd, effective_ids=True
        ):
            raise LocalError(str(where), "is a folder in which this process may not change names")
        # A link above would have been seen as no folder.
        folder = folder.rpartition("/")[0]


def check_plan(root: Folder, base: Base, plan: Plan, paths: Collection[str]) -> bool:
    """Raise LocalError, DamagedError or WrongBaseError if a plan that changes `paths` cannot be carried out in `root`.

    Whether there is room to stage all of it at once.
    """
    check_places(root, paths)
    check_names(root, [*(file.path for file in base.files), *paths])
    ours = {file.path for file in base.files}
    for row in plan.written_files:
        if row.path not in ours and root.status(row.path) is not None:
            facts = "is not the base's, and stands where the target has a file"
            raise WrongBaseError(str(root.path / row.path), facts, hint="move it away")
    if has_room(root, room_at_once(plan), len(paths)):
        return True
    check_room(root, room_in_turn(plan), len(paths))
    return False


def has_room(folder: Folder, needed_bytes: int, files: int) -> bool:
    return free_bytes(folder) >= _with_slack(needed_bytes, files)


def check_room(folder: Folder, needed_bytes: int, files: int) -> None:
    """Raise LocalError, with both numbers, if there is no room for `needed_bytes` in so many files."""
    free, needed = free_bytes(folder), _with_slack(needed_bytes, files)
    if free < needed:
        facts = f"needs {needed} bytes of room, {free} are free"
        raise NoRoomError(shown(str(folder.path)), facts, hint="make room and run the same command again")


def _with_slack(needed_bytes: int, files: int) -> int:
    return needed_bytes + _SLACK_BYTES + files * _SLACK_PER_FILE_BYTES
