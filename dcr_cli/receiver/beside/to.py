"""Applies deltas to a new folder; the checkpoint that they start from is only read.

A folder that a stopped run left is marked as incomplete, and removed by the next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dcr_cli.errors import DcrError, WrongBaseError
from dcr_cli.receiver.apply_result import ApplyResult, done, joined, nothing_done
from dcr_cli.receiver.beside.folders import TO, check_free, new_folder, open_parent, partial_name
from dcr_cli.receiver.beside.fresh import Fresh, build_shards, room_for_fresh
from dcr_cli.receiver.change import REPLACE
from dcr_cli.receiver.here import change
from dcr_cli.receiver.job import Job, Target
from dcr_cli.receiver.plan import Plan
from dcr_cli.receiver.record import find_record
from dcr_cli.receiver.sidecars import final_files, new_files
from dcr_cli.receiver.survey import Survey, is_there_already, look_at, open_root
from dcr_cli.receiver.view import View


def apply_to(checkpoint: Path, out: Path, targets: Sequence[Target], view: View) -> ApplyResult:
    """Build the last of `targets` in `out`, which must not exist or be an empty folder; `checkpoint` is only read.

    The first is built from it, and brought to the others before it gets its name.
    """
    out = Path(os.path.abspath(out))
    with open_root(checkpoint) as source, open_parent(out) as parent:
        check_free(parent, out.name)
        found, job = look_at(source, targets[0], view)
        if is_there_already(found, job):
            raise nothing_to_build(job)
        plan = job.plan(is_exact=found.is_base, in_place=False)
        partial = partial_name(out.name)
        with new_folder(parent, partial, exist_ok=True) as receiver:
            fresh = Fresh(receiver, source, job, plan, links=False)
            if build_shards(fresh, found, job, TO):
                raise nothing_to_build(job)
            fresh.end()
            result = done_to(out, found, job, plan, bytes_written=fresh.bytes_written, dry_run=False)
            results = [result]
            for target in targets[1:]:
                results.append(change(receiver, target, REPLACE, view))
                # What it has prepared goes before the folder is seen.
                receiver.clear()
            check_free(parent, out.name)
            parent.rename(partial, parent, out.name)
            parent.sync()
        return joined(results)


def find_built(out: Path, target: Target, view: View, *, dry_run: bool) -> ApplyResult | None:
    """The result for an `out` that an earlier run has built: its record says so, and its bytes; None if it is something
    else, or a link."""
    out = Path(os.path.abspath(out))
    if os.path.islink(out) or not os.path.isdir(out):
        return None
    try:
        with open_root(out) as root:
            record = find_record(root)
            if record is None or record.state.content != target.chain.target.content:
                return None
            found, job = look_at(root, target, view)
            if not is_there_already(found, job):
                return None
    except DcrError:
        # Whatever is wrong with it, nothing can be built there.
        return None
    return nothing_done(str(out), TO, job, exact=found.has_target_files, foreign=found.foreign, dry_run=dry_run)


def done_to(out: Path, found: Survey, job: Job, plan: Plan, *, bytes_written: int, dry_run: bool) -> ApplyResult:
    paths = [file.path for file in final_files(job, plan, new_files(job, plan))]
    foreign = found.foreign
    result = done(str(out), TO, job, plan, files=paths, bytes_written=bytes_written, foreign=foreign, dry_run=dry_run)
    return replace(result, room_bytes=room_for_fresh(plan, links=False))


def nothing_to_build(job: Job) -> WrongBaseError:
    return WrongBaseError(job.what, "is at this delta's target already; there is nothing to build", hint="copy it")
