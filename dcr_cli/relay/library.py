"""Bodies as children are given them: kept, or an arrival while they come from a parent, fetched once for all who ask.

What one has to be is binding.py's matter, and found first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dcr_cli.delta.file_rules import RANGE_BYTES
from dcr_cli.errors import ConflictError, DamagedError, DcrError, LocalError, NotFoundError, TransportError
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.binding import Bindings
from dcr_cli.relay.checks import Bound, Check, body_check
from dcr_cli.relay.documents import Documents
from dcr_cli.relay.kinds import Kind, Named, label_of, named
from dcr_cli.relay.news import News
from dcr_cli.relay.parents import ForbiddenError, Parent, Parents, UnavailableError, WrongError
from dcr_cli.relay.spool import FullError, Kept, Label, Spool
from dcr_cli.store.calls import RefusedError

T = TypeVar("T")

# The part of an anchor's file that is all of it.
WHOLE = -1
# So often an object is asked for that comes and is not right, each time of the next parent; then not for a while.
_ATTEMPTS, _WRONG_SECONDS = 3, 10.0
# So many bodies come or wait to come; and what nobody has wanted for so long comes no further.
_MOST_ARRIVALS, _LEFT_SECONDS = 512, 10.0


@dataclass(slots=True)
class _Wrong:
    """How often a body has come and was not right, and when it did last."""

    times: int
    at: float


@dataclass(slots=True)
class Library:
    """All bodies of a remote. Its methods are the event loop's; bodies come in threads of `pool`.

    They raise UnavailableError, ForbiddenError and WrongError, as Parents does.
    """

    documents: Documents
    pool: Executor
    received_bytes: int = 0
    bindings: Bindings = field(init=False)
    _arrivals: dict[Label, Arrival] = field(default_factory=dict)
    _checks: dict[Label, asyncio.Task[bool]] = field(default_factory=dict)
    _wrongs: dict[Label, _Wrong] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bindings = Bindings(self.documents, self._whole)
        self.documents.doubted = self.bindings.forget

    @property
    def parents(self) -> Parents:
        return self.documents.parents

    @property
    def spool(self) -> Spool:
        return self.documents.spool

    @property
    def news(self) -> News:
        return self.documents.news

    async def history(self) -> str | None:
        """As Documents has it."""
        return await self.documents.history()

    async def look(self, work: Callable[[], T]) -> T:
        """As Documents does."""
        return await self.documents.look(work)

    async def fetch(self, work: Callable[[], T]) -> T:
        """Do what may take as long as a body does to come, or to go."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def body(self, asked: Named, part: int = 0) -> Arrival | Kept | None:
        """A body, or a range of an anchor's file: kept and right, or an arrival that is open; None if it is absent."""
        if await self.history() is None:
            return None
        label = label_of(asked, part)
        for _ in range(_ATTEMPTS):
            bound = await self.bindings.of(asked, part)
            if bound is None:
                return None
            kept = self.spool.find(label)
            if kept is not None and bound.blake3 not in (None, kept.blake3):
                await self.look(partial(self.spool.forget, kept))
                kept = None
            if kept is not None and await self._is_right(label, kept):
                return kept
            self._check_wrong(label)
            arrival = self._arrivals.get(label) or self._begin_to_fetch(asked, part, bound)
            arrival.open()
            try:
                await arrival.known()
            except BaseException:
                arrival.close()
                raise
            if arrival.state in (State.COMING, State.RIGHT):
                self.announced(arrival)
                return arrival
            arrival.close()
            if arrival.state is State.ABSENT:
                return None
            if arrival.state is State.FAILED:
                raise ForbiddenError if isinstance(arrival.error, ForbiddenError) else UnavailableError
        raise WrongError

    def begin(self, asked: Named, part: int = 0, *, is_shared: bool = True) -> Arrival:
        """Begin an arrival, which all who ask for the object are given until it has ended if it `is_shared`."""
        label = label_of(asked, part)
        begin = max(part, 0) * RANGE_BYTES
        arrival = Arrival(self.spool, label, ended=self._ended, begin=begin, is_kept=part != WHOLE)
        if is_shared:
            self._arrivals[label] = arrival
        return arrival

    def coming(self, asked: Named, part: int = 0) -> Arrival | None:
        """The arrival of an object, if it is on its way."""
        return self._arrivals.get(label_of(asked, part))

    def is_kept(self, asked: Named) -> bool:
        """Whether an object is kept, right or not."""
        return self.spool.find(label_of(asked)) is not None

    def announced(self, arrival: Arrival) -> None:
        """Tell those who wait for a payload that it comes, if it does for all."""
        asked = named(arrival.label.key)
        is_shared = self._arrivals.get(arrival.label) is arrival or arrival.state is State.RIGHT
        if asked is not None and asked.kind is Kind.PAYLOAD and asked.place is not None and is_shared:
            self.news.saw_payload(asked.place, asked.number)

    async def size_of_file(self, asked: Named) -> int | None:
        """How long a file of an anchor is; None if there is none."""
        file = await self.bindings.file(asked)
        return file.size if file is not None else None

    async def _is_right(self, label: Label, kept: Kept) -> bool:
        """Whether what an earlier run has kept is what it was: looked at once for all who ask."""
        if kept.is_checked:
            return True
        checking = self._checks.get(label)
        if checking is None:
            checking = self._checks[label] = asyncio.create_task(self.look(partial(self.spool.check, kept)))
            checking.add_done_callback(lambda _: self._checks.pop(label, None))
        return await asyncio.shield(checking)

    def _check_wrong(self, label: Label) -> None:
        """Raise WrongError if an object has just come, from all that have it, and was not right."""
        wrong = self._wrongs.get(label)
        if wrong is None:
            return
        since = asyncio.get_running_loop().time() - wrong.at
        if wrong.times >= max(_ATTEMPTS, len(self.parents.all)) and since < _WRONG_SECONDS:
            raise WrongError

    def _begin_to_fetch(self, asked: Named, part: int, bound: Bound) -> Arrival:
        if len(self._arrivals) >= _MOST_ARRIVALS:
            raise UnavailableError
        arrival = self.begin(asked, part)
        self.pool.submit(self._fetch, arrival, asked, bound)
        return arrival

    def _ended(self, arrival: Arrival) -> None:
        label = arrival.label
        if self._arrivals.get(label) is arrival:
            del self._arrivals[label]
        asked = named(label.key)
        place = asked.place if asked is not None else None
        self.received_bytes += arrival.fetched_bytes
        if arrival.state is State.WRONG:
            before = self._wrongs.get(label)
            wrong = _Wrong(before.times + 1 if before is not None else 1, asyncio.get_running_loop().time())
            self._wrongs[label] = wrong
            if place is not None and wrong.times >= len(self.parents.all):
                self.documents.doubt(place)
        elif arrival.state is not State.FAILED:
            self._wrongs.pop(label, None)
        if arrival.state is not State.RIGHT and asked is not None and place is not None:
            self.news.lost_payload(place, asked.number)

    def _fetch(self, arrival: Arrival, asked: Named, bound: Bound) -> None:
        """Fetch a body, in a thread, from the first parent that has all of it."""
        try:
            history = self.parents.history
            assert history is not None
            # The end of what is wanted, in the object, where it is a range of it.
            end = arrival.begin + bound.size if asked.kind is Kind.ANCHOR_FILE and bound.size is not None else None
            coming = _Coming(self.parents, arrival, asked, body_check(asked, bound, history), bound.size, end)
            state, blake3, error = coming.run(self._in_turn(arrival))
        except BaseException as unknown:
            # Whoever waits is told, whatever it was.
            arrival.end(State.FAILED, error=UnavailableError(str(unknown)))
            raise
        arrival.end(state, blake3=blake3, error=error)

    def _in_turn(self, arrival: Arrival) -> list[Parent]:
        """The parents, beginning with the one after those from which the object has come and was not right."""
        parents, wrong = list(self.parents), self._wrongs.get(arrival.label)
        first = wrong.times % len(parents) if wrong is not None and parents else 0
        return parents[first:] + parents[:first]

    async def _whole(self, asked: Named) -> bytes | None:
        """All bytes of a body; None if it is absent, or does not come right."""
        found = await self.body(asked)
        if isinstance(found, Arrival):
            try:
                if await found.ended() is not State.RIGHT:
                    return None
                return found.read(0, found.at)
            finally:
                found.close()
        return await self.look(lambda: self.spool.read(label_of(asked))) if found is not None else None


@dataclass(frozen=True, slots=True)
class _Coming:
    """One body on its way from the parents, in a thread."""

    parents: Parents
    arrival: Arrival
    asked: Named
    check: Check
    size: int | None
    end: int | None

    def run(self, parents: list[Parent]) -> tuple[State, bytes | None, Exception | None]:
        """Have it come, from each parent as far as that one has it: what became of it, its blake3, or why it failed."""
        ending: Exception = UnavailableError()
        for parent in parents:
            try:
                self.parents.prove(parent)
                self._take(parent)
                blake3 = self.check.finish()
            except NotFoundError:
                if self._is_absent(parent) and not self.arrival.at:
                    return State.ABSENT, None, None
            except (FullError, _LeftError):
                return State.FAILED, None, UnavailableError()
            except RefusedError:
                ending = ForbiddenError()
            except (TransportError, LocalError) as error:
                self.parents.failed(parent, error)
            except (DamagedError, ConflictError, DcrError):
                return State.WRONG, None, None
            else:
                self.parents.answered(parent)
                return State.RIGHT, blake3, None
        return State.FAILED, None, ending

    def _take(self, parent: Parent) -> None:
        arrival = self.arrival
        # Of a range, `size` is its own.
        size = self.size if self.end is None else None
        begin = arrival.begin + arrival.at
        for chunk in parent.store.stream(self.asked.key, begin=begin, end=self.end, size=size, told=self._announce):
            if arrival.left_seconds > _LEFT_SECONDS:
                raise _LeftError
            arrival.fetched_bytes += len(chunk)
            self.check.update(chunk)
            arrival.add(chunk)

    def _announce(self, total: int) -> None:
        if total > self.asked.most_bytes:
            raise DamagedError(self.asked.key, f"has {total} bytes, at most {self.asked.most_bytes} expected")
        size = total if self.end is None else self.end - self.arrival.begin
        if self.arrival.size not in (None, size):
            raise DamagedError(self.asked.key, f"has {total} bytes, {self.arrival.size} expected")
        self.arrival.announce(size)

    def _is_absent(self, parent: Parent) -> bool:
        """Whether what is not there is the object, and not all of the remote."""
        try:
            return parent.store.stat(self.asked.key, is_denied_absent=True) is None
        except (NotFoundError, TransportError) as error:
            self.parents.failed(parent, error)
            return False


class _LeftError(Exception):
    """Nobody wants it any more."""
