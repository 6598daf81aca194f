"""Brings a receiver from where it stands to a version of a remote: chooses the way, fetches, and has it applied.

What is asked of a remote, and how, is fetch/'s matter, changing the checkpoint that of apply.py and receiver/. Until
the first change an error leaves the checkpoint as it was; stopped later, the next run finishes it, without the remote
where it can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.apply import ApplyResult, Way as ApplyWay, apply_chain
from dcr_cli.delta.chain import MOST_AT_ONCE, split
from dcr_cli.delta.delta import open_delta
from dcr_cli.errors import ConflictError, NotFoundError, WrongBaseError
from dcr_cli.fetch.adoption import Standing, find_standing
from dcr_cli.fetch.anchors import AnchorFetcher, wanted_of
from dcr_cli.fetch.download import Documents, RemovedError, fetch_versions
from dcr_cli.fetch.ending import arrival_at, end, is_due, note
from dcr_cli.fetch.held import leave_record
from dcr_cli.fetch.position import Position
from dcr_cli.fetch.prepared import find_prepared, stage
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.scout import Scout
from dcr_cli.fetch.situation import Situation, look
from dcr_cli.fetch.source import Source, open_source, require_version, signers_of
from dcr_cli.fetch.spool import Spool, spool_of
from dcr_cli.fetch.way import Way
from dcr_cli.fetch.wish import Wish
from dcr_cli.finishing import check_overtakable
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.install import Manner, install
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.site import Allowance
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


def advance(store: Store, path: Path, wish: Wish) -> PullResult:
    """Bring the checkpoint at `path` to what is wished for; what `finish` could finish has been finished."""
    before_bytes = store.traffic.received_bytes
    while True:
        situation = look(path)
        if situation.is_marked and not wish.is_repair:
            check_overtakable(path)
        position = situation.position if not wish.is_repair else None
        source = open_source(store, wish.trust, position.history if position is not None else None)
        if wish.version is not None:
            target = require_version(source, wish.version).version.number
        else:
            target = source.log.newest(position.version if position is not None else 0)
        if not target:
            hint = f"dcr push CHECKPOINT {store.shown} makes the first one"
            raise NotFoundError(store.shown, "holds no versions yet", hint=hint)
        standing = find_standing(source, situation, target, wish)
        step = _Advance(source, path, wish, situation, standing, before_bytes)
        if standing.own is not None and standing.own.version.number == target:
            return step.stay(standing.own)
        try:
            return step.go(target)
        except (WrongBaseError, NotFoundError):
            # The way there may have been pruned meanwhile; then one leads to the version that is the newest now.
            if wish.version is not None or source.log.newest(target) == target:
                raise


def stage_next(store: Store, path: Path, wish: Wish) -> int | None:
    """Stage the version after the one that the receiver at `path` is at, if it is prepared: its number."""
    position = look(path).position
    if position is None:
        return None
    source = open_source(store, wish.trust, position.history)
    prepared = find_prepared(source, position.known)
    if prepared is None:
        return None
    with spool_of(path) as spool:
        stage(source, path, spool, prepared, wish)
    return prepared.version.number


@dataclass(frozen=True, slots=True)
class _Advance:
    """One way from where a receiver stands to a version."""

    source: Source
    path: Path
    wish: Wish
    situation: Situation
    standing: Standing
    before_bytes: int

    def stay(self, own: Published) -> PullResult:
        """Leave a receiver where it is; what is still due for that version is done, and it is noted if it was not."""
        position = self._position(own)
        noted = self.situation.position
        if noted is not None and noted.known == position.known and not self.standing.is_adopted:
            position = noted
        is_noted = position == noted and self.situation.is_at_position
        if not self.wish.dry_run and (not is_noted or is_due(position, self.wish)):
            with self._locked():
                self._adopt()
                if not is_noted:
                    note(self.path, position)
                end(self.source.store, self.path, position, self.wish)
        return self._result(own, None, is_changed=False)

    def go(self, target: int) -> PullResult:
        """Go to another version by the best way; by another one if a part of that turns out to be gone."""
        scout = Scout(self.source, self.standing.own, target)
        while True:
            try:
                return self._go(scout)
            except RemovedError as error:
                if look(self.path).position != self.situation.position:
                    # An anchor was come to before; from there the next run looks for a way.
                    raise
                scout.miss(error.version)

    def _go(self, scout: Scout) -> PullResult:
        if self.wish.dry_run:
            way = scout.way(self.situation.bytes)
            scout.documents(way, None)
            return self._result(scout.target, way, is_changed=True)
        foreign: tuple[str, ...] = ()
        previous, reused_bytes = None, 0
        with self._locked() as spool:
            way = scout.way(self.situation.bytes)
            documents = scout.documents(way, spool)
            if spool is not None:
                self._adopt()
                self._distrust()
            if spool is not None and way.anchor is not None:
                spool.expect(scout.commits[way.anchor])
            elif spool is not None:
                done, reused_bytes = self._bring_all(spool, documents)
                foreign, previous = done.foreign, done.previous
        if way.anchor is not None:
            installed = self._install(scout, way.anchor)
            foreign, previous = installed.foreign, installed.previous
            with spool_of(self.path) as spool:
                spool.keep([each.place for each in documents])
                if documents:
                    done, reused_bytes = self._bring_all(spool, documents)
                    foreign, previous = done.foreign, previous or done.previous
        position = self._position(scout.target)
        if is_due(position, self.wish):
            with spool_of(self.path):
                end(self.source.store, self.path, position, self.wish)
        result = self._result(scout.target, way, is_changed=True)
        return replace(result, foreign=foreign, previous=previous, reused_bytes=reused_bytes)

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

    def _bring_all(self, spool: Spool, documents: list[Documents]) -> tuple[ApplyResult, int]:
        """Fetch and apply deltas: what came of it, and how many bytes of payloads were there already.

        Where the link has to be turned more than once, what was fetched goes with its folder.
        """
        applied, reused_bytes, count = self._bring(spool, documents, keep_previous=self.wish.keep_previous)
        while count < len(documents):
            with spool_of(self.path) as following:
                result, reused, more = self._bring(following, documents[count:], keep_previous=False)
            count += more
            reused_bytes += reused
            applied = replace(result, previous=applied.previous)
        return applied, reused_bytes

    def _bring(self, spool: Spool, documents: list[Documents], *, keep_previous: bool) -> tuple[ApplyResult, int, int]:
        """Fetch deltas, apply as many as go at once, and note where the receiver is then: how many these are, last."""
        effort = self.wish.effort
        # Aside, what is fetched and not applied at once would be fetched again.
        documents = documents[:MOST_AT_ONCE] if self.wish.mode == ASIDE else documents
        spool.keep([each.place for each in documents])
        reused_bytes = fetch_versions(self.source.store, spool, documents, effort)
        deltas = [open_delta(spool.path(each.place)) for each in documents]
        if self.wish.mode == ASIDE:
            deltas = list(split(deltas)[0])
        applied = apply_chain(
            deltas,
            self.path,
            ApplyWay(self.wish.mode, keep_previous=keep_previous),
            jobs=effort.jobs,
            progress=effort.progress,
            remote=self.source.shown,
        )
        note(self.path, self._position(documents[len(deltas) - 1].published))
        spool.keep(())
        return applied, reused_bytes, len(deltas)

    def _install(self, scout: Scout, version: int) -> InstallResult:
        """Bring the receiver to the version of an anchor, of which what it has is not fetched, and note that."""
        published = scout.commits[version]
        fetcher = AnchorFetcher(self.source.store, published.version.place)
        request = Request(wanted_of(scout.anchors[version]), fetcher, self.source.shown, self.wish.effort)
        # What is in progress there could not be finished, or is what is gone on with.
        allowance = Allowance(repair=self.wish.is_repair or self.situation.is_marked)
        manner = Manner(self.wish.mode, allowance, self.wish.keep_previous)
        installed = install(self.path, request, manner)
        note(self.path, self._position(published))
        return installed

    def _adopt(self) -> None:
        """Leave a record of what was read, so that it need not be read again; and nothing of what was stopped."""
        if self.standing.held is not None and (self.standing.is_adopted or self.standing.held.read is not None):
            with open_root(os.path.realpath(self.path)) as root, Receiver(root) as receiver:
                leave_record(receiver, self.standing.held, self.standing.listing)

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
        return arrival_at(published, self.source.shown, keys, self.wish, self.situation.position)

    def _result(self, published: Published, way: Way | None, *, is_changed: bool) -> PullResult:
        own = self.standing.own
        return PullResult(
            checkpoint=str(self.path),
            remote=self.source.shown,
            mode=self.wish.mode,
            from_version=own.version.number if own is not None else None,
            version=published.version.number,
            target=published.version.target,
            applied=way.versions if way is not None else (),
            changed=is_changed and not self.wish.dry_run,
            already=not is_changed,
            recovered=False,
            adopted=self.standing.is_adopted,
            dry_run=self.wish.dry_run,
            way=way,
            downloaded_bytes=self.source.store.traffic.received_bytes - self.before_bytes,
        )
