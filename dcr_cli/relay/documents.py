"""Documents as children are given them: asked of a parent each time, once for all who wait, but for those that never
change and are kept.

That one is absent only a parent says, after it was asked for. What is large is library.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.relay.checks import check_document
from dcr_cli.relay.commits import forget_commit, keep_commit
from dcr_cli.relay.kinds import KEPT_DOCUMENTS, Kind, Named, label_of, require_named
from dcr_cli.relay.news import News
from dcr_cli.relay.parents import BehindError, Parent, Parents, WrongError, get_if_there
from dcr_cli.relay.spool import Label, Spool
from dcr_cli.remote.anchor import open_anchor
from dcr_cli.remote.keys import HISTORY_KEY, Place, commit_key, prepared_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Version, decode_version

T = TypeVar("T")

# So little is read sooner than a thread would be told to.
_LITTLE_BYTES = 64 << 10


@dataclass(slots=True)
class Documents:
    """All documents of a remote. Its methods are the event loop's; what blocks is done in `pool`, in which nothing
    waits for a body.

    They raise UnavailableError, ForbiddenError and WrongError, as Parents does. `doubted` is called with the place of
    what nobody has right: what was read for it may be wrong.
    """

    parents: Parents
    spool: Spool
    news: News
    pool: Executor
    doubted: Callable[[Place], None] = lambda place: None
    _lookups: dict[str, list[asyncio.Task[bytes | None]]] = field(default_factory=dict)

    async def get(self, asked: Named) -> bytes | None:
        """A document; None if a parent has said since this was called that it is absent."""
        if asked.kind in KEPT_DOCUMENTS:
            kept = await self._read_kept(label_of(asked))
            if kept is not None:
                self._saw(asked, kept)
                return kept
        data = await self._look_up(asked)
        if data is not None:
            self._saw(asked, data)
        elif asked.kind is Kind.HINT:
            self.news.hinted(None)
        return data

    async def history(self) -> str | None:
        """The id of the remote's history; None if it has none yet."""
        if self.parents.history is None:
            await self.get(require_named(HISTORY_KEY))
        return self.parents.history

    async def version_of(self, place: Place) -> Version | None:
        """The version of a place, committed or prepared; None if it is neither."""
        for key in (commit_key(place.version), prepared_key(place)):
            data = await self.get(require_named(key))
            try:
                version = decode_version(data, place.version, key).version if data is not None else None
            except DcrError:
                # One of a newer dcr.
                continue
            if version is not None and version.place == place:
                return version
        return None

    def keep(self, asked: Named, data: bytes) -> None:
        """Remember a document that is right, and is there; in a thread."""
        if asked.kind is Kind.COMMIT:
            keep_commit(self.spool, asked.number, data)
        elif asked.kind in KEPT_DOCUMENTS:
            self.spool.write(label_of(asked), data)

    def doubt(self, place: Place) -> None:
        """Ask anew for what binds an object of which nobody has one that is right: it may be that which is wrong."""
        forget_commit(self.spool, place.version)
        self.doubted(place)

    async def look(self, work: Callable[[], T]) -> T:
        """Do what blocks, but not for long, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def _read_kept(self, label: Label) -> bytes | None:
        kept = self.spool.find(label)
        if kept is None:
            return None
        if kept.size <= _LITTLE_BYTES:
            return self.spool.read(label)
        return await self.look(partial(self.spool.read, label))

    async def _look_up(self, asked: Named) -> bytes | None:
        """Ask for a document, once for all who wait to: in a request that begins after this was called."""
        lookups = self._lookups.setdefault(asked.key, [])
        if len(lookups) < 2:
            before = lookups[0] if lookups else None
            lookups.append(asyncio.create_task(self._look_up_after(before, asked)))
            lookups[-1].add_done_callback(_heard)
        return await asyncio.shield(lookups[-1])

    async def _look_up_after(self, before: asyncio.Task[bytes | None] | None, asked: Named) -> bytes | None:
        if before is not None:
            await asyncio.wait([before])
        try:
            version = await self.version_of(asked.place) if asked.kind is Kind.ANCHOR and asked.place else None
            return await self.look(lambda: self.parents.ask(partial(self._get, asked=asked, version=version)))
        except WrongError:
            if asked.place is not None:
                self.doubt(asked.place)
            if asked.kind is Kind.HISTORY:
                # It is not kept, so nothing but one answer says which history is the right one.
                self.parents.forget_history()
            raise
        finally:
            lookups = self._lookups[asked.key]
            del lookups[0]
            if not lookups:
                del self._lookups[asked.key]

    def _get(self, parent: Parent, *, asked: Named, version: Version | None) -> bytes | None:
        """Get a document of a parent, in a thread."""
        data = get_if_there(parent, asked.key, asked.most_bytes)
        if data is None:
            if asked.kind is Kind.COMMIT and asked.number <= self.news.head:
                raise BehindError
            return None
        _check(asked, data, self.parents.history, version)
        if self.parents.history is not None:
            self.spool.history = self.parents.history
        self.keep(asked, data)
        return data

    def _saw(self, asked: Named, data: bytes) -> None:
        if asked.kind is Kind.COMMIT:
            self.news.saw_commit(asked.number)
        elif asked.kind is Kind.HINT:
            self.news.hinted(data)


def _heard(task: asyncio.Task[bytes | None]) -> None:
    """Take note of what went wrong, where nobody waits any more who would."""
    if not task.cancelled():
        task.exception()


def _check(asked: Named, data: bytes, history: str | None, version: Version | None) -> None:
    """Raise DamagedError unless a document is right, and that of an anchor the one of its version, where that is known.
    What a newer dcr wrote is not for a relay to refuse."""
    try:
        check_document(asked, data, history)
        if version is not None:
            open_anchor(version, data, asked.key, Trust())
    except DamagedError:
        raise
    except DcrError:
        return
