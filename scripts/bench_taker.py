"""Fetches objects over one connection, and throws them away: a child that is faster than what it asks.

What comes is not copied out of the kernel where that is Linux. Run as a script, with an address, how often, and keys:
it says so when it has connected, begins at the end of its input, and says how many bytes it was sent.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

PART_BYTES = 1 << 20
WAIT_SECONDS = 60.0


def take(url: str, times: int, keys: Sequence[str]) -> int:
    """Fetch all objects so many times, one after the other: how many bytes they had."""
    place = urlsplit(url)
    buffer, got = bytearray(PART_BYTES), 0
    # What is truncated is not copied out of the kernel.
    flags = socket.MSG_TRUNC if sys.platform == "linux" else 0
    with socket.create_connection((place.hostname, place.port), timeout=WAIT_SECONDS) as connection:
        print("connected", flush=True)
        sys.stdin.read()
        for key in [*keys] * times:
            connection.sendall(f"GET /{key} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(1 << 12)
                if not part:
                    return got
                head += part
            head, _, first = head.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            left = int(fields[b"content-length"]) - len(first)
            got += len(first)
            while left:
                size = connection.recv_into(buffer, min(left, PART_BYTES), flags)
                if not size:
                    return got
                left -= size
                got += size
    return got


if __name__ == "__main__":
    print(take(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
