"""What a receiver says to a remote: that it has staged a version, or is at it. One without a name says nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.remote.acknowledgement import Acknowledgement, encode_acknowledgement
from dcr_cli.remote.keys import Place, acknowledgement_key
from dcr_cli.remote.signing import SigningKey
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class Speaker:
    """A receiver's name, and the key that signs what it says, if it has one."""

    name: str
    key: SigningKey | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """What is said of a version."""

    history: str
    place: Place
    target: State
    stage: str
    is_built: bool = False


def say(store: Store, speaker: Speaker, word: Word, now_seconds: float) -> None:
    """Write an acknowledgement, unless it was written before; TransportError if that is denied."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_seconds))
    acknowledgement = Acknowledgement(
        word.history, word.place, speaker.name, word.stage, word.target, word.is_built, created
    )
    key = acknowledgement_key(word.place, speaker.name, word.stage)
    # Whoever has said it before with another time has said the same.
    store.put_if_absent(key, encode_acknowledgement(acknowledgement, speaker.key))
