"""Waiting until enough receivers have acknowledged a version (FORMAT 13.8)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError, UsageError
from dcr_cli.remote.acknowledgement import ACKNOWLEDGEMENT_KIND, read_acknowledgement
from dcr_cli.remote.keys import APPLIED, AcknowledgementPlace, acknowledgements_prefix, place_of_acknowledgement
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Version
from dcr_cli.stopping import pause
from dcr_cli.store.store import Store
from dcr_cli.waiting import tell

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many receivers have to be how far, and how long to wait for them.

    One that is at a version has staged it too. With `trust`, only acknowledgements count that one of its keys has
    signed, and each key counts once, whatever names its holder uses. `clock` and `sleep` are there for tests.
    """

    count: int
    stage: str
    timeout_seconds: float
    trust: Trust = field(default_factory=Trust)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = pause

    def __post_init__(self) -> None:
        """Raise UsageError if there is nobody to wait for, or never can be as many."""
        if self.count < 1:
            raise UsageError("quorum", f"a number of receivers from 1 on expected, found {self.count}")
        if self.trust.is_asked_for and self.count > len(self.trust.keys):
            facts = f"{self.count} receivers cannot sign with {len(self.trust.keys)} keys, each of which counts once"
            raise UsageError("quorum", facts, hint="give the keys of all receivers, or a smaller quorum")


def wait_for(
    store: Store, version: Version, quorum: Quorum, *, is_settled: Callable[[], bool] | None = None
) -> tuple[str, ...]:
    """Wait until so many receivers have acknowledged a version: their names. ConflictError if time is up before.

    `is_settled` says whether what becomes of a version that is only prepared is certain, so that nobody is waited for
    any more; it is asked each time that not enough of them are there, and last. Without it the version is published.
    """
    began = quorum.clock()
    wait = _FIRST_WAIT_SECONDS
    known: dict[str, tuple[bytes | str, ...]] = {}
    while True:
        names = _acknowledged(store, version, quorum, known)
        if len(names) >= quorum.count:
            return names
        if is_settled is not None and is_settled():
            return names
        waited = quorum.clock() - began
        left = quorum.timeout_seconds - waited
        facts = f"{len(names)} of {quorum.count} receivers have {quorum.stage} version {version.number}"
        if left <= 0:
            facts += " in time"
            facts += "; it is published all the same" if is_settled is None else ""
            hint = f"dcr status {shlex.quote(store.shown)} says how far each receiver is"
            error = ConflictError(store.shown, facts, hint=hint)
            error.details = {"committed": is_settled is None}
            raise error
        tell(store.shown, facts, waited_seconds=waited, left_seconds=left)
        quorum.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _acknowledged(
    store: Store, version: Version, quorum: Quorum, known: dict[str, tuple[bytes | str, ...]]
) -> tuple[str, ...]:
    """The receivers that count, by name; `known` is who is behind each acknowledgement that was read and counts."""
    by_voice: dict[bytes | str, str] = {}
    for entry in store.list(acknowledgements_prefix(version.place)):
        place = place_of_acknowledgement(entry.key)
        if place is None or place.stage not in (quorum.stage, APPLIED):
            continue
        # One that is listed and cannot be got yet is asked for again.
        voices = known.get(entry.key) or _voices(store, version, place, quorum.trust)
        known[entry.key] = voices
        for voice in voices:
            by_voice.setdefault(voice, place.receiver)
    return tuple(sorted(by_voice.values()))


def _voices(store: Store, version: Version, place: AcknowledgementPlace, trust: Trust) -> tuple[bytes | str, ...]:
    """Whose word an acknowledgement is: the keys that signed it, or where none has to, the receiver's name."""
    try:
        found = read_acknowledgement(store, place)
    except (DamagedError, UnsupportedError):
        # Whoever may acknowledge may write anything; that is no reason not to count the others.
        return ()
    if found is None or (found[0].history, found[0].target) != (version.history, version.target):
        return ()
    return trust.signers(found[1], ACKNOWLEDGEMENT_KIND) if trust.is_asked_for else (place.receiver,)
