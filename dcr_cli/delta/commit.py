"""The commit of a delta (FORMAT 8): what binds its documents and payloads, written last.

Signing it, and the history and version that a remote adds, are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import State, blake3_text, object_digest, parse_blake3
from dcr_cli.delta.document import COPY_DELTA, refuse_text
from dcr_cli.delta.line import BYTES_LIMIT, count, decode_line, encode_line, member, state_members, state_of
from dcr_cli.delta.manifest import Manifest, decode_digests, decode_manifest
from dcr_cli.delta.manifest_rules import PAYLOAD_COUNT_LIMIT
from dcr_cli.errors import DamagedError


@dataclass(frozen=True, slots=True)
class Commit:
    """The states that a delta leads from and to, and the digests of its parts."""

    base: State
    target: State
    manifest_blake3: bytes
    manifest_decoded_blake3: bytes
    manifest_bytes: int
    digests_blake3: bytes
    digests_bytes: int
    payload_count: int
    payload_bytes: int
    created: str
    publisher: str


def encode_commit(commit: Commit) -> bytes:
    """Encode `commit` as one line of JSON with sorted keys."""
    return encode_line(commit_members(commit), "commit")


def decode_commit(data: bytes, what: str) -> Commit:
    """Decode a commit and check all its members; those that are not known are passed over."""
    return commit_of(decode_line(data, what), what)


def commit_members(commit: Commit) -> dict[str, Any]:
    """The members of a commit's document."""
    return {
        "base": state_members(commit.base),
        "target": state_members(commit.target),
        "manifest": {
            "blake3": blake3_text(commit.manifest_blake3),
            "decoded": blake3_text(commit.manifest_decoded_blake3),
            "bytes": commit.manifest_bytes,
        },
        "digests": {"blake3": blake3_text(commit.digests_blake3), "bytes": commit.digests_bytes},
        "payloads": {"count": commit.payload_count, "bytes": commit.payload_bytes},
        "created": commit.created,
        "publisher": commit.publisher,
    }


def commit_of(document: dict[str, Any], what: str) -> Commit:
    """Read the members of a commit's document."""
    manifest, digests, payloads = (member(document, key, dict, what) for key in ("manifest", "digests", "payloads"))
    return Commit(
        base=state_of(document, "base", what),
        target=state_of(document, "target", what),
        manifest_blake3=parse_blake3(manifest.get("blake3"), f"{what}: manifest blake3"),
        manifest_decoded_blake3=parse_blake3(manifest.get("decoded"), f"{what}: manifest decoded"),
        manifest_bytes=count(manifest, "bytes", BYTES_LIMIT, f"{what}: manifest"),
        digests_blake3=parse_blake3(digests.get("blake3"), f"{what}: digests blake3"),
        digests_bytes=count(digests, "bytes", BYTES_LIMIT, f"{what}: digests"),
        payload_count=count(payloads, "count", PAYLOAD_COUNT_LIMIT + 1, f"{what}: payloads"),
        payload_bytes=count(payloads, "bytes", BYTES_LIMIT, f"{what}: payloads"),
        created=member(document, "created", str, what),
        publisher=member(document, "publisher", str, what),
    )


def open_manifest(commit: Commit, data: bytes, what: str) -> Manifest:
    """Decode the manifest that `commit` names, having checked that `data` is it."""
    _check_object(data, commit.manifest_bytes, commit.manifest_blake3, what)
    manifest = decode_manifest(data, commit.manifest_decoded_blake3, what)
    if len(manifest.payloads) != commit.payload_count:
        facts = f"lists {len(manifest.payloads)} payloads, the commit {commit.payload_count}"
        raise DamagedError(what, facts)
    total = sum(payload.bytes for payload in manifest.payloads)
    if total != commit.payload_bytes:
        raise DamagedError(what, f"lists payloads of {total} bytes, the commit of {commit.payload_bytes}")
    return manifest


def open_digests(commit: Commit, manifest: Manifest, data: bytes, what: str) -> NDArray[np.uint8]:
    """Decode the digests that `commit` names, having checked that `data` is they: [tensors without pieces, 16]."""
    _check_object(data, commit.digests_bytes, commit.digests_blake3, what)
    return decode_digests(data, sum(not row.pieces for row in manifest.tensors), what)


def _check_object(data: bytes, size: int, blake3: bytes, what: str) -> None:
    refuse_text(data, what)
    if len(data) != size:
        raise DamagedError(what, f"has {len(data)} bytes, the commit names {size}", hint=COPY_DELTA)
    if object_digest(data) != blake3:
        raise DamagedError(what, "is not the object that the commit names: its blake3 differs", hint=COPY_DELTA)
