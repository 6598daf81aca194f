"""Does all of an apply that changes nothing, and says what the apply would do.

A rehearsal reads, decodes and checks everything; it refuses what the apply would refuse.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import DcrError
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.beside.aside import check_beside, stays
from dcr_cli.receiver.beside.folders import ASIDE, check_free, is_unfinished, names_taken, open_parent
from dcr_cli.receiver.beside.fresh import check_fresh, room_for_fresh
from dcr_cli.receiver.beside.link import read_link
from dcr_cli.receiver.beside.to import done_to, nothing_to_build
from dcr_cli.receiver.change import IN_PLACE
from dcr_cli.receiver.job import Job, Target, whole_work
from dcr_cli.receiver.places import changed_paths, check_changeable, check_plan
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.record import record_folder
from dcr_cli.receiver.sidecars import new_files
from dcr_cli.receiver.survey import Survey, is_there_already, judge, look_at, open_root
from dcr_cli.receiver.view import View


def rehearse_change(root: Folder, target: Target, mode: str, view: View) -> ApplyResult:
    """Do all of replacing or patching in place that changes nothing, and say what it would do."""
    found, job = look_at(root, target, view)
    if is_there_already(found, job):
        return _nothing_done(root, mode, found, job, dry_run=True)
    check_changeable(root)
    plan = job.plan(is_exact=found.is_base, in_place=mode == IN_PLACE)
    paths = changed_paths(plan)
    check_plan(root, job.base, plan, paths)
    outcome = job.run(whole_work(plan), whole_base=True, stage="check")
    if judge(found, job, outcome.base_sums):
        return _nothing_done(root, mode, found, job, dry_run=True)
    outcome.check_target()
    return done(str(root.path), mode, job, plan, files=paths, bytes_written=0, foreign=found.foreign, dry_run=True)


def find_there(root: Folder, target: Target, mode: str, view: View) -> ApplyResult | None:
    """Say that a receiver in which nothing can be changed is at the target already.

    If it is not, LocalError says what `rehearse_change` says of its folder; None if that is not the reason.
    """
    found, job = look_at(root, target, view)
    if is_there_already(found, job):
        return _nothing_done(root, mode, found, job, dry_run=False)
    check_changeable(root)
    return None


def _nothing_done(root: Folder, mode: str, found: Survey, job: Job, *, dry_run: bool) -> ApplyResult:
    is_exact = found.has_target_files
    return nothing_done(str(root.path), mode, job, exact=is_exact, foreign=found.foreign, dry_run=dry_run)


def rehearse_to(checkpoint: Path, out: Path, target: Target, view: View) -> ApplyResult:
    """Do all of `apply_to` that changes nothing, and say what it would do."""
    out = Path(os.path.abspath(out))
    with open_root(checkpoint) as source, open_parent(out) as parent:
        check_free(parent, out.name)
        check_changeable(parent)
        found, job = look_at(source, target, view)
        if is_there_already(found, job):
            raise nothing_to_build(job)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        check_fresh(parent, source, plan, new_files(job, plan), links=False)
        if _try(found, job, plan):
            raise nothing_to_build(job)
        return done_to(out, found, job, plan, bytes_written=0, dry_run=True)


def rehearse_aside(path: Path, target: Target, view: View, *, keep_previous: bool) -> ApplyResult:
    """Do all of `apply_aside` that changes nothing, and say what it would do."""
    link = read_link(path)
    with open_root(link.folder) as source, open_folder(source.path.parent) as parent, open_folder(path.parent) as above:
        found, job = look_at(source, target, view, what=str(path))
        is_exact = found.has_target_files
        if is_there_already(found, job):
            return nothing_done(str(path), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=True)
        check_changeable(source)
        check_beside(link, parent, above, target.chain.commits[-1])
        names = link.names(target.chain.commits[-1])
        if not any(_can_take(parent, name, source.path.name, target, view) for name in names):
            raise names_taken(parent, names)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        check_fresh(parent, source, plan, new_files(job, plan), links=True)
        if _try(found, job, plan):
            return nothing_done(str(path), ASIDE, job, exact=is_exact, foreign=found.foreign, dry_run=True)
        with record_folder(source) or nullcontext() as home:
            goes = home is not None and not (keep_previous or stays(home, link))
        result = done(
            str(path),
            ASIDE,
            job,
            plan,
            files=changed_paths(plan),
            bytes_written=0,
            foreign=found.foreign,
            dry_run=True,
            previous=None if goes else link.folder,
        )
        return replace(result, room_bytes=room_for_fresh(plan, links=True))


def _try(found: Survey, job: Job, plan: Plan) -> bool:
    """Decode and check everything; True if the base has turned out to be the target."""
    outcome = job.run(whole_work(plan), whole_base=True, stage="check")
    if judge(found, job, outcome.base_sums):
        return True
    outcome.check_target()
    return False


def _can_take(parent: Folder, name: str, old: str, target: Target, view: View) -> bool:
    """Whether a new folder could have a name, or one that has it could be used."""
    if parent.status(name) is None or is_unfinished(parent, name):
        return True
    try:
        with open_root(parent.path / name) as root:
            return name != old and is_there_already(*look_at(root, target, view))
    except DcrError:
        return False
