"""decision.json (FORMAT 13.5): whether a prepared version becomes one, created once, so that all hear the same."""

from __future__ import annotations

from dcr_cli.delta.line import COMMIT_LIMIT, count, decode_line, encode_line, member
from dcr_cli.errors import DamagedError
from dcr_cli.remote.keys import MOST_VERSION, Place, decision_key, is_id
from dcr_cli.store.store import Store

COMMIT, ABORT = "commit", "abort"
_HINT = "a new push --prepare makes another version, which nobody has decided about"


def encode_decision(history: str, place: Place, decision: str) -> bytes:
    """Encode a decision as one line of JSON; the same decision gives the same bytes."""
    members = {"history": history, "version": place.version, "id": place.id, "decision": decision}
    return encode_line(members, "decision")


def decode_decision(data: bytes, history: str, place: Place, what: str) -> str:
    """What was decided of a place; DamagedError if it is no decision of this one."""
    document = decode_line(data, what, hint=_HINT)
    found = count(document, "version", MOST_VERSION + 1, what)
    if not is_id(document.get("history")) or (document["history"], found, document.get("id")) != (history, *place):
        raise DamagedError(what, "its history, version or id is not that of its key", hint=_HINT)
    decision: str = member(document, "decision", str, what)
    if decision not in (COMMIT, ABORT):
        raise DamagedError(what, f"its decision is neither {COMMIT} nor {ABORT}", hint=_HINT)
    return decision


def read_decision(store: Store, history: str, place: Place) -> str | None:
    """Read what was decided of a place; None if nothing was."""
    key = decision_key(place)
    data = store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True)
    return decode_decision(data, history, place, f"{store.shown}/{key}") if data is not None else None


def decide(store: Store, history: str, place: Place, wanted: str) -> str:
    """Decide about a prepared version, unless somebody has: what is decided, for good."""
    key = decision_key(place)
    if store.put_if_absent(key, encode_decision(history, place, wanted)):
        return wanted
    data = store.get(key, most_bytes=COMMIT_LIMIT)
    if data is None:
        raise DamagedError(f"{store.shown}/{key}", "was there, and is no more", hint=_HINT)
    return decode_decision(data, history, place, f"{store.shown}/{key}")
