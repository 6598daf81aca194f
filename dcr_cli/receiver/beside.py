"""Applies a delta without touching what is there: to a new folder, or beside a folder that a link is then turned from.

How a folder is built is fresh.py's matter. One that a stopped run left is marked as incomplete, and removed by the
next.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import STATE_FOLDER
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import ConflictError, DamagedError, DcrError, IncompleteError, UsageError, WrongBaseError
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.fresh import Fresh
from dcr_cli.receiver.job import Job, Target
from dcr_cli.receiver.places import changed_paths
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.receiver import LOCK, MARKER, Receiver, decode_marker
from dcr_cli.receiver.survey import Survey, is_there_already, judge, look_at, open_root

TO, ASIDE = "to", "aside"
_PREVIOUS = "previous"
_MOST_NAMES = 10
_NAME_LIMIT = 4096
_MARKER_LIMIT = 1 << 20


def apply_to(checkpoint: Path, out: Path, target: Target, skip: Sequence[str]) -> ApplyResult:
    """Build the target in `out`, which must not exist or be an empty folder; `checkpoint` is only read."""
    out = Path(os.path.abspath(out))
    with open_root(checkpoint) as source, open_folder(out.parent) as parent:
        _check_free(parent, out.name)
        found, job = look_at(source, target, skip)
        if is_there_already(found, job):
            raise _nothing_to_build(job)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        partial = f".{out.name}.dcr-partial"
        with _new_folder(parent, partial) as receiver:
            fresh = Fresh(receiver, source, job, plan, links=False)
            if _build(fresh, found, job, TO):
                raise _nothing_to_build(job)
            fresh.end()
            _check_free(parent, out.name)
            parent.rename(partial, parent, out.name)
            parent.sync()
        paths = [shard.path for shard in plan.shards] + [row.path for row in target.delta.manifest.files]
        written = fresh.bytes_written
        return done(str(out), TO, job, plan, files=paths, bytes_written=written, foreign=found.foreign)


def apply_aside(link: Path, target: Target, skip: Sequence[str], *, keep_previous: bool) -> ApplyResult:
    """Build the target beside the folder that `link` points at, then turn the link in one step.

    The folder before is removed, with what is foreign in it carried over, unless it is kept or has other names.
    """
    with _locked_behind(link) as (old, text):
        folder = old.root.path
        with open_folder(folder.parent) as parent:
            _remove_previous(old, parent)
            _remove_unfinished(parent, link.name)
            found, job = look_at(old.root, target, skip)
            is_there = is_there_already(found, job)
            plan = job.plan(is_exact=found.is_base, in_place=False) if not is_there else None
            others = _others(folder, {file.path for file in found.base.files})
            goes = not keep_previous and others is not None and not (link.parent / text.rstrip("/")).is_symlink()
            built = None
            if plan is not None:
                move = _Move(old, parent, link, folder.name if goes else None)
                built = move.build(found, job, plan, others or [])
            if plan is None or built is None:
                is_exact = found.has_target_files
                return nothing_done(str(link), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=False)
            name, written = built
            _turn(link, text, parent, name)
            if goes:
                with open_root(parent.path / name) as new, Receiver(new) as receiver:
                    _remove_previous(receiver, parent)
                # With its folder, all that this lock's owner might tidy up is gone.
                old.has_record = True
        return done(
            str(link),
            ASIDE,
            job,
            plan,
            files=changed_paths(plan),
            bytes_written=written,
            foreign=found.foreign,
            previous=None if goes else str(folder),
        )


@dataclass(frozen=True, slots=True)
class _Move:
    """From the folder that `old` has locked to a new one in `parent`; `goes` is the old one's name if it is to go."""

    old: Receiver
    parent: Folder
    link: Path
    goes: str | None

    def build(self, found: Survey, job: Job, plan: Plan, others: Sequence[str]) -> tuple[str, int] | None:
        """Build the new folder, or find it built: its name and how much was written. None: nothing is to be done."""
        try:
            return self._build(found, job, plan, others)
        except _NothingToDoError:
            return None

    def _build(self, found: Survey, job: Job, plan: Plan, others: Sequence[str]) -> tuple[str, int]:
        commit = job.target.delta.commit_blake3
        stem = f"{self.link.name}.dcr-{commit.hex()[:12]}"
        for name in (stem, *(f"{stem}-{number}" for number in range(2, _MOST_NAMES))):
            if self.parent.status(name) is None:
                break
            if name != self.old.root.path.name and self._is_built(name, job.target):
                return name, 0
        else:
            raise ConflictError(str(self.parent.path / stem), "exists, and so do all names like it; remove them")
        with _new_folder(self.parent, name) as receiver:
            fresh = Fresh(receiver, self.old.root, job, plan, links=True)
            if _build(fresh, found, job, ASIDE):
                raise _NothingToDoError
            self._say_what_goes(receiver)
            fresh.end(others)
            self.parent.sync()
        return name, fresh.bytes_written

    def _is_built(self, name: str, target: Target) -> bool:
        """Whether the folder `name` is at the target, left there by a run that was stopped, or by --keep-previous."""
        try:
            with open_root(self.parent.path / name) as root, Receiver(root) as receiver:
                if not is_there_already(*look_at(root, target, ())):
                    return False
                self._say_what_goes(receiver)
                return True
        except DcrError:
            return False

    def _say_what_goes(self, receiver: Receiver) -> None:
        """Leave word in the new folder, so that the next run can remove the old one if this run is stopped."""
        if self.goes is not None:
            receiver.home.replace_file(_PREVIOUS, self.goes.encode())
        else:
            receiver.home.remove(_PREVIOUS, missing_ok=True)


class _NothingToDoError(Exception):
    """The base has turned out to be the target."""


def _build(fresh: Fresh, found: Survey, job: Job, mode: str) -> bool:
    """Build the shards and check them; True if the base has turned out to be the target."""
    fresh.check()
    outcome = fresh.build(mode, job.target.delta.commit_blake3)
    if judge(found, job, outcome.base_sums):
        return True
    outcome.check_target()
    return False


def _nothing_to_build(job: Job) -> WrongBaseError:
    return WrongBaseError(job.what, "is at this delta's target already; there is nothing to build", hint="copy it")


def _check_free(parent: Folder, name: str) -> None:
    status = parent.status(name)
    if status is not None and not (stat.S_ISDIR(status.st_mode) and parent.is_empty(name)):
        hint = "choose another name, or remove it"
        raise ConflictError(str(parent.path / name), "exists and is no empty folder", hint=hint)


@contextmanager
def _new_folder(parent: Folder, name: str) -> Iterator[Receiver]:
    """Make a folder, locked, and empty but for its lock; after an error it is removed again."""
    parent.make_folder(name, exist_ok=True)
    parent.sync()
    with parent.open_folder(name) as root, Receiver(root) as receiver:
        for folder, kept in ((root, STATE_FOLDER), (receiver.home, LOCK)):
            for inner in folder.names():
                if inner != kept:
                    folder.remove_tree(inner)
        try:
            yield receiver
        except BaseException:
            # The cause is what counts; what cannot be removed now, the next run removes.
            with suppress(DcrError):
                _remove_folder(parent, name)
            receiver.has_record = True
            raise


@contextmanager
def _locked_behind(link: Path) -> Iterator[tuple[Receiver, str]]:
    """Lock the folder behind a link, which still points at it then, and give the link's text."""
    if not link.is_symlink():
        hint = f"make it one: mv {link} {link}-1 && ln -s {link.name}-1 {link}"
        raise UsageError(str(link), "is not a link to a folder, as aside needs it", hint=hint)
    text, folder = os.readlink(link), os.path.realpath(link)
    with open_root(folder) as root, Receiver(root) as receiver:
        if not link.is_symlink() or os.readlink(link) != text or os.path.realpath(link) != folder:
            raise ConflictError(str(link), "was turned by another dcr just now", hint="run the same command again")
        marker = receiver.read_marker()
        if marker is not None:
            hint = f"finish it first: dcr apply {marker.delta} {link}"
            raise IncompleteError(str(link), "an apply to the folder behind it was stopped", hint=hint)
        receiver.clear()
        yield receiver, text


def _remove_previous(receiver: Receiver, parent: Folder) -> None:
    """Remove the folder that `receiver`'s has replaced, if it is still there."""
    name = receiver.home.read(_PREVIOUS, _NAME_LIMIT)
    if name is None:
        return
    previous = os.fsdecode(name)
    if previous == receiver.root.path.name or not previous.strip(".") or "/" in previous:
        raise DamagedError(str(receiver.home.path / _PREVIOUS), "does not name another folder beside this one")
    parent.remove_tree(previous, missing_ok=True)
    parent.sync()
    receiver.home.remove(_PREVIOUS)


def _remove_unfinished(parent: Folder, link_name: str) -> None:
    """Remove folders that runs for this link began and did not complete; nobody else can be at them while it is
    locked."""
    for name in parent.names():
        if name.startswith(f"{link_name}.dcr-") and _is_unfinished(parent, name):
            _remove_folder(parent, name)


def _remove_folder(parent: Folder, name: str) -> None:
    """Remove an unfinished folder, last of all what says that it is one."""
    with parent.open_folder(name) as folder:
        for inner in folder.names():
            if inner != STATE_FOLDER:
                folder.remove_tree(inner)
    parent.remove_tree(name)


def _is_unfinished(parent: Folder, name: str) -> bool:
    """Whether nothing is in the folder yet, or a marker that says that it was being built for a link."""
    try:
        with parent.open_folder(name) as folder:
            if set(folder.names()) <= {STATE_FOLDER}:
                return True
        text = parent.read(f"{name}/{STATE_FOLDER}/{MARKER}", _MARKER_LIMIT)
        return text is not None and decode_marker(text, name).mode == ASIDE
    except DcrError:
        return False


def _others(folder: Path, ours: set[str]) -> list[str] | None:
    """All files and links in a folder that are not `ours`; None if there is something that cannot be carried over."""
    found = []
    for where, folders, files in os.walk(folder):
        prefix = os.path.relpath(where, folder) + "/" if where != str(folder) else ""
        if not prefix:
            folders[:] = [name for name in folders if name != STATE_FOLDER]
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(where, name)))):
            mode = os.lstat(os.path.join(where, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return None
            if prefix + name not in ours:
                found.append(prefix + name)
    return found


def _turn(link: Path, text: str, parent: Folder, name: str) -> None:
    """Make the link point at `name` in `parent`, in one step; relative if it was."""
    above, last = os.path.split(text.rstrip("/"))
    is_beside = last not in ("", ".", "..") and os.path.realpath(link.parent / above) == os.path.realpath(parent.path)
    new = os.path.join(above, name) if is_beside else str(parent.path / name)
    with open_folder(link.parent) as folder:
        temporary = f".{link.name}.dcr-link"
        folder.remove(temporary, missing_ok=True)
        folder.make_link(new, temporary)
        folder.rename(temporary, folder, link.name)
        folder.sync()
