"""Whether what a stopped publisher has sent can be gone on with: it must not have become so old that it is pruned.

Ages are by the store's own time, which it tells of an object that was just written, as those are by which prunes go.
"""

from __future__ import annotations

import json

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.durable import Folder
from dcr_cli.errors import DcrError
from dcr_cli.publisher.outgoing import OUTGOING
from dcr_cli.remote.hint import Hint, write_hint
from dcr_cli.remote.keys import HINT_KEY
from dcr_cli.retention import GRACE_SECONDS
from dcr_cli.store.backend import Status
from dcr_cli.store.store import Store

# A prune that begins later than this lets it be for as long again; one that began before has seen that it is young.
YOUNG_SECONDS = GRACE_SECONDS / 2
_NAME = f"{OUTGOING}/begun.json"
_LIMIT = 1 << 10


def announce(store: Store, hint: Hint) -> Status | None:
    """Write a hint; when that was by the store's time. None if that may not be asked."""
    write_hint(store, hint)
    return store.stat(HINT_KEY, is_denied_absent=True)


def note_beginning(home: Folder, status: Status | None) -> None:
    """Note when what is being sent was begun, unless that is noted, or not known."""
    if status is not None and home.status(_NAME) is None:
        home.replace_file(_NAME, json.dumps({"modified": status.modified}).encode())


def is_begun(home: Folder) -> bool:
    """Whether it is noted when what is being sent was begun."""
    return home.status(_NAME) is not None


def is_young(home: Folder, now: Status | None) -> bool:
    """Whether what is being sent was begun so short a time before `now` that no prune takes it for given up.

    Where a store tells no times, nothing is ever too old, as no prune removes it either.
    """
    try:
        text = home.read(_NAME, _LIMIT)
        begun = strict_json(text, _NAME)["modified"] if text is not None else ""
    except (DcrError, ValueError, TypeError, KeyError):
        return False
    return (begun is None or isinstance(begun, int | float)) and is_young_since(begun, now)


def is_young_since(begun: float | None, now: Status | None) -> bool:
    """The same of what was begun at a time of the store's."""
    if now is None or begun is None or now.modified is None:
        return now is not None and begun is None and now.modified is None
    return abs(now.modified - begun) < YOUNG_SECONDS
