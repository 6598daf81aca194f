"""What a remote says of a version's tensors and files: by the documents of its delta, or those of its anchor.

The bytes of tensors are not fetched.
"""

from __future__ import annotations

from dcr_cli.checkpoint.checkpoint import FileDigest, Tensor
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, Header, parse_header, stored_elements
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.delta.commit import Commit, open_digests, open_manifest
from dcr_cli.delta.document import CONTENT_LIMIT
from dcr_cli.delta.file_rules import RangedFile
from dcr_cli.errors import DamagedError, NotFoundError
from dcr_cli.publisher.bases import Description
from dcr_cli.remote.anchor import ANCHOR_LIMIT, open_anchor
from dcr_cli.remote.keys import Place, anchor_file_key, anchor_key, digests_key, manifest_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store

# What zstd makes of content that cannot be compressed is larger than it by less than this.
OBJECT_LIMIT = CONTENT_LIMIT + (CONTENT_LIMIT >> 7)


def describe(store: Store, published: Published) -> Description:
    """The tensors and files of a version, as its delta's documents, or its anchor's, say."""
    delta = published.version.delta
    place = published.version.place
    return _by_delta(store, place, delta) if delta is not None else _by_anchor(store, published)


def get_object(store: Store, key: str, most_bytes: int) -> bytes:
    """An object that has to be there; NotFoundError if it is not."""
    data = store.get(key, most_bytes=most_bytes, is_denied_absent=True)
    if data is None:
        raise NotFoundError(f"{store.shown}/{key}", "is not there", hint="it was pruned; push a checkpoint")
    return data


def _by_delta(store: Store, place: Place, delta: Commit) -> Description:
    data = get_object(store, manifest_key(place), OBJECT_LIMIT)
    manifest = open_manifest(delta, data, f"{store.shown}/{manifest_key(place)}")
    data = get_object(store, digests_key(place), OBJECT_LIMIT)
    copied = iter(open_digests(delta, manifest, data, f"{store.shown}/{digests_key(place)}"))
    tensors = tuple(_tensor(row.name, row.dtype, row.shape) for row in manifest.tensors)
    digests = {row.name: row.digest or next(copied).tobytes() for row in manifest.tensors}
    files = tuple(FileDigest(row.path, row.kind, row.size, row.blake3) for row in manifest.files)
    return Description(tensors, files, manifest.skipped, digests)


def _by_anchor(store: Store, published: Published) -> Description:
    version = published.version
    key = anchor_key(version.place)
    anchor = open_anchor(version, get_object(store, key, ANCHOR_LIMIT), f"{store.shown}/{key}", Trust())
    tensors, files = [], []
    for file in anchor.files:
        size = file.size
        if file.kind == SHARD:
            header = _header(store, version.place, file)
            size = len(header.raw)
            tensors += [_tensor(entry.name, entry.dtype, entry.shape) for entry in header.tensors]
        files.append(FileDigest(file.path, file.kind, size, file.blake3))
    tensors.sort(key=lambda tensor: tensor.name)
    return Description(tuple(tensors), tuple(files), anchor.skipped, {})


def _header(store: Store, place: Place, file: RangedFile) -> Header:
    key = anchor_file_key(place, file.path)
    what = f"{store.shown}/{key}"
    length = int.from_bytes(store.get_range(key, 0, LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file.size - LENGTH_BYTES):
        raise DamagedError(what, f"is no shard: its header would have {length} bytes")
    raw = store.get_range(key, 0, LENGTH_BYTES + length)
    if object_digest(raw) != file.blake3:
        raise DamagedError(what, "does not have the header that its anchor names: its blake3 differs")
    return parse_header(raw, file.size, what)


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that lies nowhere."""
    kind = DTYPES[dtype]
    return Tensor(name, kind, shape, 0, 0, stored_elements(kind, shape) * kind.width)
