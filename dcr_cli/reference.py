"""What a checkpoint should hold, as digests: the target of a delta, a version of a remote, or the state that its own
record names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.documents import Documents
from dcr_cli.durable import open_folder
from dcr_cli.errors import LocalError, NotFoundError
from dcr_cli.fetch.position import read_position
from dcr_cli.receiver.record import STATE_NAME, TABLE_NAME, read_record
from dcr_cli.remote.documents import fetch_anchor, fetch_documents
from dcr_cli.remote.history import require_history
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class ReferenceTensor:
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """Tensors by name, sidecars as path -> blake3, and the patterns of files that are no part of it."""

    name: str
    tensors: Mapping[str, ReferenceTensor]
    sidecars: Mapping[str, bytes]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateReference:
    """All tensors together by their content digest; sidecars and patterns as in `Reference`."""

    name: str
    content: bytes
    sidecars: Mapping[str, bytes]
    skipped: tuple[str, ...]


def reference_of_delta(folder: str | Path) -> Reference:
    """The target of the delta in `folder`."""
    delta = open_delta(folder, if_checkpoint="compare with a checkpoint by --against")
    return _of_documents(f"target of delta {folder}", delta)


def reference_of_remote(
    store: Store, checkpoint: str | Path, version: int | None, trust: Trust
) -> Reference | StateReference:
    """A version of a remote by its documents alone; if not told which, the one that `checkpoint` was pulled to, or else
    the newest.

    Where it has no delta, or none any more, its anchor tells only what all tensors are together. NotFoundError if there
    is no such version or nothing of it any more, WrongBaseError if it has to be signed and is not, or if the remote has
    another one than was pulled.
    """
    published = _find_version(store, checkpoint, version, trust)
    name = f"version {published.version.number} of {store.shown}"
    documents = fetch_documents(store, published)
    if documents is not None:
        return _of_documents(name, documents)
    anchor = fetch_anchor(store, published, trust)
    if anchor is None:
        facts, hint = "is there no more: its objects were removed", f"dcr log {shlex.quote(store.shown)}"
        raise NotFoundError(name, facts, hint=hint)
    sidecars = {file.path: file.blake3 for file in anchor.files if file.kind == SIDECAR}
    return StateReference(name, anchor.target.content, sidecars, anchor.skipped)


def reference_of_record(checkpoint: str | Path) -> Reference:
    """The state that the last apply to `checkpoint` left in it.

    NotFoundError if there is no record of it that is whole, LocalError if this process may not read it.
    """
    record, place = None, Path(checkpoint) / STATE_FOLDER
    if place.is_dir():
        with open_folder(place) as home:
            record = read_record(home)
    if record is None and any(
        os.path.exists(place / name) and not os.access(place / name, os.R_OK) for name in (STATE_NAME, TABLE_NAME)
    ):
        raise LocalError(str(checkpoint), "has a record that this process may not read", hint="run as its owner")
    if record is None:
        facts = "has no record of the state it should be in; only an apply or a pull leaves one"
        hint = f"dcr verify {shlex.quote(str(checkpoint))} --remote REMOTE, --delta DELTA or --against CHECKPOINT"
        raise NotFoundError(str(checkpoint), facts, hint=hint)
    return Reference(
        name=f"the state that {checkpoint} records",
        tensors={row.name: ReferenceTensor(row.dtype, row.shape, row.digest) for row in record.tensors},
        sidecars={file.path: file.blake3 for file in record.files if file.kind == SIDECAR},
        skipped=record.skipped,
    )


def _find_version(store: Store, checkpoint: str | Path, version: int | None, trust: Trust) -> Published:
    log = Log(store, require_history(store).id, trust)
    if version is not None:
        return log.find(version)
    place = Path(checkpoint) / STATE_FOLDER
    position = None
    if place.is_dir():
        with open_folder(place) as home:
            position = read_position(home)
    if position is not None and position.history == log.history:
        return log.check_known(position.known, str(checkpoint))
    return log.find(log.newest(0))


def _of_documents(name: str, documents: Documents) -> Reference:
    return Reference(
        name=name,
        tensors={row.name: ReferenceTensor(row.dtype, row.shape, digest) for row, digest in documents.tensors()},
        sidecars={file.path: file.blake3 for file in documents.manifest.files if file.kind == SIDECAR},
        skipped=tuple(documents.manifest.skipped),
    )
