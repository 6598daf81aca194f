"""Payloads of a version that is being made, fetched while they appear, before anything binds them.

Which version that is, only a hint says, which may be wrong: a payload is kept if it says itself that it is of that
version, and is what its own header says; it is used only if the manifest under a commit lists its blake3. All others
are removed, sooner or later.
"""

from __future__ import annotations

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import LENGTH_BYTES, header_bytes, parse_header
from dcr_cli.delta.document import HEADER_LIMIT
from dcr_cli.delta.manifest_rules import MOST_PAYLOAD_BYTES, PAYLOAD_COUNT_LIMIT
from dcr_cli.delta.payload import check_payload_start, payload_name
from dcr_cli.durable import NoRoomError
from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.fetch.spool import Spool
from dcr_cli.remote.keys import Place, payload_key
from dcr_cli.store.store import Store

# What is fetched ahead leaves room for what is surely needed.
_LEFT_FREE_BYTES = 1 << 30
# So many are fetched before it is looked again whether there is a commit.
_AT_ONCE = 64


class Ahead:
    """The payloads of one version of a history that have come so far, in their order.

    Those of a delta have about `most_bytes` at most; more are not fetched before a commit says that they are.
    """

    def __init__(self, history: str, place: Place, most_bytes: int) -> None:
        self.place = place
        self.bytes = 0
        self._history = history
        self._most_bytes = most_bytes
        self._count = 0

    def fetch(self, store: Store, spool: Spool) -> int:
        """Fetch those that are there and have not been fetched, some at a time: how many.

        One that is not what it should be is left for later: perhaps another one comes to its place.
        """
        before = self._count
        if not before:
            spool.keep([self.place])
            spool.begin(self.place)
        while self._has_more(before) and (size := self._next(store, spool)) is not None:
            self._count += 1
            self.bytes += size
        return self._count - before

    def _has_more(self, before: int) -> bool:
        is_within = self._count < PAYLOAD_COUNT_LIMIT and self.bytes < self._most_bytes
        return is_within and self._count - before < _AT_ONCE

    def _next(self, store: Store, spool: Spool) -> int | None:
        """Fetch the next payload, unless an earlier run has: its bytes; None if it is not there, or has no room."""
        kept = spool.read(self.place, payload_name(self._count), MOST_PAYLOAD_BYTES)
        if kept is not None and self._is_right(kept):
            return len(kept)
        try:
            key = payload_key(self.place, self._count)
            data = store.get(key, most_bytes=MOST_PAYLOAD_BYTES, is_denied_absent=True)
        except DamagedError:
            return None
        if data is None or not self._is_right(data) or len(data) + _LEFT_FREE_BYTES > spool.room_bytes:
            return None
        try:
            spool.write_payload(self.place, self._count, data)
        except NoRoomError:
            return None
        return len(data)

    def _is_right(self, data: bytes) -> bool:
        """Whether a payload is what it says, and says that it is the next one of this version."""
        what = payload_name(self._count)
        identity = {"history": self._history, "version": str(self.place.version), "id": self.place.id}
        try:
            begin = LENGTH_BYTES + header_bytes(data[:64], len(data), what, max_header_bytes=HEADER_LIMIT)
            header = parse_header(data[:begin], len(data), what)
            check_payload_start(memoryview(data), len(data), self._count, object_digest(data[begin:]), what)
        except DcrError:
            return False
        return all(header.metadata.get(key) == value for key, value in identity.items())
