"""Publishes a checkpoint as the next version of a remote: what changed since the version before, committed last.

Where the baseline lies and how it moves is publisher/'s matter, what a remote's objects mean remote/'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.patterns import check_recorded_patterns
from dcr_cli.content import Progress
from dcr_cli.device.finding import check
from dcr_cli.device.wish import wish_of
from dcr_cli.errors import UsageError
from dcr_cli.layout.opening import layout_given, look_at
from dcr_cli.publisher.baseline import check_places
from dcr_cli.publisher.committing import Author
from dcr_cli.publisher.encodings import chosen_encodings
from dcr_cli.publisher.likeness import look_at_base
from dcr_cli.publisher.options import PushOptions
from dcr_cli.publisher.push_result import PushResult
from dcr_cli.publisher.pushing import Pushing
from dcr_cli.publisher.quorum import Quorum, wait_for
from dcr_cli.publisher.readiness import check_ready, check_settled
from dcr_cli.publisher.rehearsing import rehearse_push
from dcr_cli.publisher.source import Source
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.keys import APPLIED
from dcr_cli.remote.signing import load_signing_key, trust_in
from dcr_cli.store.opening import open_store
from dcr_cli.work import threads

__all__ = ["PushResult", "push"]


def push(
    checkpoint: str | os.PathLike[str],
    remote: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    base_layout: str | os.PathLike[str] | None = None,
    functions: Sequence[str] = (),
    baseline: str | os.PathLike[str] | None = None,
    baseline_link: bool = False,
    encodings: Sequence[str] | None = None,
    encoding: str = "auto",
    no_delta: bool = False,
    anchor_every: int | None = None,
    prepare: bool = False,
    wait_applied: int | None = None,
    timeout_seconds: float = 900.0,
    ready: str | None = None,
    settle_seconds: float = 0.0,
    skip: Sequence[str] = (),
    single_writer: bool = False,
    storage_options: Mapping[str, object] | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    trusted_keys: Sequence[str] = (),
    publisher: str = "",
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    device: str = "auto",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Publish `checkpoint` as the next version of `remote`.

    The first version, and one with `no_delta`, is an anchor: the files as they are. Any other is a delta from the
    baseline, a copy of the version before that is kept beside the checkpoint or in `baseline`, or from `base`, a
    checkpoint that is at that version. Either, but not the first version, may be shards of ranks: with `layout` and
    `base_layout` (of `base`), files that say where their tensors belong, or as PyTorch's distributed checkpoint writes
    them. What is published is the checkpoint that they are, in the files of the version before, but for sidecars of
    their own. `functions`, each `module:function`, are those that rules of the layouts may call. Nobody sees anything
    of a version before its commit, the last object that is written. A push that was stopped is gone on with by the
    next. With `wait_applied` it returns when so many receivers have acknowledged that they are at the version. With
    `trusted_keys`, public keys or files with them, the versions that it follows have to be signed by one of these.
    `device` is as for `diff`. A dry run changes nothing, neither on disk nor in the remote.

    Raises UsageError, NotFoundError, DamagedError, WrongBaseError (the remote holds another history, or versions
    that nobody has signed who is trusted, or there is no baseline), ConflictError (another publisher was faster,
    another push runs, the source changes or is not ready), TransportError, UnsupportedError (the remote cannot create
    an object only once; a device cannot be had; a rule of a layout is of a kind that is not known here, or calls a
    function that it may not), LocalError.
    """
    check_recorded_patterns(skip)
    for path, name in ((checkpoint, "checkpoint"), (base, "--base"), (baseline, "--baseline"), (layout, "--layout")):
        if path is not None:
            check_path(path, name)
    check_places(checkpoint, remote, baseline)
    wanted = Quorum(wait_applied, APPLIED, timeout_seconds) if wait_applied is not None else None
    if wanted is not None and prepare:
        facts = "nobody can be at a version that is prepared and not committed"
        raise UsageError("--wait-applied", facts, hint="dcr commit --quorum K waits for receivers that have staged it")
    wish = wish_of(device)
    check(wish)
    author = Author(publisher, load_signing_key(sign_key, "--sign-key") if sign_key is not None else None)
    check_ready(Path(checkpoint), ready)
    given = look_at(checkpoint, layout=layout_given(layout, functions), skip=skip)
    options = PushOptions(
        base=look_at_base(base, layout_given(base_layout, functions), skip),
        baseline=Path(baseline) if baseline is not None else None,
        baseline_link=baseline_link,
        encodings=chosen_encodings(encodings),
        encoding=encoding,
        no_delta=no_delta,
        anchor_every=anchor_every,
        prepare=prepare,
        trust=trust_in(trusted_keys, "--trusted-key"),
        wish=wish,
    )
    if given.is_sharded:
        options.check_sharded()
    check_settled(given, settle_seconds, time.time())
    effort = Effort(threads(jobs), progress)
    source = Source(given, effort, is_linked=baseline_link)
    with open_store(
        remote, storage_options, is_single_writer=single_writer, limit_bytes_per_second=limit_bytes_per_second
    ) as store:
        if dry_run:
            return rehearse_push(store, source, options, effort)
        run = Pushing(store, source, options, author, effort)
        result = run.run()
        if wanted is not None and run.published is not None:
            applied = wait_for(store, run.published.version, wanted)
            result = replace(result, applied=applied)
        return result
