"""What an apply has done, or would do, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcr_cli.checkpoint.digest import State
from dcr_cli.receiver.job import Job
from dcr_cli.receiver.places import room_for
from dcr_cli.receiver.plan import Action, Plan


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """What was done to `checkpoint`, the folder that is now at the target (or would be, if `dry_run`).

    `already`: it was at the target, nothing was written. `recovered`: a change that had been stopped was finished.
    `exact`: its files are the target's byte for byte; else it keeps its own shards. `room_bytes` have to be free.
    `foreign` files are no part of the checkpoint and were left. `previous` is the folder that a link pointed at before,
    if it is left there. `not_carried` are files of such a folder that could not be carried over, so that it was not
    removed.

    Deltas that had to go in several passes, one after the other: counts of tensors and shards are those of the last.
    """

    checkpoint: str
    mode: str
    base: State
    target: State
    already: bool
    recovered: bool
    dry_run: bool
    exact: bool
    changed_tensors: int
    kept_shards: int
    patched_shards: int
    rewritten_shards: int
    files_changed: tuple[str, ...]
    bytes_written: int
    room_bytes: int
    foreign: tuple[str, ...]
    previous: str | None
    not_carried: tuple[str, ...] = ()


def nothing_done(
    checkpoint: str, mode: str, job: Job, *, exact: bool, foreign: tuple[str, ...], dry_run: bool
) -> ApplyResult:
    """The result for a receiver that was at the target already."""
    chain = job.target.chain
    return ApplyResult(
        checkpoint=checkpoint,
        mode=mode,
        base=chain.base,
        target=chain.target,
        already=True,
        recovered=False,
        dry_run=dry_run,
        exact=exact,
        changed_tensors=0,
        kept_shards=len(job.base.shards),
        patched_shards=0,
        rewritten_shards=0,
        files_changed=(),
        bytes_written=0,
        room_bytes=0,
        foreign=foreign,
        previous=None,
    )


def done(
    checkpoint: str,
    mode: str,
    job: Job,
    plan: Plan,
    *,
    files: list[str],
    bytes_written: int,
    foreign: tuple[str, ...],
    recovered: bool = False,
    dry_run: bool = False,
    previous: str | None = None,
) -> ApplyResult:
    """The result of a plan that was carried out, or would be."""
    chain = job.target.chain
    actions = [shard.action for shard in plan.shards]
    return ApplyResult(
        checkpoint=checkpoint,
        mode=mode,
        base=chain.base,
        target=chain.target,
        already=False,
        recovered=recovered,
        dry_run=dry_run,
        exact=plan.ends_exact,
        changed_tensors=sum(bool(row.pieces) or row.source != row.name for row in job.target.rows),
        kept_shards=actions.count(Action.KEEP),
        patched_shards=actions.count(Action.PATCH),
        rewritten_shards=actions.count(Action.REWRITE),
        files_changed=tuple(dict.fromkeys(files)),
        bytes_written=bytes_written,
        room_bytes=room_for(plan),
        foreign=foreign,
        previous=previous,
    )


def joined(results: Sequence[ApplyResult]) -> ApplyResult:
    """The result of passes that were made one after the other over one checkpoint."""
    first, last = results[0], results[-1]
    if first is last:
        return first
    return replace(
        last,
        checkpoint=first.checkpoint,
        mode=first.mode,
        base=first.base,
        already=all(result.already for result in results),
        recovered=any(result.recovered for result in results),
        files_changed=tuple(dict.fromkeys(path for result in results for path in result.files_changed)),
        bytes_written=sum(result.bytes_written for result in results),
        room_bytes=max(result.room_bytes for result in results),
        foreign=first.foreign,
        previous=first.previous,
        not_carried=tuple(path for result in results for path in result.not_carried),
    )
