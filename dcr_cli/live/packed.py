"""Seeing that something outside the parameters and buffers of a module was made of them, as engines pack weights once
they are loaded: no load changes it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.addresses import mixed
from dcr_cli.live.bits import Elements
from dcr_cli.live.outside import known_of, outside, span_of

# Fewer elements, or fewer different ones among the first of them, may be the same in two tensors for no reason.
_FEW_ELEMENTS, _FEW_VALUES, _FIRST = 64, 16, 4096
# What is packed may be padded up to so many times its size.
_MOST_PADDED = 2


def check_nothing_packed(module: Any, tensors: Sequence[tuple[str, Any]]) -> None:
    """Raise UnsupportedError if a module reaches, outside its parameters and buffers, which are `tensors`, one that has
    the elements of one of these, in another order or padded with zeros: as engines pack weights once they are loaded.
    """
    sums: dict[str, int] = {}
    for where, tensor in outside(module, known_of(tensor for _, tensor in tensors)):
        own: dict[int, int] = {}
        for name, other in tensors:
            width = other.element_size()
            if not _is_as_large(tensor, other) or not _has_many(other):
                continue
            if width not in own:
                own[width] = _sum_of(tensor, width)
            if name not in sums:
                sums[name] = _sum_of(other, width)
            if own[width] == sums[name]:
                facts = f"keeps {shown(where)} outside its parameters, which has the elements of tensor {shown(name)}"
                hint = "a patch would leave it as it was: use dcr pull --engine"
                raise UnsupportedError(f"module {type(module).__name__}", facts, hint=hint)


def _is_as_large(tensor: Any, other: Any) -> bool:
    """Whether a tensor could have all elements of another one, packed."""
    size, wanted = (each.numel() * each.element_size() for each in (tensor, other))
    is_size = wanted <= size <= _MOST_PADDED * wanted and size % other.element_size() == 0
    return is_size and other.numel() >= _FEW_ELEMENTS and span_of(other) is not None


def _has_many(tensor: Any) -> bool:
    """Whether a tensor has enough different elements to be told from others by them."""
    return len(np.unique(_elements(tensor.reshape(-1)[:_FIRST], tensor.element_size()))) > _FEW_VALUES


def _sum_of(tensor: Any, width: int) -> int:
    """What tells all elements of a tensor that are not zero, in whatever order they are."""
    elements = _elements(tensor, width).astype(np.uint64)
    return int(mixed(elements[elements != 0]).sum(dtype=np.uint64))


def _elements(tensor: Any, width: int) -> Elements:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    elements: Elements = data.view(uint_dtype(width))
    return elements
