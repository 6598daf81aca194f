"""Where a piece is read from on one side of a part, in its own order: from the boxes in which it lies, or by a rule
from those in which what it is made of lies. Values, no disk.

Which pieces are whose is rank_shares.py's matter, comparing them piece_scanning.py's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta import manifest
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.box import Box, compose, whole_box
from dcr_cli.layout.coverage import GapError, coordinate, find_owners
from dcr_cli.layout.gather import Boxes, Held, Source, Sources
from dcr_cli.layout.laid import PartOfCheckpoint
from dcr_cli.layout.layout import Form, Placed
from dcr_cli.layout.residual.rules import conversion_of
from dcr_cli.layout.residual.sources import residual_source
from dcr_cli.publisher.box_cutting import region_of
from dcr_cli.publisher.rule_boxes import DividedError, stored_box
from dcr_cli.publisher.shares import Slice

_HINT = "the base of a rank's part lies in the same shards, or in a folder that all ranks see"


@dataclass(frozen=True, slots=True)
class _PieceSources(Sources):
    """A piece as a tensor of its own; `region` says where its elements are in the one of form `whole`."""

    region: Box
    whole: Form

    @property
    def key(self) -> Hashable:
        return self.name, self.region

    def coordinate(self, element: int) -> str:
        (flat,) = self.region.find(np.array([element]))[1].tolist()
        return coordinate(flat, self.whole)


def piece_source(checkpoint: Checkpoint, each: Slice) -> Source:
    """Where the elements of a slice are read from.

    UnsupportedError if some of them, or of what they are made of, are in no shard that is there, or if a rule makes
    them of more than a piece.
    """
    name = each.tensor.name
    if not isinstance(checkpoint, PartOfCheckpoint):
        tensor = checkpoint.by_name[name]
        held = Held(Placed(whole_box(tensor.elements), checkpoint.shards[tensor.shard].path, name), tensor.begin)
        return _piece(checkpoint, each, each.box, Sources(name, _form_of(each), Boxes([held]), Boxes(())))
    layout = checkpoint.layout
    stored = checkpoint.stored.get(layout.boxed(name))
    if stored is None:
        stored = Sources(name, _form_of(each), Boxes(()), Boxes(()))
    if name not in layout.rules:
        return _piece(checkpoint, each, each.box, stored)
    try:
        box = stored_box(each.box, conversion_of(name, layout), stored.form)
    except DividedError as error:
        facts = (
            f"is made of {error} of {shown(stored.name)}, by rule {layout.rules[name].kind}, which its piece divides"
        )
        raise UnsupportedError(f"tensor {shown(name)} of {checkpoint.root}", facts, hint=_HINT) from error
    return residual_source(name, layout, _piece(checkpoint, each, box, stored))


def _form_of(each: Slice) -> Form:
    return Form(each.tensor.dtype.name, each.tensor.shape)


def _piece(checkpoint: Checkpoint, each: Slice, box: manifest.Box | None, stored: Sources) -> Sources:
    """The part of a stored tensor that is in a box."""
    form = stored.form if box is None else Form(stored.form.dtype, box.counts)
    region = region_of(box, stored.form.shape, form.elements)
    found: list[Held] = []
    what, at = f"tensor {shown(each.tensor.name)} of {checkpoint.root}", f"of its piece from element {each.start} on"
    try:
        for held in (*stored.owners.all, *stored.replicas.all):
            found += (Held(held.placed._replace(box=box), held.begin) for box in compose(region, held.box))
        owners = find_owners(form.elements, [held.box for held in found])
    except GapError as error:
        there = sorted({held.placed.path for held in found})
        facts = f"{at}, some lies in no shard that is there: {listed(there)}"
        raise UnsupportedError(what, facts, hint=_HINT) from error
    except ValueError as error:
        facts = f"{at}, what the shards that are there hold cannot be told apart: {error}"
        raise UnsupportedError(what, facts, hint=_HINT) from error
    owned, again = (Boxes([found[number] for number in numbers]) for numbers in (owners.owners, owners.replicas))
    return _PieceSources(stored.name, form, owned, again, region, stored.form)
