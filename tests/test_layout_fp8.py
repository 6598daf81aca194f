"""Checkpoints with FP8 weights that are updated from shards that have none: every bit is the one that PyTorch makes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Run, is_failure
from dcr_cli import apply, compose_layouts, diff, fp8_layout, megatron_layout, verify
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, UsageError
from dcr_cli.layout.document import read_layout
from dcr_cli.layout.fp8 import options_of, plain_forms, with_rules
from dcr_cli.layout.layout import Form, Layout, Rule
from fp8_models import Quantize, blocks, channels, data_of, model, rounded, with_fp8, write, write_fp8
from layouts import layout_bytes, layout_document, local, part_of, write_dcp
from megatron_models import LLAMA
from megatron_shards import dense_llama, write_ranks
from receivers import tree
from strategies import shard_bytes


@pytest.mark.parametrize(
    ("quantize", "end", "options"),
    [
        (blocks, "_scale_inv", {}),
        (blocks, "_scale", {}),
        (partial(blocks, height=64, width=32), "_scale_inv", {"block": [64, 32]}),
        (channels, "_scale", {}),
        (channels, "_scale_inv", {}),
    ],
)
@pytest.mark.parametrize("has_masters", [False, True])
def test_weights_and_scales_are_those_of_pytorch(
    quantize: Quantize, end: str, options: dict[str, Any], has_masters: bool, tmp_path: Path
) -> None:
    """Of BF16 weights, or of F32 masters, which are rounded to BF16 first."""
    quantization = {"quant_method": "fp8", "weight_block_size": options.get("block")}
    config = json.dumps({"quantization_config": quantization}).encode()
    base, target = (
        write(tmp_path / name, with_fp8(rounded(model(version)), quantize, end), config)
        for version, name in enumerate(("base", "target"))
    )
    before, after = (
        write(tmp_path / f"plain-{version}", model(version) if has_masters else rounded(model(version)), config)
        for version in (0, 1)
    )
    layout = tmp_path / "layout.json"
    made = fp8_layout(base, before, output=layout)
    kind = "fp8-channel" if quantize is channels else "fp8-block"
    assert made.rules == {kind: 4, **({"cast": 2} if has_masters else {})}
    assert diff(base, before, layout=layout).same
    assert diff(base, after, tmp_path / "delta", layout=layout).changed_elements
    apply(tmp_path / "delta", base)
    assert tree(base) == tree(target)


def test_shards_may_be_those_of_ranks(run: Run, tmp_path: Path) -> None:
    """Of PyTorch, which say of themselves; others by a layout of theirs, or of both one after the other."""
    plain = data_of(rounded(model(1)))
    base, target = (write(tmp_path / name, with_fp8(rounded(model(version)))) for name, version in (("a", 0), ("b", 1)))
    halves = [
        [
            (name, (rank * shape[0] // 2, *[0] * (len(shape) - 1)), (shape[0] // 2, *shape[1:]))
            for name, (_, shape, _) in plain.items()
        ]
        for rank in (0, 1)
    ]
    dcp = write_dcp(tmp_path / "dcp", plain, halves)
    shards = tmp_path / "ranks"
    shards.mkdir()
    described: dict[str, dict[str, Any]] = {}
    for rank, cuts in enumerate(halves):
        parts = {name: part_of(plain[name], starts, shape) for name, starts, shape in cuts}
        (shards / f"rank-{rank}.safetensors").write_bytes(shard_bytes(parts))
        described[f"rank-{rank}.safetensors"] = {
            name: local(part, [[name, rank * len(part[2]) // 2, 0, [[len(part[2]) // 2, 1, 1]]]])
            for name, part in parts.items()
        }
    (tmp_path / "tp.json").write_bytes(layout_bytes(layout_document(plain, described)))
    assert run("layout", "fp8", base, dcp, "-o", tmp_path / "of-dcp.json", "-q").code == 0
    assert run("layout", "fp8", base, tmp_path / "tp.json", "-o", tmp_path / "of-file.json", "-q").code == 0
    fp8_layout(base, write(tmp_path / "plain", rounded(model())), output=tmp_path / "of-plain.json")
    compose_layouts(tmp_path / "of-plain.json", tmp_path / "tp.json", output=tmp_path / "composed.json")
    for place, layout in ((dcp, "of-dcp.json"), (shards, "of-file.json"), (shards, "composed.json")):
        assert verify(place, against=target, layout=tmp_path / layout).matches
        assert not diff(base, place, layout=tmp_path / layout).same


def test_a_base_without_fp8_is_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", rounded(model()))
    with pytest.raises(DamagedError, match="has no FP8 weights with scales"):
        fp8_layout(plain, plain, output=tmp_path / "layout.json")
    assert not (tmp_path / "layout.json").exists()


def test_options_are_those_of_the_config_or_of_the_command(run: Run, tmp_path: Path) -> None:
    base, plain = write_fp8(tmp_path / "models")
    quantization = {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    rule = {"kind": "fp8-block", "of": "w", "power_of_two": True}
    command = ("layout", "fp8", base, plain)

    def rules(*options: str | Path) -> dict[str, Any]:
        (tmp_path / "layout.json").unlink(missing_ok=True)
        assert run(*command, *options, "-o", tmp_path / "layout.json", "-q").code == 0
        found: dict[str, Any] = json.loads((tmp_path / "layout.json").read_bytes())["rules"]
        return found

    assert rules()["w"] == {**rule, "part": "weight"} and rules()["w_scale_inv"] == {**rule, "part": "scale"}
    found = rules("--fp8", "formula=x * (448 / a)", "--fp8", "least_amax=1e-4", "--fp8", "power_of_two=false")
    assert found["w"] == {
        **rule,
        "part": "weight",
        "power_of_two": False,
        "formula": "x * (448 / a)",
        "least_amax": 1e-4,
    }
    (tmp_path / "other.json").write_text("{}")
    assert rules("--config", tmp_path / "other.json")["w"] == {"kind": "fp8-block", "of": "w", "part": "weight"}
    for options, code, message, hint in (
        (("--fp8", "formula=x"), 2, "option formula: one of", "options that the FP8 checkpoint was made with"),
        (("--fp8", "formula"), 2, "OPTION=VALUE expected", "power_of_two=true"),
        (("--fp8", "block=[1]"), 2, "[height, width] expected", "[128, 128]"),
        (("--fp8", "block=0"), 2, "[height, width] expected", "[128, 128]"),
        (("--fp8", "block=[0,0]"), 2, "[height, width] expected", "[128, 128]"),
        (("--fp8", "scale=2"), 2, "option scale: is none of FP8 weights: block, formula,", ""),
        (("--fp8", "block=[8,8]"), 8, "experts_scale_inv: is F32 [2, 2, 1], of a weight F8", "--fp8 block="),
        (("--config", tmp_path / "none.json"), 3, "no such file", "--config"),
    ):
        assert is_failure(run(*command, *options), code, message, hint), options


def plain_layout(forms: dict[str, Form], **more: Any) -> Layout:
    return Layout("the shards", forms, {}, **more)


FORMS = {
    "w": Form("F8_E4M3", (4, 6)),
    "w_scale_inv": Form("F32", (1, 1)),
    "raw": Form("F8_E4M3", (4,)),
    "norm": Form("BF16", (6,)),
}
PLAIN = {"w": Form("BF16", (4, 6)), "raw": Form("F8_E4M3", (4,)), "norm": Form("BF16", (6,))}


def test_what_has_no_scales_is_no_weight_that_is_made() -> None:
    assert plain_forms(FORMS) == PLAIN
    layout = with_rules(plain_layout(PLAIN), FORMS, {})
    assert layout.stored == {"w": PLAIN["w"]} and layout.rules.keys() == {"w", "w_scale_inv"}
    skipped = with_rules(plain_layout(PLAIN, skipped=frozenset({"w"})), FORMS, {})
    assert skipped.skipped == {"w", "w_scale_inv"} and not skipped.rules
    exponents = with_rules(plain_layout(PLAIN), {**FORMS, "w_scale_inv": Form("F8_E8M0", (1, 1))}, {})
    assert exponents.rules["w_scale_inv"].options == {"part": "scale", "power_of_two": True}
    # Other rules stay, and what is stored as the base has it needs none.
    held = {"norm": Form("F32", (6,)), "raw": Form("F8_E4M3", (4,))}
    one = plain_layout(PLAIN, stored=held, rules={"norm": Rule("add-one", "norm")})
    assert with_rules(one, FORMS, {}).rules["norm"] == Rule("add-one", "norm")


@pytest.mark.parametrize(
    ("plain", "forms", "error", "match"),
    [
        (plain_layout({**PLAIN, "more": PLAIN["w"]}), FORMS, DamagedError, "is not of tensors more"),
        (plain_layout({"w": PLAIN["w"]}), FORMS, DamagedError, "lacks tensors norm, raw"),
        (plain_layout({**PLAIN, "w": Form("BF16", (6, 4))}), FORMS, DamagedError, r"w is BF16 \[6, 4\], in the base"),
        (plain_layout({**PLAIN, "w": Form("I16", (4, 6))}), FORMS, UsageError, "fp8-block makes weights and scales of"),
        (plain_layout({**PLAIN, "raw": Form("I8", (4,))}), FORMS, UsageError, "cast makes one of"),
        (plain_layout(PLAIN), {**FORMS, "w_scale_inv": Form("F32", ())}, UnsupportedError, r"w_scale_inv: is F32 \[\]"),
        (plain_layout(PLAIN), {**FORMS, "w_scale_inv": Form("I32", (1, 1))}, UsageError, "scales of F32 or BF16"),
        (
            plain_layout(PLAIN, stored={"w": PLAIN["w"]}, rules={"w": Rule("add-one", "w")}),
            FORMS,
            UnsupportedError,
            "tensor w: is made by add-one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(plain: Layout, forms: dict[str, Form], error: type[DcrError], match: str) -> None:
    with pytest.raises(error, match=match):
        with_rules(plain, forms, {})


def test_a_config_without_quantization_says_nothing() -> None:
    for config in ({}, {"quantization_config": None}, {"quantization_config": {"weight_block_size": None}}):
        assert options_of(config) == {}


@pytest.mark.parametrize("stored", ["BF16", "F32"])
def test_ranks_of_megatron_update_fp8(stored: str, run: Run, tmp_path: Path) -> None:
    """Ranks hold BF16, or masters of it; the base has FP8 weights, and needs no option for that."""
    plain = []
    for version in (0, 1):
        dense = {name: torch.from_numpy(each).view(torch.bfloat16) for name, each in dense_llama(version).items()}
        plain.append({name: each.nan_to_num(1.0, 1.0, -1.0).clamp(-100, 100) for name, each in dense.items()})
    config = json.dumps(LLAMA.config).encode()
    base, target = (write(tmp_path / f"fp8-{version}", with_fp8(each), config) for version, each in enumerate(plain))
    masters = {name: each.float().view(torch.int32).numpy().view("u4") for name, each in plain[1].items()}
    halves = {name: each.view(torch.int16).numpy().view("u2") for name, each in plain[1].items()}
    ranks = write_ranks(tmp_path / "ranks", masters if stored == "F32" else halves)
    options = ("--stored", stored) if stored == "F32" else ()
    layout = tmp_path / "layout.json"
    made = run("layout", "megatron", base, "--tp", 2, "--pp", 2, *options, "-o", layout, "--json").json
    weights = [name for name, shape in LLAMA.shapes.items() if len(shape) > 1 and name.startswith("model.layers")]
    assert made["rules"]["fp8-block"] == 2 * len(weights)
    assert {rule.options.get("through") for rule in read_layout(layout).rules.values() if rule.kind != "cast"} == {
        "BF16" if stored == "F32" else None
    }
    assert run("diff", base, ranks, "--layout", layout, "-o", tmp_path / "delta", "-q").code == 0
    assert run("apply", tmp_path / "delta", base, "-q").code == 0
    assert tree(base) == tree(target)
    odd = megatron_layout(base, fp8={"least_amax": 2}, output=tmp_path / "odd.json")
    assert odd.rules["fp8-block"] == made["rules"]["fp8-block"]
    assert read_layout(tmp_path / "odd.json").rules[weights[0]].options["least_amax"] == 2
