"""Decides what becomes of a receiver's shards and files; pure functions from what is there to a plan.

Files beside the shards are file_plan.py's part; change.py and fresh.py carry a plan out. Whether the receiver's bits
are the base's, nothing here can know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dcr_cli.checkpoint.checkpoint import Shard
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import DTYPES, Header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.chain import check_tensors as check_base
from dcr_cli.delta.encoding import BLOCK_BYTES
from dcr_cli.delta.manifest import FileRow, Manifest, TensorRow
from dcr_cli.errors import DamagedError
from dcr_cli.receiver.base import Base
from dcr_cli.receiver.file_plan import plan_files
from dcr_cli.receiver.reshard import OwnLayout, own_layouts

# What a change in place costs in the journal beside positions and values, for each block.
_ENTRY_BYTES = 64
_POSITION_BYTES = 4


class Action(Enum):
    """What becomes of a shard."""

    KEEP = "keep"
    PATCH = "patch"
    REWRITE = "rewrite"


class Place(NamedTuple):
    """Where the tensor of row number `row` lies in its new file."""

    row: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard of the receiver as it will be; `header` with its 8 length bytes, places in the order of the data."""

    path: str
    action: Action
    header: bytes
    size: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """Shards, by number, that must be ready together before the first of them is replaced, and old shards that go then.

    Staged bytes are of rewritten shards; journal bytes are a bound; freed bytes come back when all is done.
    """

    shards: tuple[int, ...]
    removed: tuple[str, ...]
    staged_bytes: int
    journal_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class MapStep:
    """What one delta does to the weight map of a receiver that keeps its shards: in which shard each tensor is then,
    and by how many bytes all of them together grow."""

    shard_of: Mapping[str, str]
    grown_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    `is_exact`: to the target's own shards. `ends_exact`: the files are the target's in the end, byte for byte; that is
    so, too, for a receiver that keeps shards of its own, if those are the target's. `map_steps` is for these receivers.
    `laid_places` is for those with a layout, whose shards have no places: where all tensors lie in the shard that it
    thinks of.
    """

    is_exact: bool
    ends_exact: bool
    shards: tuple[NewShard, ...]
    components: tuple[Component, ...]
    written_files: tuple[FileRow, ...]
    removed_files: tuple[str, ...]
    map_steps: tuple[MapStep, ...]
    laid_places: tuple[Place, ...] = ()

    @property
    def written_file_bytes(self) -> int:
        return sum(row.size for row in self.written_files)


def check_tensors(base: Base, rows: Sequence[TensorRow], removed: Sequence[str], what: str) -> None:
    """Raise WrongBaseError if the receiver's tensors, by name, dtype and size, cannot be the delta's base."""
    forms = {tensor.name: (tensor.dtype.name, tensor.elements) for tensor in base.by_name.values()}
    check_base(forms, rows, removed, what)


def make_plan(
    base: Base,
    manifest: Manifest,
    rows: Sequence[TensorRow],
    target_header: Callable[[FileRow], Header] | None,
    *,
    in_place: bool,
    passed: Sequence[Sequence[TensorRow]] = (),
) -> Plan:
    """Plan how `base` becomes the target: with the target's own shards where `target_header` gives their headers,
    else with the receiver's.

    `passed` are the tensors of versions in between: where the receiver's shards would be by one delta after the other
    is where they will be.
    """
    map_steps: tuple[MapStep, ...] = ()
    if target_header is not None:
        layout = _target_layout(manifest, rows, target_header)
    else:
        steps = own_layouts(base.shards, [*passed, rows])
        map_steps = _map_steps(base, steps)
        layout = [(path, raw, [Place(*place) for place in places]) for path, raw, places in steps[-1].shards]
    old = {shard.path: shard for shard in base.shards}
    shards = tuple(
        NewShard(
            path,
            _action(old.get(path), raw, places, rows, in_place=in_place and path in base.alone),
            raw,
            len(raw) + sum(place.size for place in places),
            tuple(places),
        )
        for path, raw, places in layout
    )
    written, removed = plan_files(base, manifest, is_exact=target_header is not None)
    is_exact = target_header is not None
    ends_exact = is_exact or _ends_as_target(base, manifest, shards, map_steps)
    return Plan(is_exact, ends_exact, shards, _components(base, shards, rows), written, removed, map_steps)


def shard_of_tensors(plan: Plan, rows: Sequence[TensorRow]) -> dict[str, str]:
    """In which shard each tensor will be, by their names."""
    return {rows[place.row].name: shard.path for shard in plan.shards for place in shard.places}


def room_at_once(plan: Plan) -> int:
    """Bytes that staging everything takes."""
    return plan.written_file_bytes + sum(part.staged_bytes + part.journal_bytes for part in plan.components)


def in_turn(plan: Plan) -> tuple[int, ...]:
    """Components, by number, in the order in which they go one after the other: the largest first, then as they are."""
    sizes = [part.staged_bytes + part.journal_bytes for part in plan.components]
    first = sizes.index(max(sizes)) if sizes else 0
    return tuple(sorted(range(len(sizes)), key=lambda number: number != first))


def room_in_turn(plan: Plan) -> int:
    """Bytes that are taken, at the most, when components are staged and committed one after the other."""
    most = grown = 0
    for part in (plan.components[number] for number in in_turn(plan)):
        most = max(most, grown + part.staged_bytes + part.journal_bytes)
        grown += part.staged_bytes - part.freed_bytes
    return plan.written_file_bytes + max(most, grown)


def _target_layout(
    manifest: Manifest, rows: Sequence[TensorRow], target_header: Callable[[FileRow], Header]
) -> list[tuple[str, bytes, list[Place]]]:
    number_of = {row.name: number for number, row in enumerate(rows)}
    layout = []
    seen = 0
    for file in manifest.files:
        if file.kind != SHARD:
            continue
        header = target_header(file)
        places = []
        for entry in header.tensors:
            number = number_of.pop(entry.name, None)
            row = rows[number] if number is not None else None
            if number is None or row is None or (row.dtype, row.shape) != (entry.dtype, entry.shape):
                facts = f"its header and the manifest do not agree on tensor {shown(entry.name)}"
                raise DamagedError(f"shard {shown(file.path)}", facts)
            places.append(Place(number, len(header.raw) + entry.begin, entry.end - entry.begin))
        seen += len(places)
        layout.append((file.path, header.raw, places))
    if number_of:
        raise DamagedError("manifest", f"tensor {shown(next(iter(number_of)))} is in the header of no shard")
    return layout


def _map_steps(base: Base, steps: Sequence[OwnLayout]) -> tuple[MapStep, ...]:
    before = sum(tensor.bytes for tensor in base.by_name.values())
    found = []
    for step in steps:
        now = sum(size for _, _, places in step.shards for _, _, size in places)
        found.append(MapStep(step.shard_of, now - before))
        before = now
    return tuple(found)


def _ends_as_target(base: Base, manifest: Manifest, shards: Sequence[NewShard], map_steps: Sequence[MapStep]) -> bool:
    """Whether a receiver that keeps its shards ends with the target's headers and weight map."""
    weight_map = {file.path: file.blake3 for file in base.files if file.kind == WEIGHT_MAP}
    shard_of = {name: base.shards[tensor.shard].path for name, tensor in base.by_name.items()}
    if weight_map and any(step.grown_bytes or step.shard_of != shard_of for step in map_steps):
        # It says what is where, and how much there is, and is written anew.
        return False
    final = {shard.path: object_digest(shard.header) for shard in shards} | weight_map
    return final == {row.path: row.blake3 for row in manifest.files if row.kind != SIDECAR}


def _action(
    old: Shard | None, raw: bytes, places: Sequence[Place], rows: Sequence[TensorRow], *, in_place: bool
) -> Action:
    if old is None or old.header.raw != raw:
        return Action.REWRITE
    is_kept = can_be_patched = True
    for place in places:
        row = rows[place.row]
        if not place.size:
            continue
        # With equal headers, a tensor that is its own source lies where it lay.
        is_own = row.source == row.name
        is_kept = is_kept and is_own and not row.pieces
        can_be_patched = can_be_patched and (is_own or row.source is None)
    return Action.KEEP if is_kept else Action.PATCH if in_place and can_be_patched else Action.REWRITE


def _components(base: Base, shards: Sequence[NewShard], rows: Sequence[TensorRow]) -> tuple[Component, ...]:
    """Join what must be ready together: a shard, and every old shard that is changed or goes and that it is made from,
    or whose place it needs."""
    sizes = {shard.path: shard.size for shard in base.shards}
    changed = {shard.path: number for number, shard in enumerate(shards) if shard.action is not Action.KEEP}
    kept = {shard.path for shard in shards if shard.action is Action.KEEP}
    gone = [path for path in sizes if path not in changed and path not in kept]
    leader = {path: path for path in (*changed, *gone)}

    def find(path: str) -> str:
        while leader[path] != path:
            leader[path] = leader[leader[path]]
            path = leader[path]
        return path

    for path, number in changed.items():
        for place in shards[number].places:
            source = rows[place.row].source
            if source is not None:
                old = base.shards[base.by_name[source].shard].path
                if old != path and old in leader:
                    leader[find(old)] = find(path)
    # A shard that goes makes way for one whose folder has its name, or that has the name of its folder.
    for path in leader:
        for above in (path[:at] for at, letter in enumerate(path) if letter == "/"):
            if above in leader:
                leader[find(above)] = find(path)
    groups: dict[str, tuple[list[int], list[str]]] = {}
    for path, number in changed.items():
        groups.setdefault(find(path), ([], []))[0].append(number)
    for path in gone:
        groups.setdefault(find(path), ([], []))[1].append(path)
    # What only goes comes last.
    ordered = sorted(groups.values(), key=lambda group: (not group[0], group[0], group[1]))
    return tuple(_component(numbers, removed, shards, sizes, rows) for numbers, removed in ordered)


def _component(
    numbers: list[int],
    removed: list[str],
    shards: Sequence[NewShard],
    sizes: Mapping[str, int],
    rows: Sequence[TensorRow],
) -> Component:
    rewritten = [shards[number] for number in numbers if shards[number].action is Action.REWRITE]
    patched = [shards[number] for number in numbers if shards[number].action is Action.PATCH]
    return Component(
        shards=tuple(numbers),
        removed=tuple(removed),
        staged_bytes=sum(shard.size for shard in rewritten),
        journal_bytes=sum(journal_bytes(rows[place.row], place.size) for shard in patched for place in shard.places),
        freed_bytes=sum(sizes.get(path, 0) for path in (*removed, *(shard.path for shard in rewritten))),
    )


def journal_bytes(row: TensorRow, size: int) -> int:
    """A bound on what the changes of a tensor of `size` bytes take in a journal."""
    if not row.pieces:
        return 0
    width = DTYPES[row.dtype].width
    changed = sum(piece.changed for piece in row.pieces)
    blocks = sum(run.blocks for piece in row.pieces for run in piece.runs)
    # Small tensors are journalled byte by byte; blocks in which much changes may come whole.
    taken = changed * max(_POSITION_BYTES + width, (_POSITION_BYTES + 1) * width)
    if changed * (width + 3) * 8 > size:
        taken = max(taken, size)
    return taken + (blocks + size // BLOCK_BYTES + 1) * _ENTRY_BYTES
