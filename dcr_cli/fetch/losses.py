"""What a commit binds, or an anchor, and is not there: pruned before it was asked for, or while it was fetched.

A way is looked for around it; which one is way.py's decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dcr_cli.errors import NotFoundError, WrongBaseError
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store


class RemovedError(WrongBaseError):
    """A version's delta, or its anchor, is not there, or not there any more; another way may lead around it."""

    def __init__(self, what: str, version: int, *, is_anchor: bool = False) -> None:
        self.version = version
        self.is_anchor = is_anchor
        facts = _anchor_went(version) if is_anchor else f"version {version} is missing"
        super().__init__(what, facts, hint="run the same command again to look for another way")


@dataclass(slots=True)
class Losses:
    """The versions whose delta, or whose anchor, a run has found to be gone."""

    deltas: set[int] = field(default_factory=set)
    anchors: set[int] = field(default_factory=set)

    def add(self, error: RemovedError) -> None:
        (self.anchors if error.is_anchor else self.deltas).add(error.version)

    @property
    def words(self) -> str:
        """What is said of anchors that went, behind what is said of the way; of a delta that is said there."""
        return "".join(f"; {_anchor_went(version)}" for version in sorted(self.anchors))


def _anchor_went(version: int) -> str:
    return f"the anchor of version {version} was removed while it was fetched"


def is_gone(store: Store, key: str, error: NotFoundError | RefusedError) -> bool:
    """Whether an object that could not be read is absent, as FORMAT 13.4 says: also if it may not be looked at."""
    return isinstance(error, NotFoundError) or store.stat(key, is_denied_absent=True) is None
