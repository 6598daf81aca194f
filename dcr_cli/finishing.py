"""Finishes what a stopped pull has begun in a checkpoint, with what that has fetched, and without the remote.

What is to be fetched again, and what comes after it, is advance.py's matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dcr_cli.apply import ApplyWay, apply_chain
from dcr_cli.checkpoint.in_progress import INSTALL, STATE_FOLDER, check_complete, is_incomplete
from dcr_cli.delta.delta import open_delta
from dcr_cli.errors import DamagedError, DcrError, IncompleteError
from dcr_cli.fetch.adoption import is_trusted
from dcr_cli.fetch.beside import remove_beside
from dcr_cli.fetch.ending import arrival_at, note
from dcr_cli.fetch.listing import Listing, listing_of_manifest, listing_of_wanted
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.source import signers_of
from dcr_cli.fetch.spool import Spool, spool_of
from dcr_cli.fetch.wish import Wish
from dcr_cli.receiver.fetched import FETCHED, deltas_to_finish
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.install import Manner, install, wanted_in_progress
from dcr_cli.receiver.install.site import marker_in
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.version import Published


def finish(path: Path, wish: Wish) -> tuple[str, ...] | None:
    """Finish the change of a checkpoint that an earlier pull was stopped in, with what that has fetched: the files that
    are no part of the checkpoint and were left; None if nothing was finished. What was in place already, and not noted,
    is noted."""
    if wish.dry_run:
        if path.exists():
            check_complete(path)
        return None
    if path.exists():
        remove_beside(path)
    if not (path / FETCHED).is_dir():
        return None
    with spool_of(path) as spool:
        foreign = _finish(path, wish) if is_incomplete(path) else None
        if _note_arrival(path, spool, wish):
            with open_root(os.path.realpath(path)) as root, Receiver(root):
                # As it leaves, it tidies up what a change has left that was stopped at its very end.
                pass
        situation = look(path)
        if situation.position is not None and situation.is_at_position and not wish.is_repair:
            # What led here is not needed any more; what is repaired may have to come here once more.
            spool.keep([place for place in spool.places() if place.version > situation.position.version])
        return foreign


def _finish(path: Path, wish: Wish) -> tuple[str, ...] | None:
    """Finish what was begun, if all of it is there: what is foreign then."""
    found = wanted_in_progress(path)
    if found is not None:
        wanted, origin = found
        return install(path, Request(wanted, _Nobody(), origin, wish.effort), Manner()).foreign
    folders = deltas_to_finish(path)
    if folders is None:
        return None
    opened = [open_delta(folder) for folder in folders]
    return apply_chain(opened, path, ApplyWay(), jobs=wish.effort.jobs, progress=wish.effort.progress).foreign


class _Nobody:
    """Nothing is fetched for what has been staged as a whole."""

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        raise DamagedError(path, "was staged, and is not what was staged any more", hint="dcr pull --repair")


def check_overtakable(path: Path) -> None:
    """Raise IncompleteError unless what is in progress is the way to an anchor, which another one may take the place
    of."""
    with open_root(path) as root, root.open_folder(STATE_FOLDER) as home:
        marker = marker_in(home)
    if marker is not None and marker.mode == INSTALL:
        return
    if marker is not None and marker.remote is not None:
        facts = "incomplete: a pull to it was stopped, and what it had fetched is not there any more"
        raise IncompleteError(str(path), facts, hint="dcr pull --repair brings it to a version by an anchor")
    check_complete(path)


def _note_arrival(path: Path, spool: Spool, wish: Wish) -> bool:
    """Note where a receiver is, if it is at a version that was fetched for it and has not noted that: whether it
    was."""
    situation = look(path)
    old = situation.position
    for published in spool.expected():
        if situation.held is None or (old is not None and old.commit == published.blake3):
            return False
        if situation.held.is_state(published.version.target, _listing(spool, published)):
            keys = signers_of(wish.trust, published) if old is not None and is_trusted(old, wish.trust) else ()
            note(path, arrival_at(published, old.remote if old is not None else "", keys, wish, old))
            return True
    return False


def _listing(spool: Spool, published: Published) -> Listing | None:
    """The files of a version, if all of its delta is there, or if its anchor was fetched to be cut."""
    place = published.version.place
    try:
        if spool.has_delta(place):
            return listing_of_manifest(open_delta(spool.path(place)).manifest)
    except DcrError:
        # It is not what it was; then nothing can have been made of it.
        return None
    wanted = spool.read_wanted(place)
    return listing_of_wanted(wanted) if wanted is not None else None
