"""dcr.json: which history a remote holds, made once (FORMAT 13.2)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.delta.line import COMMIT_LIMIT, decode_line, encode_line, member
from dcr_cli.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from dcr_cli.remote.keys import HISTORY_KEY, is_id
from dcr_cli.store.store import Store

ENCODINGS = ("context", "gap", "whole")


@dataclass(frozen=True, slots=True)
class History:
    """A history's id, and the encodings that its deltas may have: those that all of its receivers decode."""

    id: str
    encodings: tuple[str, ...]
    created: str
    publisher: str


def encode_history(history: History) -> bytes:
    """Encode dcr.json as one line of JSON."""
    members = {
        "history": history.id,
        "encodings": list(history.encodings),
        "created": history.created,
        "publisher": history.publisher,
    }
    return encode_line(members, HISTORY_KEY)


def decode_history(data: bytes, what: str) -> History:
    """Decode dcr.json; UnsupportedError if it allows an encoding that is not known here."""
    document = decode_line(data, what, hint="is this the address of a remote?")
    encodings = member(document, "encodings", list, what)
    if not is_id(document.get("history")):
        raise DamagedError(what, "history is not an id")
    if not encodings or not all(isinstance(encoding, str) for encoding in encodings):
        raise DamagedError(what, "encodings is not a list of names")
    if len(set(encodings)) < len(encodings):
        raise DamagedError(what, "encodings has a name twice")
    unknown = sorted(set(encodings).difference(ENCODINGS))
    if unknown:
        facts = f"allows encodings unknown to this dcr: {listed(unknown)}"
        raise UnsupportedError(what, facts, hint="it needs a newer dcr")
    created, publisher = (member(document, key, str, what) for key in ("created", "publisher"))
    return History(document["history"], tuple(encodings), created, publisher)


def read_history(store: Store, *, is_denied_absent: bool = False) -> History | None:
    """Read which history a remote holds; None if it holds none, or if access is denied and that is said to mean so."""
    data = store.get(HISTORY_KEY, most_bytes=COMMIT_LIMIT, is_denied_absent=is_denied_absent)
    return decode_history(data, f"{store.shown}/{HISTORY_KEY}") if data is not None else None


def check_folder(store: Store) -> None:
    """Raise NotFoundError if a remote is a local folder that is not there, as on a disk that is not mounted; UsageError
    if it is one in which a checkpoint lies."""
    if store.missing_folder is not None:
        hint = "check its spelling, and that its disk is mounted; dcr push makes a remote"
        raise NotFoundError(store.shown, "no such folder", hint=hint)
    if store.folder is not None and any(path.is_file() for path in store.folder.glob(f"*{SHARD_SUFFIX}")):
        hint = "REMOTE comes first in dcr pull, and last in dcr push"
        raise UsageError(store.shown, "is a checkpoint, and no remote", hint=hint)


def check_can_begin(store: Store) -> None:
    """Raise NotFoundError if a remote is a local folder that is to lie in one which is not there either: on a disk that
    is not mounted a history would begin that nobody else finds."""
    missing = store.missing_folder
    if missing is not None and not os.path.lexists(missing.parent):
        above = shlex.quote(str(missing.parent))
        hint = f"check that its disk is mounted; where it is, mkdir -p {above}"
        raise NotFoundError(store.shown, f"there is no folder {shown(str(missing.parent))} to make it in", hint=hint)


def require_history(store: Store) -> History:
    """Read which history a remote holds; NotFoundError if it holds none."""
    history = read_history(store)
    if history is None:
        check_folder(store)
        hint = f"dcr push CHECKPOINT {shlex.quote(store.shown)} makes one"
        raise NotFoundError(store.shown, f"holds no versions: it has no {HISTORY_KEY}", hint=hint)
    return history
