"""What a pull leaves for those who serve from what it brings: the changes of each delta, decoded; of a version that is
prepared, before it is committed, so that they can stage it too.

What they are, and how they lie there, is the business of changes/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dcr_cli.changes.places import arrive, has_ahead, leave_ahead, make_place, publishing
from dcr_cli.changes.taking import Put, take
from dcr_cli.delta.delta import Delta
from dcr_cli.errors import UnsupportedError, WrongBaseError
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.wish import Wish
from dcr_cli.receiver.view import has_layout
from dcr_cli.remote.keys import Place


def begin_leaving(wish: Wish) -> None:
    """Make the folder in which changes are to be left, if that is wished for and it is not there."""
    if wish.changes is not None and not wish.dry_run:
        make_place(wish.changes)


@contextmanager
def leaving_changes(wish: Wish, path: Path, delta: Delta, place: Place) -> Iterator[list[str]]:
    """Leave what a delta changes in the checkpoint at `path`, if that is wished for, once it is applied within; the
    list has its name then. Not where some of it was done already, unless it was left when the version was prepared."""
    names: list[str] = []
    if wish.changes is None or has_ahead(wish.changes, place) or not _is_at_base(path, delta):
        yield names
        names += arrived(wish, place)
        return
    with publishing(wish.changes, place, delta, _taking(wish, path, delta)) as name:
        yield names
    names.append(name)


def leave_prepared(wish: Wish, path: Path, delta: Delta, place: Place) -> None:
    """Leave what a version that is prepared changes in the checkpoint at `path`, which was seen to come to it, if that
    is wished for. WrongBaseError if it is not where that starts from."""
    if wish.changes is None or has_ahead(wish.changes, place):
        return
    if not _is_at_base(path, delta):
        facts = f"is not in the state that version {place.version} starts from; it was when it was pulled"
        raise WrongBaseError(str(path), facts, hint="dcr verify tells what was changed, dcr pull --repair mends it")
    leave_ahead(wish.changes, place, delta, _taking(wish, path, delta))


def is_left(wish: Wish, place: Place) -> bool:
    """Whether what a version that is prepared changes is left, or need not be."""
    return wish.changes is None or has_ahead(wish.changes, place)


def is_arriving(wish: Wish, place: Place) -> bool:
    """Whether what was left of a version when it was prepared has not got its name."""
    return wish.changes is not None and wish.changes.is_dir() and has_ahead(wish.changes, place)


def arrived(wish: Wish, place: Place) -> tuple[str, ...]:
    """Give what was left of a version when it was prepared its name, as the checkpoint has come to it: which name."""
    name = arrive(wish.changes, place) if wish.changes is not None else None
    return (name,) if name is not None else ()


def _is_at_base(path: Path, delta: Delta) -> bool:
    situation = look(path)
    # Where the record does not count, the way began where all was read.
    is_at_base = situation.held is None or situation.held.content == delta.commit.base.content
    return is_at_base and not situation.is_marked


def _taking(wish: Wish, path: Path, delta: Delta) -> Callable[[Put], None]:
    if has_layout(path, wish.view):
        facts = "its tensors lie as a layout says; changes are told of those in canonical form"
        raise UnsupportedError(str(path), facts, hint="leave out --publish-changes")
    return partial(take, delta, path, wish.effort.jobs)
