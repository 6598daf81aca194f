"""Which files of a folder belong to the checkpoint in it, whole or damaged, and what becomes of those that are not
wanted.

What a stopped run had said of a name holds for the file that had it then, and for no other one.

It decides and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.folder import Files, Identity, scan
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.names import path_fault, shown
from dcr_cli.checkpoint.parts import MAX_WEIGHT_MAP_BYTES, is_top_shard, is_weight_map, unmapped_shards
from dcr_cli.checkpoint.weight_map import parse_weight_map
from dcr_cli.durable import Folder
from dcr_cli.errors import DamagedError, NotFoundError, WrongBaseError
from dcr_cli.receiver.base import decode_base
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.marker import Marker
from dcr_cli.receiver.marks import Known, Mark, marks_at, replaced
from dcr_cli.receiver.places import CONFIG
from dcr_cli.receiver.receiver import BASE_LIMIT, BASE_NAME, HELD_CONFIG, JOURNAL
from dcr_cli.receiver.record import find_record


@dataclass(frozen=True, slots=True)
class Belongings:
    """The files of a folder: `present` are those that can be read, `foreign` are no part of its checkpoint and stay.

    `going` are what belonged to it when it was said that it goes, as it was then; another file, or link, that has got
    such a name is foreign.
    """

    present: Mapping[str, Identity]
    going: Known
    foreign: tuple[str, ...]

    @property
    def removed(self) -> tuple[str, ...]:
        """The paths at which what belongs to the checkpoint goes, or has gone."""
        foreign = set(self.foreign)
        return tuple(path for path in self.going if path not in foreign)


def look_over(
    root: Folder, wanted: Wanted, known: Iterable[str], *, away: Iterable[str] = (), is_marked: bool = False
) -> Belongings:
    """Look at the files in `root`, and at those that a change has put `away`; `known` are paths that earlier versions
    had.

    WrongBaseError if a shard or weight map is there that would be part of the checkpoint and of which nothing says that
    it may go, NotFoundError if nothing is there of any checkpoint. With `is_marked`, a change had begun, which refused
    such ones, so that all shards are its own; those of a receiver with a layout are the wanted ones alone.
    """
    strangers: list[str] = []
    present = scan(root.path, skip=wanted.skipped, strangers=strangers)
    record = find_record(root)
    told = {path for path in known if path_fault(path) is None}
    if record is not None:
        told |= {file.path for file in record.files if path_fault(file.path) is None}
    paths = sorted({*present, *strangers, *away})
    own = told | (_as_found(root, present, told, is_marked=is_marked) if wanted.layout is None else set())
    if not (is_marked or own or any(file.path in present for file in wanted.files)):
        facts = "is not empty and holds no checkpoint: it has no *.safetensors file"
        raise NotFoundError(str(root.path), facts, hint="give an empty folder, or a new one")
    names = {file.path for file in wanted.files}
    others = [path for path in paths if path not in names]
    foreign = tuple(path for path in others if path not in own)
    check_nobodys(root, foreign, wanted)
    going = marks_at(root, (path for path in others if path in own))
    if CONFIG in going and going[CONFIG] is None:
        going[CONFIG] = _held_config(root)
    return Belongings(present, going, foreign)


def set_apart(root: Folder, wanted: Wanted, found: Belongings, noted: Known, *, is_marked: bool) -> Belongings:
    """Tell another file that has got a name since a run noted what goes, and was stopped; what it noted is kept.

    Before the change that is a sidecar alone: which shards belong to a checkpoint, this says itself. WrongBaseError as
    for look_over.
    """
    others = {path: noted[path] for path in _others(root, noted) if path in found.going}
    if not is_marked:
        others = {path: mark for path, mark in others.items() if not (is_top_shard(path) or is_weight_map(path))}
    foreign = tuple(sorted({*found.foreign, *others}))
    check_nobodys(root, foreign, wanted)
    return Belongings(found.present, {**found.going, **others}, foreign)


def check_nobodys(root: Folder, foreign: Iterable[str], wanted: Wanted) -> None:
    """Raise WrongBaseError if a file that is no part of a checkpoint would become one; beside shards that a layout is
    of, a weight map says nothing."""
    for path in foreign:
        if is_top_shard(path) or (wanted.layout is None and is_weight_map(path)):
            kind = "shard" if is_top_shard(path) else "weight map"
            facts = f"is a {kind} that is no part of the checkpoint, and would be one of the new one"
            raise WrongBaseError(str(root.path / shown(path)), facts, hint="move it out of the checkpoint")


def _as_found(root: Folder, present: Mapping[str, Identity], told: Collection[str], *, is_marked: bool) -> set[str]:
    """The shards and weight maps that make up the checkpoint as it is."""
    maps = [path for path in present if is_weight_map(path)]
    if is_marked:
        return {*maps, *unmapped_shards(present)}
    if len(maps) == 1:
        with Files(root.path, present) as files:
            return {maps[0], *_mapped(files, maps[0], present[maps[0]].size)}
    if maps or any(map(is_weight_map, told)):
        # What the weight map that is not there, or not alone, had named is not known.
        return set()
    return set(unmapped_shards(present))


def _mapped(files: Files, path: str, size_bytes: int) -> set[str]:
    """The shards that a weight map names; none if it is damaged."""
    if size_bytes > MAX_WEIGHT_MAP_BYTES:
        return set()
    try:
        return set(parse_weight_map(files.read_file(path), path).values())
    except DamagedError:
        return set()


def sort_out(root: Folder, wanted: Wanted, going: Known) -> Belongings:
    """Look at the files in `root` when it has been said which of them go, and what these were."""
    strangers: list[str] = []
    present = scan(root.path, skip=wanted.skipped, strangers=strangers)
    names = {*going, *(file.path for file in wanted.files)}
    foreign = tuple(sorted({path for path in (*present, *strangers) if path not in names}.union(_others(root, going))))
    check_nobodys(root, foreign, wanted)
    return Belongings(present, going, foreign)


def _others(root: Folder, going: Known) -> set[str]:
    """The paths at which another file, or link, lies than the one that goes; that of the config, too, if another one is
    held."""
    others, held = {*replaced(root, going)}, _held_config(root)
    if CONFIG in going and held not in (None, going[CONFIG]):
        others.add(CONFIG)
    return others


def _held_config(root: Folder) -> Mark | None:
    path = f"{STATE_FOLDER}/{HELD_CONFIG}"
    return marks_at(root, [path])[path]


def left_by_apply(home: Folder, marker: Marker) -> list[str]:
    """The files of the checkpoint that an apply was changing when it was stopped, as far as it has left word of it."""
    what = f"{JOURNAL}/{BASE_NAME}"
    data = home.read(what, BASE_LIMIT)
    if data is None or object_digest(data) != marker.base_blake3:
        return []
    return [file.path for file in decode_base(data, home.path.parent, what)[0].files]
