"""What every path, version and token that is given has to be, and whether a path can lead anywhere.

Nothing here opens or makes a file.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dcr_cli.errors import UsageError

_VISIBLE = re.compile(r"[!-~]+")
# A version has one form alone, so that no two texts that differ mean the same one (FORMAT 13.1).
_VERSION = re.compile(r"[1-9][0-9]{0,9}")
# What is no secret, so that it may be repeated.
_PLAIN = re.compile(r"[A-Za-z0-9+._-]{1,20}")


def check_path(path: str | os.PathLike[str], name: str) -> None:
    """Raise UsageError about the argument `name` if no file of any system has this path."""
    try:
        is_fine = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_fine = False
    if not is_fine:
        raise UsageError(name, f"has a character that no path has: {os.fspath(path)!a}")


def is_visible(text: str) -> bool:
    """Whether a text is what the line of a header, or an address, has without being written in another way: visible
    characters of ASCII, and no blank."""
    return _VISIBLE.fullmatch(text) is not None


def check_token(token: str, name: str) -> None:
    """Raise UsageError about the option or variable `name`, and say nothing of its value, if no server can be shown
    this token."""
    if not is_visible(token):
        facts = "is no token: visible characters of ASCII without blanks are expected"
        raise UsageError(name, facts, hint="a line break at its end is one, too; printf, unlike echo, writes none")


def version_of(text: str, name: str) -> int:
    """The version that the argument `name` says; UsageError if that is none."""
    if _VERSION.fullmatch(text) is None:
        found = repr(text) if _PLAIN.fullmatch(text) is not None else "something else"
        facts = f"a version is a number from 1 to 9999999999 without zeros before it, found {found}"
        raise UsageError(name, facts, hint="dcr log REMOTE lists them")
    return int(text)


def check_version(version: int | None) -> None:
    """Raise UsageError about a version that no history can have."""
    if version is not None:
        version_of(str(version), "version")


def check_apart(places: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Raise UsageError unless each of these folders, by what it is, lies outside of all others, wherever links lead.

    A folder that is changed must hold nothing that is read, and the other way round.
    """
    real = {name: Path(os.path.realpath(path)) for name, path in places.items() if path is not None}
    for name, place in real.items():
        for other, around in real.items():
            if name != other and (place == around or around in place.parents):
                raise UsageError(
                    str(place), f"the {name} cannot lie inside the {other} {around}", hint=f"have the {name} elsewhere"
                )


def is_loop(path: str | os.PathLike[str]) -> bool:
    """Whether links lead in a circle, or are more than the system follows."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
