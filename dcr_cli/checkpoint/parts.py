"""Which part of a checkpoint a file is, by its name and size, and which files can be none (FORMAT 2).

What is in them is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from dcr_cli.checkpoint.header import MAX_HEADER_BYTES

SHARD, SIDECAR, WEIGHT_MAP = 1, 2, 3

SHARD_SUFFIX = ".safetensors"
# Shards of PyTorch's distributed checkpoint in its own form.
PICKLED_SUFFIX = ".distcp"
WEIGHT_MAP_SUFFIX = ".safetensors.index.json"

MAX_SHARDS = 1 << 20
MAX_WEIGHT_MAP_BYTES = MAX_HEADER_BYTES
MAX_SIDECAR_BYTES = 64 << 20
MAX_SIDECARS_BYTES = 1 << 30

CONSOLIDATED = "consolidated*"
_SECOND_COPIES = (CONSOLIDATED, "*.bin", "*.pt", "*.pth", "*.gguf", "original/")


def is_top_shard(path: str) -> bool:
    """Whether the file lies where shards lie that no weight map has to name."""
    return "/" not in path and path.endswith(SHARD_SUFFIX)


def is_weight_map(path: str) -> bool:
    return "/" not in path and path.endswith(WEIGHT_MAP_SUFFIX)


def unmapped_shards(paths: Iterable[str]) -> list[str]:
    """The shards among the files of a checkpoint without weight map."""
    shards = [path for path in paths if is_top_shard(path)]
    # Beside other shards, these are the weights once more, under other tensor names.
    return [path for path in shards if not fnmatchcase(path, CONSOLIDATED)] or shards


def second_copy_pattern(path: str) -> str | None:
    """The pattern of names of second copies of the weights that a sidecar's path matches, if one does."""
    name = path.rpartition("/")[2]
    for pattern in _SECOND_COPIES:
        in_folder = pattern.endswith("/") and path.startswith(pattern)
        if in_folder or fnmatchcase(name if pattern.startswith("*") else path, pattern):
            return pattern
    return None
