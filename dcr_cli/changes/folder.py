"""A folder with what a version changes, decoded (FORMAT 12.1): written by one pull, read by all that serve on its host.

Which changes those are is taking.py's matter, which versions' folders there are that of places.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dcr_cli.changes.blocks import Elements, Said
from dcr_cli.changes.taking import Taken
from dcr_cli.checkpoint.digest import blake3_text, object_digest, parse_blake3
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.delta import Delta
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME
from dcr_cli.durable import NEW_FILE_MODE, Folder, open_folder
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Indices

FORMAT = "dcr-changes-1"
NAME, DATA_NAME = "changes.json", "changes.data"
_LIMIT = 256 << 20
_ALIGNMENT = 8
_WIDE = 1 << 32

# Where positions begin in the data, how many there are, and the bytes of each.
Spot = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a delta changes, by tensor: where in the data its positions begin, how many, and how wide they are."""

    spots: Mapping[str, Spot]
    data: bytes = field(repr=False)
    dtypes: Mapping[str, str]

    def of(self, tensor: str) -> Iterator[Said]:
        """What is said of a tensor, if anything is."""
        if tensor not in self.spots:
            return
        begin, count, width = self.spots[tensor]
        positions: Indices = np.frombuffer(self.data, f"<u{width}", count, begin).astype(np.int64)
        dtype = uint_dtype(DTYPES[self.dtypes[tensor]].width)
        values: Elements = np.frombuffer(self.data, dtype, count, _aligned(begin + count * width))
        yield Said(positions, values, False)


def has_changes(folder: Path) -> bool:
    """Whether a folder with a delta's documents has what it changes in place of its payloads."""
    return (folder / NAME).exists()


def write_changes(root: Folder, new: str, delta: Delta, taken: Sequence[Taken]) -> None:
    """Write what a delta changes, and its documents, into the folder `new` below `root`. Raises LocalError."""
    data, spots = _encode(taken)
    document = {
        "format": FORMAT,
        "requires": [],
        "bytes": len(data),
        "blake3": blake3_text(object_digest(data)),
        "tensors": [[each.tensor, *spot] for each, spot in zip(taken, spots, strict=True)],
    }
    for each in (MANIFEST_NAME, DIGESTS_NAME, COMMIT_NAME):
        root.write_file(f"{new}/{each}", (delta.folder / each).read_bytes(), NEW_FILE_MODE)
    root.write_file(f"{new}/{DATA_NAME}", data, NEW_FILE_MODE)
    root.write_file(f"{new}/{NAME}", json.dumps(document, ensure_ascii=False).encode() + b"\n", NEW_FILE_MODE)


def _encode(taken: Sequence[Taken]) -> tuple[bytes, list[Spot]]:
    """The data of changes, and where each tensor's are in it."""
    data, spots = bytearray(), []
    for each in taken:
        width = 4 if int(each.positions[-1]) < _WIDE else 8
        spots.append((len(data), len(each.positions), width))
        for array in (each.positions.astype(f"<u{width}"), each.new):
            data += array.tobytes().ljust(_aligned(array.nbytes), b"\0")
    return bytes(data), spots


def read_changes(delta: Delta) -> Changes:
    """Read what is beside a delta's documents; DamagedError if it is not whole, UnsupportedError if it needs a newer
    dcr."""
    what = str(delta.folder / NAME)
    dtypes = {row.name: row.dtype for row in delta.manifest.tensors}
    with open_folder(delta.folder) as root:
        size, blake3, spots = _decode(strict_json(root.read(NAME, _LIMIT) or b"", what), what)
        data = root.read(DATA_NAME, size)
    if data is None or object_digest(data) != blake3:
        raise DamagedError(str(delta.folder / DATA_NAME), f"is not the data that {NAME} names")
    for name, (begin, count, width) in spots.items():
        if name not in dtypes:
            raise DamagedError(what, f"tensor {shown(name)} is none of the delta's")
        if _aligned(begin + count * width) + count * DTYPES[dtypes[name]].width > size:
            raise DamagedError(what, f"the changes of tensor {shown(name)} are not all in the data")
    return Changes(spots, data, dtypes)


def _decode(document: Any, what: str) -> tuple[int, bytes, dict[str, Spot]]:
    """The size and digest of the data, and where each tensor's changes begin in it."""
    if type(document) is not dict or document.get("format") != FORMAT:
        found = document.get("format") if type(document) is dict else None
        if type(found) is str and found.startswith("dcr-changes-"):
            raise UnsupportedError(what, f"has format {shown(found)}, this dcr reads {FORMAT}")
        raise DamagedError(what, f"its format is not {FORMAT}")
    if document.get("requires") != []:
        facts = f"requires {shown(json.dumps(document.get('requires')))}, unknown to this dcr"
        raise UnsupportedError(what, facts, hint="it needs a newer dcr")
    size, rows = document.get("bytes"), document.get("tensors")
    if type(size) is not int or size < 0 or type(rows) is not list or not all(map(_is_row, rows)):
        raise DamagedError(what, "its bytes are no number, or its tensors no rows of a name and three numbers")
    return size, parse_blake3(document.get("blake3"), what), {name: (*spot,) for name, *spot in rows}


def _is_row(row: Any) -> bool:
    if type(row) is not list or len(row) != 4 or type(row[0]) is not str:
        return False
    return all(type(number) is int and number >= 0 for number in row[1:]) and row[3] in (4, 8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
