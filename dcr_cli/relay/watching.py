"""Watches the parent for what is new, and fetches ahead what children will ask for: so that a region receives a version
while it is made, and a prepared one before its commit.

A parent that is a relay is waited on; of any other one it is looked again and again, less often while nothing happens.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from dcr_cli.errors import DcrError
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.kinds import label_of, require_named
from dcr_cli.relay.library import Library
from dcr_cli.relay.parents import ForbiddenError, UnavailableError, WrongError
from dcr_cli.relay.telling import bug_line
from dcr_cli.remote.hint import PREPARED
from dcr_cli.remote.keys import (
    HINT_KEY,
    HISTORY_KEY,
    MOST_VERSION,
    Place,
    commit_key,
    digests_key,
    manifest_key,
    payload_key,
)

# What may be while a parent is asked, and passes.
PASSING = (UnavailableError, ForbiddenError, WrongError)
_WAIT_SECONDS = 30
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5, 10.0
# While something is being made, it is looked at least so often.
_MAKING_SECONDS = 1.0
# A parent that says it has waited, and has not, is not asked again at once.
_LEAST_SECONDS, _MOST_HASTY = 0.2, 3
# So often it is looked whether a parent that failed answers again.
_PROBE_SECONDS = 5.0
# So many bodies are fetched ahead at a time.
_AT_ONCE = 4


class _Waiting:
    """Waits at a parent that is a relay, for one who comes again and again. One that says it has waited, and has not,
    is believed only so often that nobody is asked without end."""

    def __init__(self, library: Library, waits: Executor) -> None:
        self._library = library
        self._waits = waits
        self._hasty = 0

    async def wait(self, key: str) -> bool:
        """Have the parent wait until an object is there, or anything is news: whether it did."""
        loop = asyncio.get_running_loop()
        parent, begun = self._library.parents.first, loop.time()
        try:
            parent.is_relay = await loop.run_in_executor(self._waits, parent.store.wait, key, _WAIT_SECONDS)
        except DcrError:
            return False
        self._hasty = self._hasty + 1 if loop.time() - begun < _LEAST_SECONDS else 0
        return parent.is_relay and self._hasty < _MOST_HASTY


@dataclass(slots=True)
class Watch:
    """The watch of one relay, for as long as `run` runs. `waits` is a pool of its own, for waiting takes long; `log` is
    told of bugs, if there is one, and it goes on; `dice` (a number from 0 to 1) is there for tests."""

    library: Library
    waits: Executor
    log: Callable[[str], None] | None
    dice: Callable[[], float] = random.random
    _quiet: int = 0
    _ahead: dict[Place, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch, until this is cancelled."""
        besides = [asyncio.create_task(work) for work in (self._check_kept(), self._look_for_parents())]
        waiting = _Waiting(self.library, self.waits)
        try:
            while True:
                try:
                    is_waited = await self._round(waiting)
                except PASSING:
                    is_waited = False
                except Exception:
                    self._tell_bug()
                    is_waited = False
                if not is_waited:
                    await self._pause()
        finally:
            for task in (*besides, *self._ahead.values()):
                task.cancel()

    async def _round(self, waiting: _Waiting) -> bool:
        """Learn what is new, and have a parent wait for more: whether it did."""
        news = self.library.news
        before = news.count
        if await self.library.documents.get(require_named(HISTORY_KEY)) is not None:
            if not news.head:
                await self.library.look(self._recall)
            await self.library.documents.get(require_named(HINT_KEY))
            await self._find_newest()
        if news.count > before:
            self._quiet = 0
        self._fetch_ahead()
        return await waiting.wait(commit_key(news.head + 1))

    async def _find_newest(self) -> None:
        """Find the newest version, from the one that is known, as FORMAT 13.4 says."""
        news, step = self.library.news, 1
        while await self._has(news.head + step):
            step *= 2
        absent = news.head + step
        while absent - news.head > 1:
            middle = (news.head + absent) // 2
            if not await self._has(middle):
                absent = middle

    async def _has(self, version: int) -> bool:
        """Whether a version is there; if it is, it is news."""
        if version > MOST_VERSION or await self.library.documents.get(require_named(commit_key(version))) is None:
            return False
        self.library.news.reached(version)
        return True

    def _fetch_ahead(self) -> None:
        """See that what is being made is fetched, and what is not any more is not."""
        news = self.library.news
        for place, task in list(self._ahead.items()):
            # What was committed is fetched to its end.
            if task.done() or (place.version > news.head and place != news.making):
                task.cancel()
                del self._ahead[place]
        if news.making is not None and news.making not in self._ahead:
            self._ahead[news.making] = asyncio.create_task(self._follow(news.making))

    async def _follow(self, place: Place) -> None:
        """Fetch the payloads of a version in order, as they appear, and at its end what binds them."""
        news, waiting = self.library.news, _Waiting(self.library, self.waits)
        coming: deque[Arrival] = deque()
        number = 0
        try:
            while True:
                before = news.count
                try:
                    if await self._fetch(payload_key(place, number), coming):
                        number += 1
                        continue
                    if news.making != place:
                        break
                    if news.hint is not None and news.hint.state == PREPARED:
                        await self._fetch_documents(place, coming)
                except PASSING:
                    await asyncio.sleep(_MAKING_SECONDS)
                    continue
                if not await waiting.wait(payload_key(place, number)):
                    await news.after(before, _MAKING_SECONDS)
            await self._fetch_documents(place, coming)
        except Exception:
            self._tell_bug()
        finally:
            for arrival in coming:
                arrival.close()

    async def _fetch_documents(self, place: Place, coming: deque[Arrival]) -> None:
        for key in (manifest_key(place), digests_key(place)):
            with suppress(*PASSING):
                await self._fetch(key, coming)

    async def _fetch(self, key: str, coming: deque[Arrival]) -> bool:
        """Have an object come, if it is there: whether it is. Some come at the same time."""
        found = await self.library.body(require_named(key))
        if isinstance(found, Arrival):
            coming.append(found)
        while len(coming) > _AT_ONCE or (coming and coming[0].state is not State.COMING):
            first = coming[0]
            await first.ended()
            coming.popleft()
            first.close()
        return found is not None

    def _tell_bug(self) -> None:
        if self.log is not None:
            self.log(bug_line(traceback.format_exc()))

    async def _pause(self) -> None:
        """Wait for news, twice as long each time that there are none, by chance a little less."""
        news = self.library.news
        most = _MAKING_SECONDS if news.making is not None else _LONGEST_SECONDS
        longest = min(_SHORTEST_SECONDS * 2.0 ** min(self._quiet, 30), most)
        self._quiet += 1
        if await news.after(news.count, longest * (1 + self.dice()) / 2):
            self._quiet = 0

    def _recall(self) -> None:
        """Go on from the newest version whose commit an earlier run has kept."""
        spool = self.library.spool
        for version in spool.versions():
            if spool.read(label_of(require_named(commit_key(version)))) is not None:
                self.library.news.head = version
                return

    async def _check_kept(self) -> None:
        """Hash what an earlier run has kept, one after the other, before children ask for it."""
        spool = self.library.spool
        for kept in await self.library.look(spool.unchecked):
            await self.library.look(partial(spool.check, kept))

    async def _look_for_parents(self) -> None:
        """See, now and then, whether parents that failed answer again: nobody else has to wait for that."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            failed = [parent for parent in self.library.parents.all if parent.failed_at is not None]
            for parent in failed:
                await loop.run_in_executor(self.waits, self.library.parents.look_again, parent)
