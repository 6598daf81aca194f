"""Says whether what a remote holds is whole: its log, and of every version that is there all that its commit binds.

It only gets, lists what it may, and writes nothing. What was pruned is not damage, as long as there is a way to
the newest version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dcr_cli.errors import DamagedError, DcrError, NotFoundError, WrongBaseError
from dcr_cli.remote.checking import TensorFound, check_anchor_file, check_content, check_payload, check_size
from dcr_cli.remote.documents import fetch_anchor, fetch_documents
from dcr_cli.remote.hint import GIVEN_UP, read_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import (
    ANCHORS,
    VERSIONS,
    Place,
    anchor_file_key,
    anchor_key,
    commit_key,
    manifest_key,
    payload_key,
)
from dcr_cli.remote.listing import Listing, list_if_allowed, sort_entries
from dcr_cli.remote.log import Log, no_versions
from dcr_cli.remote.signing import Trust, trust_in
from dcr_cli.remote.unnamed import Names, unnamed
from dcr_cli.remote.version import Published, check_follows
from dcr_cli.store.backend import Entry
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

Progress = Callable[[str, int, int], None]
Given = TypeVar("Given")
Got = TypeVar("Got")

# So many small objects are asked for at once, and so many commits are in hand.
_AT_ONCE, _COMMITS_AT_ONCE = 16, 1024
# A log with so many faults is none, however long it says it is.
_MOST_LOG_DAMAGES = 1000
_DAMAGE = (DamagedError, WrongBaseError, NotFoundError)


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that is not what it should be, or is not there."""

    what: str
    facts: str


@dataclass(frozen=True, slots=True)
class VerifyRemoteResult:
    """What was found. `matches` is true if nothing is damaged.

    Checked are the commits of all versions, the documents of the deltas and anchors that are there, and the objects
    that they name: by their sizes, or, if `is_deep`, by every byte; `checked_bytes` are those that were fetched of
    payloads and files. `pruned` versions have neither delta nor anchor any more. `unnamed_objects`, of `unnamed_bytes`
    together, are of no version, no anchor, and not of what next.json says is being made; that is no damage, and None
    where the remote does not list what it has.
    """

    remote: str
    history: str
    head: int
    matches: bool
    is_deep: bool
    checked_commits: int
    checked_deltas: int
    checked_anchors: int
    checked_bytes: int
    pruned: int
    damages: tuple[Damage, ...]
    unnamed_objects: int | None
    unnamed_bytes: int | None


def verify_remote(
    remote: str | Path,
    *,
    deep: bool = False,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyRemoteResult:
    """Check all that is in a remote, with `deep` every byte of it, and say all that is wrong; of a log with a thousand
    faults no more is looked at.

    With `trusted_keys`, what none of them has signed counts as damaged. Raises NotFoundError where there is no remote,
    or no version in it, TransportError, UnsupportedError, UsageError.
    """
    workers = threads(jobs)
    trust = trust_in(trusted_keys, "--trusted-key")
    with ExitStack() as stack:
        store = stack.enter_context(open_store(remote, storage_options, limit_bytes_per_second=limit_bytes_per_second))
        history = require_history(store)
        # What is committed after it was listed has a commit by the time that commits are read.
        listing, making = _list(store), _making(store, history.id)
        check = _Check(store, Log(store, history.id, trust), trust, stack.enter_context(_pool(workers)))
        head = check.log.newest(0)
        if not head:
            # What has compared nothing has found nothing whole.
            raise no_versions(store)
        published = check.read_log(head)
        if len(check.damages) < _MOST_LOG_DAMAGES:
            check.look(published)
            check.check_ways(published, head)
            check.check_all(published, is_deep=deep, progress=progress)
        unnamed = check.unnamed(listing, published, head, making) if listing is not None else None
        return VerifyRemoteResult(
            remote=store.shown,
            history=history.id,
            head=head,
            matches=not check.damages,
            is_deep=deep,
            checked_commits=len(published),
            checked_deltas=len(check.deltas),
            checked_anchors=len(check.anchors),
            checked_bytes=check.done_bytes,
            pruned=sum(number not in check.deltas | check.anchors for number in published),
            damages=tuple(check.damages),
            unnamed_objects=len(unnamed) if unnamed is not None else None,
            unnamed_bytes=sum(entry.size for entry in unnamed) if unnamed is not None else None,
        )


def _list(store: Store) -> Listing | None:
    """What a remote has of versions and anchors; None where it does not list both."""
    found = [list_if_allowed(store, prefix) for prefix in (VERSIONS, ANCHORS)]
    return sort_entries(entry for entries in found for entry in entries or ()) if None not in found else None


def _making(store: Store, history: str) -> Place | None:
    hint = read_hint(store)
    return hint.place if hint is not None and hint.history == history and hint.state != GIVEN_UP else None


def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "dcr-verify")


class _Check:
    """One check of a remote: what is there, what is damaged, how many bytes were read."""

    def __init__(self, store: Store, log: Log, trust: Trust, pool: ThreadPoolExecutor) -> None:
        self.log = log
        self.damages: list[Damage] = []
        self.deltas: set[int] = set()
        self.anchors: set[int] = set()
        self.done_bytes = 0
        self._store = store
        self._trust = trust
        self._pool = pool
        self._lock = threading.Lock()
        # Of each anchor whose document could be read, the keys of its files.
        self._files: dict[Place, frozenset[str]] = {}

    def read_log(self, head: int) -> dict[int, Published]:
        """Read all commits; those that are right, each of which follows the one before if that is right too."""
        found: dict[int, Published] = {}
        with ThreadPoolExecutor(_AT_ONCE, "dcr-log") as pool:
            for first in range(1, head + 1, _COMMITS_AT_ONCE):
                if len(self.damages) >= _MOST_LOG_DAMAGES:
                    break
                numbers = range(first, min(first + _COMMITS_AT_ONCE, head + 1))
                for number, each in zip(numbers, pool.map(self._read, numbers), strict=True):
                    before = found.get(number - 1)
                    if each is None:
                        continue
                    found[number] = each
                    if before is not None:
                        self._try(
                            lambda pair: check_follows(*pair), (before, each.version, self._name(commit_key(number)))
                        )
        return found

    def look(self, published: Mapping[int, Published]) -> None:
        """Find out of which versions the delta is there, and of which an anchor."""

        def look(number: int) -> tuple[bool, bool]:
            version = published[number].version
            keys = manifest_key(version.place) if version.delta is not None else None, anchor_key(version.place)
            has = [key is not None and self._store.stat(key, is_denied_absent=True) is not None for key in keys]
            return has[0], has[1]

        with ThreadPoolExecutor(_AT_ONCE, "dcr-look") as pool:
            numbers = sorted(published)
            for begin in range(0, len(numbers), _COMMITS_AT_ONCE):
                part = numbers[begin : begin + _COMMITS_AT_ONCE]
                for number, (has_delta, has_anchor) in zip(part, pool.map(look, part), strict=True):
                    self.deltas |= {number} if has_delta else set()
                    self.anchors |= {number} if has_anchor else set()

    def check_ways(self, published: Mapping[int, Published], head: int) -> None:
        """Note what is missing of what a prune always leaves: an anchor, and all deltas after the newest one."""
        newest = max(self.anchors, default=0)
        named = published[head].version.anchor if head in published else 0
        if named in published and newest < named:
            what = self._name(anchor_key(published[named].version.place))
            self._note(DamagedError(what, "is missing, though the newest commit names it and there is no newer one"))
        for number in range(newest + 1 if newest else head + 1, head + 1):
            if number in published and number not in self.deltas:
                version = published[number].version
                key = manifest_key(version.place) if version.delta is not None else anchor_key(version.place)
                if number != named:
                    facts = f"is missing, and the newest anchor, of version {newest}, is older"
                    self._note(DamagedError(self._name(key), facts))

    def check_all(self, published: Mapping[int, Published], *, is_deep: bool, progress: Progress | None) -> None:
        """Check the documents of what is there, and the objects that they name, the newest first."""
        total = sum(published[number].version.bytes for number in self.deltas)

        def tell(size: int) -> None:
            with self._lock:
                self.done_bytes += size
            if progress is not None:
                progress("verify", self.done_bytes, max(total, self.done_bytes))

        for number in sorted(self.deltas | self.anchors, reverse=True):
            if number in self.deltas:
                self._try(lambda each: self._check_delta(each, is_deep=is_deep, tell=tell), published[number])
            if number in self.anchors:
                self._try(lambda each: self._check_anchor(each, is_deep=is_deep, tell=tell), published[number])

    def unnamed(
        self, listing: Listing, published: Mapping[int, Published], head: int, making: Place | None
    ) -> list[Entry] | None:
        """What nobody names, once all was checked; None where the log is none."""
        if len(self.damages) >= _MOST_LOG_DAMAGES:
            return None
        return unnamed(listing, Names(published, head, making, self._files))

    def _check_delta(self, published: Published, *, is_deep: bool, tell: Callable[[int], None]) -> None:
        documents = fetch_documents(self._store, published)
        if documents is None:
            # Pruned meanwhile.
            return
        place = published.version.place

        def check(index: int) -> None:
            row = documents.manifest.payloads[index]
            if is_deep:
                check_payload(self._store, place, index, row)
                tell(row.bytes)
            else:
                check_size(self._store, payload_key(place, index), row.bytes)

        self._all(check, range(len(documents.manifest.payloads)))

    def _check_anchor(self, published: Published, *, is_deep: bool, tell: Callable[[int], None]) -> None:
        anchor = fetch_anchor(self._store, published, self._trust)
        if anchor is None:
            return
        place = published.version.place
        self._files[place] = frozenset(anchor_file_key(place, file.path) for file in anchor.files)
        if not is_deep:
            sizes = {anchor_file_key(place, file.path): file.size for file in anchor.files}
            self._all(lambda key: check_size(self._store, key, sizes[key]), sizes)
            return
        found = self._all(lambda file: check_anchor_file(self._store, anchor, file, tell), anchor.files)
        if found is not None:
            tensors: list[TensorFound] = [tensor for each in found for tensor in each]
            check_content(anchor, tensors, self._name(anchor_key(place)))

    def _all(self, work: Callable[[Given], Got], items: Iterable[Given]) -> list[Got] | None:
        """Do it for all, some at a time: the results, or None if any was damaged."""
        found = list(self._pool.map(lambda item: self._try(work, item), items))
        return [each for one in found for each in one] if all(found) else None

    def _try(self, work: Callable[[Given], Got], item: Given) -> tuple[Got, ...]:
        """The result, if there is one; what is damaged is noted."""
        try:
            return (work(item),)
        except _DAMAGE as error:
            self._note(error)
            return ()

    def _read(self, number: int) -> Published | None:
        try:
            return self.log.require(number)
        except _DAMAGE as error:
            self._note(error)
            return None

    def _note(self, error: DcrError) -> None:
        with self._lock:
            self.damages.append(Damage(error.what, error.facts))

    def _name(self, key: str) -> str:
        return f"{self._store.shown}/{key}"
