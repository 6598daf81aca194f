"""Checks, before anything is changed, that every name that a plan changes can be changed; and what the names are.

It changes nothing; whether there is room is asked here too.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Collection, Iterable

from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.names import shown
from dcr_cli.durable import Folder, NoRoomError, check_mounted_to_write
from dcr_cli.errors import MAY_NOT, DamagedError, LocalError, UsageError, WrongBaseError, size
from dcr_cli.receiver.base import Base
from dcr_cli.receiver.plan import Action, Plan, room_at_once, room_in_turn
from dcr_cli.receiver.room import free_bytes

# It is away while others change.
CONFIG = "config.json"
# For the marker, the record and other small files, and for what file systems round up.
_SLACK_BYTES = 1 << 20
_SLACK_PER_FILE_BYTES = 1 << 12
_IN_THE_WAY, _MOVE_AWAY = "is not the base's, and stands where the target has", "move it away"
_FIXED, _UNFIX = "has an attribute that forbids changing it", "see chattr -i, -a"


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


def check_places(root: Folder, paths: Collection[str], removed: Collection[str]) -> None:
    """Raise DamagedError, WrongBaseError or LocalError if one of `paths` could not be replaced or removed.

    What is `removed` goes before others get its place: a file may become a folder, or a folder a file.
    """
    for path in paths:
        status = root.status(path)
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            _check_all_goes(root, path, removed)
        elif stat.S_ISREG(status.st_mode):
            _check_file(root, path, status)
        elif not stat.S_ISLNK(status.st_mode):
            raise DamagedError(str(root.path / path), f"is {file_kind(status.st_mode)}, where a file has to be")
    seen: set[str] = set()
    for folder in folders_of(paths):
        _check_folder(root, folder, seen, removed)


def _check_all_goes(root: Folder, folder: str, removed: Collection[str]) -> None:
    """A folder can become a file if nothing but what is removed lies in it."""
    with root.open_folder(folder) as inside:
        names = inside.names()
    for path in (f"{folder}/{name}" for name in names):
        status = root.status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            _check_all_goes(root, path, removed)
        elif status is not None and path not in removed:
            raise WrongBaseError(str(root.path / path), f"{_IN_THE_WAY} a file", hint=_MOVE_AWAY)
    if not any(path.startswith(f"{folder}/") for path in removed):
        raise WrongBaseError(str(root.path / folder), f"{_IN_THE_WAY} a file", hint=_MOVE_AWAY)
    check_no_mount(root, folder, folder.rpartition("/")[0])


def check_moves(root: Folder, paths: Iterable[str]) -> None:
    """Raise LocalError if one of `paths` could not be moved to or from `root`'s state folder.

    A mount in between stops that, and so do attributes and the rights of a folder that many may write to.
    """
    home = STATE_FOLDER if root.status(STATE_FOLDER) is not None else ""
    here = root.mount_of(home)
    for path in paths:
        folder = _nearest_folder(root, path)
        if root.mount_of(folder) != here:
            facts = f"is no place for a file that is made in {root.path / STATE_FOLDER}: a mount lies between them"
            raise LocalError(str(root.path / path), facts, hint="dcr apply --to makes a new folder")
        status = root.status(path)
        if status is not None:
            check_no_mount(root, path, folder)
            _check_movable(root, path, folder, status)


def check_no_mount(root: Folder, path: str, folder: str) -> None:
    """Raise LocalError if something is mounted at `path`, which lies in `folder`: it could not be replaced."""
    if root.mount_of(path) != root.mount_of(folder):
        raise LocalError(str(root.path / path), "is a mount, and cannot be replaced or removed", hint="unmount it")


def _nearest_folder(root: Folder, path: str) -> str:
    """The folder that a path lies in, or the one above it that is there."""
    folder = path.rpartition("/")[0]
    while folder and root.status(folder) is None:
        folder = folder.rpartition("/")[0]
    return folder


def _check_movable(root: Folder, path: str, folder: str, status: os.stat_result) -> None:
    if root.is_fixed(path):
        raise LocalError(str(root.path / path), _FIXED, hint=_UNFIX)
    above = root.status(folder) if folder else os.fstat(root.fd)
    users = (0, status.st_uid, above.st_uid if above is not None else 0)
    if above is not None and above.st_mode & stat.S_ISVTX and os.geteuid() not in users:
        facts = "may be moved by its owner alone, as its folder has the sticky bit"
        raise LocalError(str(root.path / path), facts, hint="run as its owner")


def check_changeable(folder: Folder) -> None:
    """Raise LocalError if this process may not change the names in a folder."""
    _check_folder(folder, "", set(), ())


def check_lengths(folder: Folder, names: Iterable[str], why: str) -> None:
    """Raise UsageError if the file system does not allow one of `names` in a folder; `why` it is needed."""
    try:
        most = os.fpathconf(folder.fd, "PC_NAME_MAX")
    except OSError:
        # Where it is not told, only making the name tells.
        return
    for name in names:
        size = len(os.fsencode(name))
        if most < size:
            facts = f"{why} needs a name of {size} bytes, {most} are allowed there"
            raise UsageError(shown(str(folder.path / name)), facts, hint="choose a shorter name")


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
        raise LocalError(str(root.path / path), _FIXED, hint=_UNFIX)
    user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    if user != 0 and (status.st_uid != user or status.st_gid not in groups):
        owner = f"{status.st_uid}:{status.st_gid}"
        facts = f"belongs to {owner}, and this process cannot give what replaces it to another owner"
        raise LocalError(str(root.path / path), facts, hint="run as its owner")


def _check_folder(root: Folder, folder: str, seen: set[str], removed: Collection[str]) -> None:
    """A new name needs a folder that may be written, or one above that may be."""
    while folder not in seen:
        seen.add(folder)
        status = root.status(folder) if folder else os.fstat(root.fd)
        if status is None or (folder in removed and not stat.S_ISDIR(status.st_mode)):
            folder = folder.rpartition("/")[0]
            continue
        where = root.path / folder
        if stat.S_ISREG(status.st_mode):
            raise WrongBaseError(str(where), f"{_IN_THE_WAY} a folder", hint=_MOVE_AWAY)
        if not stat.S_ISDIR(status.st_mode):
            raise DamagedError(str(where), f"is {file_kind(status.st_mode)}, where a folder has to be")
        if root.is_fixed(folder):
            raise LocalError(str(where), _FIXED, hint=_UNFIX)
        if not os.access(folder or ".", os.W_OK | os.X_OK, dir_fd=root.fd, effective_ids=True):
            check_mounted_to_write(where, "cannot be changed")
            raise LocalError(str(where), "is a folder in which this process may not change names", hint=MAY_NOT)
        # A link above would have been seen as no folder.
        folder = folder.rpartition("/")[0]


def check_plan(root: Folder, base: Base, plan: Plan, paths: Collection[str]) -> bool:
    """Raise LocalError, DamagedError or WrongBaseError if a plan that changes `paths` cannot be carried out in `root`.

    Whether there is room to stage all of it at once.
    """
    patched = {shard.path for shard in plan.shards if shard.action is Action.PATCH}
    removed = {*plan.removed_files, *(path for part in plan.components for path in part.removed)}
    check_places(root, paths, removed)
    for path in removed:
        if root.status(path) is not None:
            check_no_mount(root, path, path.rpartition("/")[0])
    moved = [path for path in paths if path not in patched | removed]
    config = root.status(CONFIG)
    check_moves(root, [*moved, CONFIG] if config is not None and not stat.S_ISDIR(config.st_mode) else moved)
    check_names(root, [*(file.path for file in base.files), *paths])
    ours = {file.path for file in base.files}
    for row in plan.written_files:
        status = root.status(row.path)
        if row.path not in ours and status is not None and not stat.S_ISDIR(status.st_mode):
            raise WrongBaseError(str(root.path / row.path), f"{_IN_THE_WAY} a file", hint=_MOVE_AWAY)
    if has_room(root, room_at_once(plan), len(changed_paths(plan))):
        return True
    check_room(root, room_for(plan))
    return False


def room_for(plan: Plan) -> int:
    """Bytes that have to be free so that a plan can be carried out where the receiver is."""
    return with_slack(room_in_turn(plan), len(changed_paths(plan)))


def has_room(folder: Folder, needed_bytes: int, files: int) -> bool:
    return free_bytes(folder) >= with_slack(needed_bytes, files)


def check_room(folder: Folder, needed: int) -> None:
    """Raise LocalError, with both numbers, if fewer bytes than `needed` are free."""
    free = free_bytes(folder)
    if free < needed:
        facts = f"needs {size(needed)} of room ({needed:,} bytes), {size(free)} are free ({free:,} bytes)"
        raise NoRoomError(shown(str(folder.path)), facts, hint="make room and run the same command again")


def with_slack(needed_bytes: int, files: int) -> int:
    """Bytes that have to be free to write so many of them in so many files, and what goes with them."""
    return needed_bytes + _SLACK_BYTES + files * _SLACK_PER_FILE_BYTES
