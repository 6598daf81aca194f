"""Says what a checkpoint holds: shards, tensors, dtypes, sidecars, and if asked its state. It writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, unless_changed
from dcr_cli.checkpoint.digest import State, digest_text
from dcr_cli.checkpoint.names import listed
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.content import Workers, read_state
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.layout.opening import layout_given, open_any

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """A shard; of ranks, `tensors` are local ones."""

    path: str
    size: int
    tensors: int


@dataclass(frozen=True, slots=True)
class SidecarFacts:
    """A file beside the shards; `kind` is sidecar or weight map."""

    path: str
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class DtypeFacts:
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor; its digest is there if digests were asked for. `shard` is the file that holds it, or, of shards of
    ranks, those that hold some of it: all of them, or the first ones and how many more there are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    bytes: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class LaidFacts:
    """Of shards of ranks: `layout` says what they are parts of, the name of its file, or the folder if they do so
    themselves; so many `local_tensors` they hold."""

    layout: str
    local_tensors: int


@dataclass(frozen=True, slots=True)
class InspectResult:
    """What a checkpoint holds. `dense_bytes` are its tensors' bytes; `state` needs `digest`, `rows` needs `tensors`.

    If it is shards of ranks, `laid` says so; the tensors are those of the checkpoint that they are parts of.
    """

    checkpoint: str
    laid: LaidFacts | None
    tensors: int
    elements: int
    dense_bytes: int
    dtypes: tuple[DtypeFacts, ...]
    shards: tuple[ShardFacts, ...]
    sidecars: tuple[SidecarFacts, ...]
    skipped: tuple[str, ...]
    state: State | None
    rows: tuple[TensorFacts, ...]


def inspect(
    checkpoint: str | Path,
    *,
    digest: bool = False,
    tensors: bool = False,
    jobs: int | None = None,
    skip: Sequence[str] = (),
    layout: str | Path | None = None,
    functions: Sequence[str] = (),
    progress: Progress | None = None,
) -> InspectResult:
    """Read the headers of a checkpoint; with `digest`, every byte of it too, for both of its digests.

    With `tensors` the result has a row for each tensor. Shards of ranks are seen through `layout`, a file, whose rules
    may call `functions`, each `module:function`; or, as open_any says, with nothing given. Raises NotFoundError,
    DamagedError, ConflictError when a file changes while it is read, and UnsupportedError as of layouts.
    """
    opened = open_any(checkpoint, layout=layout_given(layout, functions), skip=skip)
    state: State | None = None
    digests: dict[str, bytes] = {}
    if digest:
        with opened.reader() as reader, Workers(jobs, "inspect", progress) as workers, unless_changed(reader):
            state, digests = read_state(workers, opened, reader)
    shards = opened.local if isinstance(opened, LaidCheckpoint) else opened.shards
    return InspectResult(
        checkpoint=str(opened.root),
        laid=_laid(opened),
        tensors=len(opened.tensors),
        elements=sum(tensor.elements for tensor in opened.tensors),
        dense_bytes=sum(tensor.bytes for tensor in opened.tensors),
        dtypes=_dtypes(opened),
        shards=tuple(ShardFacts(shard.path, shard.size, len(shard.header.tensors)) for shard in shards),
        sidecars=tuple(
            SidecarFacts(file.path, file.size, "sidecar" if file.kind == SIDECAR else "weight map")
            for file in opened.sidecars
        ),
        skipped=opened.skipped,
        state=state,
        rows=_rows(opened, digests) if tensors else (),
    )


def _laid(checkpoint: Checkpoint) -> LaidFacts | None:
    if not isinstance(checkpoint, LaidCheckpoint):
        return None
    return LaidFacts(checkpoint.layout.what, sum(len(shard.header.tensors) for shard in checkpoint.local))


def _dtypes(checkpoint: Checkpoint) -> tuple[DtypeFacts, ...]:
    """Sums per dtype, the one with the most bytes first."""
    sums: dict[str, list[int]] = {}
    for tensor in checkpoint.tensors:
        facts = sums.setdefault(tensor.dtype.name, [0, 0, 0])
        facts[0] += 1
        facts[1] += tensor.elements
        facts[2] += tensor.bytes
    rows = (DtypeFacts(name, *facts) for name, facts in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.dtype)))


def _rows(checkpoint: Checkpoint, digests: dict[str, bytes]) -> tuple[TensorFacts, ...]:
    shards = _shards_of(checkpoint)
    return tuple(
        TensorFacts(
            name=tensor.name,
            dtype=tensor.dtype.name,
            shape=tensor.shape,
            shard=shards[tensor.name],
            bytes=tensor.bytes,
            digest=digest_text(digests[tensor.name]) if tensor.name in digests else None,
        )
        for tensor in checkpoint.tensors
    )


def _shards_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Which shards hold each tensor."""
    if not isinstance(checkpoint, LaidCheckpoint):
        return {tensor.name: checkpoint.shards[tensor.shard].path for tensor in checkpoint.tensors}
    layout, placed = checkpoint.layout, checkpoint.layout.placed()
    stored = {name: layout.rules[name].of if name in layout.rules else name for name in layout.tensors}
    return {name: listed(list(dict.fromkeys(each.path for each in placed[of]))) for name, of in stored.items()}
