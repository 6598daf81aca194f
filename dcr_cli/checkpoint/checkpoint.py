"""A checkpoint: a folder of safetensors shards as named tensors in canonical order, and its other files.

It decides what is part of a checkpoint and reads it. It changes nothing and writes nothing.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.digest import ObjectHasher, object_digest
from dcr_cli.checkpoint.doubled import hint_about_doubled
from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.folder import Files, Identity, check_same, pattern_of, scan, skip_hint
from dcr_cli.checkpoint.header import DTYPES, Dtype, Header, bytes_view, read_header
from dcr_cli.checkpoint.in_progress import check_complete
from dcr_cli.checkpoint.names import path_fault, shown
from dcr_cli.checkpoint.parts import (
    CONSOLIDATED,
    MAX_SIDECAR_BYTES,
    MAX_SIDECARS_BYTES,
    MAX_WEIGHT_MAP_BYTES,
    PICKLED_SUFFIX,
    SHARD,
    SHARD_SUFFIX,
    SIDECAR,
    WEIGHT_MAP,
    WEIGHT_MAP_SUFFIX,
    is_top_shard,
    is_weight_map,
    second_copy_pattern,
    unmapped_shards,
)
from dcr_cli.checkpoint.patterns import Patterns, check_paths, check_patterns
from dcr_cli.checkpoint.weight_map import (
    USUAL_NAME,
    check_agreement,
    check_sets_complete,
    check_shards_exist,
    parse_weight_map,
)
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, UsageError, WrongBaseError, hint_of

if TYPE_CHECKING:
    import numpy.typing as npt


class Tensor(NamedTuple):
    """A tensor and where it is: `bytes` bytes from byte `begin` of the file of shard number `shard`."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    shard: int
    begin: int
    bytes: int

    @property
    def elements(self) -> int:
        """Elements as dcr codes them; a header whose shape says something else was refused."""
        return self.bytes // self.dtype.width


@dataclass(frozen=True, slots=True)
class Shard:
    path: str
    header: Header
    size: int


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file that is no shard; `kind` is SIDECAR or WEIGHT_MAP."""

    path: str
    size: int
    kind: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's record of FORMAT.md 3.3. `size` and `blake3` of a shard are those of its 8 length bytes and header."""

    path: str
    kind: int
    size: int
    blake3: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: all headers read and checked, no file held open.

    Shards, sidecars (the weight map is one) and tensors are in canonical order. `identities` are those of all files.
    `strangers` are what was found and is no part of it, where that is allowed.
    """

    root: Path
    shards: tuple[Shard, ...]
    sidecars: tuple[Sidecar, ...]
    tensors: tuple[Tensor, ...]
    by_name: dict[str, Tensor]
    skipped: tuple[str, ...]
    identities: dict[str, Identity]
    strangers: tuple[str, ...]

    @property
    def not_read(self) -> tuple[str, ...]:
        """Tensors that are not here, but taken to be what another checkpoint has."""
        return ()

    def reader(self) -> Reader:
        return Reader(self)

    def files_digest(self, reader: Reader) -> list[FileDigest]:
        """Return the records of all files in canonical order; the sidecars are read for it."""
        records = [
            FileDigest(shard.path, SHARD, len(shard.header.raw), object_digest(shard.header.raw))
            for shard in self.shards
        ]
        for sidecar in self.sidecars:
            hasher = ObjectHasher()
            for part in reader.parts_of(sidecar.path):
                hasher.update(part)
            records.append(FileDigest(sidecar.path, sidecar.kind, sidecar.size, hasher.digest()))
        return sorted(records, key=lambda record: record.path)


class Reader(Files):
    """Reads the tensors and files of a checkpoint, which must stay what they were when it was opened."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.root, checkpoint.identities)
        self._checkpoint = checkpoint

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Fill the whole of `buffer` with the tensor's bytes from `byte_offset` on."""
        if not 0 <= byte_offset <= byte_offset + len(bytes_view(buffer)) <= tensor.bytes:
            raise ValueError(f"bytes from {byte_offset} on are not all in tensor {tensor.name!r}")
        self.read_path_into(self._checkpoint.shards[tensor.shard].path, tensor.begin + byte_offset, buffer)

    def read_shard_into(self, shard: int, begin: int, buffer: bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Fill the whole of `buffer` with the bytes of a shard's file from `begin` on."""
        self.read_path_into(self._checkpoint.shards[shard].path, begin, buffer)

    def check_unchanged(self) -> None:
        """Raise ConflictError if a file of the checkpoint was changed, added or removed since it was opened."""
        now = scan(self.root, skip=self._checkpoint.skipped)
        check_same(self.root, self._checkpoint.identities, now)


@contextmanager
def unless_changed(*readers: Reader) -> Iterator[None]:
    """Raise ConflictError instead of what is raised within, if a file of one of the readers was changed: what is read
    twice, or from two places, may then be no more what it was, and look damaged."""
    try:
        yield
    except (ValueError, DamagedError):
        for reader in readers:
            reader.check_unchanged()
        raise


def open_checkpoint(
    root: str | os.PathLike[str],
    *,
    skip: Sequence[str] = (),
    what: str = "checkpoint",
    allow_incomplete: bool = False,
    allow_strangers: bool = False,
) -> Checkpoint:
    """Open the checkpoint at `root`, leaving out the files that a pattern of `skip` matches.

    `what` is the part it plays ("base", "target"), for messages. Raises NotFoundError when there is none, DamagedError
    when it is malformed, holds a second copy of its weights or is over the limits, IncompleteError when an apply to it
    was stopped. With `allow_strangers`, what lies beside the shards and could be part of no checkpoint is left out, not
    refused, and files may be more than a checkpoint's; but a shard that is nobody's is WrongBaseError.
    """
    folder = Path(root)
    check_patterns(skip)
    check_path(folder, what)
    check_folder(folder, what)
    if not allow_incomplete:
        check_complete(folder)
    strangers: list[str] | None = [] if allow_strangers else None
    identities = scan(folder, skip=skip, must_be_files=(SHARD_SUFFIX, WEIGHT_MAP_SUFFIX), strangers=strangers)
    if not allow_incomplete:
        # Once more: an apply that began after the first look may have changed what was listed.
        check_complete(folder)
    if strangers is None:
        check_paths(skip, identities, str(folder), hint="move away what --skip was to leave out, and leave out --skip")
    map_path = _find_weight_map(folder, identities)
    if map_path is None and not any(map(is_top_shard, identities)):
        raise _nothing_here(folder, identities, what)
    with Files(folder, identities) as files:
        weight_map = None
        if map_path is not None:
            weight_map = _read_weight_map(files, map_path, identities, skip)
        shard_paths = _find_shards(identities, weight_map)
        sidecars = _find_sidecars(folder, identities, shard_paths, map_path, strangers)
        check_sets_complete(shard_paths, str(folder))
        shards = tuple(_read_shard(files, path, identities[path]) for path in shard_paths)
        by_name = _find_tensors(files, shards)
    if weight_map is not None:
        shard_of = {tensor.name: shards[tensor.shard].path for tensor in by_name.values()}
        check_agreement(weight_map, shard_of, str(folder / str(map_path)))
    tensors = tuple(by_name[name] for name in sorted(by_name))
    skipped, others = tuple(dict.fromkeys(skip)), tuple(sorted(strangers or ()))
    return Checkpoint(folder, shards, sidecars, tensors, by_name, skipped, identities, others)


def check_folder(folder: Path, what: str) -> None:
    """Raise NotFoundError, or LocalError if that cannot be told, if there is no folder at all."""
    try:
        mode = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        spelling = "check its spelling, and that its disk is mounted"
        raise NotFoundError(f"{what} {folder}", "no such folder", hint=spelling) from error
    except OSError as error:
        raise LocalError(f"{what} {folder}", f"cannot be looked at: {error.strerror}", hint=hint_of(error)) from error
    if not stat.S_ISDIR(mode):
        hint = f"give the folder that it lies in, {folder.parent}" if folder.name.endswith(SHARD_SUFFIX) else None
        raise NotFoundError(f"{what} {folder}", f"is {file_kind(mode)}, not a folder of safetensors shards", hint=hint)


def check_not_pickled(paths: Iterable[str], what: str) -> None:
    """Raise NotFoundError if there are shards of PyTorch's distributed checkpoint in its own form, no safetensors."""
    if any(path.endswith(PICKLED_SUFFIX) for path in paths):
        facts = f"holds *{PICKLED_SUFFIX} files of PyTorch's distributed checkpoint, pickles, which are not read"
        hint = "save with torch.distributed.checkpoint.HuggingFaceStorageWriter, which writes safetensors shards"
        raise NotFoundError(what, facts, hint=hint)


def _nothing_here(folder: Path, identities: dict[str, Identity], what: str) -> NotFoundError:
    if "commit.json" in identities or "manifest.zst" in identities:
        return NotFoundError(
            f"{what} {folder}", "is a delta, not a checkpoint", hint="dcr show says what is in it, dcr apply applies it"
        )
    if "dcr.json" in identities:
        return NotFoundError(
            f"{what} {folder}", "is a remote, not a checkpoint", hint="dcr pull REMOTE CHECKPOINT makes one from it"
        )
    check_not_pickled(identities, f"{what} {folder}")
    facts = "holds no checkpoint: it has no *.safetensors file"
    hint = "a new folder, or an empty one, is what dcr pull fills"
    below = next((path for path in identities if path.endswith(SHARD_SUFFIX)), None)
    if below is not None:
        facts = f"{facts}, but {shown(below)} is below it"
        hint = f"did you mean {shlex.quote(str((folder / below).parent))}? shards of ranks need --layout; {hint}"
    return NotFoundError(f"{what} {folder}", facts, hint=hint)


def _find_weight_map(folder: Path, identities: dict[str, Identity]) -> str | None:
    maps = [path for path in identities if is_weight_map(path)]
    if len(maps) > 1:
        others = sorted(maps, key=lambda path: (path != USUAL_NAME, fnmatchcase(path, CONSOLIDATED), path))
        patterns = [CONSOLIDATED if fnmatchcase(path, CONSOLIDATED) else pattern_of(path) for path in others[1:]]
        facts = f"has {len(maps)} weight maps, {shown(others[0])} and {shown(others[1])}"
        raise DamagedError(str(folder), facts, hint=skip_hint(*patterns))
    return maps[0] if maps else None


def _read_weight_map(files: Files, path: str, identities: dict[str, Identity], skip: Sequence[str]) -> dict[str, str]:
    what = str(files.root / path)
    if identities[path].size > MAX_WEIGHT_MAP_BYTES:
        raise DamagedError(
            what, f"has {identities[path].size} bytes, more than the {MAX_WEIGHT_MAP_BYTES} a weight map may have"
        )
    weight_map = parse_weight_map(files.read_file(path), what)
    skipped = Patterns(skip)
    for shard in dict.fromkeys(weight_map.values()):
        if skipped.match(shard):
            raise UsageError(
                "--skip", f"leaves out shard {shown(shard)}, which the weight map names", hint="use a narrower pattern"
            )
    check_shards_exist(weight_map, identities, what)
    return weight_map


def _find_shards(identities: dict[str, Identity], weight_map: dict[str, str] | None) -> list[str]:
    return sorted(set(weight_map.values())) if weight_map is not None else unmapped_shards(identities)


def _find_sidecars(
    folder: Path, identities: dict[str, Identity], shards: list[str], map_path: str | None, strangers: list[str] | None
) -> tuple[Sidecar, ...]:
    """Find the files beside the shards; what cannot be one is refused, or added to `strangers`."""
    part_of_weights = set(shards)
    sidecars = [
        Sidecar(path, identity.size, WEIGHT_MAP if path == map_path else SIDECAR)
        for path, identity in identities.items()
        if path not in part_of_weights
    ]
    if strangers is not None:
        refused = [(sidecar.path, *refusal) for sidecar in sidecars if (refusal := _refusal(sidecar))]
        for path, facts, _ in refused:
            if is_top_shard(path):
                raise WrongBaseError(str(folder / path), facts, hint="move it out of the checkpoint")
        others = {path for path, _, _ in refused}
        strangers.extend(others)
        return tuple(sidecar for sidecar in sidecars if sidecar.path not in others)
    check_sidecars(folder, sidecars)
    return tuple(sidecars)


def check_sidecars(folder: Path, sidecars: Sequence[Sidecar]) -> None:
    """Raise DamagedError if a file beside the shards can be no part of a checkpoint, or they are too large together."""
    refused = [(sidecar.path, *refusal) for sidecar in sidecars if (refusal := _refusal(sidecar))]
    if refused:
        path, facts, _ = refused[0]
        more = f" (and {len(refused) - 1} more files are refused)" if len(refused) > 1 else ""
        raise DamagedError(str(folder / path), facts + more, hint=skip_hint(*(pattern for _, _, pattern in refused)))
    limited = [sidecar for sidecar in sidecars if sidecar.kind == SIDECAR]
    together = sum(sidecar.size for sidecar in limited)
    if together > MAX_SIDECARS_BYTES:
        largest = max(limited, key=lambda sidecar: sidecar.size)
        facts = f"its files beside the shards have {together} bytes, more than the {MAX_SIDECARS_BYTES} allowed"
        raise DamagedError(str(folder), facts, hint=skip_hint(pattern_of(largest.path)))


def _refusal(sidecar: Sidecar) -> tuple[str, str] | None:
    """Say why a file cannot be part of a checkpoint, and which pattern would leave it out."""
    path = sidecar.path
    if (fault := path_fault(path)) is not None:
        return f"unsafe name: {fault}", pattern_of(path)
    if sidecar.kind == WEIGHT_MAP:
        return None
    if (pattern := second_copy_pattern(path)) is not None:
        return "would be a second copy of the weights", pattern
    if is_top_shard(path):
        return "is a shard that the weight map does not name, perhaps a second copy of the weights", pattern_of(path)
    if sidecar.size > MAX_SIDECAR_BYTES:
        return (
            f"has {sidecar.size} bytes, more than the {MAX_SIDECAR_BYTES} that a file beside the shards may have",
            path,
        )
    return None


def _read_shard(files: Files, path: str, identity: Identity) -> Shard:
    if (fault := path_fault(path)) is not None:
        raise DamagedError(str(files.root / path), f"unsafe name: {fault}")
    with files.opened(path) as fd:
        return Shard(path, read_header(fd, str(files.root / path)), identity.size)


def _find_tensors(files: Files, shards: tuple[Shard, ...]) -> dict[str, Tensor]:
    by_name: dict[str, Tensor] = {}
    for number, shard in enumerate(shards):
        data_begin = len(shard.header.raw)
        for entry in shard.header.tensors:
            tensor = Tensor(
                entry.name,
                DTYPES[entry.dtype],
                entry.shape,
                number,
                data_begin + entry.begin,
                entry.end - entry.begin,
            )
            other = by_name.setdefault(entry.name, tensor)
            if other is not tensor:
                facts = f"tensor {shown(entry.name)} is in it and in {shown(shards[other.shard].path)}"
                hint = hint_about_doubled(files, {each.path: each.header for each in shards}, shard.path)
                raise DamagedError(str(files.root / shard.path), facts, hint=hint)
    return by_name
