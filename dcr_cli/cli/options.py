"""The options that commands share, what their values have to be, and the register of commands.

The arguments of one command alone stand in its signature.
"""

from __future__ import annotations

import functools
import json as json_text
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dcr_cli import __version__
from dcr_cli.arguments import version_of
from dcr_cli.checkpoint.names import shown
from dcr_cli.cli.quantities import size_of
from dcr_cli.cli.session import Options, Session
from dcr_cli.errors import NOT_SET, UsageError
from dcr_cli.work import MOST_DEFAULT_JOBS

MOST_JOBS = 256
_MOST_SHOWN = 20


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
Function = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="MODULE:FUNCTION",
        help="A function that the layout may call, such as recipes.fp8:quantize; may be repeated.",
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help="A setting of the remote's store; may be repeated."),
]
Fallback = Annotated[
    list[str] | None,
    typer.Option(
        "--fallback", metavar="REMOTE", help="Asked in this order where REMOTE does not answer; may be repeated."
    ),
]
LimitRate = Annotated[
    str | None,
    typer.Option("--limit-rate", metavar="SIZE", help="Send or fetch at most this much a second: 500k, 20M, 1.5GiB."),
]
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder of *.safetensors shards.")]
Delta = Annotated[str, typer.Argument(metavar="DELTA", help="A folder that `dcr diff -o` wrote.")]
Remote = Annotated[str, typer.Argument(metavar="REMOTE", help="A folder, or an address such as s3://bucket/path.")]
SingleWriter = Annotated[
    bool, typer.Option("--single-writer", help="Nothing else ever writes there; no exclusive create is needed.")
]
TrustedKey = Annotated[
    list[str] | None,
    typer.Option("--trusted-key", metavar="KEY", help="A public key, or a file with it; may be repeated."),
]
Layout = Annotated[
    str | None,
    typer.Option("--layout", metavar="FILE", help="The checkpoint is shards of ranks; FILE says what of it is what."),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Where the work is done; the bytes are the same."),
]
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
    found = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    facts = f"a number from 1 to {MOST_JOBS} expected, found {found!r}"
    raise UsageError("--jobs", facts, hint="leave it out to use the CPUs that this process may use")


# In the order in which `dcr --help` lists them; those of a group by both of their words.
commands: dict[str, Callable[..., int]] = {}
# What the commands of a group have in common, by its name.
groups: dict[str, str] = {}


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Register `function` as a command of its name.

    Its first parameter is the session; the others are the command's own arguments, and the common options come on top.
    """
    commands[function.__name__] = function
    return function


def command_of(group: str, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as the command `name` of a group."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        commands[f"{group} {name}"] = function
        return function

    return register


def with_common_options(function: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """What is parsed as `function` and returns the work that is left to do."""
    own = list(signature(function, eval_str=True).parameters.values())[1:]
    taken = {option.name for option in own}
    # A command that has to do with versions of its own has no --version that says dcr's.
    common = [option for option in signature(_common, eval_str=True).parameters.values() if option.name not in taken]
    first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    named = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in own]

    def parsed(*, context: typer.Context, **values: Any) -> Callable[[], int]:
        session: Session = context.obj
        session.options = _common(**{option.name: values.pop(option.name) for option in common})
        session.explain_choices()
        return functools.partial(function, session, **values)

    parsed.__signature__ = Signature([first, *named, *common])  # type: ignore[attr-defined]
    parsed.__annotations__ = {option.name: option.annotation for option in (first, *named, *common)}
    return parsed


def path_of(text: str, name: str) -> Path:
    """The path that the argument `name` says; it is not looked at."""
    if not text:
        raise UsageError(name, "an empty path", hint=NOT_SET)
    if "://" in text or "@" in text:
        from dcr_cli.store.location import is_login, is_url

        # It may hold a password, and would be repeated with whatever goes wrong with such a path.
        if is_url(text) or is_login(text):
            raise UsageError(name, "a path is expected, not an address", hint="dcr COMMAND --help has their order")
    if text.startswith("-----BEGIN "):
        raise UsageError(name, "a path is expected, not the text of a key", hint="give the file that the key is in")
    return Path(text)


def storage_options_of(given: Sequence[str] | None) -> dict[str, str]:
    """What all of --storage-option say together. No error repeats more than a key: the rest may be a secret."""
    options: dict[str, str] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError("--storage-option", "KEY=VALUE expected", hint="such as --storage-option region=eu-west-1")
        if key in options:
            raise UsageError("--storage-option", f"{shown(key)} is given twice", hint="leave one of them out")
        options[key] = value
    return options


def version_given(text: str | None, name: str = "--version") -> int | None:
    """The version that the argument `name` says; None without it."""
    return version_of(text, name) if text is not None else None


def bytes_per_second_of(limit_rate: str | None) -> int | None:
    """What --limit-rate says; None without it."""
    return size_of(limit_rate, "--limit-rate") if limit_rate is not None else None
