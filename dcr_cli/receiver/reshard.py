"""The shards of a receiver that keeps its own division into shards: new headers, and its weight map.

Texts that need not change stay as they are, byte for byte; nothing is read or written here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcr_cli.checkpoint.checkpoint import Shard
from dcr_cli.checkpoint.header import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, parse_header, stored_elements
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.errors import UnsupportedError

# Row, first byte in the file, bytes.
OwnPlace = tuple[int, int, int]


class OwnLayout(NamedTuple):
    """The shards of a receiver as `own_layout` has them, and in which of them each tensor is."""

    shards: list[tuple[str, bytes, list[OwnPlace]]]
    shard_of: dict[str, str]


def own_layouts(shards: Sequence[Shard], versions: Sequence[Sequence[TensorRow]]) -> list[OwnLayout]:
    """Divide one version after the other over a receiver's shards, each as the one before left them.

    A version whose tensors are those of the one before has its layout, and is left out; the last one never is.
    """
    layouts: list[OwnLayout] = []
    forms = None
    for number, version in enumerate(versions):
        rows = list(version)
        before, forms = forms, [(row.name, row.dtype, row.shape) for row in rows]
        if forms == before and number < len(versions) - 1:
            continue
        layout = own_layout(shards, rows)
        layouts.append(
            OwnLayout(layout, {rows[number].name: path for path, _, places in layout for number, *_ in places})
        )
        if number < len(versions) - 1:
            shards = [_new_shard(path, raw, places) for path, raw, places in layout]
    return layouts


def _new_shard(path: str, raw: bytes, places: Sequence[OwnPlace]) -> Shard:
    size = len(raw) + sum(size for _, _, size in places)
    return Shard(path, parse_header(raw, size, path), size)


def own_layout(shards: Sequence[Shard], rows: Sequence[TensorRow]) -> list[tuple[str, bytes, list[OwnPlace]]]:
    """Divide the target's tensors over the receiver's `shards`: (path, header with its length, places).

    A tensor stays in its shard; a new one goes to the end of the shard of the one before it in canonical order. A shard
    that would be left empty gets the last tensor of another, because a numbered set of shards must stay complete.
    """
    members = _divide(shards, rows)
    layout = []
    for shard, numbers in zip(shards, members, strict=True):
        entries = [(rows[number].name, rows[number].dtype, rows[number].shape) for number in numbers]
        if entries == [(entry.name, entry.dtype, entry.shape) for entry in shard.header.tensors]:
            raw = shard.header.raw
        else:
            raw = _rewrite_header(shard, [rows[number] for number in numbers])
        begin = len(raw)
        places = []
        for number in numbers:
            size = row_bytes(rows[number])
            places.append((number, begin, size))
            begin += size
        layout.append((shard.path, raw, places))
    return layout


def row_bytes(row: TensorRow) -> int:
    dtype = DTYPES[row.dtype]
    return stored_elements(dtype, row.shape) * dtype.width


def rewrite_weight_map(text: bytes, shard_of: Mapping[str, str], grown_bytes: int, what: str) -> bytes | None:
    """Write a weight map anew for tensors in `shard_of`, all else in it kept; None if it says so already."""
    document: dict[str, Any] = strict_json(text, what)
    old: dict[str, str] = document["weight_map"]
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if old == shard_of and not (grown_bytes and type(total) is int):
        return None
    new = {name: shard_of[name] for name in old if name in shard_of}
    new |= {name: path for name, path in shard_of.items() if name not in new}
    document["weight_map"] = dict(sorted(new.items())) if list(old) == sorted(old) else new
    if isinstance(metadata, dict) and type(total) is int:
        metadata["total_size"] = total + grown_bytes
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _divide(shards: Sequence[Shard], rows: Sequence[TensorRow]) -> list[list[int]]:
    """The rows of each shard, by number, in the order of the data."""
    home = {entry.name: number for number, shard in enumerate(shards) for entry in shard.header.tensors}
    number_of = {row.name: number for number, row in enumerate(rows)}
    members = [[number_of[entry.name] for entry in shard.header.tensors if entry.name in number_of] for shard in shards]
    current = next((home[row.name] for row in rows if row.name in home), 0)
    for number, row in enumerate(rows):
        if row.name in home:
            current = home[row.name]
        else:
            members[current].append(number)
    for number, shard in enumerate(shards):
        if not members[number] and shard.header.tensors:
            members[number].append(_spare(members, number, shard.path))
    return members


def _spare(members: list[list[int]], number: int, path: str) -> int:
    nearest = sorted(range(len(members)), key=lambda other: (abs(other - number), other))
    for other in nearest:
        if len(members[other]) > 1:
            return members[other].pop()
    raise UnsupportedError(
        f"shard {shown(path)}",
        "would be left without a tensor, and no other shard has one to spare",
        hint="start again from a full copy of the target",
    )


def _rewrite_header(shard: Shard, rows: Sequence[TensorRow]) -> bytes:
    old: dict[str, Any] = json.loads(shard.header.raw[LENGTH_BYTES:])
    header: dict[str, Any] = {"__metadata__": old["__metadata__"]} if "__metadata__" in old else {}
    begin = 0
    for row in rows:
        end = begin + row_bytes(row)
        known = {"dtype": row.dtype, "shape": list(row.shape), "data_offsets": [begin, end]}
        header[row.name] = {**old.get(row.name, {}), **known}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        facts = f"its header would have {len(text)} bytes, more than the {MAX_HEADER_BYTES} allowed"
        raise UnsupportedError(f"shard {shown(shard.path)}", facts)
    return struct.pack("<Q", len(text)) + text
