"""Who asks a relay, and what each has been given (FORMAT 15.4): an account for people, on which nothing depends but
what a spool lets go of first."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.document import FORMAT
from dcr_cli.errors import DcrError
from dcr_cli.remote.keys import is_receiver

RELAY, RECEIVER, OTHER = "relay", "receiver", "other"
RELAY_HEADER, RECEIVER_HEADER = "Dcr-Relay", "Dcr-Receiver"
# Of what one child says of itself, and of what all do.
MOST_STATUS_BYTES, _MOST_BYTES = 256 << 10, 8 << 20
_MOST_CHILDREN = 10_000
# Who has asked for nothing for so long is gone: three times what one who waits lets pass before it asks again.
_GONE_SECONDS = 90.0
# And is none any more.
_FORGOTTEN_SECONDS = 600.0


@dataclass(slots=True, eq=False)
class Child:
    """One who asks. `version` is the newest whose commit it was given; `status` what it has said of itself; `asking`
    how many of its requests are not answered, and `has_left` that all connections that it had have ended."""

    name: str
    kind: str
    address: str
    version: int | None = None
    sent_bytes: int = 0
    seen_at: float = 0.0
    status: dict[str, Any] | None = None
    status_bytes: int = 0
    asking: int = 0
    has_left: bool = False
    connections: set[object] = field(default_factory=set)


@dataclass(slots=True)
class Children:
    """All who have asked lately; `clock` is there for tests."""

    clock: Callable[[], float] = time.monotonic
    sent_bytes: int = 0
    _all: OrderedDict[tuple[str, str, str], Child] = field(default_factory=OrderedDict)
    # Whose a connection is: of one that goes through a proxy, many may be.
    _of: dict[object, set[Child]] = field(default_factory=dict)

    def seen(self, relay: str | None, receiver: str | None, address: str, *, connection: object | None) -> Child:
        """The child that asks now, on a connection, None if that has ended since: by its name, if it says one, else by
        its address."""
        kind, name = OTHER, address
        if relay is not None and is_receiver(relay):
            kind, name = RELAY, relay
        elif receiver is not None and is_receiver(receiver):
            kind, name = RECEIVER, receiver
        key = kind, name, address
        child = self._all.get(key)
        if child is None:
            child = self._all[key] = Child(name, kind, address)
        child.seen_at = self.clock()
        if connection is not None:
            child.connections.add(connection)
            self._of.setdefault(connection, set()).add(child)
        child.has_left = not child.connections
        self._all.move_to_end(key)
        if len(self._all) > _MOST_CHILDREN:
            self._forget_first()
        return child

    def ended(self, connection: object) -> None:
        """A connection has ended: who has no other one has left."""
        for child in self._of.pop(connection, ()):
            child.connections.discard(connection)
            child.has_left = not child.connections

    def is_gone(self, child: Child) -> bool:
        """Whether a child has left, or has asked for nothing for so long that it may have."""
        return child.has_left or (not child.asking and self.clock() - child.seen_at > _GONE_SECONDS)

    def sent(self, child: Child, size: int) -> None:
        """Count bytes that a child was given."""
        child.seen_at = self.clock()
        child.sent_bytes += size
        self.sent_bytes += size

    def take_status(self, child: Child, status: dict[str, Any], size: int) -> bool:
        """Keep what a child says of itself, which has so many bytes, if there is room: whether there is."""
        others = sum(each.status_bytes for each in self.present() if each is not child)
        if others + size > _MOST_BYTES:
            return False
        child.status, child.status_bytes = status, size
        return True

    def present(self) -> list[Child]:
        """All who have asked for something lately."""
        now = self.clock()
        while self._all and now - next(iter(self._all.values())).seen_at > _FORGOTTEN_SECONDS:
            self._forget_first()
        return list(self._all.values())

    def needed_from(self, head: int) -> int:
        """The first version that a child may still ask for."""
        versions = [child.version for child in self.present() if child.version is not None]
        return min(versions, default=head) + 1

    def documents(self, head: int) -> list[dict[str, Any]]:
        """The children as the status has them."""
        now = self.clock()
        return [
            {
                "name": child.name,
                "kind": child.kind,
                "address": child.address,
                "version": child.version,
                "lag": max(0, head - child.version) if child.version is not None else None,
                "sent_bytes": child.sent_bytes,
                "seen_seconds": round(now - child.seen_at, 3),
                "is_gone": self.is_gone(child),
                "status": child.status,
            }
            for child in self.present()
        ]

    def _forget_first(self) -> None:
        child = self._all.popitem(last=False)[1]
        for connection in child.connections:
            self._of[connection].discard(child)


def read_status(data: bytes, name: str) -> dict[str, Any] | None:
    """What a child says of itself; None if it is no such thing. It is shown, and nothing depends on it."""
    try:
        document = strict_json(data, name)
    except DcrError:
        return None
    is_its = isinstance(document, dict) and document.get("relay") == name and document.get("format") == FORMAT
    return document if is_its and len(json.dumps(document)) <= MOST_STATUS_BYTES else None
