"""Composes layouts: where one leads to local tensors that are the canonical ones of another. Values, no disk."""

from __future__ import annotations

from collections.abc import Mapping

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Patience, compose
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout, LocalTensor, Placement


def compose_layouts(first: Layout, second: Layout) -> Layout:
    """The layout that leads where `first` and then `second` lead.

    The canonical tensors of `second` are the local ones of `first`, by their names; those of several shards that have
    one name are called by their shard too, `path:name`. Elements of `second` that are padding of `first` are in no box.
    DamagedError if the two do not fit, UnsupportedError if `second` has rules, as these would be of local tensors.
    """
    if second.rules:
        facts = "has rules, and cannot follow another layout"
        raise UnsupportedError(second.what, facts, hint="give the layout with rules first")
    between = _tensors_between(first)
    _check_forms(first, second, between)
    patience = Patience(first.boxes + second.boxes)
    try:
        shards = {
            path: {name: _compose_local(tensor, between, patience) for name, tensor in tensors.items()}
            for path, tensors in second.shards.items()
        }
    except ValueError as error:
        raise DamagedError(second.what, f"does not follow {first.what}: {error}") from error
    what = f"{first.what}, then {second.what}"
    skipped = first.skipped | _left_out(first, second, between)
    return Layout(what, first.tensors, shards, skipped, first.stored, first.rules, second.hint)


def _left_out(first: Layout, second: Layout, between: Mapping[str, LocalTensor]) -> frozenset[str]:
    """The canonical tensors that lie nowhere but in local tensors of `first` that `second` skips."""
    lie = {placement.tensor: set[str]() for tensor in between.values() for placement in tensor.placements}
    for name, tensor in between.items():
        for placement in tensor.placements:
            lie[placement.tensor].add(name)
    source = {name: first.rules[name].of if name in first.rules else name for name in first.tensors}
    return frozenset(name for name in first.tensors if source[name] in lie and lie[source[name]] <= second.skipped)


def _tensors_between(first: Layout) -> dict[str, LocalTensor]:
    """The local tensors of a layout by the names that another layout calls them by."""
    count: dict[str, int] = {}
    for tensors in first.shards.values():
        for name in tensors:
            count[name] = count.get(name, 0) + 1
    found: dict[str, LocalTensor] = {}
    for path, tensors in first.shards.items():
        for name, tensor in tensors.items():
            called = name if count[name] == 1 else f"{path}:{name}"
            if called in found:
                raise DamagedError(first.what, f"two of its local tensors are called {shown(called)}")
            found[called] = tensor
    return found


def _check_forms(first: Layout, second: Layout, between: Mapping[str, LocalTensor]) -> None:
    known: dict[str, Form] = {name: tensor.form for name, tensor in between.items()}
    for name, form in second.tensors.items():
        if name not in known:
            raise DamagedError(second.what, f"tensor {shown(name)} is no local tensor of {first.what}")
        if known[name] != form:
            facts = f"tensor {shown(name)} is {form}, a local tensor of {first.what} is {known[name]}"
            raise DamagedError(second.what, facts)
    unknown = [name for name in known if name not in second.tensors and known[name].elements]
    if unknown:
        raise DamagedError(second.what, f"local tensors of {first.what} are not in it: {listed(unknown)}")


def _compose_local(tensor: LocalTensor, between: Mapping[str, LocalTensor], patience: Patience) -> LocalTensor:
    placements = [
        Placement(source.tensor, box)
        for placement in tensor.placements
        for source in between[placement.tensor].placements
        for box in compose(source.box, placement.box, patience)
    ]
    pads = {tensor.fill, *(between[placement.tensor].fill for placement in tensor.placements)}
    return LocalTensor(tensor.form, tuple(placements), ZERO if pads == {ZERO} else KEEP)
