"""Reads what a rank has published as its part, and finds out whether all that this names is still there.

Waiting for parts is part_waiting.py's matter, making them part_making.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.publisher.age import is_young_since
from dcr_cli.publisher.described import OBJECT_LIMIT
from dcr_cli.remote.keys import payload_key
from dcr_cli.remote.part import (
    PART_KIND,
    Attempt,
    PartCommit,
    PartTable,
    decode_part,
    open_table,
    part_commit_key,
    part_table_key,
)
from dcr_cli.remote.signing import Trust
from dcr_cli.store.backend import Status
from dcr_cli.store.store import Store

# So many objects are asked for at once.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The part of a rank: the bytes of its document, what that says, and the table that it binds."""

    data: bytes
    commit: PartCommit
    table: PartTable


def read_part(store: Store, attempt: Attempt, rank: int, trust: Trust) -> ReadPart | None:
    """Read the part of a rank; None if it, or its table, is not there. DamagedError, or WrongBaseError, if what is
    there is not it."""
    key = part_commit_key(attempt.place, rank)
    data = store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True)
    if data is None:
        return None
    what = f"{store.shown}/{key}"
    part, signed = decode_part(data, attempt, rank, what)
    trust.check(signed, PART_KIND, what)
    key = part_table_key(attempt.place, rank)
    table = store.get(key, most_bytes=OBJECT_LIMIT, is_denied_absent=True)
    if table is None:
        return None
    return ReadPart(data, part, open_table(part, attempt, table, f"{store.shown}/{key}"))


def can_go_on(store: Store, attempt: Attempt, rank: int, part: ReadPart) -> bool:
    """Whether a part is whole, and so young that no prune takes it for given up (FORMAT 13.9).

    Its document is put again, with its bytes: that tells what time it is there, and a prune that begins later lets the
    attempt be.
    """
    key = part_commit_key(attempt.place, rank)
    store.put(key, part.data)
    now = store.stat(key, is_denied_absent=True)
    sizes = {part_table_key(attempt.place, rank): part.commit.table_bytes} | _payload_sizes(attempt, rank, part)
    return all(
        status is not None and status.size == sizes[each] and is_young_since(status.modified, now)
        for each, status in _ask(store, sizes).items()
    )


def lacking(store: Store, attempt: Attempt, parts: Mapping[int, ReadPart]) -> set[int]:
    """The ranks of whose parts a payload is not there, or has another size than their tables say."""
    sizes = {rank: _payload_sizes(attempt, rank, part) for rank, part in parts.items()}
    found = _ask(store, {key: size for each in sizes.values() for key, size in each.items()})
    has = {key: status.size if status is not None else None for key, status in found.items()}
    return {rank for rank, each in sizes.items() if any(has[key] != size for key, size in each.items())}


def _payload_sizes(attempt: Attempt, rank: int, part: ReadPart) -> dict[str, int]:
    rows = enumerate(part.table.payloads)
    return {payload_key(attempt.place, rank + turn * attempt.ranks): row.bytes for turn, row in rows}


def _ask(store: Store, keys: Mapping[str, int]) -> dict[str, Status | None]:
    with ThreadPoolExecutor(_AT_ONCE, "dcr-part") as pool:
        return dict(zip(keys, pool.map(lambda key: store.stat(key, is_denied_absent=True), keys), strict=True))
