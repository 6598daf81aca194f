"""Says what a delta or a version of a remote holds, having checked all that can be checked without its base.

Of a version only the documents are fetched, and more only if that is asked for. It writes nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.header import DTYPES, stored_elements
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.documents import Documents
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Run, TensorRow
from dcr_cli.delta.payload import PayloadReader
from dcr_cli.errors import NotFoundError, UsageError
from dcr_cli.remote.checking import check_anchor, check_payloads
from dcr_cli.remote.documents import fetch_anchor, fetch_documents
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import anchor_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust, trust_in
from dcr_cli.remote.version import COMMIT_KIND
from dcr_cli.store.location import is_url, locate
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

Progress = Callable[[str, int, int], None]

_VERSION_ADDRESS = re.compile(r"(.+)@([0-9]{1,10})", re.DOTALL)
_KINDS = {SHARD: "shard", SIDECAR: "sidecar", WEIGHT_MAP: "weight map"}


@dataclass(frozen=True, slots=True)
class EncodingFacts:
    """The pieces of one encoding, and the bytes of their runs."""

    encoding: str
    pieces: int
    changed_elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor that does not equal its source; `source` is its own name, unless it was renamed or continues another
    one, None if it has none.

    `changed_elements` are as in `ShowResult`; `is_whole`: fewer of them may have changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str | None
    encoding: str
    elements: int
    changed_elements: int
    is_whole: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class ShownVersion:
    """A version of a remote by its commit; `signers` are the trusted keys that have signed it, `created` and
    `publisher` its publisher's own words, and `has_anchor` says whether an anchor of it is there."""

    remote: str
    version: int
    id: str
    created: str
    publisher: str
    signers: tuple[str, ...]
    has_anchor: bool


@dataclass(frozen=True, slots=True)
class ShowResult:
    """What a delta holds, in the words of `DiffResult` as far as it can tell without the base.

    `new` tensors do not continue one of the base of their name and shape: added or replaced. They do not count as
    changed. Of `changed_elements`, `whole_elements` are of tensors that are sent whole; fewer of these may have
    changed. `rows` are the tensors whose elements are in the delta, those that take the most bytes first; `sent_files`
    are files whose bytes are in it, `removed_files` sidecars of the base that the target has not. `version` says which
    one it is, if it lies in a remote. `is_deep`: all payloads were read and are right, as always those in a folder.
    """

    delta: str
    base: State
    target: State
    delta_bytes: int
    document_bytes: int
    payloads: int
    payload_bytes: int
    tensors: int
    elements: int
    dense_bytes: int
    changed_tensors: int
    changed_elements: int
    whole_elements: int
    encodings: tuple[EncodingFacts, ...]
    new: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    files: int
    sent_files: tuple[str, ...]
    removed_files: tuple[str, ...]
    skipped: tuple[str, ...]
    rows: tuple[ChangedTensor, ...]
    version: ShownVersion | None
    is_deep: bool


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file of an anchor."""

    path: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ShowAnchorResult:
    """A version of a remote of which there is an anchor and no delta; if that `is_only_way`, there never was one.
    `is_deep`: all of its files were fetched and are right."""

    anchor: str
    version: ShownVersion
    target: State
    anchor_bytes: int
    is_only_way: bool
    is_deep: bool
    files: tuple[ShownFile, ...]
    skipped: tuple[str, ...]


@overload
def show(
    delta: Path,
    *,
    deep: bool = False,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ShowResult: ...


@overload
def show(
    delta: str,
    *,
    deep: bool = False,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ShowResult | ShowAnchorResult: ...


def show(
    delta: str | Path,
    *,
    deep: bool = False,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ShowResult | ShowAnchorResult:
    """Check a delta's documents and the digest of every payload, and say what is in it.

    A text like `s3://bucket/path@42` is version 42 of a remote, unless a folder has this name; a Path never is. Of such
    a version payloads and files are fetched and checked only if `deep`, and with `trusted_keys` one of them has to have
    signed it. Raises NotFoundError, DamagedError, WrongBaseError, UnsupportedError, TransportError, UsageError.
    """
    workers = threads(jobs)
    address = _version_address(delta) if isinstance(delta, str) else None
    if address is not None:
        with open_store(address[0], storage_options, limit_bytes_per_second=limit_bytes_per_second) as store:
            return _show_version(store, address[1], trust_in(trusted_keys), (workers, progress) if deep else None)
    if isinstance(delta, str) and is_url(delta):
        raise UsageError(locate(delta).shown, "is the address of a remote", hint="REMOTE@N is its version N")
    inspect = f"dcr inspect {shlex.quote(str(delta))} says what a checkpoint holds"
    opened = open_delta(delta, if_checkpoint=inspect)
    tell = _teller(progress, opened.commit.payload_bytes)
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        payloads.verify_all(workers, tell)
    return _result(opened, str(opened.folder), opened.document_bytes)


def _version_address(text: str) -> tuple[str, int] | None:
    match = _VERSION_ADDRESS.fullmatch(text)
    return (match[1], int(match[2])) if match is not None and not os.path.lexists(text) else None


def _show_version(
    store: Store, number: int, trust: Trust, deep: tuple[int, Progress | None] | None
) -> ShowResult | ShowAnchorResult:
    """Show version `number`; `deep` are the threads and progress with which to fetch and check all of it."""
    log = Log(store, require_history(store).id, trust)
    published = log.find(number)
    version = published.version
    has_anchor = store.stat(anchor_key(version.place), is_denied_absent=True) is not None
    shown = ShownVersion(
        remote=store.shown,
        version=version.number,
        id=version.place.id,
        created=version.created,
        publisher=version.publisher,
        signers=tuple(key.hex() for key in trust.signers(published.signed, COMMIT_KIND)),
        has_anchor=has_anchor,
    )
    name = f"{store.shown}@{number}"
    documents = fetch_documents(store, published)
    if documents is not None:
        if deep is not None:
            tell = _teller(deep[1], documents.commit.payload_bytes)
            check_payloads(store, version.place, documents.manifest.payloads, jobs=deep[0], tell=tell)
        size = len(published.data) + documents.commit.manifest_bytes + documents.commit.digests_bytes
        return replace(_result(documents, name, size), version=shown, is_deep=deep is not None)
    anchor = fetch_anchor(store, published, trust)
    if anchor is None:
        facts, hint = "is there no more: its objects were removed", f"dcr log {shlex.quote(store.shown)}"
        raise NotFoundError(name, facts, hint=hint)
    if deep is not None:
        check_anchor(store, anchor, jobs=deep[0], tell=_teller(deep[1], anchor.bytes))
    return ShowAnchorResult(
        anchor=name,
        version=shown,
        target=anchor.target,
        anchor_bytes=anchor.bytes,
        is_only_way=version.delta is None,
        is_deep=deep is not None,
        files=tuple(ShownFile(file.path, _KINDS[file.kind], file.size) for file in anchor.files),
        skipped=anchor.skipped,
    )


def _teller(progress: Progress | None, total: int) -> Callable[[int], None]:
    """What is told the bytes of each part that is done; from any thread."""
    lock = threading.Lock()
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        with lock:
            done += size
        if progress is not None:
            progress("show", done, total)

    return tell


def _result(delta: Documents, name: str, document_bytes: int) -> ShowResult:
    rows: list[ChangedTensor] = []
    tensors = elements = dense_bytes = 0
    new, renamed = [], []
    sums: dict[str, list[int]] = {}
    removed = set(delta.manifest.removed)
    for row in delta.manifest.tensors:
        count = stored_elements(DTYPES[row.dtype], row.shape)
        tensors += 1
        elements += count
        dense_bytes += count * DTYPES[row.dtype].width
        is_renamed = row.source is not None and row.source != row.name and row.source in removed
        if is_renamed:
            renamed.append((str(row.source), row.name))
        is_new = not is_renamed and (row.source != row.name or row.is_reshaped)
        if is_new:
            new.append(row.name)
        if row.pieces:
            rows.append(_changed(row, count, is_new=is_new))
        for piece in row.pieces:
            facts = sums.setdefault(Encoding(piece.encoding).label, [0, 0, 0])
            facts[0] += 1
            facts[1] += piece.changed
            facts[2] += _bytes_of(piece.runs)
    continued = {source for source, _ in renamed}
    return ShowResult(
        delta=name,
        base=delta.commit.base,
        target=delta.commit.target,
        delta_bytes=document_bytes + delta.commit.payload_bytes,
        document_bytes=document_bytes,
        payloads=delta.commit.payload_count,
        payload_bytes=delta.commit.payload_bytes,
        tensors=tensors,
        elements=elements,
        dense_bytes=dense_bytes,
        changed_tensors=sum(row.changed_elements > 0 for row in rows),
        changed_elements=sum(row.changed_elements for row in rows),
        whole_elements=sum(row.changed_elements for row in rows if row.is_whole),
        encodings=tuple(EncodingFacts(name, *facts) for name, facts in sorted(sums.items(), key=lambda s: -s[1][2])),
        new=tuple(new),
        removed=tuple(name for name in delta.manifest.removed if name not in continued),
        renamed=tuple(renamed),
        files=len(delta.manifest.files),
        sent_files=tuple(file.path for file in delta.manifest.files if file.runs),
        removed_files=tuple(file.path for file in delta.manifest.removed_files),
        skipped=tuple(delta.manifest.skipped),
        rows=tuple(sorted(rows, key=lambda row: (-row.bytes, row.name))),
        version=None,
        is_deep=True,
    )


def _changed(row: TensorRow, elements: int, *, is_new: bool) -> ChangedTensor:
    labels = dict.fromkeys(Encoding(piece.encoding).label for piece in row.pieces)
    return ChangedTensor(
        name=row.name,
        dtype=row.dtype,
        shape=row.shape,
        source=row.source,
        encoding="+".join(labels),
        elements=elements,
        changed_elements=0 if is_new else sum(piece.changed for piece in row.pieces),
        is_whole=any(piece.encoding == Encoding.WHOLE for piece in row.pieces),
        bytes=sum(_bytes_of(piece.runs) for piece in row.pieces),
    )


def _bytes_of(runs: tuple[Run, ...]) -> int:
    return sum(run.bytes for run in runs)
