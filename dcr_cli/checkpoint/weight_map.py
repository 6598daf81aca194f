"""The weight map: which shard each tensor is in, and whether the shards agree.

Reading it and the headers from disk is checkpoint's work.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from dcr_cli.checkpoint.file_kinds import check_no_other_file
from dcr_cli.checkpoint.header import COPY_AGAIN
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import safe_path, shown
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.errors import DamagedError

USUAL_NAME = "model.safetensors.index.json"

_COPY_ALL = "copy all shards of the checkpoint"
_NUMBERED = re.compile(r"(.*)-([0-9]+)-of-([0-9]+)\.safetensors", re.DOTALL)


def parse_weight_map(data: bytes, what: str) -> dict[str, str]:
    """Return tensor name -> path of its shard; every path is safe and names a safetensors file."""
    check_no_other_file(data[:64], what, "a weight map")
    document = strict_json(data, what, hint=COPY_AGAIN)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError(what, "has no weight_map, an object that says in which shard each tensor is")
    checked: set[str] = set()
    for name, path in weight_map.items():
        if not isinstance(path, str):
            raise DamagedError(what, f"tensor {shown(name)}: its shard is not a string")
        if path not in checked:
            safe_path(path, what)
            if not path.endswith(SHARD_SUFFIX):
                raise DamagedError(what, f"tensor {shown(name)}: its shard {shown(path)} is not a .safetensors file")
            checked.add(path)
    return weight_map


def check_shards_exist(weight_map: Mapping[str, str], files: Collection[str], what: str) -> None:
    """Raise DamagedError if the weight map names a shard that is not among `files`."""
    for name, path in weight_map.items():
        if path not in files:
            raise DamagedError(
                what, f"puts tensor {shown(name)} into shard {shown(path)}, which is not there", hint=_COPY_ALL
            )


def check_agreement(weight_map: Mapping[str, str], shard_of: Mapping[str, str], what: str) -> None:
    """Raise DamagedError unless every tensor is in the shard that the weight map puts it into, and none is besides."""
    for name, path in shard_of.items():
        mapped = weight_map.get(name)
        if mapped is None:
            raise DamagedError(what, f"does not name tensor {shown(name)}, which is in shard {shown(path)}")
        if mapped != path:
            raise DamagedError(
                what, f"puts tensor {shown(name)} into shard {shown(mapped)}, but it is in {shown(path)}"
            )
    if len(weight_map) != len(shard_of):
        name = next(name for name in weight_map if name not in shard_of)
        raise DamagedError(
            what, f"puts tensor {shown(name)} into shard {shown(weight_map[name])}, which has no such tensor"
        )


def check_sets_complete(shards: Collection[str], what: str) -> None:
    """Raise DamagedError if shards numbered like `model-00001-of-00003.safetensors`, from 0 or 1, are not all there."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(shards):
        match = _NUMBERED.fullmatch(path)
        if match is None:
            continue
        members = sets.setdefault((match[1], int(match[3])), {})
        number = int(match[2])
        if number in members:
            raise DamagedError(what, f"shards {shown(members[number])} and {shown(path)} have the same number")
        members[number] = path
    for (_, total), members in sets.items():
        first = 0 if 0 in members else 1
        if len(members) != total or max(members) != first + total - 1:
            missing = next((n for n in range(first, first + total) if n not in members), None)
            facts = f"is one of {total} shards, of which {len(members)} are there"
            if missing is not None:
                facts += f" and number {missing} is not"
            raise DamagedError(what, f"shard {shown(next(iter(members.values())))} {facts}", hint=_COPY_ALL)
