"""The document of decoded changes, `changes.json` (FORMAT 12.1): which bytes of the data beside it are of which tensor.

No number in it is taken for a size or a place before it was checked. What the data says is positions.py's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcr_cli.changes.blocks import is_moved, may_change
from dcr_cli.checkpoint.digest import blake3_text, parse_blake3
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.errors import DamagedError, UnsupportedError

FORMAT = "dcr-changes-2"
# No block has more: so what is held of one in memory does not depend on what a document says.
MOST_ELEMENTS = 1 << 20
_FAMILY = "dcr-changes-"
_ALIGNMENT = 8


class Spot(NamedTuple):
    """Where in the data a block's positions begin, of how many elements, and the bytes of each."""

    begin: int
    elements: int
    position_bytes: int

    @property
    def values_begin(self) -> int:
        """Where its new bits begin."""
        return aligned(self.begin + self.elements * self.position_bytes)

    def end(self, width: int) -> int:
        """Where the next block begins, if its elements have so many bytes."""
        return aligned(self.values_begin + self.elements * width)

    def gaps(self, width: int) -> tuple[slice, slice]:
        """Where zeros lie after its positions, and after its new bits."""
        positions_end = self.begin + self.elements * self.position_bytes
        values_end = self.values_begin + self.elements * width
        return slice(positions_end, self.values_begin), slice(values_end, self.end(width))


@dataclass(frozen=True, slots=True)
class Index:
    """Size and digest of the data, and the blocks of each tensor."""

    data_bytes: int
    data_blake3: bytes
    spots: Mapping[str, Sequence[Spot]]


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode_index(index: Index) -> bytes:
    """Encode the document, its tensors in the order in which they come."""
    document = {
        "format": FORMAT,
        "requires": [],
        "bytes": index.data_bytes,
        "blake3": blake3_text(index.data_blake3),
        "tensors": [[name, *spots] for name, spots in index.spots.items()],
    }
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def decode_index(data: bytes, rows: Mapping[str, TensorRow], what: str) -> Index:
    """Decode the document, which is to be of a delta with these rows.

    DamagedError if it is malformed, or its blocks are not the whole of the data; UnsupportedError if it is another
    dcr's.
    """
    document = strict_json(data, what)
    found = document.get("format") if type(document) is dict else None
    if found != FORMAT:
        if type(found) is str and found.startswith(_FAMILY):
            hint = "have the same dcr pull and serve"
            raise UnsupportedError(what, f"has format {shown(found)}, this dcr reads {FORMAT}", hint=hint)
        raise DamagedError(what, f"its format is not {FORMAT}")
    if document.get("requires") != []:
        facts = f"requires {shown(json.dumps(document.get('requires')))}, unknown to this dcr"
        raise UnsupportedError(what, facts, hint="it needs a newer dcr")
    size, tensors = document.get("bytes"), document.get("tensors")
    if type(size) is not int or size < 0 or type(tensors) is not list or not all(map(_is_tensor, tensors)):
        raise DamagedError(what, "its bytes are no number, or its tensors no names with blocks of three numbers each")
    spots = {name: tuple(Spot(*block) for block in blocks) for name, *blocks in tensors}
    if len(spots) != len(tensors):
        raise DamagedError(what, "names a tensor twice")
    index = Index(size, parse_blake3(document.get("blake3"), what), spots)
    _check_tensors(index, rows, what)
    return index


def _is_tensor(row: Any) -> bool:
    return type(row) is list and len(row) > 1 and type(row[0]) is str and all(map(_is_block, row[1:]))


def _is_block(block: Any) -> bool:
    if type(block) is not list or len(block) != 3 or any(type(number) is not int for number in block):
        return False
    begin, elements, position_bytes = block
    return begin >= 0 and 0 < elements <= MOST_ELEMENTS and position_bytes in (4, 8)


def _check_tensors(index: Index, rows: Mapping[str, TensorRow], what: str) -> None:
    """Raise DamagedError unless the tensors are such as the delta changes, and their blocks tile the data."""
    for name in index.spots:
        row = rows.get(name)
        if row is None or is_moved(row) or not may_change(row):
            raise DamagedError(what, f"tensor {shown(name)} is none that the delta changes")
    spots = ((spot, name) for name, blocks in index.spots.items() for spot in blocks)
    place = 0
    for spot, name in sorted(spots):
        if spot.begin != place:
            facts = f"a block of tensor {shown(name)} begins at byte {spot.begin} of the data, {place} expected"
            raise DamagedError(what, facts)
        place = spot.end(DTYPES[rows[name].dtype].width)
    if place != index.data_bytes:
        raise DamagedError(what, f"its blocks end at byte {place} of the data, which has {index.data_bytes}")
