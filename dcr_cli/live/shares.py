"""What a module holds of each tensor, as digests that add up: each rank's share, and what all of them are together.

A rank digests the canonical elements that it holds, where they lie in the canonical tensor; nobody else is asked. Who
collects the shares of all ranks compares what several of them hold, counts it once, and has the digests of whole
tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import dcr_kernels as kernels
from dcr_cli.checkpoint.digest import add, content_digest, digest_bytes, digest_from_bytes, no_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.box import Box, whole_box
from dcr_cli.layout.layout import Form
from dcr_cli.live.memory import Memory
from dcr_cli.live.overlapping import compare_overlaps, differing, within_others
from dcr_cli.live.pieces import Sums, boxes_of, cuts_of, no_sums, total_of
from dcr_cli.live.placement import Placement, disjoint_cover

# So many elements of a canonical tensor are digested at once.
_AT_ONCE = 1 << 20
_DIFFER = "two places that should hold the same bits differ"


class Part(NamedTuple):
    """Elements of a canonical tensor: those of a box, wherever they lie in a module."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True, repr=False)
class Shares:
    """Digests of what one rank holds: of the parts of canonical tensors, and of those that its loader was given whole
    because it makes something else of them: what it was given, with which all bits of them that the rank holds were
    compared. Each is those of the tensor's pieces (pieces.py), one after the other.
    """

    forms: Mapping[str, Form]
    parts: Mapping[Part, bytes]
    loaded: Mapping[str, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        held = {part.tensor for part in self.parts} | set(self.loaded)
        return f"<Shares of {len(held):,} of {len(self.forms):,} tensors>"

    def tensors(self) -> dict[str, bytes]:
        """The digests of those tensors of which this rank alone holds every element."""
        found = {name: _cover(self.forms[name], _totals(name, self.forms[name], data)) for name, data in _held([self])}
        return {name: cover.digest for name, cover in found.items() if cover is not None}

    @property
    def content(self) -> bytes | None:
        """The content digest of what this rank holds, if it alone holds every element of every tensor."""
        found = self.tensors()
        return _content(self.forms, found) if len(found) == len(self.forms) else None


def content_of(shares: Iterable[Shares]) -> bytes:
    """The content digest of what the ranks hold together, each of which has given its shares; it is to be compared with
    a version's.

    DamagedError where two of them hold different bits of one part, or where elements are held by nobody;
    UnsupportedError where parts overlap that cannot be compared: they begin or end within a piece, and nobody holds
    what is left beside them.
    """
    collected = list(shares)
    forms = collected[0].forms if collected else {}
    if any(each.forms != forms for each in collected):
        raise DamagedError("shares", "are of different tensors", hint="collect those of one version")
    found: dict[str, bytes] = {}
    for name, data in _held(collected):
        totals = _totals(name, forms[name], data)
        if (cover := _cover(forms[name], totals)) is not None:
            _check_others(name, forms[name], totals, cover)
            found[name] = cover.digest
    if lacking := sorted(set(forms) - set(found)):
        facts = f"no ranks hold all elements of tensors {listed(lacking)}, or parts of them overlap"
        raise DamagedError("shares", facts, hint="collect those of all ranks of one engine")
    return _content(forms, found)


def _content(forms: Mapping[str, Form], digests: Mapping[str, bytes]) -> bytes:
    return content_digest((name, *forms[name], digests[name]) for name in sorted(forms))


class _Cover(NamedTuple):
    """Boxes that have every element of a tensor once, and the digest of that."""

    boxes: Sequence[Box]
    digest: bytes


def _held(collected: Sequence[Shares]) -> Iterator[tuple[str, dict[Box, bytes]]]:
    """What is held of each tensor, by whomever: the digests of the pieces of each box."""
    forms = collected[0].forms if collected else {}
    found: dict[str, dict[Box, bytes]] = {name: {} for name in forms}
    for each in collected:
        held = dict(each.parts)
        held |= {Part(name, whole_box(forms[name].elements).footprint): data for name, data in each.loaded.items()}
        for part, data in held.items():
            if found[part.tensor].setdefault(part.box, data) != data:
                raise DamagedError(f"tensor {shown(part.tensor)}", _DIFFER)
    yield from found.items()


def _totals(name: str, form: Form, held: Mapping[Box, bytes]) -> dict[Box, bytes]:
    """The digests of boxes; where some share elements, of what they have of each piece."""
    totals = {box: digest_bytes(total_of(data)) for box, data in held.items()}
    elements = sum(box.elements for box in totals)
    if elements < form.elements or (elements == form.elements and disjoint_cover(list(totals), elements) is not None):
        return totals
    totals = {}
    for box, data in held.items():
        for piece, digest in boxes_of(form, box, data).items():
            if totals.setdefault(piece, digest) != digest:
                raise DamagedError(f"tensor {shown(name)}", _DIFFER)
    return totals


def _cover(form: Form, totals: Mapping[Box, bytes], first: Sequence[Box] = ()) -> _Cover | None:
    boxes = disjoint_cover(list(totals), form.elements, first)
    if boxes is None:
        return None
    total = no_digest()
    for box in boxes:
        total = add(total, digest_from_bytes(totals[box]))
    return _Cover(boxes, digest_bytes(total))


def _check_others(name: str, form: Form, totals: Mapping[Box, bytes], cover: _Cover) -> None:
    """Raise DamagedError unless what is held beside a cover is the same: with others it is as much."""
    left = set(totals) - set(cover.boxes)
    while left:
        other = _cover(form, totals, [min(left)])
        if other is None:
            facts = "parts of it overlap that begin or end within a piece, and cannot be compared"
            raise UnsupportedError(f"tensor {shown(name)}", facts, hint="compare these ranks with others like them")
        if other.digest != cover.digest:
            raise DamagedError(f"tensor {shown(name)}", _DIFFER)
        left -= set(other.boxes)


def digest_parts(memory: Memory, placement: Placement) -> dict[Part, bytes]:
    """Digest all that a module holds of canonical tensors. DamagedError where two places that hold the same elements
    have different bits; what other places hold, too, is left out."""
    found: dict[Part, bytes] = {}
    for name, places in placement.placed.items():
        parts: dict[Box, bytes] = {}
        for place in places:
            sums = _digest(memory, placement.forms[name], place.box, place.name).tobytes()
            if parts.setdefault(place.box.footprint, sums) != sums:
                raise differing(memory, name)
        found |= {Part(name, box): sums for box, sums in parts.items()}
    for name, uncut in placement.layout.placed().items():
        if compare_overlaps(memory, name, uncut):
            boxes = {place.box.footprint for place in placement.placed[name]}
            for box in within_others(boxes, name):
                del found[Part(name, box)]
    return found


def _digest(memory: Memory, form: Form, box: Box, stretch: str) -> Sums:
    """What the elements of a box add to the digest of each piece of their tensor: all others count as zeros."""
    width = DTYPES[form.dtype].width
    bits, sums, cuts = memory.stretches[stretch].bits, no_sums(form), cuts_of(form)
    for first in range(box.canonical, box.canonical_end, _AT_ONCE):
        count = min(_AT_ONCE, box.canonical_end - first)
        parts = list(box.rectangles(box.rank(first), box.rank(first + count)))
        if not parts:
            continue
        # Small tensors are read at once, however many pieces they have.
        elements = np.zeros(count, uint_dtype(width))
        for part in parts:
            box.canonical_view(elements, first, part)[...] = bits.view(box, part)
        for number in range(bisect_right(cuts, first) - 1, bisect_left(cuts, first + count)):
            begin, end = max(cuts[number], first), min(cuts[number + 1], first + count)
            sums[number] += kernels.digest(elements[begin - first : end - first], begin * width)
    return sums
