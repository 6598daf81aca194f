"""The commands: parse, call one function, report, exit code.

It alone reads arguments and the environment. Everything heavy is imported by the command that needs it, so that
`dcr --help` answers at once.
"""

from __future__ import annotations

import functools
import json as json_text
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dcr_cli import __version__, process
from dcr_cli.errors import NOT_SET, DcrError, UsageError
from dcr_cli.work import MOST_DEFAULT_JOBS, threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dcr_cli.report.people import Line
    from dcr_cli.report.progress import Progress

MOST_JOBS = 256
_MOST_SHOWN = 20

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, add_help_option=False)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every command has."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False
    jobs: int | None = None


@dataclass(slots=True)
class Session:
    """One run of one command: its options, its clock, and the only way to its output."""

    command: str | None
    options: Options
    started: float = field(default_factory=time.monotonic)
    text: str = ""  # What to print when there is no work: a help page, the version.
    left_by_stop: Callable[[], str] | None = None  # Says what a stop has left, once there is something to say.

    @property
    def jobs(self) -> int:
        return threads(self.options.jobs)

    def progress(self) -> Progress:
        from dcr_cli.report.progress import Progress

        return Progress(shown=not (self.options.no_progress or self.options.quiet))

    def finish(
        self,
        result: DataclassInstance,
        lines: Callable[[], Iterable[Line]],
        *,
        answer: bool = True,
        leave_out: tuple[str, ...] = (),
    ) -> int:
        """Report a result; `answer` says whether the command's question was answered with yes."""
        code = 0 if answer else 1
        if self.options.json:
            from dcr_cli.report import documents

            self._write_json(code, documents.of_result(result, leave_out=leave_out))
        elif not self.options.quiet:
            from dcr_cli.report import people

            process.write(sys.stdout, people.render(lines(), sys.stdout))
        return code

    def fail(self, failure: process.Failure) -> int:
        """Report what went wrong; an output that fails as well does not hide it."""
        if self.options.json:
            error = {
                "class": failure.error_class,
                "message": failure.message,
                "hint": failure.hint,
                "retryable": failure.retryable,
            }
            with suppress(OSError):  # The exit code and standard error still tell.
                self._write_json(failure.exit_code, {"error": error})
        if failure.is_bug or os.environ.get("DCR_DEBUG") == "1":
            process.complain(failure.traceback)
        if failure.exit_code != process.CLOSED_PIPE:
            process.complain(f"dcr: {failure.message}\n" + (f"hint: {failure.hint}\n" if failure.hint else ""))
        return failure.exit_code

    def _write_json(self, code: int, fields: dict[str, Any]) -> None:
        from dcr_cli.report import documents

        seconds = round(time.monotonic() - self.started, 3)
        head = {"command": self.command, "ok": code == 0, "exit_code": code, "seconds": seconds}
        process.write(sys.stdout, documents.to_text(head | fields))

    def note_idle(self, skip: Sequence[str] | None, *checkpoints: str) -> None:
        """Say on standard error which patterns of --skip have left nothing out, as a misspelt one does."""
        if skip and not self.options.quiet:
            from dcr_cli.checkpoint.folder import idle_patterns
            from dcr_cli.checkpoint.names import shown

            for pattern in idle_patterns([Path(checkpoint) for checkpoint in checkpoints], skip):
                process.complain(f"note: --skip {shown(pattern)} matches nothing\n")

    def explain_choices(self) -> None:
        """Say on standard error what -v asks for: which kernels are used and why, and how many threads."""
        if self.options.verbose:
            import dcr_kernels

            process.complain(f"kernels: {dcr_kernels.describe()}\njobs: {self.jobs}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises and never exits by itself.

    Without `arguments` it runs the command that this process was started with.
    """
    if arguments is None:
        process.ensure_utf8()
        process.collect_rarely()
    given = list(sys.argv[1:] if arguments is None else arguments)
    session = Session(_command_in(given), Options(json="--json" in _before_dashes(given)))
    try:
        process.prepare_streams()
        with process.signals_raised():
            return _run(given, session)
    except BaseException as error:
        return session.fail(process.explain(error, session.left_by_stop))


def _run(given: list[str], session: Session) -> int:
    try:
        # typer only parses: each command answers with the work still to do, so that no exception of the work
        # passes through it (it would end a closed pipe and an interrupt in ways of its own).
        work = typer.main.get_command(app).main(given, prog_name="dcr", standalone_mode=False, obj=session)
    except typer.TyperException as error:
        raise _usage_error(error, session.command, given) from error
    if callable(work):
        return int(work())
    process.write(sys.stdout, session.text)
    return int(work or 0)


def _usage_error(error: typer.TyperException, command: str | None, given: list[str]) -> DcrError:
    message = (
        re.sub(r" \(Possible options: .*\)$", "", error.format_message().strip())
        .rstrip(".")
        .replace("Value error, ", "")
    )
    message = message[:1].lower() + message[1:]
    words = _before_dashes(given)
    named = next((word for word in words if word in COMMANDS), None)
    if named is not None and words[0].startswith("-"):
        return UsageError("arguments", message, hint=f"options come after the command: dcr {named} ... {words[0]}")
    meant = _nearest(error, command)
    perhaps = f"perhaps {meant} is meant; " if meant is not None else ""
    if command in COMMANDS:
        return UsageError(command, message, hint=f"{perhaps}dcr {command} --help")
    return UsageError("arguments", message, hint=f"{perhaps}dcr --help lists the commands")


def _nearest(error: typer.TyperException, command: str | None) -> str | None:
    """The option of a command that is most like one that it has not, or the command that is most like none."""
    if command not in COMMANDS:
        found = get_close_matches(command or "", COMMANDS, 1)
    elif isinstance(option := getattr(error, "option_name", None), str) and option.startswith("--"):
        parameters = _commands()[command].params
        options = {name: name.replace("-", "") for parameter in parameters for name in parameter.opts}
        plain = get_close_matches(option.replace("-", ""), options.values(), 1, 0.5)
        found = [name for name, text in options.items() if text in plain]
    else:
        found = []
    return found[0] if found else None


def _commands() -> Mapping[str, Any]:
    return getattr(typer.main.get_command(app), "commands", {})


def _before_dashes(given: list[str]) -> list[str]:
    return given[: given.index("--")] if "--" in given else given


def _command_in(given: list[str]) -> str | None:
    return next((word for word in _before_dashes(given) if not word.startswith("-")), None)


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.obj.text = context.get_help() + "\n"
        raise typer.Exit


def _show_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        as_json = json_text.dumps(
            {"command": "version", "ok": True, "exit_code": 0, "seconds": 0, "version": __version__}
        )
        context.obj.text = f"{as_json if context.obj.options.json else f'dcr {__version__}'}\n"
        raise typer.Exit


# Our own --help, not typer's: an option that is already a bool is not converted, and conversion imports a library that
# takes longer than all of the help.
Help = Annotated[
    bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help, help="Show this help and exit.")
]
Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: which kernels are used and why.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress.")]
Jobs = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help=f"Threads to use. [default: the CPUs this process may use, at most {MOST_DEFAULT_JOBS}]",
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="PATTERN", help="Leave matching files out of the checkpoint; may be repeated."),
]
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder of *.safetensors shards.")]
Delta = Annotated[str, typer.Argument(metavar="DELTA", help="A folder that `dcr diff -o` wrote.")]
Encoding = Literal["auto", "context", "gap", "whole"]


def _common(
    *,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    jobs: Jobs = None,
    version: Version = False,
    show_help: Help = False,
) -> Options:
    if quiet and verbose:
        raise UsageError("arguments", "--quiet and --verbose contradict each other", hint="leave one of them out")
    return Options(json, quiet, verbose, no_progress, _number_of_jobs(jobs) if jobs is not None else None)


def _number_of_jobs(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= len(str(MOST_JOBS)) and 1 <= int(text) <= MOST_JOBS:
        return int(text)
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    facts = f"a number from 1 to {MOST_JOBS} expected, found {shown!r}"
    raise UsageError("--jobs", facts, hint="leave it out to use the CPUs that this process may use")


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Register `function` as a command of its name that also takes the common options.

    Its first parameter is the session; the others are the command's own arguments.
    """
    own = list(signature(function, eval_str=True).parameters.values())[1:]
    shared = list(signature(_common, eval_str=True).parameters.values())
    first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    named = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in own]

    def parsed(*, context: typer.Context, **values: Any) -> Callable[[], int]:
        session: Session = context.obj
        session.options = _common(**{option.name: values.pop(option.name) for option in shared})
        session.explain_choices()
        return functools.partial(function, session, **values)

    parsed.__signature__ = Signature([first, *named, *shared])  # type: ignore[attr-defined]
    parsed.__annotations__ = {option.name: option.annotation for option in (first, *named, *shared)}
    parsed.__doc__ = function.__doc__
    app.command(function.__name__, add_help_option=False)(parsed)
    return function


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Version = False, show_help: Help = False) -> None:
    """Bit-exact weight deltas for RL refit: find what changed between two checkpoints, send only that, apply it."""
    if context.invoked_subcommand is None:
        raise UsageError("arguments", "a command is missing", hint="dcr --help")


def _path(text: str, name: str) -> Path:
    if not text:
        raise UsageError(name, "an empty path", hint=NOT_SET)
    return Path(text)


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
) -> int:
    """Find the changes from BASE to TARGET, bit for bit, and with -o write them as a delta."""
    from dcr_cli.diff import diff as run
    from dcr_cli.report import people

    where = _path(output, "--output") if output is not None else None
    with session.progress() as progress:
        result = run(
            _path(base, "BASE"),
            _path(target, "TARGET"),
            where,
            encoding=encoding,
            jobs=session.jobs,
            dry_run=dry_run,
            skip=skip or (),
            progress=progress,
        )
    session.note_idle(skip, base, target)
    return session.finish(
        result,
        lambda: people.diff_lines(result, stat=stat),
        answer=result.same or not exit_code,
        leave_out=() if stat else ("rows",),
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
    skip: Skip = None,
) -> int:
    """Bring CHECKPOINT from a delta's base to its target, byte for byte; safe to stop and to run again.

    Several deltas, each starting where the one before ends, are applied in one pass.
    """
    chosen = [name for name, given in (("--to", to is not None), ("--in-place", in_place), ("--aside", aside)) if given]
    if len(chosen) > 1:
        raise UsageError("apply", f"{' and '.join(chosen)} exclude each other", hint="dcr apply --help")
    if keep_previous and not aside:
        raise UsageError("apply", "--keep-previous needs --aside", hint="dcr apply --help")
    from dcr_cli.apply import apply as run, left_by_stop, stamp_of
    from dcr_cli.report import people

    session.left_by_stop = functools.partial(left_by_stop, checkpoint, stamp_of(checkpoint))
    with session.progress() as progress:
        result = run(
            [_path(folder, "DELTA") for folder in delta],
            _path(checkpoint, "CHECKPOINT"),
            to=_path(to, "--to") if to is not None else None,
            mode="in-place" if in_place else "aside" if aside else "replace",
            jobs=session.jobs,
            dry_run=dry_run,
            keep_previous=keep_previous,
            skip=skip or (),
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    return session.finish(result, lambda: people.apply_lines(result))


@command
def verify(
    session: Session,
    checkpoint: Checkpoint,
    against: Annotated[
        str | None, typer.Option("--against", metavar="CHECKPOINT", help="Compare with this checkpoint's bits.")
    ] = None,
    delta: Annotated[
        str | None, typer.Option("--delta", metavar="DELTA", help="Compare with the target of this delta.")
    ] = None,
    skip: Skip = None,
) -> int:
    """Read every byte of CHECKPOINT and say whether it holds what it should; 1 if not."""
    if against is not None and delta is not None:
        raise UsageError("verify", "--against and --delta exclude each other", hint="leave one of them out")
    from dcr_cli.report import people
    from dcr_cli.verify import verify as run

    with session.progress() as progress:
        result = run(
            _path(checkpoint, "CHECKPOINT"),
            against=_path(against, "--against") if against is not None else None,
            delta=_path(delta, "--delta") if delta is not None else None,
            jobs=session.jobs,
            skip=skip or (),
            progress=progress,
        )
    session.note_idle(skip, checkpoint, *([against] if against is not None else []))
    return session.finish(result, lambda: people.verify_lines(result), answer=result.matches)


@command
def show(session: Session, delta: Delta) -> int:
    """Check a delta and say what it holds: its states, sizes, encodings, and the tensors that changed most."""
    from dcr_cli.report import people
    from dcr_cli.show import show as run

    with session.progress() as progress:
        result = run(_path(delta, "DELTA"), jobs=session.jobs, progress=progress)
    return session.finish(result, lambda: people.show_lines(result, verbose=session.options.verbose))


@command
def inspect(
    session: Session,
    checkpoint: Checkpoint,
    digest: Annotated[bool, typer.Option("--digest", help="Read every byte and compute both digests.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    skip: Skip = None,
) -> int:
    """Say what a checkpoint holds: shards, tensors, dtypes, sidecars, and with --digest its state."""
    from dcr_cli.inspect import inspect as run
    from dcr_cli.report import people

    with session.progress() as progress:
        result = run(
            _path(checkpoint, "CHECKPOINT"),
            digest=digest,
            tensors=tensors,
            jobs=session.jobs,
            skip=skip or (),
            progress=progress,
        )
    session.note_idle(skip, checkpoint)
    return session.finish(result, lambda: people.inspect_lines(result))


COMMANDS = ("diff", "apply", "verify", "show", "inspect")
