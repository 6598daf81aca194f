"""Applies a delta beside a folder that a link leads to, which is then turned; the folder before goes, or stays.

How a folder is built is fresh.py's matter, what a link says link.py's. A folder that a stopped run left is marked as
incomplete, and removed by the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.checkpoint.folder import Identity
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, STATE_FOLDER, change_of, command_to_finish
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import ConflictError, DcrError, IncompleteError
from dcr_cli.locking import lock
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.beside.carry import (
    Previous,
    carry_over,
    decode_previous,
    encode_previous,
    known_files,
    place_of,
    remove_known,
    unknown_files,
)
from dcr_cli.receiver.beside.folders import ASIDE, is_unfinished, names_taken, new_folder, remove_folder
from dcr_cli.receiver.beside.fresh import Fresh, build_shards, room_for_fresh
from dcr_cli.receiver.beside.link import (
    CLAIM,
    Link,
    check_still,
    claim_nothing,
    is_made_for,
    is_unturned,
    is_used_otherwise,
    read_link,
    turn,
)
from dcr_cli.receiver.job import Job, Target
from dcr_cli.receiver.places import changed_paths, check_changeable, check_lengths
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.receiver import LOCK, Receiver
from dcr_cli.receiver.record import renew_record
from dcr_cli.receiver.sidecars import identities_now, leave_record
from dcr_cli.receiver.survey import Survey, is_there_already, look_at, open_root
from dcr_cli.receiver.view import View

_PREVIOUS = "previous"
_PREVIOUS_LIMIT = 1 << 30


def apply_aside(
    path: Path, target: Target, view: View, *, keep_previous: bool, before_seen: Callable[[Path], None]
) -> ApplyResult:
    """Build the target beside the folder that the link at `path` leads to, then turn the link in one step.

    `before_seen` is called with the new folder between these two.

    The folder before is removed, with what is foreign in it carried over, if a run made it for this link; it stays if
    it is to be kept, may be in use by another name, or holds what cannot be carried over.
    """
    with _locked_behind(path) as (old, link), open_folder(old.root.path.parent) as parent:
        kept, not_carried = remove_previous(old, parent, link)
        names = link.names(target.chain.commits[-1])
        remove_unfinished(parent, link, [name for name in names if not is_unfinished(parent, name)])
        found, job = look_at(old.root, target, view, what=str(path))
        is_there = is_there_already(found, job)
        if not is_there:
            with open_folder(path.parent) as above:
                check_beside(link, parent, above, target.chain.commits[-1])
        plan = job.plan(is_exact=found.is_base, in_place=False) if not is_there else None
        built = _Move(old, parent, link, view).build(found, job, plan) if plan is not None else None
        if plan is None or built is None:
            is_exact = found.has_target_files
            own = found.files_at_target(target.chain.manifest)
            leave_record(old, job, own, is_trusted=found.known is not None)
            result = nothing_done(str(path), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=False)
            return replace(result, previous=kept, not_carried=tuple(not_carried))
        name, written = built
        before_seen(parent.path / name)
        kept, left = take_over(old, link, parent.path / name, job.identities, keep_previous=keep_previous)
        files = changed_paths(plan)
        result = done(
            str(path), ASIDE, job, plan, files=files, bytes_written=written, foreign=found.foreign, previous=kept
        )
        return replace(result, not_carried=(*not_carried, *left), room_bytes=room_for_fresh(plan, links=True))


def build_aside(path: Path, target: Target, view: View) -> None:
    """Build what `apply_aside` turns the link to, and do not turn it; it then finds it built, or removes it if it is to
    turn the link to something else."""
    with _locked_behind(path) as (old, link), open_folder(old.root.path.parent) as parent:
        names = link.names(target.chain.commits[-1])
        remove_unfinished(parent, link, [name for name in names if not is_unfinished(parent, name)])
        found, job = look_at(old.root, target, view, what=str(path))
        if is_there_already(found, job):
            return
        with open_folder(path.parent) as above:
            check_beside(link, parent, above, target.chain.commits[-1])
        plan = job.plan(is_exact=found.is_base, in_place=False)
        built = _Move(old, parent, link, view).build(found, job, plan)
        if built is None:
            return
        # Second names that files have got have changed the times of the first ones, and nothing else of them.
        paths = [file.path for file in found.base.files]
        renew_record(old.root, old.home, target.chain.base.content, found.base.files, identities_now(old.root, paths))


def take_over(
    old: Receiver, link: Link, new: Path, identities: Mapping[str, Identity], *, keep_previous: bool
) -> tuple[str | None, list[str]]:
    """Turn `link` from the folder that `old` has locked, whose own files are those of `identities`, to `new` beside it.

    The path of the folder before if it stays, and what of it could not be carried over.
    """
    folder = old.root.path
    goes = not (keep_previous or stays(old.home, link))
    with open_folder(new.parent) as parent, open_root(new) as root, Receiver(root) as receiver:
        # What has come since it was built, or since a run before this one built it.
        known = known_files(old.root, identities)
        left = [str(folder / file) for file in carry_over(old.root, receiver, known)]
        goes = goes and not left
        if goes:
            # If this run is stopped, the next one removes the folder before.
            previous = Previous(folder.name, place_of(os.fstat(old.root.fd)), known)
            receiver.home.replace_file(_PREVIOUS, encode_previous(previous))
        else:
            receiver.home.remove(_PREVIOUS, missing_ok=True)
        link = turn(link, parent, new.name, receiver.home)
        kept: str | None = str(folder)
        if goes:
            kept, left = remove_previous(receiver, parent, link)
        if kept is None:
            # With its folder, all that this lock's owner might tidy up is gone.
            old.keeps_home = True
    return kept, left


def check_beside(link: Link, parent: Folder, above: Folder, commit: bytes) -> None:
    """Raise LocalError or UsageError if nothing could be built in `parent`, or the link, which is in `above`, not be
    turned; `commit` is in the name of what is built."""
    for place in (parent, above):
        check_changeable(place)
    names = link.names(commit)
    check_lengths(parent, names, f"building beside {link.path}")
    check_lengths(above, [link.temporary], f"turning {link.path}")


def stays(home: Folder, link: Link) -> bool:
    """Whether the folder that `link` leads to, whose state folder is `home`, stays when it is turned: nothing says that
    it was made for this link, or others may use it."""
    return not is_made_for(home, link) or is_used_otherwise(link, link.folder)


@dataclass(frozen=True, slots=True)
class _Move:
    """From the folder that `old` has locked to a new one in `parent`."""

    old: Receiver
    parent: Folder
    link: Link
    view: View

    def build(self, found: Survey, job: Job, plan: Plan) -> tuple[str, int] | None:
        """Build the new folder, or find it built: its name and how much was written. None: nothing is to be done."""
        try:
            return self._build(found, job, plan)
        except _NothingToDoError:
            return None

    def _build(self, found: Survey, job: Job, plan: Plan) -> tuple[str, int]:
        names = self.link.names(job.target.chain.commits[-1])
        for name in names:
            if self.parent.status(name) is None:
                break
            if name != self.old.root.path.name and self._is_built(name, job.target):
                return name, 0
        else:
            raise names_taken(self.parent, names)
        with new_folder(self.parent, name, exist_ok=False) as receiver:
            fresh = Fresh(receiver, self.old.root, job, plan, links=True)
            if build_shards(fresh, found, job, ASIDE):
                raise _NothingToDoError
            claim_nothing(receiver.home)
            fresh.end(unknown_files(self.old.root, {file.path for file in found.base.files}))
            self.parent.sync()
        return name, fresh.bytes_written

    def _is_built(self, name: str, target: Target) -> bool:
        """Whether the folder `name` is at the target, left there by a run that was stopped, or by --keep-previous."""
        try:
            with open_root(self.parent.path / name) as root, Receiver(root):
                return is_there_already(*look_at(root, target, self.view))
        except DcrError:
            return False


class _NothingToDoError(Exception):
    """The base has turned out to be the target."""


@contextmanager
def _locked_behind(path: Path) -> Iterator[tuple[Receiver, Link]]:
    """Lock the folder behind a link, which still leads to it then."""
    link = read_link(path)
    with open_root(link.folder) as root, Receiver(root) as receiver:
        check_still(link)
        marker = receiver.read_marker()
        if marker is not None:
            hint = f"finish it first: {command_to_finish(marker.deltas, marker.remote, path)}"
            facts = f"{change_of(marker.remote)} to the folder behind it was stopped"
            raise IncompleteError(str(path), facts, hint=hint)
        receiver.clear()
        if is_unturned(receiver.home, link):
            # Somebody else has turned the link to it.
            receiver.home.remove(CLAIM)
        yield receiver, link


def remove_previous(receiver: Receiver, parent: Folder, link: Link) -> tuple[str | None, list[str]]:
    """Remove the folder that `link` led to before it led to `receiver`'s, if that is still there.

    It stays if somebody may use it by another name, or if it holds what cannot be carried over: its path, and the paths
    of what cannot. A note that was copied with its folder, or is about another folder of the name, removes nothing.
    """
    word = receiver.home.read(_PREVIOUS, _PREVIOUS_LIMIT)
    if word is None:
        return None, []
    previous = decode_previous(word, str(receiver.home.path / _PREVIOUS))
    name, status = previous.name, parent.status(previous.name)
    path = str(parent.path / name)
    is_ours = status is not None and previous.is_still(status) and is_made_for(receiver.home, link)
    is_used = is_ours and (is_used_otherwise(link, path) or parent.status(f"{name}/{IN_PROGRESS}") is not None)
    left: list[str] = []
    if is_ours and not is_used:
        with parent.open_folder(name) as old:
            left = carry_over(old, receiver, previous.known)
        left = left or remove_known(parent, name, previous.known)
    receiver.home.remove(_PREVIOUS)
    return path if is_used or left else None, [f"{path}/{file}" for file in left]


def remove_unfinished(parent: Folder, link: Link, but: Collection[str] = ()) -> None:
    """Remove folders that runs for this link began and did not complete, or did not turn it to, if nobody is at them;
    `but` these stay."""
    for name in parent.names():
        if not name.startswith(link.prefix) or name in but:
            continue
        if not (is_unfinished(parent, name) or _was_not_turned_to(parent, name, link)):
            continue
        with ExitStack() as stack, suppress(ConflictError):
            if parent.status(f"{name}/{STATE_FOLDER}") is not None:
                stack.enter_context(lock(stack.enter_context(parent.open_folder(f"{name}/{STATE_FOLDER}")), LOCK))
            remove_folder(parent, name)


def _was_not_turned_to(parent: Folder, name: str, link: Link) -> bool:
    """Whether a folder was built for a link that was never turned to it, and nobody uses it by another name."""
    path = str(parent.path / name)
    try:
        with parent.open_folder(f"{name}/{STATE_FOLDER}") as home:
            return path != link.folder and is_unturned(home, link) and not is_used_otherwise(link, path)
    except DcrError:
        return False
