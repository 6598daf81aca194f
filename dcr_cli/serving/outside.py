"""What a served module keeps outside its parameters and buffers, and may have made of them after they were loaded.

Whoever patches a module where it lies leaves this as it was: such a module is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import UnsupportedError

# What engines compute from requests, and not from weights.
_CACHES = frozenset({"kv_cache", "_kv_cache"})


def check_nothing_outside(module: Any) -> None:
    """Raise UnsupportedError if a module has floating tensors as plain attributes whose bits are no parameter's."""
    known = {
        tensor.untyped_storage().data_ptr()
        for tensors in (module.parameters(), module.buffers())
        for tensor in tensors
        if not tensor.is_meta
    }
    found = sorted({name for name, tensor in _attributes(module) if tensor.untyped_storage().data_ptr() not in known})
    if found:
        facts = f"keeps {listed(found)} outside its parameters, perhaps made of them when they were loaded"
        hint = "a patch would leave them as they were: use dcr pull --engine"
        raise UnsupportedError(f"module {type(module).__name__}", facts, hint=hint)


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:
    """Floating tensors of more than one element among the plain attributes of a module's parts, by their names."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_meta
            if is_tensor and value.numel() > 1 and name not in _CACHES:
                yield f"{prefix}.{name}".removeprefix("."), value
