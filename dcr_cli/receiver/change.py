"""Changes a receiver where it is, so that it can be stopped at any step: replace and in-place (FORMAT 12).

Order is what makes it safe. Staged files and journals are durable before the batch that says to use them; the marker is
durable before the first change and goes after the last; `config.json` is away in between, so that nobody loads a
mixture. What is done is plan.py's decision.

Others may change the files at any time. What they change before the marker is durable stops the change; what they
change later is never recorded as verified.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import replace

from dcr_cli.checkpoint.digest import DIGEST_BYTES
from dcr_cli.checkpoint.folder import check_same
from dcr_cli.durable import File, NoRoomError
from dcr_cli.errors import ConflictError, DamagedError
from dcr_cli.receiver.checking import check_unhindered
from dcr_cli.receiver.job import Job, Outcome, whole_work
from dcr_cli.receiver.passes.journal import Chunk
from dcr_cli.receiver.placement import Placement, journal_of, staged_file, staged_shard
from dcr_cli.receiver.places import CONFIG, check_plan, has_room
from dcr_cli.receiver.plan import Action, Plan, in_turn
from dcr_cli.receiver.receiver import HELD_CONFIG, JOURNAL, STAGE, Batch, Receiver
from dcr_cli.receiver.sidecars import NewFiles, final_files, identities_now, marker_of, new_files
from dcr_cli.receiver.staging import stage
from dcr_cli.receiver.survey import Survey, judge
from dcr_cli.receiver.view import note_layout

REPLACE, IN_PLACE = "replace", "in-place"
# Components are committed together up to so many staged bytes, so that threads have several files to work on.
_BATCH_BYTES = 1 << 30


class _StagePlace:
    """Staged shards in a receiver's own folder, by number, and the journal of a batch."""

    def __init__(self, receiver: Receiver, batch: int) -> None:
        self._home = receiver.home
        self._batch = batch

    def create(self, number: int) -> File:
        return self._home.create_file(staged_shard(number))

    def open(self, number: int) -> File:
        return self._home.open_file(staged_shard(number))

    def create_journal(self) -> File:
        return self._home.create_file(journal_of(self._batch))


class Change:
    """A change of the checkpoint that `receiver` has locked, as `plan` says."""

    def __init__(self, receiver: Receiver, job: Job, plan: Plan) -> None:
        self._receiver = receiver
        self._root, self._home = receiver.root, receiver.home
        self._job = job
        self._plan = plan
        self._files: NewFiles = new_files(job, plan)
        self._placement = Placement(receiver, job, plan, self._files)
        self._staged_bytes = 0
        # Shards, by number, that were found to be the target's, and why one is lost that was staged.
        self._verified: set[int] = set()
        self._lost: DamagedError | None = None
        # Whether there has been less room than the file system had said.
        self._has_quota = False

    @property
    def bytes_written(self) -> int:
        return self._staged_bytes + self._placement.bytes_written

    @property
    def changed_paths(self) -> list[str]:
        """What it changes, or has changed."""
        return self._placement.changed_paths

    @property
    def left(self) -> list[str]:
        """What lies where the base had files beside its shards and is not theirs."""
        return self._placement.left

    def carry_out(self, found: Survey, mode: str) -> bool:
        """Bring the receiver from base to target. True if, once it was read, it turned out to be at the target already.

        What is raised before the marker is durable leaves the receiver as it was; what is raised later leaves it to
        `finish`. Raises WrongBaseError, DamagedError, ConflictError, LocalError.
        """
        at_once = check_plan(self._root, self._job.base, self._plan, self.changed_paths)
        self._begin()
        group, chunks = tuple(range(len(self._plan.components))), None
        try:
            if at_once:
                outcome, chunks = self._prepare(0, group, whole_base=True)
        except NoRoomError:
            # A quota, perhaps. Taking one component after the other needs less.
            if len(group) < 2:
                raise
            self._has_quota = True
            self._begin()
        if chunks is None:
            outcome = self._rehearse()
        if judge(found, self._job, outcome.base_sums):
            return True
        outcome.check_target()
        self._job.known = outcome.base_sums
        rest: tuple[int, ...] = ()
        if chunks is None:
            # The largest comes first, so that what can never be staged is refused now.
            order = in_turn(self._plan)
            group, chunks = self._stage_next(0, order)
            rest = order[len(group) :]
        self._check_base_files()
        self._mark(mode)
        try:
            self._check_base_files()
        except ConflictError:
            # Nothing is changed yet.
            self._receiver.remove_marker()
            raise
        if self._job.base.laid is not None:
            # Who finds the change stopped must not take the shards for ones of another kind.
            note_layout(self._home, self._job.base.laid.layout)
        self._placement.hold_config()
        self._placement.make_way()
        self._commit(Batch(0, group, chunks, is_done=False))
        self._in_turn(1, rest)
        self._placement.end(self._job.identities)
        return False

    def finish(self) -> None:
        """Go on with a change that was stopped; `job` and `plan` must be those that it was begun with.

        Raises DamagedError if the receiver holds what neither was nor should become, ConflictError if somebody changed
        it since.
        """
        self._receiver.resume()
        known = [*self._job.base.files, *final_files(self._job, self._plan, self._files)]
        check_unhindered(self._receiver, self._plan, self.changed_paths, known)
        batches = self._receiver.read_batches()
        self._placement.hold_config()
        self._placement.make_way()
        done = {number for batch in batches if batch.is_done for number in batch.components}
        for batch in (batch for batch in batches if not batch.is_done):
            done.update(self._finish_batch(batch))
        self._tidy()
        self._stage_files()
        pending = tuple(number for number in in_turn(self._plan) if number not in done)
        try:
            self._in_turn(max((batch.number for batch in batches), default=-1) + 1, pending)
        except ConflictError as error:
            # What a lost component was made from has gone too.
            if self._lost is not None:
                raise self._lost from error
            raise
        # Whoever was stopped has not said which files it had checked, and time has passed.
        self._placement.check_placed(self._placement.unchecked())
        self._placement.end(None)

    # Preparing

    def _begin(self) -> None:
        self._receiver.begin()
        self._stage_files()

    def _stage_files(self) -> None:
        for number, (path, content) in enumerate(self._files.contents(self._job)):
            name = staged_file(number)
            self._home.write_file(name, content)
            self._take_mode(name, path)
            self._staged_bytes += len(content)

    def _take_mode(self, name: str, path: str) -> None:
        """Give a staged file mode and owner of the file that it will replace; a link or a folder has none to give."""
        status = self._root.status(path)
        if path == CONFIG:
            status = self._home.status(HELD_CONFIG) or status
        if status is not None and stat.S_ISREG(status.st_mode):
            self._home.take_mode(name, status)

    def _rehearse(self) -> Outcome:
        """Read and decode everything, so that nothing that is wrong is found only after the first change."""
        return self._job.run(whole_work(self._plan), whole_base=True, stage="check")

    def _prepare(self, batch: int, numbers: Sequence[int], *, whole_base: bool) -> tuple[Outcome, tuple[Chunk, ...]]:
        """Stage components durably, as batch number `batch`: what was found out, and the journal."""
        shards = self._placement.shards_of(numbers)
        others = [shard for shard in self._plan.shards if shard.action is Action.KEEP] if whole_base else []
        if self._job.known is not None:
            others = []
        staged = stage(
            self._job,
            [(number, self._plan.shards[number]) for number in shards],
            _StagePlace(self._receiver, batch),
            others,
            whole_base=whole_base,
            name="apply",
        )
        for number in shards:
            shard = self._plan.shards[number]
            if shard.action is Action.REWRITE:
                self._take_mode(staged_shard(number), shard.path)
                self._staged_bytes += shard.size
        self._staged_bytes += sum(chunk.size for chunk in staged.chunks)
        self._home.sync(STAGE)
        self._home.sync(JOURNAL)
        return staged

    def _check_base_files(self) -> None:
        """Raise ConflictError unless the base's files are still those that were read."""
        before = self._job.identities
        check_same(self._root.path, before, identities_now(self._root, before))

    def _mark(self, mode: str) -> None:
        assert self._job.known is not None
        digests = self._job.known.astype("<u4").view("u1").reshape(-1, DIGEST_BYTES)
        base_blake3 = self._receiver.write_base(self._job.base, digests)
        marker = marker_of(self._job, mode, is_exact=self._plan.is_exact, base_blake3=base_blake3)
        self._receiver.write_marker(marker)

    # Changing

    def _in_turn(self, batch: int, numbers: tuple[int, ...]) -> None:
        """Stage and commit components, some at a time."""
        while numbers:
            group, chunks = self._stage_next(batch, numbers)
            self._commit(Batch(batch, group, chunks, is_done=False))
            numbers, batch = numbers[len(group) :], batch + 1

    def _stage_next(self, batch: int, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Chunk, ...]]:
        """Stage the first of some components, as many as there is room for: which, and the journal."""
        group = self._next_group(numbers)
        try:
            return group, self._stage_group(batch, group)
        except NoRoomError:
            if len(group) < 2:
                raise
            self._has_quota = True
        for name in (*(staged_shard(number) for number in self._placement.shards_of(group)), journal_of(batch)):
            self._home.remove(name, missing_ok=True)
        return group[:1], self._stage_group(batch, group[:1])

    def _stage_group(self, batch: int, group: tuple[int, ...]) -> tuple[Chunk, ...]:
        outcome, chunks = self._prepare(batch, group, whole_base=False)
        assert self._job.known is not None
        outcome.check_base(self._job.known)
        outcome.check_target()
        return chunks

    def _next_group(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        size = 0
        for count, number in enumerate(numbers):
            part = self._plan.components[number]
            size += part.staged_bytes + part.journal_bytes
            if count and (self._has_quota or size > _BATCH_BYTES or not has_room(self._home, size, count + 1)):
                return numbers[:count]
        return numbers

    def _commit(self, batch: Batch) -> None:
        self._receiver.write_batch(batch)
        self._placement.place(batch)
        self._receiver.end_batch(batch.number)
        self._home.remove(journal_of(batch.number), missing_ok=True)

    # Finishing

    def _finish_batch(self, batch: Batch) -> tuple[int, ...]:
        """Place what a stopped run had committed, and see that it is the target's: the components that are done."""
        lost = {component for component in batch.components if self._is_lost(component)}
        if lost:
            gone = set(self._placement.shards_of(lost))
            batch = replace(
                batch,
                components=tuple(component for component in batch.components if component not in lost),
                chunks=tuple(chunk for chunk in batch.chunks if chunk.file not in gone),
            )
            self._receiver.write_batch(batch)
        self._placement.place(batch)
        self._verify([number for number in self._placement.shards_of(batch.components) if number not in self._verified])
        self._receiver.end_batch(batch.number)
        return batch.components

    def _is_lost(self, component: int) -> bool:
        """Whether a staged shard of a component is gone and has not got its name; it has to be staged again.

        Of a receiver with a layout that cannot be told of one shard, nor could it be: what is gone has got its name, or
        the tensors are found not to be right in the end.
        """
        if self._job.base.laid is not None:
            return False
        for number in self._placement.shards_of([component]):
            if self._plan.shards[number].action is Action.PATCH or self._home.status(staged_shard(number)) is not None:
                continue
            try:
                self._verify([number])
            except DamagedError as error:
                self._lost = error
                return True
        return False

    def _verify(self, numbers: Sequence[int]) -> None:
        """Read shards, given by number, and refuse what is not the target's."""
        self._placement.check_placed(numbers)
        self._verified.update(numbers)

    def _tidy(self) -> None:
        """Remove what was staged and never committed, and journals that are not needed any more."""
        for folder, keep in ((STAGE, ()), (JOURNAL, (".done", "base"))):
            with self._home.open_folder(folder) as inner:
                for name in inner.names():
                    if not name.endswith(keep):
                        inner.remove_tree(name)
