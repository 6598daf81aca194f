"""Layouts to checkpoints with FP8 weights from shards of weights that are none: which tensors those are, and the rules
that make them and their scales. Pure.

The arithmetic is residual/'s. Where shards hold F32, masters are meant, and rounded to BF16 before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError, UsageError
from dcr_cli.layout.layout import Form, Layout, Rule
from dcr_cli.layout.residual.rules import SCALE, WEIGHT, check_rules

CAST = "cast"
FP8_OPTIONS = ("block", "formula", "least_amax", "power_of_two", "through")
_QUANTIZED, _PLAIN = "F8_E4M3", "BF16"
# What scales are called, after the name of their weight.
_SUFFIXES = ("_scale_inv", "_scale")
_BLOCK = [128, 128]
_ARITHMETIC = "are these the options that the FP8 checkpoint was made with, and the dtypes that shards have?"


def plain_forms(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The forms of the same model without FP8: weights that have scales are BF16, and there are no scales."""
    scales = _scales(forms)
    plain = {name: Form(_PLAIN, form.shape) if name in scales else form for name, form in forms.items()}
    return {name: form for name, form in plain.items() if name not in scales.values()}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of rules that follow from the quantization_config of a config.json, if it has one."""
    known = config.get("quantization_config")
    if not isinstance(known, Mapping):
        return {}
    found = {}
    if known.get("weight_block_size") is not None:
        found["block"] = known["weight_block_size"]
    if known.get("scale_fmt") == "ue8m0":
        found["power_of_two"] = True
    return found


def with_rules(plain: Layout, forms: Mapping[str, Form], options: Mapping[str, Any]) -> Layout:
    """The layout that leads from the shards of `plain`, whose tensors are of the same model without FP8, to tensors
    of these forms; those of other dtypes are cast.

    DamagedError where the two are not of one model. UnsupportedError where no rule is known that makes scales of that
    shape, UsageError where options, or dtypes of shards, are not those of one.
    """
    if unknown := sorted(options.keys() - set(FP8_OPTIONS)):
        raise UsageError(f"option {shown(unknown[0])}", f"is none of FP8 weights: {', '.join(FP8_OPTIONS)}")
    scales = _scales(forms)
    expected = plain_forms(forms)
    for what, names in (("lacks", expected.keys() - plain.tensors), ("is not of", plain.tensors.keys() - expected)):
        if names:
            raise DamagedError(plain.what, f"{what} tensors {listed(sorted(names))}", hint="are both of one model?")
    stored: dict[str, Form] = {}
    rules: dict[str, Rule] = {}
    for name, form in plain.tensors.items():
        own = plain.rules.get(name)
        if name in plain.skipped and own is None:
            continue
        if form.shape != expected[name].shape:
            raise DamagedError(plain.what, f"tensor {shown(name)} is {form}, in the base it is {forms[name]}")
        if name in scales or form != forms[name]:
            held = _held(name, plain)
            of = own.of if own is not None else name
            stored[of] = held
            made = _quantized(forms, (name, scales[name]), held, options) if name in scales else {name: (CAST, {})}
            rules |= {each: Rule(kind, of, given) for each, (kind, given) in made.items()}
        elif own is not None:
            stored[own.of], rules[name] = plain.stored[own.of], own
    skipped = plain.skipped | {scales[name] for name in plain.skipped if name in scales}
    layout = replace(plain, tensors=forms, skipped=skipped, stored=stored, rules=rules)
    try:
        check_rules(layout)
    except DamagedError as error:
        raise UsageError(error.what, error.facts, hint=_ARITHMETIC) from error
    return layout


def _scales(forms: Mapping[str, Form]) -> dict[str, str]:
    """The scales of each FP8 weight that has some."""
    weights = (name for name, form in forms.items() if form.dtype == _QUANTIZED)
    found = {name: next((name + end for end in _SUFFIXES if name + end in forms), None) for name in weights}
    return {name: scale for name, scale in found.items() if scale is not None}


def _held(name: str, plain: Layout) -> Form:
    """What shards hold of a tensor that another one is made of now."""
    own = plain.rules.get(name)
    if own is None:
        return plain.tensors[name]
    if own.kind != CAST or name in plain.skipped:
        facts = f"is made by {own.kind} of what shards hold, or skipped, and no other rule can be of that"
        raise UnsupportedError(f"{plain.what}: tensor {shown(name)}", facts)
    return plain.stored[own.of]


def _quantized(
    forms: Mapping[str, Form], pair: tuple[str, str], held: Form, options: Mapping[str, Any]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """The kind and the options of the rules of a weight and of its scales."""
    weight, scale = pair
    kind, given = _kind(forms[weight], forms[scale], scale, options.get("block", _BLOCK))
    given |= {name: value for name, value in options.items() if name not in ("block", "through")}
    if held.dtype == "F32":
        given["through"] = options.get("through", _PLAIN)
    if forms[scale].dtype == "F8_E8M0":
        given["power_of_two"] = True
    return {weight: (kind, {"part": WEIGHT, **given}), scale: (kind, {"part": SCALE, **given})}


def _kind(weight: Form, scale: Form, name: str, block: Any) -> tuple[str, dict[str, Any]]:
    """Which blocks scales of that shape are of."""
    *experts, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    try:
        height, width = map(int, block)
        blocks = (*experts, -(-rows // height), -(-columns // width))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        facts = f"[height, width] expected, found {shown(str(block))}"
        raise UsageError("option block", facts, hint="such as [128, 128]") from error
    if scale.shape == blocks:
        return "fp8-block", {"block": [height, width]} if [height, width] != _BLOCK else {}
    if scale.shape == (*experts, rows, 1):
        return "fp8-channel", {}
    facts = f"is {scale}, of a weight {weight}: neither of blocks of [{height}, {width}] nor of rows"
    hint = f"--fp8 block=[HEIGHT,WIDTH] says which blocks they are of, of rows they are {[*experts, rows, 1]}"
    raise UnsupportedError(f"tensor {shown(name)}", facts, hint=hint)
