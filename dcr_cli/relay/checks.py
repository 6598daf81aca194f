"""What makes an object right (FORMAT 15.6): documents as a whole, bodies piece by piece while they come.

Where it comes from, and what the digests are that bind it, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.digest import ObjectHasher, parse_blake3
from dcr_cli.checkpoint.header import LENGTH_BYTES, parse_header
from dcr_cli.delta.document import HEADER_LIMIT
from dcr_cli.delta.line import BYTES_LIMIT, count, decode_line, member
from dcr_cli.delta.manifest_rules import PAYLOAD_DATA_LIMIT
from dcr_cli.delta.payload import check_payload_start, payload_header_bytes
from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.relay.kinds import Kind, Named
from dcr_cli.remote.acknowledgement import decode_acknowledgement
from dcr_cli.remote.anchor import decode_anchor
from dcr_cli.remote.decision import decode_decision
from dcr_cli.remote.history import decode_history
from dcr_cli.remote.keys import MOST_VERSION, place_of_acknowledgement
from dcr_cli.remote.signing import split_signed
from dcr_cli.remote.version import decode_version

# A payload's head, which its first bytes have to hold to be looked at, is much smaller.
_START_BYTES = 2 * HEADER_LIMIT


@dataclass(frozen=True, slots=True)
class Bound:
    """What binds a body: its size and blake3, each None where nothing says."""

    size: int | None = None
    blake3: bytes | None = None


class Check:
    """Looks at a body whose pieces come in order; `finish` returns its blake3.

    DamagedError, from any call, says that it is not right.
    """

    def __init__(self, what: str, bound: Bound) -> None:
        self._what = what
        self._bound = bound
        self._hasher = ObjectHasher()
        self._bytes = 0

    def update(self, data: bytes) -> None:
        self._hasher.update(data)
        self._bytes += len(data)
        if self._bound.size is not None and self._bytes > self._bound.size:
            raise DamagedError(self._what, f"has more than {self._bound.size} bytes")

    def finish(self) -> bytes:
        if self._bound.size not in (None, self._bytes):
            raise DamagedError(self._what, f"has {self._bytes} bytes, {self._bound.size} expected")
        found = self._hasher.digest()
        if self._bound.blake3 not in (None, found):
            raise DamagedError(self._what, "is not the object that binds it: its blake3 differs")
        return found


class PayloadCheck(Check):
    """Looks at a payload, which says itself which one it is, and what its data is."""

    def __init__(self, what: str, bound: Bound, history: str, asked: Named) -> None:
        super().__init__(what, bound)
        assert asked.place is not None
        self._identity = {"history": history, "version": str(asked.place.version), "id": asked.place.id}
        self._number = asked.number
        # The first bytes, until the data begins; then its hash.
        self._start = bytearray()
        self._data: ObjectHasher | None = None

    def update(self, data: bytes) -> None:
        super().update(data)
        if self._data is not None:
            self._data.update(data)
            return
        self._start += data
        if len(self._start) >= _START_BYTES:
            self._begin_data()

    def finish(self) -> bytes:
        found = super().finish()
        if self._data is None:
            self._begin_data()
        assert self._data is not None
        check_payload_start(memoryview(self._start), self._bytes, self._number, self._data.digest(), self._what)
        return found

    def _begin_data(self) -> None:
        """Look at the header, as far as that can be done before the end is known, and go on with the data."""
        total = LENGTH_BYTES + HEADER_LIMIT + PAYLOAD_DATA_LIMIT
        begin = LENGTH_BYTES + payload_header_bytes(memoryview(self._start), total, self._what)
        metadata = parse_header(bytes(self._start[:begin]), None, self._what).metadata
        for name, expected in self._identity.items():
            if metadata.get(name) != expected:
                raise DamagedError(self._what, f"is a payload of another version: its {name} is another")
        self._data = ObjectHasher()
        self._data.update(bytes(self._start[begin:]))


def body_check(asked: Named, bound: Bound, history: str) -> Check:
    """The check of a body, or of a range of it, that is bound so."""
    if asked.kind is Kind.PAYLOAD:
        return PayloadCheck(asked.key, bound, history, asked)
    return Check(asked.key, bound)


def check_document(asked: Named, data: bytes, history: str | None) -> None:
    """Raise DamagedError unless a document is right, of the remote's history where that is known.

    UnsupportedError says that it is one of a newer dcr.
    """
    if len(data) > asked.most_bytes:
        raise DamagedError(asked.key, f"has {len(data)} bytes, at most {asked.most_bytes} expected")
    found: object = history
    match asked.kind:
        case Kind.HISTORY:
            found = decode_history(data, asked.key).id
        case Kind.COMMIT:
            found = decode_version(data, asked.number, asked.key).version.history
        case Kind.PREPARED:
            assert asked.place is not None
            version = decode_version(data, asked.place.version, asked.key).version
            _check_place(asked, version.place)
            found = version.history
        case Kind.ANCHOR:
            assert asked.place is not None
            found = decode_anchor(data, asked.place, asked.key)[0].history
        case Kind.DECISION if history is not None:
            assert asked.place is not None
            decode_decision(data, history, asked.place, asked.key)
        case Kind.PART | Kind.UNCHANGED:
            document = _of_place(asked, data)
            if asked.kind is Kind.PART:
                _table_of(document, asked)
            found = document.get("history")
        case Kind.ACKNOWLEDGEMENT:
            word = decode_acknowledgement(data, asked.key)[0]
            place = place_of_acknowledgement(asked.key)
            if place is None or (word.place, word.receiver, word.stage) != (place.place, place.receiver, place.stage):
                raise DamagedError(asked.key, "is an acknowledgement of another version or receiver")
            found = word.history
        case _:
            # A hint may say anything.
            pass
    if history is not None and found != history:
        raise DamagedError(asked.key, "is of another history than the remote's")


def table_bound(asked: Named, data: bytes) -> Bound:
    """What the document of a part says of its table."""
    return _table_of(_of_place(asked, data), asked)


def _table_of(document: dict[str, Any], asked: Named) -> Bound:
    table = member(document, "table", dict, asked.key)
    if count(document, "rank", 1 << 16, asked.key) != asked.number:
        raise DamagedError(asked.key, "is the part of another rank")
    return Bound(count(table, "bytes", BYTES_LIMIT, asked.key), parse_blake3(table.get("blake3"), asked.key))


def _of_place(asked: Named, data: bytes) -> dict[str, Any]:
    document = decode_line(split_signed(data, asked.key).line, asked.key)
    number = count(document, "version", MOST_VERSION + 1, asked.key)
    _check_place(asked, (number, document.get("id")))
    return document


def _check_place(asked: Named, found: object) -> None:
    if found != asked.place:
        raise DamagedError(asked.key, "is of another version or attempt than its key")


def is_right(asked: Named, data: bytes, history: str | None) -> bool:
    """Whether a document is right, or one of a newer dcr, which it is not for a relay to refuse."""
    try:
        check_document(asked, data, history)
    except DamagedError:
        return False
    except DcrError:
        return True
    return True
