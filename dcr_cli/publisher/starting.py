"""What a push starts from, and comparing with that: a baseline at the newest version, or a checkpoint that is there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.output import Sink
from dcr_cli.diff import DiffResult, Manner, diff_into
from dcr_cli.errors import UsageError, WrongBaseError
from dcr_cli.fetch.position import position_at
from dcr_cli.fetch.source import signers_of
from dcr_cli.publisher.baseline import Baseline, open_baseline
from dcr_cli.publisher.catching_up import catch_up, knows_its_version
from dcr_cli.publisher.encodings import allowed_in
from dcr_cli.publisher.likeness import base_of
from dcr_cli.publisher.options import PushOptions
from dcr_cli.publisher.source import Source
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.history import History
from dcr_cli.remote.log import Log
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class Start:
    """Where a push stands before it compares: the log that it follows, and what it publishes."""

    store: Store
    log: Log
    source: Source
    options: PushOptions
    effort: Effort
    allowed: Allowed

    def base(self, baseline: Baseline, head: Published) -> Checkpoint:
        """The checkpoint that the delta starts from, at the newest version as far as is known without reading it."""
        if self.options.base is not None:
            return base_of(self.options.base, self.store, head)
        shown, trust = self.store.shown, self.options.trust
        if not (baseline.has_checkpoint and knows_its_version(baseline, self.log, head, shown, trust)):
            self._begin(baseline, head)
        position = baseline.position()
        if position is not None and position.version < head.version.number:
            self._catch_up(baseline, head)
        return open_baseline(baseline.path, self.source.skipped, head)

    def _begin(self, baseline: Baseline, head: Published) -> None:
        """Make the baseline from the checkpoint itself, if it is at one of the newest versions; one that was begun and
        whose checkpoint is another now comes from the remote."""
        published = self.version_of_source(head)
        if published is not None:
            self.source.fill(baseline)
            baseline.move_to(position_at(published, self.store.shown, signers_of(self.options.trust, published)))
        elif baseline.is_begun:
            baseline.empty()
            self._catch_up(baseline, head)
        else:
            raise self.nothing_known()

    def version_of_source(self, head: Published) -> Published | None:
        """The newest version that is what is published, of which a baseline can be made, if there is one."""
        return None if self.source.is_sharded else self.log.find_state(self.source.read(), head.version.number)

    def nothing_known(self) -> WrongBaseError:
        """The error that nothing is there to start from."""
        facts = f"holds history {self.log.history}, and neither a baseline nor {self.source.root} is at a version of it"
        other = "--no-delta" if not self.source.is_sharded else "--baseline, where one is"
        hint = f"give --base, a checkpoint at its newest version, or {other}, or use another address"
        return WrongBaseError(self.store.shown, facts, hint=hint)

    def _catch_up(self, baseline: Baseline, head: Published) -> None:
        catch_up(self.store, baseline, head, self.effort, self.options.trust)

    def compare(self, sink: Sink, *, base: Checkpoint, head: Published) -> DiffResult:
        """Write what changed; WrongBaseError if the base is not at the newest version, unless it was given and what is
        published is that version: so it is when a push that came through is run again."""
        found = diff_into(
            sink,
            base,
            self.source.see_like(base),
            Manner(self.allowed, self.effort.jobs, self.options.wish),
            progress=self.effort.progress,
        )
        is_there = self.options.base is not None and found.target == head.version.target
        if found.base != head.version.target and not is_there:
            facts = f"is not at version {head.version.number}, the newest of {self.store.shown}"
            mend = f"dcr pull --repair {shlex.quote(self.store.shown)} {shlex.quote(str(base.root))} mends the baseline"
            hint = mend if self.options.keeps_baseline else "give another --base"
            raise WrongBaseError(str(base.root), facts, hint=hint)
        return found


def weights_of(log: Log, head: Published | None, content: bytes) -> int | None:
    """The version before `head` that had the tensors which are published now: somebody goes back to it, or has taken
    the wrong checkpoint. Those of `head` itself are no surprise."""
    if head is None or head.version.target.content == content:
        return None
    return log.find_content(content, head.version.number - 1)


def allowed_by(history: History, options: PushOptions) -> Allowed:
    """The encodings that a push may use; UsageError if it asks for others than the remote's."""
    wanted = options.encodings
    if wanted is not None and set(wanted) != set(history.encodings):
        facts = f"the remote's are {','.join(history.encodings)}, since its first push"
        raise UsageError("--encodings", facts, hint="use another address for other encodings")
    return allowed_in(history, options.encoding, "--encoding")
