"""Brings a receiver with a layout to a state that is given as plain files, each as a whole.

They are fetched first, into a folder of their own. Then all bytes of the receiver's shards are known, and it is brought
to them as any receiver is to plain files: install/ does that, and what it can be stopped at is its matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.digest import ObjectHasher, State, digest_bytes, files_digest, object_digest
from dcr_cli.checkpoint.folder import Files
from dcr_cli.checkpoint.names import listed
from dcr_cli.checkpoint.parts import SHARD, SIDECAR
from dcr_cli.content import Side, Workers, tensor_digests, tensor_of_part
from dcr_cli.delta.file_rules import RangedFile, range_count, range_spans
from dcr_cli.durable import Folder
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.coverage import tied_tensors
from dcr_cli.layout.document import encode_layout
from dcr_cli.pool import run_all
from dcr_cli.receiver.cut.copied import copy_all, name_of
from dcr_cli.receiver.cut.cutter import Cutter
from dcr_cli.receiver.cut.shards import CutShards
from dcr_cli.receiver.install.gather import Effort, Progress
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.install import Manner, install
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.laid.plan import untied


def install_cut(path: Path, request: Request, manner: Manner, cut: CutShards, folder: Folder) -> InstallResult:
    """Bring the receiver at `path`, whose shards are those of `cut`, to the tensors and sidecars of the wanted state of
    `request`, as `install` does; in `folder`, on the same file system, its files are fetched, and stay.

    UnsupportedError if the receiver cannot hold that state, and what `install` raises.
    """
    canonical = copy_all(folder, request, cut.new_bytes)
    _check_tied(canonical, cut, request.effort)
    with Cutter(cut, canonical) as cutter, Files(folder.path, canonical.identities) as files:
        wanted = _wanted(cut, cutter, request)
        fetcher = _Cuttings(cut, cutter, files, _numbers(request.wanted))
        effort = replace(request.effort, progress=_as_cut(request.effort.progress))
        return install(path, replace(request, wanted=wanted, fetcher=fetcher, effort=effort), manner)


def _as_cut(progress: Progress | None) -> Progress | None:
    """Tell of what is cut as what it is: it comes to an installation as if it were fetched."""
    if progress is None:
        return None
    return lambda stage, done, total: progress("cut" if stage == "fetch" else stage, done, total)


@dataclass(frozen=True, slots=True)
class _Cuttings:
    """Yields the shards of a receiver as they are cut, and its other files as they were fetched, by their numbers."""

    cut: CutShards
    cutter: Cutter
    files: Files
    numbers: dict[str, int]

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes | memoryview]:
        if path in self.cut.shards:
            yield from self.cutter.parts(path, begin, size)
            return
        data = memoryview(bytearray(size))
        self.files.read_path_into(name_of(self.numbers[path]), begin, data)
        yield data


def _numbers(wanted: Wanted) -> dict[str, int]:
    return {file.path: number for number, file in enumerate(wanted.files)}


def _check_tied(canonical: Checkpoint, cut: CutShards, effort: Effort) -> None:
    """Raise UnsupportedError if tensors that lie in one place differ."""
    tied = tied_tensors(cut.layout)
    if not tied:
        return
    names = sorted({*tied, *tied.values()})
    tensors = [canonical.by_name[name] for name in names]
    with Workers(effort.jobs, "check", None) as workers, canonical.reader() as reader:
        found = tensor_digests(workers, Side(canonical, reader, tensor_of_part), tensors)
    digests = {name: digest_bytes(digest) for name, digest in zip(names, found, strict=True)}
    for name, one in tied.items():
        if digests[name] != digests[one]:
            raise untied(cut.root, one, name)


def _wanted(cut: CutShards, cutter: Cutter, request: Request) -> Wanted:
    """What the receiver is to have: its shards, and the sidecars of the wanted state."""
    sidecars = [file for file in request.wanted.files if file.kind == SIDECAR]
    both = sorted(file.path for file in sidecars if file.path in cut.shards)
    if both:
        facts = f"files beside the shards have the names of shards of {cut.layout.what}: {listed(both)}"
        raise UnsupportedError(str(cut.root), facts)
    files = tuple(sorted([*_ranged(cut, cutter, request.effort), *sidecars], key=lambda file: file.path))
    digest = files_digest((file.path, file.kind, file.blake3) for file in files)
    state = State(request.wanted.state.content, digest)
    return Wanted(state, request.wanted.skipped, files, encode_layout(cut.layout))


def _ranged(cut: CutShards, cutter: Cutter, effort: Effort) -> list[RangedFile]:
    """The shards of a receiver as files, each of their ranges cut and digested."""
    ranges = {path: [b""] * range_count(shard.size) for path, shard in cut.shards.items()}
    spans = [
        (path, number, begin, size)
        for path, shard in cut.shards.items()
        for number, (begin, size) in enumerate(range_spans(shard.size))
    ]
    total = sum(size for *_, size in spans)
    done: list[int] = []

    def make_worker() -> Callable[[tuple[str, int, int, int]], None]:
        def digest(span: tuple[str, int, int, int]) -> None:
            path, number, begin, size = span
            hasher = ObjectHasher()
            for part in cutter.parts(path, begin, size):
                hasher.update(part)
            ranges[path][number] = hasher.digest()
            done.append(size)

        return digest

    def tick() -> None:
        if effort.progress is not None:
            effort.progress("check", sum(done), total)

    run_all(spans, make_worker, effort.jobs, tick)
    return [
        RangedFile(path, SHARD, shard.size, object_digest(shard.header.raw), tuple(ranges[path]))
        for path, shard in cut.shards.items()
    ]
