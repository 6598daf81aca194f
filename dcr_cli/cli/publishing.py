"""The commands of who publishes: push, commit, anchor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dcr_cli.cli.options import (
    Checkpoint,
    Device,
    Encoding,
    Function,
    Layout,
    LimitRate,
    Remote,
    SingleWriter,
    Skip,
    StorageOption,
    TrustedKey,
    bytes_per_second_of,
    command,
    path_of,
    storage_options_of,
    version_given,
)
from dcr_cli.cli.quantities import seconds_of
from dcr_cli.cli.ranks import rank_of
from dcr_cli.cli.session import Session
from dcr_cli.errors import UsageError

Timeout = Annotated[str, typer.Option("--timeout", metavar="DURATION", help="How long to wait: 30s, 15m, 2h.")]
SignKey = Annotated[str | None, typer.Option("--sign-key", metavar="FILE", help="Sign with this Ed25519 private key.")]


@command
def push(
    session: Session,
    checkpoint: Checkpoint,
    remote: Remote,
    layout: Layout = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="A checkpoint at the newest version; keep no baseline.")
    ] = None,
    base_layout: Annotated[
        str | None, typer.Option("--base-layout", metavar="FILE", help="As --layout, of the shards of --base.")
    ] = None,
    function: Function = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="DIR", help="Keep the baseline here. [default: beside CHECKPOINT]"),
    ] = None,
    baseline_link: Annotated[
        bool, typer.Option("--baseline-link", help="Let the baseline be hard links to CHECKPOINT, which never changes.")
    ] = False,
    encodings: Annotated[
        str | None,
        typer.Option(
            "--encodings",
            metavar="LIST",
            help="What all receivers decode: whole, and context, gap or both. First push. [default: context,gap,whole]",
        ),
    ] = None,
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How the changes of this version are written.")] = (
        "auto"
    ),
    no_delta: Annotated[
        bool, typer.Option("--no-delta", help="Publish the files as they are: nothing to start from is needed.")
    ] = False,
    anchor_every: Annotated[
        int | None, typer.Option("--anchor-every", metavar="K", help="Add the files as they are every K versions.")
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Send everything but the commit; dcr commit makes the version exist.")
    ] = False,
    wait_applied: Annotated[
        int | None, typer.Option("--wait-applied", metavar="K", help="Return when K receivers are at the version.")
    ] = None,
    timeout: Timeout = "15m",
    ready: Annotated[
        str | None, typer.Option("--ready", metavar="FILE", help="Only once this file is in CHECKPOINT.")
    ] = None,
    settle: Annotated[
        str | None, typer.Option("--settle", metavar="DURATION", help="Only if no file is younger: 30s, 5m.")
    ] = None,
    single_writer: SingleWriter = False,
    sign_key: SignKey = None,
    trusted_key: TrustedKey = None,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="Who publishes, for people.")] = "",
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="R/W", help="Publish part R, from 0, of W; auto: as torchrun or srun say."),
    ] = None,
    attempt: Annotated[
        str | None,
        typer.Option(
            "--attempt", metavar="TEXT", help="With --part, what all parts share. [default: from torchrun, srun]"
        ),
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="With --part, do not wait for the other parts, but in part 0.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be published; send nothing.")
    ] = False,
    device: Device = "auto",
    skip: Skip = None,
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Publish CHECKPOINT as the next version of REMOTE. Only what changed is sent; safe to stop and to run again."""
    from dcr_cli.push import push as run
    from dcr_cli.report import pushes

    if part is not None:
        alone = {
            "--baseline-link": baseline_link,
            "--encodings": encodings,
            "--no-delta": no_delta,
            "--anchor-every": anchor_every,
            "--wait-applied": wait_applied,
            "--dry-run": dry_run,
        }
        odd = [name for name, value in alone.items() if value not in (None, False)]
        if odd:
            raise UsageError("push", f"--part excludes {odd[0]}", hint="dcr push --help")
        return _push_part(
            session,
            path_of(checkpoint, "CHECKPOINT"),
            remote,
            rank_of(part, attempt, os.environ),
            is_launched=attempt is None,
            layout=path_of(layout, "--layout") if layout is not None else None,
            base=path_of(base, "--base") if base is not None else None,
            base_layout=path_of(base_layout, "--base-layout") if base_layout is not None else None,
            functions=function or (),
            baseline=path_of(baseline, "--baseline") if baseline is not None else None,
            encoding=encoding,
            prepare=prepare,
            wait=not no_wait,
            timeout_seconds=seconds_of(timeout, "--timeout"),
            ready=ready,
            settle_seconds=seconds_of(settle, "--settle") if settle is not None else 0.0,
            device=device,
            skip=skip or (),
            single_writer=single_writer,
            storage_options=storage_options_of(storage_option),
            sign_key=path_of(sign_key, "--sign-key") if sign_key is not None else None,
            trusted_keys=trusted_key or (),
            publisher=label,
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
        )
    if attempt is not None or no_wait:
        raise UsageError("push", "--attempt and --no-wait need --part", hint="dcr push --help")
    with session.progress() as progress:
        result = run(
            path_of(checkpoint, "CHECKPOINT"),
            remote,
            layout=path_of(layout, "--layout") if layout is not None else None,
            base=path_of(base, "--base") if base is not None else None,
            base_layout=path_of(base_layout, "--base-layout") if base_layout is not None else None,
            functions=function or (),
            baseline=path_of(baseline, "--baseline") if baseline is not None else None,
            baseline_link=baseline_link,
            encodings=encodings.split(",") if encodings is not None else None,
            encoding=encoding,
            no_delta=no_delta,
            anchor_every=anchor_every,
            prepare=prepare,
            wait_applied=wait_applied,
            timeout_seconds=seconds_of(timeout, "--timeout"),
            ready=ready,
            settle_seconds=seconds_of(settle, "--settle") if settle is not None else 0.0,
            skip=skip or (),
            single_writer=single_writer,
            storage_options=storage_options_of(storage_option),
            sign_key=path_of(sign_key, "--sign-key") if sign_key is not None else None,
            trusted_keys=trusted_key or (),
            publisher=label,
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
            jobs=session.jobs,
            device=device,
            dry_run=dry_run,
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    session.explain_work(result.account)
    return session.finish(result, lambda: pushes.push_lines(result), leave_out=("account",))


def _push_part(
    session: Session,
    checkpoint: Path,
    remote: str,
    place: tuple[int, int, str],
    *,
    is_launched: bool,
    **options: Any,
) -> int:
    from dcr_cli.push_part import Rank, push_part as run
    from dcr_cli.report import pushes

    with session.progress() as progress:
        result = run(checkpoint, remote, Rank(*place, is_launched), jobs=session.jobs, progress=progress, **options)
    session.note_idle(options["skip"], str(checkpoint))
    session.explain_work(result.account)
    return session.finish(result, lambda: pushes.part_lines(result), leave_out=("account",))


@command
def commit(
    session: Session,
    remote: Remote,
    version: Annotated[str | None, typer.Argument(metavar="[N]", help="The version. [default: the prepared one]")] = (
        None
    ),
    quorum: Annotated[
        int | None, typer.Option("--quorum", metavar="K", help="Wait until K receivers have staged it.")
    ] = None,
    timeout: Timeout = "15m",
    receivers: Annotated[
        list[str] | None,
        typer.Option(
            "--receivers", metavar="KEY", help="Count only receivers that sign with this key; may be repeated."
        ),
    ] = None,
    abort: Annotated[bool, typer.Option("--abort", help="Give the prepared version up.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would become of it; wait for nobody, change nothing.")
    ] = False,
    single_writer: SingleWriter = False,
    storage_option: StorageOption = None,
) -> int:
    """Make a version exist that push --prepare has prepared. With --quorum once so many receivers have staged it."""
    from dcr_cli.commit import commit as run
    from dcr_cli.report import pushes

    result = run(
        remote,
        version_given(version, "version"),
        quorum=quorum,
        timeout_seconds=seconds_of(timeout, "--timeout"),
        receivers=receivers or (),
        abort=abort,
        dry_run=dry_run,
        single_writer=single_writer,
        storage_options=storage_options_of(storage_option),
    )
    return session.finish(result, lambda: pushes.commit_lines(result, is_abort=abort))


@command
def anchor(
    session: Session,
    checkpoint: Checkpoint,
    remote: Remote,
    version: Annotated[
        str | None, typer.Option("--version", metavar="N", help="The version. [default: found by its state]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be added; send nothing.")] = False,
    sign_key: SignKey = None,
    skip: Skip = None,
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Add the files of a version of REMOTE as they are. CHECKPOINT is at that version; new receivers begin there."""
    from dcr_cli.anchor import anchor as run
    from dcr_cli.report import pushes

    with session.progress() as progress:
        result = run(
            path_of(checkpoint, "CHECKPOINT"),
            remote,
            version=version_given(version),
            skip=skip or (),
            storage_options=storage_options_of(storage_option),
            sign_key=path_of(sign_key, "--sign-key") if sign_key is not None else None,
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
            jobs=session.jobs,
            dry_run=dry_run,
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    return session.finish(result, lambda: pushes.anchor_lines(result))
