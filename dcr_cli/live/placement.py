"""Where a module holds what of a checkpoint, by what its own loader was seen to do: values, and their saved form.

How it is found out is probing.py's matter.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.digest import blake3_text, object_digest
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.durable import NEW_FILE_MODE, open_folder
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, UnsupportedError, UsageError, hint_of
from dcr_cli.layout.box import Box, Patience, meetings
from dcr_cli.layout.document import MAX_LAYOUT_BYTES, decode_layout, encode_layout
from dcr_cli.layout.layout import Form, Layout, Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.live.marks import AT_ONCE, Flags, Marks
from dcr_cli.live.memory import View

FORMAT = "dcr-placement-2"
# A box of as few steps along its longest stride is taken step by step.
_FEW_STEPS = 16
# More elements are not in all stretches together of which a loader makes something.
_MOST_MADE = 1 << 40
_SAVED = "save_layout of a receiver writes one"
_LEARN_AGAIN = "it is learnt again where there is none"
_HEAD, _HEAD_END = b'{"blake3": "', b'",\n'


class Product(NamedTuple):
    """What a loader makes in a stretch: of which of the groups of a placement, which elements loads have shown to be
    made, and whether others there change by themselves."""

    group: int
    marks: Marks
    is_restless: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Which boxes of which stretches of a module are which canonical tensors, as the only shard of `layout`.

    `loaded` are groups of canonical tensors that the loader makes something else of: where one of a group changes, all
    of it goes through the loader. `key` says of what this is the placement, in its owner's words. `views` are how the
    module's tensors lie in their stretches, by name, `made` what the loader makes, by stretch. `placed` are the boxes,
    cut so that what two ranks both hold are equal boxes, whatever else each of them holds.
    """

    layout: Layout
    loaded: tuple[tuple[str, ...], ...] = ()
    key: str = ""
    views: Mapping[str, View] = field(default_factory=dict)
    made: Mapping[str, Product] = field(default_factory=dict)
    placed: Mapping[str, tuple[Placed, ...]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        placed = {
            name: tuple(Placed(box, place.path, place.name) for place in places for box in _cut(place.box))
            for name, places in self.layout.placed().items()
        }
        object.__setattr__(self, "placed", placed)

    @property
    def forms(self) -> Mapping[str, Form]:
        """The canonical tensors."""
        return self.layout.tensors

    @property
    def stretches(self) -> dict[str, Form]:
        return {name: local.form for name, local in self.layout.shards.get(ONLY_FILE, {}).items()}

    def made_of(self, tensors: Collection[str]) -> dict[str, Marks]:
        """What the loader makes, by stretch, of groups that have one of these tensors."""
        groups = {number for number, group in enumerate(self.loaded) if not set(tensors).isdisjoint(group)}
        return {stretch: product.marks for stretch, product in self.made.items() if product.group in groups}

    def compared(self, stretch: str) -> Iterator[tuple[int, Flags]]:
        """Which elements count as what the loader makes in a stretch, in parts as marks have them: all that are not
        placed, for what no load has changed may be made, too; but where some change by themselves, marked ones."""
        product, local = self.made[stretch], self.layout.shards[ONLY_FILE][stretch]
        if product.is_restless:
            yield from product.marks.parts()
            return
        boxes = [each.box.inverse() for each in local.placements]
        for first in range(0, local.form.elements, AT_ONCE):
            flags = np.ones(min(AT_ONCE, local.form.elements - first), np.bool_)
            for box in boxes:
                for part in box.rectangles(box.rank(first), box.rank(first + len(flags))):
                    box.canonical_view(flags, first, part)[...] = False
            yield first, flags


def disjoint_cover(boxes: list[Box], elements: int, first: Sequence[Box] = ()) -> list[Box] | None:
    """Some of these footprints, `first` among them, that have every element of a tensor of so many just once; None if
    there are none, or none that are found by taking the largest ones first, in a time that anybody should wait."""
    taken = list(first)
    patience = Patience(len(boxes))
    left = elements - sum(box.elements for box in taken)
    for box in sorted(boxes, key=lambda box: (-box.elements, box)):
        try:
            if box.elements <= left and not any(_meet(box, other, patience) for other in taken):
                taken.append(box)
                left -= box.elements
        except ValueError:
            return None
    return taken if not left else None


def _meet(one: Box, other: Box, patience: Patience) -> bool:
    """Whether two footprints share an element; ValueError if that takes too long to tell."""
    return next(meetings(one, other, patience), None) is not None


def _cut(box: Box) -> list[Box]:
    """Take apart what happens to lie at equal steps, such as a rank's queries, keys and values: those of a rank beside
    it, which has the same keys, may lie at others."""
    if len(box.axes) < 2 or box.axes[0].steps > _FEW_STEPS:
        return [box]
    outer, rest = box.axes[0], box.axes[1:]
    return [
        Box(rest, box.canonical + number * outer.canonical, box.local + number * outer.local)
        for number in range(outer.steps)
    ]


def encode_placement(placement: Placement) -> bytes:
    """The JSON of a placement: its first line has the digest of all others; its layout is one of its members, line by
    line."""
    head = {
        "format": FORMAT,
        "requires": [],
        "key": placement.key,
        "loaded": placement.loaded,
        "views": placement.views,
        "made": {stretch: _product(product) for stretch, product in placement.made.items()},
    }
    text = json.dumps(head, ensure_ascii=False)[1:-1]
    rest = f'{text}, "layout":\n'.encode() + encode_layout(placement.layout).rstrip() + b"}\n"
    return _first_line(rest) + rest


def _first_line(rest: bytes) -> bytes:
    return _HEAD + blake3_text(object_digest(rest)).encode() + _HEAD_END


def _product(product: Product) -> list[object]:
    frames = [base64.b64encode(frame).decode("ascii") for frame in product.marks.frames]
    return [product.group, frames, product.is_restless]


def decode_placement(data: bytes, what: str) -> Placement:
    """Read a placement; DamagedError if it is malformed, UnsupportedError if it needs what is not known here."""
    document = strict_json(data, what)
    if type(document) is not dict or document.get("format") != FORMAT:
        found = document.get("format") if type(document) is dict else None
        if type(found) is str and found.startswith("dcr-placement-"):
            raise UnsupportedError(what, f"has format {shown(found)}, this dcr reads {FORMAT}", hint=_LEARN_AGAIN)
        raise DamagedError(what, f"its format is not {FORMAT}", hint=_SAVED)
    if document.get("requires") != []:
        facts = f"requires {shown(json.dumps(document.get('requires')))}, unknown to this dcr"
        raise UnsupportedError(what, facts, hint="it needs a newer dcr")
    begin = data.find(b"\n") + 1
    if data[:begin] != _first_line(data[begin:]):
        raise DamagedError(what, "its first line is not the blake3 of the others", hint=_LEARN_AGAIN)
    key, loaded = document.get("key"), document.get("loaded")
    if type(key) is not str or type(loaded) is not list or not all(map(_is_group, loaded)):
        raise DamagedError(what, "its key is no text, or loaded is no list of lists of names")
    layout = decode_layout(json.dumps(document.get("layout")).encode(), what)
    if layout.rules or set(layout.shards) - {ONLY_FILE}:
        raise DamagedError(what, "its layout has rules, or shards beside the only one")
    forms = {name: local.form for name, local in layout.shards.get(ONLY_FILE, {}).items()}
    if name := next((name for name, form in forms.items() if len(form.shape) != 1), None):
        raise DamagedError(what, f"stretch {shown(name)} is no row of elements")
    views = {name: _decode_view(each, forms, what, name) for name, each in _members(document, "views", what).items()}
    made = _members(document, "made", what)
    if sum(forms[name].elements for name in made if name in forms) > _MOST_MADE:
        raise DamagedError(what, f"stretches of what is made have more than {_MOST_MADE} elements")
    products = {name: _decode_product(each, forms, what, name) for name, each in made.items()}
    _check_groups(loaded, layout, products, what)
    return Placement(layout, tuple(map(tuple, loaded)), key, views, products)


def _members(document: dict[str, Any], member: str, what: str) -> dict[str, Any]:
    value = document.get(member)
    if type(value) is not dict:
        raise DamagedError(what, f"{member} is not an object")
    return value


def _decode_view(member: Any, forms: Mapping[str, Form], what: str, name: str) -> View:
    at = f"{what}: view {shown(name)}"
    if type(member) is not list or len(member) != 4 or type(member[0]) is not str or member[0] not in forms:
        raise DamagedError(at, "is not made of a stretch, an offset, a shape and strides")
    stretch, first, shape, strides = member
    if type(shape) is not list or type(strides) is not list or len(shape) != len(strides):
        raise DamagedError(at, "has not as many strides as dimensions")
    if not all(type(each) is int and each >= 0 for each in (first, *shape, *strides)) or 0 in shape:
        raise DamagedError(at, "is not made of integers from 0 on, or has no elements")
    end = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + 1
    if end > forms[stretch].elements:
        raise DamagedError(at, f"ends at element {end} of {forms[stretch].elements}")
    return View(stretch, first, tuple(shape), tuple(strides))


def _decode_product(member: Any, forms: Mapping[str, Form], what: str, name: str) -> Product:
    at = f"{what}: what is made in {shown(name)}"
    if name not in forms:
        raise DamagedError(at, "is in no stretch")
    is_product = type(member) is list and list(map(type, member)) == [int, list, bool]
    if not is_product or not all(type(frame) is str for frame in member[1]):
        raise DamagedError(at, "is not the number of a group, a list of texts and a truth value")
    try:
        frames = [base64.b64decode(frame, validate=True) for frame in member[1]]
        return Product(member[0], Marks.checked(forms[name].elements, frames), member[2])
    except ValueError as error:
        raise DamagedError(at, str(error)) from error


def _check_groups(loaded: Sequence[Sequence[str]], layout: Layout, made: Mapping[str, Product], what: str) -> None:
    names = [name for group in loaded for name in group]
    if unknown := [name for name in names if name not in layout.tensors]:
        raise DamagedError(what, f"tensors {listed(unknown)} are loaded, and not among its tensors")
    if len(set(names)) < len(names) or not all(loaded):
        raise DamagedError(what, "a group of loaded has no names, or one that another has too")
    if {product.group for product in made.values()} != set(range(len(loaded))):
        raise DamagedError(what, "the groups of loaded are not those that something is made of")


def read_placement(path: str | os.PathLike[str], key: str) -> Placement:
    """Read the placement that was saved as a file for `key`; NotFoundError, LocalError, UsageError if it is for another
    one, and what `decode_placement` raises."""
    check_path(path, "layout")
    what = f"placement {os.fspath(path)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_LAYOUT_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(what, "no such file", hint=_SAVED) from error
    except OSError as error:
        raise LocalError(what, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    placement = decode_placement(data, what)
    if placement.key != key:
        facts = f"is the placement of {shown(placement.key)}, {shown(key)} expected"
        raise UsageError(what, facts, hint="each rank, of each model and engine, has one of its own")
    return placement


def write_placement(path: str | os.PathLike[str], placement: Placement) -> None:
    """Save a placement as a file, durably; UsageError if it has no key: anybody could take it for theirs."""
    check_path(path, "layout")
    if not placement.key:
        hint = 'Receiver(..., key="model, engine version, parallel sizes, rank")'
        raise UsageError("save_layout", "needs a key, which says of what this is the placement", hint=hint)
    with open_folder(Path(path).parent) as folder:
        folder.replace_file(Path(path).name, encode_placement(placement), NEW_FILE_MODE)


def _is_group(member: Any) -> bool:
    return type(member) is list and all(type(name) is str for name in member)
