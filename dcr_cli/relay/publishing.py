"""What children put: checked, passed on to the parent, and known here from then on.

A payload of the version that is being made is handed out to those who wait for it while it comes, as one that comes
from a parent is.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import ConflictError, DamagedError, DcrError
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.checks import Bound, Check, body_check, is_right
from dcr_cli.relay.kinds import REPLACED, Kind, Named
from dcr_cli.relay.library import WHOLE, Library
from dcr_cli.relay.parents import Parent
from dcr_cli.relay.spool import FullError
from dcr_cli.remote.history import decode_history
from dcr_cli.store.store import MOST_CREATED_BYTES

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


@dataclass(slots=True)
class _Turn:
    """Whose turn it is to put an object of a key, and how many have it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


@dataclass(slots=True)
class Publishing:
    """Takes what is put, for a library's parents; of one key one object at a time.

    Nothing counts, and of a body nobody is given the last byte, before it is at the parent. That is the first one,
    always: two that are asked in turn may not be one remote, and then two publishers would hear that a key was free.
    """

    library: Library
    _turns: dict[str, _Turn] = field(default_factory=dict)

    async def put(self, asked: Named, size: int, parts: AsyncIterator[bytes], *, is_create: bool) -> Put:
        """Put an object of `size` bytes; with `is_create` only if its key is free, in one step for documents."""
        if asked.is_body:
            return await self._put_body(asked, size, parts, is_create=is_create)
        return await self._put_document(asked, size, parts, is_create=is_create)

    @asynccontextmanager
    async def _turn(self, asked: Named) -> AsyncIterator[None]:
        """Wait until nobody else puts an object of this key at the parent. What is put has come by then, so that who
        sends slowly holds up nobody."""
        turn = self._turns.setdefault(asked.key, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[asked.key]

    async def _put_document(self, asked: Named, size: int, parts: AsyncIterator[bytes], *, is_create: bool) -> Put:
        data = b"".join([part async for part in parts])
        if len(data) != size:
            return Put.SHORT
        history = await self.library.history()
        if not await self.library.look(lambda: is_right(asked, data, history)):
            return Put.WRONG
        is_first = asked.kind is not Kind.ACKNOWLEDGEMENT
        question = partial(_put_at, asked=asked, data=data, is_create=is_create)
        async with self._turn(asked):
            made = await self.library.look(lambda: self.library.parents.ask(question, only_first=is_first))
            if made:
                await self._learn(asked, data)
        return Put.DONE if made else Put.TAKEN

    async def _learn(self, asked: Named, data: bytes) -> None:
        """Know a document that is there from now on."""
        if asked.kind is Kind.HISTORY:
            with suppress(DcrError):
                self.library.parents.adopt(decode_history(data, asked.key).id)
        elif asked.kind is Kind.COMMIT:
            await self.library.look(lambda: self.library.documents.keep(asked, data))
            self.library.news.reached(asked.number)
        elif asked.kind is Kind.HINT:
            self.library.news.hinted(data)

    async def _put_body(self, asked: Named, size: int, parts: AsyncIterator[bytes], *, is_create: bool) -> Put:
        history = await self.library.history()
        if history is None:
            return Put.WRONG
        # Files of anchors are kept by ranges, and a whole one is only passed on.
        part = WHOLE if asked.kind is Kind.ANCHOR_FILE else 0
        arrival = self.library.begin(asked, part, is_shared=self._is_shared(asked))
        arrival.open()
        state, blake3, ending = State.FAILED, None, Put.SHORT
        try:
            check = body_check(asked, Bound(size), history)
            ending, blake3 = await self._receive(arrival, size, parts, check)
            if ending is Put.DONE:
                question = partial(self._pass_on, arrival=arrival, asked=asked, blake3=blake3, is_create=is_create)
                # Whoever put it may have gone: what is on its way goes on all the same.
                ending = await asyncio.shield(asyncio.ensure_future(self._pass(asked, question)))
            if ending is Put.DONE:
                state = State.RIGHT
            return ending
        finally:
            # What no document binds yet is kept until there is one to compare it with.
            await asyncio.shield(self.library.look(lambda: arrival.end(state, blake3=blake3)))
            arrival.close()

    async def _pass(self, asked: Named, question: Callable[[Parent], Put]) -> Put:
        async with self._turn(asked):
            return await self.library.fetch(lambda: self.library.parents.ask(question, only_first=True))

    def _is_shared(self, asked: Named) -> bool:
        """Whether those who wait for an object are given it while it comes: only where nothing binds it yet, nothing is
        kept, and nothing else comes."""
        is_there = self.library.is_kept(asked) or self.library.coming(asked) is not None
        return asked.kind is Kind.PAYLOAD and asked.place == self.library.news.making and not is_there

    async def _receive(
        self, arrival: Arrival, size: int, parts: AsyncIterator[bytes], check: Check
    ) -> tuple[Put, bytes | None]:
        """Let a body come, all but its end: what became of it, and its blake3."""
        try:
            await self.library.look(lambda: arrival.announce(size))
            self.library.announced(arrival)
            async for part in _gathered(parts):

                def take(part: bytes = part) -> None:
                    check.update(part)
                    arrival.add(part)

                # A thread that writes is not left alone by one who has gone.
                await asyncio.shield(self.library.look(take))
            if arrival.at < size:
                return Put.SHORT, None
            return Put.DONE, await self.library.look(check.finish)
        except FullError:
            return Put.FULL, None
        except DcrError:
            # Whatever it says of the object, or of what this version of dcr knows of it.
            return Put.WRONG, None

    def _pass_on(self, parent: Parent, *, arrival: Arrival, asked: Named, blake3: bytes | None, is_create: bool) -> Put:
        """Put what has come at the parent, in a thread."""
        if parent.replaces or is_create:
            status = parent.store.stat(asked.key, is_denied_absent=True)
            if status is not None and (is_create or status.size != arrival.at):
                return Put.TAKEN
            if status is not None and not self._is_same(parent, asked, Bound(arrival.at, blake3)):
                return Put.TAKEN
        try:
            parent.store.put(asked.key, io.BufferedReader(_Reading(arrival)))
        except ConflictError:
            return Put.TAKEN
        return Put.DONE

    def _is_same(self, parent: Parent, asked: Named, bound: Bound) -> bool:
        """Whether what is there has the bytes that have come."""
        check = Check(asked.key, bound)
        try:
            for chunk in parent.store.stream(asked.key, size=bound.size):
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


def _put_at(parent: Parent, *, asked: Named, data: bytes, is_create: bool) -> bool:
    """Put a document at a parent, in a thread: whether it is there then, and, if it is created, whether this did it."""
    if is_create and len(data) <= MOST_CREATED_BYTES:
        return parent.store.create(asked.key, data)
    if is_create and parent.store.stat(asked.key, is_denied_absent=True) is not None:
        return False
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
