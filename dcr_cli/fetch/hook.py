"""The command that runs when a receiver is at a version: started in a shell, ended with all it started when its time is
up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dcr_cli.errors import HookError

DEFAULT_SECONDS = 900.0
_GRACE_SECONDS, _TICK_SECONDS = 5.0, 0.05
_SHELL = "/bin/sh"
_AGAIN = "the bytes are in place; the next pull runs it again"


@dataclass(frozen=True, slots=True)
class Hook:
    """A shell command, and how long it may take."""

    command: str
    seconds: float = DEFAULT_SECONDS


def run_hook(hook: Hook, environment: Mapping[str, str]) -> None:
    """Run a hook with `environment` on top of this process's own; HookError unless it ends with 0 in time.

    What it prints goes to standard error. Its process group is ended when its time is up, and when this process is
    stopped.
    """
    process = subprocess.Popen(
        [_SHELL, "-c", hook.command],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        code = process.wait(hook.seconds)
    except subprocess.TimeoutExpired:
        raise HookError("--exec", f"did not end within {hook.seconds:g} s, and was ended", hint=_AGAIN) from None
    finally:
        _end(process)
    if code < 0:
        raise HookError("--exec", f"was ended by signal {-code}", hint=_AGAIN)
    if code:
        raise HookError("--exec", f"exited with {code}", hint=_AGAIN)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended, with its group: whoever lives on after a time of grace is killed."""
    if process.poll() is not None:
        return
    until = time.monotonic() + _GRACE_SECONDS
    is_there = _signal(process, signal.SIGTERM)
    while is_there and time.monotonic() < until:
        time.sleep(_TICK_SECONDS)
        process.poll()
        # The group outlives the shell that leads it: the number is nobody else's as long as one of them is there.
        is_there = _signal(process, 0)
    if is_there:
        _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signal all of a process's group: whether anybody is in it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
