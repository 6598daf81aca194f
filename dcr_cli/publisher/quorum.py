"""Waiting until enough receivers have acknowledged a version (FORMAT 13.8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcr_cli.errors import ConflictError, DamagedError
from dcr_cli.remote.acknowledgement import ACKNOWLEDGEMENT_KIND, read_acknowledgement
from dcr_cli.remote.keys import APPLIED, acknowledgements_prefix, place_of_acknowledgement
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Version
from dcr_cli.store.store import Store

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many receivers have to be how far, and how long to wait for them.

    One that is at a version has staged it too. With `trust`, only those count whose acknowledgements it has signed.
    `clock` and `sleep` are there for tests.
    """

    count: int
    stage: str
    timeout_seconds: float
    trust: Trust = field(default_factory=Trust)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def wait_for(store: Store, version: Version, quorum: Quorum, *, is_committed: bool) -> tuple[str, ...]:
    """Wait until so many receivers have acknowledged a version: their names. ConflictError if time is up before."""
    began = quorum.clock()
    wait = _FIRST_WAIT_SECONDS
    known: dict[str, bool] = {}
    while True:
        names = _acknowledged(store, version, quorum, known)
        if len(names) >= quorum.count:
            return names
        left = quorum.timeout_seconds - (quorum.clock() - began)
        if left <= 0:
            facts = f"{len(names)} of {quorum.count} receivers have {quorum.stage} version {version.number} in time"
            error = ConflictError(store.shown, facts, hint="dcr status says how far each receiver is")
            error.details = {"committed": is_committed}
            raise error
        quorum.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _acknowledged(store: Store, version: Version, quorum: Quorum, known: dict[str, bool]) -> tuple[str, ...]:
    """The receivers whose acknowledgements count; `known` is what was found out about each object."""
    names = set()
    for entry in store.list(acknowledgements_prefix(version.place)):
        place = place_of_acknowledgement(entry.key)
        if place is None or place.stage not in (quorum.stage, APPLIED):
            continue
        if entry.key not in known:
            try:
                found = read_acknowledgement(store, place)
            except DamagedError:
                # Whoever may acknowledge may write anything; that is no reason not to count the others.
                found = None
            known[entry.key] = (
                found is not None
                and found[0].history == version.history
                and found[0].target == version.target
                and (not quorum.trust.is_asked_for or bool(quorum.trust.signers(found[1], ACKNOWLEDGEMENT_KIND)))
            )
        if known[entry.key]:
            names.add(place.receiver)
    return tuple(sorted(names))
