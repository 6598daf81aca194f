"""Says how a remote is: its newest version, what is being made, who has got how far, and what lies there.

Where the remote does not let itself be listed, that is said, and the rest is told. It writes nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.digest import State
from dcr_cli.errors import DcrError
from dcr_cli.remote.acknowledgement import ACKNOWLEDGEMENT_KIND, read_acknowledgement
from dcr_cli.remote.hint import GIVEN_UP, read_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import (
    ACKNOWLEDGEMENTS,
    ANCHORS,
    APPLIED,
    COMMITS,
    STAGED,
    VERSIONS,
    AcknowledgementPlace,
    prepared_key,
)
from dcr_cli.remote.listing import Listing, list_if_allowed, sort_entries
from dcr_cli.remote.log import Log
from dcr_cli.remote.relay import RelayStatus, read_relay
from dcr_cli.remote.signing import Trust, trust_in
from dcr_cli.remote.version import ANCHOR, COMMIT_KIND, DELTA, Published
from dcr_cli.store.backend import Entry
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

_PREFIXES = {VERSIONS: "deltas", ANCHORS: "anchors", COMMITS: "commits", ACKNOWLEDGEMENTS: "acknowledgements"}


@dataclass(frozen=True, slots=True)
class Making:
    """The version that is being made: `state` is what its publisher says, `is_prepared` whether all of it is there but
    the commit, `staged` how many receivers have staged it, None where the remote does not list."""

    version: int
    id: str
    state: str
    is_prepared: bool
    staged: int | None
    created: str


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """The newest word of a receiver: that it has staged or applied a version, `age_seconds` ago by the store's time
    stamp. `lag` is how many versions are newer. `signers` are the keys that it names as its signers: the trusted ones
    that did sign it where keys were given, else what nobody has checked."""

    receiver: str
    version: int
    stage: str
    is_built: bool
    lag: int
    age_seconds: float | None
    signers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """The objects of one kind, and their bytes."""

    kind: str
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StatusResult:
    """How a remote is. What needs a listing is None where the remote gives none; `not_listed` says of what.

    `head` is the newest version, 0 if there is none; `signers` are the trusted keys that have signed it, None where
    none was given. `deltas` are the versions whose manifests are there, `anchors` those whose anchors are. `relay` is
    what a relay says of itself and of those below it, None where none is asked.
    """

    remote: str
    history: str
    encodings: tuple[str, ...]
    head: int
    kind: str | None
    target: State | None
    created: str | None
    publisher: str | None
    signers: tuple[str, ...] | None
    making: Making | None
    deltas: tuple[int, ...] | None
    anchors: tuple[int, ...] | None
    receivers: tuple[ReceiverStatus, ...] | None
    stored: tuple[Stored, ...]
    unknown: tuple[str, ...]
    not_listed: tuple[str, ...]
    relay: RelayStatus | None


def status(
    remote: str | Path,
    *,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
) -> StatusResult:
    """Look at a remote. Ages are from the store's time stamps to this machine's time.

    Raises NotFoundError where there is no remote, DamagedError, WrongBaseError, TransportError, UsageError.
    """
    trust = trust_in(trusted_keys, "--trusted-key")
    with open_store(remote, storage_options, is_look=True) as store:
        history = require_history(store)
        log = Log(store, history.id)
        head = log.newest(0)
        newest = log.require(head) if head else None
        found = {prefix: list_if_allowed(store, prefix) for prefix in _PREFIXES}
        listing = sort_entries(entry for entries in found.values() for entry in entries or ())
        return StatusResult(
            remote=store.shown,
            history=history.id,
            encodings=history.encodings,
            head=head,
            kind=None if newest is None else ANCHOR if newest.version.delta is None else DELTA,
            target=newest.version.target if newest is not None else None,
            created=newest.version.created if newest is not None else None,
            publisher=newest.version.publisher if newest is not None else None,
            signers=_signers(newest, trust),
            making=_making(store, log, head, listing if found[ACKNOWLEDGEMENTS] is not None else None),
            deltas=_versions(listing, VERSIONS) if found[VERSIONS] is not None else None,
            anchors=_versions(listing, ANCHORS) if found[ANCHORS] is not None else None,
            receivers=_receivers(store, listing, head, trust) if found[ACKNOWLEDGEMENTS] is not None else None,
            stored=tuple(
                _stored(_PREFIXES[prefix], entries) for prefix, entries in found.items() if entries is not None
            ),
            unknown=listing.unknown,
            not_listed=tuple(prefix for prefix, entries in found.items() if entries is None),
            relay=read_relay(store),
        )


def _signers(newest: Published | None, trust: Trust) -> tuple[str, ...] | None:
    if newest is None or not trust.is_asked_for:
        return None
    return tuple(key.hex() for key in trust.signers(newest.signed, COMMIT_KIND))


def _making(store: Store, log: Log, head: int, listing: Listing | None) -> Making | None:
    hint = read_hint(store)
    if hint is None or hint.history != log.history or hint.place.version <= head or hint.state == GIVEN_UP:
        return None
    is_prepared = store.stat(prepared_key(hint.place), is_denied_absent=True) is not None
    staged = None
    if listing is not None:
        words = listing.acknowledgements
        staged = sum(word.place == hint.place and word.stage == STAGED for word in words)
    return Making(hint.place.version, hint.place.id, hint.state, is_prepared, staged, hint.created)


def _versions(listing: Listing, prefix: str) -> tuple[int, ...]:
    held = listing.versions if prefix == VERSIONS else listing.anchors
    return tuple(sorted({place.version for place, each in held.items() if each.document is not None}))


def _receivers(store: Store, listing: Listing, head: int, trust: Trust) -> tuple[ReceiverStatus, ...]:
    by_receiver: dict[str, list[AcknowledgementPlace]] = defaultdict(list)
    for word in listing.acknowledgements:
        by_receiver[word.receiver].append(word)
    now = time.time()
    found = []
    for receiver, words in sorted(by_receiver.items()):
        # Of one version, what was applied was staged before.
        newest = max(words, key=lambda word: (word.place.version, word.stage == APPLIED))
        try:
            read = read_acknowledgement(store, newest)
        except DcrError:
            # Whoever may put one may put anything there: its key is all that it says then.
            read = None
        signed = read[1] if read is not None else None
        keys: Iterable[bytes] = ()
        if signed is not None and trust.is_asked_for:
            keys = trust.signers(signed, ACKNOWLEDGEMENT_KIND)
        elif signed is not None:
            keys = (key for key, _ in signed.signatures)
        modified = listing.acknowledgements[newest].modified
        found.append(
            ReceiverStatus(
                receiver=receiver,
                version=newest.place.version,
                stage=newest.stage,
                is_built=read is not None and read[0].is_built,
                lag=max(0, head - newest.place.version),
                age_seconds=max(0.0, round(now - modified, 3)) if modified is not None else None,
                signers=tuple(key.hex() for key in keys),
            )
        )
    return tuple(found)


def _stored(kind: str, entries: Sequence[Entry]) -> Stored:
    return Stored(kind, len(entries), sum(entry.size for entry in entries))
