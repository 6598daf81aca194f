"""What is fetched for a checkpoint that is not there yet: it lies in a spool beside its place.

What becomes of it is journey.py's matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcr_cli.durable import PRIVATE_FOLDER_MODE, Folder
from dcr_cli.errors import ConflictError, DcrError, LocalError
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.spool import Spool
from dcr_cli.receiver.beside.folders import open_parent
from dcr_cli.receiver.places import check_lengths


@contextmanager
def spool_beside(path: Path) -> Iterator[Spool]:
    """Open what was fetched for the checkpoint that is to be made at `path`, and keep others from it.

    ConflictError if another pull is at it, or has made the checkpoint.
    """
    place = Path(os.path.abspath(path))
    name = _name(place)
    with open_parent(place) as parent:
        check_lengths(parent, [name], "what is fetched for it")
        if parent.make_folder(name, PRIVATE_FOLDER_MODE, exist_ok=True):
            parent.sync()
        try:
            with _locked(parent, name) as spool:
                if not look(path).is_new:
                    raise _was_made(path)
                yield spool
        except BaseException:
            # The cause is what counts; what stays is for the next run.
            with suppress(DcrError):
                parent.remove_folder(name, used_ok=True)
            raise
        parent.remove_folder(name, used_ok=True)


def remove_beside(path: Path) -> None:
    """Remove what a stopped run has left beside a checkpoint that is made, if nobody is at it."""
    place = Path(os.path.abspath(path))
    name = _name(place)
    if not os.path.lexists(place.parent / name) or look(path).is_new:
        return
    # What cannot be removed is in nobody's way.
    with suppress(ConflictError, LocalError), open_parent(place) as parent:
        with _locked(parent, name) as spool:
            spool.keep(())
        parent.remove_folder(name, used_ok=True)


def _name(place: Path) -> str:
    return f".{place.name}.dcr-fetched"


@contextmanager
def _locked(parent: Folder, name: str) -> Iterator[Spool]:
    try:
        with parent.open_folder(name) as root, Spool(root) as spool:
            yield spool
    except LocalError as error:
        # Whoever was at it until now has removed it.
        if parent.status(name) is None:
            raise _was_made(parent.path / name) from error
        raise


def _was_made(path: Path) -> ConflictError:
    return ConflictError(str(path), "was made by another dcr just now", hint="run the same command again")
