"""What the kernels take: elements as unsigned integers of 1, 2, 4 or 8 bytes, in one row, on one device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

BLOCK_BYTES = 524288
# A tile is as large as a row of the digest; a block has 64 of either.
TILE_BYTES = 8192

WIDTHS = {torch.uint8: 1, torch.uint16: 2, torch.uint32: 4, torch.uint64: 8}
# Kernels see them as signed ones.
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Triton shows a kernel to other threads before it has loaded it, and they would launch what is not there yet.
_LAUNCHING = threading.Lock()

# No kernel has floats, and integers are meant to overflow.
OPTIONS = {"enable_fp_fusion": False, "sanitize_overflow": False}


def check_elements(*tensors: torch.Tensor) -> int:
    """Return the width of elements; ValueError if tensors are not rows of elements of one width."""
    for tensor in tensors:
        if tensor.dtype not in WIDTHS or tensor.dtype != tensors[0].dtype or tensor.ndim != 1:
            raise ValueError(f"not elements of one width: {tensor.dtype} of shape {tuple(tensor.shape)}")
        if not tensor.is_contiguous() or tensor.device != tensors[0].device:
            raise ValueError(
                f"not a contiguous row on {tensors[0].device}: strides {tensor.stride()} on {tensor.device}"
            )
    return WIDTHS[tensors[0].dtype]


def tile_warps(tile_elements: int) -> int:
    """Warps that work on a tile: each thread has 16 elements of it, and registers for what it knows of them."""
    return tile_elements // 512


@contextmanager
def launching(tensor: torch.Tensor) -> Iterator[None]:
    """Launch kernels where the tensor lies, one thread at a time; one in the host's memory is for Triton's
    interpreter."""
    with _LAUNCHING, torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        yield
