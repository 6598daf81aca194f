"""Says what a delta or a version of a remote holds, having checked all that can be checked without its base.

Of a version only the documents are fetched, and more only if that is asked for. It writes nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from dcr_cli.arguments import version_of
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.errors import NotFoundError, UsageError
from dcr_cli.remote.checking import check_anchor, check_payloads
from dcr_cli.remote.documents import fetch_anchor, fetch_documents
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import anchor_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust, trust_in
from dcr_cli.remote.version import COMMIT_KIND
from dcr_cli.show_result import ShowAnchorResult, ShownFile, ShownVersion, ShowResult, result_of
from dcr_cli.store.location import is_login, is_url, locate
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from dcr_cli.work import threads

Progress = Callable[[str, int, int], None]

_VERSION_ADDRESS = re.compile(r"(.+)@([0-9]+)", re.DOTALL)
_KINDS = {SHARD: "shard", SIDECAR: "sidecar", WEIGHT_MAP: "weight map"}


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
        with open_store(
            address[0], storage_options, limit_bytes_per_second=limit_bytes_per_second, is_look=not deep
        ) as store:
            return _show_version(
                store, address[1], trust_in(trusted_keys, "--trusted-key"), (workers, progress) if deep else None
            )
    if isinstance(delta, str) and (is_url(delta) or is_login(delta)):
        raise UsageError(locate(delta).shown, "is the address of a remote", hint="REMOTE@N is its version N")
    inspect = f"dcr inspect {shlex.quote(str(delta))} says what a checkpoint holds"
    opened = open_delta(delta, if_checkpoint=inspect)
    tell = _teller(progress, opened.commit.payload_bytes)
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        payloads.verify_all(workers, tell)
    return result_of(opened, str(opened.folder), opened.document_bytes)


def _version_address(text: str) -> tuple[str, int] | None:
    match = _VERSION_ADDRESS.fullmatch(text)
    return (match[1], version_of(match[2], "version")) if match is not None and not os.path.lexists(text) else None


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
        return replace(result_of(documents, name, size), version=shown, is_deep=deep is not None)
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
