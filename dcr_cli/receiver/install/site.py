"""Looks at a folder that is to be brought to a wanted state: what belongs to it, and whether a change of it must be
finished first.

It changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.in_progress import INSTALL, MAX_MARKER_BYTES, change_of, command_to_finish
from dcr_cli.durable import Folder
from dcr_cli.errors import IncompleteError
from dcr_cli.receiver.install.belongings import left_by_apply, look_over, set_apart, sort_out
from dcr_cli.receiver.install.note import key_of, read_note
from dcr_cli.receiver.install.stock import Site
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.marker import MARKER, Marker, decode_marker
from dcr_cli.receiver.places import CONFIG
from dcr_cli.receiver.receiver import HELD_CONFIG
from dcr_cli.receiver.record import record_folder


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may be done to a checkpoint: the files of the versions `known` are its own, and with `repair` a change in
    progress may be overtaken."""

    known: tuple[str, ...] = ()
    repair: bool = False


def site_of(root: Folder, wanted: Wanted, allowance: Allowance) -> Site:
    """Look at the folder `root` as it is.

    Raises IncompleteError if another change of it has to be finished first, NotFoundError if it holds no checkpoint,
    WrongBaseError if it holds what can be none of its files.
    """
    home = record_folder(root)
    if home is None:
        return Site(root, look_over(root, wanted, allowance.known))
    with home:
        marker, note = marker_in(home), read_note(home)
        away = [CONFIG] if marker is not None and home.status(HELD_CONFIG) is not None else []
        if marker is not None and is_of(marker, wanted) and note is not None and note.wanted == wanted:
            return Site(root, sort_out(root, wanted, note.going), is_marked=True)
        known = [*allowance.known]
        if marker is not None:
            if not (allowance.repair or is_of(marker, wanted)):
                facts = f"{change_of(marker.remote)} to it was stopped"
                command = command_to_finish(marker.deltas, marker.remote, root.path)
                hint = f"finish it first: {command}, or overtake it: dcr pull --repair"
                raise IncompleteError(str(root.path), facts, hint=hint)
            known += left_by_apply(home, marker)
        if note is not None and marker is not None:
            known += [*note.going, *(file.path for file in note.wanted.files)]
        belongings = look_over(root, wanted, known, away=away, is_marked=marker is not None)
        if note is not None and (marker is not None or note.wanted == wanted):
            belongings = set_apart(root, wanted, belongings, note.going, is_marked=marker is not None)
        return Site(root, belongings, is_marked=marker is not None)


def is_of(marker: Marker, wanted: Wanted) -> bool:
    """Whether the change that a marker tells of is to this wanted state."""
    return marker.mode == INSTALL and marker.commits == (key_of(wanted),)


def marker_in(home: Folder) -> Marker | None:
    """The marker in a state folder, if there is one."""
    text = home.read(MARKER, MAX_MARKER_BYTES)
    return decode_marker(text, str(home.path / MARKER)) if text is not None else None
