"""Names that come from outside: which paths are safe to use, and how a name is shown on one line.

Nothing here opens or makes a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dcr_cli.errors import DamagedError, one_line

MAX_COMPONENT_BYTES = 255
MAX_PATH_BYTES = 4096
SHOWN_CHARACTERS = 400
SHOWN_NAMES = 10

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def safe_path(path: str, what: str) -> str:
    """Return `path` if it is a safe relative path (FORMAT.md 2); raise DamagedError about `what` if it is not.

    A safe path stays below the folder it is joined to, on every system, and means one file only. It never names
    anything that dcr keeps for itself, because no component starts with a dot.
    """
    fault = path_fault(path)
    if fault is not None:
        raise DamagedError(what, f"unsafe name {shown(path)}: {fault}")
    return path


def path_fault(path: str) -> str | None:
    """Say what makes `path` unsafe, or None."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if not path:
        return "it is empty"
    if len(encoded) > MAX_PATH_BYTES:
        return f"it has {len(encoded)} bytes, more than {MAX_PATH_BYTES}"
    if path.startswith("/"):
        return "it starts at the root of the file system"
    if "\\" in path:
        return "it has a backslash"
    if _CONTROL.search(path):
        return "it has a control character"
    if _DRIVE.match(path):
        return "it starts with a drive letter"
    for component in encoded.split(b"/"):
        if not component:
            return "it has an empty component"
        if component.startswith(b"."):
            return f"its component {shown(component.decode())} starts with a dot"
        if len(component) > MAX_COMPONENT_BYTES:
            return f"a component has {len(component)} bytes, more than {MAX_COMPONENT_BYTES}"
    return None


def shown(name: str) -> str:
    """Write a name for people: one line, every name another text, quoted where its ends could not be seen.

    Of a name of more than 400 characters the middle is left out, and how much that is.
    """
    if len(name) > SHOWN_CHARACTERS:
        left_out = len(name) - SHOWN_CHARACTERS
        half = SHOWN_CHARACTERS // 2
        return f"{shown(name[:half])} [{left_out} characters left out] {shown(name[-half:])}"
    escaped = one_line(name.replace("\\", "\\\\"))
    return escaped if escaped.strip(" ") == escaped and escaped else f'"{escaped}"'


def listed(names: Sequence[str], most: int = SHOWN_NAMES) -> str:
    """Write names on one line, the first ones alone if they are more than `most`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more
