"""Whether all that a version's commit binds is there: a mirror, or a replica of a bucket, may show a commit before it.

No prune leaves the newest version without a way to it (FORMAT 13.11), so what that lacks is still to come, or was lost.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dcr_cli.delta.commit import Commit
from dcr_cli.errors import DamagedError, TransportError, UnsupportedError, WrongBaseError
from dcr_cli.fetch.download import fetch_manifest
from dcr_cli.fetch.source import Source
from dcr_cli.remote.documents import fetch_anchor
from dcr_cli.remote.keys import anchor_file_key, anchor_key, digests_key, manifest_key, payload_key
from dcr_cli.remote.version import Published


class ComingError(TransportError):
    """The newest version is committed, and not all of it is there yet."""

    def __init__(self, remote: str, facts: str) -> None:
        quoted = shlex.quote(remote)
        way = f"dcr anchor CHECKPOINT {quoted}, of a checkpoint at that version, makes a way to it"
        super().__init__(remote, facts, hint=f"run the same command again later; if it stays so, {way}")


def is_whole(source: Source, published: Published) -> bool:
    """Whether no object that a version's commit binds is missing; what is damaged is not missing."""
    commit = published.version.delta
    keys = _keys_of_delta(source, published, commit) if commit is not None else _keys_of_anchor(source, published)
    try:
        return all(source.store.stat(key, is_denied_absent=True) is not None for key in keys)
    except (DamagedError, UnsupportedError, WrongBaseError):
        return True


def _keys_of_delta(source: Source, published: Published, commit: Commit) -> Iterator[str]:
    place = published.version.place
    yield manifest_key(place)
    yield digests_key(place)
    _, manifest = fetch_manifest(source.store, published, commit, None)
    yield from (payload_key(place, index) for index in range(len(manifest.payloads)))


def _keys_of_anchor(source: Source, published: Published) -> Iterator[str]:
    place = published.version.place
    yield anchor_key(place)
    anchor = fetch_anchor(source.store, published, source.trust)
    yield from (anchor_file_key(place, file.path) for file in (anchor.files if anchor is not None else ()))
