"""From arguments to the work of one command, or to a UsageError that says what is meant.

typer only parses: what a command does is not run here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer

from dcr_cli.cli.options import Help, Version, commands, groups, with_common_options
from dcr_cli.cli.session import Session
from dcr_cli.errors import DcrError, UsageError

# An address, or a user and a password, and all of a message that follows: what is secret in it ends nowhere for sure.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://).*|[^\s/'(]+:\S*@.*", re.DOTALL)


def parse(given: list[str], session: Session) -> Callable[[], int] | None:
    """Return the work of the command that is asked for; None if there is only `session.text` to print."""
    try:
        # Each command answers with the work still to do, so that no exception of the work passes through typer (it
        # would end a closed pipe and an interrupt in ways of its own).
        work = _parser(given).main(given, prog_name="dcr", standalone_mode=False, obj=session)
    except typer.TyperException as error:
        refused = error
    else:
        return work if callable(work) else None
    # Outside the handler: typer's own error repeats what was given, and that may be a secret.
    raise _usage_error(refused, session.command, given)


def before_dashes(given: list[str]) -> list[str]:
    """The arguments that may be options."""
    return given[: given.index("--")] if "--" in given else given


def command_in(given: list[str]) -> str | None:
    """What stands where a command is expected, of a group both words; None for an address, which may hold a
    password."""
    words = [word for word in before_dashes(given) if not word.startswith("-")]
    if not words or _ADDRESS.match(words[0]):
        return None
    both = " ".join(words[:2])
    return both if both in commands else words[0]


def _parser(given: list[str]) -> Any:
    """What parses `given`: it knows the name and help of every command, but the options only of those named there."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True, add_help_option=False)(_root)
    inner: dict[str, typer.Typer] = {}
    for name, function in commands.items():
        words = name.split()
        parsed = with_common_options(function) if set(words) <= set(given) else _not_asked_for
        home = app
        if len(words) > 1:
            home = inner.get(words[0]) or _group(words[0], app, inner)
        home.command(words[-1], help=function.__doc__, add_help_option=False)(parsed)
    return typer.main.get_command(app)


def _group(name: str, app: typer.Typer, inner: dict[str, typer.Typer]) -> typer.Typer:
    """Begin a group of commands within `app`."""
    group = inner[name] = typer.Typer(add_completion=False, rich_markup_mode=None)

    def ask(context: typer.Context, show_help: Help = False) -> None:
        if context.invoked_subcommand is None:
            raise UsageError(name, "a command is missing", hint=f"dcr {name} --help")

    group.callback(invoke_without_command=True, add_help_option=False)(ask)
    app.add_typer(group, name=name, help=groups[name])
    return group


def _usage_error(error: typer.TyperException, command: str | None, given: list[str]) -> DcrError:
    # What typer guesses itself, the hint says.
    message = (
        re.sub(r" \(Possible options: .*\)$|\. Did you mean [^?]*\?$", "", error.format_message().strip())
        .rstrip(".")
        .replace("Value error, ", "")
    )
    message = _ADDRESS.sub(r"\1...", message[:1].lower() + message[1:])
    words = before_dashes(given)
    early = _early_option(words)
    if early is not None:
        named, option = early
        return UsageError("arguments", message, hint=f"options come after the command: dcr {named} ... {option}")
    meant = _nearest_option(error, command) if command in commands else _nearest_command(words)
    perhaps = f"perhaps {meant} is meant; " if meant is not None else ""
    if command in commands:
        return UsageError(command, message, hint=f"{perhaps}dcr {command} --help")
    if command in groups:
        return UsageError(command, message, hint=f"{perhaps}dcr {command} --help lists its commands")
    return UsageError("arguments", message, hint=f"{perhaps}dcr --help lists the commands")


def _early_option(words: list[str]) -> tuple[str, str] | None:
    """The command that is named although an option stands before it, or between its words, and that option."""
    at = next((at for at, word in enumerate(words) if word.startswith("-")), None)
    if at is None or not (at == 0 or (at == 1 and words[0] in groups)):
        return None
    named = _command_among([*words[:at], *words[at + 1 :]])
    # What is behind the sign may be a secret.
    option, sign, _ = words[at].partition("=")
    return (named, option + sign) if named is not None else None


def _command_among(words: list[str]) -> str | None:
    for at, word in enumerate(words):
        if word in commands:
            return word
        if word in groups:
            return next((f"{word} {later}" for later in words[at + 1 :] if f"{word} {later}" in commands), None)
    return None


def _nearest_command(words: list[str]) -> str | None:
    """The command, or the group of some, that is most like what stands where one is expected."""
    from difflib import get_close_matches

    plain = [word for word in words if not word.startswith("-")]
    if plain and plain[0] in groups:
        inner = [name.split()[1] for name in commands if name.startswith(f"{plain[0]} ")]
        found = [f"{plain[0]} {name}" for name in get_close_matches("".join(plain[1:2]), inner, 1)]
    else:
        found = get_close_matches("".join(plain[:1]), dict.fromkeys(name.split()[0] for name in commands), 1)
    return found[0] if found else None


def _nearest_option(error: typer.TyperException, command: str) -> str | None:
    """The option of a command that is most like one that it has not."""
    from difflib import get_close_matches

    option = getattr(error, "option_name", None)
    if not isinstance(option, str) or not option.startswith("--"):
        return None
    parser = _parser(command.split())
    for word in command.split():
        parser = parser.commands[word]
    options = {name: name.replace("-", "") for parameter in parser.params for name in parameter.opts}
    plain = get_close_matches(option.replace("-", ""), options.values(), 1, 0.5)
    return next((name for name, text in options.items() if text in plain), None)


def _root(context: typer.Context, version: Version = False, show_help: Help = False) -> None:
    """Bit-exact weight deltas for RL refit: find what changed between two checkpoints, send only that, apply it."""
    if context.invoked_subcommand is None:
        raise UsageError("arguments", "a command is missing", hint="dcr --help")


def _not_asked_for() -> None:
    """Stands for a command that is only listed: to know its options takes time, and there are many commands."""
