"""The commands of who receives: pull."""

from __future__ import annotations

import functools
import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_cli import process
from dcr_cli.cli.options import (
    Device,
    Fallback,
    Layout,
    LimitRate,
    Remote,
    StorageOption,
    TrustedKey,
    bytes_per_second_of,
    command,
    path_of,
    storage_options_of,
    version_given,
)
from dcr_cli.cli.quantities import seconds_of
from dcr_cli.cli.session import Session
from dcr_cli.errors import DcrError, UsageError

if TYPE_CHECKING:
    from dcr_cli.fetch.pull_result import PullResult

Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="KIND=URL", help="Have vllm=URL or sglang=URL load it again; more than one may."),
]
EngineTimeout = Annotated[
    str, typer.Option("--engine-timeout", metavar="DURATION", help="How long an engine may take to load: 30s, 15m.")
]


@command
def pull(
    session: Session,
    remote: Remote,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint to bring there, or a new one.")
    ],
    version: Annotated[
        str | None, typer.Option("--version", metavar="N", help="To this version, also back to it. [default: newest]")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Patch the shards where they lie.")] = False,
    aside: Annotated[
        bool, typer.Option("--aside", help="CHECKPOINT is a link: build beside it, then flip it.")
    ] = False,
    keep_previous: Annotated[
        bool, typer.Option("--keep-previous", help="With --aside: keep the folder the link pointed at.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Whatever CHECKPOINT holds: fetch what differs from an anchor.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on, version after version, until stopped.")] = False,
    trusted_key: TrustedKey = None,
    receiver: Annotated[
        str | None, typer.Option("--receiver", metavar="NAME", help="Acknowledge versions by this name.")
    ] = None,
    receiver_key: Annotated[
        str | None, typer.Option("--receiver-key", metavar="FILE", help="Sign acknowledgements with this private key.")
    ] = None,
    hook: Annotated[
        str | None, typer.Option("--exec", metavar="CMD", help="Run this shell command when the bytes are in place.")
    ] = None,
    hook_timeout: Annotated[
        str, typer.Option("--exec-timeout", metavar="DURATION", help="How long it may take: 30s, 15m.")
    ] = "15m",
    engine: Engines = None,
    engine_timeout: EngineTimeout = "15m",
    publish_changes: Annotated[
        str | None,
        typer.Option("--publish-changes", metavar="DIR", help="Leave there what each delta changes, decoded."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say the way and its bytes; change nothing.")
    ] = False,
    device: Device = "auto",
    layout: Layout = None,
    fallback: Fallback = None,
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Bring CHECKPOINT to the newest version of REMOTE. Byte for byte; safe to stop and to run again."""
    if in_place and aside:
        raise UsageError("pull", "--in-place and --aside exclude each other", hint="dcr pull --help")
    if keep_previous and not aside:
        raise UsageError("pull", "--keep-previous needs --aside", hint="dcr pull --help")
    for name, given in (("--version", version is not None), ("--repair", repair), ("--dry-run", dry_run)):
        if follow and given:
            raise UsageError("pull", f"--follow and {name} exclude each other", hint="dcr pull --help")
    number = version_given(version)
    session.check_device(device)
    from dcr_cli.apply import left_by_stop, stamp_of

    session.left_by_stop = functools.partial(left_by_stop, checkpoint, stamp_of(checkpoint))
    options: dict[str, Any] = {
        "mode": "in-place" if in_place else "aside" if aside else "replace",
        "keep_previous": keep_previous,
        "storage_options": storage_options_of(storage_option),
        "fallbacks": tuple(fallback or ()),
        "trusted_keys": trusted_key or (),
        "receiver": receiver,
        "receiver_key": path_of(receiver_key, "--receiver-key") if receiver_key is not None else None,
        "hook": hook,
        "hook_seconds": seconds_of(hook_timeout, "--exec-timeout"),
        "engines": engine or (),
        "engine_seconds": seconds_of(engine_timeout, "--engine-timeout"),
        "engine_token": os.environ.get("DCR_ENGINE_TOKEN") or None,
        "layout": path_of(layout, "--layout") if layout is not None else None,
        "publish_changes": path_of(publish_changes, "--publish-changes") if publish_changes is not None else None,
        "limit_bytes_per_second": bytes_per_second_of(limit_rate),
        "jobs": session.jobs,
    }
    place = path_of(checkpoint, "CHECKPOINT")
    if follow:
        return _follow(session, remote, str(place), options)
    from dcr_cli.pull import pull as run
    from dcr_cli.report import pulls

    with session.progress() as progress:
        result = run(remote, place, version=number, repair=repair, dry_run=dry_run, progress=progress, **options)
    code = session.finish(result, lambda: pulls.pull_lines(result))
    _complain_of_damage(session, result)
    if result.staging_error is not None:
        # The checkpoint is at its version all the same, and whoever goes on after this command may.
        error = result.staging_error
        session.complain(f"{error}; what is prepared was not staged", error.hint)
    return code


@command
def reload(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The folder that the engines load.")],
    engine: Engines = None,
    engine_timeout: EngineTimeout = "15m",
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="TEXT", help="What the engines call the weights. [default: the version]"),
    ] = None,
) -> int:
    """Have engines pause, load CHECKPOINT again, and go on. One after the other."""
    from dcr_cli.reload import reload as run
    from dcr_cli.report import pulls

    result = run(
        path_of(checkpoint, "CHECKPOINT"),
        engine or (),
        label=label,
        engine_seconds=seconds_of(engine_timeout, "--engine-timeout"),
        engine_token=os.environ.get("DCR_ENGINE_TOKEN") or None,
    )
    return session.finish(result, lambda: pulls.reload_lines(result))


def _follow(session: Session, remote: str, checkpoint: str, options: dict[str, Any]) -> int:
    """Report each arrival, with --json as a document of its own on a line of its own, until something ends it."""
    from dcr_cli.follow import follow
    from dcr_cli.report import pulls

    def tell(error: DcrError) -> None:
        process.complain(f"dcr: {error}; going on\n")

    code = 0
    for arrival in follow(remote, checkpoint, tell=tell, **options):
        code = session.finish(arrival, functools.partial(pulls.arrival_lines, arrival))
        _complain_of_damage(session, arrival.result)
    return code


def _complain_of_damage(session: Session, result: PullResult) -> None:
    """Say what of the remote is damaged, though the receiver could do without it: others may not be able to."""
    for damaged in result.damaged:
        hint = f"dcr verify --deep --remote {shlex.quote(result.remote)} tells what else is damaged"
        session.complain(f"{damaged}; another way {'leads' if result.dry_run else 'led'} around it", hint)
