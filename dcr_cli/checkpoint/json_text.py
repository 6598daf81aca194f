"""JSON in the form of FORMAT.md section 1, in which every text means one thing.

Refused beyond what the grammar refuses: a byte-order mark, duplicate keys, NaN and infinities, lone surrogates, numbers
that do not fit, and more than 16 levels. What the members mean is the caller's business.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError

MAX_JSON_LEVELS = 16
MAX_U64 = 2**64 - 1
MIN_I64 = -(2**63)


def strict_json(data: bytes, what: str, *, hint: str | None = None) -> Any:
    """Parse `data`; raise DamagedError about `what` if it is not strict JSON. "-0" is read as a float, no integer."""
    value = load_json(data, what, plain_object, hint=hint)
    check_levels(value, what)
    return value


def load_json(
    data: bytes, what: str, make_object: Callable[[list[tuple[str, Any]]], Any], *, hint: str | None = None
) -> Any:
    """Parse as strict_json does, but leave the levels to check_levels, and call `make_object` for every object.

    `make_object` gets the members in order, duplicates included, and raises ValueError with what is wrong.
    """
    try:
        text = data.decode()
        _check_surrogates(text)
        return json.loads(
            text,
            object_pairs_hook=make_object,
            # A call for every integer is a third of the time, and nearly no text has one that needs it.
            parse_int=_integer if _has_odd_integers(data) else int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise DamagedError(what, f"is not UTF-8, at byte {error.start} of its JSON", hint=hint) from error
    except json.JSONDecodeError as error:
        raise DamagedError(what, f"is not valid JSON: {error.msg}, at character {error.pos}", hint=hint) from error
    except ValueError as error:
        raise DamagedError(what, f"is not valid JSON: {error}", hint=hint) from error
    except RecursionError as error:
        raise DamagedError(what, f"is JSON of more than {MAX_JSON_LEVELS} levels", hint=hint) from error


def plain_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict; two equal keys are ValueError."""
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {shown(key)}")
            seen.add(key)
    return members


_ALL_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")


def _has_odd_integers(data: bytes) -> bool:
    """Whether there might be a negative zero, or an integer that does not fit 64 bits."""
    return b"-0" in data or b"0" * 19 in data.translate(_ALL_DIGITS_ALIKE)


def _integer(text: str) -> int | float:
    if len(text) < 19 and text[0] != "-":
        return int(text)
    if len(text) <= 20:
        value = int(text)
        if MIN_I64 <= value <= MAX_U64:
            return value if text != "-0" else -0.0
    raise ValueError(f"an integer of {len(text)} characters does not fit 64 bits")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _check_surrogates(text: str) -> None:
    if not _SURROGATE_ESCAPE.search(text):
        return
    high_ends_at = -1
    for match in _ESCAPE.finditer(text):
        unit = int(match[1], 16) if match[1] else 0
        is_low = 0xDC00 <= unit < 0xE000
        if (is_low or high_ends_at >= 0) and not (is_low and match.start() == high_ends_at):
            break
        high_ends_at = match.end() if 0xD800 <= unit < 0xDC00 else -1
    else:
        if high_ends_at < 0:
            return
    raise ValueError("a string has a lone surrogate")


def check_levels(value: Any, what: str) -> None:
    """Raise DamagedError if dicts and lists are nested more than 16 levels deep in `value`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_LEVELS):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise DamagedError(what, f"is JSON of more than {MAX_JSON_LEVELS} levels")
