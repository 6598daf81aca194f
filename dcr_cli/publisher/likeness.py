"""A version as its remote describes it, as a checkpoint without bytes: shards of ranks at that version are like it.

Its tensors have forms and its files digests. What is read of them comes from the shards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Reader, Shard, Sidecar, Tensor
from dcr_cli.checkpoint.header import DTYPES, parse_header, write_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.layout.opening import Given, look_at
from dcr_cli.publisher.described import describe
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class DescribedCheckpoint(Checkpoint):
    """A checkpoint of which only a description is there: `files` are the records of its files, and all its tensors are
    thought of in one shard."""

    files: tuple[FileDigest, ...]

    def reader(self) -> Reader:
        return _DescribedReader(self)

    def files_digest(self, reader: Reader) -> list[FileDigest]:
        return list(self.files)


class _DescribedReader(Reader):
    """Reads nothing, as nothing is there."""

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: Any) -> None:
        facts = "is skipped by the layout, and the base has to say what it is"
        raise UnsupportedError(
            f"tensor {shown(tensor.name)}", facts, hint="give a checkpoint in canonical form as --base"
        )

    def check_unchanged(self) -> None:
        """What was published never changes."""


def look_at_base(base: str | os.PathLike[str] | None, layout: Layout | None, skip: Sequence[str]) -> Given | None:
    """Look at the checkpoint, or the shards of ranks, that a delta is to start from, if one was given."""
    if base is None:
        if layout is not None:
            raise UsageError("--base-layout", "says of --base what is what, and there is none", hint="give --base")
        return None
    return look_at(base, layout=layout, skip=skip, what="base")


def base_of(given: Given, store: Store, head: Published) -> Checkpoint:
    """The checkpoint that was given as one at version `head`: of shards of ranks, in the files of that version."""
    return given.like(version_like(store, head, given.skipped)) if given.is_sharded else given.like(None)


def version_like(store: Store, head: Published, skipped: Sequence[str]) -> DescribedCheckpoint:
    """A version as the remote describes it."""
    description = describe(store, head)
    what = f"version {head.version.number}"
    forms = {tensor.name: Form(tensor.dtype.name, tensor.shape) for tensor in description.tensors}
    raw = write_header(forms)
    header = parse_header(raw, None, what)
    tensors = tuple(
        Tensor(entry.name, DTYPES[entry.dtype], entry.shape, 0, len(raw) + entry.begin, entry.end - entry.begin)
        for entry in sorted(header.tensors, key=lambda entry: entry.name)
    )
    return DescribedCheckpoint(
        Path(what),
        (Shard("model.safetensors", header, len(raw) + header.data_bytes),),
        tuple(Sidecar(file.path, file.size, file.kind) for file in description.files if file.kind != SHARD),
        tensors,
        {tensor.name: tensor for tensor in tensors},
        tuple(skipped),
        {},
        (),
        description.files,
    )
