"""What functions of the library refuse before they look at anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dcr_cli.anchor import anchor
from dcr_cli.apply import apply
from dcr_cli.arguments import version_of
from dcr_cli.commit import commit
from dcr_cli.diff import diff
from dcr_cli.errors import UsageError
from dcr_cli.inspect import inspect
from dcr_cli.pull import pull
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


@pytest.mark.parametrize(("text", "version"), [("1", 1), ("10", 10), ("9999999999", 9_999_999_999)])
def test_versions(text: str, version: int) -> None:
    assert version_of(text, "--version") == version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "007",
        "-1",
        "+1",
        "1.5",
        "1 ",
        "1_0",
        "1e3",
        "latest",
        "v",
        "10000000000",
        str(1 << 63),
        "\u0661",
        "\xb2",
    ],
)
def test_what_is_no_version(text: str) -> None:
    """There is one form of each."""
    with pytest.raises(
        UsageError, match=r"^--version: a version is a number from 1 to 9999999999 without zeros"
    ) as caught:
        version_of(text, "--version")
    assert caught.value.hint == "dcr log REMOTE lists them"


def test_a_version_that_may_hold_a_secret_is_not_repeated() -> None:
    with pytest.raises(UsageError, match=r"found something else$"):
        version_of("s3://key:secret@bucket", "--version")


@pytest.mark.parametrize("version", [0, -1, 10_000_000_000])
@pytest.mark.parametrize(
    "call",
    [
        lambda version: pull(HERE, HERE / "none", version=version),
        lambda version: commit(HERE, version),
        lambda version: anchor(HERE, HERE / "none", version=version),
        lambda version: verify(HERE, remote=HERE / "none", version=version),
        lambda version: show(f"{HERE}@{version:02}".replace("@-", "@0")),
    ],
)
def test_what_no_history_has(call: Callable[[int], object], version: int) -> None:
    with pytest.raises(UsageError, match=r"^version: a version is a number"):
        call(version)
