"""Finds out where a module's own loader places every element of a checkpoint, by having it load checkpoints whose
values say where they come from; no formula, no patch of anybody's code, no knowledge of a model.

It takes a load for each digit of an address, one of a digit reversed, and one of arbitrary bits, NaNs among them, which
must lie where the others say. What is not placed bit for bit is made of some tensors; which ones, and whether the
loader takes these alone, is found out by loads in which some tensors have other values than the others
(attribution.py). After it, the module is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.checkpoint.patterns import Patterns
from dcr_cli.errors import DcrError, UnsupportedError
from dcr_cli.layout.addresses import (
    NOWHERE,
    AnyBits,
    Digit,
    Found,
    WritesBits,
    give_addresses,
    read_addresses,
)
from dcr_cli.layout.fitting import TooIrregularError
from dcr_cli.layout.layout import Form, Layout, LocalTensor
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.layout.tracing import Expectation, Trace, parts_of
from dcr_cli.live.attribution import Made, attribute
from dcr_cli.live.marks import Marks
from dcr_cli.live.memory import Memory, memory_of
from dcr_cli.live.placement import Placement, Product
from dcr_cli.live.reading import Reading
from dcr_cli.live.tensors import tensor_of

_SEED = 20_011
_AT_ONCE = 1 << 22
_FIRST, _REVERSED = Digit(0), Digit(0, is_reversed=True)
_LACKING = "may_lack names those that it is right to leave out, such as another rank's layers"

Elements = NDArray[Any]
Weights = Iterable[tuple[str, Any]]
Load = Callable[[Weights], Any]


def learn(
    module: Any, load: Load, forms: Mapping[str, Form], *, may_lack: Sequence[str] = (), key: str = ""
) -> Placement:
    """Find out where `load` places the tensors of `forms` in `module`, which is as it was afterwards.

    `load` is given all tensors, in the host's memory, one at a time; where it makes something else of some, also some
    of them. Tensors of which the module has nothing must match a pattern of `may_lack`. It takes, in the host's memory,
    a copy of what the module holds, and little more for what its loader moves. UnsupportedError where the loader
    fails, moves the module's tensors to other addresses, or cannot be told what it does.
    """
    memory = memory_of(module)
    with memory.put_back():
        probe = _Probe(memory, load, forms)
        placement = probe.placement(key)
    check_lacking(placement, may_lack)
    return placement


def check_lacking(placement: Placement, may_lack: Sequence[str]) -> None:
    """Raise UnsupportedError unless all tensors that the module holds nothing of match a pattern."""
    patterns = Patterns(may_lack)
    unexpected = [name for name in placement.layout.skipped if not patterns.match(name)]
    if unexpected:
        facts = f"holds nothing of tensors {listed(sorted(unexpected))}"
        raise UnsupportedError(placement.layout.what.removeprefix("layout of "), facts, hint=_LACKING)


class _Probe:
    """Has a loader load, and says what comes of it."""

    def __init__(self, memory: Memory, load: Load, forms: Mapping[str, Form]) -> None:
        self._memory = memory
        self._load = load
        self._forms = forms
        self._addresses = give_addresses(forms)
        self._names = [name for name, form in forms.items() if form.elements]

    def placement(self, key: str) -> Placement:
        passes: list[WritesBits] = [*map(Digit, range(self._addresses.digits)), _REVERSED]
        readings = [self._read_after(dict.fromkeys(self._forms, values)) for values in passes]
        locals_: dict[str, LocalTensor] = {}
        made: dict[str, Made] = {}
        for name, form in self._memory.forms.items():
            locals_[name], flags = self._local(form, [reading[name] for reading in readings])
            if flags.any():
                made[name] = Made(flags, readings[0][name].all(form))
        del readings
        sources = self._sources(made)
        groups = tuple(dict.fromkeys(sources.values()))
        self._load_values(dict.fromkeys(self._forms, AnyBits(_SEED)))
        self._check_any_bits(locals_)
        if groups:
            self._check_alone(locals_, {name for group in groups for name in group}, made)
        held = {placement.tensor for local in locals_.values() for placement in local.placements}
        held.update(name for group in groups for name in group)
        what = f"layout of {self._memory.what}"
        layout = Layout(what, self._forms, {ONLY_FILE: locals_}, frozenset(set(self._names) - held))
        views = self._memory.views
        products = {name: Product(groups.index(group), Marks.of(made[name].flags)) for name, group in sources.items()}
        return Placement(layout, groups, key, views, products)

    # Loading

    def _read_after(self, values: Mapping[str, WritesBits]) -> dict[str, Reading]:
        """Load tensors with these values, and keep what the module holds then."""
        self._load_values(values)
        return {name: Reading(each.form, each.bits) for name, each in self._memory.stretches.items()}

    def _load_values(self, values: Mapping[str, WritesBits]) -> None:
        try:
            with torch.no_grad():
                self._load(self._weights(values))
        except DcrError:
            raise
        except Exception as error:
            facts = f"its loader failed: {type(error).__name__}: {error}"
            hint = "try it alone, on a checkpoint; the module is as it was"
            raise UnsupportedError(self._memory.what, facts, hint=hint) from error
        if (name := self._memory.moved()) is not None:
            facts = f"its loader gives tensor {shown(name)} another place in memory"
            raise UnsupportedError(self._memory.what, facts, hint="a module is patched where it lies; use --engine")

    def _weights(self, values: Mapping[str, WritesBits]) -> Iterator[tuple[str, Any]]:
        for name, each in values.items():
            yield name, tensor_of(name, self._forms[name], self._bits(name, each))

    def _bits(self, name: str, values: WritesBits) -> Elements:
        form, begin = self._forms[name], self._addresses.begins[name]
        dtype = DTYPES[form.dtype]
        elements = np.empty(form.elements, f"<u{dtype.width}")
        for first in range(0, form.elements, _AT_ONCE):
            addresses = np.arange(begin + first, begin + min(first + _AT_ONCE, form.elements), dtype=np.int64)
            elements[first : first + len(addresses)] = values.bits(dtype, addresses)
        return elements

    # Reading

    def _local(self, form: Form, readings: Sequence[Reading]) -> tuple[LocalTensor, NDArray[np.bool_]]:
        """What a stretch is made of, and which of its elements are something else than one that was loaded."""
        trace = Trace(self._addresses, form.dtype)
        made = np.zeros(form.elements, np.bool_)
        try:
            for first, count in parts_of(form):
                found = self._find(form, [reading.part(first, count) for reading in readings])
                made[first : first + count] = found.is_made
                trace.add(first, found.addresses)
            return LocalTensor(form, tuple(trace.placements())), made
        except TooIrregularError:
            # The loader knows where they lie; it is asked to place them, whatever changes.
            for first, count in parts_of(form):
                found = self._find(form, [reading.part(first, count) for reading in readings])
                made[first : first + count] = found.is_made | (found.addresses != NOWHERE)
            return LocalTensor(form, ()), made

    def _find(self, form: Form, parts: Sequence[Elements]) -> Found:
        return read_addresses(DTYPES[form.dtype], self._addresses.totals.get(form.dtype, 0), parts[:-1], parts[-1])

    def _sources(self, made: Mapping[str, Made]) -> dict[str, tuple[str, ...]]:
        """The group of tensors that what is made in each stretch is made of."""
        if not made:
            return {}

        def read_with(reversed_names: Collection[str]) -> dict[str, Elements]:
            values = {name: _REVERSED if name in reversed_names else _FIRST for name in self._forms}
            self._load_values(values)
            return {name: self._now(name, 0, len(each.flags)) for name, each in made.items()}

        return attribute(self._names, made, read_with, self._memory.what)

    def _now(self, name: str, first: int, count: int) -> Elements:
        """What the module holds now."""
        return self._memory.stretches[name].bits.read(first, count)

    # Checking

    def _check_any_bits(self, locals_: Mapping[str, LocalTensor]) -> None:
        """Raise UnsupportedError unless arbitrary bits, which were loaded, lie where they should."""
        for name, local in locals_.items():
            expectation = Expectation(self._addresses, local.form, local.placements, AnyBits(_SEED))
            self._compare(name, local, [expectation])

    def _check_alone(
        self, locals_: Mapping[str, LocalTensor], loaded: Collection[str], made: Mapping[str, Made]
    ) -> None:
        """Raise UnsupportedError unless the loader takes the tensors of all groups without the others, leaves these
        alone, and makes of them what it made when it was given all."""
        self._load_values(dict.fromkeys(sorted(loaded), _FIRST))
        for name, local in locals_.items():
            alone = [each for each in local.placements if each.tensor in loaded]
            others = [each for each in local.placements if each.tensor not in loaded]
            expectations = [
                Expectation(self._addresses, local.form, others, AnyBits(_SEED)),
                Expectation(self._addresses, local.form, alone, _FIRST),
            ]
            self._compare(name, local, expectations)
        for name, each in made.items():
            if (self._now(name, 0, len(each.flags)) != each.reading)[each.flags].any():
                facts = f"its loader makes something else of {listed(sorted(loaded))} if it is given them alone"
                raise UnsupportedError(self._memory.what, facts, hint="use --engine: what it converts has no layout")

    def _compare(self, name: str, local: LocalTensor, expectations: Sequence[Expectation]) -> None:
        for first, count in parts_of(local.form):
            found = self._now(name, first, count)
            expected = found.copy()
            for each in expectations:
                each.put(expected, first)
            differs = expected != found
            if differs.any():
                facts = f"element {first + int(np.argmax(differs))} of {shown(name)} is not what it should be after a "
                facts += "load of arbitrary bits"
                hint = "what a loader does with some values alone cannot be told; use --engine"
                raise UnsupportedError(self._memory.what, facts, hint=hint)
