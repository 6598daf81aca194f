"""Whether what a version's documents name is there, and is what they say: payloads, and the files of an anchor.

Nothing is kept of what is fetched for it but the digests of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from dcr_cli.checkpoint.digest import (
    ObjectHasher,
    TensorDigest,
    add,
    content_digest,
    digest_bytes,
    no_digest,
    object_digest,
    tensor_digest,
)
from dcr_cli.checkpoint.header import LENGTH_BYTES, Header, header_bytes, parse_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.delta.file_rules import RANGE_BYTES, RangedFile
from dcr_cli.delta.manifest import PayloadRow
from dcr_cli.delta.payload import check_payload_start
from dcr_cli.errors import DamagedError
from dcr_cli.remote.anchor import Anchor
from dcr_cli.remote.keys import Place, anchor_file_key, anchor_key, payload_key
from dcr_cli.store.store import Store

Tell = Callable[[int], None]
Given = TypeVar("Given")
Got = TypeVar("Got")

# Of a shard's first bytes, how many tell how long its header is.
_START_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorFound:
    """A tensor of an anchor's shard, and the 16 bytes of its digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def check_size(store: Store, key: str, size: int) -> None:
    """Raise DamagedError unless an object is there and has `size` bytes. It is not read."""
    status = store.stat(key, is_denied_absent=True)
    if status is None:
        raise _missing(store, key)
    if status.size != size:
        raise DamagedError(f"{store.shown}/{key}", f"has {status.size} bytes, {size} expected")


def check_payload(store: Store, place: Place, index: int, row: PayloadRow) -> None:
    """Fetch a payload; DamagedError unless it is the one that the manifest names, and is one in itself."""
    key = payload_key(place, index)
    what = f"{store.shown}/{key}"
    data = store.get(key, most_bytes=row.bytes, size=row.bytes, is_denied_absent=True)
    if data is None:
        raise _missing(store, key)
    if object_digest(data) != row.blake3:
        raise DamagedError(what, "is not the payload that the manifest names: its blake3 differs")
    start = LENGTH_BYTES + header_bytes(data[:_START_BYTES], len(data), what)
    view = memoryview(data)
    check_payload_start(view, len(data), index, object_digest(view[start:]), what)


def check_payloads(store: Store, place: Place, rows: Sequence[PayloadRow], *, jobs: int, tell: Tell) -> None:
    """Fetch all payloads of a version, some at a time; DamagedError for the first that is not right."""

    def check(index: int) -> None:
        check_payload(store, place, index, rows[index])
        tell(rows[index].bytes)

    _all(check, range(len(rows)), jobs)


def check_anchor(store: Store, anchor: Anchor, *, jobs: int, tell: Tell) -> None:
    """Fetch all files of an anchor, some at a time; DamagedError unless they are the state that it is of."""
    found = _all(lambda file: check_anchor_file(store, anchor, file, tell), anchor.files, jobs)
    check_content(anchor, [tensor for each in found for tensor in each], f"{store.shown}/{anchor_key(anchor.place)}")


def _all(work: Callable[[Given], Got], items: Iterable[Given], jobs: int) -> list[Got]:
    with ThreadPoolExecutor(jobs, "dcr-check") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_anchor_file(store: Store, anchor: Anchor, file: RangedFile, tell: Tell) -> list[TensorFound]:
    """Fetch a file of an anchor; DamagedError unless every range has its digest. Returns the tensors in it."""
    key = anchor_file_key(anchor.place, file.path)
    what = f"{store.shown}/{key}"
    if store.stat(key, is_denied_absent=True) is None:
        raise _missing(store, key)
    ranges = _Ranges(file, what)
    shard = _Shard(file.size, what) if file.kind == SHARD else None
    whole = ObjectHasher()
    for chunk in store.stream(key, size=file.size):
        ranges.update(chunk)
        if shard is not None:
            shard.update(chunk)
        else:
            whole.update(chunk)
        tell(len(chunk))
    ranges.finish()
    found = shard.header_blake3() if shard is not None else whole.digest()
    if found != file.blake3:
        raise DamagedError(what, "is not the file that the anchor names: its blake3 differs")
    return shard.tensors() if shard is not None else []


def check_content(anchor: Anchor, tensors: list[TensorFound], what: str) -> None:
    """Raise DamagedError unless the tensors of an anchor's files make up the state of its version."""
    by_name = sorted(tensors, key=lambda tensor: tensor.name)
    for first, second in pairwise(by_name):
        if first.name == second.name:
            raise DamagedError(what, f"has tensor {shown(first.name)} in two of its files")
    content = content_digest((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in by_name)
    if content != anchor.target.content:
        raise DamagedError(what, "the tensors of its files do not make up the content digest of its target")


class _Ranges:
    """The digests of a file's ranges, as its bytes come."""

    def __init__(self, file: RangedFile, what: str) -> None:
        self._file = file
        self._what = what
        self._number = 0
        self._bytes = 0
        self._hasher = ObjectHasher()

    def update(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while len(view):
            part = view[: RANGE_BYTES - self._bytes]
            self._hasher.update(part)
            self._bytes += len(part)
            view = view[len(part) :]
            if self._bytes == RANGE_BYTES:
                self._end()

    def finish(self) -> None:
        if self._bytes:
            self._end()

    def _end(self) -> None:
        if self._hasher.digest() != self._file.ranges[self._number]:
            begin = self._number * RANGE_BYTES
            facts = (
                f"its bytes {begin} to {begin + self._bytes - 1} are not what the anchor names: their blake3 differs"
            )
            raise DamagedError(self._what, facts)
        self._number, self._bytes, self._hasher = self._number + 1, 0, ObjectHasher()


class _Shard:
    """The header of a shard, and the digests of its tensors, as its bytes come."""

    def __init__(self, size: int, what: str) -> None:
        self._size = size
        self._what = what
        self._start = bytearray()
        self._header: Header | None = None
        self._digests: list[TensorDigest] = []
        self._at = 0  # Of the data.
        self._tensor = 0  # The first one that does not end before that.

    def update(self, chunk: bytes) -> None:
        if self._header is None:
            self._start += chunk
            chunk = self._parse()
        header, view = self._header, memoryview(chunk)
        while header is not None and len(view):
            tensor = header.tensors[self._tensor]
            part = view[: tensor.end - self._at]
            if len(part):
                found = tensor_digest(part, self._at - tensor.begin)
                self._digests[self._tensor] = add(self._digests[self._tensor], found)
            self._at += len(part)
            view = view[len(part) :]
            if self._at == tensor.end:
                self._tensor += 1

    def header_blake3(self) -> bytes:
        return object_digest(self._require().raw)

    def tensors(self) -> list[TensorFound]:
        rows = zip(self._require().tensors, self._digests, strict=True)
        return [TensorFound(entry.name, entry.dtype, entry.shape, digest_bytes(digest)) for entry, digest in rows]

    def _parse(self) -> bytes:
        """Parse the header once all of it is here: what has come of the data."""
        if len(self._start) < min(_START_BYTES, self._size):
            return b""
        end = LENGTH_BYTES + header_bytes(bytes(self._start[:_START_BYTES]), self._size, self._what)
        if len(self._start) < end:
            return b""
        self._header = parse_header(bytes(self._start[:end]), self._size, self._what)
        self._digests = [no_digest()] * len(self._header.tensors)
        rest, self._start = bytes(self._start[end:]), bytearray()
        return rest

    def _require(self) -> Header:
        if self._header is None:
            raise DamagedError(self._what, "is empty, not a safetensors file")
        return self._header


def _missing(store: Store, key: str) -> DamagedError:
    return DamagedError(f"{store.shown}/{key}", "is missing, though what is there names it")
