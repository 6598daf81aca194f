"""Documents that are one line of JSON (FORMAT 8): sorted keys, a newline at the end, strict in every way.

What their members mean is their owners' business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dcr_cli.checkpoint.digest import State, blake3_text, parse_blake3
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.document import COPY_DELTA, FORMAT, check_format, check_requires, refuse_answer
from dcr_cli.errors import DamagedError

COMMIT_LIMIT = 64 << 10
# Sizes in a document are below this.
BYTES_LIMIT = 1 << 63


def encode_line(members: Mapping[str, Any], what: str, *, limit: int = COMMIT_LIMIT) -> bytes:
    """Encode `members`, with the format's own, as one line; DamagedError about `what` if it is too long."""
    document = {"format": FORMAT, "requires": [], **members}
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        line = text.encode() + b"\n"
    except UnicodeEncodeError as error:
        raise DamagedError(what, f"would hold what is not UTF-8: {text[error.start : error.end]!a}") from error
    if len(line) > limit:
        raise DamagedError(what, f"would have {len(line)} bytes, at most {limit} are allowed")
    return line


def decode_line(data: bytes, what: str, *, limit: int = COMMIT_LIMIT, hint: str = COPY_DELTA) -> dict[str, Any]:
    """Decode a line and check its form, format and required features: its members."""
    refuse_answer(data, what)
    if len(data) > limit:
        raise DamagedError(what, f"has {len(data)} bytes, at most {limit} are allowed")
    document = strict_json(data, what, hint=hint)
    if not isinstance(document, dict):
        raise DamagedError(what, "is not a JSON object")
    if "format" not in document:
        raise DamagedError(
            what, "is JSON that names no format, as a web service's error is: no document of dcr", hint=hint
        )
    check_format(document.get("format"), what)
    check_requires(document.get("requires"), what)
    if not data.endswith(b"\n") or data.count(b"\n") > 1 or not _is_sorted(document):
        raise DamagedError(what, "is not one line of JSON with sorted keys and a newline at its end")
    return document


def member(members: Mapping[str, Any], key: str, kind: type[Any], what: str) -> Any:
    """The member `key`, which must be there and of a type."""
    value = members.get(key)
    if not isinstance(value, kind):
        raise DamagedError(what, f"{key} is {'missing' if value is None else 'not of the right type'}")
    return value


def count(members: Mapping[str, Any], key: str, limit: int, what: str) -> int:
    """The member `key`, a number from 0 to below `limit`."""
    value = members.get(key)
    # A bool is an int to Python, not to JSON.
    if type(value) is not int or not 0 <= value < limit:
        raise DamagedError(what, f"{key} is not a number from 0 to {limit - 1}")
    return value


def state_members(state: State) -> dict[str, str]:
    """A state as a member of a document."""
    return {"content": blake3_text(state.content), "files": blake3_text(state.files)}


def state_of(members: Mapping[str, Any], key: str, what: str) -> State:
    """The state that is the member `key`."""
    digests = member(members, key, dict, what)
    content, files = (parse_blake3(digests.get(each), f"{what}: {key} {each}") for each in ("content", "files"))
    return State(content=content, files=files)


def _is_sorted(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_sorted(each) for each in value)
    return not isinstance(value, dict) or (
        list(value) == sorted(value) and all(_is_sorted(each) for each in value.values())
    )
