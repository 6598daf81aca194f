"""What a loader makes of tensors: compared with the checkpoint, seen to be written, and not changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcr_cli import diff
from dcr_cli.errors import ConflictError, DamagedError, HookError, UnsupportedError, WrongBaseError
from dcr_cli.layout.box import Box
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement as Placed
from dcr_cli.layout.loader import ONLY_FILE
from dcr_cli.live import Receiver, content_of
from dcr_cli.live.marks import AT_ONCE, Marks
from dcr_cli.live.placement import Placement, Product, read_placement
from live_modules import Bits, Forms, held, loaded, new_bits, write

TENSORS: Forms = {"w": ("BF16", (6, 5)), "l": ("F32", (12,)), "ids": ("I64", (70,)), "v": ("BF16", (9,))}


class Makes(nn.Module):
    """It has one tensor as it is and its square, an exponential, whether a number is odd, and one that is cast; what
    its loader does otherwise than when it was learnt is up to `spoil`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6, 5, dtype=torch.bfloat16), requires_grad=False)
        self.square = nn.Parameter(torch.zeros(6, 5), requires_grad=False)
        self.e = nn.Parameter(torch.zeros(12), requires_grad=False)
        self.register_buffer("odd", torch.zeros(70, dtype=torch.bool))
        self.v = nn.Parameter(torch.zeros(9), requires_grad=False)
        self.spoil: Callable[[Makes, str, Any], Any] | None = None
        self.given: list[str] = []

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.given.append(name)
            if self.spoil is None or self.spoil(self, name, weight) is None:
                self.load(name, weight)

    def load(self, name: str, weight: Any) -> None:
        if name == "w":
            self.w.copy_(weight)
            self.square.copy_(weight.float() ** 2)
        elif name == "l":
            self.e.copy_(-weight.exp())
        elif name == "ids":
            self.get_buffer("odd").copy_(weight & 1)
        else:
            self.v.copy_(weight)


class Step:
    """A base, a target in which some tensors differ, the delta between them, and a module at the base."""

    def __init__(self, root: Path, changes: Mapping[str, Any]) -> None:
        bits = numbers()
        self.base = write(root / "base", TENSORS, bits)
        for name, mask in changes.items():
            bits[name] = bits[name] ^ np.asarray(mask).astype(bits[name].dtype)
        self.target = write(root / "target", TENSORS, bits)
        self.delta = root / "delta"
        diff(self.base, self.target, self.delta)
        self.module = loaded(Makes, self.base)

    def receiver(self, **options: Any) -> Receiver:
        return Receiver(self.module, **{"checkpoint": self.base, **options})

    def is_done(self) -> bool:
        return held(self.module) == held(loaded(Makes, self.target))


def numbers() -> Bits:
    bits = new_bits(TENSORS)
    # No NaN, whose square has bits of its own, stands for one that is like any other.
    return {name: np.where(elements == 0x7F81, 0x3F80, elements) for name, elements in bits.items()}


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("changes", [{"l": [1] + [0] * 11}, {"ids": [1] + [0] * 69}, {"v": [1] * 9}])
def test_what_is_made_is_compared_with_the_checkpoint(tmp_path: Path, changes: dict[str, Any], twin: bool) -> None:
    step = Step(tmp_path, changes)
    other = Makes()
    before = held(step.module), held(other)
    options: dict[str, Any] = {"twin": (other, None)} if twin else {}
    receiver = step.receiver(checkpoint=step.target, **options)
    with pytest.raises(WrongBaseError, match="than its loader makes of the checkpoint"):
        receiver.learn()
    assert (held(step.module), held(other)) == before and receiver.content is None
    receiver = step.receiver(key="a", **options)
    receiver.learn()
    assert (held(step.module), held(other)) == before and receiver.content is not None
    receiver.save_layout(tmp_path / "layout")
    receiver = step.receiver(checkpoint=step.target, layout=tmp_path / "layout", key="a", **options)
    with pytest.raises(WrongBaseError, match="than its loader makes of the checkpoint"):
        receiver.learn()
    assert (held(step.module), held(other)) == before


def drop(module: Makes, name: str, weight: Any) -> bool:
    return True


def drop_the_last(module: Makes, name: str, weight: Any) -> bool:
    last = module.e[-1].clone()
    module.load(name, weight)
    module.e[-1] = last
    return True


@pytest.mark.parametrize("spoil", [drop, drop_the_last])
def test_a_loader_that_leaves_something_unwritten_is_seen(tmp_path: Path, spoil: Any) -> None:
    step = Step(tmp_path, {"l": [1] + [0] * 11})
    receiver = step.receiver()
    assert receiver.stage(step.delta).loaded == ("l",)
    others = {name: data for name, data in held(step.module).items() if name != "e"}
    step.module.spoil = spoil
    for _ in range(2):
        with pytest.raises(HookError, match="has left what it makes of tensors in e as it was"):
            receiver.apply()
        assert receiver.is_partial and receiver.content is None
    step.module.spoil = None
    receiver.apply()
    assert step.is_done() and not receiver.is_partial
    assert {name: data for name, data in held(step.module).items() if name != "e"} == others
    assert content_of([receiver.digest()]) == receiver.content


@pytest.mark.parametrize(("mask", "loads"), [([2] * 70, 1), ([1] * 70, 2), ([0] * 69 + [1], 2)])
def test_what_becomes_its_own_complement_is_written_all_the_same(tmp_path: Path, mask: list[int], loads: int) -> None:
    step = Step(tmp_path, {"ids": mask})
    receiver = step.receiver()
    receiver.stage(step.delta)
    step.module.given.clear()
    receiver.apply()
    assert step.is_done() and step.module.given == ["ids"] * loads
    assert receiver.digest() == receiver.digest()
    step.module.odd[5] ^= True
    with pytest.raises(DamagedError, match="has other bits in odd than its loader has made"):
        receiver.digest()


@pytest.mark.parametrize("spoil", [drop, drop_the_last])
def test_a_loader_that_does_not_take_the_checkpoint_is_refused(tmp_path: Path, spoil: Any) -> None:
    step = Step(tmp_path, {"l": [1] + [0] * 11})
    receiver = step.receiver(key="a")
    receiver.learn()
    receiver.save_layout(tmp_path / "layout")
    step.module.spoil = spoil
    before = held(step.module)
    with pytest.raises(UnsupportedError, match="has left what it makes of tensors in e as it was"):
        step.receiver(layout=tmp_path / "layout", key="a").learn()
    assert held(step.module) == before


def move(module: Makes, name: str, weight: Any) -> bool:
    module.e.data = -weight.exp()
    return True


def put_anew(module: Makes, name: str, weight: Any) -> bool:
    module.load(name, weight)
    module.register_buffer("odd", module.get_buffer("odd").clone())
    return True


@pytest.mark.parametrize(("spoil", "name"), [(move, "e"), (put_anew, "odd")])
def test_a_loader_that_moves_what_it_makes_is_seen(tmp_path: Path, spoil: Any, name: str) -> None:
    step = Step(tmp_path, {"l": [1] + [0] * 11})
    receiver = step.receiver()
    receiver.stage(step.delta)
    step.module.spoil = spoil
    with pytest.raises(HookError, match=f"has given tensor {name} another place in memory"):
        receiver.apply()
    assert receiver.is_partial
    with pytest.raises(ConflictError, match=f"tensor {name} does not lie any more where it lay"):
        receiver.apply()


def test_what_was_moved_before_it_is_not_changed(tmp_path: Path) -> None:
    step = Step(tmp_path, {"l": [1] + [0] * 11})
    receiver = step.receiver()
    receiver.stage(step.delta)
    step.module.square.data = step.module.square.data.clone()
    before = held(step.module)
    for do in (receiver.apply, receiver.digest):
        with pytest.raises(ConflictError, match="tensor square does not lie any more where it lay"):
            do()
    assert held(step.module) == before and not receiver.is_partial


def spoil_an_element(number: int, module: Makes, name: str, weight: Any) -> bool:
    module.load(name, weight)
    module.w.view(-1)[number] = 7
    return True


@pytest.mark.parametrize("number", [3, 29])
def test_what_a_loader_places_is_compared_after_it(tmp_path: Path, number: int) -> None:
    """Whether it was to change or not."""
    step = Step(tmp_path, {"w": [0, 0, 0, 1] + [0] * 26})
    receiver = step.receiver()
    receiver.stage(step.delta)
    step.module.spoil = partial(spoil_an_element, number)
    with pytest.raises(DamagedError, match="does not have the bits that were written"):
        receiver.apply()
    assert receiver.is_partial
    step.module.spoil = None
    receiver.apply()
    assert step.is_done()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w", "has other bits of tensor w than its loader was given"),
        ("square", "has other bits in square"),
        ("e", "in e"),
    ],
)
def test_what_changes_by_itself_afterwards_is_seen(tmp_path: Path, name: str, message: str) -> None:
    step = Step(tmp_path, {"w": [1] * 30, "l": [1] * 12})
    receiver = step.receiver()
    receiver.stage(step.delta)
    receiver.apply()
    assert step.is_done() and content_of([receiver.digest()]) == receiver.content
    getattr(step.module, name).view(-1)[2] = 7
    with pytest.raises(DamagedError, match=message):
        receiver.digest()


def test_what_one_stretch_is_made_of_is_sent_together(tmp_path: Path) -> None:
    class Joins(Makes):
        """The exponential and the cast are in one."""

        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(21)
            self.e, self.v = (nn.Parameter(part, requires_grad=False) for part in (both[:12], both[12:]))
            self.both = nn.Parameter(both, requires_grad=False)

    step = Step(tmp_path, {"v": [1] * 9})
    step.module = loaded(Joins, step.base)
    receiver = step.receiver()
    assert set(receiver.stage(step.delta).loaded) == {"l", "v"}
    receiver.apply()
    assert held(step.module) == held(loaded(Joins, step.target))


def test_nothing_is_known_of_what_is_made_without_a_checkpoint(tmp_path: Path) -> None:
    step = Step(tmp_path, {"w": [1] * 30})
    receiver = Receiver(step.module)
    receiver.learn({name: Form(*form) for name, form in sorted(TENSORS.items())})
    assert receiver.content is None
    step.module.e[0] = 7
    with pytest.raises(DamagedError, match="has other bits in e than its loader has made"):
        receiver.digest()


class Masks(nn.Module):
    """What is below zero, and what is a number that no probe has, behind it padding that the loader leaves alone, and,
    where it counts, how often it has loaded."""

    def __init__(self, padding: int = 0, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((1030,), padding, dtype=torch.uint8))
        self.n = nn.Parameter(torch.zeros(4), requires_grad=False)
        self._counts = counts

    def load_weights(self, weights: Any) -> None:
        mask = self.get_buffer("mask")
        for name, weight in weights:
            if name == "w":
                numbers = weight.reshape(-1)
                mask[:512].copy_(numbers[:512] < 0)
                mask[512:1024].copy_(numbers[512:] == 1.5)
                if self._counts:
                    mask[1029] += 1
            else:
                self.n.copy_(weight)


MASKED: Forms = {"w": ("F32", (32, 32)), "n": ("F32", (4,))}


class Unmarked:
    """A base of ones, and a target with 1.5 where no probe shows that anything is made."""

    def __init__(self, root: Path, **options: Any) -> None:
        bits: Bits = {"w": np.full(1024, 0x3F800000, "<u4"), "n": np.zeros(4, "<u4")}
        self.base = write(root / "base", MASKED, bits)
        self.module = loaded(partial(Masks, **options), self.base)
        receiver = Receiver(self.module, key="masks", checkpoint=self.base)
        receiver.learn()
        receiver.save_layout(root / "layout")
        self.product = read_placement(root / "layout", "masks").made["mask"]
        ((_, flags),) = self.product.marks.parts()
        self.places = np.flatnonzero(~flags[:1024])
        assert 0 < len(self.places) < 1024 and not flags[1024:].any()
        bits["w"] = bits["w"].copy()
        bits["w"][self.places] = 0x3FC00000
        self.target = write(root / "target", MASKED, bits)
        self.receiver = receiver


@pytest.mark.parametrize("twin", [False, True])
def test_what_no_load_has_changed_is_compared_too(tmp_path: Path, twin: bool) -> None:
    step = Unmarked(tmp_path, padding=9)
    # What the loader writes nowhere is not the same in both.
    options: dict[str, Any] = {"twin": (Masks(padding=5), None)} if twin else {}
    with pytest.raises(WrongBaseError, match="has other bits in mask than its loader makes of the checkpoint"):
        Receiver(step.module, checkpoint=step.target, **options).learn()
    before = held(step.module)
    receiver = Receiver(step.module, checkpoint=step.base, **options)
    receiver.learn()
    receiver.digest()
    assert held(step.module) == before and not step.product.is_restless
    if twin:
        assert held(options["twin"][0]) == held(Masks(padding=5))
    for place in (step.places[0], step.places[-1], 1027):
        step.module.mask[place] ^= 1
        with pytest.raises(DamagedError, match="has other bits in mask than its loader has made"):
            receiver.digest()
        step.module.mask[place] ^= 1
    diff(step.base, step.target, tmp_path / "delta")
    receiver.stage(tmp_path / "delta")
    receiver.apply()
    assert content_of([receiver.digest()]) == receiver.content
    assert held(step.module) == held(loaded(partial(Masks, padding=9), step.target))


def test_beside_what_changes_by_itself_marked_elements_alone_are_compared(tmp_path: Path) -> None:
    step = Unmarked(tmp_path, counts=True)
    assert step.product.is_restless
    step.receiver.digest()
    step.module.mask[1029] += 1
    step.receiver.digest()
    ((_, flags),) = step.product.marks.parts()
    step.module.mask[int(np.argmax(flags))] ^= 1
    with pytest.raises(DamagedError, match="has other bits in mask than its loader has made"):
        step.receiver.digest()


def test_what_is_placed_beside_what_is_made_is_not_compared_with_it() -> None:
    whole, made = Form("F32", (AT_ONCE + 9,)), np.zeros(AT_ONCE + 9, np.bool_)
    made[[3, AT_ONCE + 8]] = True
    box = Box.make([(AT_ONCE // 2 + 2, 1, 2)], 0, 4)
    row = LocalTensor(whole, (Placed("w", box),))
    layout = Layout("layout", {"l": Form("F32", ()), "w": Form("F32", (box.elements,))}, {ONLY_FILE: {"row": row}})
    for is_restless in (False, True):
        product = Product(0, Marks.of(made), is_restless)
        parts = list(Placement(layout, (("l",),), made={"row": product}).compared("row"))
        assert [first for first, _ in parts] == [0, AT_ONCE]
        expected = np.ones(len(made), np.bool_)
        expected[4 : box.local_end : 2] = False
        assert np.array_equal(np.concatenate([flags for _, flags in parts]), made if is_restless else expected)
