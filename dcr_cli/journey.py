"""One way from where a receiver stands to a version, gone: fetched, and applied or installed.

Which way that is fetch/scout.py says, and what is done if a part of it is gone or damaged is advance.py's decision;
changing the checkpoint is that of apply.py and receiver/. Until the first change an error leaves the checkpoint as it
was; stopped later, the next run finishes it, without the remote where it can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.apply import ApplyWay, apply_chain
from dcr_cli.delta.chain import split
from dcr_cli.delta.delta import open_delta
from dcr_cli.engine.engines import Reloaded
from dcr_cli.errors import ConflictError
from dcr_cli.fetch.adoption import Standing
from dcr_cli.fetch.anchors import AnchorFetcher, wanted_of
from dcr_cli.fetch.beside import spool_beside
from dcr_cli.fetch.download import FetchedDocuments, at_once, fetch_versions
from dcr_cli.fetch.ending import arrival_at, end, is_due, note
from dcr_cli.fetch.held import leave_record
from dcr_cli.fetch.leaving import arrived, is_arriving, leaving_changes
from dcr_cli.fetch.losses import telling_spoiled_files
from dcr_cli.fetch.position import Position
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.scout import Scout
from dcr_cli.fetch.situation import Situation, look
from dcr_cli.fetch.source import Source, signers_of
from dcr_cli.fetch.spool import Spool, spool_of
from dcr_cli.fetch.way import Way
from dcr_cli.fetch.wish import Wish
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.cut.copied import fetch_forms
from dcr_cli.receiver.cut.shards import CutShards, find_shards
from dcr_cli.receiver.cut.through import install_cut
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.install import Manner, install
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.site import Allowance
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.survey import open_root
from dcr_cli.receiver.view import has_layout
from dcr_cli.remote.version import Published


@dataclass(slots=True)
class Trip:
    """What has been done so far, perhaps on several ways, each from where the one before was given up, or had failed.

    `before_bytes` the store had received before, `start` is where it began, `target` the version that it goes to.
    """

    before_bytes: int
    start: Standing | None = None
    target: int | None = None
    applied: tuple[int, ...] = ()
    reused_bytes: int = 0
    foreign: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    previous: str | None = None
    reloaded: tuple[Reloaded, ...] = ()
    published_changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Journey:
    """One way from where a receiver stands; what is done on it is noted in `trip`."""

    source: Source
    path: Path
    wish: Wish
    situation: Situation
    standing: Standing
    trip: Trip

    def stay(self, own: Published) -> PullResult:
        """Leave a receiver where it is; what is still due for that version is done, and it is noted if it was not."""
        position = self._position(own)
        noted = self.situation.position
        if noted is not None and noted.known == position.known and not self.standing.is_adopted:
            position = replace(noted, newer=position.newer)
        is_noted = position == noted and self.situation.is_at_position
        is_over = is_noted and not is_due(position, self.wish) and not is_arriving(self.wish, own.version.place)
        if not self.wish.dry_run and not is_over:
            with self._locked() as spool:
                self._adopt()
                self._arrive()
                if not is_noted:
                    note(self.path, position)
                if spool is not None:
                    # What led here, and was not known to have led here.
                    spool.keep([place for place in spool.places() if place.version > position.version])
                self.trip.reloaded = end(self.source.store, self.path, position, self.wish)
        return self._result(own, None, self.trip.applied)

    def go(self, scout: Scout) -> PullResult:
        """Go to the version that a scout looks for by the best way there is; RemovedError if a part of it is gone,
        SpoiledError if it is damaged in the remote."""
        if self.wish.dry_run:
            way = scout.way(self.situation.bytes)
            scout.documents(way, None)
            self._cut(scout, way)
            return self._result(scout.target, way, way.versions)
        with self._locked() as spool:
            way = scout.way(self.situation.bytes)
            cut = self._cut(scout, way)
            if spool is not None:
                self._adopt()
                self._arrive()
            documents = scout.documents(way, spool)
            if spool is not None:
                self._distrust()
            if spool is not None and way.anchor is not None:
                spool.expect(scout.commits[way.anchor])
            elif spool is not None:
                self._bring(spool, documents)
        if way.anchor is not None:
            self._install(scout, way.anchor, cut)
            with spool_of(self.path) as spool:
                self._bring(spool, documents)
        position = self._position(scout.target)
        if is_due(position, self.wish):
            with spool_of(self.path):
                self.trip.reloaded = end(self.source.store, self.path, position, self.wish)
        return self._result(scout.target, way, self.trip.applied)

    @contextmanager
    def _locked(self) -> Iterator[Spool | None]:
        """Keep other pulls from a checkpoint that there is already."""
        if self.situation.is_new:
            yield None
            return
        with spool_of(self.path) as spool:
            if look(self.path).position != self.situation.position:
                facts = "was brought to another version by another dcr just now"
                raise ConflictError(str(self.path), facts, hint="run the same command again")
            yield spool

    def _bring(self, spool: Spool, documents: list[FetchedDocuments]) -> None:
        """Fetch deltas, then apply as many at a time as go together; aside, the link is turned each time."""
        store, effort = self.source.store, self.wish.effort
        spool.keep([each.place for each in documents])
        if not documents:
            return
        self.trip.reused_bytes += fetch_versions(store, spool, documents, effort)
        left = documents
        while left and spool.is_of(self.path):
            left = self._apply(spool, left, keep_previous=self.wish.keep_previous)
        while left:
            with spool_of(self.path) as following:
                # All of it has come along, where the file system lets it.
                fetch_versions(store, following, left, effort)
                left = self._apply(following, left, keep_previous=False)

    def _apply(self, spool: Spool, documents: list[FetchedDocuments], *, keep_previous: bool) -> list[FetchedDocuments]:
        """Apply as many deltas as go at once, and note where the receiver is then: those that are left."""
        effort = self.wish.effort
        deltas = [open_delta(spool.path(each.place)) for each in documents[: at_once(documents)]]
        if self.wish.mode == ASIDE:
            deltas = list(split(deltas)[0])
        if self.wish.changes is not None:
            # What one changes is decoded against what the one before leaves.
            del deltas[1:]
        left = documents[len(deltas) :]
        position = self._position(documents[len(deltas) - 1].published)

        def prepare(folder: Path) -> None:
            """What is left goes along; and whoever finds the link turned, and nothing more, knows what led there."""
            if left:
                with spool_of(folder) as other:
                    spool.share([each.place for each in left], other)
            note(folder, position)

        with leaving_changes(self.wish, self.path, deltas[0], documents[0].place) as names:
            applied = apply_chain(
                deltas,
                self.path,
                ApplyWay(self.wish.mode, keep_previous=keep_previous, view=self.wish.view, before_seen=prepare),
                jobs=effort.jobs,
                progress=effort.progress,
                remote=self.source.shown,
            )
        self.trip.published_changes += tuple(names)
        note(self.path, position)
        is_there_still = applied.already or self.wish.mode != ASIDE
        spool.keep([each.place for each in left] if is_there_still else ())
        self._came_to(documents[: len(deltas)], applied.foreign, applied.previous)
        return left

    def _install(self, scout: Scout, version: int, cut: CutShards | None) -> None:
        """Bring the receiver to the version of an anchor, of which what it has is not fetched, and note that; one with
        a layout has the shards of `cut`."""
        published = scout.commits[version]
        request = self._request(scout, version)
        # What is in progress there could not be finished, or is what is gone on with.
        allowance = Allowance(repair=self.wish.is_repair or self.situation.is_marked)
        manner = Manner(self.wish.mode, allowance, self.wish.keep_previous)
        with telling_spoiled_files(self.source.store, published.version.place):
            if cut is not None:
                installed = self._install_cut(published, request, manner, cut)
            else:
                installed = install(self.path, request, manner)
                note(self.path, self._position(published))
        self.trip.applied += (version,)
        self.trip.unreadable = installed.unreadable
        self._left(installed.foreign, installed.previous)

    def _request(self, scout: Scout, version: int) -> Request:
        published = scout.commits[version]
        position = self._position(published)
        return Request(
            wanted_of(scout.anchors[version]),
            AnchorFetcher(self.source.store, published.version.place),
            self.source.shown,
            self.wish.effort,
            before_seen=lambda folder: note(folder, position),
        )

    def _install_cut(self, published: Published, request: Request, manner: Manner, cut: CutShards) -> InstallResult:
        """The same through the receiver's layout: the anchor's files are fetched, and its shards cut out of them."""
        place = published.version.place
        spool_at = spool_beside if self.situation.is_new else spool_of
        with spool_at(self.path) as spool:
            # All that came on another way to another anchor would take as much room again.
            spool.keep([place])
            with spool.files(place) as folder:
                spool.write_wanted(place, request.wanted)
                installed = install_cut(self.path, request, manner, cut, folder)
            note(self.path, self._position(published))
            spool.keep(())
        return installed

    def _cut(self, scout: Scout, way: Way) -> CutShards | None:
        """The shards of a receiver that comes to an anchor through a layout: what cannot be is refused before anything
        of it is fetched."""
        if way.anchor is None or not has_layout(self.path, self.wish.view):
            return None
        root, request = Path(os.path.realpath(self.path)), self._request(scout, way.anchor)
        with telling_spoiled_files(self.source.store, scout.commits[way.anchor].version.place):
            forms = fetch_forms(request)
        return find_shards(root, self.wish.view, request.wanted.skipped, forms)

    def _came_to(self, documents: list[FetchedDocuments], foreign: tuple[str, ...], previous: str | None) -> None:
        self.trip.applied += tuple(each.place.version for each in documents)
        self._left(foreign, previous)

    def _left(self, foreign: tuple[str, ...], previous: str | None) -> None:
        """Note what a change has left alone; of the folders before, the first is the one that was there."""
        self.trip.foreign = foreign
        self.trip.previous = self.trip.previous or previous

    def _adopt(self) -> None:
        """Leave a record of what was read, so that it need not be read again; and nothing of what was stopped."""
        if self.standing.held is not None and (self.standing.is_adopted or self.standing.held.read is not None):
            with open_root(os.path.realpath(self.path)) as root, Receiver(root) as receiver:
                leave_record(receiver, self.standing.held, self.standing.listing)

    def _arrive(self) -> None:
        """Have what was left of the receiver's version, when that was prepared, get its name: a run that was stopped
        may have brought the receiver there, and no more."""
        if self.standing.own is not None:
            self.trip.published_changes += arrived(self.wish, self.standing.own.version.place)

    def _distrust(self) -> None:
        """Note that what the receiver is built from is trusted by those alone who trust what comes now: should this be
        stopped, whoever finishes it does not know how it came."""
        noted = self.situation.position
        if noted is not None:
            keys = tuple(key for key in noted.trusted if bytes.fromhex(key) in self.wish.trust.keys)
            if keys != noted.trusted:
                note(self.path, replace(noted, trusted=keys))

    def _position(self, published: Published) -> Position:
        keys = signers_of(self.wish.trust, published)
        position = arrival_at(published, self.source.shown, keys, self.wish, self.situation.position)
        # From there on its log is the one that there is now.
        return replace(position, newer=None) if self.standing.has_lost_newest else position

    def _result(self, published: Published, way: Way | None, applied: tuple[int, ...]) -> PullResult:
        start = self.trip.start or self.standing
        return PullResult(
            checkpoint=str(self.path),
            remote=self.source.shown,
            mode=self.wish.mode,
            from_version=start.own.version.number if start.own is not None else None,
            version=published.version.number,
            target=published.version.target,
            applied=applied,
            changed=bool(applied) and not self.wish.dry_run,
            already=not applied,
            recovered=False,
            adopted=start.is_adopted,
            dry_run=self.wish.dry_run,
            way=way,
            downloaded_bytes=self.source.store.traffic.received_bytes - self.trip.before_bytes,
            reused_bytes=self.trip.reused_bytes,
            unreadable=self.trip.unreadable,
            foreign=self.trip.foreign,
            previous=self.trip.previous,
            reloaded=self.trip.reloaded,
            published_changes=self.trip.published_changes,
        )
