"""Residual rules from end to end: shards of ranks, a layout with rules, and the delta that a dense checkpoint gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcr_cli
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.cli import main
from dcr_cli.errors import DamagedError, UnsupportedError, UsageError
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.document import decode_layout, encode_layout, read_layout
from dcr_cli.layout.laid import LaidCheckpoint, lay
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement, Rule
from dcr_cli.layout.residual.rules import check_rules
from dcr_cli.layout.shards import open_shards
from strategies import TensorData, shard_bytes, write_checkpoint

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}


def data_of(values: torch.Tensor) -> TensorData:
    """A tensor as it is written."""
    raw = values.contiguous().view(BITS.get(values.dtype, torch.uint8)).numpy().tobytes()
    return NAMES[values.dtype], tuple(values.shape), raw


def form_of(values: torch.Tensor) -> Form:
    return Form(NAMES[values.dtype], tuple(values.shape))


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def step(values: torch.Tensor, seed: int) -> torch.Tensor:
    """What an optimizer might have made of it."""
    return values + 1e-4 * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))


def write_ranks(
    root: Path, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, str]
) -> dict[str, dict[str, LocalTensor]]:
    """Write tensors as two ranks hold them: each a part of the rows, of the columns, of the columns transposed, or all.
    Returns what a layout says of it."""
    shards: dict[str, dict[str, LocalTensor]] = {}
    for rank in range(2):
        held: dict[str, TensorData] = {}
        local: dict[str, LocalTensor] = {}
        for name, whole in tensors.items():
            mine, box = cut(whole, cuts.get(name, "rows"), rank)
            held[name] = data_of(mine)
            local[name] = LocalTensor(form_of(mine), (Placement(name, box),))
        path = f"rank-{rank}.safetensors"
        root.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(shard_bytes(held))
        shards[path] = local
    return shards


def cut(whole: torch.Tensor, way: str, rank: int) -> tuple[torch.Tensor, Box]:
    if way == "all":
        return whole, whole_box(whole.numel())
    axis = -2 if way == "rows" and whole.dim() > 1 else -1
    half = whole.shape[axis] // 2 + 1
    starts = [0] * whole.dim()
    starts[axis] = half * rank
    mine = whole.narrow(axis, half * rank, half if rank == 0 else whole.shape[axis] - half)
    if way != "transposed":
        return mine, slice_box(whole.shape, starts, mine.shape)
    rows, columns = mine.shape
    return mine.T, Box.make([(rows, whole.shape[1], 1), (columns, 1, rows)], starts[1], 0)


def write_layout(path: Path, layout: Layout) -> Path:
    path.write_bytes(encode_layout(layout))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def canonical_layout(tensors: Mapping[str, torch.Tensor], **parts: Any) -> Layout:
    return Layout("layout", {name: form_of(each) for name, each in tensors.items()}, **parts)


WAYS = ["rows", "columns", "transposed"]


@pytest.mark.parametrize("way", WAYS)
def test_masters_of_ranks_give_the_delta_of_the_dense_checkpoint(tmp_path: Path, way: str) -> None:
    old = {"a.weight": weights((300, 512), 1), "b.weight": weights((700, 400), 2), "norm.weight": weights((301,), 3)}
    new = {name: step(values, 7) for name, values in old.items()}
    base, dense = (
        write_checkpoint(tmp_path / name, {n: data_of(v.to(torch.bfloat16)) for n, v in tensors.items()}, shards=2)
        for name, tensors in (("base", old), ("dense", new))
    )
    shards = write_ranks(tmp_path / "ranks", new, {"a.weight": way, "norm.weight": "all"})
    layout = canonical_layout(
        {name: values.to(torch.bfloat16) for name, values in new.items()},
        shards=shards,
        stored={name: form_of(values) for name, values in new.items()},
        rules={name: Rule("cast", name) for name in new},
    )
    file = write_layout(tmp_path / "layout.json", layout)
    found = dcr_cli.diff(base, tmp_path / "ranks", tmp_path / "delta", layout=file)
    expected = dcr_cli.diff(base, dense, tmp_path / "expected")
    assert found.changed_elements == expected.changed_elements > 100
    assert files_of(tmp_path / "delta") == files_of(tmp_path / "expected")
    assert dcr_cli.verify(tmp_path / "ranks", against=dense, layout=file).matches
    assert not dcr_cli.verify(tmp_path / "ranks", against=base, layout=file).matches


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and the scales of blocks of 128x128, as DeepSeek's checkpoints have them."""
    values = values.float()
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(*padded.shape[:-2], padded.shape[-2] // 128, 128, padded.shape[-1] // 128, 128)
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / 448)
    made = (blocks / scales).clamp(-448, 448).flatten(-4, -3).flatten(-2)
    return made[..., :rows, :columns].to(torch.float8_e4m3fn), scales.squeeze(-1).squeeze(-2)


@pytest.mark.parametrize("way", WAYS)
def test_a_bfloat16_trainer_updates_an_f8_receiver(tmp_path: Path, way: str) -> None:
    old = {"w": weights((700, 1300), 1), "experts": weights((3, 200, 260), 2), "bias": weights((10,), 3)}
    old["w"][128:256, :128] = 0
    new = {name: step(values, 5) for name, values in old.items()}
    new["w"][128:256, :128] = 0

    def checkpoint(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {"bias": tensors["bias"].to(torch.bfloat16)}
        for name in ("w", "experts"):
            found[name], found[f"{name}_scale_inv"] = quantized(tensors[name].to(torch.bfloat16))
        return found

    base, dense = (
        write_checkpoint(tmp_path / name, {n: data_of(v) for n, v in checkpoint(tensors).items()}, shards=2)
        for name, tensors in (("base", old), ("dense", new))
    )
    halves = {name: values.to(torch.bfloat16) for name, values in new.items()}
    shards = write_ranks(tmp_path / "ranks", halves, {"w": way, "bias": "all"})
    layout = canonical_layout(
        checkpoint(new),
        shards=shards,
        stored={name: form_of(halves[name]) for name in ("w", "experts")},
        rules={
            rule: Rule("fp8-block", name, {"part": part})
            for name in ("w", "experts")
            for rule, part in ((name, "weight"), (f"{name}_scale_inv", "scale"))
        },
    )
    file = write_layout(tmp_path / "layout.json", layout)
    dcr_cli.diff(base, tmp_path / "ranks", tmp_path / "delta", layout=file, jobs=4)
    dcr_cli.diff(base, dense, tmp_path / "expected")
    assert files_of(tmp_path / "delta") == files_of(tmp_path / "expected")
    dcr_cli.apply(tmp_path / "delta", base)
    assert dcr_cli.verify(base, against=dense).matches
    assert dcr_cli.verify(base, delta=tmp_path / "delta").matches


# One tensor through one rule


def laid(
    root: Path, held: torch.Tensor, canonical: Mapping[str, Form], rules: Mapping[str, Rule], **how: Any
) -> LaidCheckpoint:
    way = how.pop("way", "all")
    shards = write_ranks(root / "ranks", {"w": held}, {"w": way})
    layout = Layout("layout", canonical, shards, stored={"w": form_of(held)}, rules=rules, **how)
    check_rules(layout)
    decoded = decode_layout(encode_layout(layout), "layout")
    assert decoded == replace(layout, functions=frozenset())
    assert encode_layout(decoded) == encode_layout(layout)
    return lay(open_shards(root / "ranks"), layout, None)


def read(found: LaidCheckpoint, name: str, *, step_elements: int = 1 << 30) -> bytes:
    """A tensor's bytes, read in parts."""
    tensor = found.by_name[name]
    width = tensor.dtype.width
    data = bytearray(tensor.bytes)
    with found.reader() as reader:
        for at in range(0, tensor.bytes, step_elements * width):
            reader.read_into(tensor, at, memoryview(data)[at : at + step_elements * width])
    return bytes(data)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step_elements", [777, 1 << 30])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (1, 40), (97, 40), (512, 256)])
def test_any_range_is_what_the_whole_is(
    tmp_path: Path, way: str, step_elements: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcr_cli.layout.residual.sources._PANEL_BYTES", 1 << 15)
    monkeypatch.setattr("dcr_cli.layout.gather._PANEL_BYTES", 1 << 15)
    held = weights((140, 150), 4)
    scales = (-(-140 // height), -(-150 // width))
    rules = {
        "w": Rule("fp8-block", "w", {"part": "weight", "block": [height, width]}),
        "s": Rule("fp8-block", "w", {"part": "scale", "block": [height, width]}),
        "c": Rule("cast", "w"),
    }
    forms = {"w": Form("F8_E4M3", (140, 150)), "s": Form("F32", scales), "c": Form("BF16", (140, 150))}
    found = laid(tmp_path, held, forms, rules, way=way)
    padded = torch.nn.functional.pad(held, (0, -150 % width, 0, -140 % height))
    largest = padded.view(scales[0], height, scales[1], width).abs().amax(dim=(1, 3))
    each = (largest / 448).repeat_interleave(height, 0).repeat_interleave(width, 1)[:140, :150]
    assert read(found, "s", step_elements=step_elements) == data_of(largest / 448)[2]
    assert read(found, "w", step_elements=step_elements) == data_of((held / each).to(torch.float8_e4m3fn))[2]
    assert read(found, "c", step_elements=step_elements) == data_of(held.to(torch.bfloat16))[2]


@pytest.mark.parametrize("experts", [(), (3,)])
def test_channels_have_a_scale_each(tmp_path: Path, experts: tuple[int, ...]) -> None:
    held = weights((*experts, 50, 70), 4).to(torch.bfloat16)
    rules = {part: Rule("fp8-channel", "w", {"part": part}) for part in ("weight", "scale")}
    forms = {"weight": Form("F8_E4M3", (*experts, 50, 70)), "scale": Form("F32", (*experts, 50, 1))}
    found = laid(tmp_path, held, forms, rules)
    scales = held.float().abs().amax(dim=-1, keepdim=True) / 448
    assert read(found, "scale") == data_of(scales)[2]
    assert read(found, "weight") == data_of((held.float() / scales).to(torch.float8_e4m3fn))[2]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0"])
def test_scales_in_other_dtypes(tmp_path: Path, dtype: str) -> None:
    held = weights((130, 140), 4)
    rules = {"s": Rule("fp8-block", "w", {"part": "scale", "power_of_two": True})}
    found = laid(tmp_path, held, {"s": Form(dtype, (2, 2))}, rules)
    exponents = (
        np.frombuffer(read(found, "s"), f"<u{DTYPES[dtype].width}") >> {"F32": 23, "BF16": 7, "F8_E8M0": 0}[dtype]
    )
    blocks = [held[:128, :128], held[:128, 128:], held[128:, :128], held[128:, 128:]]
    assert exponents.tolist() == [int(np.ceil(np.log2(block.abs().max().item() / 448))) + 127 for block in blocks]


@pytest.mark.parametrize(("kind", "added"), [("add-one", 1), ("subtract-one", -1)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("canonical", [torch.float32, torch.bfloat16, torch.float16])
def test_one_is_added(tmp_path: Path, kind: str, added: int, stored: torch.dtype, canonical: torch.dtype) -> None:
    held = weights((1000,), 4).to(stored)
    held[:3] = torch.tensor([float("inf"), -1.0, float("nan")])
    found = laid(tmp_path, held, {"n": Form(NAMES[canonical], (1000,))}, {"n": Rule(kind, "w")})
    expected = (held.float() + added).to(canonical)
    width = DTYPES[NAMES[canonical]].width
    assert read(found, "n")[3 * width :] == data_of(expected)[2][3 * width :]
    assert read(found, "n")[: 2 * width] == data_of(expected[:2])[2]
    quiet = {"F32": 0x7FC00000, "BF16": 0x7FC0, "F16": 0x7E00}[NAMES[canonical]]
    assert read(found, "n")[2 * width : 3 * width] == quiet.to_bytes(width, "little")


def test_masters_may_go_through_bfloat16(tmp_path: Path) -> None:
    held = weights((1000,), 4)
    rules = {"n": Rule("add-one", "w", {"through": "BF16"})}
    found = laid(tmp_path, held, {"n": Form("BF16", (1000,))}, rules)
    expected = held.to(torch.bfloat16) + 1
    assert read(found, "n") == data_of(expected)[2] != data_of((held + 1).to(torch.bfloat16))[2]


# Functions


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with functions, on the path, that is not imported yet."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "residual_functions.py").write_text(
        "import numpy as np\n"
        "calls = []\n"
        "buffer = np.empty((4, 6), np.uint16)\n"
        "def flip(given):\n"
        "    calls.append(given.shape)\n"
        "    assert given.dtype == np.float32 and not given.flags.writeable\n"
        "    buffer[...] = given.view(np.uint32) >> 16\n"
        "    return buffer[::-1]\n"
        "def wrong(given):\n"
        "    return given\n"
        "def fails(given):\n"
        "    raise ValueError('no such norm')\n"
        "constant = 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, "residual_functions", raising=False)
    return "residual_functions"


def called(tmp_path: Path, function: str, functions: tuple[str, ...]) -> LaidCheckpoint:
    rules = {"c": Rule("python", "w", {"function": function})}
    return laid(tmp_path, weights((4, 6), 4), {"c": Form("BF16", (4, 6))}, rules, functions=frozenset(functions))


def test_a_function_that_was_named_is_called_once(tmp_path: Path, own_module: str) -> None:
    found = called(tmp_path, f"{own_module}:flip", (f"{own_module}:flip",))
    expected = (weights((4, 6), 4).numpy().view(np.uint32) >> 16).astype(np.uint16)[::-1].tobytes()
    assert read(found, "c", step_elements=5) == expected
    assert sys.modules[own_module].calls == [(4, 6)]


def test_a_layout_runs_no_code_by_itself(tmp_path: Path, own_module: str) -> None:
    with pytest.raises(UnsupportedError, match="nobody has allowed") as caught:
        called(tmp_path, f"{own_module}:flip", (f"{own_module}:wrong",))
    assert f"--function {own_module}:flip" in str(caught.value.hint)
    assert own_module not in sys.modules


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("wrong", r"made float32 \[4, 6\], uint16 \[4, 6\] expected for BF16"),
        ("fails", "its function failed: ValueError: no such norm"),
    ],
)
def test_what_a_function_makes_is_checked(tmp_path: Path, own_module: str, function: str, facts: str) -> None:
    found = called(tmp_path, f"{own_module}:{function}", (f"{own_module}:{function}",))
    with pytest.raises(UnsupportedError, match=facts):
        read(found, "c")


@pytest.mark.parametrize("name", ["residual_functions:none", "residual_functions:constant", "no_such_module:f"])
def test_a_function_that_is_not_there(tmp_path: Path, own_module: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"has no function|cannot be imported"):
        called(tmp_path, name, (name,))


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(3)", "def f(:"])
def test_a_function_whose_module_fails(tmp_path: Path, own_module: str, text: str) -> None:
    (tmp_path / "code" / "module_that_fails.py").write_text(text)
    with pytest.raises(UnsupportedError, match="function module_that_fails:f: its module failed: ") as caught:
        called(tmp_path, "module_that_fails:f", ("module_that_fails:f",))
    assert caught.value.hint == "import it alone"


def test_functions_are_named_on_the_command_line(
    tmp_path: Path, own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = weights((4, 6), 4)
    shards = write_ranks(tmp_path / "ranks", {"w": held}, {})
    rules = {"w": Rule("python", "w", {"function": f"{own_module}:flip"})}
    layout = Layout("layout", {"w": Form("BF16", (4, 6))}, shards, stored={"w": form_of(held)}, rules=rules)
    file = write_layout(tmp_path / "layout.json", layout)
    base = write_checkpoint(tmp_path / "base", {"w": ("BF16", (4, 6), bytes(48))})
    command = ["diff", str(base), str(tmp_path / "ranks"), "--layout", str(file)]
    assert main(command) == 8
    assert f"hint: if you trust it, --function {own_module}:flip" in capsys.readouterr().err
    assert main([*command, "--function", "flip"]) == 2
    assert main([*command, "--function", f"{own_module}:flip"]) == 0
    verify = ["verify", str(tmp_path / "ranks"), "--against", str(base), "--layout", str(file)]
    assert main(verify) == 8
    assert main([*verify, "--function", f"{own_module}:flip"]) == 1
    check = ["layout", "check", str(file), str(tmp_path / "ranks"), "--deep"]
    assert main(check) == 8
    assert main([*check, "--function", f"{own_module}:flip"]) == 0


# What is refused

F32, BF16, F8 = Form("F32", (130, 140)), Form("BF16", (130, 140)), Form("F8_E4M3", (130, 140))
SCALES = Form("F32", (2, 2))


@pytest.mark.parametrize(
    ("canonical", "stored", "rule", "facts"),
    [
        (BF16, F32, {"kind": "cast", "scale": 1}, "options unknown to kind cast: scale"),
        (F32, F32, {"kind": "cast"}, "cast makes one of"),
        (Form("BF16", (140, 130)), F32, {"kind": "cast"}, "in the same shape"),
        (Form("I32", (130, 140)), F32, {"kind": "cast"}, "cast makes one of"),
        (BF16, Form("F64", (130, 140)), {"kind": "add-one"}, "add-one makes one of"),
        (BF16, BF16, {"kind": "add-one", "through": "F16"}, "option through: of F32 expected"),
        (BF16, F32, {"kind": "add-one", "through": "F32"}, 'option through: one of "F16", "BF16" expected'),
        (F8, BF16, {"kind": "fp8-block"}, "option part: .* found missing"),
        (F8, BF16, {"kind": "fp8-block", "part": "scales"}, 'found "scales"'),
        (F8, BF16, {"kind": "fp8-block", "part": ["weight"]}, "option part"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "block": [128]}, "option block"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "block": [128, 0]}, "option block"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "block": [128, True]}, "option block"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "formula": "s / x"}, "option formula"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "least_amax": -1}, "option least_amax"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "least_amax": 1e39}, "option least_amax"),
        (F8, BF16, {"kind": "fp8-block", "part": "weight", "power_of_two": 1}, "option power_of_two"),
        (F8, BF16, {"kind": "fp8-channel", "part": "weight", "block": [1, 1]}, "unknown to kind fp8-channel: block"),
        (BF16, BF16, {"kind": "fp8-block", "part": "weight"}, r"a weight of F8_E4M3 \[130, 140\], not BF16"),
        (F8, BF16, {"kind": "fp8-block", "part": "scale"}, r"scales of F32 or BF16 \[2, 2\], not F8_E4M3"),
        (Form("F32", (1, 2)), BF16, {"kind": "fp8-block", "part": "scale"}, r"\[2, 2\], not F32 \[1, 2\]"),
        (Form("F8_E8M0", (2, 2)), BF16, {"kind": "fp8-block", "part": "scale"}, "scales of F32 or BF16"),
        (SCALES, BF16, {"kind": "fp8-channel", "part": "scale"}, r"\[130, 1\], not F32 \[2, 2\]"),
        (SCALES, Form("BF16", (256,)), {"kind": "fp8-block", "part": "scale"}, "of matrices"),
        (SCALES, Form("BF16", (0, 4)), {"kind": "fp8-block", "part": "scale"}, "of matrices"),
        (SCALES, Form("F64", (256, 256)), {"kind": "fp8-block", "part": "scale"}, "of matrices"),
        (BF16, F32, {"kind": "python"}, "option function: .* found missing"),
        (BF16, F32, {"kind": "python", "function": "os.system"}, "option function"),
        (Form("F4", (4,)), F32, {"kind": "python", "function": "os:system"}, "dtypes that fill bytes"),
    ],
)
def test_rules_that_are_none(canonical: Form, stored: Form, rule: dict[str, Any], facts: str) -> None:
    with pytest.raises(DamagedError, match=facts):
        decode_layout(document(canonical, stored, rule), "layout")


def document(canonical: Form, stored: Form, rule: dict[str, Any]) -> bytes:
    def text(form: Form) -> dict[str, Any]:
        return {"dtype": form.dtype, "shape": list(form.shape)}

    members = {
        "format": "dcr-layout-1",
        "requires": ["rules"],
        "tensors": {"c": text(canonical)},
        "stored": {"w": text(stored)},
        "rules": {"c": {"of": "w", **rule}},
        "shards": {},
    }
    return json.dumps(members).encode()


def test_a_kind_that_is_not_known() -> None:
    with pytest.raises(UnsupportedError, match="is of kind int4-group, unknown to this dcr"):
        decode_layout(document(BF16, F32, {"kind": "int4-group"}), "layout")


def test_names_of_functions_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="module:function expected"):
        read_layout(tmp_path / "none", ["os.system"])


def test_what_is_skipped_is_not_missed(tmp_path: Path) -> None:
    """A stored tensor is needed only if something is made of it."""
    base = write_checkpoint(tmp_path / "base", {"c": ("BF16", (4,), bytes(8)), "d": ("BF16", (2,), bytes(4))})
    held = torch.ones(2, dtype=torch.bfloat16)
    shards = write_ranks(tmp_path / "ranks", {"d": held}, {"d": "all"})
    layout = Layout(
        "layout",
        {"c": Form("BF16", (4,)), "d": form_of(held)},
        shards,
        skipped=frozenset(["c"]),
        stored={"w": Form("F32", (4,))},
        rules={"c": Rule("cast", "w")},
    )
    file = write_layout(tmp_path / "layout.json", layout)
    assert dcr_cli.diff(base, tmp_path / "ranks", layout=file).changed_elements == 2
    assert main(["layout", "check", str(file), str(tmp_path / "ranks"), "--base", str(base)]) == 0
