"""The process of the command `dcr`, which is python -m dcr_cli.

It sees to signals until cli does, and does nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command that this process was started with, and return its exit code."""
    # Python's own answer to an interrupt is a traceback, also while modules are still being imported.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from dcr_cli.cli import main as run

    return run()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
