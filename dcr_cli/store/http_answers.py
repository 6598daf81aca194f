"""What the answers of web servers say: the objects in them, and the listings of relays (FORMAT 15.2).

What a server may get wrong is seen here: pages instead of objects, encoded bodies, ranges that are ignored or other
than asked for, listings that are none.
"""

from __future__ import annotations

import email.utils
import http.client
import re
from collections.abc import Iterator
from typing import Any

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import path_fault
from dcr_cli.errors import DamagedError
from dcr_cli.store.backend import CHUNK_BYTES, Answer, Entry, FaultError, PermanentError
from dcr_cli.store.http_client import broken

_FORMAT = "dcr-1"
# Longer numbers are none that an object has, and Python does not read all of them.
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)
_PAGE_NAMES = (".html", ".htm", ".xhtml")
_WAITED = re.compile(r"\s*wait\s*(?:[=;].*)?", re.IGNORECASE)


def has_waited(answer_headers: Any) -> bool:
    """Whether an answer says that the server has waited, or had no need to (FORMAT 15.3)."""
    applied = ",".join(answer_headers.get_all("Preference-Applied") or [])
    return any(_WAITED.fullmatch(each) is not None for each in applied.split(","))


def entries_in(data: bytes, prefix: str, shown: str) -> tuple[Entry, ...]:
    """The objects that a listing has; DamagedError about `shown` if it is none, or one of something else."""
    document = strict_json(data, shown)
    if not isinstance(document, dict) or document.get("format") != _FORMAT or document.get("requires") != []:
        raise DamagedError(shown, "is no listing of a relay")
    entries = document.get("entries")
    if not isinstance(entries, list):
        raise DamagedError(shown, "entries is not a list")
    found = tuple(_entry(each, prefix, shown) for each in entries)
    if len({entry.key for entry in found}) < len(found):
        raise DamagedError(shown, "has a key twice")
    return found


def _entry(members: Any, prefix: str, shown: str) -> Entry:
    if not isinstance(members, dict):
        raise DamagedError(shown, "has an entry that is no object")
    key, size, modified = (members.get(name) for name in ("key", "bytes", "modified"))
    if not isinstance(key, str) or not key.startswith(prefix) or path_fault(key) is not None:
        raise DamagedError(shown, "has a key that is none of what was asked for")
    # A bool is an int to Python, not to JSON.
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise DamagedError(shown, "has a size that is none")
    if modified is not None and (type(modified) not in (int, float) or not 0 <= modified < 1 << 53):
        raise DamagedError(shown, "has a time that is none")
    return Entry(key, size, float(modified) if modified is not None else None)


def object_in(response: http.client.HTTPResponse, key: str, begin: int | None) -> Answer:
    """The answer to a GET, of a range that starts at `begin` unless that is None."""
    check_kind(response, key)
    length, total, start = length_of(response.headers.get("Content-Length")), None, 0
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
        if match is None or begin is None:
            raise PermanentError("answers with a part without saying which, or unasked")
        start, last = int(match[1]), int(match[2])
        total = None if match[3] == "*" else int(match[3])
        if start != begin or last < start or length not in (None, last - start + 1):
            raise PermanentError(f"bytes from {begin} on were asked for, the answer says that it has {start} to {last}")
        length = last - start + 1
    elif response.status == 200:
        total = length
    else:
        raise PermanentError(f"answers with status {response.status}")
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    return Answer(start, length, total, _chunks(response), tag, response.close)


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        fault: FaultError
        try:
            # Not all there is, but all that came: a slow server's bytes are not lost when it breaks off.
            chunk = response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            fault = broken(error)
        else:
            if not chunk:
                return
            yield chunk
            continue
        raise fault


def check_kind(response: http.client.HTTPResponse, key: str) -> None:
    encoding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise PermanentError("sends the object encoded, though asked not to")
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml") and not key.endswith(_PAGE_NAMES):
        raise PermanentError(
            "answers with a web page, not with the object", hint="is it the right address, and is a login in between?"
        )


def length_of(header: str | None) -> int | None:
    """How long a body is, by its Content-Length, of an answer or of a request; None where that does not say."""
    return int(header) if header is not None and _LENGTH.fullmatch(header.strip()) else None


def modified_of(response: http.client.HTTPResponse) -> float | None:
    text = response.headers.get("Last-Modified")
    try:
        return None if text is None else email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
