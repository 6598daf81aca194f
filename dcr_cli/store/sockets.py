"""Waits on sockets of web servers, in which a thread that is to end notices that, and bodies sent through them.

What is sent and what an answer means is others' matter.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from dataclasses import dataclass

from dcr_cli.stopping import check
from dcr_cli.store.backend import Readable, parts

_TICK_SECONDS = 0.1
# A record of TLS, and little enough for an answer that comes meanwhile to be seen soon.
_SENT_AT_ONCE_BYTES = 16 << 10


class SilentError(TimeoutError):
    """Nothing happened for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"nothing happened for {seconds:g} s")


@dataclass(frozen=True, slots=True)
class Body:
    """What a request sends: `size` bytes."""

    data: bytes | Readable
    size: int


def wait_for(connected: socket.socket, events: int, seconds: float) -> int:
    """Wait for some of `events`, as select.poll has them: those that came; SilentError if none does in time.

    In TLS what can be read need not be a part of an answer.
    """
    poller = select.poll()
    poller.register(connected, events)
    end = time.monotonic() + seconds
    while True:
        check()
        left = end - time.monotonic()
        found = poller.poll(max(0.0, min(left, _TICK_SECONDS)) * 1000)
        if found:
            return found[0][1]
        if left <= 0:
            raise SilentError(seconds)


def send_body(connected: socket.socket, body: Body, seconds: float) -> bool:
    """Send a body; False, and not all of it, if the server answers before its end.

    SilentError if for so many seconds the server takes nothing. In TLS an answer before the end is seen only when the
    server takes no more.
    """
    events = select.POLLOUT if isinstance(connected, ssl.SSLSocket) else select.POLLOUT | select.POLLIN
    for part in parts(body.data):
        view = memoryview(part)
        while view:
            if wait_for(connected, events, seconds) & select.POLLIN:
                return False
            view = view[connected.send(view[:_SENT_AT_ONCE_BYTES]) :]
    return True
