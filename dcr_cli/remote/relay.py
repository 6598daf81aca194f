"""What a relay says of itself and of its children (FORMAT 15.4). It is told to people, and nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.document import check_format, check_requires
from dcr_cli.delta.line import BYTES_LIMIT, count, member
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError
from dcr_cli.remote.keys import MOST_VERSION
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store

T = TypeVar("T")

STATUS_KEY = "status"
RELAY, RECEIVER, OTHER = "relay", "receiver", "other"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RelayParent:
    """One that a relay fetches from: whether it is the one that is used, and whether it answers."""

    shown: str
    is_used: bool
    is_answering: bool


@dataclass(frozen=True, slots=True)
class RelaySpool:
    """What a relay keeps, and how many bytes it may be at most, None where nothing limits it."""

    objects: int
    bytes: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class RelayNext:
    """The version that the relay's next.json says is being made."""

    version: int
    id: str
    state: str


@dataclass(frozen=True, slots=True)
class RelayChild:
    """One that asks a relay: `version` is the newest whose commit it has got, `lag` how many are newer, each None where
    that is not known; `status` what a relay has said of itself. One that `is_gone` has ended, or is not heard any more.
    """

    name: str
    kind: str
    address: str
    version: int | None
    lag: int | None
    sent_bytes: int
    seen_seconds: float
    is_gone: bool
    status: RelayStatus | None


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """How a relay is. `head` is the newest version, 0 if there is none; `history` is None before there is one."""

    relay: str
    started: str
    now: str
    history: str | None
    head: int
    next: RelayNext | None
    parents: tuple[RelayParent, ...]
    spool: RelaySpool
    received_bytes: int
    sent_bytes: int
    children: tuple[RelayChild, ...]


def read_relay(store: Store) -> RelayStatus | None:
    """Ask a server how it is as a relay; None if it is none, or says nothing that can be understood."""
    if not store.may_be_relay:
        return None
    try:
        data = store.get(STATUS_KEY, most_bytes=_MOST_BYTES, is_denied_absent=True)
        return decode_relay(data, f"{store.shown}/{STATUS_KEY}") if data is not None else None
    except (RefusedError, DamagedError, UnsupportedError):
        # Any other server may have anything there.
        return None


def decode_relay(data: bytes, what: str) -> RelayStatus:
    """Decode what a relay says of itself; members that are not known are passed over."""
    return _status(strict_json(data, what), what)


def _status(document: Any, what: str) -> RelayStatus:
    members = _object(document, what)
    check_format(members.get("format"), what)
    check_requires(members.get("requires"), what)
    relay, started, now = (member(members, key, str, what) for key in ("relay", "started", "now"))
    return RelayStatus(
        relay=relay,
        started=started,
        now=now,
        history=_or_none(members, "history", what, lambda: member(members, "history", str, what)),
        head=count(members, "head", MOST_VERSION + 1, what),
        next=_or_none(members, "next", what, lambda: _next(members["next"], what)),
        parents=tuple(_parent(each, what) for each in member(members, "parents", list, what)),
        spool=_spool(member(members, "spool", dict, what), what),
        received_bytes=count(members, "received_bytes", BYTES_LIMIT, what),
        sent_bytes=count(members, "sent_bytes", BYTES_LIMIT, what),
        children=tuple(_child(each, what) for each in member(members, "children", list, what)),
    )


def _next(document: Any, what: str) -> RelayNext:
    members = _object(document, what)
    number = count(members, "version", MOST_VERSION + 1, what)
    return RelayNext(number, member(members, "id", str, what), member(members, "state", str, what))


def _parent(document: Any, what: str) -> RelayParent:
    members = _object(document, what)
    is_used, is_answering = (member(members, key, bool, what) for key in ("is_used", "is_answering"))
    return RelayParent(member(members, "shown", str, what), is_used, is_answering)


def _spool(members: Mapping[str, Any], what: str) -> RelaySpool:
    objects, size = (count(members, key, BYTES_LIMIT, what) for key in ("objects", "bytes"))
    limit = _or_none(members, "limit", what, lambda: count(members, "limit", BYTES_LIMIT, what))
    return RelaySpool(objects, size, limit)


def _child(document: Any, what: str) -> RelayChild:
    members = _object(document, what)
    name, kind, address = (member(members, key, str, what) for key in ("name", "kind", "address"))
    if kind not in (RELAY, RECEIVER, OTHER):
        raise DamagedError(what, "kind is none of a child")
    seen: Any = members.get("seen_seconds")
    # A bool is an int to Python, not to JSON.
    if type(seen) not in (int, float) or not 0 <= seen < BYTES_LIMIT:
        raise DamagedError(what, "seen_seconds is no time")
    return RelayChild(
        name=name,
        kind=kind,
        address=address,
        version=_or_none(members, "version", what, lambda: count(members, "version", MOST_VERSION + 1, what)),
        lag=_or_none(members, "lag", what, lambda: count(members, "lag", MOST_VERSION + 1, what)),
        sent_bytes=count(members, "sent_bytes", BYTES_LIMIT, what),
        seen_seconds=float(seen),
        # Not every relay says it.
        is_gone=member(members, "is_gone", bool, what) if "is_gone" in members else False,
        status=_of_child(members.get("status"), what),
    )


def _of_child(document: Any, what: str) -> RelayStatus | None:
    """What a child has said; whatever that was, it is no fault of the relay that passes it on."""
    try:
        return _status(document, what) if document is not None else None
    except DcrError:
        return None


def _object(document: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise DamagedError(what, "has something else where an object is expected")
    return document


def _or_none(members: Mapping[str, Any], key: str, what: str, decode: Callable[[], T]) -> T | None:
    """What a member is, which has to be there and may be null."""
    if key not in members:
        raise DamagedError(what, f"{key} is missing")
    return decode() if members[key] is not None else None
