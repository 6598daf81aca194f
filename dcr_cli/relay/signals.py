"""Signals that end a relay, as something that its event loop waits for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_awaited() -> Iterator[asyncio.Future[int]]:
    """What is lent has the number of the first signal that asks to end; a second one ends the process at once.

    A signal that the caller ignores stays ignored, and what it did before, it does again afterwards.
    """
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[int] = loop.create_future()

    def heard(number: int) -> None:
        if ending.done():
            os._exit(128 + number)
        ending.set_result(number)

    watched = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in watched.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        loop.add_signal_handler(number, heard, number)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
