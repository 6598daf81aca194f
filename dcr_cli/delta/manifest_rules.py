"""The rules of a manifest that need no base (FORMAT 7 and 9), checked on whole columns.

What the columns become is manifest.py's matter. Every check is linear in the columns, or a sort of them, so that a
hostile manifest costs no more than a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES_BY_CODE, LENGTH_BYTES
from dcr_cli.checkpoint.names import safe_path, shown
from dcr_cli.checkpoint.parts import is_top_shard, is_weight_map
from dcr_cli.delta.boxes import EntangledError, find_overlap
from dcr_cli.delta.document import HEADER_LIMIT, Columns
from dcr_cli.delta.encoding import BLOCK_BYTES, Encoding
from dcr_cli.delta.file_rules import check_file_parts, check_file_sizes, check_skipped
from dcr_cli.delta.tables import SOURCE_NONE, SOURCE_TABLE, Numbers, Tables, open_tables, sums
from dcr_cli.errors import DamagedError, UnsupportedError

TENSOR_BITS_LIMIT = 1 << 64
BOX_RANK_LIMIT = 64
PIECES_LIMIT = 65_536
PAYLOAD_DATA_LIMIT = 64 << 20
# Of a whole payload, header included.
MOST_PAYLOAD_BYTES = LENGTH_BYTES + HEADER_LIMIT + PAYLOAD_DATA_LIMIT
PAYLOAD_COUNT_LIMIT = 1_000_000

_DTYPE_CODES = np.array(sorted(DTYPES_BY_CODE), np.int64)
_BITS = np.array([DTYPES_BY_CODE[code].bits if code in DTYPES_BY_CODE else 0 for code in range(256)], np.int64)
_WIDTHS = np.maximum(_BITS // 8, 1)


def check_tables(columns: Columns, what: str) -> Tables:
    """Check all rules on the columns of a manifest that need no base; DamagedError or UnsupportedError names `what`."""
    tables = open_tables(columns, what)
    _check_names(tables, what)
    elements, widths = _check_tensors(tables, what)
    piece_elements = _check_boxes(tables, elements, what)
    _check_pieces(tables, elements, widths, piece_elements, what)
    _check_files(tables, what)
    _check_runs(tables, what)
    return tables


def _check_names(tables: Tables, what: str) -> None:
    removed = set(tables.removed)
    kept = removed.intersection(tables.names) if removed else removed
    if kept:
        raise DamagedError(what, f"tensor {shown(min(kept))} is removed and in the target")
    indices = tables.columns["tensor.source"]
    named = np.unique(indices[indices >= SOURCE_TABLE])
    if len(named) and named[-1] - SOURCE_TABLE >= len(tables.sources):
        raise DamagedError(what, f"tensor.source is {named[-1]}, there are {len(tables.sources)} sources")
    if len(named) != len(tables.sources):
        raise DamagedError(what, f"{len(tables.sources) - len(named)} entries of source are the source of no tensor")


def _check_tensors(tables: Tables, what: str) -> tuple[Numbers, Numbers]:
    """Check dtypes, shapes and numbers of pieces: the elements of every tensor, and their width."""
    columns = tables.columns
    codes, pieces, sources = columns["tensor.dtype"], columns["tensor.pieces"], columns["tensor.source"]
    is_known = np.isin(codes, _DTYPE_CODES)
    _refuse(~is_known, lambda i: f"tensor {shown(tables.names[i])} has unknown dtype {codes[i]}", what)
    elements = _stored_elements(tables, what)
    _refuse(
        (pieces > 0) & (elements == 0),
        lambda i: f"tensor {shown(tables.names[i])} has no elements, but pieces",
        what,
    )
    _refuse(
        (pieces == 0) & (elements > 0) & (sources == SOURCE_NONE),
        lambda i: f"tensor {shown(tables.names[i])} has neither source nor pieces",
        what,
    )
    _refuse(
        pieces > PIECES_LIMIT,
        lambda i: f"tensor {shown(tables.names[i])} has {pieces[i]} pieces, at most {PIECES_LIMIT} are allowed",
        what,
    )
    return elements, _WIDTHS[codes]


def _stored_elements(tables: Tables, what: str) -> Numbers:
    """The element count of every tensor; of the packed dtypes, bytes."""
    codes, shape = tables.columns["tensor.dtype"], tables.columns["tensor.shape"]
    bits = _BITS[codes]
    ranked = np.flatnonzero(np.diff(tables.shape_at))
    starts = tables.shape_at[ranked]
    elements = np.ones(len(codes), np.int64)
    if len(ranked):
        dimensions = np.maximum(shape, 1)
        with np.errstate(over="ignore"):
            estimates = np.multiply.reduceat(dimensions.astype(np.float64), starts) * bits[ranked]
        products = np.multiply.reduceat(dimensions, starts).view(np.int64)
        is_empty = np.minimum.reduceat(shape, starts) == 0
        # Far below the limit the 64-bit product is exact, far above the estimate is enough; between, count exactly.
        for row in np.flatnonzero(~is_empty & (estimates >= TENSOR_BITS_LIMIT / 4)):
            tensor = ranked[row]
            if estimates[row] < TENSOR_BITS_LIMIT * 4:
                exact = math.prod(shape[tables.shape_at[tensor] : tables.shape_at[tensor + 1]].tolist())
                if exact * int(bits[tensor]) < TENSOR_BITS_LIMIT:
                    products[row] = exact
                    continue
            raise DamagedError(what, f"tensor {shown(tables.names[tensor])} has 2^64 bits or more")
        elements[ranked] = np.where(is_empty, 0, products)
    packed = bits < 8
    eights, rest = np.divmod(elements, 8)
    _refuse(
        packed & (rest * bits % 8 != 0),
        lambda i: f"tensor {shown(tables.names[i])}: {elements[i]} packed elements do not fill whole bytes",
        what,
    )
    return np.where(packed, eights * bits + rest * bits // 8, elements)


def _check_boxes(tables: Tables, elements: Numbers, what: str) -> Numbers:
    """Check that boxes lie in their tensors and apart from each other: the elements of every piece."""
    columns = tables.columns
    owners = np.repeat(np.arange(len(tables.names)), columns["tensor.pieces"])
    counts = elements[owners]
    is_boxed = columns["piece.box"] == 1
    ranks = np.diff(tables.shape_at)
    _refuse(
        ~is_boxed & (columns["tensor.pieces"][owners] > 1),
        lambda i: f"tensor {shown(tables.names[owners[i]])} has a piece that is all of it, and others",
        what,
    )
    may_have_boxes = (ranks > 0) & (ranks <= BOX_RANK_LIMIT) & (_BITS[columns["tensor.dtype"]] >= 8)
    _refuse(
        is_boxed & ~may_have_boxes[owners],
        lambda i: f"tensor {shown(tables.names[owners[i]])} has a piece with a box, its dtype and rank allow none",
        what,
    )
    boxed = np.flatnonzero(is_boxed)
    for rank in np.unique(ranks[owners[boxed]]):
        pieces = boxed[ranks[owners[boxed]] == rank]
        counts[pieces] = _check_boxes_of_rank(tables, pieces, owners[pieces], int(rank), what)
    return counts


def _check_boxes_of_rank(tables: Tables, pieces: Numbers, owners: Numbers, rank: int, what: str) -> Numbers:
    shapes = tables.columns["tensor.shape"][tables.shape_at[owners][:, None] + np.arange(rank)]
    boxes = tables.columns["box"][tables.box_at[pieces][:, None] + np.arange(3 * rank)].reshape(-1, 3, rank)
    starts, steps, counts = boxes[:, 0], boxes[:, 1], boxes[:, 2]
    fits = (steps >= 1) & (counts >= 1) & (starts < shapes)
    # By division, since start + (count - 1) * step may not fit 64 bits.
    fits &= (counts - 1) <= (shapes - 1 - starts) // np.maximum(steps, 1)
    _refuse(
        ~fits.all(axis=1),
        lambda i: f"tensor {shown(tables.names[owners[i]])} has a box that does not lie in its shape",
        what,
    )
    steps[counts == 1] = 1
    try:
        overlap = find_overlap(owners, boxes.astype(np.int64))
    except EntangledError as error:
        raise DamagedError(what, str(error)) from error
    if overlap is not None:
        raise DamagedError(what, f"tensor {shown(tables.names[owners[overlap[0]]])} has pieces that overlap")
    elements: Numbers = counts.prod(axis=1).astype(np.int64)
    return elements


def _check_pieces(tables: Tables, elements: Numbers, widths: Numbers, piece_elements: Numbers, what: str) -> None:
    columns = tables.columns
    owners = np.repeat(np.arange(len(tables.names)), columns["tensor.pieces"])
    encodings, changed = columns["piece.encoding"], columns["piece.changed"]

    def tensor(piece: int) -> str:
        return shown(tables.names[owners[piece]])

    unknown = np.flatnonzero(~np.isin(encodings, list(Encoding)))
    if len(unknown):
        facts = f"tensor {tensor(unknown[0])} has encoding {encodings[unknown[0]]}, unknown to this dcr"
        raise UnsupportedError(what, facts, hint="it needs a newer dcr")
    total = piece_elements.astype(np.uint64)
    is_whole = encodings == Encoding.WHOLE
    _refuse(
        (changed < 1) | (changed > total),
        lambda i: f"tensor {tensor(i)}: {changed[i]} of {total[i]} elements of a piece changed",
        what,
    )
    _refuse(
        is_whole & (changed != total),
        lambda i: f"tensor {tensor(i)}: a whole piece of {total[i]} elements says that {changed[i]} changed",
        what,
    )
    has_source = columns["tensor.source"] != SOURCE_NONE
    _refuse(
        ~is_whole & ~has_source[owners], lambda i: f"tensor {tensor(i)} has no source, and is not coded whole", what
    )
    # Pieces of one tensor are disjoint, so that their sum does not exceed its elements.
    covered = sums(piece_elements, tables.piece_at)
    _refuse(
        ~has_source & (covered != elements),
        lambda i: (
            f"tensor {shown(tables.names[i])} has no source, and its pieces are {covered[i]} elements of {elements[i]}"
        ),
        what,
    )
    # A piece without runs has no blocks, so that it is refused here too.
    blocks = sums(columns["run.blocks"], tables.run_at[: tables.pieces + 1])
    expected = -(-piece_elements // (BLOCK_BYTES // widths[owners]))
    _refuse(
        blocks != expected,
        lambda i: f"tensor {tensor(i)}: the runs of a piece have {blocks[i]} blocks, {expected[i]} expected",
        what,
    )


def _check_files(tables: Tables, what: str) -> None:
    columns, paths = tables.columns, tables.paths
    kinds, sizes, runs = columns["file.kind"], columns["file.size"], columns["file.runs"]
    for path in tables.removed_paths:
        safe_path(path, what)
    _check_removed_files(tables, what)
    for each in (paths, tables.removed_paths):
        check_skipped(tables.skipped, each, what)
    check_file_parts(paths, kinds.tolist(), what)
    check_file_sizes(paths, kinds.tolist(), sizes.tolist(), what)
    blocks = sums(columns["run.blocks"], tables.run_at[tables.pieces :])
    expected = np.maximum(-(-sizes.astype(np.int64) // BLOCK_BYTES), 1)
    _refuse(
        (runs > 0) & (blocks != expected),
        lambda i: f"file {shown(paths[i])}: its runs have {blocks[i]} blocks, {expected[i]} expected",
        what,
    )


def _check_removed_files(tables: Tables, what: str) -> None:
    kept = set(tables.removed_paths).intersection(tables.paths) if tables.removed_paths else ()
    if kept:
        raise DamagedError(what, f"file {shown(min(kept))} is removed and in the target")
    for path in tables.removed_paths:
        if is_top_shard(path) or is_weight_map(path):
            raise DamagedError(what, f"file {shown(path)} is removed, but cannot be a sidecar")


def _check_runs(tables: Tables, what: str) -> None:
    columns = tables.columns
    payloads, sizes, blocks = columns["run.payload"], columns["run.bytes"], columns["run.blocks"]
    file_bytes = columns["payload.bytes"].astype(np.uint64)
    if len(file_bytes) > PAYLOAD_COUNT_LIMIT:
        raise DamagedError(what, f"has {len(file_bytes)} payloads, at most {PAYLOAD_COUNT_LIMIT} are allowed")
    limit = MOST_PAYLOAD_BYTES
    _refuse(
        (file_bytes > limit) | (file_bytes <= LENGTH_BYTES),
        lambda i: f"payload {i} has {file_bytes[i]} bytes, at most {limit} are allowed",
        what,
    )
    _refuse(payloads >= len(file_bytes), lambda i: f"run {i} is in payload {payloads[i]} of {len(file_bytes)}", what)
    _refuse(blocks == 0, lambda i: f"run {i} has no block", what)
    # Every block takes at least the byte of its size. So memory for a run's blocks is bounded by bytes that are there.
    _refuse(sizes < blocks, lambda i: f"run {i} has {blocks[i]} blocks in {sizes[i]} bytes", what)
    ends = columns["run.offset"].astype(np.uint64) + sizes
    room = np.minimum(file_bytes - np.uint64(LENGTH_BYTES), PAYLOAD_DATA_LIMIT)[payloads]
    _refuse(ends > room, lambda i: f"run {i} ends at byte {ends[i]} of payload {payloads[i]}, after its end", what)


def _refuse(is_bad: NDArray[np.bool_], facts: Callable[[int], str], what: str) -> None:
    if is_bad.any():
        raise DamagedError(what, facts(int(np.argmax(is_bad))))
