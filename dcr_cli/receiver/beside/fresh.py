"""Builds a whole new checkpoint folder from a base and a delta, beside everything that is there.

It is not seen as a checkpoint until it is complete; giving it its place is the caller's business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from dcr_cli.checkpoint.folder import Identity, check_same, identity_of
from dcr_cli.durable import NEW_FILE_MODE, PRIVATE_FILE_MODE, File, Folder, may_give_owner
from dcr_cli.receiver.job import Job, Outcome
from dcr_cli.receiver.places import check_names, check_room, folders_of, with_slack
from dcr_cli.receiver.plan import Action, Plan
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.sidecars import NewFiles, final_files, marker_of, new_files, record_target
from dcr_cli.receiver.staging import stage
from dcr_cli.receiver.survey import Survey, judge

_SPOOL = "spool"


class Fresh:
    """A checkpoint that is built in the folder of `receiver` from the checkpoint in `source`.

    With `links`, files that stay as they are become second names of the source's.
    """

    def __init__(self, receiver: Receiver, source: Folder, job: Job, plan: Plan, *, links: bool) -> None:
        self._receiver = receiver
        self._root = receiver.root
        self._source = source
        self._job = job
        self._plan = plan
        self._links = links
        self._files: NewFiles = new_files(job, plan)
        self.bytes_written = 0

    def check(self) -> None:
        """Raise LocalError if there is no room, DamagedError if the file system cannot hold the names."""
        check_fresh(self._root, self._source, self._plan, self._files, links=self._links)

    def build(self, mode: str) -> Outcome:
        """Build all shards that are not shared; what the pass over the base found out is not judged here."""
        self._receiver.write_marker(marker_of(self._job, mode, is_exact=True, base_blake3=bytes(32)))
        kept = {number for number, shard in enumerate(self._plan.shards) if shard.action is Action.KEEP}
        # A second name changes the first one's times, so links are made when everything has been read.
        shared = kept if self._links else {number for number in kept if self._clone(self._plan.shards[number].path)}
        made = [(number, shard) for number, shard in enumerate(self._plan.shards) if number not in shared]
        others = [self._plan.shards[number] for number in shared] if self._job.known is None else []
        outcome, _ = stage(self._job, made, self, others, whole_base=True, name="apply")
        for _, shard in made:
            self.bytes_written += shard.size
            self._take_mode(shard.path)
        self._receiver.home.remove(_SPOOL, missing_ok=True)
        check_same(self._job.root, self._job.identities, self._identities_now())
        return outcome

    # Where stage puts new shards

    def create(self, number: int) -> File:
        path = self._plan.shards[number].path
        self._root.make_parents(path)
        return self._root.create_file(path, self._first_mode(path))

    def open(self, number: int) -> File:
        return self._root.open_file(self._plan.shards[number].path)

    def create_journal(self) -> File:
        return self._receiver.home.create_file(_SPOOL, 0o600)

    def end(self, foreign: Sequence[str] = ()) -> None:
        """Add what is shared, the files beside the shards and `foreign` ones, sync, and say that it is complete.

        A foreign one in a folder of the source that has to be a file has no place here.
        """
        for path, content in self._files.contents(self._job):
            self._root.make_parents(path)
            self._root.write_file(path, content, self._first_mode(path))
            self._take_mode(path)
            self.bytes_written += len(content)
        final = final_files(self._job, self._plan, self._files)
        files = {file.path for file in final}
        foreign = [path for path in foreign if files.isdisjoint(with_those_above(folders_of([path])))]
        for path in (*(file.path for file in final), *foreign):
            if self._root.status(path) is None:
                self._copy(path)
        folders = folders_of((*(file.path for file in final), *foreign))
        for folder in folders:
            self._root.sync(folder)
        for folder in with_those_above(folders):
            status = self._source.status(folder)
            if status is not None and stat.S_ISDIR(status.st_mode):
                self._root.take_folder_mode(folder, status, with_owner=self._gives_owner(status))
        record_target(self._receiver, self._job, final)
        status = os.fstat(self._source.fd)
        self._receiver.open_to_readers(status)
        self._root.take_folder_mode("", status, with_owner=self._gives_owner(status))
        self._receiver.remove_marker()

    def _copy(self, path: str) -> None:
        """Have a file of the source under the same path here: a second name, a clone or a copy."""
        status = self._source.status(path)
        self._root.make_parents(path)
        is_file = status is not None and stat.S_ISREG(status.st_mode)
        if status is not None and stat.S_ISLNK(status.st_mode) and path not in self._job.identities:
            self._root.make_link(self._source.link_text(path), path)
            return
        if (self._links and is_file and self._root.link_file(self._source, path, path)) or self._clone(path):
            return
        with self._source.open_linked(path) as source, self._root.create_file(path, PRIVATE_FILE_MODE) as file:
            self.bytes_written += file.copy_from(source)
            file.sync()
        self._take_mode(path)

    def _clone(self, path: str) -> bool:
        self._root.make_parents(path)
        with self._source.open_linked(path) as source:
            with self._root.create_file(path, PRIVATE_FILE_MODE) as file:
                is_cloned = file.clone_from(source)
                if is_cloned:
                    file.sync()
            if not is_cloned:
                self._root.remove(path)
        if is_cloned:
            self._take_mode(path)
        return is_cloned

    def _take_mode(self, path: str) -> None:
        """Give a new file the mode and owner that the source's file of this path has; a link has none to give."""
        status = self._source.status(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            self._root.take_mode(path, status, with_owner=self._gives_owner(status))

    def _first_mode(self, path: str) -> int:
        """The mode to create a file with: private, if it is to take another one's in the end."""
        status = self._source.status(path)
        return PRIVATE_FILE_MODE if status is not None and stat.S_ISREG(status.st_mode) else NEW_FILE_MODE

    def _gives_owner(self, status: os.stat_result) -> bool:
        """A copy of what is somebody else's is its maker's; what takes the place of something has its owner."""
        return self._links or may_give_owner(status)

    def _identities_now(self) -> dict[str, Identity]:
        now = {}
        for path in self._job.identities:
            with suppress(OSError):
                now[path] = identity_of(os.stat(self._job.root / path))
        return now


def check_fresh(folder: Folder, source: Folder, plan: Plan, files: NewFiles, *, links: bool) -> None:
    """Raise LocalError or DamagedError if what `plan` makes of `source` could not be built in or below `folder`."""
    check_names(source, [shard.path for shard in plan.shards] + files.paths)
    check_room(folder, room_for_fresh(plan, links=links))


def room_for_fresh(plan: Plan, *, links: bool) -> int:
    """Bytes that have to be free to build a whole new folder; with `links`, what stays is shared."""
    made = [shard.size for shard in plan.shards if not (links and shard.action is Action.KEEP)]
    return with_slack(sum(made) + plan.written_file_bytes, len(plan.shards))


def with_those_above(folders: Sequence[str]) -> list[str]:
    """Folders and those above them, but for the root; what lies in a folder comes before it."""
    found = {"/".join(parts[:count]) for parts in (f.split("/") for f in folders) for count in range(1, len(parts) + 1)}
    return sorted(found - {""}, reverse=True)


def build_shards(fresh: Fresh, found: Survey, job: Job, mode: str) -> bool:
    """Build the shards and check them; True if the base has turned out to be the target."""
    fresh.check()
    outcome = fresh.build(mode)
    if judge(found, job, outcome.base_sums):
        return True
    outcome.check_target()
    return False
