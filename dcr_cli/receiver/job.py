"""What an apply reads from, deltas and a base, and what their digests say about each other.

Nothing is changed here; bits that do not fit are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import DIGEST_BYTES, content_digest, digest_bytes, digest_text, object_digest
from dcr_cli.checkpoint.folder import AT_REST, Files, Identity
from dcr_cli.checkpoint.header import Header, parse_header
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.checkpoint.parts import WEIGHT_MAP
from dcr_cli.checkpoint.weight_map import check_agreement, parse_weight_map
from dcr_cli.delta.chain import IN_ORDER, Chain, ChainPayloads
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.delta.manifest import FileRow, TensorRow
from dcr_cli.delta.payload import split_run
from dcr_cli.delta.whole import decode_whole
from dcr_cli.errors import ConflictError, DamagedError, WrongBaseError
from dcr_cli.layout.gather import ReadsPaths
from dcr_cli.receiver.base import Base
from dcr_cli.receiver.file_plan import check_files
from dcr_cli.receiver.laid.files import LaidFiles
from dcr_cli.receiver.laid.plan import check_tied, make_laid_plan
from dcr_cli.receiver.passes.digests import Digests
from dcr_cli.receiver.passes.passes import run_pass
from dcr_cli.receiver.passes.tasks import ShardWork, Source
from dcr_cli.receiver.plan import Plan, make_plan, shard_of_tensors

Progress = Callable[[str, int, int], None]
Sums = NDArray[np.uint32]
# Of a digest, where people compare two of them.
_SHOWN_DIGITS = 16


class Target:
    """A chain of deltas, ready to be decoded: its rows, and the digests that they must end with, as sums [rows, 4].

    `remote` is where the deltas come from, for people, if it is not from where they lie.
    """

    def __init__(
        self,
        chain: Chain,
        payloads: ChainPayloads,
        jobs: int,
        progress: Progress | None,
        *,
        remote: str | None = None,
    ) -> None:
        self.chain = chain
        self.payloads = payloads
        self.remote = remote
        self.jobs = jobs
        self.progress = progress or (lambda stage, done, total: None)
        self.rows: Sequence[TensorRow] = chain.rows
        self.digests: Sequence[bytes] = chain.digests
        self.sums = sums_of(self.digests)
        # Elements that the pieces of each row change.
        self.changed = np.array([sum(piece.changed for piece in row.pieces) for row in self.rows], np.int64)

    def file_bytes(self, file: FileRow) -> bytes:
        """Decode a file that the delta carries; DamagedError if it is not what its row says."""
        parts = []
        left = file.size
        for run in file.runs:
            try:
                data = self.payloads.run_bytes(run)
                bounds = split_run(data, run, 0).tolist()
                for begin, end in pairwise(bounds):
                    size = min(left, BLOCK_BYTES)
                    parts.append(decode_whole(data[begin:end], size, 1).tobytes())
                    left -= size
            except ValueError as error:
                what = f"file {shown(file.path)} in {self.payloads.name_of(run.payload)}"
                raise DamagedError(what, str(error)) from error
        content = b"".join(parts)
        if object_digest(content) != file.blake3:
            raise DamagedError(
                f"file {shown(file.path)}", "is not, once decoded, what the manifest says: its blake3 differs"
            )
        return content


class Job:
    """A target and the base it is made from, whose files, below `root`, must be those of `identities` when they are
    read.

    `known` are the digests of its tensors, if they are known.
    """

    def __init__(
        self, target: Target, base: Base, root: Path, identities: Mapping[str, Identity], known: Sums | None
    ) -> None:
        self.target = target
        self.base = base
        self.root = root
        self.identities = identities
        self.what = str(root)
        self._shard_of = {shard.path: shard for shard in base.shards}
        self.known = known
        self.tensors: list[Tensor] = [base.by_name[name] for name in sorted(base.by_name)]
        self.number_of = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        # A source that the base has not counts as none here; check_tensors tells.
        self.source_of = np.array([self.number_of.get(row.source or "", -1) for row in target.rows], np.int64)
        has_source = np.array([row.source is not None for row in target.rows], bool)
        self.source_of[~has_source] = -1
        self.is_copy = (self.source_of >= 0) & np.array([not row.pieces for row in target.rows], bool)

    def plan(self, *, is_exact: bool, in_place: bool) -> Plan:
        """Plan the change; `is_exact`: to the target's own shards, which needs the base's own files.

        Raises WrongBaseError if the files of another receiver cannot become the target's.
        """
        chain, rows = self.target.chain, self.target.rows
        if not is_exact:
            # The files that the first delta needs, and places for those that are there in the end.
            for manifest in (chain.first, chain.manifest):
                check_files(self.base, manifest, self.what)
        if self.base.laid is not None:
            plan = make_laid_plan(self.base, self.base.laid, chain.manifest, rows, in_place=in_place)
            check_tied(self.base.laid, rows, self.target.digests)
            return plan
        header = self._target_header if is_exact else None
        plan = make_plan(self.base, chain.manifest, rows, header, in_place=in_place, passed=chain.passed)
        if is_exact:
            self._check_weight_map(plan)
        return plan

    def _check_weight_map(self, plan: Plan) -> None:
        """Raise DamagedError unless the target's weight map names its tensors and shards as they will be."""
        row = next((file for file in self.target.chain.manifest.files if file.kind == WEIGHT_MAP), None)
        # One that stays, and is gone since the change began, is missed when the change ends.
        if row is None or not (row.runs or row.path in self.identities):
            return
        what = f"file {shown(row.path)}"
        weight_map = parse_weight_map(self.target.file_bytes(row) if row.runs else self.read_file(row.path), what)
        check_agreement(weight_map, shard_of_tensors(plan, self.target.rows), what)
        unnamed = {shard.path for shard in plan.shards}.difference(weight_map.values())
        if unnamed:
            raise DamagedError(what, f"does not name shard {shown(min(unnamed))}")

    def _target_header(self, file: FileRow) -> Header:
        what = f"header of shard {shown(file.path)}"
        if file.runs:
            return parse_header(self.target.file_bytes(file), None, what)
        shard = self._shard_of.get(file.path)
        raw = shard.header.raw if shard is not None else b""
        if shard is not None and (object_digest(raw), len(raw)) == (file.blake3, file.size):
            return shard.header
        raise DamagedError(what, "is the base's, says the manifest, but it is not")

    def run(self, works: Sequence[ShardWork], *, whole_base: bool, stage: str) -> Outcome:
        """Make a pass over `works`; with `whole_base`, also over all other base tensors whose digests are not known."""
        rows = [place.row for work in works for place in work.places if place.size]
        visited = np.zeros(len(self.target.rows), bool)
        visited[rows] = True
        leftover: list[int] = []
        if whole_base and self.known is None:
            is_read = np.zeros(len(self.tensors), bool)
            is_read[self.source_of[visited & (self.source_of >= 0)]] = True
            leftover = np.flatnonzero(~is_read).tolist()
        return self._run(works, visited, leftover, stage)

    def digest(self, numbers: Sequence[int], stage: str) -> Sums:
        """The digests of some base tensors, given by number; of the others, nothing."""
        return self._run([], np.zeros(len(self.target.rows), bool), numbers, stage).base_sums

    def read_file(self, path: str) -> bytes:
        """Read a file of the base."""
        with Files(self.root, self.identities) as files:
            return files.read_file(path)

    def _run(
        self, works: Sequence[ShardWork], visited: NDArray[np.bool_], numbers: Sequence[int], stage: str
    ) -> Outcome:
        leftover = [(number, self.tensors[number]) for number in numbers]
        leftover.sort(key=lambda pair: (pair[1].shard, pair[1].begin))
        total = sum(place.size for work in works for place in work.places) + sum(t.bytes for _, t in leftover)
        digests = Digests(len(self.target.rows), len(self.tensors))
        # No file stays open after a pass, or what is replaced would go on taking room.
        laid = self.base.laid
        with LaidFiles(laid, self.identities) if laid is not None else Files(self.root, self.identities) as files:
            source = Source(
                self.target.rows,
                [shard.path for shard in (laid.shards if laid is not None else self.base.shards)],
                self.base.by_name.__getitem__,
                files,
                self.target.payloads,
            )

            def tick() -> None:
                self.target.progress(stage, digests.bytes_done, total)

            run_pass(source, works, leftover, digests, jobs=self.target.jobs, tick=tick)
        return Outcome(self, digests, visited, numbers)


class Outcome:
    """What a pass found out about its job."""

    def __init__(self, job: Job, digests: Digests, visited: NDArray[np.bool_], leftover: Sequence[int]) -> None:
        self._job = job
        self._digests = digests
        self._visited = visited
        # Every base tensor that was read: as a row's source, or for its own sake.
        self._base = job.known.copy() if job.known is not None else np.zeros((len(job.tensors), 4), np.uint32)
        with_source = np.flatnonzero(visited & (job.source_of >= 0))
        self._read = job.source_of[with_source]
        self._base[self._read] = digests.source[with_source]
        self._base[leftover] = digests.base[leftover]
        torn = (self._base[self._read] != digests.source[with_source]).any(axis=1)
        if torn.any():
            name = job.tensors[self._read[np.argmax(torn)]].name
            raise ConflictError(job.what, f"tensor {shown(name)} changed while it was read", hint=AT_REST)

    @property
    def base_sums(self) -> Sums:
        """The digests of all base tensors, for a pass over the whole base."""
        return self._base

    def check_base(self, expected: Sums) -> None:
        """Raise ConflictError unless the base tensors that were read have the digests they had."""
        wrong = (self._base[self._read] != expected[self._read]).any(axis=1)
        if wrong.any():
            number = self._read[np.argmax(wrong)]
            facts = f"tensor {shown(self._job.tensors[number].name)} has changed"
            facts += f": {_expected(expected[number], self._base[number])}"
            raise ConflictError(self._job.what, facts, hint=AT_REST)

    def check_target(self) -> None:
        """Raise DamagedError if a block could not be decoded, or if a tensor did not become what it must."""
        job, failure = self._job, self._digests.failure
        rows = job.target.rows
        if failure is not None:
            what = f"tensor {shown(rows[failure.row].name)} in {job.target.payloads.name_of(failure.payload)}"
            raise DamagedError(what, failure.facts)
        for number in np.flatnonzero(self._visited & (self._digests.changed != job.target.changed)).tolist():
            facts = f"{self._digests.changed[number]} elements change, {job.target.changed[number]} says the manifest"
            raise DamagedError(f"tensor {shown(rows[number].name)}", facts)
        found = self._digests.target.copy()
        is_checked = self._visited.copy()
        if job.known is not None:
            copies = np.flatnonzero(~self._visited & job.is_copy)
            found[copies] = self._base[job.source_of[copies]]
            is_checked[copies] = True
        wrong = (found != job.target.sums).any(axis=1) & is_checked
        if wrong.any():
            number = int(np.argmax(wrong))
            facts = f"would not become what the manifest says: {_expected(job.target.sums[number], found[number])}"
            raise DamagedError(f"tensor {shown(rows[number].name)}", facts)


def wrong_base(job: Job, sums: Sums) -> WrongBaseError:
    """Say how a base with these digests differs from what the delta starts from."""
    # Of a tensor that the delta only copies, the digest must be the target's.
    copies = np.flatnonzero(job.is_copy)
    wrong = copies[(sums[job.source_of[copies]] != job.target.sums[copies]).any(axis=1)]
    expected = job.target.chain.base.content.hex()[:_SHOWN_DIGITS]
    facts = f"is not the base of this delta: expected content blake3:{expected}, "
    facts += f"found blake3:{content_of(job.tensors, sums).hex()[:_SHOWN_DIGITS]}"
    if len(wrong):
        names = [str(job.target.rows[number].source) for number in wrong]
        differ = (
            "1 tensor that it does not change differs"
            if len(wrong) == 1
            else f"{len(wrong)} tensors that it does not change differ"
        )
        facts += f"; {differ}, {listed(names, 3)}"
    return WrongBaseError(job.what, facts, hint=IN_ORDER)


def content_of(tensors: Sequence[Tensor], sums: Sums) -> bytes:
    """The content digest of tensors, in canonical order, with these digests."""
    return content_digest(
        (tensor.name, tensor.dtype.name, tensor.shape, digest_bytes(total))
        for tensor, total in zip(tensors, sums, strict=True)
    )


def digest_tensors(
    files: ReadsPaths, shards: Sequence[str], tensors: Sequence[Tensor], target: Target, stage: str
) -> Sums:
    """The digests of tensors that lie in `shards`, whatever they are."""
    digests = Digests(0, len(tensors))
    by_name = {tensor.name: tensor for tensor in tensors}
    source = Source((), shards, by_name.__getitem__, files, target.payloads)
    total = sum(tensor.bytes for tensor in tensors)

    def tick() -> None:
        target.progress(stage, digests.bytes_done, total)

    run_pass(source, (), list(enumerate(tensors)), digests, jobs=target.jobs, tick=tick)
    return digests.base


def sums_of(digests: Iterable[bytes]) -> Sums:
    """Tensor digests as sums [tensors, 4]."""
    return np.frombuffer(b"".join(digests), "<u4").reshape(-1, DIGEST_BYTES // 4).astype(np.uint32)


def whole_work(plan: Plan) -> list[ShardWork]:
    """Work that goes over all of a plan and hands nothing on."""
    if plan.laid_places:
        return [ShardWork(plan.laid_places, None, is_patch=False)]
    return [ShardWork(shard.places, None, is_patch=False) for shard in plan.shards]


def _expected(expected: Sums, found: Sums) -> str:
    return f"expected {digest_text(expected)}, found {digest_text(found)}"
