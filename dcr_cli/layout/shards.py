"""A folder of shards as the ranks of a trainer or an engine wrote them: their headers and its other files.

Several shards may hold tensors of one name. What is in them is a layout's to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import Shard, check_folder, check_not_pickled
from dcr_cli.checkpoint.folder import Files, Identity, scan
from dcr_cli.checkpoint.header import TensorEntry, read_header
from dcr_cli.checkpoint.in_progress import check_complete
from dcr_cli.checkpoint.names import path_fault
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.checkpoint.patterns import check_patterns
from dcr_cli.errors import DamagedError, NotFoundError


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards below a folder, by path, their tensors by path and name, and the identities of all files.

    `strangers` are what was found and is no file of a checkpoint, where that is allowed.
    """

    root: Path
    shards: Mapping[str, Shard]
    identities: Mapping[str, Identity]
    skipped: tuple[str, ...]
    strangers: tuple[str, ...] = ()

    def tensors(self, path: str) -> dict[str, TensorEntry]:
        """The tensors of a shard, by name."""
        return {entry.name: entry for entry in self.shards[path].header.tensors}


def open_shards(
    root: str | os.PathLike[str],
    *,
    skip: Sequence[str] = (),
    what: str = "checkpoint",
    allow_strangers: bool = False,
) -> RankShards:
    """Read the headers of all shards below `root`, in the order of their paths.

    Raises NotFoundError where there is none, DamagedError where one is malformed, IncompleteError when an apply to them
    was stopped. With `allow_strangers`, what could be no file of a checkpoint is left out, not refused.
    """
    folder = Path(root)
    check_patterns(skip)
    check_path(folder, what)
    check_folder(folder, what)
    check_complete(folder)
    strangers: list[str] | None = [] if allow_strangers else None
    identities = scan(folder, skip=skip, must_be_files=(SHARD_SUFFIX,), strangers=strangers)
    # Once more: an apply that began after the first look may have changed what was listed.
    check_complete(folder)
    shards = read_shards(folder, identities)
    if not shards:
        check_not_pickled(identities, f"{what} {folder}")
        raise NotFoundError(f"{what} {folder}", f"holds no shards: it has no *{SHARD_SUFFIX} file")
    return RankShards(folder, shards, identities, tuple(dict.fromkeys(skip)), tuple(strangers or ()))


def read_shards(folder: Path, identities: Mapping[str, Identity]) -> dict[str, Shard]:
    """Read the headers of those of some files that are shards, by path; DamagedError where one is malformed."""
    shards = {}
    with Files(folder, identities) as files:
        for path in (path for path in identities if path.endswith(SHARD_SUFFIX)):
            if (fault := path_fault(path)) is not None:
                raise DamagedError(str(folder / path), f"unsafe name: {fault}")
            with files.opened(path) as fd:
                shards[path] = Shard(path, read_header(fd, str(folder / path)), identities[path].size)
    return shards
