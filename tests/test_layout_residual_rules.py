"""FORMAT.md 14.3: its arithmetic once more, in fractions, and rules 135 to 139, each broken in something valid."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli.errors import DcrError
from dcr_cli.layout.document import decode_layout, read_layout
from dcr_cli.layout.opening import open_any
from layouts import layout_bytes
from strategies import shard_bytes

# Fraction bits, the exponent of the least normal number, and bytes.
FLOATS = {"F64": (52, -1022, 8), "F32": (23, -126, 4), "F16": (10, -14, 2), "BF16": (7, -126, 2)}
LETTERS = {"F64": "d", "F32": "f", "F16": "e"}
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
NANS = {"F64": 0x7FF8000000000000, "F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}
ROWS, COLUMNS = 5, 7


# The text, once more: a number is a float, which holds one of any dtype here exactly


def rounded(value: Fraction, bits: int, least: int) -> Fraction:
    """The nearest number of so many fraction bits; round() takes the even one of two."""
    if not value:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - bits)
    return round(value / unit) * unit


def cast_to(value: float, dtype: str) -> float:
    """A number in a dtype."""
    if not math.isfinite(value):
        return value
    bits, least, _ = FLOATS[dtype]
    found = rounded(Fraction(value), bits, least)
    if abs(found) >= Fraction(2) ** (2 - least):
        return math.copysign(math.inf, value)
    return math.copysign(float(abs(found)), value)


def as_f32(value: Fraction) -> float:
    return float(rounded(value, *FLOATS["F32"][:2]))


def divided(one: float, other: float) -> float:
    if math.isinf(one) or math.isnan(one) or not math.isfinite(other):
        return math.nan if math.isinf(one) == math.isinf(other) or math.isnan(one + other) else one / other
    return math.copysign(as_f32(abs(Fraction(one) / Fraction(other))), one)


def times(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one * other
    return math.copysign(as_f32(abs(Fraction(one) * Fraction(other))), one)


def encode(value: float, dtype: str) -> int:
    """The bits of a number that is one of a dtype."""
    if math.isnan(value):
        return NANS[dtype]
    if dtype == "BF16":
        return encode(value, "F32") >> 16
    letter, width = LETTERS[dtype], FLOATS[dtype][2]
    return int.from_bytes(struct.pack(f"<{letter}", value), "little") & (1 << 8 * width) - 1


def decode(bits: int, dtype: str) -> float:
    """The number that bits of a dtype are."""
    if dtype == "BF16":
        return decode(bits << 16, "F32")
    return float(struct.unpack(f"<{LETTERS[dtype]}", bits.to_bytes(FLOATS[dtype][2], "little"))[0])


def as_e4m3(value: float) -> int:
    if math.isnan(value):
        return 0x7F
    sign = (math.copysign(1, value) < 0) << 7
    magnitude = min(rounded(Fraction(min(abs(value), 1e9)), 3, -6), Fraction(448))
    return sign | next(code for code in range(0x7F) if e4m3_value(code) == magnitude)


def e4m3_value(code: int) -> Fraction:
    exponent, fraction = code >> 3, code & 7
    return Fraction(fraction + (8 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 10)


def blocks_of(values: list[list[float]], options: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Weights and scales of a matrix."""
    height, width = options.get("block", [128, 128])
    weights = [[0] * len(values[0]) for _ in values]
    scales = []
    for top in range(0, len(values), height):
        scales.append(list[float]())
        for left in range(0, len(values[0]), width):
            places = [
                (row, column)
                for row in range(top, min(top + height, len(values)))
                for column in range(left, min(left + width, len(values[0])))
            ]
            numbers = [values[row][column] for row, column in places]
            largest = max([*map(abs, numbers), cast_to(options.get("least_amax", 0), "F32")])
            if any(map(math.isnan, numbers)):
                largest = math.nan
            if divided(largest, 448.0) < 2.0**-126:
                largest = 448.0
            scale = divided(largest, 448.0)
            if options.get("power_of_two") and math.isfinite(scale):
                scale = next(2.0**power for power in range(-126, 128) if 2.0**power >= scale)
            for (row, column), x in zip(places, numbers, strict=True):
                made = {
                    "x / s": divided(x, scale),
                    "x * (1 / s)": times(x, divided(1.0, scale)),
                    "x * (448 / a)": times(x, divided(448.0, largest)),
                }
                weights[row][column] = as_e4m3(made[options.get("formula", "x / s")])
            scales[-1].append(scale)
    return weights, scales


# Against what is read


@dataclass(frozen=True)
class Stored:
    """A stored tensor, by its bits."""

    dtype: str
    shape: list[int]
    bits: list[int]


def through(root: Path, held: Stored, made: dict[str, Any], functions: Sequence[str] = ()) -> dict[str, list[int]]:
    """What rules make of a stored tensor, by name; `made` are forms with rules."""
    width = WIDTHS[held.dtype]
    data = b"".join(each.to_bytes(width, "little") for each in held.bits)
    (root / "ranks").mkdir()
    (root / "ranks" / "rank-0.safetensors").write_bytes(shard_bytes({"w": (held.dtype, tuple(held.shape), data)}))
    form = {"dtype": held.dtype, "shape": held.shape}
    document = {
        "format": "dcr-layout-1",
        "requires": ["rules"],
        "tensors": {name: {"dtype": dtype, "shape": size} for name, (dtype, size, _) in made.items()},
        "stored": {"w": form},
        "rules": {name: {"of": "w", **rule} for name, (_, _, rule) in made.items()},
        "shards": {"rank-0.safetensors": {"w": {**form, "boxes": [["w", 0, 0, [[len(held.bits), 1, 1]]]]}}},
    }
    (root / "layout.json").write_bytes(layout_bytes(document))
    laid = open_any(root / "ranks", layout=read_layout(root / "layout.json", functions))
    found = {}
    with laid.reader() as reader:
        for name, (dtype, _, _) in made.items():
            tensor = laid.by_name[name]
            read = bytearray(tensor.bytes)
            reader.read_into(tensor, 0, read)
            width = WIDTHS[dtype]
            found[name] = [int.from_bytes(read[at : at + width], "little") for at in range(0, len(read), width)]
    return found


def numbers_of(dtype: str) -> list[int]:
    """Bits of a dtype: zeros, infinities, NaNs, subnormal and largest numbers, ties, and random ones."""
    _, _, width = FLOATS[dtype]
    random = np.random.default_rng(3)
    found = [int.from_bytes(random.bytes(width), "little") for _ in range(400)]
    one = encode(1.0, dtype)
    for other in FLOATS:
        last = FLOATS[other][0]
        for value in (1.0, 1.0 + 2.0**-last, 1.0 + 3 * 2.0 ** -(last + 1), 1.0 + 2.0 ** -(last + 1), 2.0**-140):
            found += [encode(cast_to(value, dtype), dtype) + near for near in (-1, 0, 1)]
    half = 1 << (8 * width - 1)
    infinity = encode(math.inf, dtype)
    found += [0, 1, 2, infinity - 1, infinity, infinity + 1, NANS[dtype], one]
    return [each | sign for each in found if 0 <= each < half for sign in (0, half)]


@pytest.mark.parametrize("stored", FLOATS)
def test_casts_are_what_the_text_says(tmp_path: Path, stored: str) -> None:
    bits = numbers_of(stored)
    made = {dtype: (dtype, [len(bits)], {"kind": "cast"}) for dtype in FLOATS if dtype != stored}
    for dtype, found in through(tmp_path, Stored(stored, [len(bits)], bits), made).items():
        for each, is_found in zip(bits, found, strict=True):
            value = decode(each, stored)
            if stored == "F64" and dtype in ("F16", "BF16"):
                value = cast_to(value, "F32")
            expected = each << 16 if (stored, dtype) == ("BF16", "F32") else encode(cast_to(value, dtype), dtype)
            assert is_found == expected, (hex(each), dtype)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("halves", [None, "F16", "BF16"])
def test_ones_are_added_as_the_text_says(tmp_path: Path, stored: str, halves: str | None) -> None:
    if halves is not None and stored != "F32":
        return
    bits = numbers_of(stored)
    option = {"through": halves} if halves is not None else {}
    made = {
        f"{kind} {dtype}": (dtype, [len(bits)], {"kind": kind, **option})
        for kind in ("add-one", "subtract-one")
        for dtype in ("F32", "F16", "BF16")
    }
    for name, found in through(tmp_path, Stored(stored, [len(bits)], bits), made).items():
        kind, dtype = name.split()
        for each, is_found in zip(bits, found, strict=True):
            value = cast_to(decode(each, stored), halves or "F32")
            if math.isfinite(value):
                value = as_f32(Fraction(value) + (1 if kind == "add-one" else -1))
            assert is_found == encode(cast_to(value, dtype), dtype), (hex(each), name)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"formula": "x * (1 / s)", "block": [2, 3]},
    {"formula": "x * (448 / a)", "block": [1, 4], "power_of_two": True},
    {"block": [3, 2], "power_of_two": True, "least_amax": 0.3},
    {"formula": "x * (1 / s)", "block": [2, 7], "least_amax": 1e-30, "power_of_two": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("stored", "halves"), [("F32", None), ("F32", "BF16"), ("F32", "F16"), ("BF16", None), ("F16", None)]
)
@pytest.mark.parametrize("odd", [0.0, math.inf, -math.inf, math.nan])
def test_blocks_are_what_the_text_says(
    tmp_path: Path, options: dict[str, Any], stored: str, halves: str | None, odd: float
) -> None:
    random = np.random.default_rng(5)
    values = random.standard_normal((ROWS, COLUMNS)) * 2.0 ** random.integers(-10, 6, (ROWS, COLUMNS))
    values[2:4, :4] = 0
    values[1, 5] = odd
    values[4, :2] = -0.0, 2.0**-140
    held = [[cast_to(float(value), stored) for value in row] for row in values]
    bits = [encode(value, stored) for row in held for value in row]
    numbers = [[cast_to(value, halves or "F32") for value in row] for row in held]
    given = {"kind": "fp8-block", **options, **({"through": halves} if halves is not None else {})}
    height, width = options.get("block", [128, 128])
    size = [-(-ROWS // height), -(-COLUMNS // width)]
    dtypes = ["F32", "BF16", *(["F8_E8M0"] if options.get("power_of_two") else [])]
    made = {dtype: (dtype, size, {**given, "part": "scale"}) for dtype in dtypes}
    made["weight"] = ("F8_E4M3", [ROWS, COLUMNS], {**given, "part": "weight"})
    found = through(tmp_path, Stored(stored, [ROWS, COLUMNS], bits), made)
    weights, scales = blocks_of(numbers, options)
    assert found["weight"] == [each for row in weights for each in row]
    for dtype in ("F32", "BF16"):
        assert found[dtype] == [encode(cast_to(each, dtype), dtype) for row in scales for each in row]
    if "F8_E8M0" in made:
        exponents = [encode(each, "F32") >> 23 if math.isfinite(each) else 0xFF for row in scales for each in row]
        assert found["F8_E8M0"] == exponents


@pytest.mark.parametrize("formula", ["x / s", "x * (1 / s)", "x * (448 / a)"])
def test_the_smallest_blocks_are_what_the_text_says(tmp_path: Path, formula: str) -> None:
    """What `a` is where it comes to, and stays below, the least for which s is a normal number."""
    values = [448 * 2.0**-126, 447.9 * 2.0**-126, 224 * 2.0**-126, 2.0**-149, 448 * 2.0**-126 + 2.0**-140, 0.0, -0.0]
    values = [cast_to(value, "F32") for value in values]
    options = {"formula": formula, "block": [1, 1]}
    given = {"kind": "fp8-block", **options}
    made = {
        "scale": ("F32", [1, COLUMNS], {**given, "part": "scale"}),
        "weight": ("F8_E4M3", [1, COLUMNS], {**given, "part": "weight"}),
    }
    found = through(tmp_path, Stored("F32", [1, COLUMNS], [encode(value, "F32") for value in values]), made)
    weights, scales = blocks_of([values], options)
    assert found["weight"] == weights[0]
    assert found["scale"] == [encode(each, "F32") for each in scales[0]]
    assert 1.0 in scales[0] and 2.0**-126 in scales[0]


def test_rows_are_blocks_of_channels(tmp_path: Path) -> None:
    values = [[float(row + column - 5) for column in range(COLUMNS)] for row in range(2 * ROWS)]
    bits = [encode(value, "BF16") for row in values for value in row]
    made = {
        "scale": ("F32", [2, ROWS, 1], {"kind": "fp8-channel", "part": "scale"}),
        "weight": ("F8_E4M3", [2, ROWS, COLUMNS], {"kind": "fp8-channel", "part": "weight"}),
    }
    found = through(tmp_path, Stored("BF16", [2, ROWS, COLUMNS], bits), made)
    weights, scales = blocks_of(values, {"block": [1, COLUMNS]})
    assert found["weight"] == [each for row in weights for each in row]
    assert found["scale"] == [encode(each, "F32") for row in scales for each in row]


# Rules


def refused(rule: Any, match: str, code: int = 4, **forms: Any) -> None:
    """A layout with a rule is refused; `forms` are those of the tensor that is made, and of the stored one."""
    document = {
        "format": "dcr-layout-1",
        "requires": ["rules"],
        "tensors": {"c": {"dtype": "F8_E4M3", "shape": [256, 200], **forms.get("made", {})}},
        "stored": {"w": {"dtype": "F32", "shape": [256, 200], **forms.get("stored", {})}},
        "rules": {"c": rule},
        "shards": {},
    }
    with pytest.raises(DcrError, match=match) as caught:
        decode_layout(layout_bytes(document), "layout L")
    assert caught.value.exit_code == code and caught.value.what == "layout L: rule of tensor c"


WEIGHT = {"kind": "fp8-block", "of": "w", "part": "weight"}


def test_rule_135_a_rule_has_a_kind_that_is_known() -> None:
    refused([], "is not an object")
    refused({"kind": 1, "of": "w"}, "has no kind, or does not say of which tensor")
    refused({"kind": "cast"}, "has no kind, or does not say of which tensor")
    refused({"kind": "int4-group", "of": "w"}, "is of kind int4-group, unknown to this dcr", code=8)


def test_rule_136_options_are_those_of_the_kind() -> None:
    refused({**WEIGHT, "round": "up"}, "options unknown to kind fp8-block: round")
    refused({**WEIGHT, "kind": "fp8-channel", "block": [1, 200]}, "options unknown to kind fp8-channel: block")
    refused({"kind": "cast", "of": "w", "through": "F16"}, "options unknown", made={"dtype": "BF16"})
    refused({"kind": "fp8-block", "of": "w"}, "option part: .* found missing")
    refused({"kind": "python", "of": "w"}, "option function: .* found missing")
    for name, values in {
        "part": ["weights", 1],
        "block": [[128], [128, 0], [True, 128], [128, 2**32 + 1], 128],
        "formula": ["x/s", 0],
        "least_amax": [-1, 1e39, True, "0"],
        "power_of_two": [1, "true"],
        "through": ["F32", True],
    }.items():
        for value in values:
            refused({**WEIGHT, name: value}, f"option {name}: .* expected, found")
    for value in (
        "system",
        "os.system",
        "os:",
        ":system",
        "1os:system",
        "os:system()",
        "os..path:join",
        "\u00f6s:f",
        7,
    ):
        refused({"kind": "python", "of": "w", "function": value}, "option function: .* expected, found")


def test_rule_137_only_masters_go_through_another_dtype() -> None:
    for dtype in ("F16", "BF16"):
        refused({**WEIGHT, "through": "BF16"}, "option through: of F32 expected", stored={"dtype": dtype})


def test_rule_138_forms_are_as_the_kind_says() -> None:
    refused({"kind": "cast", "of": "w"}, "cast makes one of F64, F32, F16, BF16")
    refused({"kind": "cast", "of": "w"}, "cast makes one of", made={"dtype": "F32"})
    refused({"kind": "cast", "of": "w"}, "in the same shape", made={"dtype": "BF16", "shape": [200, 256]})
    for kind in ("add-one", "subtract-one"):
        refused({"kind": kind, "of": "w"}, f"{kind} makes one of F32, F16, BF16", made={"dtype": "F64"})
    refused(WEIGHT, "weights and scales of matrices", stored={"dtype": "F64"})
    refused(WEIGHT, "weights and scales of matrices", stored={"shape": [2, 2, 2, 2]})
    refused(WEIGHT, "weights and scales of matrices", stored={"shape": [0, 200]})
    refused(WEIGHT, "makes a weight of", made={"dtype": "F8_E5M2"})
    refused(WEIGHT, "makes a weight of", made={"shape": [200, 256]})
    scale = {**WEIGHT, "part": "scale"}
    refused(scale, r"scales of F32 or BF16 \[2, 2\]", made={"dtype": "F8_E8M0", "shape": [2, 2]})
    refused(scale, r"scales of F32 or BF16 \[2, 2\]", made={"dtype": "F32", "shape": [2, 1]})
    refused({**scale, "kind": "fp8-channel"}, r"\[256, 1\]", made={"dtype": "F32", "shape": [256]})
    refused({"kind": "python", "of": "w", "function": "a:b"}, "dtypes that fill bytes", made={"dtype": "F4"})


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rule_functions.py").write_text(
        "import numpy as np\n"
        "def halves(given):\n    return (given >> 16).astype(np.uint16)\n"
        "def upper(given):\n    return (given.view(np.uint32) >> 16).astype(np.uint16)\n"
        "def longer(given):\n    return np.zeros(9, np.uint16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rule_functions", raising=False)
    return "rule_functions"


def test_rule_139_functions_are_allowed_and_make_the_tensor(tmp_path: Path, own_module: str) -> None:
    bits = [encode(float(number), "F32") for number in range(6)]

    def made(function: str, *allowed: str) -> list[int]:
        given = {"kind": "python", "function": f"{own_module}:{function}"}
        root = tmp_path / f"{function}-{len(allowed)}"
        root.mkdir()
        names = [f"{own_module}:{name}" for name in allowed]
        return through(root, Stored("F32", [2, 3], bits), {"c": ("BF16", [2, 3], given)}, names)["c"]

    assert made("upper", "upper") == [each >> 16 for each in bits]
    for function, allowed, match, code in (
        ("upper", (), "nobody has allowed to be called", 8),
        ("none", ("none",), "has no function of that name", 2),
        ("halves", ("halves",), "its function failed: TypeError", 8),
        ("longer", ("longer",), r"made uint16 \[9\], uint16 \[2, 3\] expected for BF16", 8),
    ):
        with pytest.raises(DcrError, match=match) as caught:
            made(function, *allowed)
        assert caught.value.exit_code == code
