"""Whether a checkpoint is complete, as whoever writes it says, or as the age of its files does."""

from __future__ import annotations

import os
from pathlib import Path

from dcr_cli.errors import ConflictError
from dcr_cli.layout.opening import Given


def check_ready(checkpoint: Path, ready: str | None) -> None:
    """Raise ConflictError if the file that says that a checkpoint is complete is not there yet."""
    if ready is not None and not os.path.exists(checkpoint / ready):
        raise ConflictError(str(checkpoint), f"is not ready: {ready} is not there yet", hint="try again later")


def check_settled(source: Given, settle_seconds: float, now: float) -> None:
    """Raise ConflictError if a file was written less than so many seconds ago."""
    path, newest = max(source.identities.items(), key=lambda pair: pair[1].mtime_ns)
    age = now - newest.mtime_ns / 1e9
    if settle_seconds and age < settle_seconds:
        facts = f"was written {age:.1f} s ago, {settle_seconds:g} s of rest were asked for"
        raise ConflictError(str(source.root / path), facts, hint="try again later")
