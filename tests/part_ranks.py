"""Ranks that publish parts of a version, for tests: each in a thread, all at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcr_cli.errors import DcrError
from dcr_cli.push_part import PartResult, Rank, push_part
from faults import StoppedError

Outcome = PartResult | BaseException


def one_rank(checkpoint: Path, remote: Path, rank: Rank, **options: object) -> Outcome:
    try:
        return push_part(checkpoint, remote, rank, jobs=1, **{"timeout_seconds": 60.0} | options)  # type: ignore[arg-type]
    except (DcrError, StoppedError) as error:
        return error


def all_ranks(
    checkpoint: Path | Callable[[int], Path],
    remote: Path,
    count: int,
    attempt: str = "0",
    *,
    own: Callable[[int], Mapping[str, Any]] = lambda number: {},
    **options: object,
) -> list[Outcome]:
    """What each rank's run comes to; by its number it may have a checkpoint and options of its own."""
    outcomes: dict[int, Outcome] = {}

    def run(number: int) -> None:
        mine = checkpoint if isinstance(checkpoint, Path) else checkpoint(number)
        outcomes[number] = one_rank(mine, remote, Rank(number, count, attempt), **options, **own(number))

    ranks = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [outcomes[number] for number in range(count)]


def results(outcomes: list[Outcome]) -> list[PartResult]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]
