"""The versions of a remote that follow the one that is staged, looked at before any of them is applied: whether each is
committed, is there, and is one that a module which serves can come to.

None of them is fetched but its documents, and nothing is kept: staging is done one version at a time, from the one
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.changes.blocks import is_moved
from dcr_cli.checkpoint.names import listed
from dcr_cli.delta.documents import Documents
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UnsupportedError
from dcr_cli.fetch.source import Source
from dcr_cli.layout.layout import Form
from dcr_cli.live.offer import find_documents
from dcr_cli.live.shares import Shares
from dcr_cli.pool import run_all
from dcr_cli.remote.documents import fetch_documents
from dcr_cli.remote.keys import payload_key
from dcr_cli.remote.version import Published, check_follows

TO_COMMIT = "dcr commit makes it a version"
_ANEW = "load the module anew, at this version"
_NEWER = "load the module anew, at a newer version"
_BEHIND = "see that dcr pull --publish-changes runs there, and try again when it has come to it"


@dataclass(frozen=True, slots=True)
class Way:
    """Where versions come from, and what the module holds, by its `shares`. `changes` is a folder that a pull leaves
    them in, decoded; without it they are fetched."""

    source: Source
    changes: Path | None
    jobs: int
    shares: Shares


def check_following(way: Way, staged: Published, last: int) -> None:
    """Raise unless the versions after `staged`, up to `last`, can be applied one after the other.

    ConflictError if one is not committed, or a pull has not come to it yet; NotFoundError if what it changes is there
    no more, UnsupportedError if it has only an anchor, or other tensors; what reading commits and documents raises.
    """
    before = staged
    for number in range(staged.version.number + 1, last + 1):
        name = f"{way.source.shown}@{number}"
        published = way.source.log.read(number, is_denied_absent=True)
        if published is None:
            raise ConflictError(name, "is not committed", hint=TO_COMMIT)
        check_follows(before, published.version, f"{way.source.shown}, version {number}")
        _check_rows(way.shares, name, _documents(way, name, before, published))
        before = published


def _documents(way: Way, name: str, before: Published, published: Published) -> Documents:
    """The documents of a version of which everything is there."""
    if published.version.delta is None:
        raise UnsupportedError(name, "has only an anchor: nothing of it says what changes", hint=_ANEW)
    if way.changes is not None:
        found = find_documents(way.changes, before, published, way.source.shown)
        if found is None:
            raise ConflictError(name, f"what it changes is not in {way.changes} yet", hint=_BEHIND)
        return found
    documents = fetch_documents(way.source.store, published)
    if documents is None:
        raise NotFoundError(name, "its delta is there no more", hint=_NEWER)
    rows, place, store = documents.manifest.payloads, published.version.place, way.source.store

    def look() -> Callable[[int], None]:
        def one(index: int) -> None:
            key = payload_key(place, index)
            status = store.stat(key, is_denied_absent=True)
            if status is None:
                raise NotFoundError(f"{store.shown}/{key}", "is there no more", hint=_NEWER)
            if status.size != rows[index].bytes:
                facts = f"has {status.size} bytes, {rows[index].bytes} expected"
                raise DamagedError(f"{store.shown}/{key}", facts)

        return one

    run_all(range(len(rows)), look, way.jobs)
    return documents


def _check_rows(shares: Shares, name: str, documents: Documents) -> None:
    """Raise UnsupportedError unless a version has the tensors that the module has, and makes none that it holds of
    another one."""
    rows = documents.manifest.tensors
    forms = {row.name: Form(row.dtype, row.shape) for row in rows}
    if forms != shares.forms:
        names = sorted(each for each in {*forms, *shares.forms} if forms.get(each) != shares.forms.get(each))
        raise UnsupportedError(name, f"has other tensors than the module: {listed(names)}", hint=_ANEW)
    here = {part.tensor for part in shares.parts} | set(shares.loaded)
    if moved := [row.name for row in rows if is_moved(row) and row.name in here]:
        raise UnsupportedError(name, f"starts tensors from others: {listed(moved)}", hint=_ANEW)
