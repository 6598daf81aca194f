"""The commands: parse, call one function, report, exit code.

It alone reads arguments and the environment. Everything heavy is imported by the command that needs it, so that
`dcr --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcr_cli import process, waiting
from dcr_cli.cli import (  # noqa: F401  # Their commands register themselves.
    layouts,
    local,
    publishing,
    receiving,
    relaying,
    tending,
)
from dcr_cli.cli.options import commands
from dcr_cli.cli.parsing import before_dashes, command_in, parse
from dcr_cli.cli.session import Options, Session

COMMANDS = tuple(commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises and never exits by itself.

    Without `arguments` it runs the command that this process was started with.
    """
    if arguments is None:
        process.ensure_utf8()
        process.collect_rarely()
    given = list(sys.argv[1:] if arguments is None else arguments)
    session = Session(command_in(given), Options(json="--json" in before_dashes(given)))
    try:
        process.prepare_streams()
        with process.signals_raised(), waiting.heard_by(session.hear_wait):
            work = parse(given, session)
            if work is not None:
                return work()
            process.write(sys.stdout, session.text)
            return 0
    except BaseException as error:
        return session.fail(process.explain(error, session.left_by_stop))
