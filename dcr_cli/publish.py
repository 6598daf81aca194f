"""Publishes versions from the tensors of a running trainer, so that no checkpoint has to be written.

What is sent and committed, and how a stopped run is gone on with, is publisher/'s matter, as for push.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.device.finding import check
from dcr_cli.device.wish import wish_of
from dcr_cli.errors import ConflictError, NotFoundError, UsageError, WrongBaseError
from dcr_cli.layout.opening import layout_given
from dcr_cli.publisher.anchors import AnchorPlan, is_anchor_due, publish_anchor
from dcr_cli.publisher.baseline import Baseline
from dcr_cli.publisher.bases import Base, FolderBase
from dcr_cli.publisher.catching_up import catch_up, knows_its_version
from dcr_cli.publisher.committing import Author, Outcome
from dcr_cli.publisher.encodings import allowed_in
from dcr_cli.publisher.joining import Joining
from dcr_cli.publisher.making import Made, Making
from dcr_cli.publisher.memory import Memory
from dcr_cli.publisher.moving import ADDS, by_applying, move_baseline, position_of, telling_published
from dcr_cli.publisher.options import check_anchor_every
from dcr_cli.publisher.outgoing import Outgoing, drop_outgoing
from dcr_cli.publisher.publication import Publication
from dcr_cli.publisher.push_result import PREPARED, SAME, Ending, PushResult, Sizes, Subject, push_result
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.record import read_record
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import HISTORY_KEY
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import load_signing_key, trust_in
from dcr_cli.remote.version import DELTA, Published
from dcr_cli.store.opening import open_store
from dcr_cli.work import threads

__all__ = ["Publisher"]


class Publisher:
    """Publishes versions of a remote from tensors in memory; a context manager.

        with dcr_cli.Publisher("s3://bucket/run", "baseline") as publisher:
            publisher.begin()
            for name, tensor in state.items():
                publisher.add(name, tensor)
            publisher.commit()

    `baseline` is at the newest version: a folder as `dcr push --baseline` keeps it, which is brought to each version
    that is committed; or host memory, a mapping from the name of each tensor to a NumPy array with its bits, which is
    patched then. For host memory `home` is a folder on a local disk that is the publisher's alone. The remote has a
    version, which `dcr push` makes; tensors, their dtypes and shapes, shard headers and the weight map stay those.

    What is stopped, by an error or by the end of the process, has changed nothing that anybody reads; what had been
    committed by then is found by the next `begin`. Between `begin` and `commit` the baseline is locked.

    With `layout`, a file that says what shards of ranks hold, `add` takes their tensors too. `functions`, each
    `module:function`, are those that its rules may call.

    Long tensors that lie on a CUDA device are compared there, where Triton is installed: the base's bytes go there, and
    only changes leave it, and whole blocks of 512 KiB of which more than an eighth changed. `device` can be `cpu`, or a
    device, `cuda` or `cuda:N`, for those that lie in the host's memory.

    With `anchor_every` a version whose anchor is so many versions old gets one, from a baseline in a folder. With
    `trusted_keys`, public keys or files with them, the versions that are followed have to be signed by one of these.
    """

    def __init__(
        self,
        remote: str | os.PathLike[str],
        baseline: str | os.PathLike[str] | Mapping[str, Any],
        *,
        home: str | os.PathLike[str] | None = None,
        layout: str | os.PathLike[str] | None = None,
        functions: Sequence[str] = (),
        encoding: str = "auto",
        single_writer: bool = False,
        storage_options: Mapping[str, object] | None = None,
        sign_key: str | os.PathLike[str] | None = None,
        trusted_keys: Sequence[str] = (),
        anchor_every: int | None = None,
        publisher: str = "",
        limit_bytes_per_second: int | None = None,
        jobs: int | None = None,
        device: str = "auto",
    ) -> None:
        """Raises UsageError, TransportError or UnsupportedError if the remote or the device cannot be used."""
        self._wish = wish_of(device)
        check(self._wish)
        check_anchor_every(anchor_every)
        self._layout = layout_given(layout, functions)
        self._jobs = threads(jobs)
        self._encoding = encoding
        self._author = Author(publisher, load_signing_key(sign_key) if sign_key is not None else None)
        self._trust = trust_in(trusted_keys)
        self._anchor_every = anchor_every
        self._place, self._memory = _baseline_of(baseline, home)
        if anchor_every is not None and self._memory is not None:
            facts = "an anchor is made of a baseline in a folder, and this one is in host memory"
            raise UsageError("anchor_every", facts, hint="leave it out; dcr anchor adds the files of a checkpoint")
        self._version: _Version | None = None
        self._is_proven = False
        self._store = open_store(
            remote, storage_options, is_single_writer=single_writer, limit_bytes_per_second=limit_bytes_per_second
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the version that was begun and not committed, if there is one, and let go of the remote."""
        self._leave()
        self._store.close()

    def begin(self) -> int:
        """Begin the version after the newest one: its number. One that was begun before is given up.

        One that was prepared is not: as long as nobody has committed it, or given it up, that is ConflictError, and
        begin can be called again then. Raises NotFoundError (the remote holds no versions), WrongBaseError (the
        baseline is not at the newest one, or nobody has signed that who is trusted), ConflictError (the baseline is in
        use), UnsupportedError (a rule of the layout calls a function that it may not), DamagedError, TransportError,
        LocalError.
        """
        self._leave()
        with ExitStack() as stack:
            version = self._open(stack)
            version.stack = stack.pop_all()
        self._version = version
        return version.sink.place.version

    def add(self, name: str, tensor: Any, *, shard: str | None = None) -> None:
        """Say what a tensor is in this version: a NumPy array, a torch tensor or its bytes, free to change then.

        Any thread may do so, in any order; what is not added is what it was. UsageError for a tensor that was added
        before; UnsupportedError for one that is new, or of another dtype or shape: then nothing was done.

        With `shard` it is what that shard of the layout holds as `name`. What it is a part of is put together in memory
        until all has come, and has to come as a whole; what rules make of it is made then. DamagedError for a replica
        that has other bits, UnsupportedError for a function that fails: then the version cannot be committed.
        """
        version = self._begun()
        if shard is None:
            version.making.add(name, tensor)
            return
        if version.joining is None:
            raise UsageError("shard", "no layout says what it holds", hint="give layout=FILE to Publisher")
        for joined, data in version.joining.add(shard, name, tensor):
            version.making.add(joined, data)
            version.joining.taken(joined)

    def add_file(self, path: str, data: bytes) -> None:
        """Have a file beside the shards, new or not, hold `data` in this version."""
        self._begun().making.add_file(path, data)

    def remove_file(self, path: str) -> None:
        """Have this version be without a file beside the shards."""
        self._begun().making.remove_file(path)

    def commit(self) -> PushResult:
        """Make the version exist, and bring the baseline to it. Where nothing changed, nothing is published.

        ConflictError if another publisher was faster: then nothing was changed. After another error it can be called
        once more, if all was sent; else `begin` is next.
        """
        version = self._begun()
        made = self._finish(version)
        head = version.head
        if made.base == made.target:
            self._leave()
            return self._result(version, made, Ending(SAME, head, head.version.place, made.target))
        anchor = version.publication.anchor_before()
        try:
            done = version.publication.commit(version.sink.place, version.sink.commit, anchor)
        except ConflictError:
            self._leave()
            raise
        place = done.published.version.place
        try:
            self._move(version.baseline, done.published)
            if is_anchor_due(self._anchor_every, place.version, anchor):
                self._add_anchor(version, done.published)
                anchor = place.version
        finally:
            # It exists; what went wrong is found by the next begin.
            self._leave()
        ending = Ending(DELTA if done.outcome is Outcome.WON else SAME, head, place, made.target, made.changed)
        return self._result(version, made, ending, commit_bytes=done.commit_bytes, anchor=anchor)

    def prepare(self) -> PushResult:
        """Send all but the commit, which `dcr commit` makes, or gives up; then `begin` finds out which."""
        version = self._begun()
        made = self._finish(version)
        head, place = version.head, version.sink.place
        if made.base == made.target:
            self._leave()
            return self._result(version, made, Ending(SAME, head, head.version.place, made.target))
        anchor = version.publication.anchor_before()
        commit_bytes = version.publication.prepare(place, version.sink.commit, anchor)
        self._leave()
        ending = Ending(PREPARED, head, place, made.target, made.changed)
        return self._result(version, made, ending, commit_bytes=commit_bytes)

    def _begun(self) -> _Version:
        if self._version is None:
            raise UsageError("publisher", "no version was begun", hint="begin() comes first")
        return self._version

    def _leave(self) -> None:
        version, self._version = self._version, None
        if version is not None:
            version.stack.close()

    def _open(self, stack: ExitStack) -> _Version:
        history = require_history(self._store)
        if not self._is_proven:
            self._store.prove_exclusive(HISTORY_KEY)
            self._is_proven = True
        allowed = allowed_in(history, self._encoding)
        log = Log(self._store, history.id, self._trust)
        baseline = stack.enter_context(Baseline(self._place))
        publication = Publication(self._store, log, baseline.home, self._author)
        position = baseline.position() if self._memory is None else self._memory.position()
        what = f"the baseline {baseline.path}" if self._memory is None else self._memory.what
        head = publication.find_head(position, what)
        own = publication.find_own()
        if own is not None:
            self._move(baseline, own)
        if head is None:
            facts = f"holds no version of history {history.id} yet"
            raise NotFoundError(self._store.shown, facts, hint="dcr push CHECKPOINT makes the first one")
        publication.check_decided()
        base = self._open_base(log, baseline, head)
        stack.callback(base.close)
        sink = stack.enter_context(publication.outgoing(publication.new_sending(), self._jobs))
        making = Making(base, sink, allowed, self._jobs, self._wish)
        stack.callback(making.close)
        joining = Joining(self._layout, base.tensors) if self._layout is not None else None
        return _Version(baseline, publication, head, base, sink, making, joining, is_recovered=own is not None)

    def _open_base(self, log: Log, baseline: Baseline, head: Published) -> Base:
        if self._memory is not None:
            return self._memory.open(self._store, head, self._jobs)
        shown, trust = self._store.shown, self._trust
        if not (baseline.has_checkpoint and knows_its_version(baseline, log, head, shown, trust)):
            facts = f"is no baseline that is at a version of {shown}"
            where = shlex.quote(str(baseline.path))
            hint = f"dcr push CHECKPOINT {shlex.quote(shown)} --baseline {where} makes one"
            raise WrongBaseError(str(baseline.path), facts, hint=hint)
        position = baseline.position()
        if position is not None and position.version < head.version.number:
            catch_up(self._store, baseline, head, Effort(self._jobs, None), trust)
        record = read_record(baseline.home)
        skip = record.skipped if record is not None else ()
        return FolderBase(open_checkpoint(baseline.path, skip=skip, what="baseline"), record)

    def _finish(self, version: _Version) -> Made:
        """End the delta, once: all of it is sent then."""
        if version.made is None:
            if version.joining is not None:
                version.joining.check_complete()
            version.made = version.making.finish(version.head.version.target)
            if self._memory is not None:
                self._memory.keep(version.sink.place, version.making.changes, version.made.description)
        return version.made

    def _move(self, baseline: Baseline, published: Published) -> None:
        """Bring the baseline to a version that this publisher has made."""
        if self._memory is None:
            position = position_of(published, self._store.shown, self._author, self._trust)
            move_baseline(baseline, published, position, by_applying(baseline.path, self._jobs))
            return
        with telling_published(published):
            self._memory.move(published, self._store.shown)
            drop_outgoing(baseline.home)

    def _add_anchor(self, version: _Version, published: Published) -> None:
        """Publish the anchor of the version that was just committed, from the baseline."""
        plan = AnchorPlan(published.version.history, published.version.place, published.version.target)
        with telling_published(published, ADDS):
            source = open_checkpoint(version.baseline.path, skip=version.base.skipped, what="baseline")
            sent = publish_anchor(self._store, source, plan, key=self._author.key, jobs=self._jobs)
        version.anchor_bytes = sent.sent_bytes

    def _result(
        self, version: _Version, made: Made, ending: Ending, *, commit_bytes: int = 0, anchor: int | None = None
    ) -> PushResult:
        base, sink = version.base, version.sink
        subject = Subject(self._store.shown, version.head.version.history, base.what, base.tensors)
        sizes = Sizes(sink.bytes + commit_bytes, sink.sent_bytes + commit_bytes + version.anchor_bytes)
        result = push_result(subject, ending, sizes=sizes, anchor=anchor, recovered=version.is_recovered)
        account = version.making.account()
        return replace(result, device=account.device, account=account)


@dataclass(slots=True)
class _Version:
    """A version that was begun, and all that is open for it."""

    baseline: Baseline
    publication: Publication
    head: Published
    base: Base
    sink: Outgoing
    making: Making
    joining: Joining | None
    is_recovered: bool
    stack: ExitStack = field(default_factory=ExitStack)
    made: Made | None = None
    anchor_bytes: int = 0


def _baseline_of(
    baseline: str | os.PathLike[str] | Mapping[str, Any], home: str | os.PathLike[str] | None
) -> tuple[Path, Memory | None]:
    """Where a publisher keeps its state, and the baseline, if that is in host memory."""
    if isinstance(baseline, Mapping):
        if home is None:
            raise UsageError("home", "a baseline in host memory needs a folder on a local disk", hint="give home=DIR")
        check_path(home, "home")
        return Path(home), Memory(baseline)
    if home is not None:
        raise UsageError("home", "a baseline in a folder keeps all it needs there", hint="leave it out")
    check_path(baseline, "baseline")
    return Path(baseline), None
