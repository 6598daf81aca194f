"""The digests of FORMAT.md section 3: of objects, tensors, checkpoints; their texts and sums.

What the tensor digest is computed by is dcr_kernels; which files and tensors there are is the checkpoint's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.errors import DamagedError

TensorDigest = npt.NDArray[np.uint32]

DIGEST_BYTES = 16
BLAKE3_BYTES = 32
_BLAKE3_TEXT = re.compile(r"blake3:([0-9a-f]{64})")
_RECORDS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class State:
    """What identifies the state of a checkpoint: only when both are equal is it the same."""

    content: bytes
    files: bytes


# Objects


def object_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32 bytes of blake3 of `data`."""
    return blake3(data).digest()


class ObjectHasher:
    """blake3 of bytes that come in parts."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hasher.update(data)

    def digest(self) -> bytes:
        return self._hasher.digest()


def blake3_text(digest: bytes) -> str:
    return f"blake3:{digest.hex()}"


def parse_blake3(text: object, what: str) -> bytes:
    """Read the text of a blake3 digest; another algorithm, length or case is DamagedError."""
    match = _BLAKE3_TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise DamagedError(what, "is not a digest: blake3: and 64 lower-case hexadecimal digits")
    return bytes.fromhex(match[1])


# Tensors


def no_digest() -> TensorDigest:
    """Return the digest of no bytes, from which sums start."""
    return np.zeros(4, dtype=np.uint32)


def tensor_digest(data: bytes | memoryview | npt.NDArray[np.generic], offset: int = 0) -> TensorDigest:
    """Return what the bytes `data`, which lie at byte `offset` of their tensor, add to its digest (FORMAT.md 3.2)."""
    import dcr_kernels

    digest: TensorDigest = dcr_kernels.digest(data, offset)
    return digest


def add(first: TensorDigest, second: TensorDigest) -> TensorDigest:
    """Add two partial digests of one tensor."""
    return first + second


def digest_bytes(digest: TensorDigest) -> bytes:
    """Return the 16 bytes of a tensor digest."""
    return digest.astype("<u4", copy=False).tobytes()


def digest_from_bytes(data: bytes) -> TensorDigest:
    """Return the tensor digest whose 16 bytes are `data`."""
    if len(data) != DIGEST_BYTES:
        raise ValueError(f"a tensor digest has {DIGEST_BYTES} bytes, not {len(data)}")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def digest_text(digest: TensorDigest | bytes) -> str:
    return f"sum:{(digest if isinstance(digest, bytes) else digest_bytes(digest)).hex()}"


# Checkpoints


def content_digest(records: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    """Return the content digest of the tensors (name, dtype, shape, 16 bytes of digest), given in canonical order."""
    hasher = blake3()
    parts: list[bytes] = []
    before: str | None = None
    for name, dtype, shape, digest in records:
        # Code points compare as their UTF-8 bytes do.
        if before is not None and name <= before:
            raise ValueError(f"tensor {name!r} is not in canonical order after {before!r}")
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"the digest of tensor {name!r} has {len(digest)} bytes")
        before = name
        encoded = name.encode()
        rank = len(shape)
        parts += (
            struct.pack("<I", len(encoded)),
            encoded,
            struct.pack(f"<BI{rank}Q", DTYPES[dtype].code, rank, *shape),
            digest,
        )
        if len(parts) >= _RECORDS_AT_ONCE:
            hasher.update(b"".join(parts))
            parts.clear()
    hasher.update(b"".join(parts))
    return hasher.digest()


def files_digest(records: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return the files digest of the files (path, kind, blake3), given in canonical order.

    Kind 1 is a shard, whose blake3 is that of its header; 2 and 3, any other file, count as one kind.
    """
    hasher = blake3()
    before: str | None = None
    for path, kind, digest in records:
        if before is not None and path <= before:
            raise ValueError(f"file {path!r} is not in canonical order after {before!r}")
        if kind not in (1, 2, 3) or len(digest) != BLAKE3_BYTES:
            raise ValueError(f"file {path!r} has kind {kind} and a digest of {len(digest)} bytes")
        before = path
        encoded = path.encode()
        hasher.update(struct.pack("<I", len(encoded)) + encoded + bytes([1 if kind == 1 else 2]) + digest)
    return hasher.digest()
