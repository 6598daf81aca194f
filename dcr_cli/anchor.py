"""Adds the files of a version as they are, an anchor, to a remote (FORMAT 13.6)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcr_cli.arguments import check_apart, check_version
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.patterns import check_recorded_patterns
from dcr_cli.content import Progress, Workers, read_state
from dcr_cli.errors import DamagedError, UnsupportedError, WrongBaseError
from dcr_cli.publisher.anchors import AnchorPlan, publish_anchor
from dcr_cli.remote.documents import fetch_anchor
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import anchor_file_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import SigningKey, Trust, load_signing_key
from dcr_cli.remote.version import AnchorParts, Published
from dcr_cli.store.location import folder_of
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

__all__ = ["AnchorResult", "anchor"]


@dataclass(frozen=True, slots=True)
class AnchorResult:
    """What was published, or would be. `already`: the version had an anchor, all of whose files are there."""

    remote: str
    checkpoint: str
    version: int
    id: str
    target: State
    anchor_bytes: int
    uploaded_bytes: int
    already: bool
    dry_run: bool = False


def anchor(
    checkpoint: str | os.PathLike[str],
    remote: str | os.PathLike[str],
    *,
    version: int | None = None,
    skip: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> AnchorResult:
    """Publish the files of `checkpoint`, which is at a version of `remote`, as that version's anchor.

    Without `version` it is the one of the newest 64 that the checkpoint is at. An anchor that is not whole, or not
    signed with `sign_key`, is published again. A dry run reads the checkpoint and sends nothing; whether the anchor of
    a version that has no delta would be the one that its commit binds, only the sending tells. Raises WrongBaseError if
    the checkpoint is at none, or its anchor would not be the one that the commit binds, NotFoundError, DamagedError,
    ConflictError (the checkpoint changes meanwhile), TransportError.
    """
    check_version(version)
    check_recorded_patterns(skip)
    check_apart({"checkpoint": checkpoint, "remote": folder_of(remote)})
    key = load_signing_key(sign_key, "--sign-key") if sign_key is not None else None
    source = open_checkpoint(checkpoint, skip=skip)
    with open_store(remote, storage_options, limit_bytes_per_second=limit_bytes_per_second) as store:
        log = Log(store, require_history(store).id)
        with Workers(threads(jobs), "read", progress) as workers, source.reader() as reader:
            state, _ = read_state(workers, source, reader)
        found = _version_at(log, state, version)
        if found is None:
            facts = f"is not at version {version}" if version is not None else "is at none of the newest versions"
            raise WrongBaseError(str(source.root), f"{facts} of {store.shown}", hint="dcr verify --remote compares")
        place, parts = found.version.place, found.version.parts
        is_there = _is_there(store, found, key)
        size = sum(identity.size for identity in source.identities.values())
        sent = 0
        if not is_there and not dry_run:
            plan = AnchorPlan(
                log.history, place, state, parts.document_blake3 if isinstance(parts, AnchorParts) else None
            )
            sent = publish_anchor(store, source, plan, key=key, jobs=threads(jobs), progress=progress).sent_bytes
        return AnchorResult(
            store.shown, str(source.root), place.version, place.id, state, size, sent, is_there, dry_run
        )


def _version_at(log: Log, state: State, version: int | None) -> Published | None:
    if version is not None:
        found = log.require(version)
        return found if found.version.target == state else None
    return log.find_state(state, log.newest(0))


def _is_there(store: Store, published: Published, key: SigningKey | None) -> bool:
    """Whether a version has an anchor, signed with `key` if one is given, whose files are there with their sizes."""
    trust = Trust(frozenset((key.public,))) if key is not None else Trust()
    try:
        anchor = fetch_anchor(store, published, trust)
    except (DamagedError, WrongBaseError, UnsupportedError):
        return False
    if anchor is None:
        return False
    for file in anchor.files:
        status = store.stat(anchor_file_key(anchor.place, file.path), is_denied_absent=True)
        if status is None or status.size != file.size:
            return False
    return True
