"""An object on its way through a relay: one thread writes it while it comes, any number of coroutines read it.

Nobody is given the last byte that they asked for before the whole is known to be right. It is written into a draft of
the spool; where the disk has no room for it, it is held in memory. What makes it right is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Protocol

from dcr_cli.durable import NoRoomError
from dcr_cli.errors import DcrError, LocalError
from dcr_cli.relay.spool import Draft, FullError, Label, Spool


class State(Enum):
    """How far an object is."""

    COMING = auto()
    RIGHT = auto()
    WRONG = auto()
    ABSENT = auto()
    FAILED = auto()


class _Room(Protocol):
    """Where the bytes are while they come."""

    def write(self, at: int, data: bytes) -> None: ...

    def read(self, at: int, size: int) -> bytes: ...

    def end(self, label: Label, size: int, blake3: bytes | None) -> None:
        """Keep what was written, if it has a blake3."""

    def close(self) -> None: ...


class _OnDisk:
    def __init__(self, spool: Spool, draft: Draft) -> None:
        self._spool = spool
        self._draft = draft
        self._is_kept = False

    def write(self, at: int, data: bytes) -> None:
        while True:
            try:
                self._draft.file.write_at(at, data)
            except NoRoomError:
                if not self._spool.relieve():
                    raise
            else:
                return

    def read(self, at: int, size: int) -> bytes:
        data = bytearray(size)
        self._draft.file.read_into(at, memoryview(data))
        return bytes(data)

    def end(self, label: Label, size: int, blake3: bytes | None) -> None:
        if blake3 is not None:
            # What cannot be kept was right all the same.
            with suppress(LocalError):
                self._spool.keep(self._draft, label, size, blake3)
                self._is_kept = True
        if not self._is_kept:
            self._spool.drop(self._draft)

    def close(self) -> None:
        with suppress(DcrError):
            self._draft.file.close()


class _InMemory:
    def __init__(self, spool: Spool, size: int, data: bytes = b"") -> None:
        spool.lend_memory(size)
        self._spool = spool
        self._lent = size
        self._data = bytearray(data)

    def write(self, at: int, data: bytes) -> None:
        self._data[at : at + len(data)] = data

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._data[at : at + size])

    def end(self, label: Label, size: int, blake3: bytes | None) -> None:
        pass

    def close(self) -> None:
        self._data = bytearray()
        self._spool.lend_memory(-self._lent)
        self._lent = 0


class Arrival:
    """One object, or one range of it, while it comes. `begin` is where the range begins in the object.

    Its writer calls `announce`, `add` and `end` from any one thread; all else is the event loop's, the state too.
    `error` is why it failed. What is right is kept if `is_kept` says so. `ended` is called when all is known, before
    anybody else hears of it.
    """

    def __init__(
        self,
        spool: Spool,
        label: Label,
        *,
        ended: Callable[[Arrival], None] = lambda arrival: None,
        begin: int = 0,
        is_kept: bool = True,
    ) -> None:
        self.label = label
        self.begin = begin
        self.size: int | None = None
        self.at = 0
        self.state = State.COMING
        self.blake3: bytes | None = None
        # By its writer: how much of it a parent has sent.
        self.fetched_bytes = 0
        self.error: Exception | None = None
        self._spool = spool
        self._is_kept = is_kept
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._room: _Room | None = None
        # What was written on a disk that became full; a reader may still be at it.
        self._left: list[_Room] = []
        self._readers = 0
        self._left_at: float | None = self._loop.time()
        self._waiting: set[asyncio.Future[None]] = set()

    # Its writer

    def announce(self, size: int) -> None:
        """Say how long it will be, before any of it is added. FullError if there is no room for it at all."""
        if self.size is not None:
            return
        try:
            self._room = _OnDisk(self._spool, self._spool.begin(size if self._is_kept else 0))
        except (FullError, LocalError):
            self._room = _InMemory(self._spool, size)
        self.size = size
        self._tell()

    def add(self, data: bytes) -> None:
        """Add what comes next. FullError as above, where the disk became full meanwhile."""
        assert self._room is not None and self.size is not None
        try:
            self._room.write(self.at, data)
        except LocalError:
            before = self._room
            self._room = _InMemory(self._spool, self.size, before.read(0, self.at) + data)
            before.end(self.label, 0, None)
            self._left.append(before)
        self.at += len(data)
        self._tell()

    def end(self, state: State, *, blake3: bytes | None = None, error: Exception | None = None) -> None:
        """Say what became of it; with its blake3, what is right is kept."""
        if self._room is not None:
            self._room.end(self.label, self.at, blake3 if state is State.RIGHT and self._is_kept else None)
        self.blake3, self.error = blake3, error
        self._tell(state)

    @property
    def left_seconds(self) -> float:
        """For how long nobody has wanted it."""
        left_at = self._left_at
        return 0.0 if left_at is None else self._loop.time() - left_at

    # Its readers

    async def known(self) -> None:
        """Wait until it is known how long it is, or that it does not come."""
        while self.size is None and self.state is State.COMING:
            await self._change()

    async def reach(self, at: int, end: int) -> int:
        """Wait until more than `at` bytes may be handed out to somebody who wants it up to `end`: how many. No more
        than `at` says that no more will come."""
        while True:
            if self.state is State.RIGHT:
                return end
            if self.state is not State.COMING:
                return at
            if min(self.at, end - 1) > at:
                return min(self.at, end - 1)
            await self._change()

    async def ended(self) -> State:
        """Wait until it is known what became of it."""
        while self.state is State.COMING:
            await self._change()
        return self.state

    def open(self) -> None:
        """Begin to read; `close` ends it."""
        self._readers += 1
        self._left_at = None

    def read(self, at: int, size: int) -> bytes:
        """Bytes that may be handed out."""
        assert self._room is not None
        return self._room.read(at, size)

    def close(self) -> None:
        """End reading."""
        self._readers -= 1
        if not self._readers:
            self._left_at = self._loop.time()
        self._let_go()

    def _tell(self, state: State = State.COMING) -> None:
        # A loop that has ended has nobody who waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake, state)

    def _wake(self, state: State) -> None:
        if state is not State.COMING:
            self.state = state
            self._ended(self)
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._let_go()

    def _let_go(self) -> None:
        if self.state is not State.COMING and not self._readers and self._room is not None:
            for room in (self._room, *self._left):
                room.close()

    async def _change(self) -> None:
        future = self._loop.create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
