"""Makes a prepared version exist once enough receivers have staged it, or gives it up (FORMAT 13.8).

No key is needed: the commit was made, and signed, when the version was prepared.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dcr_cli.arguments import check_version
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UsageError
from dcr_cli.publisher.committing import Outcome, create_commit
from dcr_cli.publisher.quorum import Quorum, wait_for
from dcr_cli.remote.decision import ABORT, COMMIT, decide, read_decision
from dcr_cli.remote.hint import GIVEN_UP, read_hint, write_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import STAGED, VERSIONS, Place, place_of_version, prepared_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import trust_in
from dcr_cli.remote.version import Published, check_follows, decode_version, is_next
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

__all__ = ["CommitResult", "commit"]

_ANOTHER = "dcr push --prepare prepares another one"


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a prepared version. `committed`: it exists; `already`: another one has seen to that. `staged` are
    the receivers that had staged it, as far as they were counted. After a dry run it is as it was."""

    remote: str
    version: int
    id: str
    committed: bool
    already: bool
    staged: tuple[str, ...]
    dry_run: bool = False


def commit(
    remote: str | os.PathLike[str],
    version: int | None = None,
    *,
    quorum: int | None = None,
    timeout_seconds: float = 0.0,
    receivers: Sequence[str] = (),
    abort: bool = False,
    dry_run: bool = False,
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> CommitResult:
    """Make the prepared version of `remote` exist when `quorum` receivers have staged it, or with `abort` give it up.

    `receivers` are the public keys, or files with them, whose acknowledgements alone count. Without `version` it is the
    one that the remote's hint names. Committing twice is harmless, and so is giving up twice; of the two what was begun
    first holds, also for who comes when that one is gone. A dry run waits for nobody, and changes nothing. Raises
    NotFoundError (nothing is prepared), ConflictError (the quorum is not reached in time, another version was faster,
    it was given up, or with `abort` it is decided that it is committed), DamagedError (it does not start where the
    version before ends), TransportError, UsageError.
    """
    check_version(version)
    patience = 0.0 if dry_run else timeout_seconds
    wanted = Quorum(quorum, STAGED, patience, trust_in(receivers, "--receivers")) if quorum is not None else None
    if receivers and wanted is None:
        facts = "says whose word counts, and nobody is waited for"
        raise UsageError("--receivers", facts, hint="--quorum K waits for K of them")
    if abort and wanted is not None:
        raise UsageError("commit", "--abort and --quorum exclude each other", hint="dcr commit --help")
    with open_store(remote, storage_options, is_single_writer=single_writer) as store:
        log = Log(store, require_history(store).id)
        found = _find_prepared(store, log, version)
        place = found.place
        if _is_version(store, log, place):
            return CommitResult(store.shown, place.version, place.id, True, True, (), dry_run)
        if abort:
            _give_up(store, log, place, dry_run=dry_run)
            return CommitResult(store.shown, place.version, place.id, False, False, (), dry_run)
        if found.prepared is None:
            raise _given_up(store, place)
        _check_follows(store, log, found.prepared)
        staged: tuple[str, ...] = ()
        if wanted is not None:
            is_settled = partial(_is_settled, store, log, place)
            staged = wait_for(store, found.prepared.version, wanted, is_settled=is_settled)
            if _is_version(store, log, place):
                return CommitResult(store.shown, place.version, place.id, True, True, staged, dry_run)
        if dry_run:
            if read_decision(store, log.history, place) == ABORT:
                raise _given_up(store, place)
            return CommitResult(store.shown, place.version, place.id, False, False, staged, dry_run)
        # Only what is still prepared after it was decided is so for good: who prunes takes a decision along at last.
        if decide(store, log.history, place, COMMIT) != COMMIT or _read_prepared(store, place) is None:
            raise _given_up(store, place)
        outcome, published = create_commit(store, log, found.prepared.data, place.version)
        is_theirs = outcome is Outcome.SAME and published.version.place != place
        return CommitResult(store.shown, place.version, published.version.place.id, True, is_theirs, staged)


def _is_version(store: Store, log: Log, place: Place) -> bool:
    """Whether what was prepared at a place exists; ConflictError if another version was faster."""
    there = log.read(place.version, is_denied_absent=True)
    if there is not None and there.version.place != place:
        facts = f"version {place.version} was taken by {there.version.place.id}, and what was prepared is given up"
        raise ConflictError(store.shown, facts, hint=_ANOTHER)
    return there is not None


def _is_settled(store: Store, log: Log, place: Place) -> bool:
    """Whether what was prepared exists, or it is decided that it will; ConflictError if it never can.

    What was decided was decided after enough receivers had been counted; whoever did so may be gone.
    """
    if _is_version(store, log, place):
        return True
    decision = read_decision(store, log.history, place)
    if decision == ABORT:
        raise _given_up(store, place)
    return decision == COMMIT


@dataclass(frozen=True, slots=True)
class _Found:
    """The place of a version that was prepared, and its commit to be; None if that was given up."""

    place: Place
    prepared: Published | None


def _find_prepared(store: Store, log: Log, version: int | None) -> _Found:
    """The prepared version that the hint names, or of number `version`; else one of these that was given up."""
    hint = read_hint(store)
    places = []
    if hint is not None and hint.history == log.history and version in (None, hint.place.version):
        places.append(hint.place)
    if version is not None:
        found = (place_of_version(entry.key) for entry in store.list(VERSIONS))
        places += sorted({each[0] for each in found if each is not None and each[0].version == version})
    places = list(dict.fromkeys(places))
    for place in places:
        data = _read_prepared(store, place)
        if data is not None:
            published = decode_version(data, place.version, f"{store.shown}/{prepared_key(place)}")
            if published.version.place == place and published.version.history == log.history:
                return _Found(place, published)
    for place in places:
        if read_decision(store, log.history, place) == ABORT:
            return _Found(place, None)
    facts = "no version is prepared" if version is None else f"no version {version} is prepared"
    # What had been prepared before is given up by a push that publishes another state in its place.
    made = next((place for place in places if log.read(place.version, is_denied_absent=True) is not None), None)
    if made is not None:
        facts += f": a push has published version {made.version}"
    raise NotFoundError(store.shown, facts, hint=_ANOTHER)


def _read_prepared(store: Store, place: Place) -> bytes | None:
    return store.get(prepared_key(place), most_bytes=COMMIT_LIMIT, is_denied_absent=True)


def _given_up(store: Store, place: Place) -> ConflictError:
    facts = f"version {place.version} was given up"
    return ConflictError(store.shown, facts, hint=_ANOTHER)


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


def _give_up(store: Store, log: Log, place: Place, *, dry_run: bool) -> None:
    """Give a prepared version up, or go on with that; ConflictError if it is decided to be committed, and that alone
    by a dry run."""
    decided = read_decision(store, log.history, place) if dry_run else decide(store, log.history, place, ABORT)
    if decided == COMMIT:
        facts = f"version {place.version} cannot be given up: it is decided that it is committed"
        mend = f"dcr commit {shlex.quote(store.shown)} {place.version} sees that it is"
        raise ConflictError(store.shown, facts, hint=mend)
    if dry_run:
        return
    hint = read_hint(store)
    if hint is not None and hint.place == place:
        write_hint(store, replace(hint, state=GIVEN_UP))
    store.delete(prepared_key(place))
