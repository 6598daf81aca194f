"""Says whether a checkpoint holds the bits it should: another checkpoint's, a delta's target's, those of a version of a
remote, or its own record's.

It compares tensors, wherever they lie, and sidecars; not how tensors are divided into shards. It writes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.arguments import check_path, check_version
from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, Tensor, open_checkpoint, unless_changed
from dcr_cli.checkpoint.digest import blake3_text, digest_bytes, digest_text
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.checkpoint.patterns import check_patterns
from dcr_cli.content import Blocks, Side, Workers, in_file_order, read_spans, read_state, tensor_digests, tensor_of_part
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.delta.scan import Part, parts_of
from dcr_cli.errors import NotFoundError, UsageError
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.layout.opening import layout_given, noted_path, open_any
from dcr_cli.reference import (
    Reference,
    StateReference,
    reference_of_delta,
    reference_of_record,
    reference_of_remote,
)
from dcr_cli.remote.signing import trust_in
from dcr_cli.store.opening import open_store

Progress = Callable[[str, int, int], None]
Opened = tuple[Checkpoint, Reader]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs; `kind` says what `expected` and `found` are.

    bits: the bit patterns of the first element that differs, in hexadecimal; `count` elements differ, the first one is
    element `first_flat`, at `first_index` in the tensor's shape. digest: the digests of the whole tensor, which do not
    say where it differs. dtype, shape: these. content: the content digests of all tensors together, which are all that
    an anchor tells; `tensor` is empty then.
    """

    tensor: str
    kind: str
    count: int | None
    first_flat: int | None
    first_index: tuple[int, ...] | None
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class SidecarDifference:
    """A file beside the shards that differs; `kind` is bytes, missing or extra."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found. `matches` is true only if something was compared and all of it was equal."""

    checkpoint: str
    reference: str
    matches: bool
    checked_tensors: int
    checked_bytes: int
    checked_sidecars: int
    differences: tuple[TensorDifference, ...]
    extra: tuple[str, ...]
    missing: tuple[str, ...]
    sidecars: tuple[SidecarDifference, ...]


def verify(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    delta: str | Path | None = None,
    remote: str | Path | None = None,
    version: int | None = None,
    trusted_keys: Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: int | None = None,
    jobs: int | None = None,
    skip: Sequence[str] = (),
    layout: str | Path | None = None,
    against_layout: str | Path | None = None,
    functions: Sequence[str] = (),
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every byte of `checkpoint` and compare it with another one, with a delta's target, with a version of a
    remote (if not told which, the one that it was pulled to, or else the newest), or with its own record.

    With `layout`, `checkpoint` is shards of ranks, whose tensors belong where that file says; shards of PyTorch's
    distributed checkpoint say it themselves; `against_layout` is such a file for `against`. `functions`, each
    `module:function`, are those that the layouts may call.
    Of a remote only documents are fetched, and only those count that one of `trusted_keys` has signed. Files that a
    pattern of `skip` matches are no part of either. Memory does not depend on the size of the checkpoints.
    Raises NotFoundError (also when there is neither a record nor anything to compare with), DamagedError
    (IncompleteError when an apply was stopped), ConflictError when a file changes while it is read, UsageError.
    """
    given = [name for name, each in (("against", against), ("delta", delta), ("remote", remote)) if each is not None]
    if len(given) > 1:
        raise UsageError("verify", f"{' and '.join(given)} exclude each other", hint="leave one of them out")
    if version is not None and remote is None:
        raise UsageError("verify", "a version is one of a remote", hint="say which remote")
    if against_layout is not None and against is None:
        raise UsageError("verify", "a layout of what is compared with needs that", hint="say against which shards")
    check_version(version)
    check_patterns(skip)
    check_path(checkpoint, "checkpoint")
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(jobs, "verify", progress))
        if against is not None:
            expected = open_any(against, layout=layout_given(against_layout, functions), skip=skip, what="reference")
            found = open_any(checkpoint, layout=layout_given(layout, functions), like=expected, skip=skip)
            readers = stack.enter_context(found.reader()), stack.enter_context(expected.reader())
            stack.enter_context(unless_changed(*readers))
            return _against_checkpoint(workers, (found, readers[0]), (expected, readers[1]))
        reference: Reference | StateReference
        if remote is not None:
            with open_store(remote, storage_options, limit_bytes_per_second=limit_bytes_per_second) as store:
                reference = reference_of_remote(store, checkpoint, version, trust_in(trusted_keys, "--trusted-key"))
        else:
            reference = reference_of_delta(delta) if delta is not None else _record_of(checkpoint, skip)
        found = open_any(
            checkpoint, layout=layout_given(layout, functions), skip=tuple(dict.fromkeys((*skip, *reference.skipped)))
        )
        opened = found, stack.enter_context(found.reader())
        stack.enter_context(unless_changed(opened[1]))
        if isinstance(reference, StateReference):
            return _against_state(workers, opened, reference)
        return _against_digests(workers, opened, reference)


def _record_of(checkpoint: str | Path, skip: Sequence[str]) -> Reference:
    try:
        return reference_of_record(checkpoint)
    except NotFoundError:
        # There may be no checkpoint at all, or an apply that was stopped: these are the better answers.
        open_checkpoint(checkpoint, skip=skip)
        raise


def _against_checkpoint(workers: Workers, found: Opened, expected: Opened) -> VerifyResult:
    differences, comparable = [], []
    for tensor in in_file_order(found[0].tensors):
        other = expected[0].by_name.get(tensor.name)
        if other is None or not _is_held(found[0], tensor):
            continue
        form = _form_difference(tensor, other.dtype.name, other.shape)
        if form is None:
            comparable.append((other, tensor))
        else:
            differences.append(form)
    first: dict[int, _Spot] = {}
    counts: Counter[int] = Counter()
    parts = (part for row, (other, tensor) in enumerate(comparable) for part in parts_of(row, other, tensor))
    total_bytes = sum(tensor.bytes for _, tensor in comparable)
    for spot in workers.results(_Comparer(found, expected).compare, parts, total_bytes):
        first.setdefault(spot.row, spot)
        counts[spot.row] += spot.count
    differences += [_bits_difference(comparable[row][1], spot, counts[row]) for row, spot in first.items()]
    sidecars = _compare_sidecars(found, expected)
    found[1].check_unchanged()
    expected[1].check_unchanged()
    names = {tensor.name for tensor in expected[0].tensors}
    return _result(found[0], str(expected[0].root), names, [tensor for _, tensor in comparable], differences, sidecars)


def _against_digests(workers: Workers, found: Opened, reference: Reference) -> VerifyResult:
    differences, comparable = [], []
    for tensor in in_file_order(found[0].tensors):
        row = reference.tensors.get(tensor.name)
        if row is not None:
            form = _form_difference(tensor, row.dtype, row.shape)
            if form is None:
                comparable.append(tensor)
            else:
                differences.append(form)
    digests = tensor_digests(workers, Side(*found, tensor_of_part), comparable)
    for tensor, digest in zip(comparable, digests, strict=True):
        wanted = reference.tensors[tensor.name].digest
        if digest_bytes(digest) != wanted:
            texts = digest_text(wanted), digest_text(digest)
            differences.append(TensorDifference(tensor.name, "digest", None, None, None, *texts))
    records, sidecars = _sidecars_against(found, reference)
    found[1].check_unchanged()
    names = set(reference.tensors)
    return _result(found[0], reference.name, names, comparable, differences, (len(records), sidecars))


def _against_state(workers: Workers, found: Opened, reference: StateReference) -> VerifyResult:
    state, digests = read_state(workers, *found)
    differences = []
    if state.content != reference.content:
        texts = blake3_text(reference.content), blake3_text(state.content)
        differences.append(TensorDifference("", "content", None, None, None, *texts))
    records, sidecars = _sidecars_against(found, reference)
    checked = list(found[0].tensors)
    return _result(found[0], reference.name, set(digests), checked, differences, (len(records), sidecars))


def _result(
    found: Checkpoint,
    reference: str,
    names: set[str],
    checked: list[Tensor],
    differences: list[TensorDifference],
    sidecars: tuple[int, list[SidecarDifference]],
) -> VerifyResult:
    extra = tuple(tensor.name for tensor in found.tensors if tensor.name not in names)
    missing = tuple(sorted(names - found.by_name.keys()))
    return VerifyResult(
        checkpoint=str(found.root),
        reference=reference,
        # A comparison of nothing is not a match.
        matches=bool(checked) and not (differences or extra or missing or sidecars[1]),
        checked_tensors=len(checked),
        checked_bytes=sum(tensor.bytes for tensor in checked),
        checked_sidecars=sidecars[0],
        differences=tuple(sorted(differences, key=lambda difference: difference.tensor)),
        extra=extra,
        missing=missing,
        sidecars=tuple(sidecars[1]),
    )


def _form_difference(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> TensorDifference | None:
    if tensor.dtype.name != dtype:
        return TensorDifference(tensor.name, "dtype", None, None, None, dtype, tensor.dtype.name)
    if tensor.shape != shape:
        return TensorDifference(tensor.name, "shape", None, None, None, str(list(shape)), str(list(tensor.shape)))
    return None


def _bits_difference(tensor: Tensor, spot: _Spot, count: int) -> TensorDifference:
    # F4 and F6 are compared as packed bytes: their positions are no indices into the shape.
    is_packed = tensor.elements != math.prod(tensor.shape)
    index = (spot.flat,) if is_packed else tuple(int(i) for i in np.unravel_index(spot.flat, tensor.shape))
    digits = 2 * tensor.dtype.width
    bits = [f"0x{value:0{digits}x}" for value in (spot.expected, spot.found)]
    return TensorDifference(tensor.name, "bits", count, spot.flat, index, bits[0], bits[1])


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a part of tensor number `row` differs first, and in how many elements."""

    row: int
    count: int
    flat: int
    expected: int
    found: int


class _Comparer:
    """Compares parts of two checkpoints; its method may be called from several threads."""

    def __init__(self, found: Opened, expected: Opened) -> None:
        self._sides = Side(*expected, _base_of), Side(*found, _target_of)
        self._blocks = Blocks()

    def compare(self, parts: list[Part]) -> list[_Spot]:
        spots = []
        for span, (expected, found) in read_spans(parts, self._sides, self._blocks):
            if len(span) > 1 and np.array_equal(expected, found):
                continue
            begin = 0
            for part in span:
                end = begin + part.bytes
                spot = _compare(part, expected[begin:end], found[begin:end])
                if spot is not None:
                    spots.append(spot)
                begin = end
        return spots


def _compare(part: Part, expected: NDArray[np.uint8], found: NDArray[np.uint8]) -> _Spot | None:
    dtype = uint_dtype(part.tensor.dtype.width)
    # Within a span, a part may begin at any byte; its elements are aligned by a copy.
    old, new = (np.require(side.view(dtype), requirements="A") for side in (expected, found))
    positions = kernels.scan(old, new)
    if not len(positions):
        return None
    at = int(positions[0])
    return _Spot(part.row, len(positions), part.start + at, int(old[at]), int(new[at]))


def _base_of(part: Part) -> Tensor:
    assert part.base is not None
    return part.base


def _target_of(part: Part) -> Tensor:
    assert part.target is not None
    return part.target


def _compare_sidecars(found: Opened, expected: Opened) -> tuple[int, list[SidecarDifference]]:
    records, others = _sidecar_records(found), _sidecar_records(expected)
    differences = _differing(records, others)
    if _may_lack_sidecars(found[0]):
        differences = [each for each in differences if each.kind != "missing"]
    if _may_lack_sidecars(expected[0]):
        differences = [each for each in differences if each.kind != "extra"]
    return len(records.keys() & others.keys()), differences


def _sidecars_against(
    found: Opened, reference: Reference | StateReference
) -> tuple[dict[str, bytes], list[SidecarDifference]]:
    """The records of a checkpoint's sidecars, and which ones differ."""
    records = _sidecar_records(found)
    differences = _differing(records, reference.sidecars)
    if _may_lack_sidecars(found[0]):
        differences = [each for each in differences if each.kind != "missing"]
    return records, differences


def _sidecar_records(opened: Opened) -> dict[str, bytes]:
    """The digests of the sidecars that lie in a checkpoint's own folder."""
    checkpoint, reader = opened
    return {
        file.path: file.blake3
        for file in checkpoint.files_digest(reader)
        if file.kind == SIDECAR and file.path in checkpoint.identities
    }


def _may_lack_sidecars(checkpoint: Checkpoint) -> bool:
    """Whether these are shards as a trainer's ranks write them, which bring tensors alone; a receiver has all."""
    return isinstance(checkpoint, LaidCheckpoint) and noted_path(checkpoint.root) is None


def _is_held(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Whether a tensor is in the files of a checkpoint; one that a layout skips is not."""
    return not isinstance(checkpoint, LaidCheckpoint) or tensor.name in checkpoint.sources


def _differing(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[SidecarDifference]:
    differences = []
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            kind = "missing" if path not in found else "extra" if path not in expected else "bytes"
            differences.append(SidecarDifference(path, kind))
    return differences
