"""Makes a prepared version exist once enough receivers have staged it, or gives it up (FORMAT 13.8).

No key is needed: the commit was made, and signed, when the version was prepared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UsageError
from dcr_cli.publisher.committing import Outcome, create_commit
from dcr_cli.publisher.quorum import Quorum, wait_for
from dcr_cli.remote.hint import GIVEN_UP, read_hint, write_hint
from dcr_cli.remote.history import History, require_history
from dcr_cli.remote.keys import STAGED, VERSIONS, Place, place_of_version, prepared_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import trust_in
from dcr_cli.remote.version import Published, check_follows, decode_version, is_next
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

__all__ = ["CommitResult", "commit"]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a prepared version. `committed`: it exists; `already`: it did before. `staged` are the receivers
    that had staged it."""

    remote: str
    version: int
    id: str
    committed: bool
    already: bool
    staged: tuple[str, ...]


def commit(
    remote: str | os.PathLike[str],
    version: int | None = None,
    *,
    quorum: int | None = None,
    timeout_seconds: float = 0.0,
    receivers: Sequence[str] = (),
    abort: bool = False,
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> CommitResult:
    """Make the prepared version of `remote` exist when `quorum` receivers have staged it, or with `abort` give it up.

    `receivers` are the public keys, or files with them, whose acknowledgements alone count. Without `version` it is the
    one that the remote's hint names. Committing twice is harmless. Raises NotFoundError (nothing is prepared),
    ConflictError (the quorum is not reached in time, another version was faster, or it was given up meanwhile),
    DamagedError (it does not start where the version before ends), TransportError, UsageError.
    """
    wanted = Quorum(quorum, STAGED, timeout_seconds, trust_in(receivers)) if quorum is not None else None
    if receivers and wanted is None:
        facts = "says whose word counts, and nobody is waited for"
        raise UsageError("--receivers", facts, hint="--quorum K waits for K of them")
    if abort and wanted is not None:
        raise UsageError("commit", "--abort and --quorum exclude each other", hint="dcr commit --help")
    with open_store(remote, storage_options, is_single_writer=single_writer) as store:
        history = require_history(store)
        prepared, data = _find_prepared(store, history, version)
        log = Log(store, history.id)
        place = prepared.version.place
        there = log.read(place.version, is_denied_absent=True)
        if there is not None and there.version.place == place:
            return CommitResult(store.shown, place.version, place.id, True, True, ())
        if there is not None:
            facts = f"version {place.version} was taken by {there.version.place.id}"
            raise ConflictError(store.shown, facts, hint="push again")
        if abort:
            _give_up(store, log, prepared)
            return CommitResult(store.shown, place.version, place.id, False, False, ())
        _check_follows(store, log, prepared)
        staged: tuple[str, ...] = ()
        if wanted is not None:
            staged = wait_for(store, prepared.version, wanted, is_committed=False)
            if _read_prepared(store, place) != data:
                facts = f"version {place.version} was given up while receivers were waited for"
                raise ConflictError(store.shown, facts, hint="dcr push --prepare prepares another one")
        outcome, published = create_commit(store, log, data, place.version)
        is_theirs = outcome is Outcome.SAME and published.version.place != place
        return CommitResult(store.shown, place.version, published.version.place.id, True, is_theirs, staged)


def _find_prepared(store: Store, history: History, version: int | None) -> tuple[Published, bytes]:
    """The commit of the prepared version: of the one that the hint names, or of number `version`."""
    hint = read_hint(store)
    places = []
    if hint is not None and hint.history == history.id and version in (None, hint.place.version):
        places.append(hint.place)
    if version is not None:
        found = (place_of_version(entry.key) for entry in store.list(VERSIONS))
        places += sorted({each[0] for each in found if each is not None and each[0].version == version})
    for place in dict.fromkeys(places):
        data = _read_prepared(store, place)
        if data is not None:
            published = decode_version(data, place.version, f"{store.shown}/{prepared_key(place)}")
            if published.version.place == place and published.version.history == history.id:
                return published, data
    facts = "no version is prepared" if version is None else f"no version {version} is prepared"
    raise NotFoundError(store.shown, facts, hint="dcr push --prepare prepares one")


def _read_prepared(store: Store, place: Place) -> bytes | None:
    return store.get(prepared_key(place), most_bytes=COMMIT_LIMIT, is_denied_absent=True)


def _check_follows(store: Store, log: Log, prepared: Published) -> None:
    """Raise an error unless a prepared version is a delta from the newest one, so that whoever comes to it could."""
    version = prepared.version
    before = log.require(version.number - 1)
    if not is_next(before, version):
        facts = f"the prepared version {version.number} does not follow the version before it"
        raise ConflictError(store.shown, facts, hint="push again")
    what = f"{store.shown}/{prepared_key(version.place)}"
    if version.delta is None:
        raise DamagedError(what, f"is no delta from the state of version {before.version.number}")
    check_follows(before, version, what)


def _give_up(store: Store, log: Log, prepared: Published) -> None:
    place = prepared.version.place
    hint = read_hint(store)
    if hint is not None and hint.place == place:
        write_hint(store, replace(hint, state=GIVEN_UP))
    store.delete(prepared_key(place))
    there = log.read(place.version, is_denied_absent=True)
    if there is not None and there.version.place == place:
        facts = f"version {place.version} was committed while it was given up"
        raise ConflictError(store.shown, facts, hint="push again: what it has published stays")
