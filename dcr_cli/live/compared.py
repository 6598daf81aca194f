"""A module beside its placement, a delta's tensors, and the checkpoint that it was loaded from: whether it holds these
bits where they are said to lie, and what it holds something else of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, Tensor
from dcr_cli.checkpoint.digest import add, content_digest, digest_bytes, no_digest, tensor_digest
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.errors import DamagedError, HookError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.layout.layout import Form, Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.layout.opening import forms_of
from dcr_cli.live.holdings import Holdings
from dcr_cli.live.making import digest_made, send
from dcr_cli.live.memory import Memory, memory_of
from dcr_cli.live.placement import Placement
from dcr_cli.live.probing import Load

_AT_ONCE = 1 << 20
# Of many tensors that differ, so many names say enough.
_FEW = 3
_NOT_MADE = "the module is as it was; its loader has to take these tensors alone"
_SAME = "give the folder that the module was loaded from, as it was then"

Elements = NDArray[Any]


def check_fits(placement: Placement, memory: Memory) -> None:
    """Raise UsageError unless a placement is one of a module with these tensors, which lie as this one's do; and
    DamagedError if some of their elements are both placed and made."""
    names = {*_differing(placement.stretches, memory.forms), *_differing(placement.views, memory.views)}
    if names:
        facts = f"is of a module with other tensors than {memory.what} has, or that lie otherwise: "
        facts += listed(sorted(names), _FEW)
        raise UsageError("layout", facts, hint="each rank, of each model and engine, has one of its own")
    for name, product in placement.made.items():
        is_placed = np.zeros(memory.forms[name].elements, np.bool_)
        for each in placement.layout.shards[ONLY_FILE][name].placements:
            each.box.local_view(is_placed, 0, each.box.whole)[...] = True
        if any((is_placed[first : first + len(flags)] & flags).any() for first, flags in product.marks.parts()):
            facts = f"elements of {shown(name)} are both placed and made of something"
            raise DamagedError("layout", facts, hint="learn it anew")


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    """The names of which two say different things, or only one says something."""
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def check_forms(what: str, placement: Placement, forms: Mapping[str, Form]) -> None:
    """Raise UnsupportedError unless these are the tensors that a module was learnt with."""
    if forms != placement.forms:
        known = placement.forms
        names = listed(sorted(_differing(forms, known)), _FEW)
        facts = f"has other tensors than the module was learnt with: {names}"
        raise UnsupportedError(what, facts, hint="load the module anew, at this version")


def check_loaded(checkpoint: Checkpoint, holdings: Holdings) -> bytes:
    """Raise WrongBaseError unless a module holds the bits of a checkpoint, wherever it is said to hold any: the content
    digest of that."""
    forms = forms_of(checkpoint)
    known = holdings.placement.forms
    if forms != known:
        names = listed(sorted(_differing(forms, known)), _FEW)
        raise WrongBaseError(str(checkpoint.root), f"has other tensors than the delta: {names}", hint=_SAME)
    digests = {}
    with checkpoint.reader() as reader:
        for tensor in checkpoint.tensors:
            total = no_digest()
            for first in range(0, tensor.elements, _AT_ONCE):
                elements = _read(reader, tensor, first, min(_AT_ONCE, tensor.elements - first))
                total = add(total, tensor_digest(elements, first * tensor.dtype.width))
                for place in holdings.placement.placed[tensor.name]:
                    if not _is_held(holdings, place, elements, first):
                        form = Form(tensor.dtype.name, tensor.shape)
                        facts = f"{holdings.memory.what} holds other bits of tensor {shown(tensor.name)} ({form}) in "
                        raise WrongBaseError(holdings.placement.layout.what, f"{facts}{shown(place.name)}", hint=_SAME)
            digests[tensor.name] = digest_bytes(total)
        reader.check_unchanged()
    return content_digest((name, *known[name], digest) for name, digest in sorted(digests.items()))


def read_kept(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, Elements]:
    """Read whole tensors."""
    with checkpoint.reader() as reader:
        tensors = [checkpoint.by_name[name] for name in names]
        return {tensor.name: _read(reader, tensor, 0, tensor.elements) for tensor in tensors}


def _read(reader: Reader, tensor: Tensor, first: int, count: int) -> Elements:
    width = tensor.dtype.width
    elements = np.empty(count, uint_dtype(width))
    reader.read_into(tensor, first * width, elements.view(np.uint8))
    return elements


def check_made(twin: tuple[Any, Load], holdings: Holdings, made: Mapping[str, bytes]) -> None:
    """Raise WrongBaseError unless what a loader makes of tensors that are kept is what a module has, with these
    digests: what `twin` has, that module or another one, when they were loaded. It is put back then; UnsupportedError
    if its loader does not take them."""
    module, load = twin
    there = memory_of(module)
    check_fits(holdings.placement, there)
    with there.put_back():
        for name in holdings.placement.made:
            # What the loader writes nowhere, such as padding, is then the same in both.
            _copy(holdings.memory, there, name)
        try:
            send(module, load, Holdings(there, holdings.placement), holdings.kept)
        except HookError as error:
            raise UnsupportedError(error.what, error.facts, hint=_NOT_MADE) from error
        found = digest_made(Holdings(there, holdings.placement), holdings.placement.made)
    if names := sorted(_differing(found, made)):
        facts = f"has other bits in {listed(names)} than its loader makes of the checkpoint"
        raise WrongBaseError(holdings.memory.what, facts, hint=_SAME)


def _copy(memory: Memory, there: Memory, name: str) -> None:
    one, other = memory.stretches[name], there.stretches[name].bits
    for first in range(0, one.form.elements, _AT_ONCE):
        other.write(first, one.bits.read(first, min(_AT_ONCE, one.form.elements - first)))


def differs_from_kept(holdings: Holdings, names: Iterable[str]) -> str | None:
    """The name of one of these tensors, which are kept, of which the module holds other bits; None if there is none."""
    for name in names:
        elements = holdings.kept[name]
        for first in range(0, len(elements), _AT_ONCE):
            part = elements[first : first + _AT_ONCE]
            if not all(_is_held(holdings, place, part, first) for place in holdings.placement.placed[name]):
                return name
    return None


def _is_held(holdings: Holdings, place: Placed, elements: Elements, first: int) -> bool:
    """Whether a place holds these elements of its tensor, from number `first` on, as far as it holds them."""
    box = place.box
    bits = holdings.memory.stretches[place.name].bits
    return all(
        np.array_equal(bits.view(box, part), box.canonical_view(elements, first, part))
        for part in box.rectangles(box.rank(first), box.rank(first + len(elements)))
    )
