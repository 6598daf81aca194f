"""Compares a tensor that was given with the base's, block by block, in threads and in bounded memory.

What is coded later of a block has its own copy of what that needs, because what was given may change by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import TensorDigest, add, no_digest
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoding import KEPT_SHARE, Draft, Elements, LoadBlock, compare_block, find_changes, uint_dtype
from dcr_cli.delta.scan import Part, TensorReader, block_part, digest_part, is_sent_whole, parts_of, read_part
from dcr_cli.publisher.bases import Change
from dcr_cli.publisher.given import Bytes


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """What a block adds to its tensor's digest, what that grows by, and what is needed to code it if it changed."""

    base_digest: TensorDigest
    growth: TensorDigest
    draft: Draft | None
    load: LoadBlock | None
    change: Change | None


class Comparer:
    """Compares tensors with those of a base, which stays."""

    def __init__(self, base: TensorReader, allowed: Allowed, pool: ThreadPoolExecutor, jobs: int) -> None:
        self._base = base
        self._allowed = allowed
        self._pool = pool
        self._jobs = jobs

    def compare(self, tensor: Tensor, data: Bytes) -> Iterator[ComparedBlock]:
        """All blocks of a tensor in order, a bounded number ahead; once it is left, `data` is read no more."""
        ahead: deque[Future[ComparedBlock]] = deque()
        try:
            for part in parts_of(0, tensor, None):
                begin = part.start * tensor.dtype.width
                ahead.append(self._pool.submit(self._compare, part, data[begin : begin + part.bytes]))
                if len(ahead) > 2 * self._jobs:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                if not future.cancel():
                    future.exception()

    def load_unchanged(self, tensor: Tensor, block: int) -> tuple[int, LoadBlock]:
        """The elements of a block that did not change, and how both its sides are read."""
        part = block_part(0, tensor, None, block)
        return part.elements, partial(self._load, Change(part, np.empty(0, np.uint32), np.empty(0, np.uint8)))

    def digest(self, reader: TensorReader, tensor: Tensor) -> TensorDigest:
        """The digest of a whole tensor of the base, or of another reader."""
        total = no_digest()
        for found in self._pool.map(partial(digest_part, reader), parts_of(0, tensor, None)):
            total = add(total, found)
        return total

    def _compare(self, part: Part, data: Bytes) -> ComparedBlock:
        dtype = part.tensor.dtype
        old = read_part(self._base, part)
        new = np.require(data.view(uint_dtype(dtype.width)), requirements="A")
        whole = is_sent_whole(part.tensor, self._allowed)
        context, gap = self._allowed.context and not whole, self._allowed.gap and not whole
        found = compare_block(old, new, part.start * dtype.width, dtype, context=context, gap=gap)
        if found.draft is None:
            return ComparedBlock(found.digest, found.growth, None, None, None)
        draft, change = _kept(part, found.draft, old, new)
        return ComparedBlock(found.digest, found.growth, draft, partial(self._load, change), change)

    def _load(self, change: Change) -> tuple[Elements, Elements]:
        """Both sides of a block again."""
        old = read_part(self._base, change.part)
        if change.positions is None:
            return old, change.values
        new = old.copy()
        new[change.positions] = change.values
        return old, new


class GivenReader:
    """A tensor that was given, as one that can be read."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[byte_offset : byte_offset + len(buffer)].data


def _kept(part: Part, draft: Draft, old: Elements, new: Elements) -> tuple[Draft, Change]:
    """What is kept of a block that changed: its changes where they are few, else all of it."""
    changes = draft.changes
    if changes is not None:
        return draft, Change(part, changes.positions, changes.new)
    if draft.changed * KEPT_SHARE > draft.elements:
        return replace(draft, copied_bytes=part.bytes), Change(part, None, new.copy())
    changes = find_changes(old, new)
    copied_bytes = changes.positions.nbytes + changes.new.nbytes
    return replace(draft, copied_bytes=copied_bytes), Change(part, changes.positions, changes.new)
