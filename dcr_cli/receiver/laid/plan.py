"""Decides which files of a receiver that stores its tensors through a layout are changed, and how. Pure.

Its shards keep their headers, as a layout is of just these tensors; all that change do so together, since the elements
of a tensor lie in several of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.manifest import Manifest, TensorRow
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.coverage import tied_tensors
from dcr_cli.layout.gather import Boxes, Sources
from dcr_cli.layout.laid import LaidCheckpoint
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.receiver.base import Base
from dcr_cli.receiver.file_plan import plan_files
from dcr_cli.receiver.plan import Action, Component, NewShard, Place, Plan, journal_bytes

_MAKE_ANEW = "make a layout for the new tensors, and have dcr pull --layout fill an empty folder through it"
_UNTIED = "make a layout of a load that has both of them, and have dcr pull --layout fill an empty folder through it"


def make_laid_plan(
    base: Base, laid: LaidCheckpoint, manifest: Manifest, rows: Sequence[TensorRow], *, in_place: bool
) -> Plan:
    """Plan how a receiver becomes the target where its layout has it.

    UnsupportedError if the target's tensors are not those of the layout.
    """
    _check_rows(laid, rows)
    changed = [row for row in rows if row.pieces or row.source != row.name]
    touched = {path for row in changed for path in _paths(laid, row.name)}
    shards = tuple(
        NewShard(
            shard.path,
            _action(base, shard.path, touched, in_place=in_place),
            shard.header.raw,
            shard.size,
            (),
        )
        for shard in base.shards
    )
    written, removed = plan_files(base, manifest, is_exact=False)
    component = _component(shards, sum(_changed_bytes(laid, row) for row in changed))
    return Plan(False, False, shards, component, written, removed, (), laid_places(laid, rows))


def check_tied(laid: LaidCheckpoint, rows: Sequence[TensorRow], digests: Sequence[bytes]) -> None:
    """Raise UnsupportedError if tensors that lie in one place differ in the target, whose digests these are."""
    target = {row.name: digest for row, digest in zip(rows, digests, strict=True)}
    for name, one in tied_tensors(laid.layout).items():
        if target.get(name) != target.get(one):
            raise untied(laid.root, one, name)


def untied(root: Path, one: str, name: str) -> UnsupportedError:
    """Say that two tensors that lie in one place of the receiver in `root` differ in the target."""
    facts = f"{shown(one)} and {shown(name)}, which are one tensor here, differ in the target"
    return UnsupportedError(str(root), facts, hint=_UNTIED)


def laid_places(laid: LaidCheckpoint, rows: Sequence[TensorRow]) -> tuple[Place, ...]:
    """Where the tensors of `rows` lie in the shard that a layout thinks of, in its order."""
    tensors = [laid.by_name[row.name] for row in rows]
    places = (Place(number, tensor.begin, tensor.bytes) for number, tensor in enumerate(tensors))
    return tuple(sorted(places, key=lambda place: place.begin))


def check_forms(root: Path, layout: Layout, forms: Mapping[str, Form]) -> None:
    """Raise UnsupportedError unless the target's tensors, of these forms, are those of the layout of the receiver in
    `root`."""
    if layout.tensors == forms:
        return
    if others := sorted(layout.tensors.keys() ^ forms.keys()):
        facts = f"tensors are not both in the target and in {layout.what}: {listed(others)}"
        raise UnsupportedError(str(root), facts, hint=_MAKE_ANEW)
    others = [name for name, form in forms.items() if layout.tensors[name] != form]
    facts = f"tensors have another dtype or shape in the target than in {layout.what}: {listed(others)}"
    raise UnsupportedError(str(root), facts, hint=_MAKE_ANEW)


def _check_rows(laid: LaidCheckpoint, rows: Sequence[TensorRow]) -> None:
    check_forms(laid.root, laid.layout, {row.name: Form(row.dtype, row.shape) for row in rows})
    boxed = [row.name for row in rows if row.source != row.name and any(piece.box is not None for piece in row.pieces)]
    if boxed:
        facts = f"tensors become others and change in pieces, which cannot go through a layout: {listed(boxed)}"
        raise UnsupportedError(str(laid.root), facts)


def _action(base: Base, path: str, touched: Collection[str], *, in_place: bool) -> Action:
    if path not in touched:
        return Action.KEEP
    return Action.PATCH if in_place and path in base.alone else Action.REWRITE


def _boxes(laid: LaidCheckpoint, name: str) -> Iterable[Boxes]:
    source = laid.sources[name]
    assert isinstance(source, Sources)
    return source.owners, source.replicas


def _paths(laid: LaidCheckpoint, name: str) -> set[str]:
    return {held.placed.path for boxes in _boxes(laid, name) for held in boxes.all}


def _changed_bytes(laid: LaidCheckpoint, row: TensorRow) -> int:
    """A bound on what the changes of a row take in a journal, in all places where its elements lie."""
    tensor = laid.by_name[row.name]
    times = sum(held.box.elements for boxes in _boxes(laid, row.name) for held in boxes.all) / max(1, tensor.elements)
    taken = journal_bytes(row, tensor.bytes) if row.source == row.name else tensor.bytes * 5
    return int(times * taken) + 1


def _component(shards: Sequence[NewShard], bytes_of_journal: int) -> tuple[Component, ...]:
    numbers = tuple(number for number, shard in enumerate(shards) if shard.action is not Action.KEEP)
    staged = sum(shards[number].size for number in numbers if shards[number].action is Action.REWRITE)
    return (Component(numbers, (), staged, bytes_of_journal, staged),) if numbers else ()
