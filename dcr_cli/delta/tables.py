"""A manifest's columns as tables that refer to each other by row: opened, and as long as they say of each other.

What the rows mean, and what else must hold for them, is manifest_rules.py's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import BLAKE3_BYTES, DIGEST_BYTES
from dcr_cli.checkpoint.patterns import MAX_PATTERNS_BYTES
from dcr_cli.delta.document import Columns, decode_texts, take_column, text_rows
from dcr_cli.errors import DamagedError

# Values of tensor.source: none, the base tensor of the same name, or an entry of `source`, counted from the last.
SOURCE_NONE, SOURCE_SAME, SOURCE_TABLE = 0, 1, 2

_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "tensor.dtype": ("U8", ()),
    "tensor.rank": ("U32", ()),
    "tensor.shape": ("U64", ()),
    "tensor.source": ("U32", ()),
    "tensor.pieces": ("U32", ()),
    "tensor.digest": ("U8", (DIGEST_BYTES,)),
    "piece.encoding": ("U8", ()),
    "piece.changed": ("U64", ()),
    "piece.box": ("U8", ()),
    "box": ("U64", ()),
    "piece.runs": ("U32", ()),
    "file.kind": ("U8", ()),
    "file.size": ("U64", ()),
    "file.blake3": ("U8", (BLAKE3_BYTES,)),
    "file.runs": ("U32", ()),
    "removed.blake3": ("U8", (BLAKE3_BYTES,)),
    "run.payload": ("U32", ()),
    "run.offset": ("U32", ()),
    "run.bytes": ("U32", ()),
    "run.blocks": ("U32", ()),
    "payload.bytes": ("U64", ()),
    "payload.blake3": ("U8", (BLAKE3_BYTES,)),
}

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tables:
    """A manifest's columns, and where a row's part of another column begins: `x_at` has an entry more than rows."""

    columns: Columns
    names: Sequence[str]
    sources: list[str]
    removed: list[str]
    paths: list[str]
    removed_paths: list[str]
    skipped: list[str]
    shape_at: Numbers
    piece_at: Numbers
    digest_at: Numbers
    box_at: Numbers
    run_at: Numbers  # of the pieces, then of the files

    @property
    def pieces(self) -> int:
        return len(self.columns["piece.encoding"])


def open_tables(columns: Columns, what: str) -> Tables:
    """Check that every column is there and as long as the others say."""
    columns = columns | {name: take_column(columns, name, *form, what) for name, form in _COLUMNS.items()}
    decode_texts(columns, "tensor.name", what)
    # Of all that a manifest says these would take the most memory.
    names = text_rows(columns, "tensor.name", what)
    paths = decode_texts(columns, "file.path", what)
    removed_paths = decode_texts(columns, "removed.file", what)
    rows = {"tensor": len(names), "file": len(paths), "removed": len(removed_paths)}
    for name in ("piece.encoding", "run.payload", "payload.bytes"):
        rows[name.partition(".")[0]] = len(columns[name])

    def expect(name: str, count: int) -> None:
        if len(columns[name]) != count:
            raise DamagedError(what, f"column {name} has {len(columns[name])} rows, {count} expected")

    for name in _COLUMNS:
        if name not in ("tensor.shape", "tensor.digest", "box"):
            expect(name, rows[name.partition(".")[0]])
    ranks, boxed = columns["tensor.rank"].astype(np.int64), columns["piece.box"]
    has_pieces = columns["tensor.pieces"] > 0
    piece_at = _offsets(columns["tensor.pieces"])
    if piece_at[-1] != rows["piece"]:
        raise DamagedError(what, f"tensor.pieces adds up to {piece_at[-1]}, there are {rows['piece']} pieces")
    if rows["piece"] and boxed.max() > 1:
        raise DamagedError(what, f"piece.box is {boxed.max()}, neither 0 nor 1")
    run_at = _offsets(np.concatenate((columns["piece.runs"], columns["file.runs"])))
    if run_at[-1] != rows["run"]:
        raise DamagedError(what, f"piece.runs and file.runs add up to {run_at[-1]}, there are {rows['run']} runs")
    shape_at, digest_at = _offsets(ranks), _offsets(has_pieces)
    box_at = _offsets(np.repeat(3 * ranks, columns["tensor.pieces"]) * boxed)
    expect("tensor.shape", int(shape_at[-1]))
    expect("tensor.digest", int(digest_at[-1]))
    expect("box", int(box_at[-1]))
    return Tables(
        columns=columns,
        names=names,
        sources=decode_texts(columns, "source", what),
        removed=decode_texts(columns, "removed", what),
        paths=paths,
        removed_paths=removed_paths,
        skipped=decode_texts(columns, "skipped", what, any_order_limit=MAX_PATTERNS_BYTES),
        shape_at=shape_at,
        piece_at=piece_at,
        digest_at=digest_at,
        box_at=box_at,
        run_at=run_at,
    )


def _offsets(lengths: NDArray[np.generic]) -> Numbers:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def sums(values: NDArray[np.generic], at: Numbers) -> Numbers:
    """Sums of the parts of `values` that `at` bounds; right, in wrapping arithmetic, if each fits 63 bits."""
    sums = _offsets(values)
    return sums[at[1:]] - sums[at[:-1]]
