"""Whether this process was asked to end, for the threads that no signal is raised in, and what it would leave behind.

The main thread hears signals by itself (process.py); what other threads do for long looks here.
"""

from __future__ import annotations

import signal
import threading
import time

_TICK_SECONDS = 0.1


class Stopped(BaseException):
    """A signal asked this process to end; not an Exception, so that nothing on the way mistakes it for a fault."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


# The signal that was heard, 0 while none was. It is set while a signal is handled, so no lock can guard it.
_number = 0
# What this process would leave behind elsewhere if it ended at once.
_left = ""


def ask(number: int) -> None:
    """Have all threads but the main one end, because of a signal; 0 takes it back."""
    global _number
    _number = number


def leave(text: str) -> None:
    """Note what this process would leave behind elsewhere, where nothing shows it, if it ended at once; nothing takes
    it back."""
    global _left
    _left = text


def left() -> str:
    """What it would leave behind, as noted last."""
    return _left


def check() -> None:
    """Raise Stopped in a thread that is to end."""
    if _number and threading.current_thread() is not threading.main_thread():
        raise Stopped(_number)


def pause(seconds: float) -> None:
    """Wait, as time.sleep does, but no longer than until this thread is to end: then raise Stopped."""
    end = time.monotonic() + seconds
    while True:
        check()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _TICK_SECONDS))
