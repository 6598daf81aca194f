"""Decodes a delta for a module: which of its elements get which bits, all of it before anything is changed.

What is staged are absolute bits, so that writing them twice is writing them once. What a rank does not hold is passed
over, where its blocks can be decoded without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.changes.blocks import Block, Said, blocks_of, is_moved, may_change, read_block
from dcr_cli.checkpoint.digest import digest_bytes, digest_text, tensor_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.chain import IN_ORDER
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.delta.strided import spans
from dcr_cli.errors import DamagedError, UnsupportedError, WrongBaseError
from dcr_cli.layout.box import Indices
from dcr_cli.layout.layout import Form
from dcr_cli.live.holdings import Holdings
from dcr_cli.live.offer import Offer
from dcr_cli.live.pieces import Sums, no_sums, split, sums_of
from dcr_cli.live.shares import Part, Shares
from dcr_cli.pool import run_all
from dcr_cli.receiver.passes.runs import Runs

# Positions are digested relative to the first one of so many elements.
_SPAN_ELEMENTS = 1 << 31
_OTHER_WAY = (
    "dcr pull --publish-changes DIR on this host decodes it: take it from there, changes=DIR; "
    "or publish with --encodings gap,whole"
)

Elements = NDArray[Any]


@dataclass(slots=True)
class Changes:
    """Elements of a stretch that change: where, and their old and new bits, in the parts in which they came."""

    positions: list[Indices] = field(default_factory=list)
    old: list[Elements] = field(default_factory=list)
    new: list[Elements] = field(default_factory=list)

    def joined(self) -> tuple[Indices, Elements, Elements]:
        return np.concatenate(self.positions), np.concatenate(self.old), np.concatenate(self.new)


class Decoded:
    """What a delta changes in a module: elements of its stretches by their names, what that adds to the digests of
    the pieces of parts, and the new elements of tensors that are kept whole."""

    def __init__(self) -> None:
        self.stretches: dict[str, Changes] = {}
        self.growth: dict[Part, Sums] = {}
        self.kept: dict[str, Elements] = {}
        self.lock = Lock()

    @property
    def elements(self) -> int:
        """How many elements of the module change, each place of a replica counted."""
        return sum(len(each) for changes in self.stretches.values() for each in changes.positions)

    def sums(self, before: Mapping[Part, bytes]) -> dict[Part, bytes]:
        """The digests of parts after the change, from those before."""
        # What lies within other parts has no digests of its own.
        grown = {part: growth for part, growth in self.growth.items() if part in before}
        return {**before, **{part: (sums_of(before[part]) + growth).tobytes() for part, growth in grown.items()}}


def decode(offer: Offer, holdings: Holdings, jobs: int) -> Decoded:
    """Decode a delta, whose tensors are those of the module's placement, against what a module holds.

    DamagedError if a block is malformed; UnsupportedError where one cannot be decoded from what is held here.
    """
    decoded = Decoded()

    def worker() -> Callable[[Block | TensorRow], None]:
        return _Worker(offer, holdings, decoded).work

    run_all(_tasks(offer, holdings, decoded), worker, jobs)
    rows = {row.name: row for row in offer.documents.manifest.tensors}
    for name, elements in decoded.kept.items():
        row = rows[name]
        found = digest_bytes(tensor_digest(elements))
        if row.digest is not None and found != row.digest:
            facts = f"would not become what the manifest says: expected {digest_text(row.digest)}, "
            raise DamagedError(f"tensor {shown(name)}", f"{facts}found {digest_text(found)}")
    return decoded


def weights_of(offer: Offer, holdings: Holdings, decoded: Decoded) -> dict[str, Elements]:
    """The tensors that have to go through the loader, with their new elements. UnsupportedError if some are not
    known."""
    changed = {row.name for row in offer.documents.manifest.tensors if may_change(row)}
    found: dict[str, Elements] = {}
    for group in holdings.placement.loaded:
        if changed.isdisjoint(group):
            continue
        lacking = [name for name in group if name not in holdings.kept]
        if lacking:
            facts = f"the loader makes something else of {listed(lacking)}, and what it was given is not known"
            hint = "give the checkpoint that the module was loaded from: Receiver(..., checkpoint=FOLDER)"
            raise UnsupportedError(holdings.memory.what, facts, hint=hint)
        found |= {name: decoded.kept.get(name, holdings.kept[name]) for name in group}
    return found


def check_target(offer: Offer, shares: Shares, what: str) -> None:
    """Raise WrongBaseError unless all that one rank holds every element of becomes what the delta says."""
    found = shares.tensors()
    wrong = [row.name for row, digest in offer.documents.tensors() if found.get(row.name, digest) != digest]
    if wrong:
        facts = f"would not become what the delta says: tensors {listed(wrong)} differ"
        raise WrongBaseError(what, facts, hint=IN_ORDER)


def _tasks(offer: Offer, holdings: Holdings, decoded: Decoded) -> Iterator[Block | TensorRow]:
    runs = Runs(offer.payloads) if offer.changes is None else None
    for row in offer.documents.manifest.tensors:
        is_here = bool(holdings.placement.placed[row.name]) or row.name in holdings.kept
        if not is_here or not may_change(row):
            continue
        if row.name in holdings.kept:
            decoded.kept[row.name] = holdings.kept[row.name].copy()
        if runs is None or is_moved(row):
            yield row
        if runs is not None:
            yield from blocks_of(runs, offer.payloads, row, holdings.placement.forms[row.name].elements)


class _Worker:
    """Decodes blocks in one thread."""

    def __init__(self, offer: Offer, holdings: Holdings, decoded: Decoded) -> None:
        self._offer = offer
        self._holdings = holdings
        self._decoded = decoded

    def work(self, task: Block | TensorRow) -> None:
        row = task if isinstance(task, TensorRow) else task.row
        if is_moved(row):
            facts = f"starts from tensor {shown(str(row.source))}, and not from what it is itself"
            raise UnsupportedError(f"tensor {shown(row.name)}", facts, hint="load the module anew, at this version")
        if isinstance(task, Block):
            self._place(row, read_block(task, self._offer.payloads, partial(self._base, row)))
        elif self._offer.changes is not None:
            for said in self._offer.changes.of(row.name):
                self._place(row, said)

    def _base(self, row: TensorRow, flat: Indices) -> Elements:
        base, is_held = self._holdings.gather(row.name, flat)
        if not is_held.all():
            facts = "is coded by what it was before (context), and is not all held here"
            raise UnsupportedError(f"tensor {shown(row.name)}", facts, hint=_OTHER_WAY)
        return base

    def _place(self, row: TensorRow, said: Said) -> None:
        """Note what is said of elements of a tensor wherever they are held."""
        (flat, values, is_mask), name, digested = said, row.name, set[Part]()
        form = self._holdings.placement.forms[name]
        kept = self._decoded.kept.get(name)
        if kept is not None:
            kept[flat] = kept[flat] ^ values if is_mask else values
        for place, found, local in self._holdings.find(name, flat):
            old = self._holdings.memory.stretches[place.name].bits.gather(local)
            new = old ^ values[found] if is_mask else values[found]
            differs = new != old
            if not differs.any():
                continue
            local, at, old, new = local[differs], flat[found][differs], old[differs], new[differs]
            part = Part(name, place.box.footprint)
            growth = _growth(form, at, old, new) if part not in digested else None
            digested.add(part)
            with self._decoded.lock:
                changes = self._decoded.stretches.setdefault(place.name, Changes())
                changes.positions.append(local)
                changes.old.append(old)
                changes.new.append(new)
                if growth is not None:
                    before = self._decoded.growth.get(part)
                    self._decoded.growth[part] = growth if before is None else before + growth


def _growth(form: Form, flat: Indices, old: Elements, new: Elements) -> Sums:
    """What the digests of a tensor's pieces grow by when these of its elements, which ascend, change."""
    sums, width = no_sums(form), DTYPES[form.dtype].width
    for number, start, stop in split(form, flat):
        for _, begin, end in spans(flat[start:stop], _SPAN_ELEMENTS):
            at = slice(start + begin, start + end)
            first = int(flat[at.start])
            positions = (flat[at] - first).astype(np.uint32)
            sums[number] += kernels.digest_changes(positions, old[at], new[at], first * width)
    return sums
