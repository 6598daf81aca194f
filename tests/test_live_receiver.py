"""Live receivers: modules with odd loaders, patched where they lie, against the same loaders on the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcr_cli import diff
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.delta.delta import open_delta
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    HookError,
    IncompleteError,
    UnsupportedError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.live import Receiver, content_of
from live_modules import (
    FORMS,
    MADE,
    Converting,
    Engine,
    Forms,
    addresses,
    held,
    loaded,
    new_bits,
    train,
    write,
)

ALL = {**FORMS, **MADE}
MODULE = torch.nn.Linear(5, 6)


class Steps:
    """Checkpoints, each a step after the one before, and the deltas between them."""

    def __init__(self, root: Path, forms: Forms, count: int = 1, encoding: str = "gap") -> None:
        self.checkpoints = []
        bits = new_bits(forms)
        for number in range(count + 1):
            bits = train(bits, forms, number) if number else bits
            self.checkpoints.append(write(root / f"step-{number}", forms, bits))
        self.deltas = [root / f"delta-{number}" for number in range(count)]
        for number, delta in enumerate(self.deltas):
            diff(self.checkpoints[number], self.checkpoints[number + 1], delta, encoding=encoding)

    @property
    def base(self) -> Path:
        return self.checkpoints[0]

    @property
    def target(self) -> Path:
        return self.checkpoints[1]

    @property
    def delta(self) -> Path:
        return self.deltas[0]


def content(delta: Path) -> bytes:
    return open_delta(delta).commit.target.content


@pytest.mark.parametrize("encoding", ["gap", "whole", "context", "auto"])
def test_a_module_is_always_what_its_loader_makes_of_the_target(tmp_path: Path, encoding: str) -> None:
    steps = Steps(tmp_path, ALL, 20 if encoding == "gap" else 5, encoding)
    module = loaded(Converting, steps.base)
    receiver = Receiver(module, checkpoint=steps.base)
    before = addresses(module)
    for delta, target in zip(steps.deltas, steps.checkpoints[1:], strict=True):
        old = held(module)
        staged = receiver.stage(delta)
        assert held(module) == old and receiver.staged == staged
        assert content_of([staged.shares]) == staged.target.content == content(delta)
        assert receiver.apply() == staged
        assert held(module) == held(loaded(Converting, target))
        assert receiver.digest() == staged.shares
        assert receiver.content == content(delta) and receiver.staged is None and not receiver.is_partial
    assert addresses(module) == before


def test_what_is_staged_is_written_in_a_line(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ALL)
    staged = Receiver(loaded(Converting, steps.base), checkpoint=steps.base).stage(steps.delta)
    loaded_ = f"{len(staged.loaded)} tensors through the loader"
    assert repr(staged) == f"<Staged {steps.delta}: {staged.changed_elements:,} elements, {loaded_}>"
    # Of one without elements there is nothing to hold.
    assert repr(staged.shares) == f"<Shares of {len(ALL) - 1} of {len(ALL)} tensors>"


def test_what_changes_alone_is_touched(tmp_path: Path) -> None:
    bits = new_bits(FORMS)
    base = write(tmp_path / "base", FORMS, bits)
    bits["o.weight"][3] ^= 1
    bits["norm.weight"][2] ^= 1
    target = write(tmp_path / "target", FORMS, bits)
    diff(base, target, tmp_path / "delta")
    module = loaded(Engine, base)
    receiver = Receiver(module)
    staged = receiver.stage(tmp_path / "delta")
    # The norm is in two places.
    assert (staged.changed_elements, staged.loaded, staged.version) == (3, (), None)
    receiver.apply()
    assert held(module) == held(loaded(Engine, target))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_slices_and_their_shares_add_up(tmp_path: Path, ranks: int) -> None:
    forms = {name: form for name, form in ALL.items() if not name.startswith("wide")}
    steps = Steps(tmp_path, forms, 5)
    makes = [partial(Converting, rank, ranks) for rank in range(ranks)]
    modules = [loaded(make, steps.base) for make in makes]
    receivers = [Receiver(module, checkpoint=steps.base) for module in modules]
    for delta, target in zip(steps.deltas, steps.checkpoints[1:], strict=True):
        staged = [receiver.stage(delta) for receiver in receivers]
        assert content_of([each.shares for each in staged]) == content(delta)
        with pytest.raises(DamagedError, match="no ranks hold all elements of tensors"):
            content_of([each.shares for each in staged[1:]])
        for receiver in receivers:
            receiver.apply()
        for make, module in zip(makes, modules, strict=True):
            assert held(module) == held(loaded(make, target))
        assert content_of([receiver.digest() for receiver in receivers]) == content(delta)


def test_context_needs_all_of_a_piece(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS, encoding="context")
    receiver = Receiver(loaded(partial(Engine, 0, 2), steps.base))
    with pytest.raises(UnsupportedError, match="is not all held here") as caught:
        receiver.stage(steps.delta)
    assert caught.value.hint is not None and "--encodings gap,whole" in caught.value.hint
    assert receiver.staged is None


def test_a_layout_is_saved_and_read(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ALL)
    module = loaded(Converting, steps.base)
    first = Receiver(module, key="odd, rank 0", checkpoint=steps.base)
    with pytest.raises(UsageError, match="does not know yet"):
        first.save_layout(tmp_path / "layout")
    first.stage(steps.delta)
    first.save_layout(tmp_path / "layout")
    saved = (tmp_path / "layout").read_bytes()
    module.loads = 0
    second = Receiver(module, layout=tmp_path / "layout", key="odd, rank 0", checkpoint=steps.base)
    second.stage(steps.delta)
    assert module.loads == 0
    second.apply()
    assert held(module) == held(loaded(Converting, steps.target))
    second.save_layout(tmp_path / "layout")
    assert (tmp_path / "layout").read_bytes() == saved
    with pytest.raises(UsageError, match="is the placement of odd, rank 0, odd, rank 1 expected"):
        Receiver(module, layout=tmp_path / "layout", key="odd, rank 1")
    with pytest.raises(UsageError, match="is of a module with other tensors"):
        Receiver(Engine(), layout=tmp_path / "layout", key="odd, rank 0").stage(steps.delta)
    with pytest.raises(UsageError, match=r": [^,]+, [^,]+, [^,]+ and \d+ more$"):
        Receiver(MODULE, layout=tmp_path / "layout", key="odd, rank 0").stage(steps.delta)


def test_a_layout_needs_a_key_and_is_one(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    receiver = Receiver(loaded(Engine, steps.base), checkpoint=steps.base)
    receiver.learn()
    with pytest.raises(UsageError, match=r"^save_layout: needs a key"):
        receiver.save_layout(tmp_path / "layout")
    assert not (tmp_path / "layout").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DamagedError, match="its format is not dcr-placement") as told:
        Receiver(Engine(), layout=tmp_path / "config.json", key="rank 0")
    assert told.value.hint == "save_layout of a receiver writes one"


def test_a_twin_is_disturbed_instead(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    module, twin = loaded(Engine, steps.base), Engine()

    def refuse(weights: object) -> None:
        raise AssertionError

    receiver = Receiver(module, refuse, twin=(twin, None))
    receiver.stage(steps.delta)
    receiver.apply()
    assert held(module) == held(loaded(Engine, steps.target))
    assert held(twin) == held(Engine())


class Rows(torch.nn.Module):
    """Some rows of one tensor, in places of the module's own; how they lie there is up to `strides`."""

    def __init__(self, *places: tuple[int, int], strides: tuple[int, int] = (7, 1)) -> None:
        super().__init__()
        self.places = places
        for number, (first, end) in enumerate(places):
            row = torch.zeros((end - first) * 7, dtype=torch.bfloat16)
            lies = row.view(end - first, 7) if strides == (7, 1) else row.view(7, end - first).t()
            self.register_buffer(f"w{number}", lies)

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            for number, (first, end) in enumerate(self.places):
                self.get_buffer(f"w{number}").copy_(weight[first:end])


ROWS: Forms = {"w": ("BF16", (14, 7))}


def test_a_layout_is_of_tensors_that_lie_alike(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ROWS)
    make = partial(Rows, (0, 7))
    first = Receiver(loaded(make, steps.base), key="a", checkpoint=steps.base)
    first.learn()
    first.save_layout(tmp_path / "layout")
    turned = partial(Rows, (0, 7), strides=(1, 7))
    module = loaded(turned, steps.base)
    before = held(module)
    for options in ({"layout": tmp_path / "layout"}, {"twin": (make(), None)}):
        with pytest.raises(UsageError, match=r"has, or that lie otherwise: w0$"):
            Receiver(module, key="a", **options).stage(steps.delta)
        assert held(module) == before
    receiver = Receiver(module, twin=(turned(), None))
    receiver.stage(steps.delta)
    receiver.apply()
    assert held(module) == held(loaded(turned, steps.target))


def test_a_layout_that_lacks_tensors_says_so_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ALL)
    module = loaded(Ignoring, steps.base)
    receiver = Receiver(module, key="a", checkpoint=steps.base, may_lack=["a_log", "wide.*"])
    receiver.learn()
    receiver.save_layout(tmp_path / "layout")
    for may_lack in ((), ["wide.*"]):
        with pytest.raises(UnsupportedError, match="holds nothing of tensors a_log"):
            Receiver(module, layout=tmp_path / "layout", key="a", may_lack=may_lack).stage(steps.delta)
    Receiver(module, layout=tmp_path / "layout", key="a", may_lack=["a_log", "wide.*"]).stage(steps.delta)
    with pytest.raises(UsageError, match=r"may_lack: is the text layers\.\*, and no list"):
        Receiver(module, may_lack="layers.*")


def test_every_place_is_compared(tmp_path: Path) -> None:
    """What one place has whole, another one in part."""
    steps = Steps(tmp_path, ROWS, 3)
    module = loaded(partial(Rows, (0, 14), (0, 7), (5, 9)), steps.base)
    receiver = Receiver(module)
    for delta in steps.deltas:
        receiver.stage(delta)
        receiver.apply()
        assert content_of([receiver.digest()]) == receiver.content == content(delta)
    for number in range(3):
        bits = module.get_buffer(f"w{number}").view(torch.int16)
        bits[1, 3] ^= 1
        with pytest.raises(DamagedError, match="two places of module Rows that should hold the same bits differ"):
            receiver.digest()
        bits[1, 3] ^= 1
    assert content_of([receiver.digest()]) == receiver.content


@pytest.mark.parametrize("places", [[(0, 14), (0, 7)], [(0, 9), (5, 14)], [(0, 7), (7, 14), (2, 12)]])
def test_every_part_of_every_rank_is_compared(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    steps = Steps(tmp_path, ROWS, 3)
    modules = [loaded(partial(Rows, place), steps.base) for place in places]
    receivers = [Receiver(module, checkpoint=steps.base) for module in modules]
    for delta in steps.deltas:
        staged = [receiver.stage(delta) for receiver in receivers]
        assert content_of([each.shares for each in staged]) == content(delta)
        for receiver in receivers:
            receiver.apply()
        assert content_of([receiver.digest() for receiver in receivers]) == content(delta)
    modules[1].w0.view(torch.int16)[3, 3] ^= 1
    with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
        content_of([receiver.digest() for receiver in receivers])


def test_a_digest_is_of_the_module_as_it_lies_now(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ROWS)
    module = loaded(partial(Rows, (0, 14)), steps.base)
    receiver = Receiver(module, checkpoint=steps.base)
    receiver.learn()
    receiver.digest()
    module.register_buffer("w0", torch.full((14, 7), 9.0, dtype=torch.bfloat16))
    with pytest.raises(ConflictError, match="tensor w0 does not lie any more where it lay"):
        receiver.digest()


def test_what_a_module_is_at_is_known_when_it_is_shown(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ROWS, 2)
    for places, checkpoint, is_known in (
        ([(0, 7)], None, False),
        ([(0, 7)], steps.base, True),
        ([(0, 7), (7, 14)], None, True),
        ([(0, 14), (3, 9)], None, True),
    ):
        receiver = Receiver(loaded(partial(Rows, *places), steps.base), checkpoint=checkpoint)
        for delta in steps.deltas:
            receiver.stage(delta)
            receiver.apply()
            assert receiver.content == (content(delta) if is_known else None)


class Ruining(Converting):
    """One whose loader does what it should not, from its load number `after` on."""

    def __init__(self, ruin: Callable[[Any], None], after: int) -> None:
        super().__init__()
        self.ruin, self.after = ruin, after

    def load_weights(self, weights: Any) -> None:
        pairs = list(weights)
        if self.loads >= self.after:
            for name, weight in pairs[: len(pairs) // 2]:
                if name in FORMS:
                    self.load(name, weight)
            self.loads += 1
            self.ruin(self)
        else:
            super().load_weights(pairs)


def fail(module: Any) -> None:
    raise RuntimeError("out of luck")


def replace(module: Any) -> None:
    module.norm = torch.nn.Parameter(torch.ones(8))


def move(module: Any) -> None:
    module.o.data = module.o.data.clone()


def shrink(module: Any) -> None:
    module.qkv.data = torch.empty(0)


def add(module: Any) -> None:
    del module._buffers["mask"]
    module.register_buffer("other", torch.ones(3))


def grow(module: Any) -> None:
    module.add_module("more", torch.nn.Linear(2, 2))
    module.rank = 7


@pytest.mark.parametrize("after", [1, 4, 7])
@pytest.mark.parametrize(
    ("ruin", "message"),
    [
        (fail, "its loader failed: RuntimeError: out of luck"),
        (replace, "gives tensor norm another place"),
        (move, "gives tensor o another place"),
        (shrink, "gives tensor qkv another place"),
        (add, "gives tensor mask another place"),
        (grow, "gives tensor more.bias another place"),
    ],
)
def test_a_loader_that_fails_leaves_the_module_as_it_was(
    tmp_path: Path, ruin: Callable[[Any], None], message: str, after: int
) -> None:
    steps = Steps(tmp_path, ALL)
    module = loaded(partial(Ruining, ruin, after), steps.base)
    before = held(module), addresses(module), [id(each) for each in module.parameters()]
    with pytest.raises(UnsupportedError, match=message):
        Receiver(module).stage(steps.delta)
    assert (held(module), addresses(module), [id(each) for each in module.parameters()]) == before
    assert (module.rank, module.loads, len(list(module.modules()))) == (0, 1, 2)


def test_a_loader_that_is_interrupted_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    def interrupt(module: Any) -> None:
        raise KeyboardInterrupt

    steps = Steps(tmp_path, ALL)
    module = loaded(partial(Ruining, interrupt, 2), steps.base)
    before = held(module)
    with pytest.raises(KeyboardInterrupt):
        Receiver(module).stage(steps.delta)
    assert held(module) == before


class ClearsNans(Engine):
    def load(self, name: str, weight: Any) -> None:
        super().load(name, torch.nan_to_num(weight) if weight.is_floating_point() else weight)


class Shuffles(Engine):
    """Its loader puts the rows of one tensor where no short list of boxes says."""

    def load(self, name: str, weight: Any) -> None:
        if name == "conv.weight":
            order = torch.randperm(35, generator=torch.Generator().manual_seed(1))
            weight = weight.reshape(-1)[order].reshape(5, 7)
        super().load(name, weight)


class NeedsAll(Converting):
    def load_weights(self, weights: Any) -> None:
        pairs = list(weights)
        if len(pairs) < len(ALL):
            raise ValueError("tensors are missing")
        super().load_weights(pairs)


class Averages(Converting):
    """What it makes of one tensor depends on whether it is given another one."""

    def load_weights(self, weights: Any) -> None:
        pairs = dict(weights)
        super().load_weights(pairs.items())
        if "norm.weight" in pairs:
            self.a.data.add_(1)


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ALL)
    for make, message in (
        (NeedsAll, "its loader failed: ValueError: tensors are missing"),
        (Averages, "makes something else of a_log"),
    ):
        module = loaded(make, steps.base)
        before = held(module)
        with pytest.raises(UnsupportedError, match=message):
            Receiver(module, checkpoint=steps.base).stage(steps.delta)
        assert held(module) == before
    plain = Steps(tmp_path / "plain", FORMS)
    with pytest.raises(UnsupportedError, match="is not what it should be after a load of arbitrary bits"):
        Receiver(loaded(ClearsNans, plain.base)).stage(plain.delta)
    with pytest.raises(UnsupportedError, match="holds nothing of tensors a_log, wide"):
        Receiver(loaded(Ignoring, steps.base)).stage(steps.delta)
    receiver = Receiver(loaded(Ignoring, steps.base), may_lack=["a_log", "wide.*"])
    receiver.stage(steps.delta)
    receiver.apply()


class Counting(Converting):
    """It counts its loads, which no tensor of a checkpoint is the source of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.int32))

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.get_buffer("count").add_(1)


def test_what_changes_by_itself_comes_from_no_tensor(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {**FORMS, "a_log": MADE["a_log"]})
    module = loaded(Counting, steps.base)
    receiver = Receiver(module, checkpoint=steps.base)
    receiver.stage(steps.delta)
    assert module.count.tolist() == [1, 1]
    assert receiver.digest() != receiver.apply().shares == receiver.digest()


class Ignoring(Engine):
    def load(self, name: str, weight: Any) -> None:
        if name in FORMS:
            super().load(name, weight)


def test_what_is_no_short_list_of_boxes_goes_through_the_loader(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS, 6)
    module = loaded(Shuffles, steps.base)
    receiver = Receiver(module, checkpoint=steps.base)
    for delta, target in zip(steps.deltas, steps.checkpoints[1:], strict=True):
        staged = receiver.stage(delta)
        assert set(staged.loaded) <= {"conv.weight"}
        receiver.apply()
        assert held(module) == held(loaded(Shuffles, target))


def test_what_is_made_of_tensors_needs_their_checkpoint(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ALL, 6)
    receiver = Receiver(loaded(Converting, steps.base))
    bring = partial(bring_through, receiver, steps.deltas)
    with pytest.raises(UnsupportedError, match="what it was given is not known") as caught:
        bring()
    assert caught.value.hint is not None and "checkpoint=FOLDER" in caught.value.hint
    with pytest.raises(WrongBaseError, match="holds other bits of tensor"):
        Receiver(loaded(Converting, steps.base), checkpoint=steps.target).stage(steps.delta)


def bring_through(receiver: Receiver, deltas: Sequence[Path]) -> None:
    for delta in deltas:
        receiver.stage(delta)
        receiver.apply()


def test_another_base_is_refused(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS, 3)
    module = loaded(Engine, steps.base)
    with pytest.raises(WrongBaseError, match="starts from content blake3:"):
        Receiver(module).stage(steps.deltas[2])
    # One that holds slices as well sees it of what it holds whole.
    with pytest.raises(WrongBaseError, match="would not become what the delta says: tensors"):
        Receiver(loaded(partial(Engine, 0, 2), steps.base)).stage(steps.deltas[2])
    receiver = Receiver(module)
    receiver.stage(steps.deltas[0])
    receiver.apply()
    with pytest.raises(WrongBaseError, match="starts from content blake3:"):
        receiver.stage(steps.deltas[2])
    receiver.stage(steps.deltas[1])
    receiver.apply()
    assert held(module) == held(loaded(Engine, steps.checkpoints[2]))
    with pytest.raises(UsageError, match="nothing is staged"):
        receiver.apply()


def test_a_checkpoint_tells_each_rank_what_it_starts_from(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS, 2)
    receiver = Receiver(loaded(partial(Engine, 0, 2), steps.base), checkpoint=steps.base)
    with pytest.raises(WrongBaseError, match="starts from content blake3:"):
        receiver.stage(steps.deltas[1])
    assert receiver.content == open_delta(steps.delta).commit.base.content
    receiver.stage(steps.delta)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    receiver = Receiver(loaded(Engine, steps.base))
    receiver.stage(steps.delta)
    receiver.apply()
    write(tmp_path / "more", {**FORMS, "new": ("F32", (3,))}, new_bits({**FORMS, "new": ("F32", (3,))}))
    diff(steps.target, tmp_path / "more", tmp_path / "delta")
    with pytest.raises(UnsupportedError, match="has other tensors than the module was learnt with: new"):
        receiver.stage(tmp_path / "delta")


def test_a_damaged_delta_changes_nothing(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    payload = next((steps.delta / "payloads").iterdir())
    data = bytearray(payload.read_bytes())
    data[-3] ^= 1
    payload.write_bytes(data)
    module = loaded(Engine, steps.base)
    with pytest.raises(DamagedError, match="its blake3 differs"):
        Receiver(module).stage(steps.delta)
    assert held(module) == held(loaded(Engine, steps.base))


class StoppedError(BaseException):
    """Raised where an apply is stopped."""


@pytest.mark.parametrize("stop", range(0, 14, 2))
def test_an_apply_that_was_stopped_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Stopped before each write, and within one: a mixture is never taken for a version."""
    from dcr_cli.live import bits

    steps = Steps(tmp_path, ALL, 2)
    module = loaded(Converting, steps.base)
    receiver = Receiver(module, checkpoint=steps.base)
    receiver.stage(steps.delta)
    left = stop
    write_all = bits.HostPatch.write

    def write_some(patch: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            # Half of it is written.
            for piece, positions, _, new in patch._pieces:
                half = len(positions) // 2
                piece[positions[:half]] = new[:half]
            raise StoppedError
        write_all(patch)

    with monkeypatch.context() as patched:
        patched.setattr(bits.HostPatch, "write", write_some)
        try:
            receiver.apply()
        except StoppedError:
            assert receiver.is_partial and receiver.content is None and receiver.published is None
            for refused in (receiver.digest, partial(receiver.stage, steps.delta)):
                with pytest.raises(IncompleteError, match="holds a mixture"):
                    refused()
            left = 1
            with pytest.raises(StoppedError):
                receiver.apply()
            assert receiver.is_partial
    if receiver.is_partial:
        receiver.apply()
    assert held(module) == held(loaded(Converting, steps.target))
    assert receiver.content == content(steps.delta) and not receiver.is_partial
    receiver.stage(steps.deltas[1])
    receiver.apply()
    assert held(module) == held(loaded(Converting, steps.checkpoints[2]))


def test_a_loader_that_fails_while_it_is_applied(tmp_path: Path) -> None:
    bits = new_bits(ALL)
    base = write(tmp_path / "base", ALL, bits)
    bits["a_log"][1] ^= 1
    target = write(tmp_path / "target", ALL, bits)
    diff(base, target, tmp_path / "delta")
    module = loaded(Converting, base)
    works = module.load_weights
    is_failing = False

    def load(weights: Any) -> None:
        if is_failing:
            raise OSError("gone")
        works(weights)

    receiver = Receiver(module, load, checkpoint=base)
    assert receiver.stage(tmp_path / "delta").loaded == ("a_log",)
    is_failing = True
    for _ in range(2):
        with pytest.raises(HookError, match="its loader failed: OSError: gone"):
            receiver.apply()
        assert receiver.is_partial and receiver.content is None
    is_failing = False
    receiver.apply()
    assert held(module) == held(loaded(Converting, target))


def test_nothing_is_staged(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    receiver = Receiver(loaded(Engine, steps.base))
    with pytest.raises(UsageError, match=r"^apply: nothing is staged"):
        receiver.apply()
    receiver.stage(steps.delta)
    receiver.give_up()
    with pytest.raises(UsageError, match=r"^apply: nothing is staged"):
        receiver.apply()


def test_somebody_else_has_written_to_the_module(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    module = loaded(Engine, steps.base)
    receiver = Receiver(module)
    receiver.stage(steps.delta)
    module.load_weights([(name, torch.zeros_like(weight)) for name, weight in weights_of(steps.base)])
    before = held(module)
    with pytest.raises(ConflictError, match="has other bits than when the change was staged"):
        receiver.apply()
    assert held(module) == before and not receiver.is_partial
    module = loaded(Engine, steps.base)
    receiver = Receiver(module)
    receiver.stage(steps.delta)
    module.o.data = module.o.data.clone()
    with pytest.raises(ConflictError, match="tensor o does not lie any more where it lay"):
        receiver.apply()
    # What has nothing of a checkpoint may be anywhere.
    module = loaded(Engine, steps.base)
    receiver = Receiver(module)
    receiver.stage(steps.delta)
    module.rotary = module.rotary.clone()
    receiver.apply()
    assert held(module) == held(loaded(Engine, steps.target))


def test_what_somebody_has_written_elsewhere_is_seen_by_its_digest_alone(tmp_path: Path) -> None:
    bits = new_bits(FORMS)
    base = write(tmp_path / "base", FORMS, bits)
    bits["o.weight"][3] ^= 1
    target = write(tmp_path / "target", FORMS, bits)
    diff(base, target, tmp_path / "delta")
    module = loaded(Engine, base)
    receiver = Receiver(module, checkpoint=base)
    receiver.learn()
    module.o.data.view(-1)[-1] += 1
    staged = receiver.stage(tmp_path / "delta")
    assert receiver.apply() is staged and receiver.digest() != staged.shares
    module.load_weights(weights_of(target))
    assert receiver.digest() == staged.shares


def weights_of(root: Path) -> list[tuple[str, Any]]:
    from live_modules import weights_in

    return list(weights_in(root))


def test_places_that_should_agree_and_do_not(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    module = loaded(Engine, steps.base)
    receiver = Receiver(module)
    receiver.stage(steps.delta)
    receiver.apply()
    module.norm_copy[3] = 7
    with pytest.raises(DamagedError, match="two places of module Engine that should hold the same bits differ"):
        receiver.digest()


def test_a_state_dict_is_a_loader(tmp_path: Path) -> None:
    forms: Forms = {"weight": ("BF16", (6, 5)), "bias": ("F32", (6,))}
    steps = Steps(tmp_path, forms, 4)

    def make() -> Any:
        module = torch.nn.Linear(5, 6)
        module.weight = torch.nn.Parameter(module.weight.to(torch.bfloat16))
        module.load_state_dict(dict(weights_of(steps.base)))
        return module

    module = make()
    receiver = Receiver(module)
    for delta, target in zip(steps.deltas, steps.checkpoints[1:], strict=True):
        receiver.stage(delta)
        receiver.apply()
        expected = make()
        expected.load_state_dict(dict(weights_of(target)))
        assert held(module) == held(expected)


def test_a_loader_that_wants_a_dict_is_told_of_what_it_is_given(tmp_path: Path) -> None:
    forms: Forms = {"weight": ("F32", (6, 5)), "bias": ("F32", (6,))}
    base = write(tmp_path / "base", forms, new_bits(forms))
    module = torch.nn.Linear(5, 6)
    module.load_state_dict(dict(weights_of(base)))
    receiver = Receiver(module, module.load_state_dict, checkpoint=base)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="its loader failed: TypeError") as told:
        receiver.learn()
    assert told.value.hint is not None and "lambda weights: LOAD(dict(weights))" in told.value.hint
    Receiver(module, lambda weights: module.load_state_dict(dict(weights)), checkpoint=base).learn()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((MODULE.state_dict(), None, None), "module: is of type OrderedDict, a torch.nn.Module expected"),
        ((MODULE, "step-1", None), "load_weights: is of type str, a function expected"),
        ((MODULE, None, MODULE), "twin: is no pair of a module and its loader"),
        ((MODULE, None, ("step-1", None)), "twin: is of type str, a torch.nn.Module expected"),
        ((MODULE, None, (MODULE, 7)), "twin: is of type int, a function expected"),
    ],
)
def test_what_is_no_module_and_no_loader(given: tuple[Any, Any, Any], what: str) -> None:
    module, load, twin = given
    with pytest.raises(UsageError, match=f"^{what}"):
        Receiver(module, load, twin=twin)


def test_what_is_no_plain_memory_is_refused(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FORMS)
    module = Engine()
    module.lost = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedError, match="tensor lost is a Tensor on meta, no plain elements"):
        Receiver(module).stage(steps.delta)
    module = Engine()
    module.register_buffer("bytes", module.norm.data.view(torch.uint8))
    with pytest.raises(UnsupportedError, match="tensor bytes shares bytes with one of another dtype: float32, uint8"):
        Receiver(module).stage(steps.delta)


def test_blocks_of_more_than_one_and_many_threads(tmp_path: Path) -> None:
    forms: Forms = {"weight": ("BF16", (700, 1000)), "bias": ("F32", (5,))}
    for encoding in ("gap", "context", "whole"):
        steps = Steps(tmp_path / encoding, forms, encoding=encoding)
        module = torch.nn.Linear(1000, 700).to(torch.bfloat16)
        module.bias = torch.nn.Parameter(torch.zeros(5))
        module.load_state_dict(dict(weights_of(steps.base)))
        receiver = Receiver(module, jobs=3)
        receiver.stage(steps.delta)
        receiver.apply()
        expected = open_checkpoint(steps.target)
        found = np.frombuffer(b"".join(held(module).values()), np.uint8)
        data = np.empty(expected.by_name["weight"].bytes, np.uint8)
        with expected.reader() as reader:
            reader.read_into(expected.by_name["weight"], 0, data)
        assert np.array_equal(found[-len(data) :], data)
