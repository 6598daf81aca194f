"""The commands of who looks after a remote: log, status, prune."""

from __future__ import annotations

from typing import Annotated

import typer

from dcr_cli.cli.options import Remote, SingleWriter, StorageOption, TrustedKey, command, storage_options_of
from dcr_cli.cli.quantities import seconds_of
from dcr_cli.cli.session import Session
from dcr_cli.errors import UsageError


@command
def log(
    session: Session,
    remote: Remote,
    lines: Annotated[
        int | None, typer.Option("--lines", "-N", metavar="COUNT", help="So many of the newest. [default: 20]")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="All versions.")] = False,
    trusted_key: TrustedKey = None,
    storage_option: StorageOption = None,
) -> int:
    """List the versions of REMOTE, the newest first. Each is proven to follow the one before."""
    if show_all and lines is not None:
        raise UsageError("log", "--all and --lines exclude each other", hint="leave one of them out")
    from dcr_cli.log import LINES, log as run
    from dcr_cli.report import remotes

    result = run(
        remote,
        lines=None if show_all else LINES if lines is None else lines,
        trusted_keys=trusted_key or (),
        storage_options=storage_options_of(storage_option),
    )
    return session.finish(result, lambda: remotes.log_lines(result))


@command
def status(
    session: Session,
    remote: Remote,
    trusted_key: TrustedKey = None,
    storage_option: StorageOption = None,
) -> int:
    """Say how REMOTE is, and how far its receivers are. Its newest version, what is being made, and what lies there."""
    from dcr_cli.report import remotes
    from dcr_cli.status import status as run

    result = run(remote, trusted_keys=trusted_key or (), storage_options=storage_options_of(storage_option))
    return session.finish(result, lambda: remotes.status_lines(result))


@command
def prune(
    session: Session,
    remote: Remote,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", help="Keep the newest N versions. [default: 64]")
    ] = None,
    keep_within: Annotated[
        str, typer.Option("--keep-within", metavar="DURATION", help="Keep what is younger: 24h, 7d.")
    ] = "24h",
    lease: Annotated[
        str, typer.Option("--lease", metavar="DURATION", help="Keep what receivers need that were seen within it: 7d.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would go; remove nothing.")] = False,
    single_writer: SingleWriter = False,
    storage_option: StorageOption = None,
) -> int:
    """Remove from REMOTE what nobody needs any more. Safe beside pushes and pulls, and to stop and run again."""
    from dcr_cli.prune import KEEP, prune as run
    from dcr_cli.report import remotes

    with session.progress() as progress:
        result = run(
            remote,
            keep=KEEP if keep is None else keep,
            keep_within=seconds_of(keep_within, "--keep-within", needs_unit=True),
            lease=seconds_of(lease, "--lease", needs_unit=True),
            dry_run=dry_run,
            single_writer=single_writer,
            storage_options=storage_options_of(storage_option),
            progress=progress,
        )
    return session.finish(result, lambda: remotes.prune_lines(result, verbose=session.options.verbose))
