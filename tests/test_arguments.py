"""What functions of the library refuse before they look at anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.diff import diff
from dcr_cli.errors import UsageError
from dcr_cli.inspect import inspect
from dcr_cli.show import show
from dcr_cli.verify import verify

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", ["nul\0", "surrogate\ud800"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda path: diff(path, HERE), "base"),
        (lambda path: apply(path, HERE), "delta"),
        (lambda path: apply(HERE, path), "checkpoint"),
        (lambda path: apply(HERE, HERE / "none", to=path), "output"),
        (lambda path: show(path), "delta"),
        (lambda path: inspect(path), "checkpoint"),
        (lambda path: verify(path), "checkpoint"),
        (lambda path: verify(path, delta=HERE), "checkpoint"),
        (lambda path: verify(HERE, delta=path), "delta"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_no_path_has(call: Callable[[str | Path], object], name: str, path: str, kind: type) -> None:
    with pytest.raises(UsageError, match=f"^{name}: has a character that no path has"):
        call(kind(path))


def test_what_no_path_of_two_checkpoints_has(tiny_pair: tuple[Path, Path]) -> None:
    base, target = tiny_pair
    with pytest.raises(UsageError, match=r"^target: "):
        diff(base, "nul\0")
    with pytest.raises(UsageError, match=r"^output: "):
        diff(base, target, "nul\0")
    with pytest.raises(UsageError, match=r"^reference: "):
        verify(base, against="nul\0")


@pytest.mark.parametrize("jobs", [0, -1])
@pytest.mark.parametrize(
    "call",
    [
        lambda jobs: diff(HERE, HERE, jobs=jobs),
        lambda jobs: apply(HERE, HERE / "none", jobs=jobs),
        lambda jobs: show(HERE, jobs=jobs),
        lambda jobs: verify(HERE, jobs=jobs),
        lambda jobs: verify(HERE, against=HERE, jobs=jobs),
    ],
)
def test_numbers_of_threads(call: Callable[[int], object], jobs: int) -> None:
    with pytest.raises(UsageError, match=f"^jobs: a number from 1 on expected, found {jobs}$"):
        call(jobs)
