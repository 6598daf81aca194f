"""Finds shards of one form that lie in each other's place. Nothing in their headers tells, but what they hold does.

A step of training changes few bits of a base. A shard that has few of the base's elements where it lies, and most where
another one of the same local tensors belongs, is that other one. Some runs of elements of each are looked at; what has
changed all over is nobody's, and is left alone. Where the rest is compared is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Indices
from dcr_cli.layout.coverage import coordinate
from dcr_cli.layout.gather import Gatherer, Sources
from dcr_cli.layout.laid import LaidCheckpoint, PartOfCheckpoint
from dcr_cli.layout.layout import Layout, LocalTensor
from dcr_cli.layout.residual.rules import Elementwise, conversion_of

# So many runs of so many elements are looked at in each shard.
_RUNS = 32
_RUN_ELEMENTS = 32
# A run of fewer different elements, as of zeros or ones, may be found anywhere.
_LEAST_DIFFERENT = 4
# So many elements that are others in two places are enough to tell which of both a shard belongs to.
_LEAST_TELLING = 16
# A local tensor of more boxes is not looked at.
_MOST_BOXES = 1024

_HINT = "put each shard where its layout has it; what is meant to be so can be given as a checkpoint in canonical form"

Flags = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Fill = Callable[[str, int, NDArray[Any]], None]


class Run(NamedTuple):
    """Elements of a local tensor that follow each other."""

    name: str
    first: int
    elements: int


class Made(NamedTuple):
    """The canonical tensor that a stored one is made into, element by element."""

    name: str
    conversion: Elementwise | None


@dataclass(frozen=True, slots=True)
class Alike:
    """Shards that have the same local tensors in several places: the runs to look at, what is made of the tensors that
    their boxes lead to, and how the elements of each local tensor that is looked at become canonical, if not as they
    are."""

    shards: Mapping[str, Mapping[str, LocalTensor]]
    runs: tuple[Run, ...]
    made: Mapping[str, Made]
    conversions: Mapping[str, Elementwise | None]


@dataclass(frozen=True, slots=True)
class Sight:
    """What the base has where the runs of a shard belong: the bits of each element, and whether they tell anything.

    `tensors` are numbers of `names`, and with `elements` say where that is.
    """

    names: tuple[str, ...]
    tensors: Indices
    elements: Indices
    bits: Bits
    is_telling: Flags


# What is compared, and how it comes out: values in, values out


def find_alike(layout: Layout, readable: Collection[str]) -> Iterator[Alike]:
    """Find the shards of a layout that could lie in each other's place, and what of them to look at: what leads to
    canonical tensors that are `readable`, as it is or by rules of single elements."""
    made = _made_of(layout, readable)
    by_form: dict[frozenset[Any], dict[str, Mapping[str, LocalTensor]]] = {}
    for path, tensors in layout.shards.items():
        form = frozenset((name, tensor.form) for name, tensor in tensors.items())
        by_form.setdefault(form, {})[path] = tensors
    for shards in by_form.values():
        first = next(iter(shards.values()))
        conversions = {}
        for name in first:
            found = _conversions_of([tensors[name] for tensors in shards.values()], made)
            if len(found) == 1:
                conversions[name] = found.pop()
        runs = spread({name: first[name].form.elements for name in conversions})
        if runs:
            yield Alike(shards, tuple(runs), made, conversions)


def _conversions_of(tensors: Sequence[LocalTensor], made: Mapping[str, Made]) -> set[Elementwise | None]:
    """How local tensors of one name and form become canonical; none if they are not worth a look: they lie in the same
    place, in very many boxes, or lead to what cannot be compared."""
    first = tensors[0]
    if first.form.dtype == "BOOL" or all(tensor.placements == first.placements for tensor in tensors):
        return set()
    if max(len(tensor.placements) for tensor in tensors) > _MOST_BOXES:
        return set()
    stored = {placement.tensor for tensor in tensors for placement in tensor.placements}
    return {made[name].conversion for name in stored} if stored <= made.keys() else set()


def _made_of(layout: Layout, readable: Collection[str]) -> dict[str, Made]:
    """What is made of each tensor that boxes lead to, of those that can be compared."""
    wanted = [name for name in layout.tensors if name in readable and name not in layout.skipped]
    found = {name: Made(name, None) for name in wanted if name not in layout.rules}
    for name in wanted:
        if name in layout.rules and isinstance(conversion := conversion_of(name, layout), Elementwise):
            found[layout.rules[name].of] = Made(name, conversion)
    return found


def spread(elements: Mapping[str, int]) -> list[Run]:
    """Runs of local tensors of so many elements, spread over the largest of them; in the order that these have."""
    largest = set(sorted((name for name in elements if elements[name]), key=lambda name: -elements[name])[:_RUNS])
    runs = []
    for name, size in elements.items():
        if name not in largest:
            continue
        count = min(_RUN_ELEMENTS, size)
        number = max(1, min(_RUNS // len(largest), size // count))
        runs += [Run(name, (size - count) * each // max(number - 1, 1), count) for each in range(number)]
    return runs


def agreement(found: Bits, own: Sight) -> float:
    """Which part of what tells something a shard has as the base has it in its own place; 1 if nothing does."""
    telling = int(np.count_nonzero(own.is_telling))
    return int(np.count_nonzero((found == own.bits) & own.is_telling)) / telling if telling else 1.0


def first_of_other(found: Bits, own: Sight, other: Sight) -> int | None:
    """Which is the first of some elements that show that they are not in their own place, but belong to another one;
    None if they do not."""
    telling = own.is_telling & other.is_telling & (own.bits != other.bits)
    count = int(np.count_nonzero(telling))
    here, there = telling & (found == own.bits), telling & (found == other.bits)
    if count < _LEAST_TELLING or 4 * np.count_nonzero(here) >= count or 2 * np.count_nonzero(there) < count:
        return None
    return int(np.argmax(there))


# Reading


def check_places(target: Checkpoint, base: Checkpoint, own: Collection[str] | None = None) -> None:
    """Raise DamagedError, naming the shard, the tensor and the element, if one of the shards of `target`, or of those
    in `own`, holds what belongs to another one.

    Of a checkpoint in canonical form there is nothing to say, nor where not all of the base is there.
    """
    if not isinstance(target, LaidCheckpoint):
        return
    readable = _readable(base)
    alike = list(find_alike(target.layout, readable)) if readable else []
    if not alike:
        return
    with ExitStack() as stack:
        reader = stack.enter_context(target.reader())
        base_elements = _elements_of(base, stack.enter_context(base.reader()))
        for shards in alike:
            _Comparison(target, reader, base_elements, shards).check(own)


def _readable(base: Checkpoint) -> Collection[str]:
    """The tensors of a base of which a few elements can be read without all of them."""
    if not isinstance(base, LaidCheckpoint):
        return base.by_name.keys()
    if isinstance(base, PartOfCheckpoint) and not base.layout.shards.keys() <= {shard.path for shard in base.local}:
        return ()
    return {name for name, source in base.sources.items() if isinstance(source, Sources)}


def _elements_of(base: Checkpoint, reader: Reader) -> Fill:
    """What fills `out` with elements of a tensor, `name`, of the base, from number `first` on."""
    if not isinstance(base, LaidCheckpoint):
        return lambda name, first, out: reader.read_into(base.by_name[name], first * out.itemsize, out)
    gatherer = Gatherer(reader)

    def gather(name: str, first: int, out: NDArray[Any]) -> None:
        source = base.sources[name]
        assert isinstance(source, Sources)
        gatherer.read(source, first, out)

    return gather


class _Comparison:
    """Compares shards of one form with the base at the places of all of them; each place is looked at once."""

    def __init__(self, target: LaidCheckpoint, reader: Reader, base: Fill, alike: Alike) -> None:
        self._target = target
        self._reader = reader
        self._base = base
        self._alike = alike
        self._seen: dict[str, Sight] = {}
        self._same: dict[tuple[Any, ...], str] = {}

    def check(self, own: Collection[str] | None) -> None:
        there = {shard.path: shard for shard in self._target.local}
        for path in self._alike.shards:
            if path not in there or (own is not None and path not in own):
                continue
            begins = {entry.name: len(there[path].header.raw) + entry.begin for entry in there[path].header.tensors}
            found, here = self._found(path, begins), self._sight(path)
            if agreement(found, here) < 0.5:
                self._check_others(path, found, here)

    def _check_others(self, path: str, found: Bits, here: Sight) -> None:
        for other in self._alike.shards:
            there = self._sight(other)
            first = first_of_other(found, here, there)
            if first is not None:
                facts = (
                    f"holds what belongs to {shown(other)}: tensor {self._place(here, first)}, "
                    f"is what the base has of tensor {self._place(there, first)}"
                )
                raise DamagedError(str(self._target.root / path), facts, hint=_HINT)

    def _place(self, sight: Sight, number: int) -> str:
        name = sight.names[sight.tensors[number]]
        form = self._target.layout.tensors[name]
        return f"{shown(name)}, element {coordinate(int(sight.elements[number]), form)}"

    def _found(self, path: str, begins: Mapping[str, int]) -> Bits:
        """What a shard holds, in canonical form."""
        parts = []
        for name, first, elements in self._alike.runs:
            width = DTYPES[self._alike.shards[path][name].form.dtype].width
            bits: NDArray[Any] = np.empty(elements, f"<u{width}")
            self._reader.read_path_into(path, begins[name] + first * width, bits.view(np.uint8))
            conversion = self._alike.conversions[name]
            parts.append((conversion.convert(bits) if conversion is not None else bits).astype(np.uint64))
        return np.concatenate(parts)

    def _sight(self, path: str) -> Sight:
        """What the base has where a shard belongs; where replicas of it belong is the same place."""
        tensors = self._alike.shards[path]
        same = self._same.setdefault(tuple(tensors[name].placements for name in self._alike.conversions), path)
        if same not in self._seen:
            self._seen[same] = self._look(tensors)
        return self._seen[same]

    def _look(self, tensors: Mapping[str, LocalTensor]) -> Sight:
        numbers: dict[str, int] = {}
        parts = [self._look_at(run, tensors[run.name], numbers) for run in self._alike.runs]
        places, elements, bits, is_telling = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Sight(tuple(numbers), places, elements, bits, is_telling)

    def _look_at(self, run: Run, tensor: LocalTensor, numbers: dict[str, int]) -> tuple[Indices, Indices, Bits, Flags]:
        """The tensors, by their numbers, the elements and the bits of a run, and which of them tell anything."""
        places, elements = np.zeros((2, run.elements), np.int64)
        bits, is_there = np.zeros(run.elements, np.uint64), np.zeros(run.elements, np.bool_)
        local = np.arange(run.first, run.first + run.elements)
        for stored, box in tensor.placements:
            if box.local_end <= run.first or box.local >= run.first + run.elements:
                continue
            name = self._alike.made[stored].name
            found, canonical = box.inverse().find(local)
            places[found], elements[found] = numbers.setdefault(name, len(numbers)), canonical
            is_there[found] = True
            bits[found] = self._read(name, canonical)
        is_telling = is_there & (len(np.unique(bits[is_there])) >= _LEAST_DIFFERENT)
        return places, elements, bits, is_telling

    def _read(self, name: str, elements: Indices) -> Bits:
        """Elements of a tensor of the base, those that follow each other in one read."""
        width = DTYPES[self._target.layout.tensors[name].dtype].width
        bits: NDArray[Any] = np.empty(len(elements), f"<u{width}")
        for part in _consecutive(elements):
            self._base(name, int(elements[part.start]), bits[part])
        return bits.astype(np.uint64)


def _consecutive(elements: Indices) -> Sequence[slice]:
    """Where elements that follow each other begin and end."""
    ends = [*(np.flatnonzero(np.diff(elements) != 1) + 1).tolist(), len(elements)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]
