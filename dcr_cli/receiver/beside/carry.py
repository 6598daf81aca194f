"""Takes along what dcr does not know from a folder that another one replaces, and removes no more of it than it knows.

A file is known while it has the size and the time that it had when it was read or taken along.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dcr_cli.checkpoint.folder import Identity, identity_of
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.parts import is_top_shard, is_weight_map
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder
from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.receiver.marks import Known, decode_known, mark_of
from dcr_cli.receiver.receiver import Receiver

_CARRIED = "carried"
_COMPARED_BYTES = 1 << 20


def known_files(root: Folder, identities: Mapping[str, Identity]) -> Known:
    """A checkpoint's files, as far as they are still what they were when they were read."""
    known: Known = dict.fromkeys(identities)
    for path, identity in identities.items():
        status = root.status(path)
        try:
            now = identity_of(os.stat(path, dir_fd=root.fd))
        except OSError:
            continue
        if status is not None and now[:4] == identity[:4]:
            known[path] = mark_of(status)
    return known


@dataclass(frozen=True, slots=True)
class Previous:
    """A folder that is to be removed, by its name and by what it was then, and what of it is known."""

    name: str
    place: tuple[int, int]
    known: Known

    def is_still(self, status: os.stat_result) -> bool:
        """Whether it is this folder that now has the name, and not another one, as beside a copy of this note."""
        return place_of(status) == self.place


def place_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode."""
    return status.st_dev, status.st_ino


def encode_previous(previous: Previous) -> bytes:
    document = {"name": previous.name, "place": previous.place, "files": previous.known}
    return json.dumps(document).encode() + b"\n"


def decode_previous(text: bytes, what: str) -> Previous:
    document = strict_json(text, what)
    try:
        name = document["name"]
        device, inode = map(int, document["place"])
        known = decode_known(document["files"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedError(what, "does not say which folder is to be removed", hint="remove it") from error
    if not isinstance(name, str) or not name.strip(".") or "/" in name:
        raise DamagedError(what, "does not name another folder beside this one", hint="remove it")
    return Previous(name, (device, inode), known)


def unknown_files(root: Folder, ours: Collection[str]) -> list[str]:
    """All files and links below `root` that are not `ours`."""
    return [path for path, status in _entries(root) if path not in ours and _can_be_carried(status)]


def carry_over(old: Folder, receiver: Receiver, known: Known) -> list[str]:
    """Give the folder of `receiver` all that is in `old`, was never known, and is not there; it is known then.

    What cannot be given, or is there otherwise, is returned; so is what was known and has changed.
    """
    new = receiver.root
    left = []
    made: dict[str, os.stat_result] = {}
    for path, status in _entries(old):
        if known.get(path) == mark_of(status):
            continue
        if stat.S_ISDIR(status.st_mode):
            _carry_folder(old, new, path, made)
            continue
        try:
            is_new = path not in known and new.status(path) is None
            if is_new and _can_be_carried(status) and not _is_part_of_checkpoint(path):
                _carry(old, receiver, path, made)
            is_there = _is_same(old, new, path)
        except DcrError:
            # What is gone by itself is no loss.
            is_there = old.status(path) is None
        if is_there:
            known[path] = mark_of(status)
        else:
            left.append(path)
    for folder in sorted(made, reverse=True):
        new.take_folder_mode(folder, made[folder])
    return left


def remove_known(parent: Folder, name: str, known: Known) -> list[str]:
    """Remove the folder `name`, but for what is not known in it; what that is."""
    with parent.open_folder(name) as folder:
        left = _remove_known(folder, "", known)
        # Something may have come meanwhile.
        left = left or [inner for inner in folder.names() if inner != STATE_FOLDER]
        if not left:
            folder.remove_tree(STATE_FOLDER, missing_ok=True)
    if not left:
        parent.remove_folder(name)
        parent.sync()
    return left


def _remove_known(folder: Folder, prefix: str, known: Known) -> list[str]:
    left = []
    names = [name for name in folder.names() if prefix or name != STATE_FOLDER]
    if names:
        folder.make_changeable()
    for name in names:
        path, status = prefix + name, folder.status(name)
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            with folder.open_folder(name) as inner:
                left += _remove_known(inner, f"{path}/", known)
            if folder.is_empty(name):
                folder.remove_folder(name)
        elif known.get(path) == mark_of(status):
            folder.remove(name)
        else:
            left.append(path)
    return left


def _entries(folder: Folder, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder but for folders that hold something, and dcr's own one."""
    for name in folder.names():
        status = folder.status(name)
        if status is None or (not prefix and name == STATE_FOLDER):
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield prefix + name, status
            continue
        with folder.open_folder(name) as inner:
            if inner.names():
                yield from _entries(inner, f"{prefix}{name}/")
            else:
                yield prefix + name, status


def _can_be_carried(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)


def _is_part_of_checkpoint(path: str) -> bool:
    """Whether a file would be part of a checkpoint that it came to lie in, not something beside it."""
    return is_top_shard(path) or is_weight_map(path)


def _carry(old: Folder, receiver: Receiver, path: str, made: dict[str, os.stat_result]) -> None:
    """Have a file or link under the same path in the receiver, whole or not at all."""
    new, home = receiver.root, receiver.home
    status = old.status(path)
    if status is None:
        return
    above = path.rpartition("/")[0]
    if above:
        _carry_folder(old, new, above, made)
    if stat.S_ISLNK(status.st_mode):
        new.make_link(old.link_text(path), path)
    elif not new.link_file(old, path, path):
        home.remove(_CARRIED, missing_ok=True)
        with old.open_linked(path) as source, home.create_file(_CARRIED, 0o600) as file:
            file.copy_from(source)
            file.sync()
        home.take_mode(_CARRIED, status)
        home.rename(_CARRIED, new, path)
    new.sync(above)


def _carry_folder(old: Folder, new: Folder, path: str, made: dict[str, os.stat_result]) -> None:
    """Have a folder and those above it, as far as nothing else has their names; `made` notes which were not there."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        folder = "/".join(parts[:count])
        status, there = old.status(folder), new.status(folder)
        if there is not None and not stat.S_ISDIR(there.st_mode):
            return
        if there is None and status is not None:
            new.make_folder(folder, PRIVATE_FOLDER_MODE)
            new.sync("/".join(parts[: count - 1]))
            made[folder] = status


def _is_same(old: Folder, new: Folder, path: str) -> bool:
    """Whether both have the same link, or a file with the same bytes, under a path."""
    before, after = old.status(path), new.status(path)
    if before is None or after is None or stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
        return False
    if stat.S_ISLNK(before.st_mode):
        return old.link_text(path) == new.link_text(path)
    if not stat.S_ISREG(before.st_mode):
        return False
    if (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino):
        return True
    if before.st_size != after.st_size:
        return False
    with old.open_linked(path) as one, new.open_linked(path) as other:
        return _has_same_bytes(one, other, before.st_size)


def _has_same_bytes(one: File, other: File, size: int) -> bool:
    for offset in range(0, size, _COMPARED_BYTES):
        parts = [bytearray(min(_COMPARED_BYTES, size - offset)) for _ in range(2)]
        for file, part in zip((one, other), parts, strict=True):
            file.read_into(offset, memoryview(part))
        if parts[0] != parts[1]:
            return False
    return True
