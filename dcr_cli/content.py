"""Reads all tensors of an opened checkpoint in threads: their digests, and the checkpoint's state.

Results come in order, a bounded number of blocks is in memory, and a giant tensor is read by all threads. Comparing is
not its business.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, Tensor
from dcr_cli.checkpoint.digest import State, TensorDigest, add, content_digest, digest_bytes, files_digest, no_digest
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.delta.scan import Part, parts_of, tasks_of
from dcr_cli.delta.scanning import Pace, pace_of
from dcr_cli.work import threads

Progress = Callable[[str, int, int], None]
Result = TypeVar("Result")


class Workers:
    """A pool of threads that works through parts of tensors; a context manager."""

    def __init__(self, jobs: int | None, stage: str, progress: Progress | None) -> None:
        self._jobs = threads(jobs)
        self.pool = ThreadPoolExecutor(self._jobs, f"dcr-{stage}")
        self._stage = stage
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def results(
        self,
        function: Callable[[list[Part]], list[Result]],
        parts: Iterator[Part],
        total_bytes: int,
        pace: Pace | None = None,
    ) -> Iterator[Result]:
        """Run `function` over lists of parts, a bounded number of them at a time; yield what it returns, in order."""
        pace = pace or pace_of(self._jobs)
        done = 0
        running: deque[tuple[int, Future[list[Result]]]] = deque()
        tasks = tasks_of(parts, pace.task_bytes)
        while True:
            while len(running) < pace.tasks and (task := next(tasks, None)) is not None:
                running.append((task[0], self.pool.submit(function, task[1])))
            if not running:
                return
            size, future = running.popleft()
            yield from future.result()
            done += size
            if self._progress is not None:
                self._progress(self._stage, done, total_bytes)


class Blocks(threading.local):
    """Two blocks a thread, used again and again."""

    def __init__(self) -> None:
        self.pair = np.empty(BLOCK_BYTES, np.uint8), np.empty(BLOCK_BYTES, np.uint8)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the checkpoints that parts are read from; `tensor_of` says which tensor of a part is its."""

    checkpoint: Checkpoint
    reader: Reader
    tensor_of: Callable[[Part], Tensor]

    def place(self, part: Part) -> tuple[int, int]:
        """The shard that holds `part`, and the byte of it where the part begins."""
        tensor = self.tensor_of(part)
        return tensor.shard, tensor.begin + part.start * tensor.dtype.width


def read_spans(
    parts: Sequence[Part], sides: Sequence[Side], blocks: Blocks
) -> Iterator[tuple[Sequence[Part], list[NDArray[np.uint8]]]]:
    """Read parts; those that lie back to back on every side, up to a block of them, in one read a side.

    Yields the parts of a span and the span's bytes on each side, valid until the next span is asked for.
    """
    start = 0
    while start < len(parts):
        places = [side.place(parts[start]) for side in sides]
        stop, size = start + 1, parts[start].bytes
        while stop < len(parts) and size + parts[stop].bytes <= BLOCK_BYTES:
            following = [(shard, begin + size) for shard, begin in places]
            if [side.place(parts[stop]) for side in sides] != following:
                break
            size += parts[stop].bytes
            stop += 1
        views = []
        for side, (shard, begin), block in zip(sides, places, blocks.pair, strict=False):
            side.reader.read_shard_into(shard, begin, block[:size])
            views.append(block[:size])
        yield parts[start:stop], views
        start = stop


def tensor_of_part(part: Part) -> Tensor:
    """For parts of one checkpoint alone."""
    return part.tensor


def in_file_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors as they lie, so that reading is sequential."""
    return sorted(tensors, key=lambda tensor: (tensor.shard, tensor.begin))


def tensor_digests(workers: Workers, side: Side, tensors: Sequence[Tensor]) -> list[TensorDigest]:
    """Return the digests of `tensors`, best given in file order."""
    blocks = Blocks()

    def digest(parts: list[Part]) -> list[tuple[int, TensorDigest]]:
        found = []
        for span, (view,) in read_spans(parts, [side], blocks):
            begin = 0
            for part in span:
                data = view[begin : begin + part.bytes]
                found.append((part.row, kernels.digest(data, part.start * part.tensor.dtype.width)))
                begin += part.bytes
        return found

    digests = [no_digest()] * len(tensors)
    parts = (part for row, tensor in enumerate(tensors) for part in parts_of(row, tensor, None))
    for row, found in workers.results(digest, parts, sum(tensor.bytes for tensor in tensors)):
        digests[row] = add(digests[row], found)
    return digests


def read_state(workers: Workers, checkpoint: Checkpoint, reader: Reader) -> tuple[State, dict[str, bytes]]:
    """Read every byte of a checkpoint: its state, and the 16 bytes of digest of each of its tensors."""
    tensors = in_file_order(checkpoint.tensors)
    digests = tensor_digests(workers, Side(checkpoint, reader, tensor_of_part), tensors)
    by_name = {tensor.name: digest_bytes(digest) for tensor, digest in zip(tensors, digests, strict=True)}
    records = ((t.name, t.dtype.name, t.shape, by_name[t.name]) for t in checkpoint.tensors)
    files = ((file.path, file.kind, file.blake3) for file in checkpoint.files_digest(reader))
    state = State(content_digest(records), files_digest(files))
    reader.check_unchanged()
    return state, by_name
