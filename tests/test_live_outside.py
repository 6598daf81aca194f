"""What a module keeps outside its parameters and buffers: it is reached, put back, and seen to change; and what was
packed once it was loaded is seen to be that."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.layout import Form
from dcr_cli.live import Receiver, reach as reaching
from dcr_cli.live.memory import memory_of
from dcr_cli.live.outside import Outside
from dcr_cli.live.probing import learn
from dcr_cli.live.reach import reach
from dcr_cli.serving.outside import check_nothing_outside
from live_modules import Forms, held, loaded, new_bits, write

FORMS: Forms = {"w": ("BF16", (12, 8)), "n": ("BF16", (40,))}


@dataclass
class Plain:
    tensor: Any


class Slotted:
    __slots__ = ("never", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def method(self) -> Any:
        return self.tensor


def closure(tensor: Any) -> Callable[[Any], Any]:
    return lambda x: x @ tensor


def default(tensor: Any) -> Callable[..., Any]:
    def function(x: Any, weight: Any = tensor, *, bias: Any = None) -> Any:
        return x @ weight

    return function


def circle(tensor: Any) -> list[Any]:
    found: list[Any] = [tensor]
    found.append({"again": found})
    return found


def attribute_of_a_tensor(tensor: Any) -> Any:
    parameter = nn.Parameter(torch.zeros(0))
    parameter.packed = tensor  # type: ignore[attr-defined]
    return [parameter]


# Ways to keep a tensor that is neither a parameter nor a buffer, and where it is then.
WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda tensor: tensor, "kept"),
    "list": (lambda tensor: [1, [tensor]], "kept[1][0]"),
    "tuple": (lambda tensor: (tensor,), "kept[0]"),
    "dict": (lambda tensor: {"a": OrderedDict(b=tensor)}, "kept.a.b"),
    "set": (lambda tensor: {tensor}, "kept[0]"),
    "dataclass": (Plain, "kept.tensor"),
    "slots": (Slotted, "kept.tensor"),
    "namespace": (lambda tensor: SimpleNamespace(tensor=tensor), "kept.tensor"),
    "closure": (closure, "kept.tensor"),
    "default": (default, "kept.defaults[0][0]"),
    "partial": (lambda tensor: partial(torch.add, tensor), "kept.args[0]"),
    "keyword": (lambda tensor: partial(torch.add, other=tensor), "kept.keywords.other"),
    "method": (lambda tensor: Slotted(tensor).method, "kept.self.tensor"),
    "bound": (lambda tensor: tensor.copy_, "kept.self"),
    "circle": (circle, "kept[0]"),
    "module": (lambda tensor: [nn.ParameterList([nn.Parameter(tensor, requires_grad=False)])], "kept[0].0"),
    "tensor": (attribute_of_a_tensor, "kept[0].packed"),
}
ways = pytest.mark.parametrize("way", WAYS)


class Keeping(nn.Module):
    """One that has a tensor of its own in some way; `fill` is what its loader does with that."""

    def __init__(self, way: str, tensor: Any, fill: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("n", torch.zeros(40, dtype=torch.bfloat16))
        self.kept = WAYS[way][0](tensor)
        self.fill = fill

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)
            if self.fill is not None and name == "w":
                tensors = [each for each in reach(self) if isinstance(each.what, torch.Tensor)]
                self.fill(next(each.what for each in tensors if each.where == self.where), weight)

    where = ""


def keeping(way: str, tensor: Any, fill: Callable[[Any, Any], None] | None = None) -> Keeping:
    module = Keeping(way, tensor, fill)
    module.where = WAYS[way][1]
    return module


def forms() -> dict[str, Form]:
    return {name: Form(*form) for name, form in FORMS.items()}


@ways
def test_a_tensor_is_reached_once(way: str) -> None:
    tensor = torch.arange(4)
    found = [each for each in reach(keeping(way, tensor)) if isinstance(each.what, torch.Tensor)]
    tensors = [each.where for each in found if each.what.data_ptr() == tensor.data_ptr()]
    assert tensors == [WAYS[way][1]]
    assert {"w", "n"} < {each.where for each in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.int64, torch.bfloat16])
@ways
def test_what_a_loader_changes_outside_is_refused_and_put_back(way: str, dtype: torch.dtype) -> None:
    """In general, and so where what it packs is seen to follow its weights."""
    tensor = torch.ones(12, 8).to(dtype)
    module = keeping(way, tensor, lambda kept, weight: kept.data.copy_(weight))
    before = held(module), tensor.clone()
    with pytest.raises(UnsupportedError) as caught:
        learn(module, module.load_weights, forms())
    assert f"its loader changes {WAYS[way][1]}, outside its parameters and buffers" in str(caught.value)
    assert held(module) == before[0] and torch.equal(tensor, before[1])


@ways
def test_what_changes_by_itself_is_put_back(way: str) -> None:
    tensor = torch.zeros(3, dtype=torch.int64)
    module = keeping(way, tensor, lambda kept, weight: kept.data.add_(1))
    learn(module, module.load_weights, forms())
    assert tensor.tolist() == [0, 0, 0]


def test_containers_and_numbers_are_put_back() -> None:
    """Also where a loader puts other tensors, or more, into them: that follows its weights."""

    def spoil(module: Any, weight: Any) -> None:
        module.table["new"], module.row[0] = 1, "other"
        module.row.append(weight)
        module.some.add(9)
        module.cell.__closure__[0].cell_contents = weight
        module.scale, module.shift = float(weight.float().abs().max()), 7

    module: Any = keeping("attribute", torch.zeros(3))
    module.table, module.row, module.some = {"a": 1}, ["first"], {1}
    module.cell, module.scale, module.shift = closure(torch.zeros(2)), 0.5, 3
    old = module.cell.__closure__[0].cell_contents
    works = module.load_weights

    def load(weights: Any) -> None:
        pairs = list(weights)
        works(pairs)
        spoil(module, pairs[0][1])

    with pytest.raises(UnsupportedError, match=r"its loader changes cell\.tensor, row\[1\], outside"):
        learn(module, load, forms())
    assert (module.table, module.row, module.some) == ({"a": 1}, ["first"], {1})
    assert (module.scale, module.shift) == (0.5, 3)
    assert module.cell.__closure__[0].cell_contents is old


def with_load(module: Any, also: Callable[[Any], None]) -> Callable[[Any], None]:
    """Its loader, and something that is done with the first tensor that is loaded."""

    def load(weights: Any) -> None:
        pairs = list(weights)
        module.load_weights(pairs)
        also(pairs[0][1])

    return load


@pytest.mark.parametrize(
    "number",
    [
        lambda w: int((w < 0).sum()),
        lambda w: bool((w > 0).any()),
        lambda w: float(w.float().sign().sum()),
        lambda w: np.int64((w < 0).sum().item()),
        lambda w: np.float32((w < 0).sum().item()),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_number_that_is_made_of_weights_is_refused_and_put_back(number: Callable[[Any], Any], shared: bool) -> None:
    """Whole ones, too, and in an object of somebody else."""
    module: Any = keeping("attribute", torch.zeros(3))
    module.config, module.many = SimpleNamespace(many=0), 0
    owner = module.config if shared else module
    with pytest.raises(UnsupportedError, match=f"its loader changes {'config.' * shared}many, outside"):
        learn(module, with_load(module, lambda weight: setattr(owner, "many", number(weight))), forms())
    assert owner.many == 0 and type(owner.many) is int


def test_a_flag_and_a_counter_are_made_of_no_weights() -> None:
    module: Any = keeping("attribute", torch.zeros(3))
    module.is_loaded, module.scale, module.count = False, 0.0, 0

    def note(weight: Any) -> None:
        module.is_loaded, module.scale, module.count = True, 1.5, module.count + 1

    learn(module, with_load(module, note), forms())
    assert (module.is_loaded, module.scale, module.count) == (False, 0.0, 0)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16])
@pytest.mark.parametrize("is_strided", [False, True])
def test_an_array_that_a_loader_fills_is_refused_and_put_back(kind: Any, is_strided: bool) -> None:
    module: Any = keeping("attribute", torch.zeros(3))
    module.table = np.full((12, 16), 5, kind)[:, :: 2 if is_strided else 1][:, :8]
    table = module.table

    def fill(weight: Any) -> None:
        module.table[...] = weight.float().sign().numpy()

    def replace(weight: Any) -> None:
        module.table = weight.float().sign().numpy().astype(kind)

    for also in (fill, replace):
        with pytest.raises(UnsupportedError, match="its loader changes table, outside"):
            learn(module, with_load(module, also), forms())
        assert module.table is table and (table == 5).all()


def test_an_array_of_a_parameter_or_that_no_load_changes_is_nothing_of_its_own() -> None:
    module: Any = keeping("attribute", torch.zeros(3))
    module.view = module.w.data.view(torch.int16).numpy()
    module.turned, module.table = module.view[::-1, ::-2], np.array([float("nan"), 1])
    module.texts, module.none = np.array(["a", None], dtype=object), np.zeros((0, 3))
    learn(module, module.load_weights, forms())


class Watched(dict[str, Any]):
    """The attributes of a part, or another dict, that notes whether it was emptied."""

    cleared = False

    def clear(self) -> None:
        self.cleared = True
        super().clear()


def test_what_others_put_into_containers_meanwhile_is_kept() -> None:
    """As requests that another thread puts into a queue which an object that the module has shares with it."""
    module: Any = keeping("attribute", torch.zeros(3))
    shared = SimpleNamespace(queue=["a", "b"], seen={"a": 1, "b": 1}, some={1}, count=0, scale=0.5, tensors=[])
    module.config, module.table = shared, Watched(a=1, b=2, c=3)

    def other(weight: Any) -> None:
        shared.queue.append(f"request {len(shared.queue)}")
        shared.queue.pop(0)
        shared.seen[f"request {len(shared.seen)}"] = 1
        shared.seen.pop("a", None)
        shared.some.add(len(shared.some) + 1)
        shared.count += 1
        shared.tensors.append(torch.zeros(2))
        module.table["b"] = 7
        module.table.pop("a", None)

    with pytest.raises(UnsupportedError, match=r"changes config\.tensors\[0\], outside"):
        learn(module, with_load(module, other), forms())
    assert len(shared.queue) == 2 and "a" not in shared.queue and "b" not in shared.queue
    assert "a" not in shared.seen and shared.seen["b"] == 1 and len(shared.seen) > 1
    assert len(shared.some) > 1 and (shared.count, shared.scale, shared.tensors) == (0, 0.5, [])
    assert list(module.table.items()) == [("a", 1), ("b", 2), ("c", 3)] and not module.table.cleared


def test_a_replaced_parameter_is_put_back_in_its_place() -> None:
    module: Any = keeping("attribute", torch.zeros(3))
    module.register_parameter("later", nn.Parameter(torch.zeros(3), requires_grad=False))
    old = dict(module.named_parameters())

    def replace(weight: Any) -> None:
        del module.w
        module.w = nn.Parameter(weight.clone(), requires_grad=False)

    with pytest.raises(UnsupportedError, match="gives tensor w another place"):
        learn(module, with_load(module, replace), forms())
    assert [*module.named_parameters()] == [*old.items()] and module.w is old["w"]


def test_what_is_outside_is_looked_at_a_few_times_however_many_loads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And copied once."""
    copied, looked = [], []
    loads = [0]
    init, changed = Outside.__init__, Outside.changed

    def copy(*args: Any) -> None:
        copied.append(loads[0])
        init(*args)

    def look(*args: Any, **options: Any) -> set[str]:
        looked.append(loads[0])
        return changed(*args, **options)

    monkeypatch.setattr(Outside, "__init__", copy)
    monkeypatch.setattr(Outside, "changed", look)
    module: Any = keeping("attribute", torch.zeros(3))
    module.register_buffer("largest", torch.zeros(()))

    def count(weight: Any) -> None:
        loads[0] += 1
        module.largest.copy_(weight.float().abs().max())

    learn(module, with_load(module, count), forms())
    contrasts = [each for each in looked if 1 < each < loads[0]]
    assert copied == [0] and looked == [1, *contrasts, loads[0]] and len(contrasts) == 7


def test_an_arena_of_parameters_is_looked_at_between_them() -> None:
    module: Any = keeping("attribute", torch.zeros(3))
    module.arena = torch.zeros(200, dtype=torch.bfloat16)
    module.w.data = module.arena[:96].view(12, 8)
    module.n = module.arena[100:140]
    learn(module, module.load_weights, forms())
    memory_of(module).check_nothing_packed()
    works = module.load_weights

    def load(weights: Any) -> None:
        pairs = list(weights)
        works(pairs)
        module.arena[97] = pairs[0][1].reshape(-1)[0]

    with pytest.raises(UnsupportedError, match="its loader changes arena, outside"):
        learn(module, load, forms())
    assert not module.arena.any()


@ways
@pytest.mark.parametrize(
    "pack",
    [
        lambda w: w.t().contiguous(),
        lambda w: nn.functional.pad(w, (0, 4)),
        lambda w: w.reshape(2, 6, 4, 2).transpose(1, 2).contiguous().view(torch.int32),
    ],
)
def test_what_is_packed_once_it_is_loaded_is_refused(tmp_path: Path, way: str, pack: Callable[[Any], Any]) -> None:
    """No load changes it, as the packed output layer of an engine that loads first and packs then."""
    base = write(tmp_path / "base", FORMS, new_bits(FORMS))
    first = loaded(partial(keeping, "attribute", torch.zeros(3)), base)
    module = keeping(way, pack(first.w.data))
    module.load_state_dict(first.state_dict(), strict=False)
    with pytest.raises(UnsupportedError) as caught:
        Receiver(module, checkpoint=base).learn()
    assert f"keeps {WAYS[way][1]} outside its parameters, which has the elements of tensor w" in str(caught.value)
    if way != "module":
        # As it would be after a patch.
        module.w[0, 0] += 1
        Receiver(module, twin=(keeping("attribute", torch.zeros(3)), None)).learn(forms())


@ways
def test_a_served_module_has_no_floating_tensors_outside(way: str) -> None:
    check_nothing_outside(keeping(way, torch.zeros(4, dtype=torch.int32)))
    check_nothing_outside(keeping(way, torch.tensor(2.0)))
    module = keeping(way, torch.zeros(4))
    with pytest.raises(UnsupportedError) as caught:
        check_nothing_outside(module)
    assert f"keeps {WAYS[way][1]} outside its parameters" in str(caught.value)


def test_a_served_module_has_no_handles_of_packed_weights() -> None:
    module: Any = keeping("attribute", None)
    module.linear = closure(SimpleNamespace(handler_tensor=torch.tensor(0x7F00), rows=8))
    with pytest.raises(UnsupportedError, match=r"keeps linear\.tensor\.handler_tensor outside its parameters"):
        check_nothing_outside(module)


def test_caches_are_not_looked_into() -> None:
    module: Any = keeping("attribute", None)
    module.kv_cache = [torch.zeros(4)]
    check_nothing_outside(module)
    assert not any(each.where.startswith("kv_cache") for each in reach(module))


def test_a_module_that_reaches_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_MOST", 100)
    with pytest.raises(UnsupportedError, match="reaches more than 100 objects"):
        list(reach(keeping("attribute", [[] for _ in range(200)])))


def test_a_receiver_holds_nothing_that_it_does_not_patch(tmp_path: Path) -> None:
    base = write(tmp_path / "base", FORMS, new_bits(FORMS))
    # Their memory goes with them.
    arrays = [np.zeros(count, np.int32) for count in range(5, 9)]
    gone = [weakref.ref(array) for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays]
    del arrays
    module: Any = loaded(partial(keeping, "attribute", tensors.pop()), base)
    module.many, module.cell = [tensors.pop()], closure(tensors.pop())
    module.register_buffer("rotary", tensors.pop())
    receiver = Receiver(module, checkpoint=base)
    receiver.learn()
    assert all(each() is not None for each in gone)
    module.kept, module.cell, module.rotary = None, None, torch.zeros(8)
    module.many.clear()
    gc.collect()
    assert all(each() is None for each in gone)
    assert receiver.digest().parts
