"""Brings a checkpoint to a version of a remote, once.

This module takes what is asked for; advance.py carries it out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dcr_cli.advance import advance, stage_next
from dcr_cli.arguments import check_path
from dcr_cli.engine.engines import DEFAULT_SECONDS as DEFAULT_ENGINE_SECONDS
from dcr_cli.errors import DcrError
from dcr_cli.fetch.hook import DEFAULT_SECONDS
from dcr_cli.fetch.leaving import begin_leaving
from dcr_cli.fetch.opening import check_addresses, open_remote
from dcr_cli.fetch.pull_result import PullResult
from dcr_cli.fetch.wish import Wish, make_wish
from dcr_cli.finishing import finish
from dcr_cli.receiver.change import REPLACE
from dcr_cli.receiver.install.gather import Effort, Progress
from dcr_cli.store.store import Store
from dcr_cli.work import threads

__all__ = ["PullResult", "pull"]


def pull(
    remote: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    version: int | None = None,
    mode: str = REPLACE,
    keep_previous: bool = False,
    repair: bool = False,
    storage_options: Mapping[str, object] | None = None,
    fallbacks: Sequence[str | os.PathLike[str]] = (),
    trusted_keys: Sequence[str] = (),
    receiver: str | None = None,
    receiver_key: str | os.PathLike[str] | None = None,
    hook: str | None = None,
    hook_seconds: float = DEFAULT_SECONDS,
    engines: Sequence[str] = (),
    engine_seconds: float = DEFAULT_ENGINE_SECONDS,
    engine_token: str | None = None,
    layout: str | os.PathLike[str] | None = None,
    publish_changes: str | os.PathLike[str] | None = None,
    limit_bytes_per_second: float | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PullResult:
    """Bring `checkpoint` to the newest version of `remote`, or to `version`, which may lie behind.

    A folder that is not there, or empty, becomes a copy; one that holds one of the newest versions is brought on from
    there; any other one is refused, unless `repair` brings it to the version by an anchor, whatever it holds. `mode`,
    `keep_previous` and `layout` are those of `apply`; the shards of a receiver with a layout are cut out of the files
    of an anchor where deltas do not lead to the version. With
    `trusted_keys` (as text or files) only what one of them has signed counts. `hook` is a shell command that runs when
    the bytes are in place; if it fails, the next pull runs it again. `engines`, each `vllm=URL` or `sglang=URL`, are
    reloaded instead of it, one after the other; each may take `engine_seconds` to load, and is shown `engine_token`. A
    `receiver`'s name is what it acknowledges the version by, signed with `receiver_key`; one that has a name also
    stages the version after it, if that is prepared; what prevents that is no error of the pull: the result has it as
    `staging_error`. In the folder `publish_changes`, which is made for this user alone where it is not there, what each
    delta changes is left, decoded, for whoever serves from it, and, staged as with a name, what the version changes
    that is prepared. `fallbacks` lead to the same remote, and are asked in their order where it does not answer. Raises
    what `apply` raises,
    TransportError, NotFoundError (no remote, no such version), DamagedError, WrongBaseError (another state or history,
    a log that went backwards, a delta that is gone), HookError.
    """
    wish = make_wish(
        Effort(threads(jobs), progress),
        version=version,
        mode=mode,
        keep_previous=keep_previous,
        is_repair=repair,
        trusted_keys=trusted_keys,
        receiver=receiver,
        receiver_key=receiver_key,
        hook=hook,
        hook_seconds=hook_seconds,
        engines=engines,
        engine_seconds=engine_seconds,
        engine_token=engine_token,
        layout=layout,
        publish_changes=publish_changes,
        dry_run=dry_run,
    )
    check_path(checkpoint, "checkpoint")
    check_addresses(checkpoint, remote, fallbacks, publish_changes)
    path = Path(checkpoint)
    begin_leaving(wish)
    foreign = finish(path, wish)
    with open_remote(
        remote, fallbacks, storage_options, receiver=receiver, limit_bytes_per_second=limit_bytes_per_second
    ) as store:
        result = replace(advance(store, path, wish), recovered=foreign is not None)
        if foreign is not None and result.already:
            result = replace(result, foreign=foreign)
        return _with_next(store, path, wish, result) if _stages(wish) else result


def _with_next(store: Store, path: Path, wish: Wish, result: PullResult) -> PullResult:
    """Stage what comes next, if it is prepared: the result with what became of that."""
    try:
        return replace(result, staged=stage_next(store, path, wish))
    except DcrError as error:
        return replace(result, staging_error=error)


def _stages(wish: Wish) -> bool:
    """Whether somebody waits for what a receiver stages, who hears of it, or takes what it changes; one that goes back
    does not wait for what comes."""
    return (wish.speaker is not None or wish.changes is not None) and wish.version is None and not wish.dry_run
