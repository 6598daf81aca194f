"""next.json (FORMAT 13.7): a word about the version that is being made. The only object that changes; never trusted."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.delta.line import COMMIT_LIMIT, count, decode_line, encode_line, member
from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.remote.keys import HINT_KEY, MOST_VERSION, Place, is_id
from dcr_cli.store.store import Store

STREAMING, PREPARED, GIVEN_UP = "streaming", "prepared", "given up"


@dataclass(frozen=True, slots=True)
class Hint:
    """Which version is being made, and how far it is."""

    history: str
    place: Place
    state: str
    created: str


def encode_hint(hint: Hint) -> bytes:
    """Encode a hint as one line of JSON."""
    members = {
        "history": hint.history,
        "version": hint.place.version,
        "id": hint.place.id,
        "state": hint.state,
        "created": hint.created,
    }
    return encode_line(members, HINT_KEY)


def decode_hint(data: bytes) -> Hint | None:
    """Read a hint; None if it is none. Whatever it says may be wrong."""
    try:
        document = decode_line(data, HINT_KEY)
        version = count(document, "version", MOST_VERSION + 1, HINT_KEY)
        texts = (member(document, key, str, HINT_KEY) for key in ("history", "id", "state", "created"))
        history, own, state, created = texts
    except DcrError:
        return None
    if not (version and is_id(history) and is_id(own) and state in (STREAMING, PREPARED, GIVEN_UP)):
        return None
    return Hint(history, Place(version, own), state, created)


def read_hint(store: Store) -> Hint | None:
    """Read the hint of a remote; None if there is none, or none that can be read."""
    try:
        return require_hint(store)
    except DcrError:
        return None


def require_hint(store: Store) -> Hint | None:
    """The same for whoever may do harm without it: None if there is none, DamagedError if what is there is none, and
    TransportError or LocalError if that cannot be told."""
    data = store.get(HINT_KEY, most_bytes=COMMIT_LIMIT)
    if data is None:
        return None
    hint = decode_hint(data)
    if hint is None:
        raise DamagedError(f"{store.shown}/{HINT_KEY}", "is no hint that can be understood")
    return hint


def write_hint(store: Store, hint: Hint) -> None:
    """Write the hint of a remote over the one before."""
    store.put(HINT_KEY, encode_hint(hint))
