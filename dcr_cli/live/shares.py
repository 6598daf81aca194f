"""What a module holds of each tensor, as digests that add up: each rank's share, and what all of them are together.

A rank digests the canonical elements that it holds, where they lie in the canonical tensor; nobody else is asked. Who
collects the shares of all ranks counts what several of them hold once, and has the digests of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.checkpoint.digest import add, content_digest, digest_bytes, digest_from_bytes, no_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Box
from dcr_cli.layout.layout import Form
from dcr_cli.live.memory import Memory
from dcr_cli.live.placement import Placement, disjoint_cover

# So many elements of a canonical tensor are digested at once.
_AT_ONCE = 1 << 20

Sum = NDArray[np.uint32]


class Part(NamedTuple):
    """Elements of a canonical tensor: those of a box, wherever they lie in a module."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Shares:
    """Digests of what one rank holds: of the parts of canonical tensors, and of those that its loader was given whole
    because it makes something else of them: what it was given, not what it made of it.
    """

    forms: Mapping[str, Form]
    parts: Mapping[Part, bytes]
    loaded: Mapping[str, bytes] = field(default_factory=dict)

    def tensors(self) -> dict[str, bytes]:
        """The digests of those tensors of which this rank alone holds every element."""
        return _whole([self], self.forms)


def content_of(shares: Iterable[Shares]) -> bytes:
    """The content digest of what the ranks hold together, each of which has given its shares; it is to be compared with
    a version's.

    DamagedError where two of them hold different bits of one part, or where elements are held by nobody.
    """
    collected = list(shares)
    forms = collected[0].forms if collected else {}
    if any(each.forms != forms for each in collected):
        raise DamagedError("shares", "are of different tensors", hint="collect those of one version")
    found = _whole(collected, forms)
    if lacking := sorted(set(forms) - set(found)):
        facts = f"no ranks hold all elements of tensors {listed(lacking)}, or parts of them overlap"
        raise DamagedError("shares", facts, hint="collect those of all ranks of one engine")
    return content_digest((name, *forms[name], found[name]) for name in sorted(forms))


def _whole(collected: Sequence[Shares], forms: Mapping[str, Form]) -> dict[str, bytes]:
    parts: dict[str, dict[Box, bytes]] = {name: {} for name in forms}
    found: dict[str, bytes] = {}
    for each in collected:
        for part, digest in each.parts.items():
            if parts[part.tensor].setdefault(part.box, digest) != digest:
                raise DamagedError(f"tensor {shown(part.tensor)}", "two places that should hold the same bits differ")
        for name, digest in each.loaded.items():
            if found.setdefault(name, digest) != digest:
                raise DamagedError(f"tensor {shown(name)}", "two ranks were given different bits of it")
    for name, form in forms.items():
        cover = disjoint_cover(list(parts[name]), form.elements) if name not in found else None
        if cover is not None:
            total = no_digest()
            for box in cover:
                total = add(total, digest_from_bytes(parts[name][box]))
            found[name] = digest_bytes(total)
    return found


def digest_parts(memory: Memory, placement: Placement) -> dict[Part, bytes]:
    """Digest all that a module holds of canonical tensors. DamagedError where two places that hold the same elements
    have different bits."""
    found: dict[Part, bytes] = {}
    for name, places in placement.placed.items():
        for place in places:
            part = Part(name, place.box.footprint)
            digest = digest_bytes(_digest(memory, placement.forms[name], place.box, place.name))
            if found.setdefault(part, digest) != digest:
                facts = f"two places of {memory.what} that should hold the same bits differ"
                raise DamagedError(f"tensor {shown(name)}", facts, hint="load the module anew")
    return found


def _digest(memory: Memory, form: Form, box: Box, stretch: str) -> Sum:
    """What the elements of a box add to the digest of their canonical tensor: all others count as zeros."""
    width = DTYPES[form.dtype].width
    bits, total = memory.stretches[stretch].bits, no_digest()
    for first in range(box.canonical, box.canonical_end, _AT_ONCE):
        count = min(_AT_ONCE, box.canonical_end - first)
        parts = list(box.rectangles(box.rank(first), box.rank(first + count)))
        if not parts:
            continue
        elements = np.zeros(count, uint_dtype(width))
        for part in parts:
            box.canonical_view(elements, first, part)[...] = bits.view(box, part)
        total = add(total, kernels.digest(elements, first * width))
    return total
