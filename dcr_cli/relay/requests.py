"""What a request asks for, from its head (FORMAT 15.1, pure): the key, the range, the preference to wait."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

MOST_WAIT_SECONDS = 60
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})|bytes=-(\d{1,18})")
_WAIT = re.compile(r"(?:^|,)\s*wait=(\d{1,6})\s*(?:$|[,;])")


def key_of(raw_path: str) -> str | None:
    """The key that a path names, below the address that the relay listens at; None if it can name none."""
    path = raw_path.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):
        return None
    try:
        return unquote_to_bytes(path[1:]).decode()
    except UnicodeDecodeError:
        return None


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """The bytes, from and to before, of an object of `size` bytes that are asked for.

    All of them where the header asks for nothing or is of another form; None for a range that has none of them.
    """
    match = _RANGE.fullmatch((header or "").strip())
    if match is None:
        return 0, size
    if match[3] is not None:
        begin, end = max(0, size - int(match[3])), size
    else:
        begin, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < begin:
            return 0, size
    return (begin, end) if begin < end else None


def is_ranged(header: str | None) -> bool:
    """Whether an answer may be a part."""
    match = _RANGE.fullmatch((header or "").strip())
    return match is not None and not (match[1] and match[2] and int(match[2]) < int(match[1]))


def wait_of(header: str | None) -> int | None:
    """For how many seconds an answer may wait; None where that is not asked for."""
    match = _WAIT.search(header or "")
    return min(int(match[1]), MOST_WAIT_SECONDS) if match is not None else None
