"""What a loader makes of tensors, found out by loads: casts, masks, signs, the largest and the smallest of elements and
of tensors, and what is refused because it cannot be. Each is applied, against the same loader on the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcr_cli import diff
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.addresses import AnyBits, Digit
from dcr_cli.layout.layout import Form
from dcr_cli.live import Receiver
from dcr_cli.live.probing import learn
from dcr_cli.live.values import MOST_PAIRS, PAIRS, Below, Lean, Leaning, Zeros, pair_of
from live_modules import Forms, held, loaded, new_bits, write

Tensors = Mapping[str, Any]
W: Forms = {"w": ("BF16", (9, 30))}
QKV: Forms = dict.fromkeys("qkv", ("BF16", (4, 6)))
TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}


class Deriving(nn.Module):
    """One that holds its tensors as they are, but for those in `dropped`, and what `derive` makes of them in buffers of
    their own."""

    def __init__(self, forms: Forms, derive: Callable[[Tensors], Tensors], dropped: Iterable[str] = ()) -> None:
        super().__init__()
        self.derive, self.given = derive, {name: self.zeros(*form) for name, form in forms.items()}
        for name, form in forms.items():
            if name not in dropped:
                self.register_buffer(name, self.zeros(*form))
        for name, tensor in derive(self.given).items():
            self.register_buffer(name, torch.zeros_like(tensor))

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Any:
        return torch.zeros(shape, dtype=TYPES[dtype])

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        given = {name: weight.clone() for name, weight in weights}
        for name, tensor in given.items():
            if name in self._buffers:
                self.get_buffer(name).copy_(tensor)
        for name, tensor in self.derive(given).items():
            self.get_buffer(name).copy_(tensor)


def of_w(make: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    return lambda given: {"made": make(given["w"])} if "w" in given else {}


def of_all(make: Callable[..., Any]) -> Callable[[Tensors], Tensors]:
    """What is made of q, k and v together, which the loader needs together."""
    return lambda given: {"made": make(*(given[name] for name in "qkv"))} if given.keys() & set("qkv") else {}


def change(bits: Any, forms: Forms, seed: int) -> Any:
    """Other weights, zeros of both signs among them, some of them larger than all that were there."""
    random = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in forms.items():
        values = torch.from_numpy(random.standard_normal(shape) * 30).to(TYPES[dtype]).reshape(-1)
        raw = values.view(torch.uint8).numpy().view(f"<u{DTYPES[dtype].width}").copy()
        raw[:3] = 0
        raw[3:5] ^= np.array(1 << (8 * DTYPES[dtype].width - 1), raw.dtype)
        found[name] = np.where(random.random(len(raw)) < 0.5, raw, bits[name]).astype(raw.dtype)
    return found


def bring(root: Path, forms: Forms, make: Callable[[], Any], **options: Any) -> list[tuple[str, ...]]:
    """Have a receiver take some steps, each with what it has to be in the end: what went through the loader."""
    bits = new_bits(forms)
    before = write(root / "step-0", forms, bits)
    module = loaded(make, before)
    receiver = Receiver(module, checkpoint=before, **options)
    sent = []
    for number in range(1, 3):
        bits = change(bits, forms, number)
        target = write(root / f"step-{number}", forms, bits)
        diff(before, target, root / f"delta-{number}")
        sent.append(receiver.stage(root / f"delta-{number}").loaded)
        receiver.apply()
        assert held(module) == held(loaded(make, target))
        before = target
    return sent


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w != 0,
        lambda w: w < 0,
        lambda w: w.signbit(),
        lambda w: w.float().abs().max(),
        lambda w: w.float().min(),
        lambda w: w.float().abs().amax(1),
        lambda w: w.clamp(-1, 1),
        lambda w: w.float().sign().sum(),
        lambda w: w.to(torch.float8_e4m3fn),
        lambda w: (w.float() / w.float().abs().max() * 127).round().to(torch.int8),
        lambda w: w.half(),
        lambda w: w.float().exp(),
        lambda w: w.float() ** 2,
    ],
)
def test_what_is_made_of_a_tensor_beside_it(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    assert bring(tmp_path, W, lambda: Deriving(W, of_w(make))) == [("w",)] * 2


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1,), ()])
def test_the_largest_of_many_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Also of as many as there are digits, of which the largest is always the same."""
    forms: Forms = {"w": ("BF16", shape), "other": ("BF16", (7,))}
    module = Deriving(forms, of_w(lambda w: w.float().abs().max()))
    placement = learn(module, module.load_weights, {name: Form(*form) for name, form in forms.items()})
    assert placement.loaded == (("w",),)


CASTS = [("F32", "BF16"), ("F32", "F16"), ("F64", "F32"), ("F64", "BF16"), ("F32", "F8_E4M3"), ("BF16", "F8_E4M3")]


@pytest.mark.parametrize("may_lack", [(), ("*",)])
@pytest.mark.parametrize(("given", "kept"), [*CASTS, ("F16", "BF16"), ("BF16", "F16"), ("BF16", "F32")])
def test_a_cast_is_never_taken_for_nothing(tmp_path: Path, given: str, kept: str, may_lack: tuple[str, ...]) -> None:
    """Not where all may lack, either: with tensors of the other dtype beside it, and with none."""
    beside: Forms
    for beside in ({}, {"other": (kept, (400,))}):
        forms: Forms = {"w": (given, (9, 30)), **beside}
        root = tmp_path / str(len(beside))
        root.mkdir()
        make = partial(Deriving, forms, of_w(lambda w: w.to(TYPES[kept])), dropped="w")
        assert bring(root, forms, make, may_lack=may_lack) == [("w",)] * 2


def test_a_cast_and_back_is_made(tmp_path: Path) -> None:
    forms: Forms = {"w": ("F32", (9, 30))}
    for kept in ("F16", "BF16"):
        (tmp_path / kept).mkdir()
        back = of_w(partial(lambda kept, w: w.to(TYPES[kept]).float(), kept))
        assert bring(tmp_path / kept, forms, partial(Deriving, forms, back, dropped="w")) == [("w",)] * 2


@pytest.mark.parametrize("dtype", ["BF16", "U8"])
@pytest.mark.parametrize(
    "make",
    [
        lambda q, k, v: torch.minimum(torch.minimum(q, k), v),
        lambda q, k, v: torch.maximum(torch.maximum(q, k), v),
        lambda q, k, v: torch.stack([q.float().abs().max(), k.float().abs().max(), v.float().abs().max()]).max(),
        lambda q, k, v: torch.stack([q.float().min(), k.float().min(), v.float().min()]).min(),
        lambda q, k, v: torch.where(q > k, v, q),
        lambda q, k, v: torch.where(q.float().sum() > 1, k.float(), -v.float()),
        lambda q, k, v: q.float() * k.float() + v.float(),
        lambda q, k, v: (q.float().amax() > k.float().amax()) | (v == 0),
    ],
)
def test_what_shows_only_the_largest_of_several_is_made_of_all(
    tmp_path: Path, make: Callable[..., Any], dtype: str
) -> None:
    forms: Forms = {**dict.fromkeys("qkv", (dtype, (4, 6))), "other": (dtype, (7,)), "more": ("F32", (3,))}
    assert set(bring(tmp_path, forms, lambda: Deriving(forms, of_all(make)))) == {("k", "q", "v")}


@pytest.mark.parametrize(
    "make",
    [
        lambda q, k, v: (q.float().abs() > 1000) | (k < 0) | (v < 0),
        lambda q, k, v: q.isnan() | (k < 0) | (v < 0),
        lambda q, k, v: q.float().abs().amax().clamp(min=50) + k.float() + v.float(),
        lambda q, k, v: (q.float() - 300).relu() + k.float() + v.float(),
    ],
)
def test_a_part_that_only_large_numbers_or_nans_show_is_found(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Beside others that any numbers show."""
    forms: Forms = dict.fromkeys("qkv", ("BF16", (60, 50)))
    assert set(bring(tmp_path, forms, lambda: Deriving(forms, of_all(make)))) == {("k", "q", "v")}


def test_nans_that_are_counted_are_made_of_it(tmp_path: Path) -> None:
    forms: Forms = {"w": ("BF16", (60, 50))}
    assert bring(tmp_path, forms, lambda: Deriving(forms, of_w(lambda w: w.isnan().sum()))) == [("w",)] * 2


def test_what_no_value_of_a_pair_shows_is_refused_and_not_dropped() -> None:
    """It counts numbers that the contrasts have, and no pair; nobody can say that it is of these tensors alone."""
    dtype, addresses = DTYPES["BF16"], np.arange(3000)
    shown = [value.bits(dtype, addresses) for number in range(MOST_PAIRS) for value in pair_of(number)]
    rare = np.setdiff1d(AnyBits(20_011).bits(dtype, addresses), np.concatenate(shown)).tolist()

    def count(w: Any) -> Any:
        return sum((w.view(torch.uint16).int() == bits).sum() for bits in rare[:50])

    module = Deriving({"w": ("BF16", (60, 50))}, of_w(count))
    before = held(module)
    with pytest.raises(UnsupportedError, match="nobody can say what its loader makes made of"):
        learn(module, module.load_weights, {"w": Form("BF16", (60, 50))}, may_lack=["*"])
    assert held(module) == before


def test_what_is_the_same_in_all_loads_is_passed_over(tmp_path: Path) -> None:
    """Padding, and a constant that the loader writes."""
    derive = of_w(lambda w: torch.nn.functional.pad(torch.full_like(w, 3), (0, 2)))
    assert bring(tmp_path, W, lambda: Deriving(W, derive)) == [()] * 2


class Disturbing(Deriving):
    """One that loses what it made of one tensor when it is given another one alone."""

    lost = ("", "")

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        pairs = dict(weights)
        super().load_weights(pairs.items())
        if list(pairs) == [self.lost[0]]:
            self.get_buffer(f"{self.lost[1]}_made").zero_()


def exponentials(given: Tensors) -> Tensors:
    return {f"{name}_made": given[name].float().exp() for name in given}


@pytest.mark.parametrize("lost", [("q", "k"), ("k", "q")])
def test_a_group_may_not_disturb_another_one(lost: tuple[str, str]) -> None:
    """Whichever of the two comes first when groups are given alone."""
    module = Disturbing(QKV, exponentials)
    forms = {name: Form(*form) for name, form in QKV.items()}
    assert learn(module, module.load_weights, forms).loaded == (("q",), ("k",), ("v",))
    module.lost = lost
    with pytest.raises(UnsupportedError, match="makes something else of k, q, v if it is given them alone"):
        learn(module, module.load_weights, forms)


def test_what_one_tensor_decides_of_the_place_of_another_is_refused() -> None:
    """Though it is moved as it is in nearly all loads."""
    forms: Forms = dict.fromkeys(("gate", "k", "v"), ("U8", (4, 6)))

    def derive(given: Tensors) -> Tensors:
        return {"chosen": torch.where(given["gate"].sum() > 0, given["k"], given["v"])} if given else {}

    module = Deriving(forms, derive)
    with pytest.raises(UnsupportedError, match="of chosen is not what it should be after a load"):
        learn(module, module.load_weights, {name: Form(*form) for name, form in forms.items()})


@pytest.mark.parametrize("name", DTYPES)
def test_values_lean_as_they_should(name: str) -> None:
    dtype, addresses = DTYPES[name], np.arange(4000)
    sign = 1 << (8 * dtype.width - 1)
    for values in (*(value for pair in PAIRS for value in pair), Below(3), Zeros(3)):
        assert values.bits(dtype, addresses).dtype == f"<u{dtype.width}"
    near, high, low = (Leaning(lean, 1).bits(dtype, addresses) for lean in (Lean.NEAR, Lean.HIGH, Lean.LOW))
    turned = Leaning(Lean.TURNED, 1).bits(dtype, addresses)
    if name != "C64":
        other = 1 if name == "BOOL" else sign if dtype.exponent_bits or name.startswith("I") else 0
        assert np.array_equal(near ^ turned, np.full_like(near, other))
    zeros, below = Zeros(1).bits(dtype, addresses), Below(1).bits(dtype, addresses)
    assert not np.array_equal(near, Leaning(Lean.NEAR, 2).bits(dtype, addresses))
    if dtype.exponent_bits:
        assert (
            (high < sign).all() and (low & sign != 0).all() and (near & ~np.array(sign, near.dtype)).max() < high.min()
        )
        assert (below & sign != 0).all() and set(zeros.tolist()) <= {0, sign}
        assert set((near & sign != 0).tolist()) == {True, False}
    elif name.startswith("I"):
        assert (high < sign).all() and (low & sign != 0).all() and not zeros.any()
        signed = near.view(f"<i{dtype.width}")
        assert signed.max() < high.min() and set((signed < 0).tolist()) == {True, False}
    elif name == "BOOL":
        assert high.all() and not low.any() and set(near.tolist()) == {0, 1} and not zeros.any()
    elif name != "C64":
        assert low.max() < near.min() and near.max() < high.min() and not zeros.any()
    digits = Digit(0).bits(dtype, addresses)
    assert (below != digits).any() and (high != low).any()
