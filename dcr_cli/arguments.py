"""What every path that is given has to be, and whether it can lead anywhere. Nothing here opens or makes a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dcr_cli.errors import UsageError


def check_path(path: str | os.PathLike[str], name: str) -> None:
    """Raise UsageError about the argument `name` if no file of any system has this path."""
    try:
        is_fine = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_fine = False
    if not is_fine:
        raise UsageError(name, f"has a character that no path has: {os.fspath(path)!a}")


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
