"""Acknowledgements (FORMAT 13.8): a receiver's create-only word that it has staged a version, or is at it."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.delta.line import COMMIT_LIMIT, count, decode_line, encode_line, member, state_members, state_of
from dcr_cli.errors import DamagedError
from dcr_cli.remote.keys import (
    APPLIED,
    MOST_VERSION,
    STAGED,
    AcknowledgementPlace,
    Place,
    acknowledgement_key,
    check_receiver,
    is_id,
    is_receiver,
)
from dcr_cli.remote.signing import MAX_SIGNATURES_BYTES, Signed, SigningKey, split_signed
from dcr_cli.store.store import Store

ACKNOWLEDGEMENT_KIND = "acknowledgement"
_HINT = "nothing counts that it says; it may be removed"


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a receiver says of a version: that it is staged, perhaps `built` up to the turning of a link, or applied."""

    history: str
    place: Place
    receiver: str
    stage: str
    target: State
    is_built: bool
    created: str


def encode_acknowledgement(acknowledgement: Acknowledgement, key: SigningKey | None = None) -> bytes:
    """Encode an acknowledgement, signed if there is a key."""
    members = {
        "history": acknowledgement.history,
        "version": acknowledgement.place.version,
        "id": acknowledgement.place.id,
        "receiver": check_receiver(acknowledgement.receiver),
        "stage": acknowledgement.stage,
        "target": state_members(acknowledgement.target),
        "built": acknowledgement.is_built,
        "created": acknowledgement.created,
    }
    line = encode_line(members, "acknowledgement", limit=COMMIT_LIMIT - MAX_SIGNATURES_BYTES)
    return key.sign(line, ACKNOWLEDGEMENT_KIND) if key is not None else line


def decode_acknowledgement(data: bytes, what: str) -> tuple[Acknowledgement, Signed]:
    """Decode an acknowledgement, and the signatures below it, which are not checked here."""
    signed = split_signed(data, what)
    document = decode_line(signed.line, what, hint=_HINT)
    version = count(document, "version", MOST_VERSION + 1, what)
    stage, receiver = (member(document, key, str, what) for key in ("stage", "receiver"))
    if not version or not is_id(document.get("history")) or not is_id(document.get("id")):
        raise DamagedError(what, "its history, version or id is none", hint=_HINT)
    if stage not in (STAGED, APPLIED) or not is_receiver(receiver):
        raise DamagedError(what, f"its stage is neither {STAGED} nor {APPLIED}, or its receiver no name", hint=_HINT)
    acknowledgement = Acknowledgement(
        document["history"],
        Place(version, document["id"]),
        receiver,
        stage,
        state_of(document, "target", what),
        member(document, "built", bool, what),
        member(document, "created", str, what),
    )
    return acknowledgement, signed


def read_acknowledgement(store: Store, place: AcknowledgementPlace) -> tuple[Acknowledgement, Signed] | None:
    """Read the acknowledgement of a key; None if it is gone. DamagedError if it is not what its key says."""
    key = acknowledgement_key(*place)
    data = store.get(key, most_bytes=COMMIT_LIMIT)
    if data is None:
        return None
    what = f"{store.shown}/{key}"
    acknowledgement, signed = decode_acknowledgement(data, what)
    if (acknowledgement.place, acknowledgement.receiver, acknowledgement.stage) != place:
        raise DamagedError(what, "is another acknowledgement than its key says", hint=_HINT)
    return acknowledgement, signed
