"""What kind of file something is, for messages: by its mode, or by its first bytes where it should be safetensors.

Whether that is an error is its callers' business.
"""

from __future__ import annotations

import stat

from dcr_cli.errors import DamagedError

_FETCH = "fetch the real file: git lfs pull, or download it again"


_OTHER_FILES: tuple[tuple[bytes, str, str | None], ...] = (
    (b"version https://git-lfs.github.com/spec/", "a Git-LFS pointer", _FETCH),
    (b"<!doctype", "an HTML page", "download the file again"),
    (b"<html", "an HTML page", "download the file again"),
    (b"<?xml", "an XML document", "download the file again"),
    (b"<error>", "an object store's error in XML", "download the file again"),
    (b"pk\x03\x04", "a zip file (PyTorch's own format is one)", None),
    (b"gguf", "a GGUF file", None),
    (b"\x28\xb5\x2f\xfd", "a zstd frame", None),
)


def check_no_other_file(start: bytes, what: str, expected: str) -> None:
    """Raise DamagedError if a file that starts with `start` is plainly of another kind than `expected`."""
    for magic, kind, hint in _OTHER_FILES:
        if start[: len(magic)].lower() == magic:
            raise DamagedError(what, f"is {kind}, not {expected}", hint=hint)


def file_kind(mode: int) -> str:
    """Name the kind of file that `mode` is of, for a message."""
    for is_kind, name in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
    ):
        if is_kind(mode):
            return name
    return "a device"
