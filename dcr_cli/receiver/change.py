"""Changes a receiver where it is, so that it can be stopped at any step: replace and in-place (FORMAT 12).

Order is what makes it safe. Staged files and journals are durable before the batch that says to use them; the marker is
durable before the first change and goes after the last; `config.json` is away in between, so that nobody loads a
mixture. What is done is plan.py's decision.

Others may change the files at any time. What they change before the marker is durable stops the change; what they
change later is never recorded as verified.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcr_cli.checkpoint.digest import DIGEST_BYTES
from dcr_cli.checkpoint.folder import Identity, check_same, identity_of
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder, NoRoomError
from dcr_cli.errors import ConflictError, DamagedError
from dcr_cli.receiver.checking import check_shards, check_sidecars, check_unhindered, others
from dcr_cli.receiver.job import Job, Outcome, whole_work
from dcr_cli.receiver.journal import Chunk
from dcr_cli.receiver.places import CONFIG, changed_paths, check_plan, folders_of, has_room
from dcr_cli.receiver.plan import Action, Plan, in_turn
from dcr_cli.receiver.receiver import HELD, HELD_CONFIG, JOURNAL, STAGE, Batch, Receiver
from dcr_cli.receiver.removal import move_file, remove_empty_folders, remove_files
from dcr_cli.receiver.sidecars import (
    NewFiles,
    final_files,
    identities_now,
    identity_below,
    marker_of,
    new_files,
    record_target,
)
from dcr_cli.receiver.staging import place_chunks, stage
from dcr_cli.receiver.survey import Survey, judge

REPLACE, IN_PLACE = "replace", "in-place"
# Components are committed together up to so many staged bytes, so that threads have several files to work on.
_BATCH_BYTES = 1 << 30


class _StagePlace:
    """Staged shards in a receiver's own folder, by number, and the journal of a batch."""

    def __init__(self, receiver: Receiver, batch: int) -> None:
        self._home = receiver.home
        self._batch = batch

    def create(self, number: int) -> File:
        return self._home.create_file(_staged(number))

    def open(self, number: int) -> File:
        return self._home.open_file(_staged(number))

    def create_journal(self) -> File:
        return self._home.create_file(_bits(self._batch))


class Change:
    """A change of the checkpoint that `receiver` has locked, as `plan` says."""

    def __init__(self, receiver: Receiver, job: Job, plan: Plan) -> None:
        self._receiver = receiver
        self._root, self._home = receiver.root, receiver.home
        self._job = job
        self._plan = plan
        self._files: NewFiles = new_files(job, plan)
        self.changed_paths = [*changed_paths(plan), *self._files.paths[len(plan.written_files) :]]
        self.bytes_written = 0
        # What lies where the base had files beside its shards and is not theirs.
        self.left: list[str] = []
        # Files that this run made or, finishing, has read again, as they were then.
        self._checked: dict[str, Identity] = {}
        self._patched: set[str] = set()
        # The config before this run put it away.
        self._config: Identity | None = None
        # Shards, by number, that were found to be the target's, and why one is lost that was staged.
        self._verified: set[int] = set()
        self._lost: DamagedError | None = None
        # Whether there has been less room than the file system had said.
        self._has_quota = False

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
        self._hold_config()
        self._make_way()
        self._commit(Batch(0, group, chunks, is_done=False))
        self._in_turn(1, rest)
        self._end(self._job.identities)
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
        self._hold_config()
        self._make_way()
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
        shards = range(len(self._plan.shards))
        self._verify([number for number in shards if self._plan.shards[number].path not in self._checked])
        self._end(None)

    # Preparing

    def _begin(self) -> None:
        self._receiver.begin()
        self._stage_files()

    def _stage_files(self) -> None:
        for number, (path, content) in enumerate(self._files.contents(self._job)):
            name = _staged_file(number)
            self._home.write_file(name, content)
            self._take_mode(name, path)
            self.bytes_written += len(content)

    def _take_mode(self, name: str, path: str) -> None:
        """Give a staged file mode and owner of the file that it will replace; a link or a folder has none to give."""
        status = self._root.status(path)
        if path == CONFIG:
            status = self._home.status(HELD_CONFIG) or status
        if status is not None and stat.S_ISREG(status.st_mode):
            self._home.take_mode(name, status)

    def _rehearse(self) -> Outcome:
        """Read and decode everything, so that nothing that is wrong is found only after the first change."""
        return self._job.run(whole_work(self._plan.shards), whole_base=True, stage="check")

    def _prepare(self, batch: int, numbers: Sequence[int], *, whole_base: bool) -> tuple[Outcome, tuple[Chunk, ...]]:
        """Stage components durably, as batch number `batch`: what was found out, and the journal."""
        shards = self._shards_of(numbers)
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
                self._take_mode(_staged(number), shard.path)
                self.bytes_written += shard.size
        self.bytes_written += sum(chunk.size for chunk in staged.chunks)
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
        marker = marker_of(self._job.target, mode, is_exact=self._plan.is_exact, base_blake3=base_blake3)
        self._receiver.write_marker(marker)

    # Changing

    def _hold_config(self) -> None:
        if not self._has_config() or self._home.status(HELD_CONFIG) is not None:
            return
        if self._home.make_folder(HELD, PRIVATE_FOLDER_MODE, exist_ok=True):
            self._home.sync()
        self._config = identity_below(self._root, CONFIG)
        self._move(self._root, CONFIG, self._home, HELD_CONFIG)
        self._home.sync(HELD)
        self._root.sync()

    def _has_config(self) -> bool:
        """Whether there is a config that a loader could read; what else may have the name stays where it is."""
        try:
            return stat.S_ISREG(os.stat(CONFIG, dir_fd=self._root.fd).st_mode)
        except OSError:
            return False

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
        for name in (*(_staged(number) for number in self._shards_of(group)), _bits(batch)):
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

    def _make_way(self) -> None:
        """Remove what lies beside the shards and is the base's, not the target's; others may need its place."""
        self.left = others(self._root, self._plan.removed_files, self._job.base.files)
        self.changed_paths = [path for path in self.changed_paths if path not in self.left]
        gone = [path for path in self._plan.removed_files if path != CONFIG and path not in self.left]
        remove_files(self._root, gone)
        self._remove_empty_folders()

    def _commit(self, batch: Batch) -> None:
        self._receiver.write_batch(batch)
        self._place(batch)
        self._receiver.end_batch(batch.number)
        self._home.remove(_bits(batch.number), missing_ok=True)

    def _place(self, batch: Batch) -> None:
        """Give a batch's staged shards their names and patch the others; doing it again does no harm."""
        remove_files(
            self._root, [path for number in batch.components for path in self._plan.components[number].removed]
        )
        self._remove_empty_folders()
        renamed = []
        for number in self._shards_of(batch.components):
            shard = self._plan.shards[number]
            # A staged file that is gone has its name already.
            if shard.action is Action.REWRITE and self._home.status(_staged(number)) is not None:
                self._root.make_parents(shard.path)
                self._move(self._home, _staged(number), self._root, shard.path)
                renamed.append(shard.path)
        for folder in folders_of(renamed):
            self._root.sync(folder)
        if renamed:
            self._home.sync(STAGE)
        if batch.chunks:
            with self._home.open_file(_bits(batch.number)) as journal:
                self.bytes_written += place_chunks(journal, batch.chunks, self._open_shard, self._job.target.jobs)
            for path in {self._plan.shards[chunk.file].path for chunk in batch.chunks}:
                self._checked[path] = identity_below(self._root, path)

    def _open_shard(self, number: int) -> File:
        """Open a shard to patch it, if it is still what was read, and has no other name that would change too."""
        path = self._plan.shards[number].path
        file = self._root.open_file(path)
        try:
            status = os.fstat(file.fd)
            if status.st_nlink != 1:
                facts = "has got another name, whose bytes would change too"
                raise ConflictError(str(file.path), facts, hint="remove the other name and run the same command again")
            if path not in self._patched:
                check_same(self._root.path, {path: self._job.identities[path]}, {path: identity_of(status)})
                self._patched.add(path)
        except BaseException:
            file.close()
            raise
        return file

    def _move(self, source: Folder, name: str, to: Folder, new_name: str) -> None:
        """Rename a file, and note what it is then."""
        move_file(source, name, to, new_name)
        if to is self._root:
            self._checked[new_name] = identity_below(to, new_name)

    def _end(self, known: Mapping[str, Identity] | None) -> None:
        """Do what is left when all shards are the target's, the config last, and say so.

        Files that stay must still be those that are `known`; without, they are read again.
        """
        config = None
        placed = []
        for number, path in enumerate(self._files.paths):
            if path == CONFIG:
                config = _staged_file(number)
                continue
            self._root.make_parents(path)
            self._move(self._home, _staged_file(number), self._root, path)
            placed.append(path)
        for folder in folders_of(placed):
            self._root.sync(folder)
        if placed:
            self._home.sync(STAGE)
        if config is None and CONFIG not in self._plan.removed_files and self._home.status(HELD_CONFIG) is not None:
            config = HELD_CONFIG
        if config is not None:
            self._move(self._home, config, self._root, CONFIG)
            self._root.sync()
            self._home.sync(config.rpartition("/")[0])
        files = final_files(self._job, self._plan, self._files)
        if known is None:
            if config == HELD_CONFIG:
                # It came from where it had been put, perhaps long ago.
                del self._checked[CONFIG]
            self._checked |= check_sidecars(self._root, [file for file in files if file.path not in self._checked])
        expected = {file.path: self._checked.get(file.path) or (known or {})[file.path] for file in files}
        if known is not None and config == HELD_CONFIG and self._config is not None:
            # Putting it away and back changed its ctime, also under every other name, or link, that leads to it.
            before, now = self._config, self._config._replace(ctime_ns=self._checked[CONFIG].ctime_ns)
            expected |= {path: now for path, identity in expected.items() if path == CONFIG or identity == before}
        check_same(self._root.path, expected, identities_now(self._root, expected))
        # Without a marker, a config that is held would be put back.
        self._receiver.release_held()
        record_target(self._receiver, self._job, files, expected)
        self._receiver.remove_marker()

    def _remove_empty_folders(self) -> None:
        removed = [*self._plan.removed_files, *(path for part in self._plan.components for path in part.removed)]
        remove_empty_folders(self._root, removed)

    # Finishing

    def _finish_batch(self, batch: Batch) -> tuple[int, ...]:
        """Place what a stopped run had committed, and see that it is the target's: the components that are done."""
        lost = {component for component in batch.components if self._is_lost(component)}
        if lost:
            gone = set(self._shards_of(lost))
            batch = replace(
                batch,
                components=tuple(component for component in batch.components if component not in lost),
                chunks=tuple(chunk for chunk in batch.chunks if chunk.file not in gone),
            )
            self._receiver.write_batch(batch)
        self._place(batch)
        self._verify([number for number in self._shards_of(batch.components) if number not in self._verified])
        self._receiver.end_batch(batch.number)
        return batch.components

    def _is_lost(self, component: int) -> bool:
        """Whether a staged shard of a component is gone and has not got its name; it has to be staged again."""
        for number in self._shards_of([component]):
            if self._plan.shards[number].action is Action.PATCH or self._home.status(_staged(number)) is not None:
                continue
            try:
                self._verify([number])
            except DamagedError as error:
                self._lost = error
                return True
        return False

    def _verify(self, numbers: Sequence[int]) -> None:
        """Read shards, given by number, and refuse what is not the target's."""
        shards = [self._plan.shards[number] for number in numbers]
        self._checked |= check_shards(self._root, shards, self._job.target)
        self._verified.update(numbers)

    def _tidy(self) -> None:
        """Remove what was staged and never committed, and journals that are not needed any more."""
        for folder, keep in ((STAGE, ()), (JOURNAL, (".done", "base"))):
            with self._home.open_folder(folder) as inner:
                for name in inner.names():
                    if not name.endswith(keep):
                        inner.remove_tree(name)

    def _shards_of(self, components: Iterable[int]) -> list[int]:
        return [number for component in components for number in self._plan.components[component].shards]


def _staged(number: int) -> str:
    return f"{STAGE}/{number:07d}"


def _staged_file(number: int) -> str:
    return f"{STAGE}/file-{number:07d}"


def _bits(batch: int) -> str:
    return f"{JOURNAL}/{batch:06d}.bits"
