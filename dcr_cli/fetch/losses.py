"""What a commit binds, or an anchor, and is of no use: pruned before it was asked for, or while it was fetched, or
damaged where it lies.

A way is looked for around it; which one is way.py's decision.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcr_cli.errors import DamagedError, NotFoundError, WrongBaseError
from dcr_cli.receiver.install.wanted import FetchedError
from dcr_cli.remote.keys import Place, anchor_file_key
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store


class RemovedError(WrongBaseError):
    """A version's delta, or its anchor, is not there, or not there any more; another way may lead around it."""

    def __init__(self, what: str, version: int, *, is_anchor: bool = False) -> None:
        self.version = version
        self.is_anchor = is_anchor
        facts = _anchor_went(version) if is_anchor else f"version {version} is missing"
        super().__init__(what, facts, hint="run the same command again to look for another way")


class SpoiledError(DamagedError):
    """An object of a version's delta, or of its anchor, is damaged in the remote; another way may lead around it."""

    def __init__(self, error: DamagedError, remote: str, version: int, *, is_anchor: bool = False) -> None:
        self.version = version
        self.is_anchor = is_anchor
        super().__init__(error.what, error.facts, hint=_cure(remote))


@dataclass(slots=True)
class Losses:
    """The versions whose delta, or whose anchor, a run has found to be gone or damaged, and what was damaged."""

    deltas: set[int] = field(default_factory=set)
    anchors: set[int] = field(default_factory=set)
    spoiled: list[SpoiledError] = field(default_factory=list)

    def add(self, error: RemovedError | SpoiledError) -> None:
        (self.anchors if error.is_anchor else self.deltas).add(error.version)
        if isinstance(error, SpoiledError):
            self.spoiled.append(error)

    def look_again(self) -> None:
        """Forget what was gone, and may have come; what is damaged stays so."""
        self.deltas = {each.version for each in self.spoiled if not each.is_anchor}
        self.anchors = {each.version for each in self.spoiled if each.is_anchor}

    @property
    def words(self) -> str:
        """What is said of anchors that went, behind what is said of the way; of a delta that is said there."""
        return "".join(f"; {_anchor_went(version)}" for version in sorted(self.anchors))


def _anchor_went(version: int) -> str:
    return f"the anchor of version {version} was removed while it was fetched"


def _cure(remote: str) -> str:
    quoted = shlex.quote(remote)
    way = f"dcr anchor CHECKPOINT {quoted}, of a checkpoint at a later version, makes a way around it"
    return f"run the same command again; if it stays so, {way}; dcr verify --deep --remote {quoted} tells what else is"


@contextmanager
def telling_spoiled(store: Store, place: Place, *, is_anchor: bool = False) -> Iterator[None]:
    """Have what comes damaged meanwhile say of which version it is: of its delta, or of its anchor."""
    try:
        yield
    except DamagedError as error:
        raise SpoiledError(error, store.shown, place.version, is_anchor=is_anchor) from error


@contextmanager
def telling_spoiled_files(store: Store, place: Place) -> Iterator[None]:
    """Have the file of an anchor of which other bytes came than its document says be named, and be the anchor's."""
    try:
        yield
    except FetchedError as error:
        named = DamagedError(f"{store.shown}/{anchor_file_key(place, error.path)}", error.facts)
        raise SpoiledError(named, store.shown, place.version, is_anchor=True) from error


def is_gone(store: Store, key: str, error: NotFoundError | RefusedError) -> bool:
    """Whether an object that could not be read is absent, as FORMAT 13.4 says: also if it may not be looked at."""
    return isinstance(error, NotFoundError) or store.stat(key, is_denied_absent=True) is None
