"""The commands that work on local folders: diff, apply, verify, show, inspect."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from dcr_cli.cli.options import (
    Checkpoint,
    Device,
    Encoding,
    Function,
    Layout,
    LimitRate,
    Skip,
    StorageOption,
    TrustedKey,
    bytes_per_second_of,
    command,
    path_of,
    storage_options_of,
    version_given,
)
from dcr_cli.cli.session import Session
from dcr_cli.errors import UsageError


@command
def diff(
    session: Session,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint a delta starts from.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The checkpoint it ends at.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DELTA", help="Write the delta to this new folder.")
    ] = None,
    stat: Annotated[bool, typer.Option("--stat", help="List the tensors that changed.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the two differ.")] = False,
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How changes are written.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be written; write nothing.")] = False,
    skip: Skip = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="FILE", help="TARGET is shards of ranks; FILE says what is what.")
    ] = None,
    base_layout: Annotated[str | None, typer.Option("--base-layout", metavar="FILE", help="The same for BASE.")] = None,
    function: Function = None,
    device: Device = "auto",
) -> int:
    """Find what changed from BASE to TARGET, bit for bit. With -o it is written as a delta."""
    from dcr_cli.diff import diff as run
    from dcr_cli.report import diffs

    where = path_of(output, "--output") if output is not None else None
    with session.progress() as progress:
        result = run(
            path_of(base, "BASE"),
            path_of(target, "TARGET"),
            where,
            encoding=encoding,
            jobs=session.jobs,
            dry_run=dry_run,
            skip=skip or (),
            layout=path_of(layout, "--layout") if layout is not None else None,
            base_layout=path_of(base_layout, "--base-layout") if base_layout is not None else None,
            functions=function or (),
            device=device,
            progress=progress,
        )
    session.note_idle(skip, base, target)
    session.explain_work(result.account)
    return session.finish(
        result,
        lambda: diffs.diff_lines(result, stat=stat),
        answer=result.same or not exit_code,
        leave_out=("account",) if stat else ("account", "rows"),
    )


@command
def apply(
    session: Session,
    delta: Annotated[
        list[str], typer.Argument(metavar="DELTA", help="Folders that `dcr diff -o` wrote, in their order.")
    ],
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint to bring to the target.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="OUT", help="Leave CHECKPOINT alone and build the target here.")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Patch the shards where they lie.")] = False,
    aside: Annotated[
        bool, typer.Option("--aside", help="CHECKPOINT is a link: build beside it, then flip it.")
    ] = False,
    keep_previous: Annotated[
        bool, typer.Option("--keep-previous", help="With --aside: keep the folder the link pointed at.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be done; change nothing.")] = False,
    device: Device = "auto",
    skip: Skip = None,
    layout: Layout = None,
) -> int:
    """Bring CHECKPOINT from a delta's base to its target. Byte for byte; safe to stop and to run again.

    Several deltas, each starting where the one before ends, are applied in one pass.
    """
    chosen = [name for name, given in (("--to", to is not None), ("--in-place", in_place), ("--aside", aside)) if given]
    if len(chosen) > 1:
        raise UsageError("apply", f"{' and '.join(chosen)} exclude each other", hint="dcr apply --help")
    if keep_previous and not aside:
        raise UsageError("apply", "--keep-previous needs --aside", hint="dcr apply --help")
    session.check_device(device)
    from dcr_cli.apply import apply as run, left_by_stop, stamp_of
    from dcr_cli.report import people

    session.left_by_stop = functools.partial(left_by_stop, checkpoint, stamp_of(checkpoint))
    with session.progress() as progress:
        result = run(
            [path_of(folder, "DELTA") for folder in delta],
            path_of(checkpoint, "CHECKPOINT"),
            to=path_of(to, "--to") if to is not None else None,
            mode="in-place" if in_place else "aside" if aside else "replace",
            jobs=session.jobs,
            dry_run=dry_run,
            keep_previous=keep_previous,
            skip=skip or (),
            layout=path_of(layout, "--layout") if layout is not None else None,
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    return session.finish(result, lambda: people.apply_lines(result))


@command
def verify(
    session: Session,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="A folder of *.safetensors shards.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="CHECKPOINT", help="Compare with this checkpoint's bits.")
    ] = None,
    delta: Annotated[
        str | None, typer.Option("--delta", metavar="DELTA", help="Compare with the target of this delta.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="REMOTE", help="Compare with a version of it; alone: check the remote."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="N", help="The version. [default: the one pulled, or the newest]"),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Fetch and check every byte of the remote.")] = False,
    skip: Skip = None,
    layout: Layout = None,
    against_layout: Annotated[
        str | None, typer.Option("--against-layout", metavar="FILE", help="The same for the CHECKPOINT of --against.")
    ] = None,
    function: Function = None,
    trusted_key: TrustedKey = None,
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Say whether CHECKPOINT, or a remote, is what it should be. Reads every byte; 1 if not, of a remote 4."""
    pairs = (("--against", against), ("--delta", delta), ("--remote", remote))
    given = [name for name, each in pairs if each is not None]
    if len(given) > 1:
        raise UsageError("verify", f"{' and '.join(given)} exclude each other", hint="leave one of them out")
    if against_layout is not None and against is None:
        raise UsageError("verify", "--against-layout needs --against", hint="dcr verify --help")
    if remote is None and (version is not None or deep or trusted_key):
        raise UsageError("verify", "--version, --deep and --trusted-key need --remote", hint="dcr verify --help")
    if checkpoint is None:
        if remote is None or version is not None or skip:
            raise UsageError("verify", "missing argument 'CHECKPOINT'", hint="only a remote is checked without one")
        return _verify_remote(session, remote, deep, (trusted_key, storage_option, limit_rate))
    if deep:
        facts = "--deep checks a remote, not a checkpoint"
        raise UsageError("verify", facts, hint="dcr verify --remote REMOTE --deep")
    from dcr_cli.report import people
    from dcr_cli.verify import verify as run

    with session.progress() as progress:
        result = run(
            path_of(checkpoint, "CHECKPOINT"),
            against=path_of(against, "--against") if against is not None else None,
            delta=path_of(delta, "--delta") if delta is not None else None,
            remote=remote,
            version=version_given(version),
            trusted_keys=trusted_key or (),
            storage_options=storage_options_of(storage_option),
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
            jobs=session.jobs,
            skip=skip or (),
            layout=path_of(layout, "--layout") if layout is not None else None,
            against_layout=path_of(against_layout, "--against-layout") if against_layout is not None else None,
            functions=function or (),
            progress=progress,
        )
    session.note_idle(skip, checkpoint, *([against] if against is not None else []))
    return session.finish(result, lambda: people.verify_lines(result), answer=result.matches)


def _verify_remote(
    session: Session, remote: str, deep: bool, how: tuple[list[str] | None, list[str] | None, str | None]
) -> int:
    from dcr_cli.report import remotes
    from dcr_cli.verify_remote import verify_remote as run

    trusted_key, storage_option, limit_rate = how
    with session.progress() as progress:
        result = run(
            remote,
            deep=deep,
            trusted_keys=trusted_key or (),
            storage_options=storage_options_of(storage_option),
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
            jobs=session.jobs,
            progress=progress,
        )
    return session.finish(result, lambda: remotes.verify_lines(result), answer=result.matches, no=4)


@command
def show(
    session: Session,
    delta: Annotated[
        str, typer.Argument(metavar="DELTA", help="A folder that `dcr diff -o` wrote, or REMOTE@N: its version N.")
    ],
    deep: Annotated[
        bool, typer.Option("--deep", help="Fetch and check all of a remote's version; of a folder that is always done.")
    ] = False,
    trusted_key: TrustedKey = None,
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Check a delta and say what it holds. Its states, sizes, encodings, and the tensors that changed most."""
    from dcr_cli.report import people, remotes
    from dcr_cli.show import show as run
    from dcr_cli.show_result import ShowResult
    from dcr_cli.store.location import is_url

    if not is_url(delta):
        path_of(delta, "DELTA")
    with session.progress() as progress:
        result = run(
            delta,
            deep=deep,
            trusted_keys=trusted_key or (),
            storage_options=storage_options_of(storage_option),
            limit_bytes_per_second=bytes_per_second_of(limit_rate),
            jobs=session.jobs,
            progress=progress,
        )
    if not isinstance(result, ShowResult):
        return session.finish(result, lambda: remotes.show_anchor_lines(result))
    return session.finish(result, lambda: people.show_lines(result, verbose=session.options.verbose))


@command
def inspect(
    session: Session,
    checkpoint: Checkpoint,
    digest: Annotated[bool, typer.Option("--digest", help="Read every byte and compute both digests.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    skip: Skip = None,
    layout: Layout = None,
    function: Function = None,
) -> int:
    """Say what a checkpoint holds. Shards, tensors, dtypes, sidecars, and with --digest its state."""
    from dcr_cli.inspect import inspect as run
    from dcr_cli.report import people

    with session.progress() as progress:
        result = run(
            path_of(checkpoint, "CHECKPOINT"),
            digest=digest,
            tensors=tensors,
            jobs=session.jobs,
            skip=skip or (),
            layout=path_of(layout, "--layout") if layout is not None else None,
            functions=function or (),
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    return session.finish(result, lambda: people.inspect_lines(result))
