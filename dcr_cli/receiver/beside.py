"""Applies a delta without touching what is there: to a new folder, or beside a folder that a link is then turned from.

How a folder is built is fresh.py's matter. One that a stopped run left is marked as incomplete, and removed by the
next.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import MAX_MARKER_BYTES, STATE_FOLDER
from dcr_cli.durable import PRIVATE_FOLDER_MODE, Folder, open_folder
from dcr_cli.errors import ConflictError, DamagedError, DcrError, IncompleteError, UsageError, WrongBaseError
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.carry import (
    carry_over,
    decode_previous,
    encode_previous,
    known_files,
    remove_known,
    unknown_files,
)
from dcr_cli.receiver.fresh import Fresh, check_fresh, room_of_fresh
from dcr_cli.receiver.job import Job, Target, whole_work
from dcr_cli.receiver.places import changed_paths, check_changeable
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.receiver import LOCK, MARKER, Receiver, decode_marker
from dcr_cli.receiver.sidecars import new_files
from dcr_cli.receiver.survey import Survey, is_there_already, judge, look_at, open_root

TO, ASIDE = "to", "aside"
_PREVIOUS = "previous"
_MOST_NAMES = 10
_PREVIOUS_LIMIT = 1 << 30


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
        return _done_to(out, found, job, plan, bytes_written=fresh.bytes_written, dry_run=False)


def rehearse_to(checkpoint: Path, out: Path, target: Target, skip: Sequence[str]) -> ApplyResult:
    """Do all of `apply_to` that changes nothing, and say what it would do."""
    out = Path(os.path.abspath(out))
    with open_root(checkpoint) as source, open_folder(out.parent) as parent:
        _check_free(parent, out.name)
        check_changeable(parent)
        found, job = look_at(source, target, skip)
        if is_there_already(found, job):
            raise _nothing_to_build(job)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        check_fresh(parent, source, plan, new_files(job, plan), links=False)
        if _try(found, job, plan):
            raise _nothing_to_build(job)
        return _done_to(out, found, job, plan, bytes_written=0, dry_run=True)


def _done_to(out: Path, found: Survey, job: Job, plan: Plan, *, bytes_written: int, dry_run: bool) -> ApplyResult:
    paths = [shard.path for shard in plan.shards] + [row.path for row in job.target.delta.manifest.files]
    foreign = found.foreign
    result = done(str(out), TO, job, plan, files=paths, bytes_written=bytes_written, foreign=foreign, dry_run=dry_run)
    return replace(result, room_bytes=room_of_fresh(plan, links=False))


def apply_aside(link: Path, target: Target, skip: Sequence[str], *, keep_previous: bool) -> ApplyResult:
    """Build the target beside the folder that `link` points at, then turn the link in one step.

    The folder before is removed, with what is foreign in it carried over, unless it is kept, has other names, or holds
    what cannot be carried over.
    """
    with _locked_behind(link) as (old, text):
        folder = old.root.path
        with open_folder(folder.parent) as parent:
            not_carried = _remove_previous(old, parent)
            _remove_unfinished(parent, link.name)
            found, job = look_at(old.root, target, skip)
            is_there = is_there_already(found, job)
            plan = job.plan(is_exact=found.is_base, in_place=False) if not is_there else None
            built = _Move(old, parent, link).build(found, job, plan) if plan is not None else None
            if plan is None or built is None:
                is_exact = found.has_target_files
                result = nothing_done(str(link), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=False)
                return replace(result, not_carried=tuple(not_carried))
            name, written = built
            goes = not keep_previous and not _has_other_names(link, text)
            with open_root(parent.path / name) as new, Receiver(new) as receiver:
                # What has come since it was built, or since a run before this one built it.
                known = known_files(old.root, job.identities)
                left = [str(folder / path) for path in carry_over(old.root, receiver, known)]
                goes = goes and not left
                if goes:
                    # If this run is stopped, the next one removes the folder before.
                    receiver.home.replace_file(_PREVIOUS, encode_previous(folder.name, known))
                else:
                    receiver.home.remove(_PREVIOUS, missing_ok=True)
                _turn(link, text, parent, name)
                if goes:
                    left = _remove_previous(receiver, parent)
            if goes and not left:
                # With its folder, all that this lock's owner might tidy up is gone.
                old.has_record = True
        result = done(
            str(link),
            ASIDE,
            job,
            plan,
            files=changed_paths(plan),
            bytes_written=written,
            foreign=found.foreign,
            previous=None if goes and not left else str(folder),
        )
        return replace(result, not_carried=(*not_carried, *left), room_bytes=room_of_fresh(plan, links=True))


def rehearse_aside(link: Path, target: Target, skip: Sequence[str], *, keep_previous: bool) -> ApplyResult:
    """Do all of `apply_aside` that changes nothing, and say what it would do."""
    text, folder = _behind(link)
    with open_root(folder) as source, open_folder(source.path.parent) as parent, open_folder(link.parent) as above:
        found, job = look_at(source, target, skip)
        is_exact = found.has_target_files
        if is_there_already(found, job):
            return nothing_done(str(link), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=True)
        for place in (source, parent, above):
            check_changeable(place)
        names = _names(link, job)
        if not any(_can_take(parent, name, source.path.name, target) for name in names):
            raise _names_taken(parent, names)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        check_fresh(parent, source, plan, new_files(job, plan), links=True)
        if _try(found, job, plan):
            return nothing_done(str(link), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=True)
        stays = keep_previous or _has_other_names(link, text)
        result = done(
            str(link),
            ASIDE,
            job,
            plan,
            files=changed_paths(plan),
            bytes_written=0,
            foreign=found.foreign,
            dry_run=True,
            previous=folder if stays else None,
        )
        return replace(result, room_bytes=room_of_fresh(plan, links=True))


def _try(found: Survey, job: Job, plan: Plan) -> bool:
    """Decode and check everything; True if the base has turned out to be the target."""
    outcome = job.run(whole_work(plan.shards), whole_base=True, stage="check")
    if judge(found, job, outcome.base_sums):
        return True
    outcome.check_target()
    return False


def _has_other_names(link: Path, text: str) -> bool:
    """Whether what a link says is itself a link, so that others may use the folder by it."""
    return (link.parent / text.rstrip("/")).is_symlink()


@dataclass(frozen=True, slots=True)
class _Move:
    """From the folder that `old` has locked to a new one in `parent`."""

    old: Receiver
    parent: Folder
    link: Path

    def build(self, found: Survey, job: Job, plan: Plan) -> tuple[str, int] | None:
        """Build the new folder, or find it built: its name and how much was written. None: nothing is to be done."""
        try:
            return self._build(found, job, plan)
        except _NothingToDoError:
            return None

    def _build(self, found: Survey, job: Job, plan: Plan) -> tuple[str, int]:
        names = _names(self.link, job)
        for name in names:
            if self.parent.status(name) is None:
                break
            if name != self.old.root.path.name and self._is_built(name, job.target):
                return name, 0
        else:
            raise _names_taken(self.parent, names)
        with _new_folder(self.parent, name) as receiver:
            fresh = Fresh(receiver, self.old.root, job, plan, links=True)
            if _build(fresh, found, job, ASIDE):
                raise _NothingToDoError
            fresh.end(unknown_files(self.old.root, {file.path for file in found.base.files}))
            self.parent.sync()
        return name, fresh.bytes_written

    def _is_built(self, name: str, target: Target) -> bool:
        """Whether the folder `name` is at the target, left there by a run that was stopped, or by --keep-previous."""
        try:
            with open_root(self.parent.path / name) as root, Receiver(root):
                return is_there_already(*look_at(root, target, ()))
        except DcrError:
            return False


def _names(link: Path, job: Job) -> list[str]:
    """What a new folder for a link may be called."""
    stem = f"{link.name}.dcr-{job.target.delta.commit_blake3.hex()[:12]}"
    return [stem, *(f"{stem}-{number}" for number in range(2, _MOST_NAMES))]


def _names_taken(parent: Folder, names: Sequence[str]) -> ConflictError:
    return ConflictError(str(parent.path / names[0]), "exists, and so do all names like it; remove them")


def _can_take(parent: Folder, name: str, old: str, target: Target) -> bool:
    """Whether a new folder could have a name, or one that has it could be used."""
    if parent.status(name) is None or _is_unfinished(parent, name):
        return True
    try:
        with open_root(parent.path / name) as root:
            return name != old and is_there_already(*look_at(root, target, ()))
    except DcrError:
        return False


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
    parent.make_folder(name, PRIVATE_FOLDER_MODE, exist_ok=True)
    parent.sync()
    with _opened_private(parent, name) as root, Receiver(root) as receiver:
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
def _opened_private(parent: Folder, name: str) -> Iterator[Folder]:
    """Open a folder that is being built, or was and may have its last mode already, to change what is in it."""
    with parent.open_folder(name) as folder:
        folder.make_private()
        yield folder


@contextmanager
def _locked_behind(link: Path) -> Iterator[tuple[Receiver, str]]:
    """Lock the folder behind a link, which still points at it then, and give the link's text."""
    text, folder = _behind(link)
    with open_root(folder) as root, Receiver(root) as receiver:
        if not link.is_symlink() or os.readlink(link) != text or os.path.realpath(link) != folder:
            raise ConflictError(str(link), "was turned by another dcr just now", hint="run the same command again")
        marker = receiver.read_marker()
        if marker is not None:
            hint = f"finish it first: dcr apply {marker.delta} {link}"
            raise IncompleteError(str(link), "an apply to the folder behind it was stopped", hint=hint)
        receiver.clear()
        yield receiver, text


def _behind(link: Path) -> tuple[str, str]:
    """What a link says, and the folder that it leads to."""
    if not link.is_symlink():
        hint = f"make it one: mv {link} {link}-1 && ln -s {link.name}-1 {link}"
        raise UsageError(str(link), "is not a link to a folder, as aside needs it", hint=hint)
    return os.readlink(link), os.path.realpath(link)


def _remove_previous(receiver: Receiver, parent: Folder) -> list[str]:
    """Remove the folder that `receiver`'s has replaced, if it is still there; it stays if it holds what cannot be
    carried over, which is returned then."""
    word = receiver.home.read(_PREVIOUS, _PREVIOUS_LIMIT)
    if word is None:
        return []
    name, known = decode_previous(word, str(receiver.home.path / _PREVIOUS))
    if name == receiver.root.path.name:
        raise DamagedError(str(receiver.home.path / _PREVIOUS), "names the folder it is in", hint="remove it")
    left: list[str] = []
    if parent.status(name) is not None:
        with parent.open_folder(name) as old:
            left = carry_over(old, receiver, known)
        left = left or remove_known(parent, name, known)
    receiver.home.remove(_PREVIOUS)
    return [str(parent.path / name / path) for path in left]


def _remove_unfinished(parent: Folder, link_name: str) -> None:
    """Remove folders that runs for this link began and did not complete; nobody else can be at them while it is
    locked."""
    for name in parent.names():
        if name.startswith(f"{link_name}.dcr-") and _is_unfinished(parent, name):
            _remove_folder(parent, name)


def _remove_folder(parent: Folder, name: str) -> None:
    """Remove an unfinished folder, last of all what says that it is one."""
    with _opened_private(parent, name) as folder:
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
        text = parent.read(f"{name}/{STATE_FOLDER}/{MARKER}", MAX_MARKER_BYTES)
        return text is not None and decode_marker(text, name).mode == ASIDE
    except DcrError:
        return False


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
