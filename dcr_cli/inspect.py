"""Says what a checkpoint holds: shards, tensors, dtypes, sidecars, and if asked its state. It writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.digest import State, digest_text
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.content import Workers, read_state

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ShardFacts:
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
    """One tensor; its digest is there if digests were asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    bytes: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class InspectResult:
    """What a checkpoint holds. `dense_bytes` are its tensors' bytes; `state` needs `digest`, `rows` needs `tensors`."""

    checkpoint: str
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
    progress: Progress | None = None,
) -> InspectResult:
    """Read the headers of a checkpoint; with `digest`, every byte of it too, for both of its digests.

    With `tensors` the result has a row for each tensor. Raises NotFoundError, DamagedError, ConflictError when a file
    changes while it is read.
    """
    opened = open_checkpoint(checkpoint, skip=skip)
    state: State | None = None
    digests: dict[str, bytes] = {}
    if digest:
        with opened.reader() as reader, Workers(jobs, "inspect", progress) as workers:
            state, digests = read_state(workers, opened, reader)
    return InspectResult(
        checkpoint=str(opened.root),
        tensors=len(opened.tensors),
        elements=sum(tensor.elements for tensor in opened.tensors),
        dense_bytes=sum(tensor.bytes for tensor in opened.tensors),
        dtypes=_dtypes(opened),
        shards=tuple(ShardFacts(shard.path, shard.size, len(shard.header.tensors)) for shard in opened.shards),
        sidecars=tuple(
            SidecarFacts(file.path, file.size, "sidecar" if file.kind == SIDECAR else "weight map")
            for file in opened.sidecars
        ),
        skipped=opened.skipped,
        state=state,
        rows=_rows(opened, digests) if tensors else (),
    )


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
    return tuple(
        TensorFacts(
            name=tensor.name,
            dtype=tensor.dtype.name,
            shape=tensor.shape,
            shard=checkpoint.shards[tensor.shard].path,
            bytes=tensor.bytes,
            digest=digest_text(digests[tensor.name]) if tensor.name in digests else None,
        )
        for tensor in checkpoint.tensors
    )
