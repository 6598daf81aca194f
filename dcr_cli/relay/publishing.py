"""What children put: checked, passed on to the parent, and known here from then on.

A body is handed out to those who wait for it while it comes, as one that comes from a parent is.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import ConflictError, DamagedError, DcrError
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.checks import Bound, body_check, is_right
from dcr_cli.relay.kinds import REPLACED, Kind, Named
from dcr_cli.relay.library import WHOLE, Library
from dcr_cli.relay.parents import Parent
from dcr_cli.relay.spool import FullError
from dcr_cli.remote.history import decode_history

# What comes is passed on to threads in parts of this size.
_PART_BYTES = 1 << 20


class Put(Enum):
    """What became of a put."""

    DONE = auto()
    # Another object has the key.
    TAKEN = auto()
    # What came is not what its key says.
    WRONG = auto()
    # It ended before its length.
    SHORT = auto()
    # There is no room for it.
    FULL = auto()


@dataclass(frozen=True, slots=True)
class Publishing:
    """Takes what is put, for a library's parents."""

    library: Library

    async def put(self, asked: Named, size: int, parts: AsyncIterator[bytes], *, is_create: bool) -> Put:
        """Put an object of `size` bytes; with `is_create` only if its key is free, in one step for documents."""
        if asked.is_body:
            return await self._put_body(asked, size, parts, is_create=is_create)
        data = b"".join([part async for part in parts])
        if len(data) != size:
            return Put.SHORT
        history = await self.library.history()
        if not await self.library.run(lambda: is_right(asked, data, history)):
            return Put.WRONG
        made = await self.library.run(lambda: self.library.parents.ask(_question(asked, data, is_create=is_create)))
        if made:
            self._learn(asked, data)
        return Put.DONE if made else Put.TAKEN

    def _learn(self, asked: Named, data: bytes) -> None:
        """Know a document that is there from now on."""
        news = self.library.news
        if asked.kind is Kind.HISTORY:
            self.library.parents.adopt(decode_history(data, asked.key).id)
        elif asked.kind is Kind.COMMIT:
            self.library.keep_document(asked, data)
            news.reached(asked.number)
        elif asked.kind is Kind.HINT:
            news.hinted(data)

    async def _put_body(self, asked: Named, size: int, parts: AsyncIterator[bytes], *, is_create: bool) -> Put:
        # Files of anchors are kept by ranges, and a whole one is only passed on.
        part = WHOLE if asked.kind is Kind.ANCHOR_FILE else 0
        while (before := self.library.coming(asked, part)) is not None:
            await before.ended()
        arrival = self.library.begin(asked, part)
        arrival.open()
        try:
            ending = await self._receive(arrival, asked, size, parts)
            if ending is Put.DONE:
                ending = await self.library.run(lambda: self._pass_on(arrival, asked, is_create=is_create))
            return ending
        finally:
            arrival.close()

    async def _receive(self, arrival: Arrival, asked: Named, size: int, parts: AsyncIterator[bytes]) -> Put:
        """Let a body come."""
        history = await self.library.history()
        check = body_check(asked, Bound(size), history) if history is not None else None
        state, blake3 = State.FAILED, None
        try:
            if check is None:
                return Put.WRONG
            await self.library.run(lambda: arrival.announce(size))
            self._saw(asked)
            async for part in _gathered(parts):

                def take(part: bytes = part) -> None:
                    check.update(part)
                    arrival.add(part)

                await self.library.run(take)
            if arrival.at < size:
                return Put.SHORT
            blake3 = await self.library.run(check.finish)
            state = State.RIGHT
        except FullError:
            return Put.FULL
        except DcrError:
            # Whatever it says of the object, or of what this version of dcr knows of it.
            return Put.WRONG
        finally:
            # What is bound by no document yet is kept until there is one to compare it with.
            await asyncio.shield(self.library.run(lambda: arrival.end(state, blake3=blake3)))
        return Put.DONE

    def _saw(self, asked: Named) -> None:
        if asked.kind is Kind.PAYLOAD and asked.place is not None:
            self.library.news.saw_payload(asked.place, asked.number)

    def _pass_on(self, arrival: Arrival, asked: Named, *, is_create: bool) -> Put:
        """Put what has come at the parent, in a thread."""

        def question(parent: Parent) -> Put:
            if parent.replaces or is_create:
                status = parent.store.stat(asked.key, is_denied_absent=True)
                if status is not None and (is_create or status.size != arrival.at):
                    return Put.TAKEN
                if status is not None and not self._is_same(parent, asked, arrival):
                    return Put.TAKEN
            try:
                parent.store.put(asked.key, io.BufferedReader(_Reading(arrival)))
            except ConflictError:
                return Put.TAKEN
            return Put.DONE

        return self.library.parents.ask(question)

    def _is_same(self, parent: Parent, asked: Named, arrival: Arrival) -> bool:
        """Whether what is there has the bytes that have come."""
        check = body_check(asked, Bound(arrival.at, arrival.blake3), self.library.parents.history or "")
        try:
            for chunk in parent.store.stream(asked.key, size=arrival.at):
                check.update(chunk)
            check.finish()
        except DamagedError:
            return False
        return True


class _Reading(io.RawIOBase):
    """What has come, as a stream that is put."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._arrival.at}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self._arrival.read(self._at, min(len(buffer), self._arrival.at - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _question(asked: Named, data: bytes, *, is_create: bool):  # type: ignore[no-untyped-def]
    """How a document is put at a parent: whether it is there then."""

    def ask(parent: Parent) -> bool:
        if is_create:
            return parent.store.create(asked.key, data)
        if parent.replaces and asked.kind not in REPLACED:
            there = parent.store.get(asked.key, most_bytes=asked.most_bytes, is_denied_absent=True)
            if there is not None and object_digest(there) != object_digest(data):
                return False
        try:
            # Also over the same bytes: the time at which it was put counts.
            parent.store.put(asked.key, data)
        except ConflictError:
            return False
        return True

    return ask


async def _gathered(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in larger parts."""
    gathered = bytearray()
    async for part in parts:
        gathered += part
        if len(gathered) >= _PART_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
