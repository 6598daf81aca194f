"""Layouts that are derived from loaders, and the loaders that have none; and boxes fitted to elements."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from box_cases import boxes, places
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, UsageError
from dcr_cli.layout.addresses import NOWHERE, Digit, Drawn, alphabet_of, give_addresses, read_addresses
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.fitting import Fitting, TooIrregularError
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout, Placement
from dcr_cli.layout.loader import ONLY_FILE, Loader, find_loader
from dcr_cli.layout.probe import probe
from strategies import tensor_of, write_checkpoint

Arrays = dict[str, NDArray[Any]]
Program = Callable[[Arrays], Mapping[str, Any]]

# Query, key and value of 4 heads in 2 groups, of 8 columns; experts; a vocabulary; biases; a number.
BASE = {
    "q": ("F32", (8, 8)),
    "k": ("F32", (4, 8)),
    "v": ("F32", (4, 8)),
    "o": ("F16", (8, 16)),
    **{f"experts.{number}.{part}": ("F16", (3, 4)) for number in range(3) for part in ("gate", "up", "down")},
    "embed": ("F16", (261, 8)),
    "bias": ("F32", (16,)),
    "scale": ("F64", ()),
    "mask": ("BOOL", (70,)),
    "ids": ("I64", (5,)),
    "bytes": ("I8", (300,)),
    "nothing": ("F32", (0, 4)),
}


def read(folder: str) -> Arrays:
    """All tensors of a checkpoint."""
    return {name: each for path in sorted(Path(folder).glob("*.safetensors")) for name, each in load_file(path).items()}


def probed(tmp_path: Path, program: Program, **options: Any) -> Layout:
    """The layout of a loader that reads a checkpoint and does with its tensors what `program` does."""
    root = tmp_path / "base"
    if not root.exists():
        tensors = {name: tensor_of(dtype, shape) for name, (dtype, shape) in BASE.items()}
        write_checkpoint(root, tensors, shards=3, sidecars={"config.json": b"{}", "more/vocab.txt": b"a\n"})
        (tmp_path / "scratch").mkdir()

    def load(folder: str) -> Mapping[str, Any]:
        assert (Path(folder) / "config.json").read_bytes() == b"{}"
        assert (Path(folder) / "more/vocab.txt").read_bytes() == b"a\n"
        return program(read(folder))

    try:
        return probe(Loader("program", load), open_checkpoint(root), scratch=tmp_path / "scratch", **options)
    finally:
        assert list((tmp_path / "scratch").iterdir()) == []


def local(tmp_path: Path, program: Program) -> Mapping[str, Any]:
    """The local tensors of a loader that has all tensors as they are, and those of `program` besides."""
    return probed(tmp_path, lambda given: {**given, **program(given)}).shards[ONLY_FILE]


def boxes_of(tmp_path: Path, made: Callable[[Arrays], NDArray[Any]]) -> list[Placement]:
    return list(local(tmp_path, lambda given: {"made": made(given)})["made"].placements)


def fused(given: Arrays) -> NDArray[Any]:
    """Per group its two query heads, its key and its value head, as in Megatron."""
    groups = [given["q"].reshape(2, 4, 8), given["k"].reshape(2, 2, 8), given["v"].reshape(2, 2, 8)]
    return np.concatenate(groups, axis=1).reshape(16, 8)


def test_tensors_as_they_are(tmp_path: Path) -> None:
    layout = probed(tmp_path, lambda given: given)
    assert dict(layout.tensors) == {name: Form(*form) for name, form in sorted(BASE.items())}
    for name, form in layout.tensors.items():
        tensor = layout.shards[ONLY_FILE][name]
        assert (tensor.form, tensor.fill) == (form, KEEP)
        assert tensor.placements == ((Placement(name, whole_box(form.elements)),) if form.elements else ())
    assert layout.skipped == frozenset()


def test_slices_and_transposes(tmp_path: Path) -> None:
    assert boxes_of(tmp_path, lambda given: given["o"][2:5]) == [Placement("o", slice_box((8, 16), (2, 0), (3, 16)))]
    assert boxes_of(tmp_path, lambda given: given["o"][:, 4:8]) == [Placement("o", slice_box((8, 16), (0, 4), (8, 4)))]
    assert boxes_of(tmp_path, lambda given: given["o"][:, 4:5]) == [Placement("o", slice_box((8, 16), (0, 4), (8, 1)))]
    assert boxes_of(tmp_path, lambda given: given["o"].T) == [Placement("o", Box.make([(16, 1, 8), (8, 16, 1)], 0, 0))]
    even = [Placement("o", Box.make([(8, 16, 8), (8, 2, 1)], 0, 0))]
    assert boxes_of(tmp_path, lambda given: given["o"][:, ::2]) == even


def test_fused_and_interleaved(tmp_path: Path) -> None:
    assert boxes_of(tmp_path, fused) == [
        Placement("q", Box.make([(2, 32, 64), (32, 1, 1)], 0, 0)),
        Placement("k", Box.make([(2, 16, 64), (16, 1, 1)], 0, 32)),
        Placement("v", Box.make([(2, 16, 64), (16, 1, 1)], 0, 48)),
    ]
    columns = [Placement("q", Box.make([(32, 1, 2)], 0, 0)), Placement("k", Box.make([(32, 1, 2)], 0, 1))]
    assert boxes_of(tmp_path, lambda given: np.stack([given["q"][:4], given["k"]], axis=-1)) == columns


@pytest.mark.parametrize(("value", "fill"), [(0.0, ZERO), (-1.0, KEEP)])
def test_padding_is_zero_or_kept(tmp_path: Path, value: float, fill: str) -> None:
    def program(given: Arrays) -> Arrays:
        return {"padded": np.pad(given["embed"], ((0, 3), (0, 0)), constant_values=value)}

    padded = local(tmp_path, program)["padded"]
    assert (padded.form, padded.fill) == (Form("F16", (264, 8)), fill)
    assert padded.placements == (Placement("embed", whole_box(261 * 8)),)


def test_tied_tensors_and_buffers(tmp_path: Path) -> None:
    found = local(tmp_path, lambda given: {"head": given["embed"], "table": np.arange(9.0), "zeros": np.zeros(3)})
    assert found["head"].placements == found["embed"].placements
    assert found["table"].placements == found["zeros"].placements == ()
    assert found["table"].fill == found["zeros"].fill == KEEP


def test_stacked_experts(tmp_path: Path) -> None:
    def stacked(given: Arrays) -> NDArray[Any]:
        parts = [[given[f"experts.{number}.{part}"] for part in ("gate", "up")] for number in range(3)]
        return np.stack([np.concatenate(each) for each in parts])

    names = [f"experts.{number}.{part}" for number in range(3) for part in ("gate", "up")]
    expected = [Placement(name, Box.make([(12, 1, 1)], 0, 12 * number)) for number, name in enumerate(names)]
    assert boxes_of(tmp_path, stacked) == expected


def test_several_files(tmp_path: Path) -> None:
    def program(given: Arrays) -> dict[str, Arrays]:
        return {f"{rank}.safetensors": {**given, "part": given["o"][4 * rank :][:4]} for rank in range(2)}

    layout = probed(tmp_path, program)
    assert list(layout.shards) == ["0.safetensors", "1.safetensors"]
    assert layout.shards["1.safetensors"]["part"].placements == (Placement("o", Box.make([(64, 1, 1)], 64, 0)),)


def test_a_tensor_that_has_elements_twice(tmp_path: Path) -> None:
    twice = boxes_of(tmp_path, lambda given: np.concatenate([given["k"], given["k"]]))
    assert twice == [Placement("k", whole_box(32)), Placement("k", Box.make([(32, 1, 1)], 0, 32))]


def bits_of(folder: str) -> Arrays:
    """The tensors of a checkpoint's only shard, all of them unsigned integers of NumPy."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        first, end = (begin + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[first:end], f"<u{DTYPES[entry['dtype']].width}").reshape(entry["shape"])
    return found


@pytest.mark.parametrize("eight", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"])
def test_bits_of_what_numpy_has_not(tmp_path: Path, eight: str) -> None:
    tensors = {"wide": tensor_of("BF16", (30, 8)), "narrow": tensor_of(eight, (12, 8))}
    base = open_checkpoint(write_checkpoint(tmp_path / "base", tensors))

    def load(folder: str) -> Arrays:
        given = bits_of(folder)
        return {"right": given["wide"][:, 4:], "left": given["wide"][:, :4], "turned": given["narrow"].T}

    found = probe(Loader("bits", load), base, scratch=tmp_path).shards[ONLY_FILE]
    assert {name: str(tensor.form) for name, tensor in found.items()} == {
        "right": "BF16 [30, 4]",
        "left": "BF16 [30, 4]",
        "turned": f"{eight} [8, 12]",
    }
    assert found["right"].placements == (Placement("wide", slice_box((30, 8), (0, 4), (30, 4))),)


def test_bits_that_could_be_of_several_dtypes_are_themselves(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("F8_E4M3", (30, 8)), "scale": tensor_of("F8_E8M0", (4,)), "wide": tensor_of("BF16", (4,))}
    base = open_checkpoint(write_checkpoint(tmp_path / "base", tensors | {"ids": tensor_of("U16", (4,))}))
    for name, dtype in (("w", "U8"), ("wide", "U16")):
        with pytest.raises(UnsupportedError, match=f"tensor {name} .* no element of it of {dtype}"):
            probe(Loader("bits", lambda folder, name=name: {name: bits_of(folder)[name]}), base, scratch=tmp_path)  # type: ignore[misc]


def test_tensors_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    # PyTorch has no dtype of 6 bits.
    names = [name for name, dtype in DTYPES.items() if dtype.bits != 6]
    write_checkpoint(tmp_path / "base", {name: tensor_of(name, (6, 50)) for name in names})
    (tmp_path / "scratch").mkdir()
    torch_file = pytest.importorskip("safetensors.torch").load_file

    def load(folder: str) -> dict[str, Any]:
        given: dict[str, Any] = torch_file(f"{folder}/model.safetensors")
        given["t"] = torch.nn.Parameter(given["BF16"]).T
        return given

    layout = probe(Loader("program", load), open_checkpoint(tmp_path / "base"), scratch=tmp_path / "scratch")
    for name in names:
        elements = layout.tensors[name].elements
        assert layout.shards[ONLY_FILE][name].form == layout.tensors[name]
        assert layout.shards[ONLY_FILE][name].placements == (Placement(name, whole_box(elements)),)
    assert layout.shards[ONLY_FILE]["t"].placements == (Placement("BF16", Box.make([(50, 1, 6), (6, 50, 1)], 0, 0)),)


def there_and_back(given: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return given.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    "made",
    [
        lambda given: given["o"] + np.float16(1),
        lambda given: -given["o"],
        lambda given: given["o"] / 2,
        lambda given: given["o"].astype(np.float32),
        lambda given: given["o"].astype(np.int32).astype(np.float16),
        lambda given: there_and_back(given["q"]),
        lambda given: np.maximum(given["o"], np.float16(0.5)),
        lambda given: given["q"].view(np.float16),
        lambda given: given["q"][:4] + given["k"],
        lambda given: given["bytes"] ^ np.int8(1),
        lambda given: ~given["mask"],
    ],
)
def test_what_is_computed_is_refused(tmp_path: Path, made: Callable[[Arrays], NDArray[Any]]) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor made of model.safetensors: element \[?\d"):
        boxes_of(tmp_path, made)


def test_what_only_random_values_tell_is_refused(tmp_path: Path) -> None:
    def program(given: Arrays) -> Arrays:
        return {**given, "o": np.where(given["o"] < 0, np.float16(0), given["o"])}

    with pytest.raises(UnsupportedError, match=r"tensor o of .*after a load of random values"):
        probed(tmp_path, program)


def test_a_mask_of_zeros_is_no_constant(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor made of .*after a load of random values"):
        boxes_of(tmp_path, lambda given: given["embed"] != 0)


def test_what_is_no_short_list_of_boxes_is_refused(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(261)
    with pytest.raises(UnsupportedError, match=r"tensor made of .*no short list of boxes"):
        boxes_of(tmp_path, lambda given: given["embed"][order])


def test_what_changes_by_itself_is_refused(tmp_path: Path) -> None:
    numbers = itertools.count()
    with pytest.raises(UnsupportedError, match=r"tensor made of .*changes"):
        boxes_of(tmp_path, lambda given: np.full(3, next(numbers), np.float32))
    with pytest.raises(UnsupportedError, match="other names or forms"):
        probed(tmp_path, lambda given: {**given, "made": np.zeros(next(numbers))})


def test_a_tensor_that_is_nowhere_must_be_expected(tmp_path: Path) -> None:
    def program(given: Arrays) -> Arrays:
        del given["mask"]
        return given

    with pytest.raises(UnsupportedError, match="holds nothing of tensors mask"):
        probed(tmp_path, program)
    assert probed(tmp_path, program, may_lack=["ma*"]).skipped == {"mask"}
    with pytest.raises(DamagedError, match=r"tensor o: element \[4, 0\] is in no shard"):
        probed(tmp_path, lambda given: {**given, "o": given["o"][:4]})


def fail(given: Arrays) -> Arrays:
    raise ValueError("no room")


@pytest.mark.parametrize(
    ("program", "facts"),
    [
        (fail, "loader program: failed: ValueError: no room"),
        (lambda given: list(given), "loader program: returned a list"),
        (lambda given: {"a": 1}, "tensor a is a int"),
        (lambda given: {"a": np.array(["x"])}, "tensor a is a ndarray"),
        (lambda given: {"../a": {}}, "unsafe name"),
    ],
)
def test_what_a_loader_returns_or_raises(tmp_path: Path, program: Program, facts: str) -> None:
    with pytest.raises(DcrError, match=facts):
        probed(tmp_path, program)


def test_loaders_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_loader("os.path:join").function is __import__("os").path.join
    for name in ("os", "os:", ":join", "os.path:sep", "no_such_module:load", "os:no_such_function"):
        with pytest.raises(UsageError):
            find_loader(name)
    (tmp_path / "loader_that_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="its module failed: ZeroDivisionError"):
        find_loader("loader_that_fails:load")


@pytest.mark.parametrize("name", DTYPES)
def test_addresses_come_back(name: str) -> None:
    dtype = DTYPES[name]
    form = Form(name, (3, 40_000))
    addresses = give_addresses({"a": form, "b": form})
    total = addresses.totals[name]
    wanted = np.array([0, 1, total - 1, total // 2, 12_345], np.int64)
    digits = [Digit(number).bits(dtype, wanted) for number in range(addresses.digits + 1)]
    for bits in digits:
        alphabet = alphabet_of(dtype)
        assert bits.dtype == f"<u{dtype.width}" and alphabet.symbols % 2 == 0
        assert alphabet.digits(bits)[1].all() and (alphabet.first <= bits).all()
    is_reversed = Digit(0, is_reversed=True).bits(dtype, wanted)
    found = read_addresses(dtype, total, digits, is_reversed)
    assert found.addresses.tolist() == wanted.tolist() and not found.is_made.any()
    stuck = read_addresses(dtype, total, [digits[0]] * len(digits), digits[0])
    assert (stuck.addresses == NOWHERE).all() and not stuck.is_made.any()
    drawn = Drawn(7).bits(dtype, np.arange(20_000))
    assert drawn.dtype == f"<u{dtype.width}" and len(np.unique(drawn)) >= (2 if name == "BOOL" else 200)


@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64"])
def test_digits_are_normal_numbers_that_a_cast_tells_apart(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype, alphabet = DTYPES[name], alphabet_of(DTYPES[name])
    bits = alphabet.bits(np.arange(alphabet.symbols)).astype(f"<u{dtype.width}")
    exponents = (bits >> np.uint64(dtype.exponent_shift)).astype(np.int64)
    assert len(np.unique(bits)) == alphabet.symbols and exponents[-1] - exponents[0] >= 15
    assert exponents[0] > 0 and exponents[-1] < (1 << dtype.exponent_bits) - 1
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    values = torch.from_numpy(bits.view(np.uint8)).view(kinds[name])
    for other, kind in kinds.items():
        if DTYPES[other].width < dtype.width:
            made = values.to(kind)
            # Only some in the middle may be what their reverse is then.
            assert (made != made.flip(0)).sum() >= alphabet.symbols - 16
            assert not torch.equal(made.to(kinds[name]), values)
        if other != name:
            # What a cast makes of a digit and of its reverse is no digit and its reverse of the other dtype.
            cast = values.to(kind).view(torch.uint8).numpy().view(f"<u{DTYPES[other].width}")
            digits, is_digit = alphabet_of(DTYPES[other]).digits(cast)
            is_mistaken = is_digit & is_digit[::-1] & (digits + digits[::-1] == alphabet_of(DTYPES[other]).symbols - 1)
            assert not is_mistaken.any()


@given(boxes(), st.integers(1, 40))
def test_boxes_are_fitted_to_their_own_elements(box: Box, at_once: int) -> None:
    check_fit({here: there for there, here in places(box).items()}, at_once)


@given(st.lists(boxes(), max_size=3), st.integers(1, 40))
def test_several_boxes_are_fitted_exactly(several: list[Box], at_once: int) -> None:
    found: dict[int, int] = {}
    for box in several:
        for there, here in places(box).items():
            found.setdefault(here, there)
    check_fit(found, at_once)


@given(st.dictionaries(st.integers(0, 60), st.integers(0, 60)), st.integers(1, 40))
def test_any_elements_are_fitted_exactly(found: dict[int, int], at_once: int) -> None:
    check_fit(found, at_once)


def check_fit(found: dict[int, int], at_once: int) -> list[Box]:
    """Fit boxes to elements, given by what they are in the local tensor, and see that they are these."""
    pairs = sorted(found.items())
    fitting = Fitting()
    for first in range(0, len(pairs), at_once):
        part = np.array(pairs[first : first + at_once], np.int64)
        fitting.add(part[:, 0].copy(), part[:, 1].copy())
    fitted = list(fitting.boxes(1000))
    again = [(here, there) for box in fitted for there, here in places(box).items()]
    assert sorted(again) == pairs
    return fitted


@pytest.mark.parametrize("at_once", [8, 16, 1000])
def test_few_boxes_are_fitted(at_once: int) -> None:
    whole = np.arange(240).reshape(6, 5, 8)
    for view in (whole, whole[:, 1:3], whole[..., 2:5], whole[::2], whole.transpose(1, 0, 2), whole.transpose(2, 1, 0)):
        assert len(check_fit(dict(enumerate(view.reshape(-1).tolist())), at_once)) == 1
    assert len(check_fit(dict(enumerate(whole[::-1].reshape(-1).tolist())), at_once)) == 6
    mixed = np.concatenate([whole[:, :2], whole[:, 3:4], whole[:, 2:3]], axis=1)
    assert len(check_fit(dict(enumerate(mixed.reshape(-1).tolist())), at_once)) == 3


def test_an_element_that_two_rows_could_have_is_in_one() -> None:
    assert [box.elements for box in check_fit(dict(enumerate([0, 1, 2, 7, 12, 17, 18, 19])), 1000)] == [3, 3, 2]


def test_what_fits_no_boxes_is_said_early() -> None:
    fitting = Fitting()
    order = np.random.default_rng(1).permutation(1 << 16)
    with pytest.raises(TooIrregularError, match="forms"):
        fitting.add(np.arange(len(order)), order)
    fitting = Fitting()
    fitting.add(np.arange(5), np.array([9, 7, 5, 3, 1]))
    with pytest.raises(TooIrregularError, match="5 boxes, more than 4"):
        fitting.boxes(4)
