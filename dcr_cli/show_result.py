"""What a delta or a version holds, in the words of `dcr show`.

Fetching and checking it is show.py's work; nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.header import DTYPES, stored_elements
from dcr_cli.delta.documents import Documents
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Run, TensorRow


@dataclass(frozen=True, slots=True)
class EncodingFacts:
    """The pieces of one encoding, and the bytes of their runs."""

    encoding: str
    pieces: int
    changed_elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor that does not equal its source; `source` is its own name, unless it was renamed or continues another
    one, None if it has none.

    `changed_elements` are as in `ShowResult`; `is_whole`: fewer of them may have changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str | None
    encoding: str
    elements: int
    changed_elements: int
    is_whole: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class ShownVersion:
    """A version of a remote by its commit; `signers` are the trusted keys that have signed it, `created` and
    `publisher` its publisher's own words, and `has_anchor` says whether an anchor of it is there."""

    remote: str
    version: int
    id: str
    created: str
    publisher: str
    signers: tuple[str, ...]
    has_anchor: bool


@dataclass(frozen=True, slots=True)
class ShowResult:
    """What a delta holds, in the words of `DiffResult` as far as it can tell without the base.

    `new` tensors do not continue one of the base of their name and shape: added or replaced. They do not count as
    changed. Of `changed_elements`, `whole_elements` are of tensors that are sent whole; fewer of these may have
    changed. `rows` are the tensors whose elements are in the delta, those that take the most bytes first; `sent_files`
    are files whose bytes are in it, `removed_files` sidecars of the base that the target has not. `version` says which
    one it is, if it lies in a remote. `is_deep`: all payloads were read and are right, as always those in a folder.
    """

    delta: str
    base: State
    target: State
    delta_bytes: int
    document_bytes: int
    payloads: int
    payload_bytes: int
    tensors: int
    elements: int
    dense_bytes: int
    changed_tensors: int
    changed_elements: int
    whole_elements: int
    encodings: tuple[EncodingFacts, ...]
    new: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    files: int
    sent_files: tuple[str, ...]
    removed_files: tuple[str, ...]
    skipped: tuple[str, ...]
    rows: tuple[ChangedTensor, ...]
    version: ShownVersion | None
    is_deep: bool


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file of an anchor."""

    path: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ShowAnchorResult:
    """A version of a remote of which there is an anchor and no delta; if that `is_only_way`, there never was one.
    `is_deep`: all of its files were fetched and are right."""

    anchor: str
    version: ShownVersion
    target: State
    anchor_bytes: int
    is_only_way: bool
    is_deep: bool
    files: tuple[ShownFile, ...]
    skipped: tuple[str, ...]


def result_of(delta: Documents, name: str, document_bytes: int) -> ShowResult:
    """What a delta called `name` holds, whose documents take so many bytes; all of its payloads count as read."""
    rows: list[ChangedTensor] = []
    tensors = elements = dense_bytes = 0
    new, renamed = [], []
    sums: dict[str, list[int]] = {}
    removed = set(delta.manifest.removed)
    for row in delta.manifest.tensors:
        count = stored_elements(DTYPES[row.dtype], row.shape)
        tensors += 1
        elements += count
        dense_bytes += count * DTYPES[row.dtype].width
        is_renamed = row.source is not None and row.source != row.name and row.source in removed
        if is_renamed:
            renamed.append((str(row.source), row.name))
        is_new = not is_renamed and (row.source != row.name or row.is_reshaped)
        if is_new:
            new.append(row.name)
        if row.pieces:
            rows.append(_changed(row, count, is_new=is_new))
        for piece in row.pieces:
            facts = sums.setdefault(Encoding(piece.encoding).label, [0, 0, 0])
            facts[0] += 1
            facts[1] += piece.changed
            facts[2] += _bytes_of(piece.runs)
    continued = {source for source, _ in renamed}
    return ShowResult(
        delta=name,
        base=delta.commit.base,
        target=delta.commit.target,
        delta_bytes=document_bytes + delta.commit.payload_bytes,
        document_bytes=document_bytes,
        payloads=delta.commit.payload_count,
        payload_bytes=delta.commit.payload_bytes,
        tensors=tensors,
        elements=elements,
        dense_bytes=dense_bytes,
        changed_tensors=sum(row.changed_elements > 0 for row in rows),
        changed_elements=sum(row.changed_elements for row in rows),
        whole_elements=sum(row.changed_elements for row in rows if row.is_whole),
        encodings=tuple(EncodingFacts(name, *facts) for name, facts in sorted(sums.items(), key=lambda s: -s[1][2])),
        new=tuple(new),
        removed=tuple(name for name in delta.manifest.removed if name not in continued),
        renamed=tuple(renamed),
        files=len(delta.manifest.files),
        sent_files=tuple(file.path for file in delta.manifest.files if file.runs),
        removed_files=tuple(file.path for file in delta.manifest.removed_files),
        skipped=tuple(delta.manifest.skipped),
        rows=tuple(sorted(rows, key=lambda row: (-row.bytes, row.name))),
        version=None,
        is_deep=True,
    )


def _changed(row: TensorRow, elements: int, *, is_new: bool) -> ChangedTensor:
    labels = dict.fromkeys(Encoding(piece.encoding).label for piece in row.pieces)
    return ChangedTensor(
        name=row.name,
        dtype=row.dtype,
        shape=row.shape,
        source=row.source,
        encoding="+".join(labels),
        elements=elements,
        changed_elements=0 if is_new else sum(piece.changed for piece in row.pieces),
        is_whole=any(piece.encoding == Encoding.WHOLE for piece in row.pieces),
        bytes=sum(_bytes_of(piece.runs) for piece in row.pieces),
    )


def _bytes_of(runs: tuple[Run, ...]) -> int:
    return sum(run.bytes for run in runs)
