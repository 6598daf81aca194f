"""Derives a layout from a loader, which loads checkpoints whose values say where they come from, and returns its own.

It takes one load for each digit of an address, one of a digit reversed, which only what is moved as it is comes through
as foretold, and at last one of random values, which must lie, bit for bit, where the layout says. Whether every
canonical element is somewhere is coverage.py's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.layout.addresses import NOWHERE, Addresses, Digit, Drawn, Found, WritesBits, give_addresses, read_addresses
from dcr_cli.layout.coverage import Coverage, coordinate
from dcr_cli.layout.fitting import TooIrregularError
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout, LocalTensor, Placement
from dcr_cli.layout.loader import Loader
from dcr_cli.layout.opening import forms_of
from dcr_cli.layout.probe_files import Kept, ProbeFolder
from dcr_cli.layout.tracing import Expectation, Trace, parts_of

_SEED = 20_011
_LACKING = "--may-lack names those that it is right to leave out, --tied A=B two for which it has one tensor"

Returned = Mapping[str, Mapping[str, Kept]]


def probe(
    loader: Loader,
    base: Checkpoint,
    *,
    scratch: Path,
    may_lack: Sequence[str] = (),
    tied: Sequence[tuple[str, str]] = (),
) -> Layout:
    """Derive the layout of what a loader returns for checkpoints like `base`, of which headers and sidecars are read.

    In a new folder in `scratch`, removed again, one checkpoint of the base's size lies at a time, and beside it what
    each load returned. Canonical tensors that the loader has nowhere must match a pattern of `may_lack`; the layout
    skips them. Of two that are `tied` it has one; wherever that is, the other is too, and a receiver changes both or
    neither. UsageError where these are not such a pair; UnsupportedError, naming the tensor, where it does more than
    move elements, or so that no short list of boxes says how.
    """
    forms = forms_of(base)
    _check_tied(forms, tied)
    addresses = give_addresses(forms)
    passes: list[WritesBits] = [*map(Digit, range(addresses.digits)), Digit(0, is_reversed=True), Drawn(_SEED)]
    with ProbeFolder(scratch) as folder:
        returned = [folder.load(loader, base, addresses.begins, each) for each in passes]
        _check_same(returned, loader.what)
        probed = _Probe(loader.what, folder, addresses, forms)
        shards = {
            path: {name: probed.local_tensor(path, name, kept) for name, kept in tensors.items()}
            for path, tensors in returned[0].items()
        }
    return _covering(_with_tied(Layout(f"layout of {loader.what}", forms, shards), tied), may_lack)


def _check_tied(forms: Mapping[str, Form], tied: Sequence[tuple[str, str]]) -> None:
    for pair in tied:
        what = f"--tied {shown('='.join(pair))}"
        for name in pair:
            if name not in forms:
                raise UsageError(what, f"the base has no tensor {shown(name)}", hint="A=B, two tensors of the base")
        one, other = (forms[name] for name in pair)
        if one != other or pair[0] == pair[1]:
            raise UsageError(what, f"these are {one} and {other}", hint="A=B, two tensors of one form")


def _with_tied(layout: Layout, tied: Sequence[tuple[str, str]]) -> Layout:
    """The layout in which, of each pair, the one that is nowhere is where the other is."""
    for pair in tied:
        placed = layout.placed()
        lacking = [name for name in pair if not placed[name]]
        if len(lacking) != 1:
            facts = f"the loader has {'neither' if lacking else 'both, each for itself'}"
            hint = "leave it out: it has one tensor for both where they are tied"
            raise UsageError(f"--tied {shown('='.join(pair))}", facts, hint=hint)
        (there,) = (name for name in pair if name not in lacking)
        shards = {
            path: {name: _with_copy(tensor, there, lacking[0]) for name, tensor in tensors.items()}
            for path, tensors in layout.shards.items()
        }
        layout = replace(layout, shards=shards)
    return layout


def _with_copy(tensor: LocalTensor, name: str, copy: str) -> LocalTensor:
    """A local tensor that holds of `copy` what it holds of tensor `name`."""
    more = [Placement(copy, placement.box) for placement in tensor.placements if placement.tensor == name]
    return replace(tensor, placements=(*tensor.placements, *more)) if more else tensor


def _check_same(returned: Sequence[Returned], what: str) -> None:
    for other in returned[1:]:
        if other != returned[0]:
            raise UnsupportedError(what, "returned tensors of other names or forms when it loaded again")


def _covering(layout: Layout, may_lack: Sequence[str]) -> Layout:
    """The layout, which skips what is nowhere and may be; UnsupportedError or DamagedError if it lacks more."""
    placed = layout.placed()
    lacking = [name for name, form in layout.tensors.items() if form.elements and not placed[name]]
    patterns = Patterns(may_lack)
    unexpected = [name for name in lacking if not patterns.match(name)]
    if unexpected:
        facts = f"holds nothing of tensors {listed(unexpected)}"
        raise UnsupportedError(layout.what, facts, hint=_LACKING)
    coverage = Coverage(layout)
    for name, form in layout.tensors.items():
        if name not in lacking:
            coverage.owners_of(name, form, placed[name])
    return Layout(layout.what, layout.tensors, layout.shards, frozenset(lacking))


class _Probe:
    """Reads what came back of all loads, and says of each local tensor where it comes from."""

    def __init__(self, what: str, folder: ProbeFolder, addresses: Addresses, forms: Mapping[str, Form]) -> None:
        self._what = what
        self._folder = folder
        self._addresses = addresses
        self._forms = forms

    def local_tensor(self, path: str, name: str, kept: Kept) -> LocalTensor:
        what = f"{self._what}: tensor {shown(name)} of {shown(path)}"
        trace = Trace(self._addresses, kept.form.dtype)
        is_padded, is_zero = False, True
        try:
            for first, count in parts_of(kept.form):
                found = self._find(what, kept, first, count)
                nowhere = found.addresses == NOWHERE
                if nowhere.any():
                    is_padded = True
                    is_zero &= not self._folder.read(0, kept, first, count)[nowhere].any()
                trace.add(first, found.addresses)
            placements = trace.placements()
        except TooIrregularError as error:
            facts = f"is no short list of boxes of canonical tensors: {error}"
            raise UnsupportedError(what, facts, hint="a layout cannot say where its elements come from") from error
        fill = ZERO if placements and is_padded and is_zero else KEEP
        tensor = LocalTensor(kept.form, tuple(placements), fill)
        self._check(what, tensor, kept)
        return tensor

    def _find(self, what: str, kept: Kept, first: int, count: int) -> Found:
        dtype = kept.form.dtype
        digits = [self._folder.read(number, kept, first, count) for number in range(self._addresses.digits)]
        is_reversed = self._folder.read(len(digits), kept, first, count)
        found = read_addresses(DTYPES[dtype], self._addresses.totals.get(dtype, 0), digits, is_reversed)
        if found.is_made.any():
            where = coordinate(first + int(np.argmax(found.is_made)), kept.form)
            facts = f"element {where} changes with the checkpoint, but is no element of it of {dtype}"
            raise UnsupportedError(what, facts, hint="what a loader converts or computes has no layout")
        return found

    def _check(self, what: str, tensor: LocalTensor, kept: Kept) -> None:
        """Raise UnsupportedError unless the load of random values is, bit for bit, what the layout says."""
        drawn = self._addresses.digits + 1
        expectation = Expectation(self._addresses, kept.form, tensor.placements, Drawn(_SEED))
        for first, count in parts_of(kept.form):
            expected = self._folder.read(0, kept, first, count)
            expectation.put(expected, first)
            differs = self._folder.read(drawn, kept, first, count) != expected
            if differs.any():
                where = coordinate(first + int(np.argmax(differs)), kept.form)
                facts = f"element {where} is not what it should be after a load of random values"
                raise UnsupportedError(what, facts, hint="what a loader converts or computes has no layout")
