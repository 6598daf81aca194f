"""SGLang's way in, called as it calls a loader of weights: a function of a model and named tensors."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from dcr_cli import pull, push
from dcr_cli.errors import ConflictError, NotFoundError, UsageError
from dcr_cli.serving.settings import Settings
from dcr_cli.serving.sglang import load, message
from live_modules import FORMS, Engine, addresses, held, loaded, new_bits, train, write

PATH = "dcr_cli.serving.sglang.load"


class Server:
    """What SGLang does with a request: it finds the function by its dotted path, and calls it for its model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str = PATH) -> None:
        module, _, name = load_format.rpartition(".")
        getattr(importlib.import_module(module), name)(self.model, named_tensors)


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    bits, found = new_bits(FORMS), []
    for number in (1, 2, 3):
        found.append(write(tmp_path / f"v{number}", FORMS, bits))
        push(found[-1], tmp_path / "remote", baseline=tmp_path / "baseline", encodings=["gap", "whole"], jobs=1)
        bits = train(bits, FORMS, number)
    return found


def begin(versions: list[Path], **options: Any) -> list[tuple[str, Any]]:
    remote = str(versions[0].parent / "remote")
    given = {"remote": remote, "version": 1, "checkpoint": str(versions[0]), "jobs": 1, **options}
    return message("init", **given)


def test_a_model_takes_versions(versions: list[Path]) -> None:
    server = Server(loaded(Engine, versions[0]))
    before = addresses(server.model)
    server.update_weights_from_tensor(begin(versions, name="sglang"))
    for number in (2, 3):
        server.update_weights_from_tensor(message("update", version=number))
        server.update_weights_from_tensor(message("finish"))
        assert held(server.model) == held(loaded(Engine, versions[number - 1]))
    assert addresses(server.model) == before
    said = [path.name for path in (versions[0].parent / "remote").glob("acks/*/*")]
    assert len(said) == 5, said


def test_a_model_takes_what_a_pull_has_decoded(versions: list[Path]) -> None:
    root = versions[0].parent
    remote, changes = root / "remote", root / "changes"
    changes.mkdir()
    pull(remote, root / "replica", version=1, jobs=1)
    pull(remote, root / "replica", publish_changes=changes, jobs=1)
    # All that is fetched of the remote are its commits.
    for path in remote.glob("versions/*/*"):
        path.rename(path.with_name(f"gone-{path.name}"))
    server = Server(loaded(Engine, versions[0]))
    server.update_weights_from_tensor(begin(versions, changes=str(changes)))
    server.update_weights_from_tensor(message("update", version=3))
    server.update_weights_from_tensor(message("finish"))
    assert held(server.model) == held(loaded(Engine, versions[2]))


def test_each_model_has_a_session_of_its_own(versions: list[Path]) -> None:
    one, other = loaded(Engine, versions[0]), loaded(Engine, versions[0])
    for model in (one, other):
        load(model, begin(versions))
    load(one, message("update", version=2))
    load(one, message("finish"))
    assert held(one) == held(loaded(Engine, versions[1]))
    assert held(other) == held(loaded(Engine, versions[0]))
    # Begun anew, it has to be at the version that it is said to be at.
    load(other, begin(versions))
    load(other, message("update", version=4))
    with pytest.raises(ConflictError, match="@4: is not committed"):
        load(other, message("finish"))
    assert held(other) == held(loaded(Engine, versions[0]))
    load(other, message("update", version=3))
    load(other, message("finish"))
    assert held(other) == held(loaded(Engine, versions[2]))


def test_a_model_goes_with_its_session(versions: list[Path]) -> None:
    model = loaded(Engine, versions[0])
    load(model, begin(versions))
    load(model, message("update", version=2))
    other = copy.deepcopy(model)
    with pytest.raises(UsageError, match="is no receiver yet"):
        load(other, message("finish"))
    load(model, message("finish"))
    model = weakref.ref(model)
    gc.collect()
    assert model() is None


def test_an_init_that_is_refused_leaves_what_was_begun(versions: list[Path]) -> None:
    model = loaded(Engine, versions[0])
    load(model, begin(versions))
    load(model, message("update", version=2))
    with pytest.raises(NotFoundError, match="there is no version 9"):
        load(model, message("init", remote=str(versions[0].parent / "remote"), version=9, checkpoint=str(versions[0])))
    load(model, message("finish"))
    assert held(model) == held(loaded(Engine, versions[1]))


WRONG: dict[str, tuple[Any, ...]] = {
    "remote": (5, None, ["a"]),
    "version": ("1", 1.0, True, None, 0, -1, 10**12),
    "checkpoint": (5, ["a"]),
    "name": (7, "", "a/b", "n" * 101),
    "layouts": (5,),
    "changes": ({},),
    "key": (5, None),
    "may_lack": ("layers.1.*", 5, [5], None),
    "trusted_keys": ("x", [5]),
    "receiver_key": (5,),
    "storage_options": ([1], "x"),
    "jobs": ("x", 0, -3, 10**9, True, 1.5),
}


def test_what_is_of_another_type_is_refused_by_its_name(versions: list[Path]) -> None:
    model = loaded(Engine, versions[0])
    assert set(WRONG) == {each.name for each in fields(Settings)}
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(UsageError, match=f"^{name}: has to be ") as told:
                load(model, begin(versions, **{"key": "k", name: value}))
            assert "secret" not in str(told.value)
    with pytest.raises(UsageError, match=r"^layouts: .* is no folder"):
        load(model, begin(versions, key="k", layouts="/no/such/folder"))
    assert "secret" not in repr(Settings(remote="r", version=1, storage_options={"token": "secret"}))


def test_what_is_no_message_is_refused(versions: list[Path]) -> None:
    model = loaded(Engine, versions[0])
    old = held(model)
    weights = [("embed.weight", torch.zeros(2, 2))]
    text = [("dcr", torch.frombuffer(bytearray(b"[]"), dtype=torch.uint8))]
    torn = [("dcr", torch.frombuffer(bytearray(b'{"call": '), dtype=torch.uint8))]
    for wrong in (weights, [], text, torn, message("leave")):
        with pytest.raises(UsageError, match="message"):
            load(model, wrong)
    for call in (message("update", version=2), message("finish")):
        with pytest.raises(UsageError, match="is no receiver yet"):
            load(model, call)
    with pytest.raises(UsageError, match="has wide, unknown"):
        load(model, begin(versions, wide=1))
    with pytest.raises(UsageError, match="init: lacks remote"):
        load(model, message("init", version=1))
    with pytest.raises(UsageError, match="layouts without a key"):
        load(model, begin(versions, layouts=str(versions[0].parent)))
    load(model, begin(versions))
    for info, told in (
        ({"version": "2"}, "version: has to be a number"),
        ({}, "update: lacks version"),
        ({"version": 2, "more": 1}, "update: has more, unknown"),
    ):
        with pytest.raises(UsageError, match=told):
            load(model, message("update", **info))
    with pytest.raises(UsageError, match="has no members"):
        load(model, message("finish", version=2))
    assert held(model) == old
