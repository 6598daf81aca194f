"""What a push would do: everything is read and compared, and nothing changes, neither on disk nor in the remote."""

from __future__ import annotations

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.delta.output import DeltaOutput
from dcr_cli.errors import WrongBaseError
from dcr_cli.publisher.baseline import KeptBaseline, default_baseline, open_baseline
from dcr_cli.publisher.catching_up import find_recorded
from dcr_cli.publisher.likeness import base_of
from dcr_cli.publisher.options import PushOptions
from dcr_cli.publisher.publication import find_head
from dcr_cli.publisher.push_result import SAME, Ending, PushResult, Sizes, Subject, push_result
from dcr_cli.publisher.source import Source
from dcr_cli.publisher.starting import Start, allowed_by, weights_of
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.history import check_can_begin, read_history
from dcr_cli.remote.log import Log
from dcr_cli.remote.version import ANCHOR, DELTA, Published
from dcr_cli.store.store import Store


def rehearse_push(store: Store, source: Source, options: PushOptions, effort: Effort) -> PushResult:
    """Say what a push would publish; it raises what that would raise before it writes."""
    history = read_history(store, is_denied_absent=True)
    if history is None:
        check_can_begin(store)
        return _whole(store, source, options)
    allowed = allowed_by(history, options)
    log = Log(store, history.id, options.trust)
    with KeptBaseline(options.baseline or default_baseline(source.root, history.id)) as baseline:
        head = find_head(log, baseline.position(), f"the baseline {baseline.path}")
        if head is None or options.no_delta:
            return _whole(store, source, options, history=history.id, head=head)
        start = Start(store, log, source, options, effort, allowed)
        base = base_of(options.base, store, head) if options.base is not None else _base(start, baseline, head)
        with DeltaOutput(None, outside=(), dry_run=True) as sink:
            found = start.compare(sink, base=base, head=head)
    if found.target == head.version.target:
        ending = Ending(SAME, head, None, found.target)
    else:
        changed = found.changed_tensors, found.changed_elements
        weights = weights_of(log, head, found.target.content)
        ending = Ending(DELTA, head, None, found.target, changed, found, weights)
    subject = _subject(store, history.id, source)
    return push_result(subject, ending, sizes=Sizes(found.delta_bytes), dry_run=True)


def _whole(
    store: Store, source: Source, options: PushOptions, *, history: str = "", head: Published | None = None
) -> PushResult:
    """What a version would be that starts from nothing."""
    options.check_anchor()
    source.check_files(store.shown)
    subject = _subject(store, history, source)
    ending = Ending(ANCHOR, head, None, source.read())
    return push_result(subject, ending, sizes=Sizes(source.bytes), dry_run=True)


def _subject(store: Store, history: str, source: Source) -> Subject:
    seen = source.checkpoint
    return Subject(store.shown, history, str(source.root), seen.tensors, seen.not_read)


def _base(start: Start, baseline: KeptBaseline, head: Published) -> Checkpoint:
    """The checkpoint that the delta would start from: the baseline; where there is none, the checkpoint itself, of
    which one would be made. WrongBaseError where it would come from the remote first."""
    at, is_there = _version_of(baseline, start.log, head), True
    if at is None:
        published, is_there = start.version_of_source(head), False
        if published is None and not baseline.is_begun:
            raise start.nothing_known()
        at = published.version.number if published is not None else 0
    if at < head.version.number:
        facts = f"is behind version {head.version.number}, and a dry run does not bring it there"
        raise WrongBaseError(str(baseline.path), facts, hint="dcr push without --dry-run does")
    return open_baseline(baseline.path, start.source.skipped, head) if is_there else start.source.checkpoint


def _version_of(baseline: KeptBaseline, log: Log, head: Published) -> int | None:
    """The version that a baseline is at; None if there is none, or none that is known."""
    if not baseline.has_checkpoint:
        return None
    position = baseline.position()
    if position is not None:
        return position.version
    recorded = find_recorded(baseline, log, head)
    return recorded.version.number if recorded is not None else None
