"""Brings a checkpoint by deltas from base to target, byte for byte; what was stopped is finished by the next run.

This module checks what is asked for and chooses the way, and which deltas go in one pass; receiver/here.py changes a
receiver where it is, receiver/beside/ builds new folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcr_cli.arguments import check_apart, check_path, is_loop
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.in_progress import INSTALL, STATE_FOLDER, command_to_finish, is_incomplete
from dcr_cli.checkpoint.names import listed
from dcr_cli.checkpoint.patterns import check_patterns
from dcr_cli.delta.chain import ChainPayloads, check_chain, compose, split
from dcr_cli.delta.delta import Delta, open_delta
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import IN_A_CIRCLE, DamagedError, IncompleteError, LocalError, UsageError
from dcr_cli.layout.document import read_layout
from dcr_cli.receiver.apply_result import ApplyResult, joined
from dcr_cli.receiver.beside.aside import apply_aside
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.beside.to import apply_to, find_built
from dcr_cli.receiver.change import IN_PLACE, REPLACE
from dcr_cli.receiver.here import change, finish
from dcr_cli.receiver.job import Progress, Target
from dcr_cli.receiver.marker import Marker
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import read_recorded_state
from dcr_cli.receiver.rehearsal import find_there, rehearse_aside, rehearse_change, rehearse_to
from dcr_cli.receiver.start import TargetOf, find_start
from dcr_cli.receiver.survey import open_root
from dcr_cli.receiver.view import View
from dcr_cli.work import threads

__all__ = ["MODES", "ApplyResult", "apply"]

Stamp = tuple[str, State | None]
MODES = (REPLACE, IN_PLACE, ASIDE)


def apply(
    delta: str | Path | Sequence[str | Path],
    checkpoint: str | Path,
    *,
    to: str | Path | None = None,
    mode: str = REPLACE,
    jobs: int | None = None,
    dry_run: bool = False,
    keep_previous: bool = False,
    skip: Sequence[str] = (),
    layout: str | Path | None = None,
    progress: Progress | None = None,
) -> ApplyResult:
    """Bring `checkpoint` from the base of `delta` to its target; with `to`, build the target there instead, unless it
    is there, as an earlier apply has built it.

    Several deltas, each starting where the one before ends, are applied in one pass, from the version on that the
    checkpoint is at; deltas that do not allow that go in as few passes as they can, one after the other, and a dry run
    rehearses the first of them.

    `mode` replace stages new shards and renames them, in-place patches shards where they lie, and aside builds beside
    the folder that the link `checkpoint` points at and turns the link; that folder stays with `keep_previous`, and if
    it was not made for this link or another one leads to it. With `layout`, a file, or where one was given before, or
    PyTorch's distributed checkpoint has written the shards, tensors lie in them where that says. A receiver that is at
    the target is left alone. Before
    anything changes, the deltas and the base are read and checked, and every tensor's result: an error until then
    leaves the checkpoint as it was. Stopped later, it says that it is incomplete until the same call finishes it.
    Raises NotFoundError, DamagedError (IncompleteError if other deltas have to be finished first), WrongBaseError,
    ConflictError (another apply holds it), LocalError, UsageError.
    """
    _check_arguments(mode, jobs, is_apart=to is not None, keep_previous=keep_previous)
    check_patterns(skip)
    folders = [delta] if isinstance(delta, str | Path) else list(delta)
    if not folders:
        raise UsageError("apply", "no delta is given", hint="dcr apply DELTA CHECKPOINT")
    for folder in folders:
        _check_apart(Path(folder), Path(checkpoint), Path(to) if to is not None else None)
    hint = "the delta comes first: dcr apply DELTA CHECKPOINT"
    opened = [open_delta(folder, if_checkpoint=hint) for folder in folders]
    view = View(tuple(skip), read_layout(layout) if layout is not None else None)
    way = ApplyWay(mode, Path(to) if to is not None else None, dry_run, keep_previous, view)
    return apply_chain(opened, Path(checkpoint), way, jobs=jobs, progress=progress)


@dataclass(frozen=True, slots=True)
class ApplyWay:
    """How deltas are to be applied; the members mean what the arguments of `apply` mean.

    Aside, `before_seen` is called with each new folder when it is complete, before the link is turned to it.
    """

    mode: str = REPLACE
    to: Path | None = None
    dry_run: bool = False
    keep_previous: bool = False
    view: View = field(default_factory=View)
    before_seen: Callable[[Path], None] = lambda folder: None


def apply_chain(
    deltas: Sequence[Delta],
    checkpoint: Path,
    way: ApplyWay,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    remote: str | None = None,
) -> ApplyResult:
    """Do what `apply` does with opened deltas, which may lie anywhere, in the checkpoint's own `.dcr/fetched` too.

    Aside, they must not lie in a folder that goes, if they need several passes. `remote` is what people are told to
    pull from to finish a change that was stopped, where the deltas come from there.
    """
    check_chain(deltas)
    with ExitStack() as stack:
        readers = [stack.enter_context(PayloadReader(delta.folder, delta.manifest.payloads)) for delta in deltas]
        for reader in readers:
            reader.verify_all(threads(jobs))
        reader_of = {delta.commit_blake3: reader for delta, reader in zip(deltas, readers, strict=True)}

        def target_of(group: Sequence[Delta]) -> Target:
            payloads = ChainPayloads([reader_of[delta.commit_blake3] for delta in group])
            return Target(compose(group), payloads, threads(jobs), progress, remote=remote)

        if way.to is None and way.mode != ASIDE and not way.dry_run:
            return _apply_here(checkpoint, deltas, way, target_of)
        if len(deltas) > 1:
            with open_root(checkpoint) as root:
                deltas = _not_done(root, deltas, way.view, target_of)
        targets = [target_of(group) for group in split(deltas)]
        if way.to is not None:
            built = find_built(way.to, targets[-1], way.view, dry_run=way.dry_run)
            if built is not None:
                return built
        if way.dry_run:
            return replace(_rehearse(checkpoint, targets[0], way), target=targets[-1].chain.target)
        if way.to is not None:
            return apply_to(checkpoint, way.to, targets, way.view)
        keeps = [way.keep_previous, *(False for _ in targets[1:])]
        return joined(
            [
                apply_aside(checkpoint, target, way.view, keep_previous=keep, before_seen=way.before_seen)
                for target, keep in zip(targets, keeps, strict=True)
            ]
        )


def _rehearse(checkpoint: Path, target: Target, way: ApplyWay) -> ApplyResult:
    if way.to is not None:
        return rehearse_to(checkpoint, way.to, target, way.view)
    if way.mode == ASIDE:
        return rehearse_aside(checkpoint, target, way.view, keep_previous=way.keep_previous)
    with open_root(checkpoint) as root:
        return rehearse_change(root, target, way.mode, way.view)


def _apply_here(checkpoint: Path, deltas: Sequence[Delta], way: ApplyWay, target_of: TargetOf) -> ApplyResult:
    with open_root(checkpoint) as root:
        try:
            receiver = Receiver(root)
        except LocalError:
            # Where nothing can be changed, nothing has to be if it is at the target.
            group = split(_not_done(root, deltas, way.view, target_of))[0]
            found = find_there(root, target_of(group), way.mode, way.view)
            if found is None:
                raise
            return found
        with receiver:
            results = []
            marker = receiver.read_marker()
            if marker is not None:
                begun, deltas = _begun(root, deltas, marker)
                results.append(finish(receiver, target_of(begun), marker))
            else:
                receiver.clear()
                deltas = _not_done(root, deltas, way.view, target_of)
            for group in split(deltas):
                results.append(change(receiver, target_of(group), way.mode, way.view))
            return joined(results)


def _not_done(root: Folder, deltas: Sequence[Delta], view: View, target_of: TargetOf) -> Sequence[Delta]:
    """The deltas that are to be applied; of those that all have been, the last, so that its target is checked."""
    return deltas[min(find_start(root, deltas, view, target_of), len(deltas) - 1) :]


def _begun(root: Folder, deltas: Sequence[Delta], marker: Marker) -> tuple[Sequence[Delta], Sequence[Delta]]:
    """The deltas whose change is in progress, and those that come after it.

    Raises IncompleteError unless it is one of these deltas, and one that can be finished.
    """
    if marker.mode == INSTALL:
        command = command_to_finish(marker.deltas, marker.remote, root.path)
        raise IncompleteError(str(root.path), "a pull to it was stopped", hint=f"finish it first: {command}")
    if marker.mode not in (REPLACE, IN_PLACE):
        facts = "was being built when it was stopped"
        raise IncompleteError(str(root.path), facts, hint="run the dcr apply that was building it again")
    commits = [delta.commit_blake3 for delta in deltas]
    count = len(marker.commits)
    for begin in range(len(deltas) - count + 1):
        if tuple(commits[begin : begin + count]) == marker.commits:
            return deltas[begin : begin + count], deltas[begin + count :]
    other = "another delta" if count == 1 else "other deltas"
    facts = f"an apply of {other}, {listed(marker.deltas, 3)}, to it was stopped"
    command = command_to_finish(marker.deltas, marker.remote, root.path)
    raise IncompleteError(str(root.path), facts, hint=f"finish it first: {command}")


def stamp_of(checkpoint: str | Path) -> Stamp:
    """What `left_by_stop` needs to know of a checkpoint as it was."""
    path = os.path.join(os.path.realpath(checkpoint), STATE_FOLDER)
    try:
        with open_folder(path) as home:
            return path, read_recorded_state(home)
    except (LocalError, DamagedError):
        return path, None


def left_by_stop(checkpoint: str | Path, before: Stamp) -> str:
    """Say how an apply to `checkpoint` that was stopped has left it: as it was, incomplete, or done all the same.

    The record of another state is written when all else is, and before the mark of a change goes.
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
    """Raise unless all of them are somewhere, and none inside another."""
    given = {"delta": delta, "checkpoint": checkpoint} | ({"output": to} if to is not None else {})
    for name, path in given.items():
        check_path(path, name)
        if is_loop(path):
            facts = "is a link that leads in a circle"
            if name == "output":
                raise UsageError(str(path), facts, hint="choose another name for the output")
            raise LocalError(f"{name} {path}", facts, hint=IN_A_CIRCLE)
    if to is not None and os.path.realpath(to) == os.path.realpath(checkpoint):
        raise UsageError(str(to), "is the checkpoint itself", hint="leave out --to to change it where it is")
    check_apart(given)
