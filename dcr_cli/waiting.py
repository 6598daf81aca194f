"""What is waited for, told to whoever wants to hear it: a run that says nothing for minutes looks like one that hangs.

Who hears is said once for the process; nobody does otherwise. How often it is said, and in which words, is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """What is waited for: `what` it is about, and how that stands; since when, and how long at most from now on."""

    what: str
    facts: str
    waited_seconds: float
    left_seconds: float


_hear: Callable[[Wait], None] | None = None


@contextmanager
def heard_by(hear: Callable[[Wait], None]) -> Iterator[None]:
    """While inside, have `hear` called, from any thread, whenever something goes on waiting."""
    global _hear
    before, _hear = _hear, hear
    try:
        yield
    finally:
        _hear = before


def tell(what: str, facts: str, *, waited_seconds: float, left_seconds: float) -> None:
    """Say what is waited for; whoever waits does so each time that they look and it has not come."""
    if _hear is not None:
        _hear(Wait(what, facts, waited_seconds, left_seconds))
