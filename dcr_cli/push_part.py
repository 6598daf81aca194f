"""Publishes one of several parts of a version: each of some ranks compares a share, and none talks to another.

The checkpoint is one that all of them see. What a part is, is publisher/'s matter, what its objects mean remote/'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor
from dcr_cli.checkpoint.patterns import check_recorded_patterns
from dcr_cli.content import Progress
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.commit import Commit
from dcr_cli.delta.output import DIGESTS_NAME, MANIFEST_NAME, encode_documents
from dcr_cli.device.finding import check
from dcr_cli.device.wish import wish_of
from dcr_cli.errors import WrongBaseError
from dcr_cli.layout.opening import layout_given
from dcr_cli.publisher.baseline import check_places
from dcr_cli.publisher.committing import Author
from dcr_cli.publisher.encodings import allowed_in
from dcr_cli.publisher.likeness import look_at_base, version_like
from dcr_cli.publisher.merging import Merged, Sides, merge
from dcr_cli.publisher.moving import telling_published
from dcr_cli.publisher.part_base import PartBase, PartOptions
from dcr_cli.publisher.part_making import PartMaking
from dcr_cli.publisher.part_reading import can_go_on, read_part
from dcr_cli.publisher.part_result import PartResult, Rank, check_rank
from dcr_cli.publisher.part_source import PartSource
from dcr_cli.publisher.part_waiting import Ended, Patience, wait_for_end, wait_for_parts
from dcr_cli.publisher.publication import Publication, check_not_given_up
from dcr_cli.publisher.readiness import check_ready, check_settled
from dcr_cli.publisher.shares import Slice
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.hint import PREPARED, STREAMING, Hint, write_hint
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import VERSIONS, prepared_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.part import Attempt, encode_unchanged, unchanged_key
from dcr_cli.remote.signing import Trust, load_signing_key, trust_in
from dcr_cli.remote.version import Published
from dcr_cli.stages import Account
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

__all__ = ["PartResult", "Rank", "push_part"]


@dataclass(frozen=True, slots=True)
class _Work:
    """What the ranks of an attempt compare: the version before, and the share of each."""

    attempt: Attempt
    head: Published
    base: Checkpoint
    target: Checkpoint
    shares: list[tuple[Slice, ...]]


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of it, as far as this rank knows, and what it has sent."""

    ended: Ended
    sent_bytes: int = 0
    is_recovered: bool = False
    merged: Merged | None = None
    delta_bytes: int | None = None
    account: Account | None = None


def push_part(
    checkpoint: str | os.PathLike[str],
    remote: str | os.PathLike[str],
    rank: Rank,
    *,
    layout: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    base_layout: str | os.PathLike[str] | None = None,
    functions: Sequence[str] = (),
    baseline: str | os.PathLike[str] | None = None,
    encoding: str = "auto",
    prepare: bool = False,
    wait: bool = True,
    timeout_seconds: float = 900.0,
    ready: str | None = None,
    settle_seconds: float = 0.0,
    skip: Sequence[str] = (),
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    trusted_keys: Sequence[str] = (),
    publisher: str = "",
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> PartResult:
    """Publish one of several parts of the next version of `remote`, which is the state of `checkpoint`.

    All ranks see the same `checkpoint` and give the same arguments. Rank 0 waits for all parts, and commits. Without
    `baseline`, that beside the checkpoint is read by all ranks and moved by rank 0; with it, each rank has its own.
    `checkpoint` may be shards of ranks, as for push; then each rank publishes what some of the shards hold, which are
    shared out in their order, and reads no others; what several ranks hold, one of them does. Of shards that the file
    `layout` describes it need see no others either: then the attempt has to be named, for nothing else tells one step
    from another. `base` is a checkpoint at the newest version, or shards of ranks that are, by `base_layout`, of which
    again only some need be there if `checkpoint` is shards too. `functions` and `device` are as for push. Nothing that
    anyone reads has changed unless the version exists; a run that was stopped, of this rank or all of them, is gone on
    with by the same call.

    Raises UsageError, NotFoundError (the remote holds no version), WrongBaseError (no baseline at the newest version),
    ConflictError (not all parts came in time, another publisher was faster, the checkpoint changes), DamagedError,
    TransportError, UnsupportedError (as push; what shards hold has no pieces, or divides what a rule needs as a whole),
    LocalError.
    """
    check_recorded_patterns(skip)
    check_path(checkpoint, "checkpoint")
    check_places(checkpoint, remote, baseline)
    check_rank(rank)
    wish = wish_of(device)
    check(wish)
    author = Author(publisher, load_signing_key(sign_key, "--sign-key") if sign_key is not None else None)
    check_ready(Path(checkpoint), ready)
    source = PartSource(checkpoint, rank, layout=layout, functions=functions, skip=skip)
    check_settled(source.given, settle_seconds, datetime.now(UTC).timestamp())
    options = PartOptions(
        base=look_at_base(base, layout_given(base_layout, functions), skip),
        baseline=Path(baseline) if baseline is not None else None,
        encoding=encoding,
        prepare=prepare,
        wait=wait,
        patience=Patience(timeout_seconds),
        author=author,
        effort=Effort(threads(jobs), progress),
        trust=trust_in(trusted_keys, "--trusted-key"),
        wish=wish,
    )
    with open_store(
        remote, storage_options, is_single_writer=single_writer, limit_bytes_per_second=limit_bytes_per_second
    ) as store:
        return _Run(store, source, rank, options).run()


class _Run:
    """One rank's run, from what the remote holds to what came of all parts."""

    def __init__(self, store: Store, source: PartSource, rank: Rank, options: PartOptions) -> None:
        self._store = store
        self._source = source
        self._rank = rank
        self._options = options
        self._history = require_history(store)
        self._log = Log(store, self._history.id, options.trust)
        self._base = PartBase(store, self._log, source, options)
        key = options.author.key
        self._trust = Trust(frozenset({key.public})) if key is not None else Trust()

    def run(self) -> PartResult:
        allowed = allowed_in(self._history, self._options.encoding, "--encoding")
        with ExitStack() as stack:
            self._base.lock(stack, self._rank.number)
            head = self._base.find_head()
            attempt = self._attempt_of(head)
            if attempt is not None:
                tensors = self._source.tensors or version_like(self._store, head, self._source.skipped).tensors
                return self._result(attempt, head, _Done(Ended("delta", head), is_recovered=True), tensors)
            attempt = self._attempt(head.version.number + 1, head.blake3)
            base = self._base.open(head)
            target, shares = self._source.open(base)
            work = _Work(attempt, head, base, target, shares)
            done = self._make_part(work, allowed)
            done = self._commit(work, done) if self._rank.number == 0 else self._wait(attempt, done)
            return self._result(attempt, head, done, target.tensors)

    # Parts

    def _attempt(self, version: int, previous: bytes) -> Attempt:
        source = self._source.digest()
        return Attempt(self._log.history, version, previous, self._rank.count, self._rank.attempt, source)

    def _attempt_of(self, head: Published) -> Attempt | None:
        """The attempt that the newest version is of, if that is this one: then all is done."""
        version = head.version
        if version.previous is None:
            return None
        attempt = self._attempt(version.number, version.previous)
        return attempt if attempt.place == version.place else None

    def _make_part(self, work: _Work, allowed: Allowed) -> _Done:
        """Publish this rank's part, unless a stopped run has, and no prune can have taken anything of it."""
        number, attempt, author = self._rank.number, work.attempt, self._options.author
        check_not_given_up(self._store, attempt.history, attempt.place)
        if number == 0:
            # An earlier run may have prepared it: then receivers go on staging it.
            is_prepared = self._store.stat(prepared_key(attempt.place), is_denied_absent=True) is not None
            state = PREPARED if is_prepared else STREAMING
            write_hint(self._store, Hint(attempt.history, attempt.place, state, author.now()))
        kept = read_part(self._store, attempt, number, self._trust)
        if kept is not None and can_go_on(self._store, attempt, number, kept):
            return _Done(Ended("part"), is_recovered=True)
        making = PartMaking(self._store, attempt, number, author, self._options.effort, self._options.wish)
        making.make(work.base, work.target, work.shares[number], allowed, kept=kept)
        account = making.account
        self._base.check_unmoved(attempt.previous)
        making.publish()
        return _Done(Ended("part"), making.sent_bytes, account=account)

    def _wait(self, attempt: Attempt, done: _Done) -> _Done:
        """Wait for what rank 0 makes of all parts, if that was asked for, and bring a baseline of one's own to it."""
        if not self._options.wait:
            return done
        ended = wait_for_end(self._store, self._log, attempt, self._options.patience)
        if ended.kind == "delta" and ended.published is not None:
            self._base.bring(ended.published)
        return replace(done, ended=ended)

    def _commit(self, work: _Work, done: _Done) -> _Done:
        """Make the version of all parts, once they are there."""
        attempt, head = work.attempt, work.head
        tables = wait_for_parts(self._store, attempt, self._trust, self._options.patience)
        with work.base.reader() as old, work.target.reader() as new:
            sides = Sides(work.base, work.target, work.base.files_digest(old), work.target.files_digest(new))
        merged = merge(attempt, sides, work.shares, tables)
        if merged.base != head.version.target:
            facts = f"is not at version {head.version.number}, the newest of {self._store.shown}"
            raise WrongBaseError(str(work.base.root), facts, hint=self._base.mend())
        done = replace(done, merged=merged)
        if merged.base == merged.target:
            self._store.put(unchanged_key(attempt.place), encode_unchanged(attempt))
            return replace(done, ended=Ended("same"))
        commit, sent_bytes = self._put_documents(attempt, merged)
        sent_bytes += done.sent_bytes
        size = commit.payload_bytes + commit.manifest_bytes + commit.digests_bytes
        publication = Publication(self._store, self._log, self._base.home, self._options.author)
        publication.head = head
        anchor = publication.anchor_before()
        if self._options.prepare:
            check_not_given_up(self._store, attempt.history, attempt.place)
            sent_bytes += publication.prepare(attempt.place, commit, anchor)
            return replace(done, ended=Ended("prepared"), sent_bytes=sent_bytes, delta_bytes=size)
        # An earlier run may have prepared the same attempt, and a prune may take it for one that nobody goes on with.
        committed = publication.commit(attempt.place, commit, anchor, is_attempt_of_many=True)
        with telling_published(committed.published):
            self._base.bring(committed.published)
        sent_bytes += committed.commit_bytes
        return replace(done, ended=Ended("delta", committed.published), sent_bytes=sent_bytes, delta_bytes=size)

    def _put_documents(self, attempt: Attempt, merged: Merged) -> tuple[Commit, int]:
        """Put what binds the parts: the commit to be, and the bytes that were sent."""
        documents = encode_documents(merged.manifest, merged.digests, merged.base, merged.target)
        objects = merged.fillers | {DIGESTS_NAME: documents.digests, MANIFEST_NAME: documents.manifest}
        for name, data in objects.items():
            self._store.put(f"{VERSIONS}{attempt.place}/{name}", data)
        return documents.commit, sum(map(len, objects.values()))

    def _result(self, attempt: Attempt, head: Published, done: _Done, tensors: Sequence[Tensor]) -> PartResult:
        merged, published = done.merged, done.ended.published
        place, target = attempt.place, merged.target if merged is not None else None
        if done.ended.kind == "same":
            place, target = head.version.place, head.version.target
        elif published is not None:
            place, target = published.version.place, published.version.target
        # Where this attempt's version was there already, the one before it is the base.
        delta = head.version.delta if published is head else None
        return PartResult(
            remote=self._store.shown,
            checkpoint=str(self._source.root),
            history=attempt.history,
            version=place.version,
            id=place.id,
            kind=done.ended.kind,
            rank=self._rank.number,
            ranks=self._rank.count,
            attempt=self._rank.attempt,
            base_version=attempt.version - 1,
            base=delta.base if delta is not None else head.version.target,
            target=target,
            tensors=len(tensors),
            elements=sum(tensor.elements for tensor in tensors),
            dense_bytes=sum(tensor.bytes for tensor in tensors),
            changed_tensors=merged.changed_tensors if merged is not None else None,
            changed_elements=merged.changed_elements if merged is not None else None,
            delta_bytes=done.delta_bytes,
            uploaded_bytes=done.sent_bytes,
            recovered=done.is_recovered,
            not_read=self._source.not_read,
            device=done.account.device if done.account is not None else None,
            account=done.account,
        )
