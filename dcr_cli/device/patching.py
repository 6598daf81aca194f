"""Writes changes to a tensor where it lies, in the host's memory or on a CUDA device.

Where they come from, and whether they are right, is the caller's matter. torch is imported by whoever has a tensor.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.errors import UnsupportedError, install_hint

if TYPE_CHECKING:
    import torch

_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def patch_tensor(tensor: torch.Tensor, positions: NDArray[Any], values: NDArray[Any]) -> None:
    """Write `values`, the new bits of elements as unsigned integers of their width, to `tensor` at the flat
    `positions`, uint32 or int64, which are distinct.

    The tensor lies in one piece. On a device it is patched in the caller's stream, after what was begun there before,
    and is so once what comes after in that stream sees it; nothing but the changes goes there: 4 or 8 bytes of a
    position and the value. ValueError, and nothing was written, if they are no changes of it; UnsupportedError if it
    lies on a device and Triton is not installed.
    """
    bits = _bits_of(tensor, values)
    if positions.dtype not in (np.uint32, np.int64) or positions.shape != values.shape:
        raise ValueError(f"no positions of {len(values)} values: {positions.dtype} of shape {positions.shape}")
    if tensor.device.type == "cuda":
        patch_there(bits, positions, values)
        return
    outside = (positions < 0) | (positions >= tensor.numel())
    if outside.any():
        at = int(np.argmax(outside))
        raise ValueError(f"position outside of {tensor.numel()} elements: at element {at}")
    bits.numpy()[positions] = values


def patch_there(bits: torch.Tensor, positions: NDArray[Any], values: NDArray[Any]) -> None:
    """Patch bits that lie on a device, as `patch_tensor` does."""
    if find_spec("triton") is None:
        raise UnsupportedError(str(bits.device), "Triton is not installed", hint=install_hint("gpu"))
    import torch

    from dcr_kernels.gpu import patch

    patch(bits, *(torch.from_numpy(np.ascontiguousarray(each)).to(bits.device) for each in (positions, values)))


def _bits_of(tensor: torch.Tensor, values: NDArray[Any]) -> torch.Tensor:
    import torch

    if not tensor.is_contiguous():
        raise ValueError(f"a tensor that does not lie in one piece: strides {tensor.stride()}")
    name = _BITS[tensor.element_size()]
    if values.ndim != 1 or values.dtype.name != name:
        raise ValueError(f"no bits of elements of {tensor.dtype}: {values.dtype} of shape {values.shape}")
    return tensor.detach().reshape(-1).view(getattr(torch, name))
