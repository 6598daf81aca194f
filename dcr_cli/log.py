"""Says which versions a remote has, each proven to follow the one before. It needs no right but to get.

What is in a version is show's matter, what else lies in a remote, status's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.digest import State
from dcr_cli.errors import UsageError
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import ANCHORS, Place
from dcr_cli.remote.listing import list_if_allowed, sort_entries
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust, trust_in
from dcr_cli.remote.version import ANCHOR, COMMIT_KIND, DELTA, Published
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

LINES = 20


@dataclass(frozen=True, slots=True)
class LoggedVersion:
    """A version by its commit.

    `kind` is delta or anchor: an anchor starts from nothing. `bytes` are what fetching its delta, or that anchor,
    takes. `has_anchor` says whether an anchor of it is there, None where the remote does not list. `signers` are the
    trusted keys that have signed it, None where no key was given; `created` and `publisher` its publisher's own words.
    """

    version: int
    kind: str
    id: str
    bytes: int
    has_anchor: bool | None
    target: State
    created: str
    publisher: str
    signers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LogResult:
    """The newest versions of a remote, the newest first; `head` is the newest one's number, 0 if there is none."""

    remote: str
    history: str
    head: int
    versions: tuple[LoggedVersion, ...]


def log(
    remote: str | Path,
    *,
    lines: int | None = LINES,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
) -> LogResult:
    """Read the newest `lines` commits of a remote, or all of them, and check that each follows the one before it.

    `trusted_keys` are public keys, or files of them; versions that none of these signed are told, not refused. Raises
    NotFoundError where there is no remote, DamagedError, WrongBaseError, TransportError, UsageError.
    """
    if lines is not None and lines < 1:
        raise UsageError("lines", f"a number from 1 on expected, found {lines}", hint="or all of them")
    trust = trust_in(trusted_keys, "--trusted-key")
    with open_store(remote, storage_options, is_look=True) as store:
        history = require_history(store)
        commits = Log(store, history.id)
        head = commits.newest(0)
        shown = read_newest(commits, head, head if lines is None else lines)
        anchors = listed_anchors(store) if shown else None
        versions = tuple(logged(each, anchors, trust) for each in reversed(shown))
        return LogResult(store.shown, history.id, head, versions)


def read_newest(commits: Log, head: int, count: int) -> list[Published]:
    """The newest `count` versions, the oldest first, each proven to follow the one before, told or not."""
    if not head:
        return []
    first = commits.require(max(1, head - count))
    following = commits.following(first, head)
    return following if head > count else [first, *following]


def listed_anchors(store: Store) -> frozenset[Place] | None:
    """The versions of which an anchor is there; None where the remote does not list."""
    entries = list_if_allowed(store, ANCHORS)
    if entries is None:
        return None
    return frozenset(place for place, held in sort_entries(entries).anchors.items() if held.document is not None)


def logged(published: Published, anchors: frozenset[Place] | None, trust: Trust) -> LoggedVersion:
    version = published.version
    keys = trust.signers(published.signed, COMMIT_KIND)
    return LoggedVersion(
        version=version.number,
        kind=DELTA if version.delta is not None else ANCHOR,
        id=version.place.id,
        bytes=version.bytes,
        has_anchor=version.place in anchors if anchors is not None else None,
        target=version.target,
        created=version.created,
        publisher=version.publisher,
        signers=tuple(key.hex() for key in keys) if trust.is_asked_for else None,
    )
