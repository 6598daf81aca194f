"""Objects as children are given them: from what is kept, or from a parent, once for all who ask.

A body is an arrival while it comes and kept afterwards; documents are asked for again each time, but for those that
never change. What an object has to be is found in other objects first, as its commit or its manifest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dcr_cli.delta.commit import open_manifest
from dcr_cli.delta.file_rules import RANGE_BYTES, RangedFile, range_count
from dcr_cli.delta.manifest import PayloadRow
from dcr_cli.errors import ConflictError, DamagedError, DcrError, LocalError, NotFoundError, TransportError
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.checks import Bound, body_check, check_document, table_bound
from dcr_cli.relay.commits import forget_commit, keep_commit
from dcr_cli.relay.kinds import KEPT_DOCUMENTS, Kind, Named, named
from dcr_cli.relay.news import News
from dcr_cli.relay.parents import ForbiddenError, Parent, Parents, UnavailableError, WrongError
from dcr_cli.relay.spool import FullError, Kept, Label, Spool
from dcr_cli.remote.anchor import decode_anchor, open_anchor
from dcr_cli.remote.keys import HISTORY_KEY, Place, anchor_key, commit_key, manifest_key, part_key, prepared_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Version, decode_version
from dcr_cli.store.calls import RefusedError

T = TypeVar("T")

# The part of an anchor's file that is all of it.
WHOLE = -1
# So often an object is asked for that comes and is not right; each time of the next parent, if there are several.
_ATTEMPTS = 3
# Of so many versions it is remembered what binds their payloads, and of so many anchors their files.
_VERSIONS, _ANCHORS = 64, 2


@dataclass(slots=True)
class Library:
    """All objects of a remote, by name. Its methods are the event loop's; what blocks is done in `pool`.

    They raise UnavailableError, ForbiddenError and WrongError, as Parents does.
    """

    parents: Parents
    spool: Spool
    news: News
    pool: Executor
    received_bytes: int = 0
    _arrivals: dict[str, Arrival] = field(default_factory=dict)
    _lookups: dict[str, list[asyncio.Task[bytes | None]]] = field(default_factory=dict)
    _rows: OrderedDict[Place, Sequence[PayloadRow]] = field(default_factory=OrderedDict)
    _files: OrderedDict[Place, dict[str, RangedFile]] = field(default_factory=OrderedDict)
    # What has come and was not right: how often, so that the next parent is asked first.
    _wrongs: dict[str, int] = field(default_factory=dict)

    # Documents

    async def document(self, asked: Named) -> bytes | None:
        """A document, None if the parent has said since this was asked that it is absent."""
        if asked.kind in KEPT_DOCUMENTS:
            kept = await self.run(lambda: self.spool.read(label_of(asked)))
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
            asked = named(HISTORY_KEY)
            assert asked is not None
            await self.document(asked)
        return self.parents.history

    async def version_of(self, place: Place) -> Version | None:
        """The version of a place, committed or prepared; None if it is neither."""
        for key in (commit_key(place.version), prepared_key(place)):
            asked = named(key)
            assert asked is not None
            data = await self.document(asked)
            try:
                version = decode_version(data, place.version, key).version if data is not None else None
            except DcrError:
                # One of a newer dcr.
                continue
            if version is not None and version.place == place:
                return version
        return None

    def keep_document(self, asked: Named, data: bytes) -> None:
        """Remember a document that is right, and is there."""
        if asked.kind is Kind.COMMIT:
            keep_commit(self.spool, asked.number, data)
        elif asked.kind in KEPT_DOCUMENTS:
            self.spool.write(label_of(asked), data)

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

        def question(parent: Parent) -> bytes | None:
            data = parent.store.get(asked.key, most_bytes=asked.most_bytes, is_denied_absent=True)
            if data is not None:
                _check(asked, data, self.parents.history, version)
                self.keep_document(asked, data)
            return data

        try:
            version = await self.version_of(asked.place) if asked.kind is Kind.ANCHOR and asked.place else None
            return await self.run(lambda: self.parents.ask(question))
        except WrongError:
            self._doubt(asked)
            if asked.kind is Kind.HISTORY:
                # It is not kept, so nothing but one answer says which history is the right one.
                self.parents.forget_history()
            raise
        finally:
            lookups = self._lookups[asked.key]
            del lookups[0]
            if not lookups:
                del self._lookups[asked.key]

    def _doubt(self, asked: Named) -> None:
        """Ask anew for what binds an object of which nobody has one that is right: it may be that which is wrong."""
        if asked.place is not None:
            forget_commit(self.spool, asked.place.version)
            self._rows.pop(asked.place, None)
            self._files.pop(asked.place, None)

    def _saw(self, asked: Named, data: bytes) -> None:
        if asked.kind is Kind.COMMIT:
            self.news.reached(asked.number)
        elif asked.kind is Kind.HINT:
            self.news.hinted(data)

    # Bodies

    async def body(self, asked: Named, part: int = 0) -> Arrival | Kept | None:
        """A body, or a range of an anchor's file: kept and right, or an arrival that is open; None if it is absent."""
        if await self.history() is None:
            return None
        for _ in range(_ATTEMPTS):
            bound = await self._bound(asked, part)
            if bound is None:
                return None
            kept = self.spool.find(label_of(asked, part))
            if kept is not None and bound.blake3 not in (None, kept.blake3):
                self.spool.forget(kept)
                kept = None
            if kept is not None and (kept.is_checked or await self.run(partial(self.spool.check, kept))):
                return kept
            arrival = self._arrivals.get(label_of(asked, part).name)
            if arrival is None:
                arrival = self.begin(asked, part)
                self.pool.submit(self._fetch, arrival, asked, bound)
            arrival.open()
            await arrival.known()
            if arrival.state in (State.COMING, State.RIGHT):
                if asked.kind is Kind.PAYLOAD and asked.place is not None:
                    self.news.saw_payload(asked.place, asked.number)
                return arrival
            await arrival.ended()
            arrival.close()
            if arrival.state is State.ABSENT:
                return None
            if arrival.state is State.FAILED:
                raise ForbiddenError if isinstance(arrival.error, ForbiddenError) else UnavailableError
        raise WrongError

    def begin(self, asked: Named, part: int = 0) -> Arrival:
        """Begin an arrival that all who ask for the object are given from now on, until it has ended."""
        label = label_of(asked, part)
        begin = max(part, 0) * RANGE_BYTES
        arrival = Arrival(self.spool, label, ended=self._ended, begin=begin, is_kept=part != WHOLE)
        self._arrivals[label.name] = arrival
        return arrival

    def coming(self, asked: Named, part: int = 0) -> Arrival | None:
        """The arrival of an object, if it is on its way."""
        return self._arrivals.get(label_of(asked, part).name)

    async def size_of_file(self, asked: Named) -> int | None:
        """How long a file of an anchor is; None if there is none."""
        file = await self._file(asked)
        return file.size if file is not None else None

    async def run(self, work: Callable[[], T]) -> T:
        """Do what blocks in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def _ended(self, arrival: Arrival) -> None:
        name = arrival.label.name
        del self._arrivals[name]
        if arrival.state is State.WRONG:
            self._wrongs[name] = self._wrongs.get(name, 0) + 1
            asked = named(arrival.label.key)
            if asked is not None and self._wrongs[name] >= len(self.parents.all):
                self._doubt(asked)
        else:
            self._wrongs.pop(name, None)

    def _fetch(self, arrival: Arrival, asked: Named, bound: Bound) -> None:
        """Fetch a body, in a thread, from the first parent that has all of it."""
        try:
            state, blake3, error = self._come(arrival, asked, bound)
        except BaseException as unknown:
            # Whoever waits is told, whatever it was.
            arrival.end(State.FAILED, error=UnavailableError(str(unknown)))
            raise
        arrival.end(state, blake3=blake3, error=error)

    def _come(self, arrival: Arrival, asked: Named, bound: Bound) -> tuple[State, bytes | None, Exception | None]:
        history = self.parents.history
        assert history is not None
        is_range = asked.kind is Kind.ANCHOR_FILE
        check = body_check(asked, bound, history)
        # The end of what is wanted, and the size of the object, as far as they are known.
        end = arrival.begin + bound.size if is_range and bound.size is not None else None
        size = bound.size if not is_range else None
        ending: Exception = UnavailableError()
        for parent in self._in_turn(arrival):
            try:
                self.parents.prove(parent)

                def announce(total: int) -> None:
                    if total > asked.most_bytes:
                        raise DamagedError(asked.key, f"has {total} bytes, at most {asked.most_bytes} expected")
                    arrival.announce(total if end is None else end - arrival.begin)

                begin = arrival.begin + arrival.at
                for chunk in parent.store.stream(asked.key, begin=begin, end=end, size=size, told=announce):
                    self.received_bytes += len(chunk)
                    check.update(chunk)
                    arrival.add(chunk)
                blake3 = check.finish()
            except NotFoundError:
                if not arrival.at:
                    return State.ABSENT, None, None
                continue
            except FullError:
                return State.FAILED, None, UnavailableError()
            except (DamagedError, ConflictError):
                return State.WRONG, None, None
            except RefusedError:
                ending = ForbiddenError()
                continue
            except (TransportError, LocalError):
                self.parents.failed(parent)
                continue
            except DcrError:
                return State.WRONG, None, None
            parent.failed_at = None
            return State.RIGHT, blake3, None
        return State.FAILED, None, ending

    def _in_turn(self, arrival: Arrival) -> list[Parent]:
        """The parents, beginning with the one after those from which the object has come and was not right."""
        parents = list(self.parents)
        first = self._wrongs.get(arrival.label.name, 0) % len(parents)
        return parents[first:] + parents[:first]

    # What binds them

    async def _bound(self, asked: Named, part: int) -> Bound | None:
        """What binds a body, as far as anything does; None if it is absent, for what would bind it is."""
        assert asked.place is not None
        if asked.kind is Kind.ANCHOR_FILE:
            file = await self._file(asked)
            if file is None or part >= range_count(file.size):
                return None
            size = min(RANGE_BYTES, file.size - part * RANGE_BYTES)
            return Bound(size, file.ranges[part])
        if asked.kind is Kind.TABLE:
            document = named(part_key(asked.place, f"{asked.number:05d}.json"))
            assert document is not None
            data = await self.document(document)
            return _read(lambda: table_bound(document, data)) if data is not None else None
        if asked.kind is Kind.PAYLOAD:
            return await self._payload_bound(asked)
        version = await self.version_of(asked.place)
        if version is None or version.delta is None:
            return None
        if asked.kind is Kind.MANIFEST:
            return Bound(version.delta.manifest_bytes, version.delta.manifest_blake3)
        return Bound(version.delta.digests_bytes, version.delta.digests_blake3)

    async def _payload_bound(self, asked: Named) -> Bound | None:
        assert asked.place is not None
        rows = self._rows.get(asked.place)
        if rows is None and asked.place != self.news.making:
            with suppress(UnavailableError):
                rows = await self.payload_rows(asked.place)
        if rows is None:
            return Bound()
        if asked.number >= len(rows):
            return None
        row = rows[asked.number]
        return Bound(row.bytes, row.blake3)

    async def payload_rows(self, place: Place) -> Sequence[PayloadRow] | None:
        """What the manifest of a version says of its payloads; None if there is none, or none that can be read."""
        version = await self.version_of(place)
        asked = named(manifest_key(place))
        assert asked is not None
        if version is None or version.delta is None:
            return None
        data = await self._whole(asked)
        commit = version.delta
        if data is None:
            return None
        try:
            rows = (await self.run(lambda: open_manifest(commit, data, asked.key))).payloads
        except DcrError:
            return None
        self._rows[place] = rows
        if len(self._rows) > _VERSIONS:
            self._rows.popitem(last=False)
        return rows

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
        return await self.run(lambda: self.spool.read(label_of(asked))) if found is not None else None

    async def _file(self, asked: Named) -> RangedFile | None:
        """What the anchor's document says of one of its files."""
        place = asked.place
        assert place is not None
        files = self._files.get(place)
        if files is None:
            document = named(anchor_key(place))
            assert document is not None
            data = await self.document(document)
            if data is None:
                return None
            anchor = (await self.run(lambda: _read(lambda: decode_anchor(data, place, document.key))))[0]
            files = self._files[place] = {file.path: file for file in anchor.files}
            if len(self._files) > _ANCHORS:
                self._files.popitem(last=False)
        return files.get(asked.path)


def label_of(asked: Named, part: int = 0) -> Label:
    """What is kept of an object, or of a range of it, is called so."""
    return Label(asked.key, part, asked.version)


def _heard(task: asyncio.Task[bytes | None]) -> None:
    """Take note of what went wrong, where nobody waits any more who would."""
    if not task.cancelled():
        task.exception()


def _read(read: Callable[[], T]) -> T:
    """What a document says. WrongError if it is one of a newer dcr, which can be handed on, but not be read."""
    try:
        return read()
    except DcrError as error:
        raise WrongError from error


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
