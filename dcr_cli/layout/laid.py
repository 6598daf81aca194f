"""A checkpoint that is read through a layout: its tensors in canonical form, as if they lay in the shards of another.

That other one is the base that it is compared with, whose headers, weight map and sidecars count for it too, but for
sidecars of its own; without one, a single shard is thought of, in canonical order. Nothing is written, and no tensor is
put together: what is read is gathered when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcr_cli.checkpoint.checkpoint import (
    Checkpoint,
    FileDigest,
    Reader,
    Shard,
    Sidecar,
    Tensor,
    check_sidecars,
)
from dcr_cli.checkpoint.digest import ObjectHasher, object_digest
from dcr_cli.checkpoint.folder import pattern_of, skip_hint
from dcr_cli.checkpoint.header import DTYPES, bytes_view, parse_header, write_header
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, is_weight_map
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.coverage import Coverage
from dcr_cli.layout.gather import Boxes, Gatherer, Held, Source, Sources
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.layout.residual.sources import residual_source
from dcr_cli.layout.shards import RankShards

if TYPE_CHECKING:
    import numpy.typing as npt

_ONLY_SHARD = "model.safetensors"

Kind = TypeVar("Kind", bound="LaidCheckpoint")


@dataclass(frozen=True, slots=True)
class LaidCheckpoint(Checkpoint):
    """A checkpoint read through a layout. `sources` say where each of its tensors comes from, `stored` where those lie
    that boxes lead to. `like` is the checkpoint whose files stand for its own; `tensors` lie where they lie there.
    `local` are the shards that there are."""

    sources: Mapping[str, Source]
    stored: Mapping[str, Sources]
    like: Checkpoint | None
    layout: Layout
    local: tuple[Shard, ...]

    @property
    def not_read(self) -> tuple[str, ...]:
        return tuple(sorted(self.layout.skipped))

    def reader(self) -> LaidReader:
        return LaidReader(self)

    def files_digest(self, reader: Reader) -> list[FileDigest]:
        """As of any checkpoint: the headers and files of the one that it is like, and its own sidecars."""
        if self.like is None:
            return self._files_digest(self.shards, self.sidecars, reader)
        assert isinstance(reader, LaidReader)
        own = [sidecar for sidecar in self.sidecars if reader.is_own(sidecar.path)]
        records = {record.path: record for record in reader.files_of_like()}
        records |= {record.path: record for record in self._files_digest((), own, reader)}
        return [records[path] for path in sorted(records)]

    def local_files_digest(self, reader: Reader) -> list[FileDigest]:
        """The same of the files that there are."""
        return self._files_digest(self.local, self.sidecars, reader)

    def _files_digest(self, shards: Sequence[Shard], sidecars: Sequence[Sidecar], reader: Reader) -> list[FileDigest]:
        records = [
            FileDigest(each.path, SHARD, len(each.header.raw), object_digest(each.header.raw)) for each in shards
        ]
        for sidecar in sidecars:
            hasher = ObjectHasher()
            for part in reader.parts_of(sidecar.path):
                hasher.update(part)
            records.append(FileDigest(sidecar.path, sidecar.kind, sidecar.size, hasher.digest()))
        return sorted(records, key=lambda record: record.path)


class LaidReader(Reader):
    """Reads what a checkpoint that is read through a layout would hold if it lay in the shards of the other one."""

    def __init__(self, checkpoint: LaidCheckpoint) -> None:
        super().__init__(checkpoint)
        self._laid = checkpoint
        self._like = checkpoint.like.reader() if checkpoint.like is not None else None
        self._own = frozenset(_own_sidecars(checkpoint.identities, [shard.path for shard in checkpoint.local]))
        self._gatherer = Gatherer(self)
        self._by_shard: list[list[Tensor]] = [[] for _ in checkpoint.shards]
        for tensor in checkpoint.tensors:
            if tensor.bytes:
                self._by_shard[tensor.shard].append(tensor)
        for tensors in self._by_shard:
            tensors.sort(key=lambda tensor: tensor.begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        if self._like is not None:
            self._like.close()

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Fill the whole of `buffer` with the tensor's bytes from `byte_offset` on, both in whole elements."""
        view = bytes_view(buffer)
        width = tensor.dtype.width
        if not 0 <= byte_offset <= byte_offset + len(view) <= tensor.bytes or byte_offset % width or len(view) % width:
            raise ValueError(f"bytes from {byte_offset} on are not all in tensor {tensor.name!r}")
        source = self._laid.sources.get(tensor.name)
        if source is None:
            assert self._like is not None and self._laid.like is not None
            self._like.read_into(self._laid.like.by_name[tensor.name], byte_offset, buffer)
        else:
            source.read(self._gatherer, byte_offset // width, np.frombuffer(view, f"<u{width}"))

    def read_shard_into(self, shard: int, begin: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Fill the whole of `buffer` with the data that a shard would hold from byte `begin` of its file on."""
        view = bytes_view(buffer)
        tensors = self._by_shard[shard]
        number = max(bisect_right(tensors, begin, key=lambda tensor: tensor.begin) - 1, 0)
        while number < len(tensors) and (tensor := tensors[number]).begin < begin + len(view):
            number += 1
            low, high = max(begin, tensor.begin), min(begin + len(view), tensor.begin + tensor.bytes)
            if low < high:
                self.read_into(tensor, low - tensor.begin, view[low - begin : high - begin])

    def read_file(self, path: str) -> bytes:
        """Return all bytes of a sidecar."""
        return super().read_file(path) if self.is_own(path) else self._others.read_file(path)

    def parts_of(self, path: str) -> Iterator[memoryview]:
        """Read a sidecar in parts; each is valid until the next one is asked for."""
        return super().parts_of(path) if self.is_own(path) else self._others.parts_of(path)

    def check_unchanged(self) -> None:
        """Raise ConflictError if a file of the checkpoint, or of the one that it is like, is not what it was."""
        super().check_unchanged()
        if self._like is not None:
            self._like.check_unchanged()

    def files_of_like(self) -> list[FileDigest]:
        """The records of the files of the checkpoint that it is like."""
        assert self._laid.like is not None
        return self._laid.like.files_digest(self._others)

    def is_own(self, path: str) -> bool:
        """Whether a sidecar is one of the folder with the shards, not one of the checkpoint that it is like."""
        return self._laid.like is None or path in self._own

    @property
    def _others(self) -> Reader:
        assert self._like is not None
        return self._like


def lay(shards: RankShards, layout: Layout, like: Checkpoint | None) -> LaidCheckpoint:
    """See shards through a layout, in the shards of `like`.

    DamagedError, naming the tensor and the element, unless every element of every canonical tensor is owned exactly
    once and the shards hold what the layout says, and no tensor besides; UnsupportedError where a rule is of a kind
    that is not known, or calls a function that it may not.
    """
    _check_shards(shards, layout, layout.shards)
    if layout.skipped and like is None:
        facts = f"skips tensors, and there is no base to take them from: {listed(sorted(layout.skipped))}"
        raise UnsupportedError(layout.what, facts, hint="compare with a checkpoint that has them")
    if like is not None:
        check_like(layout, like)
    stored = _stored(shards, layout, layout.shards)
    places, tensors = (like.shards, like.tensors) if like is not None else _thought_of(layout)
    return _as(LaidCheckpoint, shards, layout, like, (places, tensors, stored))


@dataclass(frozen=True, slots=True)
class PartOfCheckpoint(LaidCheckpoint):
    """What some of the shards of a checkpoint hold: of all that is stored no more than lies in these, so that tensors
    are read in pieces, each from `stored`."""

    def reader(self) -> LaidReader:
        return _PartReader(self)


class _PartReader(LaidReader):
    def read_into(self, tensor: Tensor, byte_offset: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        raise ValueError(f"of tensor {tensor.name!r} some elements are elsewhere")


def lay_part(shards: RankShards, layout: Layout, like: Checkpoint, own: Collection[str]) -> PartOfCheckpoint:
    """See the shards `own`, some of those of a layout, in the shards of `like`; others need not be there.

    Raises as `lay`, also of rules whose tensors are elsewhere.
    """
    _check_shards(shards, layout, own)
    check_like(layout, like)
    stored = _stored(shards, layout, own)
    return _as(PartOfCheckpoint, shards, layout, like, (like.shards, like.tensors, stored))


def _as(
    kind: type[Kind],
    shards: RankShards,
    layout: Layout,
    like: Checkpoint | None,
    seen: tuple[tuple[Shard, ...], tuple[Tensor, ...], dict[str, Sources]],
) -> Kind:
    """A checkpoint of shards that are seen as others, with tensors that lie there, from where they are stored."""
    places, tensors, stored = seen
    return kind(
        shards.root,
        places,
        _sidecars(shards, layout, like),
        tensors,
        {tensor.name: tensor for tensor in tensors},
        shards.skipped,
        dict(shards.identities),
        shards.strangers,
        {name: source_of(name, layout, stored) for name in layout.tensors if name not in layout.skipped},
        stored,
        like,
        layout,
        tuple(shards.shards.values()),
    )


def source_of(name: str, layout: Layout, stored: Mapping[str, Sources]) -> Source:
    """Where a canonical tensor comes from that is, or is made of, a stored one."""
    found = stored[layout.boxed(name)]
    return residual_source(name, layout, found) if name in layout.rules else found


def _stored(shards: RankShards, layout: Layout, own: Collection[str]) -> dict[str, Sources]:
    """Where every tensor lies that boxes lead to, and that something is made of: in shards that are `own`."""
    coverage = Coverage(layout)
    begins = {
        path: {entry.name: len(shard.header.raw) + entry.begin for entry in shard.header.tensors}
        for path, shard in shards.shards.items()
    }
    stored: dict[str, Sources] = {}
    forms = layout.forms()
    read = layout.read()
    for name, placed in layout.placed().items():
        if name not in read:
            continue
        owners = coverage.owners_of(name, forms[name], placed)
        held = {
            number: Held(each, begins[each.path][each.name]) for number, each in enumerate(placed) if each.path in own
        }
        owned, again = (
            Boxes([held[number] for number in numbers if number in held])
            for numbers in (owners.owners, owners.replicas)
        )
        stored[name] = Sources(name, forms[name], owned, again)
    return stored


def _check_shards(shards: RankShards, layout: Layout, own: Collection[str]) -> None:
    """Raise DamagedError unless those that are needed are there, and all that are hold the local tensors of the layout,
    and no others."""
    missing = [path for path in own if path not in shards.shards]
    if missing:
        raise DamagedError(str(shards.root), f"shards of the layout are missing: {listed(missing)}")
    for path in shards.shards:
        local = layout.shards.get(path)
        what = str(shards.root / path)
        if local is None:
            facts = f"is in no rule of {layout.what}"
            raise DamagedError(what, facts, hint=skip_hint(pattern_of(path)))
        found = shards.tensors(path)
        for name, tensor in local.items():
            entry = found.get(name)
            if entry is None:
                raise DamagedError(what, f"tensor {shown(name)} of {layout.what} is missing")
            form = Form(entry.dtype, entry.shape)
            if form != tensor.form:
                raise DamagedError(what, f"tensor {shown(name)} is {form}, {tensor.form} expected by {layout.what}")
        unknown = [name for name in found if name not in local]
        if unknown:
            facts = f"tensors are in no rule of {layout.what}: {listed(unknown)}"
            raise DamagedError(what, facts, hint="a layout says of every tensor what it is, or that it is skipped")


def check_like(layout: Layout, like: Checkpoint) -> None:
    """Raise DamagedError unless the layout's canonical tensors are those of the base."""
    for name, form in layout.tensors.items():
        tensor = like.by_name.get(name)
        if tensor is None:
            raise DamagedError(layout.what, f"tensor {shown(name)} is not in {like.root}")
        known = Form(tensor.dtype.name, tensor.shape)
        if known != form:
            raise DamagedError(layout.what, f"tensor {shown(name)} is {form}, in {like.root} it is {known}")
    unknown = [tensor.name for tensor in like.tensors if tensor.name not in layout.tensors]
    if unknown:
        facts = f"tensors of {like.root} are in no shard: {listed(unknown)}"
        raise DamagedError(layout.what, facts, hint=layout.hint)


def _thought_of(layout: Layout) -> tuple[tuple[Shard, ...], tuple[Tensor, ...]]:
    """One shard that would hold all canonical tensors, and where they would lie in it."""
    names = sorted(layout.tensors)
    raw = write_header({name: layout.tensors[name] for name in names})
    header = parse_header(raw, None, layout.what)
    tensors = tuple(
        Tensor(entry.name, DTYPES[entry.dtype], entry.shape, 0, len(raw) + entry.begin, entry.end - entry.begin)
        for entry in sorted(header.tensors, key=lambda entry: entry.name)
    )
    return (Shard(_ONLY_SHARD, header, len(raw) + header.data_bytes),), tensors


def _sidecars(shards: RankShards, layout: Layout, like: Checkpoint | None) -> tuple[Sidecar, ...]:
    """The files beside the shards: those of `like`, and over them what lies in the folder itself."""
    found = {each.path: each for each in like.sidecars} if like is not None else {}
    for path in _own_sidecars(shards.identities, shards.shards):
        found[path] = Sidecar(path, shards.identities[path].size, SIDECAR)
    sidecars = tuple(found[path] for path in sorted(found))
    check_sidecars(shards.root, sidecars)
    return sidecars


def _own_sidecars(paths: Iterable[str], shards: Collection[str]) -> list[str]:
    """The sidecars among the files of a folder with shards."""
    folders = {path.rpartition("/")[0] for path in shards} - {""}
    known = frozenset(shards)
    return [path for path in paths if not (path in known or is_weight_map(path) or path.rpartition("/")[0] in folders)]
