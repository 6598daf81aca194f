"""Conversions of floating-point elements, against PyTorch's and against exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dcr_cli.layout.residual.floats import FLOATS, Elements, cast, e4m3_values, to_e4m3, to_float32

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
UNSIGNED = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
SIGNED = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def tensor(bits: Elements, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(TORCH[dtype])


def bits_of(values: torch.Tensor, dtype: str) -> Elements:
    found: Elements = values.view(SIGNED[dtype]).numpy().view(UNSIGNED[dtype])
    return found


def samples(dtype: str) -> Elements:
    """All bit patterns of a half, or many of a wider one: random ones, ties and what lies beside them."""
    if UNSIGNED[dtype] is np.uint16:
        return EVERY_HALF
    random = np.random.default_rng(7)
    if dtype == "F32":
        upper = EVERY_HALF.astype(np.uint32) << 16
        near = [upper + low for low in (0, 0x7FFF, 0x8000, 0x8001)]
        halves = cast(EVERY_HALF, "F16", "F32")
        near += [halves + delta for delta in np.array([0xFFF, 0x1000, 0x1001], np.uint32)]
        return np.concatenate([*near, random.integers(0, 1 << 32, 1 << 16, np.uint32)])
    wide = samples("F32").view(np.float32)
    with np.errstate(invalid="ignore"):
        values = wide.astype(np.float64)
    bits = values.view(np.uint64)
    return np.concatenate([bits, bits + 1, bits + (1 << 28), random.integers(0, 1 << 64, 1 << 16, np.uint64)])


@pytest.mark.parametrize(("stored", "canonical"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_a_cast_is_what_pytorch_does(stored: str, canonical: str) -> None:
    bits = samples(stored)
    expected = tensor(bits, stored).to(TORCH[canonical])
    found = cast(bits, stored, canonical)
    is_nan = torch.isnan(expected).numpy()
    assert np.array_equal(found[~is_nan], bits_of(expected, canonical)[~is_nan])
    assert np.array_equal(is_nan, torch.isnan(tensor(bits, stored)).numpy())
    if (stored, canonical) == ("BF16", "F32"):
        assert np.array_equal(found, bits.astype(np.uint32) << 16)
        return
    quiet = {"F64": 0x7FF8 << 48, "F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}[canonical]
    assert is_nan.any() and (found[is_nan] == quiet).all()


def test_a_cast_rounds_ties_to_even_and_overflows() -> None:
    def to_bf16(*bits: int) -> list[int]:
        found: list[int] = cast(np.array(bits, np.uint32), "F32", "BF16").tolist()
        return found

    assert to_bf16(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF) == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    assert to_bf16(0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x80000000, 0x00008001) == [0x7F7F, 0x7F80, 0xFF80, 0x8000, 1]


def nearest(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The F8_E4M3 of values, from its definition, in numbers that are exact."""
    with np.errstate(invalid="ignore"):
        magnitudes = np.abs(values.astype(np.float64))
    # The exponent of the last bit of the nearest ones; below 2^-6 all have that of the subnormal ones.
    last = np.maximum(np.frexp(magnitudes)[1] - 1, -6) - 3
    units = np.rint(np.ldexp(magnitudes, -last))
    rounded = np.minimum(np.ldexp(units, last), 448.0)
    codes = {float(value): code for code, value in enumerate(e4m3_values()[:127].tolist())}
    found = np.array([codes[value] if value == value else 0x7F for value in rounded.tolist()], np.uint8)
    return np.where(np.signbit(values) & ~np.isnan(values), found | 0x80, found).astype(np.uint8)


def f8_samples() -> NDArray[np.float32]:
    """Numbers around every F8_E4M3 value and every middle of two, and random ones."""
    values = e4m3_values()[:127].astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    exact = np.concatenate([values, middles]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(1e9)), np.nextafter(exact, np.float32(-1e9))])
    random = np.random.default_rng(3)
    spread = random.standard_normal(1 << 16) * 2.0 ** random.integers(-12, 10, 1 << 16)
    every = samples("F32").view(np.float32)[:: 1 << 5]
    return np.concatenate([near, -near, spread.astype(np.float32), every])


def test_every_bfloat16_becomes_the_nearest_f8() -> None:
    values = to_float32(EVERY_HALF, "BF16")
    assert np.array_equal(to_e4m3(values), nearest(values))


def test_every_float32_becomes_the_nearest_f8() -> None:
    values = f8_samples()
    assert np.array_equal(to_e4m3(values), nearest(values))


@pytest.mark.parametrize("values", [to_float32(EVERY_HALF, "BF16"), f8_samples()], ids=["bfloat16", "float32"])
def test_f8_is_what_pytorch_does(values: NDArray[np.float32]) -> None:
    expected = torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    is_nan = np.isnan(values)
    assert np.array_equal(to_e4m3(values)[~is_nan], expected[~is_nan])
    assert (to_e4m3(values)[is_nan] == 0x7F).all() and (expected[is_nan] & 0x7F == 0x7F).all()


def test_f8_values_are_those_of_pytorch() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), expected, equal_nan=True)
