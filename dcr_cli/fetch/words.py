"""What a receiver says to a remote: that it has staged a version, or is at it. One without a name says nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.errors import ConflictError, DamagedError, UnsupportedError
from dcr_cli.remote.acknowledgement import (
    ACKNOWLEDGEMENT_KIND,
    Acknowledgement,
    encode_acknowledgement,
    read_acknowledgement,
)
from dcr_cli.remote.keys import AcknowledgementPlace, Place, acknowledgement_key
from dcr_cli.remote.signing import SigningKey, Trust
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class Speaker:
    """A receiver's name, and the key that signs what it says, if it has one."""

    name: str
    key: SigningKey | None = None

    @property
    def voice(self) -> str:
        """The name and the public key, by which it is known whose word was written."""
        return f"{self.name} {self.key.public.hex()}" if self.key is not None else self.name


@dataclass(frozen=True, slots=True)
class Word:
    """What is said of a version."""

    history: str
    place: Place
    target: State
    stage: str
    is_built: bool = False


def say(store: Store, speaker: Speaker, word: Word, now_seconds: float) -> None:
    """Write an acknowledgement, unless it was written before.

    TransportError if that is denied, ConflictError if somebody else has said something by this name, or signed it.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_seconds))
    acknowledgement = Acknowledgement(
        word.history, word.place, speaker.name, word.stage, word.target, word.is_built, created
    )
    key = acknowledgement_key(word.place, speaker.name, word.stage)
    if not store.put_if_absent(key, encode_acknowledgement(acknowledgement, speaker.key)):
        _check_said(store, speaker, word)


def _check_said(store: Store, speaker: Speaker, word: Word) -> None:
    """Raise ConflictError unless what is there says the same; whoever has said it before has said it at another
    time."""
    place = AcknowledgementPlace(word.place, speaker.name, word.stage)
    try:
        said = read_acknowledgement(store, place)
    except (DamagedError, UnsupportedError):
        said = None
    trust = Trust(frozenset({speaker.key.public})) if speaker.key is not None else Trust()
    is_same = said is not None and (said[0].history, said[0].target) == (word.history, word.target)
    if said is not None and is_same and (not trust.is_asked_for or trust.signers(said[1], ACKNOWLEDGEMENT_KIND)):
        return
    what = f"{store.shown}/{acknowledgement_key(*place)}"
    facts = f"is not by this receiver: the name {speaker.name} is in use, and this one is not counted"
    raise ConflictError(what, facts, hint="give each receiver a --receiver NAME of its own")
