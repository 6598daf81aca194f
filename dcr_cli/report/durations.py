"""Durations as people read them."""

from __future__ import annotations

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def duration(seconds: float) -> str:
    """Write a duration in its largest unit."""
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
