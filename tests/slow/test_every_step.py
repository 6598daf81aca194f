"""Push, stopped at every single step and call, as test_push_crash.py does at some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from test_push_crash import SCENES, Scene, check_kills, check_stops, make_scene


# A lock that nobody had taken over yet when all stopped is let go by its destructor, which is stopped too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", SCENES)
def test_stopped_at_every_step(tmp_path: Path, make: Callable[[Scene], tuple[Callable[[], object], list[int]]]) -> None:
    check_stops(make_scene(tmp_path), make, 1)


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("make", SCENES)
def test_stopped_at_every_call(
    tmp_path: Path, make: Callable[[Scene], tuple[Callable[[], object], list[int]]], when: str
) -> None:
    check_kills(make_scene(tmp_path), make, 1, when)
