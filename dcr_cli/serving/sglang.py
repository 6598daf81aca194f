"""SGLang's way in: a function that takes a model and named tensors, of which it is told by --custom-weight-loader.

    --custom-weight-loader dcr_cli.serving.sglang.load

`/update_weights_from_tensor` with this as its `load_format` gives it what the caller sends. What is sent here are no
weights but a message, as the bytes of a tensor that `message` makes: the weights come from a remote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UsageError
from dcr_cli.serving.session import Rank, Session, Settings

CALLS = ("init", "update", "finish")
_NAME = "dcr"
_HINT = "dcr_cli.serving.sglang.message makes what is sent"

_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()


def message(call: str, **info: Any) -> list[tuple[str, Any]]:
    """Make the named tensors of a call: "init" with the fields of `Settings`, "update" with `version`, which begins to
    stage that while the engine serves, "finish" with nothing, which writes it."""
    data = json.dumps({"call": call, "info": info}).encode()
    return [(_NAME, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Do what a message says, with a model of SGLang's. UsageError for anything else than a message; what `Session`
    raises, of which the engine makes what it makes of errors of its loaders."""
    call, info = _read(named_tensors)
    if call == "init":
        _begin(model, _settings(info))
        return
    session = _sessions.get(model)
    if session is None:
        raise UsageError("dcr", "is no receiver yet", hint='send message("init", ...) first')
    if call == "update":
        version = info.get("version")
        if type(version) is not int or len(info) != 1:
            raise UsageError("message update", "has a version, a number, and nothing else", hint=_HINT)
        session.update(version)
    else:
        if info:
            raise UsageError("message finish", "has no members", hint=_HINT)
        _synchronize()
        session.finish()
        _synchronize()


def _begin(model: Any, settings: Settings) -> None:
    session = _sessions.pop(model, None)
    if session is not None:
        if session.is_partial:
            _sessions[model] = session
            raise UsageError("dcr", "holds a mixture: an update was stopped", hint='send message("finish") again')
        session.close()
    number, count = 0, 1
    if torch.distributed.is_initialized():
        number, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = next(model.parameters()).device

    def agree(is_right: bool) -> bool:
        if count == 1:
            return is_right
        flag = torch.tensor([int(is_right)], device=device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    _synchronize()
    _sessions[model] = Session(model, model.load_weights, settings, Rank(number, f"rank {number} of {count}", agree))


def _read(named_tensors: Iterable[tuple[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    found = list(named_tensors)
    if [name for name, _ in found] != [_NAME] or found[0][1].dtype != torch.uint8:
        names = shown(", ".join(name for name, _ in found[:3]))
        raise UsageError("named tensors", f"are {names}, a message expected", hint=_HINT)
    document = strict_json(found[0][1].cpu().numpy().tobytes(), "message")
    if type(document) is not dict or document.get("call") not in CALLS or type(document.get("info")) is not dict:
        raise UsageError("message", f"call is one of {', '.join(CALLS)}, and info its members", hint=_HINT)
    return document["call"], document["info"]


def _settings(info: Mapping[str, Any]) -> Settings:
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(info) - known):
        raise UsageError("message init", f"has {shown(', '.join(unknown))}, unknown to this dcr", hint=_HINT)
    if not {"remote", "version"} <= set(info):
        raise UsageError("message init", "has a remote and a version", hint=_HINT)
    if info.get("layouts") is not None and not info.get("key"):
        facts = "has layouts without a key"
        raise UsageError("message init", facts, hint="say what they are of: model, engine version, parallel sizes")
    return Settings(**info)


def _synchronize() -> None:
    """Let steps of the model that were begun end."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
