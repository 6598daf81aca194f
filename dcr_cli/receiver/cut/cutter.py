"""Cuts the shards of a receiver out of a checkpoint, range by range, in bounded memory.

A shard is a header, and elements of canonical tensors where its layout says so; what else it holds is what the shard
holds that is there, or zeros. So boxes are read the other way round: here the local tensor is gathered from canonical
ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Checkpoint, Shard
from dcr_cli.checkpoint.folder import Files
from dcr_cli.checkpoint.header import DTYPES, TensorEntry, bytes_view
from dcr_cli.layout.coverage import tied_tensors
from dcr_cli.layout.gather import Boxes, Gatherer, Held, Sources
from dcr_cli.layout.layout import LocalTensor, Placed
from dcr_cli.receiver.cut.shards import CutShards

# So much of a local tensor is gathered at once.
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Local:
    """A local tensor, `size` bytes from byte `begin` of its shard, and what its elements come from, if from
    anything."""

    begin: int
    size: int
    width: int
    sources: Sources

    def is_covered(self, first: int, end: int) -> bool:
        """Whether all elements from number `first` to `end` come from somewhere; of no two boxes they are the same."""
        boxes = [held.box for held in self.sources.owners.within(first, end)]
        return sum(box.rank(end) - box.rank(first) for box in boxes) == end - first


class Cutter:
    """Reads shards as they will be, whose canonical tensors are those of a checkpoint, for any number of threads; a
    context manager."""

    def __init__(self, cut: CutShards, canonical: Checkpoint) -> None:
        self._cut = cut
        self._canonical = canonical
        tied = tied_tensors(cut.layout)
        self._locals = {path: self._locals_of(shard, tied) for path, shard in cut.shards.items()}
        self._held = Files(cut.root, cut.held)
        self._reader = canonical.reader()
        self._gatherer = Gatherer(self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()
        self._reader.close()

    def parts(self, path: str, begin: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes of a shard from byte `begin` on."""
        shard, at, end = self._cut.shards[path], begin, begin + size
        raw = shard.header.raw
        if at < len(raw):
            yield memoryview(raw)[at:end]
            at = min(len(raw), end)
        tensors = self._locals[path]
        number = max(bisect_right(tensors, at, key=lambda local: local.begin) - 1, 0)
        for local in tensors[number:]:
            if local.begin >= end:
                return
            yield from self._slices(shard, local, max(at, local.begin), min(end, local.begin + local.size))

    def _slices(self, shard: Shard, local: _Local, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes of a local tensor from byte `begin` to `end` of its shard, which may cut elements in two."""
        width, step = local.width, _SLICE_BYTES // local.width
        first, last = (begin - local.begin) // width, -(-(end - local.begin) // width)
        for low in range(first, last, step):
            high = min(low + step, last)
            data = bytes_view(self._elements(shard, local, low, high))
            at = local.begin + low * width
            yield data[max(begin - at, 0) : end - at]

    def _elements(self, shard: Shard, local: _Local, first: int, end: int) -> NDArray[Any]:
        out: NDArray[Any] = np.zeros(end - first, f"<u{local.width}")
        if shard.path in self._cut.held and not local.is_covered(first, end):
            self._held.read_path_into(shard.path, local.begin + first * local.width, out)
        self._gatherer.read(local.sources, first, out)
        return out

    def _locals_of(self, shard: Shard, tied: Collection[str]) -> list[_Local]:
        """The local tensors of a shard, as they lie in it; those of no bytes before others that begin there."""
        tensors = self._cut.layout.shards[shard.path]
        found = [self._local(shard, entry, tensors[entry.name], tied) for entry in shard.header.tensors]
        return sorted(found, key=lambda local: (local.begin, local.size))

    def _local(self, shard: Shard, entry: TensorEntry, local: LocalTensor, tied: Collection[str]) -> _Local:
        # Tensors that are tied are the same elements.
        placements = [placement for placement in local.placements if placement.tensor not in tied]
        held = []
        for placement in placements:
            tensor = self._canonical.by_name[placement.tensor]
            source = self._canonical.shards[tensor.shard].path
            held.append(Held(Placed(placement.box.inverse(), source, placement.tensor), tensor.begin))
        return _Local(
            len(shard.header.raw) + entry.begin,
            entry.end - entry.begin,
            DTYPES[local.form.dtype].width,
            Sources(entry.name, local.form, Boxes(held), Boxes([])),
        )
