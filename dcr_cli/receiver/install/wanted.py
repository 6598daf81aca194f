"""A state that is given as plain files: which files it has, how their bytes are checked, and whence they come.

It knows nothing of remotes; what a receiver has already, and how it is brought there, is not its business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dcr_cli.checkpoint.digest import (
    BLAKE3_BYTES,
    State,
    blake3_text,
    files_digest,
    object_digest,
    parse_blake3,
)
from dcr_cli.checkpoint.header import LENGTH_BYTES
from dcr_cli.checkpoint.json_text import strict_json
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
from dcr_cli.checkpoint.patterns import Patterns, check_patterns
from dcr_cli.delta.file_rules import RangedFile, range_count, range_spans
from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.receiver.record import Record

_NO_BYTES = object_digest(b"")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A state, its files in canonical order, and the patterns of what its publisher left out.

    `layout` is the text of the one through which its shards store their tensors; without, they store them as they are.
    """

    state: State
    skipped: tuple[str, ...]
    files: tuple[RangedFile, ...]
    layout: bytes | None = None

    @property
    def layout_blake3(self) -> bytes | None:
        """What a record says of the layout."""
        return object_digest(self.layout) if self.layout is not None else None

    def is_recorded(self, record: Record | None) -> bool:
        """Whether a record is of this state, in shards that store it so."""
        return record is not None and (record.state, record.layout) == (self.state, self.layout_blake3)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


class Part(NamedTuple):
    """A range of a wanted file, both by number, and where it is."""

    file: int
    number: int
    begin: int
    size: int
    blake3: bytes


class FetchedError(DamagedError):
    """What was fetched of the file `path` is not what is wanted, the last time too."""

    def __init__(self, path: str, facts: str) -> None:
        self.path = path
        super().__init__(f"file {shown(path)}", facts)


class Fetcher(Protocol):
    """Whence the bytes come that a receiver has not. It is called from several threads, and never trusted."""

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes | memoryview]:
        """Yield `size` bytes of the file `path` from byte `begin` on, in parts of any size; DcrError if it cannot."""


def parts_of(number: int, file: RangedFile) -> Iterator[Part]:
    """The ranges of a wanted file whose number is given."""
    for at, ((begin, size), blake3) in enumerate(zip(range_spans(file.size), file.ranges, strict=True)):
        yield Part(number, at, begin, size, blake3)


# Checking


def check_wanted(wanted: Wanted, what: str) -> None:
    """Raise DamagedError unless a list of files can be that of a checkpoint of its state, and its names are safe.

    Whether the bytes are of that state only the bytes tell.
    """
    try:
        check_patterns(wanted.skipped)
    except UsageError as error:
        raise DamagedError(what, error.facts) from error
    skipped = Patterns(wanted.skipped)
    before = ""
    for file in wanted.files:
        if safe_path(file.path, what) <= before:
            raise DamagedError(what, f"file {shown(file.path)} is not in canonical order after {shown(before)}")
        before = file.path
        if skipped.match(file.path):
            raise DamagedError(what, f"file {shown(file.path)} is one that its own patterns leave out")
        if (fault := _fault(file)) is not None:
            raise DamagedError(what, f"file {shown(file.path)} {fault}")
    _check_together(wanted, what)
    if files_digest((file.path, file.kind, file.blake3) for file in wanted.files) != wanted.state.files:
        raise DamagedError(what, "its files do not have the files digest that it states")


def _fault(file: RangedFile) -> str | None:
    """Say what is wrong with a file by itself."""
    count = range_count(file.size)
    if file.size < 0 or len(file.ranges) != count:
        return f"has {len(file.ranges)} ranges, of {file.size} bytes there are {max(count, 0)}"
    if any(len(digest) != BLAKE3_BYTES for digest in (file.blake3, *file.ranges)):
        return f"has a digest that is not of {BLAKE3_BYTES} bytes"
    if file.kind == SHARD:
        if file.size < LENGTH_BYTES or not file.path.endswith(SHARD_SUFFIX):
            return f"is no shard: it has {file.size} bytes"
        return None
    if count < 2 and file.blake3 != (file.ranges[0] if count else _NO_BYTES):
        return "has one range whose blake3 is not that of the file"
    if file.kind == WEIGHT_MAP:
        most = MAX_WEIGHT_MAP_BYTES
        is_right = is_weight_map(file.path)
    else:
        most = MAX_SIDECAR_BYTES
        is_right = file.kind == SIDECAR and not (is_top_shard(file.path) or is_weight_map(file.path))
        is_right = is_right and second_copy_pattern(file.path) is None
    if not is_right:
        return f"cannot be of kind {file.kind}, by its name"
    return f"has {file.size} bytes, more than the {most} allowed" if file.size > most else None


def _check_together(wanted: Wanted, what: str) -> None:
    shards = [file.path for file in wanted.files if file.kind == SHARD]
    maps = [file.path for file in wanted.files if file.kind == WEIGHT_MAP]
    if not 1 <= len(shards) <= MAX_SHARDS or len(maps) > 1:
        raise DamagedError(what, f"has {len(shards)} shards and {len(maps)} weight maps, and is no checkpoint")
    if wanted.layout is not None and maps:
        raise DamagedError(what, "has a weight map beside shards that a layout is of")
    if wanted.layout is None and not maps and unmapped_shards(shards) != shards:
        raise DamagedError(what, "has no weight map that names its shards")
    if sum(file.size for file in wanted.files if file.kind == SIDECAR) > MAX_SIDECARS_BYTES:
        raise DamagedError(what, f"its files beside the shards have more than {MAX_SIDECARS_BYTES} bytes")
    paths = {file.path for file in wanted.files}
    for path in paths:
        for at, letter in enumerate(path):
            if letter == "/" and path[:at] in paths:
                raise DamagedError(what, f"has a file {shown(path[:at])} and, as if it were a folder, {shown(path)}")


# Writing it down


def encode_wanted(wanted: Wanted) -> bytes:
    """Write a wanted state on one line; equal ones are equal bytes."""
    document: dict[str, object] = {
        "content": blake3_text(wanted.state.content),
        "files": blake3_text(wanted.state.files),
        "skipped": wanted.skipped,
        "rows": [
            [file.path, file.kind, file.size, file.blake3.hex(), [digest.hex() for digest in file.ranges]]
            for file in wanted.files
        ],
    }
    if wanted.layout is not None:
        document["layout"] = wanted.layout.decode()
    return json.dumps(document).encode()


def decode_wanted(text: bytes, what: str) -> Wanted:
    """The inverse of encode_wanted; DamagedError if it is not what that wrote."""
    document = strict_json(text, what)
    try:
        wanted = Wanted(
            State(parse_blake3(document["content"], what), parse_blake3(document["files"], what)),
            tuple(map(str, document["skipped"])),
            tuple(_file(*row) for row in document["rows"]),
            document["layout"].encode() if "layout" in document else None,
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedError(what, "is not a wanted state that dcr wrote") from error
    check_wanted(wanted, what)
    return wanted


def _file(path: str, kind: int, size: int, blake3: str, ranges: Sequence[str]) -> RangedFile:
    return RangedFile(path, kind, size, bytes.fromhex(blake3), tuple(map(bytes.fromhex, ranges)))
