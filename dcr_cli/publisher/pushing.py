"""One push of a checkpoint, from what the remote holds to the baseline that has moved on.

Where it starts from is starting.py's matter, what a dry run says rehearsing.py's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.errors import NotFoundError
from dcr_cli.publisher.anchors import AnchorPlan, PublishedAnchor, is_anchor_due, publish_anchor
from dcr_cli.publisher.baseline import Baseline, default_baseline
from dcr_cli.publisher.committing import Author, Outcome
from dcr_cli.publisher.moving import ADDS, Bring, by_applying, move_baseline, position_of, telling_published
from dcr_cli.publisher.options import PushOptions
from dcr_cli.publisher.outgoing import drop_outgoing
from dcr_cli.publisher.publication import Publication
from dcr_cli.publisher.push_result import PREPARED, SAME, Ending, PushResult, Sizes, Subject, push_result
from dcr_cli.publisher.source import Source
from dcr_cli.publisher.starting import Start, allowed_by, weights_of
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.anchor import Anchor
from dcr_cli.remote.history import ENCODINGS, History, check_can_begin, encode_history, read_history
from dcr_cli.remote.keys import HISTORY_KEY, new_id
from dcr_cli.remote.log import Log
from dcr_cli.remote.version import ANCHOR, DELTA, AnchorParts, Published
from dcr_cli.store.store import Store


class Pushing:
    """One push. `published` is the version that the remote is at then; None if it is only prepared."""

    def __init__(self, store: Store, source: Source, options: PushOptions, author: Author, effort: Effort) -> None:
        self._store = store
        self._source = source
        self._options = options
        self._author = author
        self._effort = effort
        self._uploaded_bytes = 0
        self._recovered = False
        self.published: Published | None = None

    def run(self) -> PushResult:
        """Publish the checkpoint."""
        # Where absence looks like a lack of rights, only creating it tells.
        history = read_history(self._store, is_denied_absent=True) or self._begin_history()
        allowed = allowed_by(history, self._options)
        self._store.prove_exclusive(HISTORY_KEY)
        with Baseline(self._options.baseline or default_baseline(self._source.root, history.id)) as baseline:
            log = Log(self._store, history.id, self._options.trust)
            publication = Publication(self._store, log, baseline.home, self._author)
            head = publication.find_head(baseline.position(), f"the baseline {baseline.path}")
            self._recover(publication, baseline)
            prepared = publication.prepared()
            if head is None or self._options.no_delta:
                result = self._publish_anchor(publication, baseline)
            else:
                start = Start(self._store, log, self._source, self._options, self._effort, allowed)
                result = self._publish_delta(publication, baseline, start)
        is_other = prepared is not None and result.version == prepared.version and result.id != prepared.id
        return replace(result, gave_up=is_other)

    def _begin_history(self) -> History:
        """Begin a history, unless somebody else is faster; before it is known that its baseline can be made. That
        begins when the store has been tried: until then each try would leave one, of a history that never came to be.
        """
        check_can_begin(self._store)
        self._source.check_files(self._store.shown)
        own = History(new_id(), self._options.encodings or ENCODINGS, self._author.now(), self._author.publisher)
        if self._options.keeps_baseline:
            with Baseline(self._options.baseline or default_baseline(self._source.root, own.id)) as baseline:
                try:
                    self._source.check_room(baseline)
                finally:
                    baseline.discard()
        self._store.put_if_absent(HISTORY_KEY, encode_history(own))
        history = read_history(self._store)
        if history is None:
            raise NotFoundError(self._store.shown, f"{HISTORY_KEY} was written, but is not there")
        return history

    def _recover(self, publication: Publication, baseline: Baseline) -> None:
        """Take over what a stopped push had published."""
        own = publication.find_own()
        if own is None:
            return
        self._recovered = True
        if baseline.has_checkpoint or not self._options.keeps_baseline:
            self._move(baseline, own)
        else:
            # The files that it was to be second names of are looked at again.
            drop_outgoing(baseline.home)

    # A delta

    def _publish_delta(self, publication: Publication, baseline: Baseline, start: Start) -> PushResult:
        head = publication.head
        assert head is not None
        base = start.base(baseline, head)
        sink, found = publication.send(partial(start.compare, base=base, head=head), self._effort.jobs)
        if found.target == head.version.target:
            if not found.same:
                publication.give_up(sink.place)
            self.published = head
            return self._result(publication, Ending(SAME, head, head.version.place, found.target))
        self._uploaded_bytes += sink.sent_bytes
        anchor = publication.anchor_before()
        changed = found.changed_tensors, found.changed_elements
        weights = weights_of(publication.log, head, found.target.content)
        if self._options.prepare:
            commit_bytes = publication.prepare(sink.place, sink.commit, anchor)
            ending = Ending(PREPARED, head, sink.place, found.target, changed, found, weights)
            return self._result(publication, ending, delta_bytes=sink.bytes, commit_bytes=commit_bytes)
        done = publication.commit(sink.place, sink.commit, anchor)
        self._move(baseline, done.published)
        if is_anchor_due(self._options.anchor_every, sink.place.version, anchor):
            with telling_published(done.published, ADDS):
                self._add_anchor(publication.history, baseline, done.published)
            anchor = sink.place.version
        kind = DELTA if done.outcome is Outcome.WON else SAME
        ending = Ending(kind, head, done.published.version.place, found.target, changed, found, weights)
        return self._result(publication, ending, delta_bytes=sink.bytes, commit_bytes=done.commit_bytes, anchor=anchor)

    def _add_anchor(self, history: str, baseline: Baseline, published: Published) -> None:
        """Publish the anchor of the version that was just committed."""
        source = self._source.checkpoint
        if self._options.keeps_baseline:
            source = open_checkpoint(baseline.path, skip=self._source.skipped, what="baseline")
        self._send_anchor(source, AnchorPlan(history, published.version.place, published.version.target), None)

    # An anchor

    def _publish_anchor(self, publication: Publication, baseline: Baseline) -> PushResult:
        """Publish a version that starts from nothing: its files as they are."""
        history, head = publication.history, publication.head
        self._options.check_anchor()
        self._source.check_files(self._store.shown)
        source, state = self._anchor_source(baseline)
        if head is not None and head.version.target == state:
            drop_outgoing(baseline.home)
            baseline.move_to(position_of(head, self._store.shown, self._author, self._options.trust))
            self.published = head
            return self._result(publication, Ending(SAME, head, head.version.place, state))
        weights = weights_of(publication.log, head, state.content)
        sending = publication.anchor_sending(state)
        sent = self._send_anchor(source, AnchorPlan(history, sending.place, state), baseline)
        done = publication.commit(sending.place, _anchor_parts(sent.anchor, sent.data), sending.place.version)
        self._move(baseline, done.published)
        place = done.published.version.place
        kind = ANCHOR if done.outcome is Outcome.WON else SAME
        ending = Ending(kind, head, place, state, weights_of=weights)
        size = sent.anchor.bytes + len(sent.data)
        return self._result(publication, ending, delta_bytes=size, commit_bytes=done.commit_bytes, anchor=place.version)

    def _send_anchor(self, source: Checkpoint, plan: AnchorPlan, noting: Baseline | None) -> PublishedAnchor:
        sent = publish_anchor(
            self._store,
            source,
            plan,
            key=self._author.key,
            home=noting.home if noting is not None else None,
            jobs=self._effort.jobs,
            progress=self._effort.progress,
        )
        self._uploaded_bytes += sent.sent_bytes
        return sent

    def _anchor_source(self, baseline: Baseline) -> tuple[Checkpoint, State]:
        """What an anchor is published from: the baseline, made now, which nobody changes; else the source itself."""
        if self._options.keeps_baseline:
            state = self._source.fill(baseline)
            return open_checkpoint(baseline.path, skip=self._source.skipped, what="baseline"), state
        return self._source.checkpoint, self._source.read()

    # What comes of it

    def _move(self, baseline: Baseline, published: Published) -> None:
        self.published = published
        position = position_of(published, self._store.shown, self._author, self._options.trust)
        move_baseline(baseline, published, position, self._bring(baseline) if self._options.keeps_baseline else None)

    def _bring(self, baseline: Baseline) -> Bring:
        """How the baseline comes to the target of what was sent."""
        # What a push before this one had published may be elsewhere now, or gone.
        if self._source.is_linked and not self._recovered:
            return partial(baseline.relink, self._source.checkpoint)
        return by_applying(baseline.path, self._effort.jobs)

    def _result(
        self,
        publication: Publication,
        ending: Ending,
        *,
        delta_bytes: int = 0,
        commit_bytes: int = 0,
        anchor: int | None = None,
    ) -> PushResult:
        checkpoint = self._source.checkpoint
        root, tensors, not_read = str(checkpoint.root), checkpoint.tensors, checkpoint.not_read
        subject = Subject(self._store.shown, publication.history, root, tensors, not_read)
        sizes = Sizes(delta_bytes + commit_bytes, self._uploaded_bytes + commit_bytes)
        return push_result(subject, ending, sizes=sizes, anchor=anchor, recovered=self._recovered)


def _anchor_parts(anchor: Anchor, data: bytes) -> AnchorParts:
    return AnchorParts(anchor.target, object_digest(data), len(data), len(anchor.files), anchor.bytes)
