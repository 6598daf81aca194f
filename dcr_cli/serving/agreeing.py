"""Ranks of one engine that are told the same at the same time: each hears from all whether they can go on, all go on or
none does, and the first one that cannot speaks for all.

So that nobody waits for one that has gone away, whatever fails on a rank is heard of by the others: each asks as often
as they do. Which group of processes hears each other is the engine's matter: vllm.py and sglang.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from dcr_cli import errors
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DcrError, HookError, UsageError

_SAME = "send the same to all ranks"
_LOST = "see whether all ranks live; else start the engine again"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong on a rank, as it goes from process to process: the name of an error's class, and its texts."""

    kind: str
    what: str
    facts: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says before it goes on with a `call`: where it stands, if it is a receiver, and what is wrong."""

    rank: int
    call: str
    version: int | None = None
    is_partial: bool = False
    fault: Fault | None = None


Answers = Sequence[Answer]


def _alone(answer: Answer) -> Answers:
    return (answer,)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank among those of its engine: its number, and in words what its placement is one of. `hear` has what it and
    all others say, who ask at the same time, by their numbers; `settle` lets steps that were begun end."""

    number: int
    key: str
    hear: Callable[[Answer], Answers] = field(default=_alone, repr=False)
    settle: Callable[[], None] = field(default=_nothing, repr=False)

    @property
    def what(self) -> str:
        return f"rank {self.number} of the engine"


def ask_all(rank: Rank, answer: Answer) -> Answers:
    """Hear what all ranks say. HookError if they cannot be heard."""
    try:
        return tuple(rank.hear(answer))
    except Exception as error:
        facts = f"cannot hear the other ranks: {type(error).__name__}: {error}"
        raise HookError(rank.what, facts, hint=_LOST) from error


def fault_of(error: BaseException) -> Fault:
    """Put an error in words; one that is none of dcr's own is a HookError."""
    if isinstance(error, DcrError):
        return Fault(error.class_name, error.what, error.facts, error.hint)
    return Fault(HookError.__name__, "dcr", f"{type(error).__name__}: {error}", None)


def check_all(answers: Answers, *, where: str | None = None, hint: str | None = None) -> None:
    """Raise what the first rank says that cannot go on, with `where` all of them stand, and with `hint` in place of its
    own; UsageError if they were told different things."""
    first = next((each for each in answers if each.fault is not None), None)
    if first is None or first.fault is None:
        calls = sorted({each.call for each in answers})
        if len(calls) > 1:
            raise UsageError("engine", f"its ranks were told different things: {listed(calls)}", hint=_SAME)
        return
    fault, own = first.fault, f"rank {first.rank} of the engine"
    is_named = len(answers) == 1 or fault.what == own
    facts = f"{fault.facts}; {where}" if where is not None else fault.facts
    raise getattr(errors, fault.kind)(
        fault.what if is_named else f"{own}, {fault.what}", facts, hint=hint or fault.hint
    )


def refuse(rank: Rank, call: str, error: Exception) -> NoReturn:
    """Say to all ranks that this one cannot do what all were told, and raise why, or what is wrong on one before it."""
    answers = ask_all(rank, Answer(rank.number, call, fault=fault_of(error)))
    try:
        check_all(answers)
    except DcrError as first:
        raise first from error
    raise error


def standing(answers: Answers) -> str:
    """Where ranks stand, in words."""
    stands: dict[str, list[str]] = {}
    for each in answers:
        version = each.version or 0
        stand = f"a mixture of versions {version} and {version + 1}" if each.is_partial else f"version {version}"
        stands.setdefault(stand, []).append(str(each.rank))
    if len(stands) == 1:
        (stand,) = stands
        return f"the module is at {stand}" if len(answers) == 1 else f"all ranks are at {stand}"
    return "; ".join(f"rank {shown(listed(numbers))} is at {stand}" for stand, numbers in stands.items())


def is_one_version(answers: Answers) -> bool:
    """Whether all ranks are at one version, and none holds a mixture."""
    return len({each.version for each in answers}) == 1 and not any(each.is_partial for each in answers)
