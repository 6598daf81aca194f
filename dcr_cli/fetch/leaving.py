"""What a pull leaves for those who serve from what it brings: the changes of each delta, decoded.

What they are, and how they lie there, is the business of changes/.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from dcr_cli.changes.places import publishing
from dcr_cli.changes.taking import take
from dcr_cli.delta.delta import Delta
from dcr_cli.errors import UnsupportedError
from dcr_cli.fetch.situation import look
from dcr_cli.fetch.wish import Wish
from dcr_cli.receiver.view import has_layout
from dcr_cli.remote.keys import Place


def leaving_changes(wish: Wish, path: Path, delta: Delta, place: Place) -> AbstractContextManager[str | None]:
    """Leave what a delta changes in the checkpoint at `path`, if that is wished for, once it is applied within, under
    the name that is yielded; not where some of it was done already."""
    if wish.changes is None:
        return nullcontext()
    situation = look(path)
    # Where the record does not count, the way began where all was read.
    is_at_base = situation.held is None or situation.held.content == delta.commit.base.content
    if situation.is_marked or not is_at_base:
        return nullcontext()
    if has_layout(path, wish.view):
        facts = "its tensors lie as a layout says; changes are told of those in canonical form"
        raise UnsupportedError(str(path), facts, hint="leave out --publish-changes")
    return publishing(wish.changes, place, delta, take(delta, path, wish.effort.jobs))
