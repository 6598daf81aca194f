"""Changes written to elements on a device: new bits over old ones, or masks of the bits that flip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcr_kernels.gpu.elements import OPTIONS, SIGNED, check_elements, launching

# Changes that one program writes.
CHUNK = 1024


@triton.jit(do_not_specialize=["count"])
def scatter(
    out: tl.tensor, positions: tl.tensor, values: tl.tensor, count: tl.tensor, chunk: tl.constexpr, is_xor: tl.constexpr
) -> None:
    """Write `chunk` of the values, or flip the bits that they are masks of."""
    number = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    mask = number < count
    at = out + tl.load(positions + number, mask=mask, other=0).to(tl.int64)
    value = tl.load(values + number, mask=mask, other=0)
    if is_xor:
        value = value ^ tl.load(at, mask=mask, other=0)
    tl.store(at, value, mask=mask)


def patch(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` to `out` at `positions`, uint32 or int64, which are distinct; `out` is unchanged on an error."""
    _patch(out, positions, values, is_xor=False)


def patch_xor(out: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor) -> None:
    """Flip the bits `masks` of `out` at `positions`, uint32 or int64, which are distinct; `out` is unchanged on an
    error."""
    _patch(out, positions, masks, is_xor=True)


def _patch(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, *, is_xor: bool) -> None:
    width = check_elements(out, values)
    if positions.dtype not in (torch.uint32, torch.int64) or positions.ndim != 1 or not positions.is_contiguous():
        raise ValueError(f"not positions: {positions.dtype} of shape {tuple(positions.shape)}")
    count = positions.numel()
    if count != values.numel():
        raise ValueError(f"sizes differ: {count} and {values.numel()}: at element {min(count, values.numel())}")
    if not count:
        return
    wide = positions if positions.dtype is torch.int64 else positions.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    outside = (wide < 0) | (wide >= out.numel())
    if bool(outside.any()):
        at = int(outside.to(torch.uint8).argmax())
        raise ValueError(f"position outside of {out.numel()} elements: at element {at}")
    grid = (triton.cdiv(count, CHUNK),)
    elements = out.view(SIGNED[width]), positions, values.view(SIGNED[width])
    with launching(out):
        scatter[grid](*elements, count, chunk=CHUNK, is_xor=is_xor, **OPTIONS)
