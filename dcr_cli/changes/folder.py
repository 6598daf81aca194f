"""A folder with what a version changes, decoded (FORMAT 12.1): written by one pull, read by all that serve on its host.

Which changes those are is taking.py's matter, which versions' folders there are that of places.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from dcr_cli.changes.blocks import Elements, Said
from dcr_cli.changes.index import Index, Spot, aligned, decode_index, encode_index
from dcr_cli.changes.owned import open_own, open_own_file
from dcr_cli.changes.positions import Positions, fault_in
from dcr_cli.changes.taking import Put
from dcr_cli.checkpoint.digest import ObjectHasher, object_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.delta import Delta
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.durable import NEW_FILE_MODE, File, Folder
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError
from dcr_cli.layout.box import Indices
from dcr_cli.layout.layout import Form
from dcr_cli.remote.keys import place_named
from dcr_cli.remote.version import PUBLISHED_NAME

NAME, DATA_NAME = "changes.json", "changes.data"
_DOCUMENTS = (MANIFEST_NAME, DIGESTS_NAME, PUBLISHED_NAME, COMMIT_NAME)
_LIMIT = 256 << 20
_WIDE = 1 << 32


@dataclass(frozen=True, slots=True)
class Changes:
    """What a delta changes, by tensor: its blocks in the data, which is not copied, and stays what it is also when its
    file has gone."""

    spots: Mapping[str, Sequence[Spot]]
    data: memoryview = field(repr=False)
    dtypes: Mapping[str, str]

    def of(self, tensor: str) -> Iterator[Said]:
        """What is said of a tensor, if anything is, block by block."""
        dtype = uint_dtype(DTYPES[self.dtypes[tensor]].width)
        for spot in self.spots.get(tensor, ()):
            values: Elements = np.frombuffer(self.data, dtype, spot.elements, spot.values_begin)
            yield Said(self.positions(spot).astype(np.int64), values, False)

    def positions(self, spot: Spot) -> Positions:
        """The positions of a block as they lie."""
        return np.frombuffer(self.data, f"<u{spot.position_bytes}", spot.elements, spot.begin)


def has_changes(folder: Path) -> bool:
    """Whether a folder with a delta's documents has what it changes in place of its payloads."""
    return (folder / NAME).exists()


# Writing


def write_changes(root: Folder, new: str, delta: Delta, take: Callable[[Put], None]) -> None:
    """Write what a delta changes, as `take` puts it, and its documents, into the folder `new` below `root`.

    Raises LocalError, and what `take` raises.
    """
    with root.create_file(f"{new}/{DATA_NAME}", NEW_FILE_MODE) as file:
        data = _Data(file)
        take(data.put)
        file.sync()
    for each in _DOCUMENTS:
        root.write_file(f"{new}/{each}", (delta.folder / each).read_bytes(), NEW_FILE_MODE)
    index = data.index([row.name for row in delta.manifest.tensors])
    root.write_file(f"{new}/{NAME}", encode_index(index), NEW_FILE_MODE)


class _Data:
    """The data while it is written, block after block, by any number of threads."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._lock = Lock()
        self._hasher = ObjectHasher()
        self._bytes = 0
        # With the first position of each.
        self._spots: dict[str, list[tuple[int, Spot]]] = {}

    def put(self, tensor: str, positions: Indices, new: Elements) -> None:
        """Write a block of changes, one at least."""
        position_bytes = 4 if int(positions[-1]) < _WIDE else 8
        arrays = (positions.astype(f"<u{position_bytes}"), new)
        data = b"".join(array.tobytes().ljust(aligned(array.nbytes), b"\0") for array in arrays)
        with self._lock:
            self._file.write_at(self._bytes, data)
            self._hasher.update(data)
            spot = Spot(self._bytes, len(positions), position_bytes)
            self._spots.setdefault(tensor, []).append((int(positions[0]), spot))
            self._bytes += len(data)

    def index(self, tensors: Sequence[str]) -> Index:
        """What was written, the tensors in this order."""
        spots = {name: [spot for _, spot in sorted(self._spots[name])] for name in tensors if name in self._spots}
        return Index(self._bytes, self._hasher.digest(), spots)


# Reading


def read_changes(delta: Delta) -> Changes:
    """Read what is beside a delta's documents, and check all of it; what nobody but this user and root can have
    written counts.

    DamagedError if it does not count, is malformed, or has positions that are none; UnsupportedError if it is another
    dcr's; NotFoundError if it has gone; ConflictError if the documents are others now.
    """
    what = str(delta.folder / NAME)
    rows = {row.name: row for row in delta.manifest.tensors}
    root = open_own(delta.folder)
    if root is None:
        raise _gone(delta.folder, "is there no more")
    with root:
        if object_digest(_read(root, COMMIT_NAME, COMMIT_LIMIT)) != delta.commit_blake3:
            raise ConflictError(str(delta.folder), "became that of another version while it was read")
        index = decode_index(_read(root, NAME, _LIMIT), rows, what)
        data = _map(root, index.data_bytes)
    if object_digest(data) != index.data_blake3:
        raise DamagedError(str(delta.folder / DATA_NAME), f"is not the data that {NAME} names")
    changes = Changes(index.spots, data, {name: row.dtype for name, row in rows.items()})
    for name in index.spots:
        fault = _fault_in(changes, name, Form(rows[name].dtype, rows[name].shape))
        if fault is not None:
            raise DamagedError(str(delta.folder / DATA_NAME), f"tensor {shown(name)}: {fault}")
    return changes


def _fault_in(changes: Changes, name: str, form: Form) -> str | None:
    """What is wrong with the blocks of a tensor; None if nothing is."""
    spots = changes.spots[name]
    gaps = (gap for spot in spots for gap in spot.gaps(DTYPES[form.dtype].width))
    if any(any(changes.data[gap]) for gap in gaps):
        return "there is more between positions and new bits than zeros"
    return fault_in([changes.positions(spot) for spot in spots], form.elements)


def hint_beside(folder: Path) -> str:
    """What to do where a version's changes are not in a folder, by those that are there."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted(place.version for place in map(place_named, names) if place is not None)
    if not numbers:
        return "load the module anew, at a newer version"
    there = f"versions {', '.join(map(str, numbers))}" if len(numbers) > 1 else f"version {numbers[0]}"
    return f"the changes of {there} are there: load the module anew, at version {numbers[0] - 1} or later"


def _read(root: Folder, name: str, limit: int) -> bytes:
    with _open(root, name) as file:
        return file.read_all(limit)


def _map(root: Folder, size: int) -> memoryview:
    """The bytes of the data, as they lie."""
    with _open(root, DATA_NAME) as file:
        found = os.fstat(file.fd).st_size
        if found != size:
            facts = f"is not the data that {NAME} names: it has {found} bytes, {size} expected"
            raise DamagedError(str(file.path), facts)
        # Nothing cannot be mapped.
        return memoryview(mmap.mmap(file.fd, size, access=mmap.ACCESS_READ) if size else b"")


def _open(root: Folder, name: str) -> File:
    file = open_own_file(root, name)
    if file is None:
        raise _gone(root.path, f"its {name} is there no more")
    return file


def _gone(folder: Path, facts: str) -> NotFoundError:
    return NotFoundError(str(folder), facts, hint=hint_beside(folder.parent))
