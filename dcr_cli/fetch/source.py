"""A remote as a receiver reads it: its newest version, whether its log still has what the receiver has seen, and the
commits between two versions, each proven to follow the one before.

Everything is read by get alone, so that a right to read known keys is enough.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from dcr_cli.errors import NotFoundError
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import commit_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import COMMIT_KIND, Published
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class Source:
    """A remote that is read: its store, the log of its history, and whose signatures count."""

    store: Store
    log: Log
    trust: Trust

    @property
    def shown(self) -> str:
        return self.store.shown


def open_source(store: Store, trust: Trust, history: str | None) -> Source:
    """Take up a remote whose history is known; without, its dcr.json is read: NotFoundError if there is none."""
    return Source(store, Log(store, history or require_history(store).id, trust), trust)


def require_version(source: Source, version: int) -> Published:
    """Read the commit of a version; NotFoundError if there is none, or none that may be read.

    Whoever asks has read something of this remote.
    """
    published = source.log.read(version, is_denied_absent=True)
    if published is None:
        facts = f"there is no version {version}, or it may not be read"
        raise NotFoundError(
            f"{source.shown}/{commit_key(version)}", facts, hint=f"dcr log {shlex.quote(source.shown)} lists them"
        )
    return published


def commits_between(source: Source, first: Published, last: int) -> dict[int, Published]:
    """The commits of `first` and of the versions after it up to `last`, by version."""
    found = [first, *source.log.following(first, last)]
    return {published.version.number: published for published in found}


def signers_of(trust: Trust, published: Published) -> tuple[str, ...]:
    """The trusted keys that have signed a commit, in hexadecimal."""
    return tuple(sorted(key.hex() for key in trust.signers(published.signed, COMMIT_KIND)))
