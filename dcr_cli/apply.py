"""Brings a checkpoint from a delta's base to its target, byte for byte; what was stopped is finished by the next run.

This module checks what is asked for and chooses the way; change.py changes a receiver where it is, beside.py builds a
new folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dcr_cli.arguments import check_path, is_loop
from dcr_cli.checkpoint.folder import Identity, identity_of, scan
from dcr_cli.checkpoint.in_progress import INSTALL, STATE_FOLDER, command_to_finish, is_incomplete
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.patterns import check_patterns
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.payload import PayloadReader
from dcr_cli.durable import Folder
from dcr_cli.errors import IncompleteError, LocalError, UsageError
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.beside import ASIDE, apply_aside, apply_to
from dcr_cli.receiver.change import IN_PLACE, REPLACE, Change
from dcr_cli.receiver.job import Job, Progress, Target, sums_of
from dcr_cli.receiver.receiver import Marker, Receiver
from dcr_cli.receiver.record import STATE_NAME
from dcr_cli.receiver.rehearsal import find_there, rehearse_aside, rehearse_change, rehearse_to
from dcr_cli.receiver.sidecars import identities_now, leave_record
from dcr_cli.receiver.survey import is_there_already, look_at, open_root
from dcr_cli.work import threads

__all__ = ["MODES", "ApplyResult", "apply"]

Stamp = tuple[str, Identity | None]
MODES = (REPLACE, IN_PLACE, ASIDE)


def apply(
    delta: str | Path,
    checkpoint: str | Path,
    *,
    to: str | Path | None = None,
    mode: str = REPLACE,
    jobs: int | None = None,
    dry_run: bool = False,
    keep_previous: bool = False,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> ApplyResult:
    """Bring `checkpoint` from the base of `delta` to its target; with `to`, build the target there instead.

    `mode` replace stages new shards and renames them, in-place patches shards where they lie, and aside builds beside
    the folder that the link `checkpoint` points at and turns the link; that folder stays with `keep_previous`, and if
    it was not made for this link or another one leads to it. A receiver that is at the target is left alone. Before
    anything changes, the delta and the base are read and checked, and every tensor's result: an error until then leaves
    the checkpoint as it was. Stopped later, it says that it is incomplete until the same call finishes it. Raises
    NotFoundError, DamagedError (IncompleteError if another delta has to be finished first), WrongBaseError,
    ConflictError (another apply holds it), LocalError, UsageError.
    """
    _check_arguments(mode, jobs, is_apart=to is not None, keep_previous=keep_previous)
    check_patterns(skip)
    _check_apart(Path(delta), Path(checkpoint), Path(to) if to is not None else None)
    opened = open_delta(delta, if_checkpoint="the delta comes first: dcr apply DELTA CHECKPOINT")
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        payloads.verify_all(threads(jobs))
        target = Target(opened, payloads, threads(jobs), progress)
        if dry_run and to is not None:
            return rehearse_to(Path(checkpoint), Path(to), target, skip)
        if dry_run and mode == ASIDE:
            return rehearse_aside(Path(checkpoint), target, skip, keep_previous=keep_previous)
        if dry_run:
            with open_root(checkpoint) as root:
                return rehearse_change(root, target, mode, skip)
        if to is not None:
            return apply_to(Path(checkpoint), Path(to), target, skip)
        if mode == ASIDE:
            return apply_aside(Path(checkpoint), target, skip, keep_previous=keep_previous)
        with open_root(checkpoint) as root:
            try:
                receiver = Receiver(root)
            except LocalError:
                # Where nothing can be changed, nothing has to be if it is at the target.
                found = find_there(root, target, mode, skip)
                if found is None:
                    raise
                return found
            with receiver:
                marker = receiver.read_marker()
                if marker is not None:
                    return _finish(receiver, target, marker)
                receiver.clear()
                return _change(receiver, target, mode, skip)


def _change(receiver: Receiver, target: Target, mode: str, skip: Sequence[str]) -> ApplyResult:
    root = receiver.root
    found, job = look_at(root, target, skip)
    is_there = is_there_already(found, job)
    if not is_there:
        plan = job.plan(is_exact=found.is_base, in_place=mode == IN_PLACE)
        change = Change(receiver, job, plan)
        is_there = change.carry_out(found, mode, target.delta.commit_blake3)
    if is_there:
        files = found.files_at_target(target.delta.manifest)
        leave_record(receiver, job, files, is_trusted=found.known is not None)
        return nothing_done(
            str(root.path), mode, job, exact=found.has_target_files, foreign=found.foreign, dry_run=False
        )
    return done(
        str(root.path),
        mode,
        job,
        plan,
        files=change.changed_paths,
        bytes_written=change.bytes_written,
        foreign=found.foreign,
    )


def _finish(receiver: Receiver, target: Target, marker: Marker) -> ApplyResult:
    """Finish the change that `marker` tells of, as it was begun."""
    root = receiver.root
    check_same_delta(root, target, marker)
    base, digests = receiver.read_base(marker)
    identities = identities_now(root, [file.path for file in base.files])
    job = Job(target, base, root.path, identities, sums_of(row.tobytes() for row in digests))
    plan = job.plan(is_exact=marker.is_exact, in_place=marker.mode == IN_PLACE)
    change = Change(receiver, job, plan)
    change.finish()
    ours = {*(shard.path for shard in plan.shards), *(file.path for file in base.files), *change.changed_paths}
    ours |= {row.path for row in target.delta.manifest.files}
    strangers: list[str] = []
    present = scan(root.path, skip=target.delta.manifest.skipped, strangers=strangers)
    foreign = tuple(sorted([*(path for path in present if path not in ours), *strangers]))
    return done(
        str(root.path),
        marker.mode,
        job,
        plan,
        files=change.changed_paths,
        bytes_written=change.bytes_written,
        foreign=foreign,
        recovered=True,
    )


def check_same_delta(root: Folder, target: Target, marker: Marker) -> None:
    """Raise IncompleteError unless the change in progress is that of this delta, and one that can be finished."""
    if marker.mode == INSTALL:
        command = command_to_finish(marker.delta, root.path, marker.mode)
        raise IncompleteError(str(root.path), "a pull to it was stopped", hint=f"finish it first: {command}")
    if marker.mode not in (REPLACE, IN_PLACE):
        facts = "was being built when it was stopped"
        raise IncompleteError(str(root.path), facts, hint="run the dcr apply that was building it again")
    if marker.commit != target.delta.commit_blake3:
        facts = f"an apply of another delta, {shown(marker.delta)}, to it was stopped"
        command = command_to_finish(marker.delta, root.path)
        raise IncompleteError(str(root.path), facts, hint=f"finish it first: {command}")


def stamp_of(checkpoint: str | Path) -> Stamp:
    """What `left_by_stop` needs to know of a checkpoint as it was."""
    home = os.path.join(os.path.realpath(checkpoint), STATE_FOLDER)
    try:
        return home, identity_of(os.stat(os.path.join(home, STATE_NAME)))
    except OSError:
        return home, None


def left_by_stop(checkpoint: str | Path, before: Stamp) -> str:
    """Say how an apply to `checkpoint` that was stopped has left it: as it was, incomplete, or done all the same.

    A record is written when all else is, and before the mark of a change goes.
    """
    try:
        if is_incomplete(checkpoint):
            return f"{checkpoint} is incomplete now"
    except LocalError:
        return f"whether {checkpoint} is incomplete now cannot be told"
    return f"{checkpoint} is {'as it was' if stamp_of(checkpoint) == before else 'at the target'}"


def _check_arguments(mode: str, jobs: int | None, *, is_apart: bool, keep_previous: bool) -> None:
    if mode not in MODES:
        raise UsageError("mode", f"one of {', '.join(MODES)} expected, found {mode!r}")
    if is_apart and mode != REPLACE:
        raise UsageError("apply", f"to and mode {mode} exclude each other")
    if keep_previous and mode != ASIDE:
        raise UsageError("apply", "keep_previous needs mode aside")
    threads(jobs)


def _check_apart(delta: Path, checkpoint: Path, to: Path | None) -> None:
    """A folder that is changed must hold nothing that is read, and the other way round; all have to be somewhere."""
    given = {"delta": delta, "checkpoint": checkpoint} | ({"output": to} if to is not None else {})
    for name, path in given.items():
        check_path(path, name)
        if is_loop(path):
            facts = "is a link that leads in a circle"
            if name == "output":
                raise UsageError(str(path), facts, hint="choose another name for the output")
            raise LocalError(f"{name} {path}", facts)
    places = {name: Path(os.path.realpath(path)) for name, path in given.items()}
    if to is not None and places["output"] == places["checkpoint"]:
        raise UsageError(str(to), "is the checkpoint itself", hint="leave out --to to change it where it is")
    for name, place in places.items():
        for other, around in places.items():
            if name != other and (place == around or around in place.parents):
                raise UsageError(
                    str(place), f"the {name} cannot lie inside the {other} {around}", hint=f"have the {name} elsewhere"
                )
