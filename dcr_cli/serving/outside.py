"""What a served module keeps outside its parameters and buffers, and may have made of them after they were loaded.

Whoever patches a module where it lies leaves this as it was: such a module is refused.
"""

from __future__ import annotations

from typing import Any

from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import UnsupportedError
from dcr_cli.live.outside import known_of, outside

# What engines call a number that stands for weights which native code has packed, as vLLM does on processors.
_HANDLES = frozenset({"handler_tensor"})


def check_nothing_outside(module: Any) -> None:
    """Raise UnsupportedError if a module reaches floating tensors of more than one element whose bits are no
    parameter's, or a handle of what native code has packed: in attributes, containers, objects, or what functions have
    closed over."""
    known = known_of(tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
    found = sorted({where for where, tensor in outside(module, known) if _is_of_weights(where, tensor)})
    if found:
        facts = f"keeps {listed(found)} outside its parameters, perhaps made of them when they were loaded"
        hint = "a patch would leave them as they were: use dcr pull --engine"
        raise UnsupportedError(f"module {type(module).__name__}", facts, hint=hint)


def _is_of_weights(where: str, tensor: Any) -> bool:
    is_floating = tensor.is_floating_point() and tensor.numel() > 1
    return is_floating or where.rpartition(".")[2] in _HANDLES
