"""What one rank of several publishes of a version (FORMAT 13.9): a table, and the document that binds it.

Which tensors are whose, and what the parts make together, is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dcr_cli.checkpoint.digest import BLAKE3_BYTES, DIGEST_BYTES, blake3_text, object_digest, parse_blake3
from dcr_cli.delta.document import Column, Columns, decode_document, encode_document, take_column
from dcr_cli.delta.line import BYTES_LIMIT, COMMIT_LIMIT, count, decode_line, encode_line, member
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.errors import DamagedError
from dcr_cli.remote.keys import ID_DIGITS, Place, part_key
from dcr_cli.remote.signing import MAX_SIGNATURES_BYTES, Signed, split_signed

PART_KIND = "part"
MOST_RANKS = 65_536
MOST_ATTEMPT_CHARACTERS = 256
BASE, TARGET, BOTH = 1, 2, 3
UNCHANGED_NAME = "unchanged.json"

_SLICE_COLUMNS = (
    ("slice.tensor", "U32"),
    ("slice.side", "U8"),
    ("slice.start", "U64"),
    ("slice.elements", "U64"),
    ("slice.encoding", "U8"),
    ("slice.changed", "U64"),
    ("slice.runs", "U32"),
)
_RUN_COLUMNS = ("run.payload", "run.offset", "run.bytes", "run.blocks")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all ranks have to agree on, and know without talking: it makes the id of the version.

    `previous` is the blake3 of the commit that the version follows, `text` tells this attempt from another one, and
    `source` is the digest of names, sizes and times of the files that are published.
    """

    history: str
    version: int
    previous: bytes
    ranks: int
    text: str
    source: bytes

    @property
    def place(self) -> Place:
        facts = (self.history, str(self.version), self.previous.hex(), str(self.ranks), self.source.hex(), self.text)
        digest = object_digest("".join(f"{each}\n" for each in ("dcr-1 part", *facts)).encode())
        return Place(self.version, digest.hex()[:ID_DIGITS])


@dataclass(frozen=True, slots=True)
class PartCommit:
    """Whose part it is, and the table that it binds."""

    rank: int
    table_blake3: bytes
    table_bytes: int
    created: str
    publisher: str


@dataclass(frozen=True, slots=True)
class SliceRow:
    """What a rank has found of consecutive elements of a tensor.

    `tensor` is the tensor's number among the names of base and target, `side` says in which of them the elements are.
    The digests are what they add to their tensors'; without an encoding nothing changed.
    """

    tensor: int
    side: int
    start: int
    elements: int
    base_digest: bytes
    target_digest: bytes
    encoding: int
    changed: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class PartTable:
    """All of a part: its slices, the runs of the target's files (of rank 0 alone), its payloads in order."""

    slices: tuple[SliceRow, ...]
    file_runs: tuple[tuple[Run, ...], ...]
    payloads: tuple[PayloadRow, ...]


def part_commit_key(place: Place, rank: int) -> str:
    return part_key(place, f"{rank:05d}.json")


def part_table_key(place: Place, rank: int) -> str:
    return part_key(place, f"{rank:05d}.zst")


def unchanged_key(place: Place) -> str:
    return part_key(place, UNCHANGED_NAME)


def encode_part(attempt: Attempt, part: PartCommit) -> bytes:
    """Encode the line of a part's document; a signature may be added to it."""
    members = _agreed(attempt) | {
        "rank": part.rank,
        "table": {"blake3": blake3_text(part.table_blake3), "bytes": part.table_bytes},
        "created": part.created,
        "publisher": part.publisher,
    }
    return encode_line(members, "part", limit=COMMIT_LIMIT - MAX_SIGNATURES_BYTES)


def decode_part(data: bytes, attempt: Attempt, rank: int, what: str) -> tuple[PartCommit, Signed]:
    """Decode the document of a part, and check that it is that of a rank of an attempt; signatures are not checked."""
    signed = split_signed(data, what)
    document = decode_line(signed.line, what)
    for key, expected in (_agreed(attempt) | {"rank": rank}).items():
        if document.get(key) != expected or type(document.get(key)) is not type(expected):
            raise DamagedError(what, f"is not the part of rank {rank} of this attempt: its {key} is another")
    table = member(document, "table", dict, what)
    created, publisher = (member(document, key, str, what) for key in ("created", "publisher"))
    digest = parse_blake3(table.get("blake3"), f"{what}: table blake3")
    return PartCommit(rank, digest, count(table, "bytes", BYTES_LIMIT, what), created, publisher), signed


def encode_unchanged(attempt: Attempt) -> bytes:
    """Encode the word that all parts together change nothing, so that no version will come."""
    return encode_line(_agreed(attempt), "part")


def _agreed(attempt: Attempt) -> dict[str, object]:
    return {
        "history": attempt.history,
        "version": attempt.version,
        "id": attempt.place.id,
        "kind": PART_KIND,
        "ranks": attempt.ranks,
        "attempt": attempt.text,
        "previous": blake3_text(attempt.previous),
        "source": blake3_text(attempt.source),
    }


def encode_table(table: PartTable) -> bytes:
    """Encode the table of a part. Equal tables give equal bytes."""
    slices = table.slices
    runs = [run for each in slices for run in each.runs] + [run for each in table.file_runs for run in each]
    columns: Columns = {
        "slice.tensor": _column(4, (each.tensor for each in slices)),
        "slice.side": _column(1, (each.side for each in slices)),
        "slice.start": _column(8, (each.start for each in slices)),
        "slice.elements": _column(8, (each.elements for each in slices)),
        "slice.encoding": _column(1, (each.encoding for each in slices)),
        "slice.changed": _column(8, (each.changed for each in slices)),
        "slice.runs": _column(4, (len(each.runs) for each in slices)),
        "slice.base": _digests((each.base_digest for each in slices), DIGEST_BYTES),
        "slice.target": _digests((each.target_digest for each in slices), DIGEST_BYTES),
        "file.runs": _column(4, (len(each) for each in table.file_runs)),
        "run.payload": _column(4, (run.payload for run in runs)),
        "run.offset": _column(4, (run.offset for run in runs)),
        "run.bytes": _column(4, (run.bytes for run in runs)),
        "run.blocks": _column(4, (run.blocks for run in runs)),
        "payload.bytes": _column(8, (payload.bytes for payload in table.payloads)),
        "payload.blake3": _digests((payload.blake3 for payload in table.payloads), BLAKE3_BYTES),
    }
    return encode_document(PART_KIND, columns)[0]


def open_table(part: PartCommit, attempt: Attempt, data: bytes, what: str) -> PartTable:
    """Decode the table that a part's document names, having checked that `data` is it."""
    if len(data) != part.table_bytes or object_digest(data) != part.table_blake3:
        raise DamagedError(what, "is not the table that its part names: its blake3 differs")
    columns = decode_document(PART_KIND, data, None, what)
    numbers = {name: take_column(columns, name, dtype, (), what).tolist() for name, dtype in _SLICE_COLUMNS}
    base, target = (take_column(columns, name, "U8", (DIGEST_BYTES,), what) for name in ("slice.base", "slice.target"))
    file_runs = take_column(columns, "file.runs", "U32", (), what).tolist()
    rows = len(numbers["slice.tensor"])
    if any(len(column) != rows for column in (*numbers.values(), base, target)):
        raise DamagedError(what, "its columns of slices do not have the same length")
    payloads = _payloads(columns, what)
    all_runs = iter(_runs(columns, attempt, part.rank, len(payloads), what))
    per_slice = [_taken(all_runs, size, what) for size in numbers["slice.runs"]]
    per_file = tuple(_taken(all_runs, size, what) for size in file_runs)
    if next(all_runs, None) is not None:
        raise DamagedError(what, "has runs that belong to nothing")
    slices = tuple(
        SliceRow(tensor, side, start, elements, old.tobytes(), new.tobytes(), encoding, changed, own_runs)
        for tensor, side, start, elements, encoding, changed, _, old, new, own_runs in zip(
            *numbers.values(), base, target, per_slice, strict=True
        )
    )
    return PartTable(slices, per_file, payloads)


def _payloads(columns: Columns, what: str) -> tuple[PayloadRow, ...]:
    sizes = take_column(columns, "payload.bytes", "U64", (), what).tolist()
    digests = take_column(columns, "payload.blake3", "U8", (BLAKE3_BYTES,), what)
    if len(sizes) != len(digests):
        raise DamagedError(what, "its columns of payloads do not have the same length")
    return tuple(PayloadRow(size, digest.tobytes()) for size, digest in zip(sizes, digests, strict=True))


def _runs(columns: Columns, attempt: Attempt, rank: int, payloads: int, what: str) -> list[Run]:
    columns_of_runs = [take_column(columns, name, "U32", (), what).tolist() for name in _RUN_COLUMNS]
    if len({len(column) for column in columns_of_runs}) != 1:
        raise DamagedError(what, "its columns of runs do not have the same length")
    runs = [Run(*facts) for facts in zip(*columns_of_runs, strict=True)]
    for run in runs:
        turn, owner = divmod(run.payload, attempt.ranks)
        if owner != rank or turn >= payloads:
            raise DamagedError(what, f"has a run in payload {run.payload}, which is not one of rank {rank}")
    return runs


def _taken(runs: Iterable[Run], size: int, what: str) -> tuple[Run, ...]:
    taken = tuple(islice(runs, size))
    if len(taken) < size:
        raise DamagedError(what, "has fewer runs than its slices and files")
    return taken


def _column(width: int, numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, np.dtype(f"<u{width}"))


def _digests(digests: Iterable[bytes], size: int) -> Column:
    rows: Sequence[bytes] = list(digests)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, size)
