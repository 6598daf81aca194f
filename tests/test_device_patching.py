"""Changes are written to tensors where they lie, and only there; what is no change of one writes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcr_cli.device import patching
from dcr_cli.device.patching import patch_tensor, patch_there
from dcr_cli.errors import UnsupportedError
from interpreter import HAS_CUDA, HAS_TRITON, hurry

DTYPES = (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex64)
PLACES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device")]),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("index", [np.uint32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_bits_are_written(dtype: torch.dtype, index: Any, place: str) -> None:
    width = dtype.itemsize
    old = np.random.default_rng(width).integers(0, 2, 30 * width).astype(np.uint8)
    tensor = torch.from_numpy(old.copy()).view(dtype).reshape(5, 6).to(place)
    positions, values = np.array([29, 0, 7], index), np.arange(3).astype(f"<u{width}") // 2
    patch_tensor(tensor, positions, values)
    expected = old.view(f"<u{width}").copy()
    expected[positions] = values
    assert tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("place", PLACES)
def test_nothing_and_a_single_element(place: str) -> None:
    single = torch.zeros((), dtype=torch.float32, device=place, requires_grad=True)
    patch_tensor(single, np.array([0], np.uint32), np.array([0x3F800000], np.uint32))
    assert single.item() == 1.0
    for tensor in (torch.zeros(0, device=place), single):
        patch_tensor(tensor, np.zeros(0, np.int64), np.zeros(0, np.uint32))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_change_writes_nothing(place: str) -> None:
    tensor = torch.zeros(2, 3, device=place)
    ones = np.ones(2, np.uint32)
    for positions, values, message in (
        (np.array([0, 6]), ones, "position outside of 6 elements: at element 1"),
        (np.array([-1, 0]), ones, "position outside of 6 elements: at element 0"),
        (np.array([0]), ones, "no positions of 2 values"),
        (np.array([0, 1], np.int32), ones, "no positions of 2 values: int32"),
        (np.array([0, 1]), ones.astype(np.uint16), "no bits of elements of torch.float32: uint16"),
        (np.array([0, 1]), ones.view(np.float32), "no bits of elements of torch.float32: float32"),
    ):
        with pytest.raises(ValueError, match=message):
            patch_tensor(tensor, positions, values)
    with pytest.raises(ValueError, match="does not lie in one piece"):
        patch_tensor(tensor.T, np.array([0, 1]), ones)
    assert not tensor.any()


@pytest.mark.skipif(not HAS_TRITON or HAS_CUDA, reason="there is no Triton, or a CUDA device to compile for")
def test_what_is_done_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    bits = torch.zeros(1000, dtype=torch.int16).view(torch.uint16)
    patch_there(bits, np.array([999, 5], np.uint32), np.array([7, 8], np.uint16))
    assert bits.view(torch.int16).nonzero().flatten().tolist() == [5, 999]
    assert (int(bits[5]), int(bits[999])) == (8, 7)
    with pytest.raises(ValueError, match="position outside of 1000 elements: at element 0"):
        patch_there(bits, np.array([1000]), np.array([7], np.uint16))


def test_without_triton_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="Triton is not installed"):
        patch_there(torch.zeros(1, dtype=torch.uint8), np.array([0]), np.array([1], np.uint8))
