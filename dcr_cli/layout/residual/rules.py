"""The kinds of residual rules, the options of each, and the forms that they go between (FORMAT 14.3). Pure.

    cast          each element, in another dtype (floats.py). Of F64, F32, F16, BF16, to another of these. No options.
    add-one       each element + 1, computed in F32 and then cast. Of F32, F16 or BF16, to one of these.
    subtract-one  the same with - 1.
    fp8-block     blocks of a matrix as F8_E4M3, and their scales (quantize.py). Of F32, F16 or BF16, of shape [rows,
                  columns] or, each expert for itself, [experts, rows, columns]. Of its two rules one makes the weight,
                  F8_E4M3 of the same shape, the other the scales: F32, BF16 or, if scales are powers of two, F8_E8M0,
                  of shape [ceil(rows / height), ceil(columns / width)], after experts if there are.
    fp8-channel   the same with a block for each row; scales have shape [rows, 1], after experts if there are.
    python        what a named function returns (function.py). Of any dtype that fills bytes, to any other.

Options, with what they are where they are left out:

    part          fp8: "weight" or "scale", which of both is made; always given
    block         fp8-block: [height, width] of a block; [128, 128]
    formula       fp8: how a weight is made, "x / s", "x * (1 / s)" or "x * (448 / a)"; "x / s"
    least_amax    fp8: a block's largest magnitude counts as no less; 0
    power_of_two  fp8: whether scales are powers of two; false
    through       fp8, add-one, subtract-one: "BF16" or "F16", to which the elements, then F32, are cast first; none
    function      python: "module:function"; always given

Whether a function may be called is function.py's to say, reading through rules sources.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.layout import Form, Layout, Rule
from dcr_cli.layout.residual.floats import FLOATS, Elements, cast, from_float32
from dcr_cli.layout.residual.quantize import FORMULAS, QUOTIENT, Recipe, values_of

WEIGHT, SCALE = PARTS = ("weight", "scale")
# What masters may be rounded to before anything else.
HALVES = ("F16", "BF16")
_SINGLES = ("F32", "F16", "BF16")
_SCALES = ("F32", "BF16", "F8_E8M0")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_MOST_BLOCK = 1 << 32
_MOST_AMAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Makes each element of the stored one at its place. `added` is None for a mere cast."""

    stored: str
    canonical: str
    added: int | None = None
    through: str | None = None

    def convert(self, bits: Elements) -> Elements:
        if self.added is None:
            return cast(bits, self.stored, self.canonical)
        with np.errstate(over="ignore", invalid="ignore"):
            values = values_of(bits, self.stored, self.through) + np.float32(self.added)
        return from_float32(values, self.canonical)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Makes the weights or the scales of blocks of matrices."""

    part: str
    canonical: str
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Named:
    """Calls a function."""

    function: str


Conversion = Elementwise | Quantized | Named


def check_rules(layout: Layout) -> None:
    """Raise DamagedError or UnsupportedError unless every rule is one that can be followed."""
    for name in layout.rules:
        conversion_of(name, layout)


def conversion_of(name: str, layout: Layout) -> Conversion:
    """Read the rule that makes canonical tensor `name`.

    UnsupportedError where its kind is unknown; DamagedError where its options, or the forms of both tensors, are not of
    it.
    """
    rule = layout.rules[name]
    at = f"{layout.what}: rule of tensor {shown(name)}"
    decode = _KINDS.get(rule.kind)
    if decode is None:
        known = ", ".join(_KINDS)
        raise UnsupportedError(at, f"is of kind {shown(rule.kind)}, unknown to this dcr", hint=f"it knows {known}")
    stored, canonical = layout.stored[rule.of], layout.tensors[name]
    options = _Options(rule, at)
    conversion = decode(options, stored, canonical)
    options.end()
    return conversion


class _Options:
    """The options of a rule, which are taken one by one."""

    def __init__(self, rule: Rule, at: str) -> None:
        self.kind, self.of = rule.kind, rule.of
        self.at = at
        self._left = dict(rule.options)

    def take(self, name: str, default: Any, *, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """The option, or `default`, which is None for one that has to be there."""
        value = self._left.pop(name, default)
        if value is None or not is_valid(value):
            found = "missing" if value is None else shown(json.dumps(value, ensure_ascii=False, default=str))
            raise DamagedError(self.at, f"option {name}: {expected} expected, found {found}")
        return value

    def one_of(self, name: str, default: str | None, choices: tuple[str, ...]) -> str:
        expected = "one of " + ", ".join(map(json.dumps, choices))
        found: str = self.take(
            name, default, is_valid=lambda value: type(value) is str and value in choices, expected=expected
        )
        return found

    def through(self, stored: Form) -> str | None:
        """The dtype that elements are cast to before."""
        if "through" not in self._left:
            return None
        if stored.dtype != "F32":
            raise DamagedError(self.at, f"option through: of F32 expected, but {shown(self.of)} is {stored.dtype}")
        return self.one_of("through", None, HALVES)

    def end(self) -> None:
        if self._left:
            raise DamagedError(self.at, f"options unknown to kind {self.kind}: {listed(sorted(self._left))}")

    def refuse_unless(self, fits: bool, stored: Form, canonical: Form, expected: str) -> None:
        """Raise DamagedError where the forms do not fit the kind."""
        if not fits:
            facts = f"{self.kind} makes {expected}, not {canonical} of {shown(self.of)}, which is {stored}"
            raise DamagedError(self.at, facts)


def _decode_cast(options: _Options, stored: Form, canonical: Form) -> Conversion:
    fits = stored.dtype in FLOATS and canonical.dtype in FLOATS and stored.dtype != canonical.dtype
    expected = f"one of {', '.join(FLOATS)} of another of them, in the same shape"
    options.refuse_unless(fits and stored.shape == canonical.shape, stored, canonical, expected)
    return Elementwise(stored.dtype, canonical.dtype)


def _decode_added(options: _Options, stored: Form, canonical: Form) -> Conversion:
    fits = stored.dtype in _SINGLES and canonical.dtype in _SINGLES and stored.shape == canonical.shape
    expected = f"one of {', '.join(_SINGLES)} of one of them, in the same shape"
    options.refuse_unless(fits, stored, canonical, expected)
    added = 1 if options.kind == "add-one" else -1
    return Elementwise(stored.dtype, canonical.dtype, added, options.through(stored))


def _decode_block(options: _Options, stored: Form, canonical: Form) -> Conversion:
    height, width = options.take(
        "block", [128, 128], is_valid=_is_block, expected=f"[height, width], integers from 1 to {_MOST_BLOCK}"
    )
    return _decode_quantized(options, stored, canonical, (height, width))


def _decode_channel(options: _Options, stored: Form, canonical: Form) -> Conversion:
    return _decode_quantized(options, stored, canonical, (1, max(stored.shape[-1:], default=1) or 1))


def _decode_quantized(options: _Options, stored: Form, canonical: Form, block: tuple[int, int]) -> Conversion:
    is_matrix = stored.dtype in _SINGLES and len(stored.shape) in (2, 3) and stored.elements > 0
    expected = f"weights and scales of matrices of {', '.join(_SINGLES)}"
    options.refuse_unless(is_matrix, stored, canonical, expected)
    part = options.one_of("part", None, PARTS)
    is_power_of_two: bool = options.take(
        "power_of_two", False, is_valid=lambda value: type(value) is bool, expected="true or false"
    )
    recipe = Recipe(
        stored.dtype,
        options.through(stored),
        block,
        options.one_of("formula", QUOTIENT, FORMULAS),
        float(options.take("least_amax", 0, is_valid=_is_magnitude, expected="a number from 0 on that F32 can hold")),
        is_power_of_two,
    )
    *experts, rows, columns = stored.shape
    if part == WEIGHT:
        fits, expected = canonical == Form("F8_E4M3", stored.shape), f"a weight of {Form('F8_E4M3', stored.shape)}"
    else:
        shape = (*experts, -(-rows // block[0]), -(-columns // block[1]))
        dtypes = _SCALES if is_power_of_two else _SCALES[:2]
        fits = canonical.shape == shape and canonical.dtype in dtypes
        expected = f"scales of {' or '.join(dtypes)} {list(shape)}"
    options.refuse_unless(fits, stored, canonical, expected)
    return Quantized(part, canonical.dtype, recipe)


def _decode_python(options: _Options, stored: Form, canonical: Form) -> Conversion:
    fits = not any(DTYPES[form.dtype].is_packed for form in (stored, canonical))
    options.refuse_unless(fits, stored, canonical, "tensors of dtypes that fill bytes")
    function = options.take("function", None, is_valid=is_function_name, expected='"module:function"')
    return Named(function)


def is_function_name(value: object) -> bool:
    """Whether it names a function of a module."""
    return type(value) is str and _FUNCTION.fullmatch(value) is not None


def _is_block(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and all(type(number) is int and 1 <= number <= _MOST_BLOCK for number in value)
    )


def _is_magnitude(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_AMAX


_KINDS: Mapping[str, Callable[[_Options, Form, Form], Conversion]] = {
    "cast": _decode_cast,
    "add-one": _decode_added,
    "subtract-one": _decode_added,
    "fp8-block": _decode_block,
    "fp8-channel": _decode_channel,
    "python": _decode_python,
}
