"""The commit of a delta (FORMAT 8): what binds its documents and payloads, written last.

Signing it, and the history and version that a remote adds, are not its business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import State, blake3_text, object_digest, parse_blake3
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.document import COPY_DELTA, FORMAT, check_format, check_requires, refuse_web_page
from dcr_cli.delta.manifest import Manifest, decode_digests, decode_manifest
from dcr_cli.delta.manifest_rules import PAYLOAD_COUNT_LIMIT
from dcr_cli.errors import DamagedError

COMMIT_LIMIT = 64 << 10
_BYTES_LIMIT = 1 << 63


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
    document = {
        "format": FORMAT,
        "requires": [],
        "base": _state_members(commit.base),
        "target": _state_members(commit.target),
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
    line = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > COMMIT_LIMIT:
        raise DamagedError("commit", f"would have {len(line)} bytes, at most {COMMIT_LIMIT} are allowed")
    return line


def decode_commit(data: bytes, what: str) -> Commit:
    """Decode a commit and check all its members; those that are not known are passed over."""
    refuse_web_page(data, what)
    if len(data) > COMMIT_LIMIT:
        raise DamagedError(what, f"has {len(data)} bytes, at most {COMMIT_LIMIT} are allowed")
    document = strict_json(data, what, hint=COPY_DELTA)
    if not isinstance(document, dict):
        raise DamagedError(what, "is not a JSON object")
    check_format(document.get("format"), what)
    check_requires(document.get("requires"), what)
    if not data.endswith(b"\n") or data.count(b"\n") > 1 or not _is_sorted(document):
        raise DamagedError(what, "is not one line of JSON with sorted keys and a newline at its end")
    manifest, digests, payloads = (_member(document, key, dict, what) for key in ("manifest", "digests", "payloads"))
    return Commit(
        base=_state(_member(document, "base", dict, what), f"{what}: base"),
        target=_state(_member(document, "target", dict, what), f"{what}: target"),
        manifest_blake3=parse_blake3(manifest.get("blake3"), f"{what}: manifest blake3"),
        manifest_decoded_blake3=parse_blake3(manifest.get("decoded"), f"{what}: manifest decoded"),
        manifest_bytes=_count(manifest, "bytes", _BYTES_LIMIT, f"{what}: manifest"),
        digests_blake3=parse_blake3(digests.get("blake3"), f"{what}: digests blake3"),
        digests_bytes=_count(digests, "bytes", _BYTES_LIMIT, f"{what}: digests"),
        payload_count=_count(payloads, "count", PAYLOAD_COUNT_LIMIT + 1, f"{what}: payloads"),
        payload_bytes=_count(payloads, "bytes", _BYTES_LIMIT, f"{what}: payloads"),
        created=_member(document, "created", str, what),
        publisher=_member(document, "publisher", str, what),
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
    refuse_web_page(data, what)
    if len(data) != size:
        raise DamagedError(what, f"has {len(data)} bytes, the commit names {size}", hint=COPY_DELTA)
    if object_digest(data) != blake3:
        raise DamagedError(what, "is not the object that the commit names: its blake3 differs", hint=COPY_DELTA)


def _state_members(state: State) -> dict[str, str]:
    return {"content": blake3_text(state.content), "files": blake3_text(state.files)}


def _state(members: dict[str, Any], what: str) -> State:
    content, files = (parse_blake3(members.get(key), f"{what} {key}") for key in ("content", "files"))
    return State(content=content, files=files)


def _member(document: dict[str, Any], key: str, kind: type[Any], what: str) -> Any:
    value = document.get(key)
    if not isinstance(value, kind):
        raise DamagedError(what, f"{key} is {'missing' if value is None else 'not of the right type'}")
    return value


def _count(members: dict[str, Any], key: str, limit: int, what: str) -> int:
    value = members.get(key)
    # A bool is an int to Python, not to JSON.
    if type(value) is not int or not 0 <= value < limit:
        raise DamagedError(what, f"{key} is not a number from 0 to {limit - 1}")
    return value


def _is_sorted(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_sorted(member) for member in value)
    return not isinstance(value, dict) or (
        list(value) == sorted(value) and all(_is_sorted(member) for member in value.values())
    )
