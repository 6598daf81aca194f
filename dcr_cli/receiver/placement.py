"""Puts what is staged in a receiver into place: the steps that others see, each of which may be done again.

In which order they go, and what is staged, is change.py's matter.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from dcr_cli.checkpoint.folder import Identity, check_same, identity_of
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder
from dcr_cli.errors import ConflictError
from dcr_cli.receiver.checking import check_laid, check_shards, check_sidecars, others
from dcr_cli.receiver.job import Job
from dcr_cli.receiver.places import CONFIG, changed_paths, folders_of
from dcr_cli.receiver.plan import Action, Plan
from dcr_cli.receiver.receiver import HELD, HELD_CONFIG, JOURNAL, STAGE, Batch, Receiver
from dcr_cli.receiver.removal import move_file, remove_empty_folders, remove_files
from dcr_cli.receiver.sidecars import NewFiles, final_files, identities_now, identity_below, record_target
from dcr_cli.receiver.staging import place_chunks


class Placement:
    """Where what is staged for a change goes, and what lies there then."""

    def __init__(self, receiver: Receiver, job: Job, plan: Plan, files: NewFiles) -> None:
        self._receiver = receiver
        self._root, self._home = receiver.root, receiver.home
        self._job = job
        self._plan = plan
        self._files = files
        self.changed_paths = [*changed_paths(plan), *files.paths[len(plan.written_files) :]]
        self.bytes_written = 0
        # What lies where the base had files beside its shards and is not theirs.
        self.left: list[str] = []
        # Files that this run made or, finishing, has read again, as they were then.
        self._checked: dict[str, Identity] = {}
        self._patched: set[str] = set()
        # The config before this run put it away.
        self._config: Identity | None = None

    def hold_config(self) -> None:
        """Put the config away, so that no loader reads a mixture."""
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

    def make_way(self) -> None:
        """Remove what lies beside the shards and is the base's, not the target's; others may need its place."""
        self.left = others(self._root, self._plan.removed_files, self._job.base.files)
        self.changed_paths = [path for path in self.changed_paths if path not in self.left]
        gone = [path for path in self._plan.removed_files if path != CONFIG and path not in self.left]
        remove_files(self._root, gone)
        self._remove_empty_folders()

    def place(self, batch: Batch) -> None:
        """Give a batch's staged shards their names and patch the others; doing it again does no harm."""
        remove_files(
            self._root, [path for number in batch.components for path in self._plan.components[number].removed]
        )
        self._remove_empty_folders()
        renamed = []
        for number in self.shards_of(batch.components):
            shard = self._plan.shards[number]
            # A staged file that is gone has its name already.
            if shard.action is Action.REWRITE and self._home.status(staged_shard(number)) is not None:
                self._root.make_parents(shard.path)
                self._move(self._home, staged_shard(number), self._root, shard.path)
                renamed.append(shard.path)
        for folder in folders_of(renamed):
            self._root.sync(folder)
        if renamed:
            self._home.sync(STAGE)
        if batch.chunks:
            with self._home.open_file(journal_of(batch.number)) as journal:
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

    def end(self, known: Mapping[str, Identity] | None) -> None:
        """Do what is left when all shards are the target's, the config last, and say so.

        Files that stay must still be those that are `known`; without, they are read again.
        """
        config = None
        placed = []
        for number, path in enumerate(self._files.paths):
            if path == CONFIG:
                config = staged_file(number)
                continue
            self._root.make_parents(path)
            self._move(self._home, staged_file(number), self._root, path)
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

    def check_placed(self, numbers: Sequence[int]) -> None:
        """Read shards, given by number, and refuse what is not the target's."""
        if not numbers:
            return
        if self._job.base.laid is not None:
            # A tensor is right or wrong in all shards together.
            self._checked |= check_laid(self._job)
            return
        shards = [self._plan.shards[number] for number in numbers]
        self._checked |= check_shards(self._root, shards, self._job.target)

    def unchecked(self) -> list[int]:
        """The shards, by number, that this run has neither made nor read."""
        shards = range(len(self._plan.shards))
        return [number for number in shards if self._plan.shards[number].path not in self._checked]

    def shards_of(self, components: Iterable[int]) -> list[int]:
        """The shards of some components, by number."""
        return [number for component in components for number in self._plan.components[component].shards]


def staged_shard(number: int) -> str:
    """Where a shard lies, below the state folder, until it gets its name."""
    return f"{STAGE}/{number:07d}"


def staged_file(number: int) -> str:
    """The same of a file beside the shards."""
    return f"{STAGE}/file-{number:07d}"


def journal_of(batch: int) -> str:
    """Where the journal of a batch lies."""
    return f"{JOURNAL}/{batch:06d}.bits"
