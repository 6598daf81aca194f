"""What a remote has on the way to a version: commits, anchors and documents, asked for only as far as a way needs them.

Which way is taken is way.py's decision.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dcr_cli.errors import DamagedError, DcrError, NotFoundError, UnsupportedError, WrongBaseError
from dcr_cli.fetch.coming import ComingError, is_whole
from dcr_cli.fetch.download import FetchedDocuments, fetch_delta_documents
from dcr_cli.fetch.losses import Losses, RemovedError, SpoiledError, telling_spoiled
from dcr_cli.fetch.source import Source, commits_between, require_version
from dcr_cli.fetch.spool import Spool
from dcr_cli.fetch.way import Goal, Way, find_way, first_gap, is_worth_looking
from dcr_cli.remote.anchor import Anchor
from dcr_cli.remote.documents import fetch_anchor
from dcr_cli.remote.version import Published


class Scout:
    """Looks for a way from a receiver's own version, if it has one, to a target; remembers what was there.

    Around `losses` it looks for one from the start. `prefers_deltas`: an anchor costs the receiver much more than its
    bytes, and is taken where deltas lead nowhere.
    """

    def __init__(
        self, source: Source, own: Published | None, target: int, losses: Losses, *, prefers_deltas: bool = False
    ) -> None:
        self.goal = Goal(own.version.number if own is not None else None, target)
        self.anchors: dict[int, Anchor] = {}
        self._source = source
        self._losses = losses
        self._prefers_deltas = prefers_deltas
        self._faults: list[DcrError] = []
        self._asked: set[int] = set()
        first = own if own is not None and own.version.number <= target else None
        if first is None:
            newest = require_version(source, target)
            first = newest if newest.version.anchor == target else require_version(source, newest.version.anchor)
        self.commits = commits_between(source, first, target)

    @property
    def target(self) -> Published:
        return self.commits[self.goal.target]

    def way(self, own_bytes: int) -> Way:
        """Find the best way, for a receiver that holds so many bytes.

        WrongBaseError, or NotFoundError, if there is none; ComingError if that is because the newest version is not all
        there yet. What is damaged, or an anchor that is not signed as it has
        to be, is as good as none: what is wrong with it is raised if there is no other way.
        """
        way = self._best()
        if is_worth_looking(way, own_bytes) and not (way is not None and self._prefers_deltas):
            self._ask({self.goal.target, self.target.version.anchor})
            way = self._best()
        for version in self._others():
            if way is not None:
                break
            self._ask({version})
            way = self._best()
        if way is None:
            raise self._no_way()
        return way if way.anchor is None or self._has(way.anchor) else self.way(own_bytes)

    def documents(self, way: Way, spool: Spool | None) -> list[FetchedDocuments]:
        """Fetch the documents of a way's deltas; RemovedError if some are gone, SpoiledError if some are damaged."""
        found = []
        for version in way.deltas:
            published = self.commits[version]
            commit = published.version.delta
            if commit is None:
                raise RemovedError(self._source.shown, version)
            found.append(fetch_delta_documents(self._source.store, published, commit, spool))
        return found

    def _best(self) -> Way | None:
        deltas = {
            number: published.version.bytes
            for number, published in self.commits.items()
            if published.version.delta is not None
        }
        anchors = {
            number: published.version.bytes
            for number, published in self.commits.items()
            if published.version.delta is None and (number not in self._asked or number in self.anchors)
        }
        anchors |= {number: anchor.bytes for number, anchor in self.anchors.items()}
        left = {number: size for number, size in anchors.items() if number not in self._losses.anchors}
        by_deltas = find_way(self.goal, deltas, {}, missing=self._losses.deltas) if self._prefers_deltas else None
        return by_deltas or find_way(self.goal, deltas, left, missing=self._losses.deltas)

    def _ask(self, versions: set[int]) -> None:
        for version in sorted(versions - self._asked, reverse=True):
            self._asked.add(version)
            published = self.commits.get(version)
            if published is None or version in self._losses.anchors:
                continue
            try:
                with telling_spoiled(self._source.store, published.version.place, is_anchor=True):
                    anchor = fetch_anchor(self._source.store, published, self._source.trust)
            except SpoiledError as error:
                self._losses.add(error)
                continue
            except (WrongBaseError, UnsupportedError) as error:
                self._faults.append(error)
                continue
            if anchor is not None:
                self.anchors[version] = anchor

    def _has(self, version: int) -> bool:
        """Whether the anchor of a version is there, which its commit says it has."""
        self._ask({version})
        return version in self.anchors

    def _others(self) -> Iterator[int]:
        """Versions that may have an anchor though no commit on the way says so; older ones where those may serve."""
        own, target = self.goal
        if own is not None and own <= target:
            yield from range(target, own, -1)
            return
        oldest = min(self.commits)
        yield from range(target, oldest - 1, -1)
        while oldest > 1:
            before = require_version(self._source, oldest - 1)
            older = min(self.commits[oldest].version.anchor, before.version.anchor)
            self.commits = commits_between(self._source, require_version(self._source, older), target)
            yield from range(oldest - 1, older - 1, -1)
            oldest = older

    def _no_way(self) -> DcrError:
        for spoiled in self._losses.spoiled:
            # This is the end: whoever looks for ways around what is spoiled has none left.
            return DamagedError(spoiled.what, spoiled.facts, hint=spoiled.hint)
        if self._faults:
            return self._faults[0]
        own, target = self.goal
        if self._is_coming():
            return ComingError(self._source.shown, f"version {target} is committed, but not all of it is there yet")
        hint = f"dcr anchor CHECKPOINT {shlex.quote(self._source.shown)} makes one of the version that CHECKPOINT is at"
        if own is None or own > target:
            facts = f"no anchor from which version {target} can be reached{self._losses.words}"
            return NotFoundError(self._source.shown, facts, hint=hint)
        gap = first_gap(self.goal, self._deltas(), self._losses.deltas)
        facts = f"version {gap} is missing; no anchor at or after it{self._losses.words}"
        return WrongBaseError(self._source.shown, facts, hint=hint)

    def _is_coming(self) -> bool:
        """Whether the target is the newest version and lacks something; a gap before a whole one is there to stay."""
        target = self.goal.target
        if self._source.log.newest(target) != target:
            return False
        was_lacking = self._losses.deltas if self.target.version.delta is not None else self._losses.anchors
        return target in was_lacking or not is_whole(self._source, self.target)

    def _deltas(self) -> set[int]:
        return {number for number, published in self.commits.items() if published.version.delta is not None}
