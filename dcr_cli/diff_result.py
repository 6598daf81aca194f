"""What comparing two checkpoints has found, in the words of `dcr diff`.

Comparing is diff.py's work; nothing is read or written here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Tensor
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Manifest, TensorRow
from dcr_cli.delta.output import Sink
from dcr_cli.stages import Account


@dataclass(frozen=True, slots=True)
class DiffRow:
    """What became of one tensor. `kind` is same, changed, added, removed, replaced or renamed.

    Only what is changed or renamed has changed elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    source: str | None
    elements: int
    changed_elements: int
    encoding: str | None
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class DiffResult:
    """What two checkpoints differ in. Sizes are in bytes; `delta_bytes` is what the whole delta folder takes.

    `not_read` are tensors that the target's layout skips, which are taken to be the base's. `reshaped` are tensors of
    another shape or dtype than in the base, `files_removed` files beside the shards that the target has no more.
    `encodings` are the changed tensors of each encoding, `encoding_bytes` the bytes that their changes take in the
    delta. `output` is where it was written or, for a dry run, would be. `device` is where tensors were compared, `cpu`
    or `cuda:N`, and `account` how.
    """

    tensors: int
    elements: int
    changed_elements: int
    changed_tensors: int
    dense_bytes: int
    delta_bytes: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    replaced: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    reshaped: tuple[str, ...]
    moved: tuple[str, ...]
    files_changed: tuple[str, ...]
    not_read: tuple[str, ...]
    files_removed: tuple[str, ...]
    base: State
    target: State
    encodings: dict[str, int]
    encoding_bytes: dict[str, int]
    output: str | None
    dry_run: bool
    device: str
    rows: tuple[DiffRow, ...]
    account: Account = field(compare=False, repr=False)

    @property
    def same(self) -> bool:
        """Whether both are one state."""
        return self.base == self.target


@dataclass(frozen=True, slots=True)
class Compared:
    """Two checkpoints, and all that is between them.

    `changed` has the changed elements of each tensor of the target; `twins` are those whose changes are written as
    another one's.
    """

    base: Checkpoint
    target: Checkpoint
    base_state: State
    target_state: State
    base_files: Sequence[FileDigest]
    manifest: Manifest
    changed: Sequence[int]
    twins: frozenset[str]


def summarize(found: Compared, output: Sink, account: Account) -> DiffResult:
    """Say what was found, and what of it was written to `output`, or would be."""
    base, target, manifest = found.base, found.target, found.manifest
    rows = [
        _row(found, tensor, row, changed)
        for tensor, row, changed in zip(target.tensors, manifest.tensors, found.changed, strict=True)
    ]
    renamed = tuple((row.source, row.name) for row in rows if row.kind == "renamed" and row.source is not None)
    continued = {source for source, _ in renamed}
    gone = {name: base.by_name[name] for name in manifest.removed if name not in continued}
    rows += [DiffRow(n, t.dtype.name, t.shape, "removed", None, t.elements, 0, None, 0) for n, t in gone.items()]
    encodings: Counter[str] = Counter()
    encoding_bytes: Counter[str] = Counter()
    for row in rows:
        if row.encoding is not None:
            encodings[row.encoding] += 1
            encoding_bytes[row.encoding] += row.delta_bytes
    return DiffResult(
        tensors=len(target.tensors),
        elements=sum(tensor.elements for tensor in target.tensors),
        changed_elements=sum(row.changed_elements for row in rows),
        changed_tensors=sum(row.changed_elements > 0 for row in rows),
        dense_bytes=sum(tensor.bytes for tensor in target.tensors),
        delta_bytes=output.bytes,
        added=tuple(row.name for row in rows if row.kind == "added"),
        removed=tuple(gone),
        replaced=tuple(row.name for row in rows if row.kind == "replaced"),
        renamed=renamed,
        reshaped=tuple(_reshaped(base, target)),
        moved=tuple(_moved(base, target)),
        files_changed=tuple(sorted(_changed_files(manifest, found.base_files))),
        not_read=target.not_read,
        files_removed=tuple(file.path for file in _gone(manifest, found.base_files) if file.kind == SIDECAR),
        base=found.base_state,
        target=found.target_state,
        encodings=dict(encodings),
        encoding_bytes=dict(encoding_bytes),
        output=output.name,
        dry_run=output.dry_run,
        device=account.device,
        rows=tuple(sorted(rows, key=lambda row: row.name.encode())),
        account=account,
    )


def _row(found: Compared, tensor: Tensor, row: TensorRow, changed: int) -> DiffRow:
    own = found.base.by_name.get(tensor.name)
    if own is None:
        kind = "renamed" if row.source is not None and row.source not in found.target.by_name else "added"
    elif row.source != own.name or row.is_reshaped:
        kind = "replaced"
    else:
        kind = "changed" if row.pieces else "same"
    piece = row.pieces[0] if row.pieces else None
    is_written = piece is not None and tensor.name not in found.twins
    return DiffRow(
        name=tensor.name,
        dtype=tensor.dtype.name,
        shape=tensor.shape,
        kind=kind,
        source=row.source,
        elements=tensor.elements,
        changed_elements=changed if kind in ("changed", "renamed") else 0,
        encoding=Encoding(piece.encoding).label if piece is not None else None,
        delta_bytes=sum(run.bytes for run in piece.runs) if piece is not None and is_written else 0,
    )


def _reshaped(base: Checkpoint, target: Checkpoint) -> list[str]:
    return [
        tensor.name
        for tensor in target.tensors
        if (own := base.by_name.get(tensor.name)) is not None and (own.dtype, own.shape) != (tensor.dtype, tensor.shape)
    ]


def _moved(base: Checkpoint, target: Checkpoint) -> list[str]:
    """The tensors that lie in a shard of another name than before."""
    return [
        tensor.name
        for tensor in target.tensors
        if (own := base.by_name.get(tensor.name)) is not None
        and base.shards[own.shard].path != target.shards[tensor.shard].path
    ]


def _changed_files(manifest: Manifest, base_files: Sequence[FileDigest]) -> list[str]:
    gone = (file.path for file in _gone(manifest, base_files))
    return [*(row.path for row in manifest.files if row.runs), *gone]


def _gone(manifest: Manifest, base_files: Sequence[FileDigest]) -> list[FileDigest]:
    kept = {(row.path, row.kind) for row in manifest.files}
    return [file for file in base_files if (file.path, file.kind) not in kept]
