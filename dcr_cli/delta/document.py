"""What the documents of a delta have in common: their format's name, and columns in a safetensors file in a zstd frame.

What the columns mean is manifest.py's matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import read_safetensors, write_safetensors
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.frame import decode_frame, encode_frame, stated_bytes
from dcr_cli.delta.rows import Rows
from dcr_cli.errors import DamagedError, UnsupportedError

FORMAT = "dcr-1"
CONTENT_LIMIT = 256 << 20
WINDOW_LIMIT = 128 << 20
HEADER_LIMIT = 64 << 10
TEXT_LIMIT = 64 << 10
# What helps when parts of a delta do not belong together.
COPY_DELTA = "copy the whole delta again"
# Up to here the time for the strongest level does not matter, and most manifests are as small.
STRONG_LEVEL_BYTES = 1 << 20
STRONG_LEVEL, FAST_LEVEL = 19, 3

Column = NDArray[Any]
Columns = dict[str, Column]

_TEXTS_AT_ONCE = 1 << 14
# Of what came, how much tells what it is, and how pages begin.
_START_BYTES = 256
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<!--", b"<title", b"<body", b"<script", b"<meta")
_SEE_ANSWER = "fetch its address with curl or a browser, and read what the server says"
_OTHER_VERSION = re.compile(r"dcr-[1-9][0-9]{0,8}")
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8")}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def check_format(value: object, what: str) -> None:
    """Refuse what is not of this format's version."""
    if value == FORMAT:
        return
    if isinstance(value, str) and _OTHER_VERSION.fullmatch(value):
        raise UnsupportedError(what, f"has format {value}, this dcr reads {FORMAT}", hint="it needs a newer dcr")
    raise DamagedError(what, f"its format is not {FORMAT}")


def check_requires(value: object, what: str) -> None:
    """Refuse what needs a feature that is not known here; version 1 has none."""
    if not isinstance(value, list) or not all(isinstance(feature, str) for feature in value):
        raise DamagedError(what, "requires is not a list of strings")
    if value:
        raise UnsupportedError(what, f"requires {listed(value)}, unknown to this dcr", hint="it needs a newer dcr")


def refuse_answer(data: bytes, what: str) -> None:
    """Say so when what servers tell of an error or a login stands in for a document: a page, XML, or pretty JSON."""
    start = data[:_START_BYTES].lstrip().lower()
    if start.startswith(b"<"):
        looks = "HTML" if start.startswith(_PAGES) else "XML, in which object stores tell of an error"
    elif start.startswith((b"{\n", b"{\r")):
        looks = "JSON of several lines, in which web services tell of an error"
    else:
        return
    raise DamagedError(what, f"looks like {looks}, not like a part of a delta", hint=_SEE_ANSWER)


def refuse_text(data: bytes, what: str) -> None:
    """The same of what has to be a zstd frame, as which no text begins: any JSON is refused too."""
    refuse_answer(data, what)
    if data[:1] == b"{":
        raise DamagedError(what, "looks like JSON, not like a part of a delta", hint=_SEE_ANSWER)


def encode_document(kind: str, columns: Mapping[str, Column]) -> tuple[bytes, bytes]:
    """Pack `columns`, in this order, as a document of `kind`: the object, and what it decodes to."""
    metadata = {"format": FORMAT, "kind": kind, "requires": json.dumps([])}
    decoded = write_safetensors(
        {
            name: (_DTYPE_NAMES[column.dtype], column.shape, np.ascontiguousarray(column).data)
            for name, column in columns.items()
        },
        metadata,
    )
    return encode_frame(decoded, STRONG_LEVEL if len(decoded) <= STRONG_LEVEL_BYTES else FAST_LEVEL), decoded


def decode_document(kind: str, data: bytes, decoded_blake3: bytes | None, what: str) -> Columns:
    """Unpack a document of `kind`: its columns of U8, U32 and U64, views of one buffer. Others are left out."""
    refuse_text(data, what)
    try:
        decoded = decode_frame(data, stated_bytes(data, CONTENT_LIMIT, WINDOW_LIMIT), WINDOW_LIMIT)
    except ValueError as error:
        raise DamagedError(what, str(error)) from error
    if decoded_blake3 is not None and object_digest(decoded) != decoded_blake3:
        raise DamagedError(what, "does not decode to what the commit names")
    header, content = read_safetensors(decoded, what, max_header_bytes=HEADER_LIMIT)
    check_format(header.metadata.get("format"), what)
    if header.metadata.get("kind") != kind:
        raise DamagedError(what, f"is not of kind {kind}")
    check_requires(strict_json(header.metadata.get("requires", "").encode(), f"{what}: requires"), what)
    return {
        entry.name: np.frombuffer(content[entry.begin : entry.end], _DTYPES[entry.dtype]).reshape(entry.shape)
        for entry in header.tensors
        # More dimensions than any column has would be more than NumPy can shape, too.
        if entry.dtype in _DTYPES and len(entry.shape) <= 2
    }


def take_column(columns: Columns, name: str, dtype: str, row: tuple[int, ...], what: str) -> Column:
    """The column `name`, whose rows have shape `row`."""
    column = columns.get(name)
    if column is None or column.dtype != _DTYPES[dtype]:
        raise DamagedError(what, f"has no column {name} of {dtype}")
    if column.ndim != 1 + len(row) or column.shape[1:] != row:
        raise DamagedError(what, f"column {name} has shape {list(column.shape)}")
    return column


def encode_texts(name: str, texts: Iterable[str]) -> Columns:
    """The two columns of a text column."""
    encoded = [text.encode() for text in texts]
    return {
        f"{name}.bytes": np.frombuffer(b"".join(encoded), np.uint8),
        f"{name}.lengths": np.fromiter(map(len, encoded), np.dtype("<u4"), len(encoded)),
    }


def decode_texts(columns: Columns, name: str, what: str, *, any_order_limit: int | None = None) -> list[str]:
    """Read the texts of a text column, each at most 64 KiB, in canonical order and each once.

    With `any_order_limit` any texts are fine, but not more than so many.
    """
    data = take_column(columns, f"{name}.bytes", "U8", (), what)
    lengths = take_column(columns, f"{name}.lengths", "U32", (), what)
    if any_order_limit is not None and len(lengths) > any_order_limit:
        raise DamagedError(what, f"{name} has {len(lengths)} entries, at most {any_order_limit} are allowed")
    ends = np.cumsum(lengths, dtype=np.int64)
    if (ends[-1] if len(ends) else 0) != len(data):
        raise DamagedError(what, f"the lengths of {name} do not add up to its {len(data)} bytes")
    if len(lengths) and lengths.max() > TEXT_LIMIT:
        raise DamagedError(what, f"an entry of {name} has {lengths.max()} bytes, at most {TEXT_LIMIT} are allowed")
    texts: list[str] = []
    start = 0
    for first in range(0, len(ends), _TEXTS_AT_ONCE):
        bounds = [start, *ends[first : first + _TEXTS_AT_ONCE].tolist()]
        texts += _texts(data[start : bounds[-1]].tobytes(), bounds, name, what)
        start = bounds[-1]
        if any_order_limit is None:
            # Part by part, so that a short text a million times over is refused before it takes its memory.
            _check_ascending(texts[max(0, first - 1) :], name, what)
    return texts


def text_rows(columns: Columns, name: str, what: str) -> Rows[str]:
    """The texts of a text column that `decode_texts` has read, each made again whenever it is asked for."""
    data = columns[f"{name}.bytes"]
    at = np.zeros(len(columns[f"{name}.lengths"]) + 1, np.int64)
    np.cumsum(columns[f"{name}.lengths"], out=at[1:])

    def make(start: int, stop: int) -> list[str]:
        bounds = at[start : stop + 1].tolist()
        return _texts(data[bounds[0] : bounds[-1]].tobytes(), bounds, name, what)

    return Rows(len(at) - 1, make)


def _texts(encoded: bytes, bounds: list[int], name: str, what: str) -> list[str]:
    start = bounds[0]
    try:
        if encoded.isascii():
            text = encoded.decode("ascii")
            return [text[one - start : end - start] for one, end in pairwise(bounds)]
        return [encoded[one - start : end - start].decode() for one, end in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise DamagedError(what, f"an entry of {name} is not UTF-8") from error


def _check_ascending(texts: list[str], name: str, what: str) -> None:
    # Code points compare as their UTF-8 bytes do.
    for before, text in pairwise(texts):
        if before >= text:
            raise DamagedError(what, f"{name}: {shown(text)} after {shown(before)} is not in canonical order")
