"""Publishes a checkpoint as the next version of a remote: what changed since the version before, committed last.

Where the baseline lies and how it moves is publisher/'s matter, what a remote's objects mean remote/'s.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.apply import Way, apply_chain
from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.checkpoint.patterns import check_recorded_patterns
from dcr_cli.content import Progress, Workers, read_state
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.output import DeltaOutput, Sink
from dcr_cli.diff import DiffResult, diff_into
from dcr_cli.durable import Folder
from dcr_cli.errors import NotFoundError, UsageError, WrongBaseError
from dcr_cli.fetch.position import position_at
from dcr_cli.publisher.anchors import AnchorPlan, PublishedAnchor, publish_anchor
from dcr_cli.publisher.baseline import Baseline, check_places, default_baseline, open_baseline
from dcr_cli.publisher.catching_up import catch_up, knows_its_version
from dcr_cli.publisher.committing import Author, Outcome
from dcr_cli.publisher.encodings import allowed_in, chosen_encodings
from dcr_cli.publisher.outgoing import Outgoing, begin_anchor, drop_outgoing, outgoing_path
from dcr_cli.publisher.publication import Publication
from dcr_cli.publisher.push_result import PushResult
from dcr_cli.publisher.quorum import Quorum, wait_for
from dcr_cli.publisher.readiness import check_ready, check_settled
from dcr_cli.receiver.change import IN_PLACE
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.anchor import Anchor
from dcr_cli.remote.history import ENCODINGS, History, encode_history, read_history
from dcr_cli.remote.keys import APPLIED, HISTORY_KEY, Place, new_id
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import load_signing_key
from dcr_cli.remote.version import ANCHOR, DELTA, AnchorParts, Published
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

__all__ = ["PushResult", "push"]

_SAME, _PREPARED = "same", "prepared"


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to publish, but for what and where."""

    base: Path | None = None
    baseline: Path | None = None
    baseline_link: bool = False
    encodings: tuple[str, ...] | None = None
    encoding: str = "auto"
    no_delta: bool = False
    anchor_every: int | None = None
    prepare: bool = False
    dry_run: bool = False


def push(
    checkpoint: str | os.PathLike[str],
    remote: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    baseline: str | os.PathLike[str] | None = None,
    baseline_link: bool = False,
    encodings: Sequence[str] | None = None,
    encoding: str = "auto",
    no_delta: bool = False,
    anchor_every: int | None = None,
    prepare: bool = False,
    wait_applied: int | None = None,
    timeout_seconds: float = 900.0,
    ready: str | None = None,
    settle_seconds: float = 0.0,
    skip: Sequence[str] = (),
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    publisher: str = "",
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Publish `checkpoint` as the next version of `remote`.

    The first version, and one with `no_delta`, is an anchor: the files as they are. Any other is a delta from the
    baseline, a copy of the version before that is kept beside the checkpoint or in `baseline`, or from `base`, a
    checkpoint that is at that version. Nobody sees anything of a version before its commit, the last object that is
    written. A push that was stopped is gone on with by the next. With `wait_applied` it returns when so many receivers
    have acknowledged that they are at the version.

    Raises UsageError, NotFoundError, DamagedError, WrongBaseError (the remote holds another history, or there is no
    baseline), ConflictError (another publisher was faster, another push runs, the source changes or is not ready),
    TransportError, UnsupportedError (the remote cannot create an object only once), LocalError.
    """
    check_recorded_patterns(skip)
    check_path(checkpoint, "checkpoint")
    check_places(checkpoint, remote, baseline)
    options = PushOptions(
        base=Path(base) if base is not None else None,
        baseline=Path(baseline) if baseline is not None else None,
        baseline_link=baseline_link,
        encodings=chosen_encodings(encodings),
        encoding=encoding,
        no_delta=no_delta,
        anchor_every=anchor_every,
        prepare=prepare,
        dry_run=dry_run,
    )
    _check_options(options)
    wanted = Quorum(wait_applied, APPLIED, timeout_seconds) if wait_applied is not None else None
    if wanted is not None and prepare:
        facts = "nobody can be at a version that is prepared and not committed"
        raise UsageError("--wait-applied", facts, hint="dcr commit --quorum K waits for receivers that have staged it")
    key = load_signing_key(sign_key) if sign_key is not None else None
    check_ready(Path(checkpoint), ready)
    source = open_checkpoint(checkpoint, skip=skip)
    check_settled(source, settle_seconds, time.time())
    with open_store(
        remote, storage_options, is_single_writer=single_writer, limit_bytes_per_second=limit_bytes_per_second
    ) as store:
        author = Author(publisher, key)
        run = _Push(store, source, options, author, Effort(threads(jobs), progress))
        result = run.run()
        if wanted is not None and run.published is not None:
            applied = wait_for(store, run.published.version, wanted, is_committed=True)
            result = replace(result, applied=applied)
        return result


class _Push:
    """One push, from what the remote holds to the baseline that has moved on."""

    def __init__(self, store: Store, source: Checkpoint, options: PushOptions, author: Author, effort: Effort) -> None:
        self._store = store
        self._source = source
        self._options = options
        self._author = author
        self._effort = effort
        self._uploaded_bytes = 0
        self._recovered = False
        self.published: Published | None = None

    def run(self) -> PushResult:
        # Where absence looks like a lack of rights, only creating it tells.
        history = read_history(self._store, is_denied_absent=True)
        if history is None:
            if self._options.dry_run:
                return self._first_without_doing()
            history = self._begin_history()
        self._check_encodings(history)
        if not self._options.dry_run:
            self._store.prove_exclusive(HISTORY_KEY)
        path = self._options.baseline or default_baseline(self._source.root, history.id)
        with Baseline(path) as baseline:
            return self._publish(history, Log(self._store, history.id), baseline)

    # Beginning

    def _first_without_doing(self) -> PushResult:
        state, _ = self._read_source()
        return self._result("", None, ANCHOR, None, state, delta_bytes=_bytes_of(self._source))

    def _begin_history(self) -> History:
        """Begin a history, unless somebody else is faster; the place of its baseline is known to be there before."""
        own = History(new_id(), self._options.encodings or ENCODINGS, self._author.now(), self._author.publisher)
        if self._keeps_baseline:
            path = self._options.baseline or default_baseline(self._source.root, own.id)
            with Baseline(path) as baseline:
                if not self._options.baseline_link and not baseline.can_clone(self._source):
                    baseline.check_room(_bytes_of(self._source), len(self._source.identities))
        self._store.put_if_absent(HISTORY_KEY, encode_history(own))
        history = read_history(self._store)
        if history is None:
            raise NotFoundError(self._store.shown, f"{HISTORY_KEY} was written, but is not there")
        return history

    @property
    def _keeps_baseline(self) -> bool:
        return self._options.base is None

    def _check_encodings(self, history: History) -> None:
        wanted = self._options.encodings
        if wanted is not None and set(wanted) != set(history.encodings):
            facts = f"the remote's are {','.join(history.encodings)}, since its first push"
            raise UsageError("--encodings", facts, hint="use another address for other encodings")
        self._allowed = allowed_in(history, self._options.encoding)

    # Publishing

    def _publish(self, history: History, log: Log, baseline: Baseline) -> PushResult:
        publication = Publication(self._store, log, baseline.home, self._author)
        head = publication.find_head(baseline.position(), f"the baseline {baseline.path}")
        own = publication.find_own() if not self._options.dry_run else None
        if own is not None:
            self._recovered = True
            if baseline.has_checkpoint or not self._keeps_baseline:
                self._move(baseline, own)
            else:
                # The files that it was to be second names of are looked at again.
                drop_outgoing(baseline.home)
        if head is None or self._options.no_delta:
            return self._publish_anchor(publication, baseline)
        base = self._base(log, baseline, head)
        if self._options.dry_run:
            return self._compare_without_doing(history, base, head)
        return self._publish_delta(publication, baseline, head, base)

    def _base(self, log: Log, baseline: Baseline, head: Published) -> Checkpoint:
        """The checkpoint that the delta starts from, at the newest version as far as is known without reading it."""
        if self._options.base is not None:
            return open_checkpoint(self._options.base, skip=self._source.skipped, what="base")
        if not (baseline.has_checkpoint and knows_its_version(baseline, log, head, self._store.shown)):
            self._begin_baseline(log, baseline, head)
        position = baseline.position()
        if position is not None and position.version < head.version.number:
            self._catch_up(baseline, head)
        return open_baseline(baseline.path, self._source, head)

    def _begin_baseline(self, log: Log, baseline: Baseline, head: Published) -> None:
        """Make the baseline from the checkpoint itself, if it is at one of the newest versions; one that was begun and
        whose checkpoint is another now comes from the remote."""
        state, _ = self._read_source()
        published = log.find_state(state, head.version.number)
        if published is not None:
            if not self._options.dry_run:
                self._fill(baseline)
                baseline.move_to(position_at(published, self._store.shown))
            return
        if baseline.is_begun and not self._options.dry_run:
            baseline.empty()
            self._catch_up(baseline, head)
            return
        facts = f"holds history {log.history}, and neither a baseline nor {self._source.root} is at a version of it"
        hint = "give --base, a checkpoint at its newest version, or --no-delta, or use another address"
        raise WrongBaseError(self._store.shown, facts, hint=hint)

    def _catch_up(self, baseline: Baseline, head: Published) -> None:
        if self._options.dry_run:
            facts = f"is behind version {head.version.number}, and a dry run does not bring it there"
            raise WrongBaseError(str(baseline.path), facts, hint="dcr push without --dry-run does")
        catch_up(self._store, baseline, head, self._effort)

    def _compare_without_doing(self, history: History, base: Checkpoint, head: Published) -> PushResult:
        with DeltaOutput(None, outside=(), dry_run=True) as sink:
            found = self._diff(sink, base, head)
        kind = _SAME if found.same else DELTA
        return self._result(history.id, None, kind, head, found.target, found=found, delta_bytes=found.delta_bytes)

    def _publish_delta(
        self, publication: Publication, baseline: Baseline, head: Published, base: Checkpoint
    ) -> PushResult:
        sink, found = publication.send(lambda sink: self._diff(sink, base, head), self._effort.jobs)
        if found.same:
            self.published = head
            return self._result(publication.history, head.version.place, _SAME, head, found.target, found=found)
        self._uploaded_bytes += sink.sent_bytes
        anchor = publication.anchor_before()
        if self._options.prepare:
            size = publication.prepare(sink.place, sink.commit, anchor)
            return self._sent(publication, sink, size, found, kind=_PREPARED)
        done = publication.commit(sink.place, sink.commit, anchor)
        self._move(baseline, done.published)
        number = sink.place.version
        if self._options.anchor_every is not None and number - anchor >= self._options.anchor_every:
            self._add_anchor(publication.history, baseline, done.published)
            anchor = number
        kind = DELTA if done.outcome is Outcome.WON else _SAME
        return self._sent(publication, sink, done.commit_bytes, found, kind=kind, anchor=anchor)

    def _sent(
        self,
        publication: Publication,
        sink: Outgoing,
        commit_bytes: int,
        found: DiffResult,
        *,
        kind: str,
        anchor: int | None = None,
    ) -> PushResult:
        """The result of a version that was sent."""
        self._uploaded_bytes += commit_bytes
        place = self.published.version.place if self.published is not None else sink.place
        size = sink.bytes + commit_bytes
        head = publication.head
        return self._result(
            publication.history, place, kind, head, found.target, found=found, delta_bytes=size, anchor=anchor
        )

    def _diff(self, sink: Sink, base: Checkpoint, head: Published) -> DiffResult:
        found = diff_into(
            sink, base, self._source, allowed=self._allowed, jobs=self._effort.jobs, progress=self._effort.progress
        )
        if found.base != head.version.target:
            facts = f"is not at version {head.version.number}, the newest of {self._store.shown}"
            mend = (
                f"dcr pull --repair {shlex.quote(self._store.shown)} {shlex.quote(str(base.root))} mends the baseline"
            )
            raise WrongBaseError(str(base.root), facts, hint=mend if self._keeps_baseline else "give another --base")
        return found

    def _publish_anchor(self, publication: Publication, baseline: Baseline) -> PushResult:
        """Publish a version that starts from nothing: its files as they are."""
        history, head = publication.history, publication.head
        if self._options.prepare:
            raise UsageError("--prepare", "a version that is an anchor cannot be prepared", hint="leave it out")
        if self._options.dry_run:
            state, _ = self._read_source()
            return self._result(history, None, ANCHOR, head, state, delta_bytes=_bytes_of(self._source))
        source, state = self._anchor_source(baseline)
        if head is not None and head.version.target == state:
            drop_outgoing(baseline.home)
            baseline.move_to(position_at(head, self._store.shown))
            self.published = head
            return self._result(history, head.version.place, _SAME, head, state)
        sending = begin_anchor(baseline.home, publication.sending, state)
        sent = self._send_anchor(source, AnchorPlan(history, sending.place, state), baseline.home)
        done = publication.commit(sending.place, _anchor_parts(sent.anchor, sent.data), sending.place.version)
        self._uploaded_bytes += done.commit_bytes
        self._move(baseline, done.published)
        kind = ANCHOR if done.outcome is Outcome.WON else _SAME
        place = done.published.version.place
        size = sent.anchor.bytes + len(sent.data) + done.commit_bytes
        return self._result(history, place, kind, head, state, delta_bytes=size, anchor=place.version)

    def _send_anchor(self, source: Checkpoint, plan: AnchorPlan, home: Folder | None) -> PublishedAnchor:
        sent = publish_anchor(
            self._store,
            source,
            plan,
            key=self._author.key,
            home=home,
            jobs=self._effort.jobs,
            progress=self._effort.progress,
        )
        self._uploaded_bytes += sent.sent_bytes
        return sent

    def _anchor_source(self, baseline: Baseline) -> tuple[Checkpoint, State]:
        """What an anchor is published from: the baseline, made now, which nobody changes; else the source itself."""
        if self._keeps_baseline:
            state = self._fill(baseline)
            return open_checkpoint(baseline.path, skip=self._source.skipped, what="baseline"), state
        state, _ = self._read_source()
        return self._source, state

    def _add_anchor(self, history: str, baseline: Baseline, published: Published) -> None:
        """Publish the anchor of the version that was just committed."""
        source = self._source
        if self._keeps_baseline:
            source = open_checkpoint(baseline.path, skip=self._source.skipped, what="baseline")
        self._send_anchor(source, AnchorPlan(history, published.version.place, published.version.target), None)

    # The baseline

    def _move(self, baseline: Baseline, published: Published) -> None:
        """Bring the baseline to a version that this publisher has just made, or had made when it was stopped."""
        version = published.version
        if self._keeps_baseline and version.delta is not None:
            delta = outgoing_path(baseline.home)
            # What a push before this one had published may be elsewhere now, or gone.
            if self._options.baseline_link and not self._recovered:
                baseline.relink(self._source, open_delta(delta))
            else:
                apply_chain([open_delta(delta)], baseline.path, Way(mode=IN_PLACE), jobs=self._effort.jobs)
        if self._keeps_baseline or not baseline.has_checkpoint:
            # A checkpoint there that is not moved on stays at its version.
            baseline.move_to(position_at(published, self._store.shown))
        drop_outgoing(baseline.home)
        self.published = published

    def _fill(self, baseline: Baseline) -> State:
        """Make the baseline from the checkpoint: the state that both are in."""
        if not self._options.baseline_link:
            return baseline.fill(self._source, jobs=self._effort.jobs, progress=self._effort.progress)
        state = baseline.link(self._source, jobs=self._effort.jobs, progress=self._effort.progress)
        # The new names have changed the times of its files.
        self._source = open_checkpoint(self._source.root, skip=self._source.skipped)
        return state

    def _read_source(self) -> tuple[State, dict[str, bytes]]:
        with Workers(self._effort.jobs, "read", self._effort.progress) as workers, self._source.reader() as reader:
            return read_state(workers, self._source, reader)

    # The result

    def _result(
        self,
        history: str,
        place: Place | None,
        kind: str,
        head: Published | None,
        target: State,
        *,
        found: DiffResult | None = None,
        delta_bytes: int = 0,
        anchor: int | None = None,
    ) -> PushResult:
        source = self._source
        is_first = head is None or kind == ANCHOR
        return PushResult(
            remote=self._store.shown,
            checkpoint=str(source.root),
            history=history,
            version=place.version if place is not None else None,
            id=place.id if place is not None else None,
            kind=kind,
            base_version=head.version.number if head is not None and not is_first and kind != _SAME else None,
            base=head.version.target if head is not None and not is_first else None,
            target=target,
            tensors=len(source.tensors),
            changed_tensors=found.changed_tensors if found is not None else 0,
            elements=sum(tensor.elements for tensor in source.tensors),
            changed_elements=found.changed_elements if found is not None else 0,
            dense_bytes=sum(tensor.bytes for tensor in source.tensors),
            delta_bytes=delta_bytes,
            uploaded_bytes=self._uploaded_bytes,
            anchor=anchor,
            recovered=self._recovered,
            dry_run=self._options.dry_run,
        )


def _anchor_parts(anchor: Anchor, data: bytes) -> AnchorParts:
    return AnchorParts(anchor.target, object_digest(data), len(data), len(anchor.files), anchor.bytes)


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(identity.size for identity in checkpoint.identities.values())


def _check_options(options: PushOptions) -> None:
    if options.base is not None and (options.baseline_link or options.no_delta):
        raise UsageError("push", "--base excludes --baseline-link and --no-delta", hint="dcr push --help")
    if options.anchor_every is not None and options.anchor_every < 1:
        raise UsageError("--anchor-every", f"a number from 1 on expected, found {options.anchor_every}")
