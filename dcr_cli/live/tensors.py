"""Tensors of torch that a loader is given, made of bits. Where the bits come from is the callers' matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.layout import Form
from dcr_cli.layout.loader import DTYPE_NAMES

_TORCH_NAMES = {name: native for native, name in DTYPE_NAMES.items()}


def tensor_of(name: str, form: Form, elements: NDArray[Any]) -> Any:
    """The tensor of a form whose elements are these unsigned integers, whose memory it shares."""
    dtype = getattr(torch, _TORCH_NAMES.get(form.dtype, ""), None)
    if dtype is None:
        raise UnsupportedError(f"tensor {shown(name)}", f"torch has no {form.dtype}")
    shape = form.shape
    if DTYPES[form.dtype].is_packed:
        # Torch counts pairs.
        shape = (*shape[:-1], shape[-1] // 2)
    if not len(elements):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(elements.view(np.uint8)).view(dtype).reshape(shape)
