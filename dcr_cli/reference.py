"""What a checkpoint should hold, as digests: the target of a delta, or the state that its own record names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.delta import open_delta
from dcr_cli.durable import open_folder
from dcr_cli.errors import LocalError, NotFoundError
from dcr_cli.receiver.record import STATE_NAME, TABLE_NAME, read_record


@dataclass(frozen=True, slots=True)
class ReferenceTensor:
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """Tensors by name, sidecars as path -> blake3, and the patterns of files that are no part of it."""

    name: str
    tensors: Mapping[str, ReferenceTensor]
    sidecars: Mapping[str, bytes]
    skipped: tuple[str, ...]


def reference_of_delta(folder: str | Path) -> Reference:
    """The target of the delta in `folder`."""
    delta = open_delta(folder, if_checkpoint="compare with a checkpoint by --against")
    return Reference(
        name=f"target of delta {folder}",
        tensors={row.name: ReferenceTensor(row.dtype, row.shape, digest) for row, digest in delta.tensors()},
        sidecars={file.path: file.blake3 for file in delta.manifest.files if file.kind == SIDECAR},
        skipped=tuple(delta.manifest.skipped),
    )


def reference_of_record(checkpoint: str | Path) -> Reference:
    """The state that the last apply to `checkpoint` left in it.

    NotFoundError if there is no record of it that is whole, LocalError if this process may not read it.
    """
    record, place = None, Path(checkpoint) / STATE_FOLDER
    if place.is_dir():
        with open_folder(place) as home:
            record = read_record(home)
    if record is None and any(
        os.path.exists(place / name) and not os.access(place / name, os.R_OK) for name in (STATE_NAME, TABLE_NAME)
    ):
        raise LocalError(str(checkpoint), "has a record that this process may not read", hint="run as its owner")
    if record is None:
        facts = "has no record of the state it should be in; only an apply leaves one"
        hint = f"dcr verify {shlex.quote(str(checkpoint))} --delta DELTA, or --against CHECKPOINT"
        raise NotFoundError(str(checkpoint), facts, hint=hint)
    return Reference(
        name=f"the state that {checkpoint} records",
        tensors={row.name: ReferenceTensor(row.dtype, row.shape, row.digest) for row in record.tensors},
        sidecars={file.path: file.blake3 for file in record.files if file.kind == SIDECAR},
        skipped=record.skipped,
    )
