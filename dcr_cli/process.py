"""What surrounds a command: standard streams, signals, and the exit code of whatever went wrong.

It prints nothing but text that it is handed, and it parses no arguments.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from dcr_cli import stopping
from dcr_cli.errors import DcrError, LocalError, hint_of, one_line
from dcr_cli.stopping import Stopped

INTERNAL_ERROR = 70
CLOSED_PIPE = 128 + signal.SIGPIPE
# How soon what Python dropped is raised again.
_AGAIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Failure:
    """One error as people and programs are told it."""

    exit_code: int
    error_class: str
    message: str
    hint: str | None
    retryable: bool
    is_bug: bool
    traceback: str
    details: Mapping[str, bool | int] = field(default_factory=dict)


def explain(error: BaseException, left: Callable[[], str] | None = None) -> Failure:
    """Turn whatever ended a command into an exit code and one line; `left` says what a stop has left."""
    trace = "".join(traceback.format_exception(error))
    name = type(error).__name__
    if isinstance(error, DcrError):
        name = error.class_name
        return Failure(error.exit_code, name, str(error), error.hint, error.retryable, False, trace, error.details)
    if isinstance(error, Stopped | KeyboardInterrupt):
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        told = [f"stopped: by signal {signal.Signals(number).name}", *getattr(error, "__notes__", ())]
        if left is not None:
            told.append(left())
        message = one_line("; ".join(told))
        return Failure(128 + number, "Stopped", message, "run the same command again", True, False, trace)
    if isinstance(error, BrokenPipeError):
        return Failure(CLOSED_PIPE, name, "output: the reader closed the pipe", None, False, False, trace)
    if isinstance(error, MemoryError):
        return Failure(
            9, LocalError.__name__, "memory: not enough for this step", "try fewer --jobs", False, False, trace
        )
    if isinstance(error, OSError):
        message = f"{_path_of(error)}: {error.strerror or error}"
        return Failure(9, LocalError.__name__, one_line(message), hint_of(error), False, False, trace)
    message = one_line(f"internal error: {name}: {error}")
    return Failure(INTERNAL_ERROR, name, message, "this is a bug in dcr; please report it", False, True, trace)


def _path_of(error: OSError) -> str:
    if error.filename is None:
        return "the operating system"
    return " and ".join(os.fsdecode(path) for path in (error.filename, error.filename2) if path is not None)


def collect_rarely() -> None:
    """Look for circular garbage less often: with a million small objects, none of them in a circle, that takes long."""
    gc.set_threshold(100_000, 50, 50)


def ensure_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if file names are not UTF-8 to it.

    Names in deltas are UTF-8 whatever the locale of the machine; under another encoding of the file system they would
    be other names.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def prepare_streams() -> None:
    """Make the standard streams safe to use, whatever they are.

    A closed descriptor 0, 1 or 2 is taken, because the next file that is opened would get its number and then be
    written to by anything that prints. A name that the locale cannot encode is escaped instead of raising.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(stream: IO[str] | None, text: str) -> None:
    """Write all of `text` now; raises OSError naming standard output when it cannot be written."""
    try:
        if stream is None:
            raise OSError(9, "is closed")
        stream.write(text)
        stream.flush()
    except OSError as error:
        abandon(stream)
        error.filename = "standard output"
        raise


def complain(text: str) -> None:
    """Write `text` to standard error; if nobody can read it, there is nobody to tell."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except OSError:
        abandon(sys.stderr)


def abandon(stream: IO[str] | None) -> None:
    """Point a stream that failed at nothing, so that the flush at exit does not fail again."""
    for standard in (sys.__stdout__, sys.__stderr__):
        if standard is not None and stream is standard:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, standard.fileno())
            os.close(nothing)


@contextmanager
def signals_raised() -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread, and end what other threads wait for; a
    second one ends the process at once, and says what that leaves behind elsewhere.

    A signal that the caller ignores (nohup, a background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = _Signals()
    watched = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in watched.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, signals.heard)
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, signals.again) or signal.SIG_DFL
    sys.unraisablehook, dropped = signals.dropped, sys.unraisablehook
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = dropped
        for number, handler in before.items():
            signal.signal(number, handler)
        stopping.ask(0)


class _Signals:
    """What was heard of signals, and raised.

    Python drops what is raised while it runs a destructor, or a callback of its own, and only tells a hook. A stop that
    was dropped so is raised again a moment later, by a timer, until it is not.
    """

    def __init__(self) -> None:
        self._raised = 0
        self._dropped = 0
        self._tell_dropped = sys.unraisablehook

    def heard(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            _end_at_once(number)
        self._raised = number
        stopping.ask(number)
        raise Stopped(number)

    def dropped(self, told: sys.UnraisableHookArgs) -> None:
        if not isinstance(told.exc_value, Stopped):
            self._tell_dropped(told)
        elif threading.current_thread() is threading.main_thread():
            self._raised, self._dropped = 0, told.exc_value.number
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    def again(self, number: int, frame: FrameType | None) -> None:
        if not self._raised:
            self.heard(self._dropped, frame)


def _end_at_once(number: int) -> None:
    left = stopping.left()
    if left:
        # A stream may be in the middle of something when a signal comes.
        with suppress(OSError):
            io.FileIO(2, "w", closefd=False).write(one_line(f"dcr: {left}").encode() + b"\n")
    os._exit(128 + number)
