"""The JSON form of a layout (FORMAT 14): decoding, which believes nothing, and encoding.

Whether a layout covers every element is coverage.py's to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.header import DTYPES, MAX_HEADER_BYTES
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import listed, safe_path, shown
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, UnsupportedError, UsageError, hint_of
from dcr_cli.layout.box import Box
from dcr_cli.layout.layout import FILLS, KEEP, Form, Layout, LocalTensor, Placement, Rule
from dcr_cli.layout.residual.rules import check_rules, is_function_name

FORMAT = "dcr-layout-1"
# What a reader has to know to read a layout that has rules.
RULES = "rules"
MAX_LAYOUT_BYTES = 4 * MAX_HEADER_BYTES
# So many bytes of a document may begin a value: each takes memory, many times as much as the byte does.
_MAX_VALUES = 1 << 25
_OPENING = b",[{"
_MAX_COUNT = 1 << 62


def read_layout(path: str | os.PathLike[str], functions: Sequence[str] = ()) -> Layout:
    """Read a layout, whose rules may call `functions`, from a file.

    Raises NotFoundError, LocalError, DamagedError if it is none, UnsupportedError if it needs what is not known here,
    and UsageError where something else is named as a function.
    """
    for name in functions:
        if not is_function_name(name):
            raise UsageError("function", f"module:function expected, found {shown(name)}")
    check_path(path, "layout")
    file = Path(path)
    what = f"layout {file}"
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_LAYOUT_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(what, "no such file", hint="dcr layout --help says how to make one") from error
    except OSError as error:
        raise LocalError(what, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    return replace(decode_layout(data, what), functions=frozenset(functions))


def encode_layout(layout: Layout) -> bytes:
    """The JSON of a layout, a line for each tensor, so that two of them can be compared line by line. UnsupportedError
    if it would be more than a reader takes."""
    requires = [RULES] if layout.rules else []
    lines = ["{", f'"format": {_text(FORMAT)}, "requires": {_text(requires)},']
    lines += ['"tensors": {', *_lines({name: _form(form) for name, form in layout.tensors.items()}), "},"]
    if layout.stored:
        lines += ['"stored": {', *_lines({name: _form(form) for name, form in layout.stored.items()}), "},"]
    if layout.rules:
        lines += ['"rules": {', *_lines({name: _rule(rule) for name, rule in layout.rules.items()}), "},"]
    if layout.skipped:
        lines.append(f'"skipped": {_text(sorted(layout.skipped))},')
    lines.append('"shards": {')
    for number, (path, tensors) in enumerate(layout.shards.items(), 1):
        lines += [f"{_text(path)}: {{", *_lines({name: _local(tensor) for name, tensor in tensors.items()})]
        lines.append("}" if number == len(layout.shards) else "},")
    data = "\n".join([*lines, "}", "}", ""]).encode()
    if (fault := _limit_fault(data)) is not None:
        hint = "boxes with more axes, or layouts of some of the shards, are smaller"
        raise UnsupportedError(layout.what, f"cannot be written: {fault}", hint=hint)
    return data


def _limit_fault(data: bytes) -> str | None:
    """Say which limit of documents is exceeded, if one is."""
    if len(data) > MAX_LAYOUT_BYTES:
        return f"has more than the {MAX_LAYOUT_BYTES} bytes that a layout may have"
    if sum(map(data.count, _OPENING)) > _MAX_VALUES:
        return f"has more than {_MAX_VALUES} values"
    return None


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(members: Mapping[str, object]) -> list[str]:
    lines = [f"{_text(name)}: {_text(member)}" for name, member in members.items()]
    return [line + "," for line in lines[:-1]] + lines[-1:]


def _form(form: Form) -> dict[str, object]:
    return {"dtype": form.dtype, "shape": list(form.shape)}


def _rule(rule: Rule) -> dict[str, object]:
    return {"kind": rule.kind, "of": rule.of, **rule.options}


def _local(tensor: LocalTensor) -> dict[str, object]:
    boxes = [
        [placement.tensor, placement.box.canonical, placement.box.local, [list(axis) for axis in placement.box.axes]]
        for placement in tensor.placements
    ]
    fill = {"fill": tensor.fill} if tensor.fill != KEEP else {}
    return {**_form(tensor.form), **fill, "boxes": boxes}


def decode_layout(data: bytes, what: str) -> Layout:
    """Read a layout; DamagedError if it is malformed, UnsupportedError if it needs what is not known here."""
    if (fault := _limit_fault(data)) is not None:
        raise DamagedError(what, fault)
    document = strict_json(data, what)
    if type(document) is not dict or document.get("format") != FORMAT:
        found = document.get("format") if type(document) is dict else None
        if type(found) is str and found.startswith("dcr-layout-"):
            raise UnsupportedError(what, f"has format {shown(found)}, this dcr reads {FORMAT}")
        raise DamagedError(what, f"its format is not {FORMAT}")
    requires = document.get("requires")
    if type(requires) is not list or not all(type(feature) is str for feature in requires):
        raise DamagedError(what, "requires is not a list of strings")
    if unknown := [feature for feature in requires if feature != RULES]:
        raise UnsupportedError(what, f"requires {listed(unknown)}, unknown to this dcr", hint="it needs a newer dcr")
    tensors = {name: _decode_form(each, what, name) for name, each in _object(document, "tensors", what).items()}
    stored = {name: _decode_form(each, what, name) for name, each in _object(document, "stored", what, {}).items()}
    rules = {name: _decode_rule(each, what, name) for name, each in _object(document, "rules", what, {}).items()}
    skipped = document.get("skipped", [])
    if type(skipped) is not list or not all(type(name) is str for name in skipped):
        raise DamagedError(what, "skipped is not a list of strings")
    _check_names(tensors, stored, rules, skipped, what)
    if rules and RULES not in requires:
        raise DamagedError(what, f"has rules, and does not require {RULES}")
    layout = Layout(what, tensors, {}, frozenset(skipped), stored, rules)
    check_rules(layout)
    forms = layout.forms()
    shards: dict[str, dict[str, LocalTensor]] = {}
    for path, members in _object(document, "shards", what).items():
        safe_path(path, what)
        if type(members) is not dict:
            raise DamagedError(what, f"shard {shown(path)} is not an object of tensors")
        at = f"{what}: {shown(path)}"
        shards[path] = {name: _decode_local(each, forms, at, name) for name, each in members.items()}
        for name, tensor in shards[path].items():
            if placed := next((each.tensor for each in tensor.placements if each.tensor in layout.skipped), None):
                raise DamagedError(at, f"tensor {shown(name)} has elements of {shown(placed)}, which is skipped")
    return Layout(what, tensors, shards, frozenset(skipped), stored, rules)


def _check_names(
    tensors: Mapping[str, Form],
    stored: Mapping[str, Form],
    rules: Mapping[str, Rule],
    skipped: list[str],
    what: str,
) -> None:
    for name in (*rules, *skipped):
        if name not in tensors:
            raise DamagedError(what, f"tensor {shown(name)} is not among its tensors")
    for name, rule in rules.items():
        if rule.of not in stored:
            raise DamagedError(what, f"tensor {shown(name)} is made of {shown(rule.of)}, which is not stored")
    made = {rule.of for rule in rules.values()}
    for name in stored:
        if name not in made:
            raise DamagedError(what, f"no rule makes anything of stored tensor {shown(name)}")
        if name in tensors and name not in rules:
            raise DamagedError(what, f"tensor {shown(name)} is stored as another, and no rule makes it of that")


def _object(document: dict[str, Any], member: str, what: str, default: object = None) -> dict[str, Any]:
    value = document.get(member, default)
    if type(value) is not dict:
        raise DamagedError(what, f"{member} is not an object")
    return value


def _decode_form(member: Any, what: str, name: str) -> Form:
    at = f"{what}: tensor {shown(name)}"
    if type(member) is not dict:
        raise DamagedError(at, "is not described by an object")
    dtype, shape = member.get("dtype"), member.get("shape")
    if type(dtype) is not str or dtype not in DTYPES:
        raise DamagedError(at, "its dtype is none of safetensors")
    if type(shape) is not list or not all(_is_count(number) for number in shape):
        raise DamagedError(at, "its shape is not a list of integers from 0 on")
    elements = 1
    for dimension in shape:
        # A long row of large numbers is not multiplied to its end.
        elements *= dimension
        if elements > _MAX_COUNT:
            raise DamagedError(at, "has more elements than can be counted")
    if elements * DTYPES[dtype].bits % 8:
        raise DamagedError(at, f"{elements} elements of {dtype} do not fill whole bytes")
    return Form(dtype, tuple(shape))


def _decode_rule(member: Any, what: str, name: str) -> Rule:
    at = f"{what}: rule of tensor {shown(name)}"
    if type(member) is not dict:
        raise DamagedError(at, "is not an object")
    kind, of = member.get("kind"), member.get("of")
    if type(kind) is not str or type(of) is not str:
        raise DamagedError(at, "has no kind, or does not say of which tensor")
    return Rule(kind, of, {key: value for key, value in member.items() if key not in ("kind", "of")})


def _decode_local(member: Any, forms: Mapping[str, Form], what: str, name: str) -> LocalTensor:
    form = _decode_form(member, what, name)
    at = f"{what}: tensor {shown(name)}"
    fill = member.get("fill", KEEP)
    if fill not in FILLS:
        raise DamagedError(at, f"its fill is none of {', '.join(FILLS)}")
    boxes = member.get("boxes")
    if type(boxes) is not list:
        raise DamagedError(at, "has no list of boxes")
    placements = []
    for number, box in enumerate(boxes):
        try:
            placements.append(_decode_box(box, form, forms))
        except ValueError as error:
            raise DamagedError(at, f"box {number} {error}") from error
    return LocalTensor(form, tuple(placements), fill)


def _decode_box(member: Any, local: Form, forms: Mapping[str, Form]) -> Placement:
    """Read a box; ValueError says what is wrong with it."""
    if type(member) is not list or len(member) != 4:
        raise ValueError("is not a list of tensor, canonical offset, local offset and axes")
    name, canonical, offset, axes = member
    form = forms.get(name) if type(name) is str else None
    if form is None:
        known = f"{shown(name)}, which is" if type(name) is str else "what is"
        raise ValueError(f"is of {known} no tensor of the layout")
    are_axes = type(axes) is list and all(
        type(axis) is list and len(axis) == 3 and all(map(_is_count, axis)) for axis in axes
    )
    if not (_is_count(canonical) and _is_count(offset) and are_axes):
        raise ValueError(f"of {shown(name)} is not made of integers from 0 on")
    try:
        box = Box.make([(count, stride, step) for count, stride, step in axes], canonical, offset)
    except ValueError as error:
        raise ValueError(f"of {shown(name)} is none: {error}") from error
    if box.canonical_end > form.elements or box.local_end > local.elements:
        facts = f"of {shown(name)} ends at element {box.canonical_end} of {form.elements}, here at {box.local_end}"
        raise ValueError(f"{facts} of {local.elements}")
    if DTYPES[form.dtype] != DTYPES[local.dtype]:
        raise ValueError(f"of {shown(name)} is {form.dtype}, the local tensor {local.dtype}")
    return Placement(name, box)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
