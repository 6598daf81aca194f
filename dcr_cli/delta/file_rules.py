"""The rules of a list of a checkpoint's files (FORMAT 2 and 9): their names, kinds, sizes and skip patterns.

They are those of a manifest and of an anchor alike; the files' bytes are not looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcr_cli.checkpoint.header import LENGTH_BYTES, MAX_HEADER_BYTES
from dcr_cli.checkpoint.names import safe_path, shown
from dcr_cli.checkpoint.parts import (
    MAX_SHARDS,
    MAX_SIDECAR_BYTES,
    MAX_SIDECARS_BYTES,
    MAX_WEIGHT_MAP_BYTES,
    SHARD,
    SHARD_SUFFIX,
    SIDECAR,
    WEIGHT_MAP,
    is_top_shard,
    is_weight_map,
    second_copy_pattern,
    unmapped_shards,
)
from dcr_cli.checkpoint.patterns import MAX_PATTERNS_BYTES, Patterns, check_paths
from dcr_cli.checkpoint.weight_map import check_sets_complete
from dcr_cli.errors import DamagedError

# Files that are sent as they are have a digest for each so many bytes.
RANGE_BYTES = 64 << 20
# The most bytes that count of a file of each kind: of a shard its header's.
_LIMITS = {SHARD: LENGTH_BYTES + MAX_HEADER_BYTES, SIDECAR: MAX_SIDECAR_BYTES, WEIGHT_MAP: MAX_WEIGHT_MAP_BYTES}


@dataclass(frozen=True, slots=True)
class RangedFile:
    """A file as it is: its whole size, its blake3 as in FORMAT 3.3, of a shard that of its header, and that of each of
    its ranges."""

    path: str
    kind: int
    size: int
    blake3: bytes
    ranges: tuple[bytes, ...]


def range_count(size: int) -> int:
    """How many ranges a file has."""
    return -(-size // RANGE_BYTES)


def range_spans(size: int) -> Iterator[tuple[int, int]]:
    """Beginning and size of each range of a file."""
    for begin in range(0, size, RANGE_BYTES):
        yield begin, min(RANGE_BYTES, size - begin)


def check_file_parts(paths: Sequence[str], kinds: Sequence[int], what: str) -> None:
    """Raise DamagedError about `what` unless files of these paths, in canonical order, and of these kinds are those of
    one checkpoint, as far as their names can tell."""
    for path in paths:
        safe_path(path, what)
    for path in paths:
        below = bisect_left(paths, f"{path}/")
        if below < len(paths) and paths[below].startswith(f"{path}/"):
            raise DamagedError(what, f"file {shown(path)} is also the folder of another")
    for path, kind in zip(paths, kinds, strict=True):
        if not SHARD <= kind <= WEIGHT_MAP:
            raise DamagedError(what, f"file {shown(path)} has unknown kind {kind}")
        is_shard = path.endswith(SHARD_SUFFIX) if kind == SHARD else is_top_shard(path)
        if is_shard != (kind == SHARD):
            raise DamagedError(what, f"file {shown(path)} is of kind {kind}, its name says otherwise")
        if is_weight_map(path) != (kind == WEIGHT_MAP):
            verb = "cannot be" if kind == WEIGHT_MAP else "has to be"
            raise DamagedError(what, f"file {shown(path)} {verb} a weight map")
        if kind == SIDECAR and second_copy_pattern(path) is not None:
            raise DamagedError(what, f"file {shown(path)} would be a second copy of the weights")
    shards = [path for path, kind in zip(paths, kinds, strict=True) if kind == SHARD]
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise DamagedError(what, f"has {len(shards)} shards, 1 to {MAX_SHARDS} are allowed")
    check_sets_complete(shards, what)
    weight_maps = list(kinds).count(WEIGHT_MAP)
    if weight_maps > 1:
        raise DamagedError(what, "has more than one weight map")
    others = set(shards).difference(unmapped_shards(shards)) if not weight_maps else ()
    if others:
        raise DamagedError(what, f"file {shown(min(others))} is a shard that no weight map names")


def check_file_sizes(paths: Sequence[str], kinds: Sequence[int], sizes: Sequence[int], what: str) -> None:
    """Raise DamagedError about `what` if a file is larger or smaller than its kind allows; a shard's size is that of
    its length bytes and header."""
    for path, kind, size in zip(paths, kinds, sizes, strict=True):
        if size > _LIMITS[kind] or (kind == SHARD and size <= LENGTH_BYTES):
            raise DamagedError(what, f"file {shown(path)} has {size} bytes, more or less than its kind allows")
    if sum(size for kind, size in zip(kinds, sizes, strict=True) if kind == SIDECAR) > MAX_SIDECARS_BYTES:
        raise DamagedError(what, f"sidecars have more than {MAX_SIDECARS_BYTES} bytes together")


def check_skipped(skipped: Sequence[str], paths: Sequence[str], what: str) -> None:
    """Raise DamagedError about `what` if the skip patterns, or the paths with them, are too long, or if a pattern
    leaves one of the paths out."""
    if "" in skipped:
        raise DamagedError(what, "a pattern of skipped is empty")
    total = sum(len(pattern.encode()) for pattern in skipped)
    if total > MAX_PATTERNS_BYTES:
        facts = f"the patterns of skipped have {total} bytes, at most {MAX_PATTERNS_BYTES} are allowed"
        raise DamagedError(what, facts)
    check_paths(skipped, paths, what)
    patterns = Patterns(skipped)
    for path in paths:
        if patterns.match(path):
            raise DamagedError(what, f"file {shown(path)} is skipped by a pattern of skipped")
