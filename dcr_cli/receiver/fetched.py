"""The deltas that were fetched into a receiver's own folder, `.dcr/fetched/`: which of them finish what was stopped.

Fetching and removing them is somebody else's matter; an apply leaves the folder alone.
"""

from __future__ import annotations

from pathlib import Path

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, MAX_MARKER_BYTES, STATE_FOLDER
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.output import COMMIT_NAME
from dcr_cli.durable import open_folder
from dcr_cli.receiver.marker import decode_marker
from dcr_cli.receiver.survey import open_root

FETCHED = f"{STATE_FOLDER}/fetched"


def deltas_to_finish(checkpoint: str | Path) -> tuple[Path, ...] | None:
    """The folders of the deltas, in order, whose change of `checkpoint` was stopped, if all were fetched into it.

    None if no change is in progress, or some of its deltas are not there. Their commits are compared, and nothing else.
    """
    with open_root(checkpoint) as root:
        text = root.read(IN_PROGRESS, MAX_MARKER_BYTES)
        if text is None:
            return None
        marker = decode_marker(text, str(root.path / IN_PROGRESS))
        fetched = root.path / FETCHED
        if not fetched.is_dir():
            return None
    found = {}
    with open_folder(fetched) as folder:
        for name in folder.names():
            if not (fetched / name).is_dir():
                continue
            commit = folder.read(f"{name}/{COMMIT_NAME}", COMMIT_LIMIT)
            if commit is not None:
                found[object_digest(commit)] = fetched / name
    if any(commit not in found for commit in marker.commits):
        return None
    return tuple(found[commit] for commit in marker.commits)
