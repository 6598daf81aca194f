"""What a module's parts reach beside their parameters and buffers: tensors, arrays and numbers in plain attributes, in
lists, dicts, sets and objects, in partial functions, bound methods, and in what functions have closed over.

Not looked into are classes, modules of Python, objects of the standard library and of torch, and what is called as the
caches are that engines fill from requests. Nothing is called and nothing changed on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from dcr_cli.errors import UnsupportedError

# What engines compute from requests, and not from weights.
_CACHES = frozenset({"kv_cache", "_kv_cache"})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
NUMBERS = (int, float, complex, np.generic)
_PLAIN = (str, bytes, type, ModuleType, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
# More than any module is known to reach.
_MOST = 1 << 22

# What classes have that is in no dict of an object, by class.
Slots = dict[type, list[tuple[str, MemberDescriptorType]]]
Container = dict[Any, Any] | list[Any] | set[Any] | CellType


class Reached(NamedTuple):
    """What a module reaches: where, and either a tensor, an array, a number, or what can have them."""

    where: str
    what: Any


def reach(module: Any) -> Iterator[Reached]:
    """All tensors, arrays, numbers and containers that a module reaches, once each, its registries and parts among
    them. UnsupportedError if it reaches more than anybody should look through."""
    seen: set[int] = set()
    # What is made on the way is kept, so that nothing else gets its place in memory meanwhile.
    kept: list[Any] = []
    slots: Slots = {}
    left: list[Reached] = [Reached("", module)]
    while left:
        each = left.pop()
        if isinstance(each.what, NUMBERS):
            yield each
            continue
        if isinstance(each.what, _PLAIN) or id(each.what) in seen:
            continue
        seen.add(id(each.what))
        kept.append(each.what)
        if len(seen) > _MOST:
            what = f"module {type(module).__name__}"
            raise UnsupportedError(what, f"reaches more than {_MOST} objects", hint="give a twin that has its tensors")
        if isinstance(each.what, torch.Tensor | np.ndarray | dict | list | set | CellType):
            yield each
        left.extend(reversed(list(_parts(each, slots))))


def _parts(each: Reached, slots: Slots) -> Iterator[Reached]:
    """What something reaches by one step."""
    where, what = each
    if isinstance(what, dict):
        yield from _entries(where, what)
    elif isinstance(what, list | tuple | set | frozenset):
        for number, value in enumerate(tuple(what)):
            yield Reached(f"{where}[{number}]", value)
    elif isinstance(what, partial):
        yield Reached(f"{where}.func", what.func)
        yield Reached(f"{where}.args", what.args)
        yield Reached(f"{where}.keywords", what.keywords)
    elif isinstance(what, FunctionType):
        for name, cell in zip(what.__code__.co_freevars, what.__closure__ or (), strict=True):
            yield Reached(f"{where}.{name}", cell)
        yield Reached(f"{where}.defaults", (what.__defaults__, what.__kwdefaults__))
        yield Reached(where, vars(what))
    elif isinstance(what, CellType):
        # It may be empty.
        with suppress(ValueError):
            yield Reached(where, what.cell_contents)
    elif isinstance(what, MethodType):
        yield Reached(f"{where}.self", what.__self__)
        yield Reached(where, what.__func__)
    elif type(what).__module__ == "builtins":
        # A method of a tensor, say.
        yield Reached(f"{where}.self", getattr(what, "__self__", None))
    elif _is_looked_into(what):
        yield from _members(where, what, slots)


def _entries(where: str, entries: dict[Any, Any]) -> Iterator[Reached]:
    for key, value in tuple(dict.items(entries)):
        if key in _REGISTRIES:
            yield Reached(where, value)
        elif key not in _CACHES:
            yield Reached(f"{where}.{key}".removeprefix("."), value)


def _members(where: str, owner: Any, slots: Slots) -> Iterator[Reached]:
    with suppress(AttributeError):
        yield Reached(where, object.__getattribute__(owner, "__dict__"))
    kind = type(owner)
    if kind not in slots:
        pairs = ((name, slot) for each in kind.__mro__ for name, slot in vars(each).items())
        slots[kind] = [(name, slot) for name, slot in pairs if isinstance(slot, MemberDescriptorType)]
    for name, slot in slots[kind]:
        with suppress(AttributeError):
            yield Reached(f"{where}.{name}", slot.__get__(owner, kind))


def _is_looked_into(what: Any) -> bool:
    if isinstance(what, torch.nn.Module | torch.Tensor):
        return True
    return type(what).__module__.partition(".")[0] not in _LIBRARIES or type(what).__module__ == "types"
