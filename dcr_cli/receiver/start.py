"""Finds how many of some deltas a receiver has behind it, so that a chain is applied from there on.

It changes nothing, and nothing is refused here: what is neither a base nor a target is the survey's to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.delta.chain import compose_files
from dcr_cli.delta.delta import Delta
from dcr_cli.durable import Folder
from dcr_cli.receiver.file_plan import match_files
from dcr_cli.receiver.job import Sums, Target, content_of
from dcr_cli.receiver.survey import Survey, files_left, has_tensors_of_target, look_at, looks_like_target
from dcr_cli.receiver.view import View

TargetOf = Callable[[Sequence[Delta]], Target]


def find_start(root: Folder, deltas: Sequence[Delta], view: View, target_of: TargetOf) -> int:
    """How many of `deltas` have been applied to the receiver in `root`: all up to the last one at whose target it is.

    A receiver that looks like one of the targets, and has no record that says so, is read as a whole.
    """
    if len(deltas) == 1:
        return 0
    read: tuple[Sequence[Tensor], Sums] | None = None
    for count in range(len(deltas), 0, -1):
        target = target_of(deltas[count - 1 : count])
        found, job = look_at(root, target, view)
        if not found.is_target or not has_tensors_of_target(found, job):
            continue
        sums = found.known if found.known is not None else read[1] if read and read[0] == job.tensors else None
        if sums is None and looks_like_target(found, job):
            sums = job.digest(range(len(job.tensors)), "check")
            read = job.tensors, sums
        if sums is None or content_of(job.tensors, sums) != target.chain.target.content:
            continue
        if not _has_rival(found, deltas[:count]):
            return count
    return 0


def _has_rival(found: Survey, deltas: Sequence[Delta]) -> bool:
    """Whether a version before has the same tensors, and its very files are there, or ones that the deltas have
    removed.

    Then the receiver is at that version, and they are not just files of the same names.
    """
    content = deltas[-1].commit.target.content
    rivals = [delta for delta in deltas if delta.commit.base.content == content]
    if not rivals:
        return False
    if not found.has_target_files and any(_has_base_files(found, delta) for delta in rivals):
        return True
    _, removed = compose_files(deltas)
    return bool(files_left(found.files, removed))


def _has_base_files(found: Survey, delta: Delta) -> bool:
    """Whether all files of a delta's base are there, byte for byte."""
    paths = {row.path for row in delta.manifest.files}
    candidates = [paths, paths.union(file.path for file in delta.manifest.removed_files)]
    return match_files(found.files, delta.commit.base.files, candidates) is not None
