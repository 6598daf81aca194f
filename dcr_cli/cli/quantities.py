"""Amounts as people write them: sizes and durations. Functions of the library take plain numbers."""

from __future__ import annotations

import re

from dcr_cli.errors import UsageError

_LONGEST = 20
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?(?:([kmgt])(i?))?b?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+)(?:\.([0-9]+))?([smhd]?)", re.ASCII | re.IGNORECASE)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def size_of(text: str, name: str) -> int:
    """The number of bytes, one or more, that the argument `name` says: 500k is 500 000, 1.5GiB is 1 610 612 736."""
    match = _SIZE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is not None:
        whole, fraction, prefix, binary = match.groups(default="")
        unit = (1024 if binary else 1000) ** _POWER[prefix.lower()] if prefix else 1
        count_bytes = _times(whole, fraction, unit)
        if count_bytes > 0:
            return count_bytes
    raise UsageError(name, f"a size expected, found {_shown(text)}", hint="such as 500k, 20M or 1.5GiB")


def seconds_of(text: str, name: str, *, needs_unit: bool = False) -> float:
    """The number of seconds that the argument `name` says: 15m is 900, and so is 900, unless a unit is needed: where a
    forgotten one would remove what is to be kept."""
    match = _DURATION.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or (needs_unit and not match[3]):
        known = "a number and s, m, h or d" if needs_unit else "a number of seconds, or one and s, m, h or d"
        facts = f"a duration expected, found {_shown(text)}"
        raise UsageError(name, facts, hint=f"{known}, such as 30s, 15m, 24h or 7d")
    whole, fraction, unit = match.groups(default="")
    return _times(whole, fraction, 1000 * _SECONDS[unit.lower()]) / 1000


def _times(whole: str, fraction: str, unit: int) -> int:
    """A decimal number times a unit, rounded down."""
    return int(whole + fraction) * unit // int(10 ** len(fraction))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
