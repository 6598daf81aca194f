"""What a loader makes of tensors, in a module's memory: has it make that, sees that it has, and digests it.

Nobody but the loader knows what is to come of it. So before it is sent tensors, every element that it is to make has
the complement of what it had, and one that has it still was not written. Which tensors are sent is receiver.py's
matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import add, digest_bytes, no_digest, tensor_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import HookError, UsageError
from dcr_cli.layout.layout import Form
from dcr_cli.live.holdings import Elements, Holdings
from dcr_cli.live.marks import Marks
from dcr_cli.live.memory import Memory, memory_of
from dcr_cli.live.probing import Load, Weights
from dcr_cli.live.tensors import tensor_of

AGAIN = "call apply again: what it writes are absolute bits, and once they are all there it is done"
# What a loader has written may be what was there as a sign that it has not, but not twice.
_TRIES = 2


def loader_of(module: Any, given: Load | None = None, what: tuple[str, str] = ("module", "load_weights")) -> Load:
    """The loader that is given for a module, else its own: its method, else its `load_state_dict`, given all tensors at
    once. UsageError, which names what is wrong, if that is no module, or no function."""
    if not isinstance(module, torch.nn.Module):
        facts = f"is of type {type(module).__name__}, a torch.nn.Module expected"
        raise UsageError(what[0], facts, hint="give the model itself")
    if given is not None:
        if not callable(given):
            facts = f"is of type {type(given).__name__}, a function expected that loads (name, tensor)"
            hint = "leave it out for the module's own; the folder of its checkpoint is checkpoint=FOLDER"
            raise UsageError(what[1], facts, hint=hint)
        return given
    if hasattr(module, "load_weights"):
        return cast(Load, module.load_weights)

    def load_all(weights: Weights) -> None:
        module.load_state_dict(dict(weights), strict=False)

    return load_all


def send(module: Any, load: Load, holdings: Holdings, weights: Mapping[str, Elements]) -> None:
    """Have `load` load whole tensors, of all groups that any of them is in, into a module.

    HookError if it fails, gives a tensor of the module another place, or leaves what it makes of them unwritten. Its
    tensors are read once or twice; it takes a copy of what is made of them in the host's memory.
    """
    made = holdings.placement.made_of(weights)
    where = memory_of(module)
    for _ in range(_TRIES):
        signs = {name: _poison(holdings.memory, name, marks) for name, marks in made.items()}
        _load(load, holdings, weights)
        if (name := where.moved()) is not None:
            facts = f"its loader has given tensor {shown(name)} another place in memory"
            raise HookError(holdings.memory.what, facts, hint="load the module anew, and make a new receiver")
        unwritten = [name for name, marks in made.items() if _is_left(holdings.memory, name, marks, signs[name])]
        if not unwritten:
            return
    facts = f"its loader has left what it makes of tensors in {shown(unwritten[0])} as it was"
    raise HookError(holdings.memory.what, facts, hint=AGAIN)


def _load(load: Load, holdings: Holdings, weights: Mapping[str, Elements]) -> None:
    forms = holdings.placement.forms
    # A loader may keep what it was given, or change it.
    tensors = ((name, tensor_of(name, forms[name], elements.copy())) for name, elements in weights.items())
    try:
        with torch.no_grad():
            load(tensors)
    except Exception as error:
        facts = f"its loader failed: {type(error).__name__}: {error}"
        raise HookError(holdings.memory.what, facts, hint=AGAIN) from error


def _poison(memory: Memory, name: str, marks: Marks) -> list[Elements]:
    """Give marked elements the complement of what they have: what they have now, part by part."""
    stretch, signs = memory.stretches[name], []
    for first, flags in marks.parts():
        elements = stretch.bits.read(first, len(flags))
        elements[flags] ^= _all_bits(stretch.form)
        stretch.bits.write(first, elements)
        signs.append(elements[flags])
    return signs


def _is_left(memory: Memory, name: str, marks: Marks, signs: list[Elements]) -> bool:
    """Whether marked elements have what they were given."""
    bits = memory.stretches[name].bits
    parts = zip(marks.parts(), signs, strict=True)
    return any((bits.read(first, len(flags))[flags] == sign).any() for (first, flags), sign in parts)


def _all_bits(form: Form) -> Any:
    """The bits that an element of a dtype can have."""
    dtype = DTYPES[form.dtype]
    return np.array(1 if dtype.name == "BOOL" else (1 << 8 * dtype.width) - 1, f"<u{dtype.width}")


def digest_made(holdings: Holdings, stretches: Iterable[str]) -> dict[str, bytes]:
    """Digest what counts as made in stretches (`Placement.compared`): all else counts as zeros."""
    return {name: _digest(holdings, name) for name in stretches}


def _digest(holdings: Holdings, name: str) -> bytes:
    bits, total = holdings.memory.stretches[name].bits, no_digest()
    for first, flags in holdings.placement.compared(name):
        elements: NDArray[Any] = bits.read(first, len(flags))
        elements[~flags] = 0
        total = add(total, tensor_digest(elements, first * elements.itemsize))
    return digest_bytes(total)
