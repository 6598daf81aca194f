"""Reads canonical elements from local tensors through boxes, range by range, in bounded memory, from any thread.

It opens no file itself and knows nothing of documents; conversions of what was read are residual/'s.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Box, Rectangle
from dcr_cli.layout.buffers import Buffers
from dcr_cli.layout.coverage import coordinate, local_name
from dcr_cli.layout.kept import Kept, Making, Step
from dcr_cli.layout.layout import Form, Placed

Elements = NDArray[Any]

# What lies in between is read too, up to so many times what is wanted, or up to so many bytes.
_SPARSE = 4
_NEAR_BYTES = 1 << 16
# No more is read at once than this.
_SCRATCH_BYTES = 4 << 20
# Slabs that are read one by one are put in place together, up to so many bytes.
_STACK_BYTES = 1 << 18
# Rows of a stack lie apart by a line of the processor's cache more than they are long: by a power of two, those of one
# column would take each other's place in it.
_LINE_BYTES = 64
# Of a tensor that boxes lie across, or more than so many of which lie in one another, so many bytes are gathered at
# once: for few of them, very short runs would be read.
_MANY = 4
_PANEL_BYTES = 16 << 20
# What was gathered or converted so, and what was found out for it, is kept up to so many bytes.
_PANELS_BYTES = 32 << 20
_FINDINGS_BYTES = 32 << 20


class ReadsPaths(Protocol):
    """Fills the whole of `buffer` with the bytes of file `path` from `offset` on."""

    def read_path_into(self, path: str, offset: int, buffer: Any) -> None: ...


class Held(NamedTuple):
    """A box, whose local tensor begins at byte `begin` of its file."""

    placed: Placed
    begin: int

    @property
    def box(self) -> Box:
        return self.placed.box


class Boxes:
    """Boxes of one canonical tensor, of which those that have elements of a range are found without a look at each."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = tuple(held)
        self._starts = np.array([each.box.canonical for each in held], np.int64)
        self._ends = np.array([each.box.canonical_end for each in held], np.int64)
        self.lie_across = any(_lies_across(each.box) for each in held)
        """Whether one of them lies across the canonical tensor."""

    @property
    def all(self) -> tuple[Held, ...]:
        return self._held

    def within(self, first: int, end: int) -> Iterator[Held]:
        """Those that may have an element from number `first` to `end`."""
        for number in np.flatnonzero((self._starts < end) & (first < self._ends)).tolist():
            yield self._held[number]

    @property
    def are_many(self) -> bool:
        """Whether many of them reach beyond one and the same element, as those of ranks that have some columns each."""
        if len(self._held) <= _MANY:
            return False
        ended = np.searchsorted(np.sort(self._ends), np.sort(self._starts), side="right")
        return int((np.arange(1, len(ended) + 1) - ended).max()) > _MANY


def _lies_across(box: Box) -> bool:
    """Whether neighbours of the canonical tensor are far apart in the local one, as in a transposed one."""
    return bool(box.axes) and box.axes[-1].local > _SPARSE


class _Scratch(threading.local):
    """A buffer for each thread, used again and again."""

    def __init__(self) -> None:
        self.buffer = np.empty(0, np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        if len(self.buffer) < size:
            self.buffer = np.empty(size, np.uint8)
        return self.buffer[:size]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a canonical tensor is read from: the boxes that own its elements, and those that hold some of them again.

    `form` is that of the elements as they are stored.
    """

    name: str
    form: Form
    owners: Boxes
    replicas: Boxes

    @property
    def key(self) -> Hashable:
        """What tells it from others of which panels are kept."""
        return self.name

    def coordinate(self, element: int) -> str:
        """Where one of its elements is, for people."""
        return coordinate(element, self.form)

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        """Fill `out` with the tensor's elements from number `first` on."""
        height = _PANEL_BYTES // out.itemsize
        if len(out) == self.form.elements or not (self.owners.lie_across or self.owners.are_many):
            gatherer.read(self, first, out)
            return
        for number in range(first // height, -(-(first + len(out)) // height)):
            begin = number * height
            panel = gatherer.panels.shared(("stored", self.key, number), partial(self._panel, gatherer, begin, height))
            low, high = max(begin, first), min(begin + len(panel), first + len(out))
            out[low - first : high - first] = panel[low - begin : high - begin]

    def _panel(self, gatherer: Gatherer, begin: int, height: int) -> Making:
        count = min(height, self.form.elements - begin)
        panel: Elements = gatherer.buffers.take(count, f"<u{DTYPES[self.form.dtype].width}")
        return Making(panel, gatherer.steps(self, begin, panel), partial(gatherer.compare, self, begin, panel))


class Source(Protocol):
    """Where a canonical tensor comes from."""

    def read(self, gatherer: Gatherer, first: int, out: Elements) -> None:
        """Fill `out`, unsigned integers as wide as the tensor's elements, with those from number `first` on."""


class Gatherer:
    """Reads ranges of canonical tensors from the files of their local ones. Its methods may be called from several
    threads.

    `panels` keep canonical elements that were gathered or converted more of at once than was asked for, in `buffers`;
    `findings` what is small and took much reading.
    """

    def __init__(self, files: ReadsPaths) -> None:
        self._files = files
        self._scratch = _Scratch()
        self._replica = _Scratch()
        self._stored = _Scratch()
        self.buffers = Buffers(_PANEL_BYTES)
        self.panels = Kept(_PANELS_BYTES)
        self.findings = Kept(_FINDINGS_BYTES)

    def read(self, sources: Sources, first: int, out: Elements) -> None:
        """Fill `out`, unsigned integers as wide as the tensor's elements, with its elements from number `first` on.

        DamagedError, naming the first element that differs, where replicas do not agree.
        """
        for step in self.steps(sources, first, out):
            step()
        self.compare(sources, first, out)

    def steps(self, sources: Sources, first: int, out: Elements) -> Iterator[Step]:
        """What fills `out` from the owners of its elements: in any order, and in several threads."""
        for held in sources.owners.within(first, first + len(out)):
            yield from self._copies(held, first, out)

    def compare(self, sources: Sources, first: int, out: Elements) -> None:
        """Compare what replicas hold of `out` with it."""
        for held in sources.replicas.within(first, first + len(out)):
            self._compare(sources, held, first, out)

    def read_stored(self, sources: Sources, first: int, count: int) -> Elements:
        """The tensor's elements from number `first` on, until this thread asks for the next ones."""
        width = DTYPES[sources.form.dtype].width
        out: Elements = self._stored.of(count * width).view(f"<u{width}")
        sources.read(self, first, out)
        return out

    def _copies(self, held: Held, first: int, out: Elements) -> Iterator[Step]:
        box = held.box
        start, stop = box.rank(first), box.rank(first + len(out))
        if len(box.axes) <= 1 and all(axis[1:] == (1, 1) for axis in box.axes):
            # One run on both sides needs no copy.
            at = box.canonical + start - first
            yield partial(self._read, held, box.local + start, out[at : at + stop - start])
            return
        parts = list(box.rectangles(start, stop))
        if not parts:
            return
        begin = min(part.local for part in parts)
        end = max(part.local + box.span(part) for part in parts)
        if not _lies_across(box) and self._is_dense(end - begin, stop - start, out.itemsize):
            yield partial(self._copy_parts, held, (begin, end), parts, first, out)
        else:
            for part in parts:
                yield from self._copies_of_part(held, part, first, out)

    def _copies_of_part(self, held: Held, part: Rectangle, first: int, out: Elements) -> Iterator[Step]:
        box = held.box
        if part.elements == 1 or (
            not _lies_across(box) and self._is_dense(box.span(part), part.elements, out.itemsize)
        ):
            yield partial(self._copy_span, held, part, first, out)
            return
        slab = next(box.slabs(part))
        span = box.span(slab)
        if not self._is_dense(span, slab.elements, out.itemsize):
            for slab in box.slabs(part):
                yield from self._copies_of_part(held, slab, first, out)
            return
        # Several slabs are put where they belong at once: one alone may have a single element in each row of the other
        # tensor, and each would cost as much as a whole line of the processor's cache.
        for several in box.slabs(part, max(1, _STACK_BYTES // (span * out.itemsize))):
            # One read is better than many, even if what lies in between comes too.
            is_one = several.elements == slab.elements or box.span(several) <= _SPARSE * several.elements
            yield partial(self._copy_span if is_one else self._copy_stack, held, several, first, out)

    def _copy_parts(
        self, held: Held, span: tuple[int, int], parts: Sequence[Rectangle], first: int, out: Elements
    ) -> None:
        """Read all from the first to the last element of some parts at once."""
        local = self._read_scratch(held, *span, out.dtype)
        for part in parts:
            held.box.copy(part, local, span[0], out, first)

    def _copy_span(self, held: Held, part: Rectangle, first: int, out: Elements) -> None:
        """Read all from a part's first to its last element at once."""
        self._copy_parts(held, (part.local, part.local + held.box.span(part)), [part], first, out)

    def _copy_stack(self, held: Held, part: Rectangle, first: int, out: Elements) -> None:
        """Read the slabs of a part into rows of a stack, and put them where they belong from there."""
        box = held.box
        slabs, step = box.slabs_of(part)
        span = box.span(part) - (slabs - 1) * step
        apart = span + _LINE_BYTES // out.itemsize
        stack: Elements = self._scratch.of(slabs * apart * out.itemsize).view(out.dtype).reshape(slabs, apart)
        for number, row in enumerate(stack):
            self._read(held, part.local + number * step, row[:span])
        box.copy_stacked(part, stack.reshape(-1), apart, out, first)

    def _compare(self, sources: Sources, held: Held, first: int, out: Elements) -> None:
        """Compare what a replica holds of `out` with it."""
        found = self._replica.of(out.nbytes).view(out.dtype)
        found[:] = out
        for step in self._copies(held, first, found):
            step()
        if np.array_equal(found, out):
            return
        at = int(np.argmax(found != out))
        element = np.array([first + at])
        owner = next(
            each for each in sources.owners.within(first + at, first + at + 1) if each.box.find(element)[0].size
        )
        width = 2 * out.itemsize
        facts = (
            f"element {sources.coordinate(first + at)} is 0x{int(out[at]):0{width}x} in "
            f"{local_name(owner.placed)}, but 0x{int(found[at]):0{width}x} in {local_name(held.placed)}"
        )
        raise DamagedError(f"tensor {shown(sources.name)}", facts, hint="replicas of one tensor have the same bits")

    def _is_dense(self, span: int, wanted: int, width: int) -> bool:
        size = span * width
        return size <= _SCRATCH_BYTES and (span <= _SPARSE * wanted or size <= _NEAR_BYTES)

    def _read_scratch(self, held: Held, begin: int, end: int, dtype: np.dtype[Any]) -> Elements:
        local: Elements = self._scratch.of((end - begin) * dtype.itemsize).view(dtype)
        self._read(held, begin, local)
        return local

    def _read(self, held: Held, begin: int, out: Elements) -> None:
        if len(out):
            self._files.read_path_into(held.placed.path, held.begin + begin * out.itemsize, out.view(np.uint8))
