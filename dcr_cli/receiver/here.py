"""Brings a receiver where it is to the target of a chain, or finishes what was begun, and says what was done.

How that can be stopped at any step is change.py's matter.
"""

from __future__ import annotations

from dcr_cli.checkpoint.folder import scan
from dcr_cli.receiver.apply_result import ApplyResult, done, nothing_done
from dcr_cli.receiver.change import IN_PLACE, Change
from dcr_cli.receiver.job import Job, Target, sums_of
from dcr_cli.receiver.marker import Marker
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.sidecars import identities_now, leave_record
from dcr_cli.receiver.survey import is_there_already, look_at
from dcr_cli.receiver.view import View


def change(receiver: Receiver, target: Target, mode: str, view: View) -> ApplyResult:
    """Bring a receiver to `target`, which nothing has begun to do."""
    root = receiver.root
    found, job = look_at(root, target, view)
    is_there = is_there_already(found, job)
    if not is_there:
        plan = job.plan(is_exact=found.is_base, in_place=mode == IN_PLACE)
        work = Change(receiver, job, plan)
        is_there = work.carry_out(found, mode)
    if is_there:
        files = found.files_at_target(target.chain.manifest)
        leave_record(receiver, job, files, is_trusted=found.known is not None)
        return nothing_done(
            str(root.path), mode, job, exact=found.has_target_files, foreign=found.foreign, dry_run=False
        )
    return done(
        str(root.path),
        mode,
        job,
        plan,
        files=work.changed_paths,
        bytes_written=work.bytes_written,
        foreign=tuple(sorted({*found.foreign, *work.left})),
    )


def finish(receiver: Receiver, target: Target, marker: Marker) -> ApplyResult:
    """Finish the change to `target` that `marker` tells of, as it was begun."""
    root = receiver.root
    base, digests = receiver.read_base(marker)
    identities = identities_now(root, [file.path for file in base.files])
    job = Job(target, base, root.path, identities, sums_of(row.tobytes() for row in digests))
    plan = job.plan(is_exact=marker.is_exact, in_place=marker.mode == IN_PLACE)
    work = Change(receiver, job, plan)
    work.finish()
    ours = {*(shard.path for shard in plan.shards), *(file.path for file in base.files), *work.changed_paths}
    ours |= {row.path for row in target.chain.manifest.files}
    ours -= set(work.left)
    strangers: list[str] = []
    present = scan(root.path, skip=target.chain.manifest.skipped, strangers=strangers)
    foreign = tuple(sorted([*(path for path in present if path not in ours), *strangers]))
    return done(
        str(root.path),
        marker.mode,
        job,
        plan,
        files=work.changed_paths,
        bytes_written=work.bytes_written,
        foreign=foreign,
        recovered=True,
    )
