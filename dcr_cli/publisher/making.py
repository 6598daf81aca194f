"""Makes a delta from tensors that come one by one, in any order and from any thread, against a base that stays.

Whatever is coded after a tensor was added has its own copy of what that needs, so that its memory may change at once.
Sending the delta is outgoing.py's matter, the life of a version publication.py's.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dcr_cli.checkpoint.checkpoint import FileDigest, Tensor
from dcr_cli.checkpoint.digest import (
    State,
    TensorDigest,
    add,
    content_digest,
    digest_bytes,
    files_digest,
    no_digest,
    object_digest,
)
from dcr_cli.checkpoint.names import path_fault, shown
from dcr_cli.checkpoint.parts import MAX_SIDECAR_BYTES, SIDECAR, is_top_shard, is_weight_map, second_copy_pattern
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.encoder import PieceEncoder
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.feed import PieceFeed, write_file
from dcr_cli.delta.manifest import FileRow, Manifest, Piece, RemovedFile, Run, TensorRow
from dcr_cli.delta.matching import TWIN_BYTES
from dcr_cli.delta.output import Sink
from dcr_cli.delta.scan import is_sent_whole
from dcr_cli.device.wish import Wish
from dcr_cli.errors import UnsupportedError, UsageError, WrongBaseError
from dcr_cli.publisher.bases import Base, Change, Description
from dcr_cli.publisher.comparing import Comparer
from dcr_cli.publisher.devices import Devices, Taken
from dcr_cli.publisher.given import PUSH_INSTEAD
from dcr_cli.stages import Account, Stages


@dataclass(slots=True)
class _Row:
    """What was added of one tensor. One whose `twin` is set has the changes of that one."""

    tensor: Tensor
    base_digest: TensorDigest = field(default_factory=no_digest)
    growth: TensorDigest = field(default_factory=no_digest)
    changed: int = 0
    twin: _Row | None = None
    encoding: Encoding | None = None
    runs: tuple[Run, ...] = ()

    @property
    def target_digest(self) -> bytes:
        return digest_bytes(add(self.base_digest, self.growth))


@dataclass(frozen=True, slots=True)
class Made:
    """What a delta leads from and to, how much of it changed, and what is there in the end."""

    base: State
    target: State
    description: Description
    changed_tensors: int
    changed_elements: int

    @property
    def changed(self) -> tuple[int, int]:
        """How many tensors and elements changed."""
        return self.changed_tensors, self.changed_elements


class Making:
    """A delta that is being made; a context manager. `add` may be called from any thread, one tensor goes at a time.

    `changes` are those of the blocks that changed, if the base wants them kept.
    """

    def __init__(self, base: Base, sink: Sink, allowed: Allowed, jobs: int, wish: Wish) -> None:
        """UnsupportedError if the device that is wished for cannot be had."""
        stages = Stages()
        self._devices = Devices(wish, allowed, stages)
        self._base = base
        self._sink = sink
        self._allowed = allowed
        self._pool = ThreadPoolExecutor(jobs, "dcr-publish")
        self._comparer = Comparer(base, allowed, self._pool, jobs, stages)
        self._encoder = PieceEncoder(self._pool, sink.writer, allowed, tasks=2 * jobs, stages=stages)
        self._tensors = {tensor.name: tensor for tensor in base.tensors}
        self._rows: dict[str, _Row] = {}
        self._by_kind: dict[tuple[str, int, bytes], list[_Row]] = {}
        self._files: dict[str, bytes | None] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        self.changes: list[Change] = []

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, name: str, given: Any) -> None:
        """Add a tensor, which may change as soon as this returns.

        UnsupportedError, UsageError if it cannot be what the base calls so, and nothing was done; after any other error
        the delta cannot be ended.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise UnsupportedError(f"tensor {shown(name)}", "is not in the version before", hint=PUSH_INSTEAD)
        taken = self._devices.take(given, tensor)
        with self._lock:
            self._check_whole()
            if name in self._rows:
                raise UsageError(f"tensor {shown(name)}", "was added twice")
            row = self._rows[name] = _Row(tensor)
            self._broken = f"adding tensor {shown(name)} went wrong"
            self._compare(row, taken)
            self._broken = None

    def add_file(self, path: str, data: bytes) -> None:
        """Have a file beside the shards be this; UsageError if it can be none."""
        if (fault := path_fault(path)) is not None:
            raise UsageError(f"file {shown(path)}", f"unsafe name: {fault}")
        if (
            is_top_shard(path)
            or is_weight_map(path)
            or any(f.path == path and f.kind != SIDECAR for f in self._base.files)
        ):
            raise UsageError(f"file {shown(path)}", "shards and the weight map stay what they are", hint=PUSH_INSTEAD)
        if second_copy_pattern(path) is not None:
            raise UsageError(f"file {shown(path)}", "would be a second copy of the weights")
        if Patterns(self._base.skipped).match(path):
            raise UsageError(f"file {shown(path)}", "matches a skip pattern that its history was published with")
        if len(data) > MAX_SIDECAR_BYTES:
            facts = f"has {len(data)} bytes, more than the {MAX_SIDECAR_BYTES} that a file beside the shards may have"
            raise UsageError(f"file {shown(path)}", facts)
        self._set_file(path, bytes(data))

    def remove_file(self, path: str) -> None:
        """Have a file beside the shards be no more; UsageError if there is none."""
        if not any(file.path == path and file.kind == SIDECAR for file in self._base.files):
            raise UsageError(f"file {shown(path)}", "is no file beside the shards of the version before")
        self._set_file(path, None)

    def finish(self, expected: State | None) -> Made:
        """Write what is left, and the documents. WrongBaseError if the base is not in the state that it should be, if
        that is known."""
        with self._lock:
            self._check_whole()
            self._broken = "the delta was ended"
            base_digests = self._base_digests()
            self._encoder.close()
            file_rows = self._file_rows()
            self._base.check_unchanged()
            base_state, target_state = self._states(base_digests, file_rows)
            if expected is not None and base_state != expected:
                raise WrongBaseError(self._base.what, "is not at the newest version", hint="remove it, and push again")
            tensors = [self._tensor_row(tensor) for tensor in self._base.tensors]
            digests = [self._target_digest(tensor.name, base_digests) for tensor in self._base.tensors]
            self._sink.finish(self._manifest(tensors, file_rows), digests, base_state, target_state)
            changed = [row.changed for row in self._rows.values()]
            by_name = {tensor.name: digest for tensor, digest in zip(self._base.tensors, digests, strict=True)}
            files = tuple(FileDigest(row.path, row.kind, row.size, row.blake3) for row in file_rows)
            description = Description(tuple(self._base.tensors), files, self._base.skipped, by_name)
            return Made(base_state, target_state, description, sum(map(bool, changed)), sum(changed))

    def account(self) -> Account:
        """How tensors were compared so far."""
        return self._devices.account()

    # Tensors

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise UsageError("publisher", f"{self._broken}; nothing can be added", hint="begin() again")

    def _compare(self, row: _Row, taken: Taken) -> None:
        """Compare a tensor block by block, a bounded number of blocks ahead, and have what changed be coded."""
        tensor = row.tensor
        twin = self._find_twin(row, taken)
        if twin is not None:
            row.twin, row.base_digest, row.growth, row.changed = twin, twin.base_digest, twin.growth, twin.changed
            self._keep_changes_of(twin, tensor)
            return
        whole = is_sent_whole(tensor, self._allowed)
        feed = PieceFeed(self._encoder, tensor.dtype, partial(self._comparer.load_unchanged, tensor), whole=whole)
        for found in self._comparer.compare(tensor, taken):
            row.base_digest, row.growth = add(row.base_digest, found.base_digest), add(row.growth, found.growth)
            feed.add(found.draft, found.load)
            if found.change is not None and self._base.keeps_changes:
                self.changes.append(found.change)
        feed.end(partial(_remember, row))
        row.changed = feed.changed
        known = self._base.digests.get(tensor.name)
        if known is not None and digest_bytes(row.base_digest) != known:
            facts = f"tensor {shown(tensor.name)} is not what it was at the newest version"
            raise WrongBaseError(self._base.what, facts, hint="make the baseline anew from the newest version")
        self._by_kind.setdefault(_kind(row), []).append(row)

    def _find_twin(self, row: _Row, taken: Taken) -> _Row | None:
        """A tensor that was and is the same as this one: then its changes are this one's, too."""
        tensor = row.tensor
        known = self._base.digests.get(tensor.name)
        if known is None or tensor.bytes < TWIN_BYTES:
            return None
        alike = self._by_kind.get((tensor.dtype.name, tensor.bytes, known), ())
        if not alike:
            return None
        total = digest_bytes(self._comparer.digest_given(tensor, taken))
        return next((other for other in alike if other.target_digest == total), None)

    def _keep_changes_of(self, twin: _Row, tensor: Tensor) -> None:
        self.changes += [
            replace(change, part=change.part._replace(base=tensor))
            for change in self.changes
            if change.part.tensor is twin.tensor
        ]

    def _base_digests(self) -> dict[str, bytes]:
        """The base's digests of all tensors; those that nobody knows are read."""
        found = {name: digest_bytes(row.base_digest) for name, row in self._rows.items()}
        for tensor in self._base.tensors:
            if tensor.name not in found:
                known = self._base.digests.get(tensor.name)
                found[tensor.name] = known or digest_bytes(self._comparer.digest(self._base, tensor))
        return found

    def _target_digest(self, name: str, base_digests: dict[str, bytes]) -> bytes:
        row = self._rows.get(name)
        return row.target_digest if row is not None else base_digests[name]

    def _tensor_row(self, tensor: Tensor) -> TensorRow:
        row = self._rows.get(tensor.name)
        origin = row.twin or row if row is not None else None
        pieces: tuple[Piece, ...] = ()
        digest = None
        if row is not None and origin is not None and origin.encoding is not None:
            changed = tensor.elements if origin.encoding is Encoding.WHOLE else origin.changed
            pieces = (Piece(int(origin.encoding), changed, None, origin.runs),)
            digest = row.target_digest
        return TensorRow(tensor.name, tensor.dtype.name, tensor.shape, tensor.name, pieces, digest)

    # Files and states

    def _set_file(self, path: str, data: bytes | None) -> None:
        with self._lock:
            self._check_whole()
            if path in self._files:
                raise UsageError(f"file {shown(path)}", "was added or removed twice")
            self._files[path] = data

    def _file_rows(self) -> list[FileRow]:
        rows = {file.path: FileRow(file.path, file.kind, file.size, file.blake3, ()) for file in self._base.files}
        for path, data in self._files.items():
            known = rows.pop(path, None)
            if data is None:
                continue
            digest = object_digest(data)
            is_same = known is not None and known.blake3 == digest
            runs = () if is_same else write_file(self._sink.writer, data)
            rows[path] = FileRow(path, SIDECAR, len(data), digest, runs)
        return [rows[path] for path in sorted(rows)]

    def _manifest(self, tensors: list[TensorRow], files: list[FileRow]) -> Manifest:
        kept = {row.path for row in files}
        removed = tuple(RemovedFile(file.path, file.blake3) for file in self._base.files if file.path not in kept)
        return Manifest(tuple(tensors), (), tuple(files), removed, self._sink.writer.finish(), self._base.skipped)

    def _states(self, base_digests: dict[str, bytes], files: list[FileRow]) -> tuple[State, State]:
        tensors = self._base.tensors
        old = content_digest((t.name, t.dtype.name, t.shape, base_digests[t.name]) for t in tensors)
        new = content_digest(
            (t.name, t.dtype.name, t.shape, self._target_digest(t.name, base_digests)) for t in tensors
        )
        old_files, new_files = (
            files_digest((file.path, file.kind, file.blake3) for file in each) for each in (self._base.files, files)
        )
        return State(old, old_files), State(new, new_files)


def _remember(row: _Row, encoding: Encoding, runs: tuple[Run, ...]) -> None:
    row.encoding, row.runs = encoding, runs


def _kind(row: _Row) -> tuple[str, int, bytes]:
    return row.tensor.dtype.name, row.tensor.bytes, digest_bytes(row.base_digest)
