"""Finds out where a module's own loader places every element of a checkpoint, by having it load checkpoints whose
values say where they come from; no formula, no patch of anybody's code, no knowledge of a model.

It takes a load for each digit of an address, one of a digit reversed, and seven contrasts: in two of them each tensor
has zeros, and negative numbers from the whole range of exponents, in one arbitrary bits, NaNs among them, and in four
numbers near one, the same of the other sign, larger ones, and such below zero. What is placed has to hold in all of
them what it should; what is not placed, and is not the same in all, is made of some tensors. Which ones is found out by
loads in which some tensors have other values than the others (attribution.py), and at last each group of them is given
to the loader alone, twice. So a tensor that nothing is placed or made of had no effect in any load. After it, the
module is as it was.

What no value of these loads brings about cannot be seen: a loader that does something else with one number, or from
some bound on that none of them reaches, is not told from one that does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from itertools import cycle
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
from dcr_cli.live.attribution import attribute
from dcr_cli.live.marks import Marks
from dcr_cli.live.memory import Memory, memory_of
from dcr_cli.live.outside import Outside
from dcr_cli.live.placement import Placement, Product
from dcr_cli.live.reading import Reading
from dcr_cli.live.tensors import tensor_of
from dcr_cli.live.values import MOST_PAIRS, PAIRS, Below, Lean, Leaning, Zeros, pair_of

_SEED = 20_011
_AT_ONCE = 1 << 22
# What tensors have in the contrasts, in turns: what one of them decides of another one shows.
_CONTRASTS: tuple[tuple[WritesBits, WritesBits], ...] = (
    (Zeros(_SEED), Below(_SEED)),
    (Below(_SEED), Zeros(_SEED)),
    (AnyBits(_SEED), AnyBits(_SEED)),
    # Few of those are within the bounds of a cast, or one that lies apart from all others.
    *((Leaning(lean, _SEED + 2), Leaning(lean, _SEED + 2)) for lean in Lean),
)
# With these the groups are given to the loader alone.
_TRIED = (Leaning(Lean.NEAR, _SEED), Leaning(Lean.HIGH, _SEED + 1))
_ITERABLE = "it is given an iterable of (name, tensor); for one that wants a dict: lambda weights: LOAD(dict(weights))"
_LACKING = "may_lack names those that it is right to leave out, such as another rank's layers"

Elements = NDArray[Any]
Flags = NDArray[np.bool_]
Weights = Iterable[tuple[str, Any]]
Load = Callable[[Weights], Any]


def learn(
    module: Any, load: Load, forms: Mapping[str, Form], *, may_lack: Sequence[str] = (), key: str = ""
) -> Placement:
    """Find out where `load` places the tensors of `forms` in `module`, which is as it was afterwards.

    `load` is given all tensors, in the host's memory, one at a time; where it makes something else of some, also some
    of them. Tensors of which the module has nothing must match a pattern of `may_lack`. It takes, in the host's memory,
    a copy of what the module holds, and little more for what its loader moves. UnsupportedError where the loader
    fails, moves the module's tensors to other addresses, changes what the module keeps outside its parameters and
    buffers, or cannot be told what it does.
    """
    memory = memory_of(module)
    with memory.put_back() as outside:
        probe = _Probe((memory, outside), load, forms)
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

    def __init__(self, disturbed: tuple[Memory, Outside], load: Load, forms: Mapping[str, Form]) -> None:
        self._memory, self._outside = disturbed
        # Where something outside changes by itself, such as a counter of loads.
        self._restless: set[str] = set()
        self._load = load
        self._forms = forms
        self._addresses = give_addresses(forms)
        self._names = [name for name, form in forms.items() if form.elements]

    def placement(self, key: str) -> Placement:
        passes: list[WritesBits] = [*map(Digit, range(self._addresses.digits)), Digit(0, is_reversed=True)]
        readings = [self._read_after(dict.fromkeys(self._forms, values)) for values in passes[:1]]
        self._check_outside(dict.fromkeys(self._forms, passes[0]), with_numbers=False)
        self._outside.take_numbers()
        readings.extend(self._read_after(dict.fromkeys(self._forms, values)) for values in passes[1:])
        locals_: dict[str, LocalTensor] = {}
        flags: dict[str, Flags] = {}
        for name, form in self._memory.forms.items():
            locals_[name], is_made = self._local(form, [reading[name] for reading in readings])
            if is_made.any():
                flags[name] = is_made
        first = readings[0]
        del readings
        for turns in _CONTRASTS:
            values = dict(zip(self._forms, cycle(turns), strict=False))
            self._send(values)
            self._check_outside(values)
            for name, local in locals_.items():
                self._contrast(name, (local, first[name]), values, flags)
        del first
        marked = {name: int(each.sum()) for name, each in flags.items()}
        sources = self._sources(flags)
        numbers = {name: number for number, name in enumerate(self._names)}
        groups = tuple(sorted(set(sources.values()), key=lambda group: numbers[group[0]]))
        if groups:
            self._check_alone(locals_, groups, flags)
        held = {placement.tensor for local in locals_.values() for placement in local.placements}
        held.update(name for group in groups for name in group)
        what = f"layout of {self._memory.what}"
        layout = Layout(what, self._forms, {ONLY_FILE: locals_}, frozenset(set(self._names) - held))
        views = self._memory.views
        products = {
            name: Product(groups.index(group), Marks.of(flags[name]), int(flags[name].sum()) < marked[name])
            for name, group in sources.items()
        }
        return Placement(layout, groups, key, views, products)

    # Loading

    def _read_after(self, values: Mapping[str, WritesBits]) -> dict[str, Reading]:
        """Load tensors with these values, and keep what the module holds then."""
        self._send(values)
        return {name: Reading(each.form, each.bits) for name, each in self._memory.stretches.items()}

    def _check_outside(self, values: Mapping[str, WritesBits], *, with_numbers: bool = True) -> None:
        """Raise UnsupportedError if loads, of which the last one was of `values`, have changed what the module keeps
        outside its parameters and buffers."""
        changed = self._outside.changed(with_numbers=with_numbers)
        if changed - self._restless:
            self._restless |= self._changed_by_itself(values)
        if kept := sorted(changed - self._restless):
            facts = f"its loader changes {listed(kept)}, outside its parameters and buffers"
            hint = "a patch would leave them as they were: use dcr pull --engine"
            raise UnsupportedError(self._memory.what, facts, hint=hint)

    def _changed_by_itself(self, values: Mapping[str, WritesBits]) -> set[str]:
        """Where something outside is not what it was after the same load."""
        before = self._outside.now()
        self._send(values)
        return before.changed()

    def _send(self, values: Mapping[str, WritesBits]) -> None:
        """Load tensors with these values. UnsupportedError if that fails, or moves the module's tensors."""
        weights = self._weights(values)
        try:
            with torch.no_grad():
                self._load(weights)
        except DcrError:
            raise
        except Exception as error:
            facts = f"its loader failed: {type(error).__name__}: {error}"
            is_untouched = inspect.getgeneratorstate(weights) == inspect.GEN_CREATED
            hint = _ITERABLE if is_untouched else "try it alone, on a checkpoint; the module is as it was"
            raise UnsupportedError(self._memory.what, facts, hint=hint) from error
        if (name := self._memory.moved()) is not None:
            facts = f"its loader gives tensor {shown(name)} another place in memory"
            raise UnsupportedError(self._memory.what, facts, hint="a module is patched where it lies; use --engine")

    def _weights(self, values: Mapping[str, WritesBits]) -> Generator[tuple[str, Any], None, None]:
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

    def _local(self, form: Form, readings: Sequence[Reading]) -> tuple[LocalTensor, Flags]:
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

    def _contrast(
        self,
        name: str,
        probed: tuple[LocalTensor, Reading],
        values: Mapping[str, WritesBits],
        flags: dict[str, Flags],
    ) -> None:
        """Flag what a load of `values` has left in a stretch as it was not after the first load, and is not placed.
        UnsupportedError if what is placed does not hold what it should."""
        local, reading = probed
        expectations = [
            Expectation(self._addresses, local.form, [each], values[each.tensor]) for each in local.placements
        ]
        for first, count in parts_of(local.form):
            found, expected = self._now(name, first, count), reading.part(first, count).copy()
            is_placed = np.zeros(count, np.bool_)
            for each in expectations:
                each.put(expected, first)
                each.mark(is_placed, first)
            differs = found != expected
            self._check(name, first, differs & is_placed)
            if (differs & ~is_placed).any():
                is_made = flags.setdefault(name, np.zeros(local.form.elements, np.bool_))
                is_made[first : first + count] |= differs & ~is_placed

    def _sources(self, flags: Mapping[str, Flags]) -> dict[str, tuple[str, ...]]:
        """The group of tensors that what is made in each stretch is made of."""
        if not flags:
            return {}

        def read_with(changed: Collection[str], pair: int) -> dict[str, Elements]:
            values = pair_of(pair)
            self._send({name: values[name in changed] for name in self._forms})
            return self._made_now(flags)

        return attribute(self._names, flags, read_with, pairs=(len(PAIRS), MOST_PAIRS), what=self._memory.what)

    def _now(self, name: str, first: int, count: int) -> Elements:
        """What the module holds now."""
        return self._memory.stretches[name].bits.read(first, count)

    def _made_now(self, flags: Mapping[str, Flags]) -> dict[str, Elements]:
        """What the module holds now of what is made."""
        return {name: self._now(name, 0, len(each))[each] for name, each in flags.items()}

    # Checking

    def _check_alone(
        self, locals_: Mapping[str, LocalTensor], groups: Sequence[Sequence[str]], flags: Mapping[str, Flags]
    ) -> None:
        """Raise UnsupportedError unless the loader takes the tensors of each group without the others, leaves these
        alone, and makes of them what it made when it was given all."""
        made = []
        for values in _TRIED:
            self._send(dict.fromkeys(self._forms, values))
            made.append(self._made_now(flags))
        loaded = {name for group in groups for name in group}
        # Once in their order and once in the other: what one of them does to another is not hidden by that one's load.
        for values, expected, order in ((_TRIED[0], made[0], groups), (_TRIED[1], made[1], groups[::-1])):
            for group in order:
                self._send(dict.fromkeys(group, values))
            for name, local in locals_.items():
                alone = [each for each in local.placements if each.tensor in loaded]
                others = [each for each in local.placements if each.tensor not in loaded]
                self._compare(
                    name,
                    local,
                    [
                        Expectation(self._addresses, local.form, others, _TRIED[1]),
                        Expectation(self._addresses, local.form, alone, values),
                    ],
                )
            found = self._made_now(flags)
            if any(not np.array_equal(found[name], each) for name, each in expected.items()):
                facts = f"its loader makes something else of {listed(sorted(loaded))} if it is given them alone"
                raise UnsupportedError(self._memory.what, facts, hint="use --engine: what it converts has no layout")
        # Of a part of the tensors, there may be other numbers, as how many there were.
        self._check_outside(dict.fromkeys(groups[0], _TRIED[1]), with_numbers=False)

    def _compare(self, name: str, local: LocalTensor, expectations: Sequence[Expectation]) -> None:
        """Raise UnsupportedError unless what is placed holds what it should."""
        for first, count in parts_of(local.form):
            found = self._now(name, first, count)
            expected = found.copy()
            for each in expectations:
                each.put(expected, first)
            self._check(name, first, expected != found)

    def _check(self, name: str, first: int, differs: Flags) -> None:
        if differs.any():
            facts = f"element {first + int(np.argmax(differs))} of {shown(name)} is not what it should be after a "
            facts += "load of arbitrary bits"
            hint = "what a loader does with some values alone cannot be told; use --engine"
            raise UnsupportedError(self._memory.what, facts, hint=hint)
