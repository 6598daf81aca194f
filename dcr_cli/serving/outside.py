"""What a served module keeps outside its parameters and buffers, and may have made of them after they were loaded.

Whoever patches a module where it lies leaves this as it was: such a module is refused.
"""

from __future__ import annotations

from typing import Any

from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import UnsupportedError
from dcr_cli.live.outside import known_of, outside


def check_nothing_outside(module: Any) -> None:
    """Raise UnsupportedError if a module reaches floating tensors of more than one element whose bits are no
    parameter's: in attributes, containers, objects, or what functions have closed over."""
    known = known_of(tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
    tensors = outside(module, known)
    found = sorted({where for where, tensor in tensors if tensor.is_floating_point() and tensor.numel() > 1})
    if found:
        facts = f"keeps {listed(found)} outside its parameters, perhaps made of them when they were loaded"
        hint = "a patch would leave them as they were: use dcr pull --engine"
        raise UnsupportedError(f"module {type(module).__name__}", facts, hint=hint)
