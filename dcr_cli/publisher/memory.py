"""A baseline in host memory: arrays, and the version at which they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import content_digest, digest_bytes, no_digest
from dcr_cli.delta.scan import TensorReader, digest_part, parts_of
from dcr_cli.errors import WrongBaseError
from dcr_cli.fetch.position import Position, position_at
from dcr_cli.publisher.bases import Base, Change, Description, MemoryBase
from dcr_cli.publisher.described import describe
from dcr_cli.remote.keys import Place
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store

_AGAIN = "fill the arrays with the newest version, of which dcr pull makes a copy, and make another publisher"


@dataclass(frozen=True, slots=True)
class _Due:
    """What brings the arrays to a version, should that come to exist."""

    place: Place
    changes: Sequence[Change]
    description: Description


class Memory:
    """Arrays by tensor name, which are at the newest version when they are first used.

    Nothing is changed in them before the commit of a version exists.
    """

    what = "the baseline in host memory"

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self._position: Position | None = None
        self._description: Description | None = None
        self._due: _Due | None = None

    def position(self) -> Position | None:
        return self._position

    def open(self, store: Store, head: Published, jobs: int) -> Base:
        """The arrays as what the next delta starts from; all of them are read the first time.

        WrongBaseError if they are not at the newest version.
        """
        if self._position is not None and self._position.commit != head.blake3:
            facts = f"is at version {self._position.version}, the newest is {head.version.number}"
            raise WrongBaseError(self.what, facts, hint=_AGAIN)
        if self._description is None:
            description = describe(store, head)
            digests = _digests(MemoryBase(self._arrays, description), description.tensors, jobs)
            content = content_digest((t.name, t.dtype.name, t.shape, digests[t.name]) for t in description.tensors)
            if content != head.version.target.content:
                facts = f"is not at version {head.version.number}, the newest of {store.shown}"
                raise WrongBaseError(self.what, facts, hint=_AGAIN)
            self._description = replace(description, digests=digests)
            self._position = position_at(head, store.shown)
        return MemoryBase(self._arrays, self._description)

    def keep(self, place: Place, changes: Sequence[Change], description: Description) -> None:
        """Keep what brings the arrays to a version until it is known whether that exists."""
        self._due = _Due(place, changes, description)

    def move(self, published: Published, remote: str) -> None:
        """Bring the arrays to a version that exists, if what does so was kept."""
        due, self._due = self._due, None
        if due is not None and self._description is not None and _is_of(due, published):
            MemoryBase(self._arrays, self._description).patch(due.changes)
            self._description = due.description
            self._position = position_at(published, remote)


def _is_of(due: _Due, published: Published) -> bool:
    """Whether a version is the one that was kept, or the very same, which another publisher has made."""
    content = content_digest(
        (t.name, t.dtype.name, t.shape, due.description.digests[t.name]) for t in due.description.tensors
    )
    return published.version.number == due.place.version and published.version.target.content == content


def _digests(reader: TensorReader, tensors: Sequence[Tensor], jobs: int) -> dict[str, bytes]:
    """The digest of each tensor, read in threads."""
    totals = [no_digest() for _ in tensors]
    with ThreadPoolExecutor(jobs, "dcr-memory") as pool:
        for index, tensor in enumerate(tensors):
            for found in pool.map(partial(digest_part, reader), parts_of(index, tensor, None)):
                totals[index] += found
    return {tensor.name: digest_bytes(total) for tensor, total in zip(tensors, totals, strict=True)}
