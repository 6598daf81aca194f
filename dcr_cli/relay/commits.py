"""The commits that a relay keeps: each names the one before by its digest, and so they show when one is not right.

Nothing binds the newest commit but a signature, which is not a relay's matter. So one that came wrong may be kept,
until what it names, or the commit after it, says so. How commits come, and who is given them, is not known here.
"""

from __future__ import annotations

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import DcrError
from dcr_cli.relay.spool import Label, Spool
from dcr_cli.remote.keys import commit_key
from dcr_cli.remote.version import decode_version


def keep_commit(spool: Spool, number: int, data: bytes) -> None:
    """Keep a commit, unless one beside it is kept that does not follow it, or that it does not follow.

    Nobody knows which of the two is wrong: so the other one is forgotten, and both are asked for again.
    """
    before, after = (spool.read(_label(beside)) if beside else None for beside in (number - 1, number + 1))
    is_fit = True
    if before is not None and not _follows(number, data, before):
        forget_commit(spool, number - 1)
        is_fit = False
    if after is not None and not _follows(number + 1, after, data):
        forget_commit(spool, number + 1)
        is_fit = False
    if is_fit:
        spool.write(_label(number), data)


def forget_commit(spool: Spool, number: int) -> None:
    """Forget a commit, if it is kept."""
    kept = spool.find(_label(number))
    if kept is not None:
        spool.forget(kept)


def _follows(number: int, data: bytes, before: bytes) -> bool:
    """Whether a commit names the one before it; one of a newer dcr may do so in another way."""
    try:
        return decode_version(data, number, commit_key(number)).version.previous == object_digest(before)
    except DcrError:
        return True


def _label(number: int) -> Label:
    return Label(commit_key(number), 0, number)
