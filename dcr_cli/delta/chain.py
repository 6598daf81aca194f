"""Deltas in order, each starting where the one before ends, as one that leads from the first base to the last target.

Only what the documents say is put together here; decoding one change after the other is the receiver's matter.

A tensor is gone over once, block by block, each delta's block for what the one before left there. That needs every
change of it to lie on the same blocks, as pieces without boxes do. The blocks of boxes, which come from ranks that
publish apart, lie across them: one needs what others have left, so that a tensor which one delta changes in boxes, and
another one too, cannot be brought from first to last in one pass. Such deltas are split into groups that go one after
the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.header import DTYPES, stored_elements
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.delta import Delta
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import FileRow, Manifest, Piece, RemovedFile, Run, TensorRow
from dcr_cli.delta.payload import States
from dcr_cli.delta.payload_reader import ReadsPayloads
from dcr_cli.errors import DamagedError, WrongBaseError

# What helps against a wrong base.
IN_ORDER = "apply the deltas in their order, or start from a full copy"
# The blake3 of a removed file that the base may have, with any bytes, or may not have: an earlier delta brings it.
ANY_BLAKE3 = b""
# Deltas of one pass: for each of them some payloads and coded blocks are open at a time.
MOST_AT_ONCE = 64

# A tensor's dtype, and how many elements are stored.
Form = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Chain:
    """Deltas that are applied in one pass; one alone is a chain too.

    `rows` and `digests` are the last target's. A row's source is a tensor of the first base. Of its pieces each is for
    what the one before left, unless they have boxes: then all are of one delta, and apart. `manifest` has these rows,
    its `removed` is the first delta's, its `removed_files` may have ANY_BLAKE3, and payloads are numbered through.
    """

    deltas: tuple[Delta, ...]
    rows: Sequence[TensorRow]
    digests: Sequence[bytes]
    manifest: Manifest

    @property
    def base(self) -> State:
        return self.deltas[0].commit.base

    @property
    def target(self) -> State:
        return self.deltas[-1].commit.target

    @property
    def commits(self) -> tuple[bytes, ...]:
        """The blake3 of each delta's commit."""
        return tuple(delta.commit_blake3 for delta in self.deltas)

    @property
    def first(self) -> Manifest:
        """What the base must be is what the first delta says."""
        return self.deltas[0].manifest

    @property
    def first_rows(self) -> Sequence[TensorRow]:
        return self.rows if len(self.deltas) == 1 else self.first.tensors

    @property
    def passed(self) -> list[Sequence[TensorRow]]:
        """The tensors of the versions that lie between base and target, in order."""
        return [delta.manifest.tensors for delta in self.deltas[:-1]]


class ChainPayloads:
    """Reads the payloads of deltas in order, numbered through; for any number of threads.

    Each delta's own payloads are read by one of `readers`, which somebody else closes. Errors are theirs.
    """

    def __init__(self, readers: Sequence[ReadsPayloads]) -> None:
        self._readers = readers
        self._starts = _starts([reader.count for reader in readers])

    def states(self, payload: int) -> States:
        """The starting states of a payload."""
        number = self.delta_of(payload)
        return self._readers[number].states(payload - self._starts[number])

    def runs_bytes(self, payload: int) -> int:
        """How many bytes the runs of a payload have together."""
        number = self.delta_of(payload)
        return self._readers[number].runs_bytes(payload - self._starts[number])

    def run_bytes(self, run: Run, start: int = 0, stop: int | None = None) -> memoryview:
        """Read the bytes `start` to `stop` of a run, all of them if not told otherwise."""
        number = self.delta_of(run.payload)
        return self._readers[number].run_bytes(_renumbered(run, -self._starts[number]), start, stop)

    def delta_of(self, payload: int) -> int:
        """Which delta, by its number in the chain, a payload is of."""
        return bisect_right(self._starts, payload) - 1

    def name_of(self, payload: int) -> str:
        """What a payload is called in messages: its number, and its delta if there are several."""
        number = self.delta_of(payload)
        name = f"payload {payload - self._starts[number]}"
        return name if len(self._readers) == 1 else f"{name} of {self._readers[number].folder}"


def check_chain(deltas: Sequence[Delta]) -> None:
    """Raise WrongBaseError unless each delta starts at the state that the one before it ends at."""
    for before, delta in pairwise(deltas):
        for what, ends, starts in (
            ("content", before.commit.target.content, delta.commit.base.content),
            ("files", before.commit.target.files, delta.commit.base.files),
        ):
            if ends != starts:
                facts = f"does not start where {shown(str(before.folder))} ends: expected {what} blake3:{ends.hex()}, "
                facts += f"found blake3:{starts.hex()}"
                raise WrongBaseError(f"delta {delta.folder}", facts, hint="give the deltas in their order, without gap")


def compose(deltas: Sequence[Delta]) -> Chain:
    """Put deltas together that can be applied in one pass, as `split` finds them.

    WrongBaseError or DamagedError if one says of its base what the one before does not say of its target.
    """
    last = deltas[-1]
    pairs = list(last.tensors())
    rows = [row for row, _ in pairs]
    if len(deltas) > 1:
        # No more than two of them at a time: each has an entry for every tensor.
        lineages = deque(_lineages(deltas), maxlen=1)[0].values()
        rows = [
            replace(row, source=lineage.source, pieces=lineage.pieces, digest=digest if lineage.pieces else None)
            for (row, digest), lineage in zip(pairs, lineages, strict=True)
        ]
    files, removed_files = compose_files(deltas)
    payloads = [payload for delta in deltas for payload in delta.manifest.payloads]
    manifest = Manifest(rows, deltas[0].manifest.removed, files, removed_files, payloads, last.manifest.skipped)
    return Chain(tuple(deltas), rows, [digest for _, digest in pairs], manifest)


def compose_files(deltas: Sequence[Delta]) -> tuple[list[FileRow], list[RemovedFile]]:
    """The files of the last target, with the runs of the delta that brings them, and those of the base that it has not.

    A file that an earlier delta brings, and a later one removes, is removed with any bytes.
    """
    files: dict[str, FileRow] = {}
    gone: dict[str, bytes] = {}
    for number, (delta, start) in enumerate(zip(deltas, _payload_starts(deltas), strict=True)):
        manifest, before = delta.manifest, files
        if number:
            _check_files_follow(before, delta)
        for file in manifest.removed_files:
            is_carried = number and before[file.path].runs
            gone.setdefault(file.path, ANY_BLAKE3 if is_carried else file.blake3)
        files = {
            row.path: replace(row, runs=tuple(_renumbered(run, start) for run in row.runs))
            if row.runs
            else before.get(row.path, row)
            for row in manifest.files
        }
    removed = [RemovedFile(path, blake3) for path, blake3 in sorted(gone.items()) if path not in files]
    return list(files.values()), removed


def is_removed(removed: Mapping[str, bytes], path: str, blake3: bytes) -> bool:
    """Whether a file is one of the `removed` ones, path -> blake3, of a chain."""
    return path in removed and removed[path] in (blake3, ANY_BLAKE3)


def split(deltas: Sequence[Delta]) -> list[tuple[Delta, ...]]:
    """Split deltas into the fewest groups that can each be applied in one pass; most often that is one."""
    if not deltas:
        return []
    if len(deltas) == 1 or (len(deltas) <= MOST_AT_ONCE and _reach(deltas)[-1:] == [len(deltas)]):
        return [tuple(deltas)]
    ends: dict[int, tuple[int, ...]] = {len(deltas): ()}
    for start in reversed(range(len(deltas))):
        ways = ((start + count, *ends[start + count]) for count in _reach(deltas[start : start + MOST_AT_ONCE]))
        ends[start] = min(ways, key=len)
    return [tuple(deltas[start:end]) for start, end in pairwise((0, *ends[0]))]


def check_tensors(before: Mapping[str, Form], rows: Sequence[TensorRow], removed: Sequence[str], what: str) -> None:
    """Raise WrongBaseError if tensors `before`, by name, cannot be the base of a delta with these rows."""
    for row in rows:
        if row.source is None:
            continue
        found = before.get(row.source)
        if found is None:
            facts = f"has no tensor {shown(row.source)}, from which the delta makes {shown(row.name)}"
            raise WrongBaseError(what, facts, hint=IN_ORDER)
        dtype, elements = _form(row)
        if found != (dtype, elements):
            facts = f"expected {elements} elements of {dtype}, found {found[1]} of {found[0]}"
            raise WrongBaseError(what, f"tensor {shown(row.source)}: {facts}", hint=IN_ORDER)
    for name in removed:
        if name not in before:
            raise WrongBaseError(what, f"has no tensor {shown(name)}, which the delta removes", hint=IN_ORDER)
    names = {row.name for row in rows}.union(removed)
    for name in before:
        if name not in names:
            raise WrongBaseError(what, f"has tensor {shown(name)}, which the delta does not know", hint=IN_ORDER)


class _Lineage(NamedTuple):
    """How a tensor comes from one of the base, or from nowhere.

    `boxed` is the shape that its pieces' boxes lie in; `is_mixed`: there are boxes, and something else.
    """

    form: Form
    source: str | None
    pieces: tuple[Piece, ...]
    boxed: tuple[int, ...] | None
    is_mixed: bool


def _reach(deltas: Sequence[Delta]) -> list[int]:
    """How many of the first deltas can be applied in one pass: all numbers for which that is so."""
    counts = []
    for count, lineages in enumerate(_lineages(deltas), 1):
        if deltas[count - 1].manifest.skipped != deltas[0].manifest.skipped:
            # What is a file of the one is none of the other.
            break
        if not any(lineage.is_mixed for lineage in lineages.values()):
            counts.append(count)
    return counts


def _lineages(deltas: Sequence[Delta]) -> Iterator[dict[str, _Lineage]]:
    """The tensors of each target in turn, in canonical order, seen from the first base."""
    before: dict[str, _Lineage] = {}
    for number, (delta, start) in enumerate(zip(deltas, _payload_starts(deltas), strict=True)):
        rows = list(delta.manifest.tensors)
        if number:
            forms = {name: lineage.form for name, lineage in before.items()}
            check_tensors(forms, rows, delta.manifest.removed, f"the target of {deltas[number - 1].folder}")
        before = {
            row.name: _lineage(row, before[row.source] if number and row.source is not None else None, start)
            for row in rows
        }
        yield before


def _lineage(row: TensorRow, before: _Lineage | None, first_payload: int) -> _Lineage:
    """Go on from what the source is; without, the row's source is the base's, or it has none."""
    form = _form(row)
    pieces = tuple(
        replace(piece, runs=tuple(_renumbered(run, first_payload) for run in piece.runs)) if first_payload else piece
        for piece in row.pieces
    )
    boxed = row.shape if pieces and pieces[0].box is not None else None
    if before is None:
        return _Lineage(form, row.source, pieces, boxed, is_mixed=False)
    if not pieces:
        is_mixed = before.is_mixed or before.boxed not in (None, row.shape)
        return before._replace(is_mixed=is_mixed)
    if boxed is None and pieces[0].encoding == Encoding.WHOLE:
        # It needs nothing of what was there before.
        return _Lineage(form, before.source, pieces, None, is_mixed=False)
    is_mixed = before.is_mixed or bool(before.pieces if boxed is not None else before.boxed is not None)
    return _Lineage(form, before.source, before.pieces + pieces, before.boxed or boxed, is_mixed)


def _check_files_follow(before: Mapping[str, FileRow], delta: Delta) -> None:
    """Raise DamagedError unless a delta says of its base's files, which are `before`, what is so."""
    what, manifest = f"manifest of {delta.folder}", delta.manifest
    for row in manifest.files:
        known = before.get(row.path)
        if not row.runs and (
            known is None or (known.kind, known.size, known.blake3) != (row.kind, row.size, row.blake3)
        ):
            raise DamagedError(what, f"says that {shown(row.path)} is the base's, but it is not")
    kept = {row.path for row in manifest.files}
    gone = {path: row.blake3 for path, row in before.items() if row.kind == SIDECAR and path not in kept}
    if gone != {file.path: file.blake3 for file in manifest.removed_files}:
        raise DamagedError(what, "does not name the files of the base that the target has not")


def _form(row: TensorRow) -> Form:
    return row.dtype, stored_elements(DTYPES[row.dtype], row.shape)


def _payload_starts(deltas: Sequence[Delta]) -> list[int]:
    """The number of each delta's first payload."""
    return _starts([len(delta.manifest.payloads) for delta in deltas])


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts[:-1], initial=0))


def _renumbered(run: Run, by: int) -> Run:
    return Run(run.payload + by, run.offset, run.bytes, run.blocks) if by else run
