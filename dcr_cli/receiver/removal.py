"""Takes files of a checkpoint away, or moves them, durably, and sees that they are what they were.

Which files those are is its callers' business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from dcr_cli.durable import Folder
from dcr_cli.errors import ConflictError
from dcr_cli.receiver.places import folders_of


def remove_files(root: Folder, paths: Iterable[str]) -> None:
    """Remove what is still there, as a file; something else may have a folder of the name."""
    present = [(path, root.status(path)) for path in paths]
    gone = [path for path, status in present if status is not None and not stat.S_ISDIR(status.st_mode)]
    for path in gone:
        root.remove(path)
    for folder in folders_of(gone):
        root.sync(folder)


def remove_empty_folders(root: Folder, paths: Iterable[str]) -> None:
    """Remove the folders in which nothing is left of these paths, which lay there, nor of anything else."""
    for folder in sorted(folders_of(paths), key=len, reverse=True):
        while folder and _is_empty_folder(root, folder):
            root.remove_folder(folder, used_ok=True)
            if root.status(folder) is not None:
                break
            folder = folder.rpartition("/")[0]
            root.sync(folder)


def move_file(source: Folder, name: str, to: Folder, new_name: str) -> None:
    """Rename a file, which changes its ctime; ConflictError if anything else about it changes meanwhile."""
    before = source.status(name)
    source.rename(name, to, new_name)
    after = to.status(new_name)
    if before is None or after is None or _written(before) != _written(after):
        raise ConflictError(str(to.path / new_name), "was changed by another process while it got its name")


def _is_empty_folder(root: Folder, path: str) -> bool:
    status = root.status(path)
    return status is not None and stat.S_ISDIR(status.st_mode) and root.is_empty(path)


def _written(status: os.stat_result) -> tuple[int, int]:
    """What changes when a file is written to, and not when it is renamed."""
    return status.st_size, status.st_mtime_ns
