"""SGLang's way in: a function that takes a model and named tensors, of which it is told by --custom-weight-loader.

    --custom-weight-loader dcr_cli.serving.sglang.load

`/update_weights_from_tensor` with this as its `load_format` gives it what the caller sends. What is sent here are no
weights but a message, as the bytes of a tensor that `message` makes: the weights come from a remote. The model itself
keeps its session, so that both go together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.serving.agreeing import Answer, Answers, Rank, refuse
from dcr_cli.serving.session import Session, Settings, begin

CALLS = ("init", "update", "finish")
_NAME = "dcr"
_HINT = "dcr_cli.serving.sglang.message makes what is sent"
# The attribute of a model in which its session is kept.
_ATTRIBUTE = "_dcr_session"


class _Kept:
    """What a model keeps. A copy of the model, or a pickled one, is no receiver."""

    __slots__ = ("session",)

    def __init__(self, session: Session | None = None) -> None:
        self.session = session

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def message(call: str, **info: Any) -> list[tuple[str, Any]]:
    """Make the named tensors of a call: "init" with the fields of `Settings`, "update" with `version`, which begins to
    stage that while the engine serves, "finish" with nothing, which writes it."""
    data = json.dumps({"call": call, "info": info}).encode()
    return [(_NAME, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Do what a message says, with a model of SGLang's, on all ranks or on none. UsageError for anything else than a
    message; what `Session` raises, of which the engine makes what it makes of errors of its loaders."""
    rank = _rank()
    try:
        call, info = _read(named_tensors)
    except Exception as error:
        refuse(rank, "read", error)
    if call == "init":
        _begin(model, info, rank)
        return
    kept = vars(model).get(_ATTRIBUTE)
    session = kept.session if kept is not None else None
    if session is None:
        refuse(rank, call, UsageError("dcr", "is no receiver yet", hint='send message("init", ...) first'))
    if call == "update":
        session.update_as(info)
    else:
        session.finish()


def _begin(model: Any, info: Mapping[str, Any], rank: Rank) -> None:
    def read() -> Mapping[str, Any]:
        if info.get("layouts") is not None and not info.get("key"):
            facts = "has layouts without a key"
            raise UsageError("message init", facts, hint="say what they are of: model, engine version, parallel sizes")
        return info

    def make(settings: Settings) -> Session:
        return Session(model, model.load_weights, settings, rank)

    # While a model is learnt it has nothing that its engine has not given it.
    kept = vars(model).pop(_ATTRIBUTE, None) or _Kept()
    try:
        kept.session = begin(rank, kept.session, read, make)
    finally:
        vars(model)[_ATTRIBUTE] = kept


def _rank() -> Rank:
    number, count = 0, 1
    if torch.distributed.is_initialized():
        number, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    key = f"rank {number} of {count}"
    if count == 1:
        return Rank(number, key, settle=_synchronize)

    def hear(answer: Answer) -> Answers:
        answers: list[Any] = [None] * count
        torch.distributed.all_gather_object(answers, answer)
        return answers

    return Rank(number, key, hear, _synchronize)


def _read(named_tensors: Iterable[tuple[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    found = list(named_tensors)
    if [name for name, _ in found] != [_NAME] or found[0][1].dtype != torch.uint8:
        names = shown(", ".join(name for name, _ in found[:3]))
        raise UsageError("named tensors", f"are {names}, a message expected", hint=_HINT)
    try:
        document = strict_json(found[0][1].cpu().numpy().tobytes(), "message")
    except DamagedError as error:
        raise UsageError("message", error.facts, hint=_HINT) from error
    if type(document) is not dict or document.get("call") not in CALLS or type(document.get("info")) is not dict:
        raise UsageError("message", f"call is one of {', '.join(CALLS)}, and info its members", hint=_HINT)
    if document["call"] == "finish" and document["info"]:
        raise UsageError("message finish", "has no members", hint=_HINT)
    return document["call"], document["info"]


def _synchronize() -> None:
    """Let steps of the model that were begun end."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
