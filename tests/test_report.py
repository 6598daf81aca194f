"""What people read: numbers, names, tables, progress; and documents that any locale can hold."""

from __future__ import annotations

import io
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcr_cli.checkpoint.digest import State
from dcr_cli.errors import size
from dcr_cli.report import documents, people
from dcr_cli.report.progress import Progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (45_437_712, "45.4 MB"),
        (10**12, "1 TB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0 %"),
        (0, 5, "0 %"),
        (5, 5, "100.00 %"),
        (1, 10**12, "0.0001 %"),
        (10**12 - 1, 10**12, "99.99 %"),
        (1, 100, "1.00 %"),
        (1, 3000, "0.033 %"),
    ],
)
def test_shares(part: int, whole: int, text: str) -> None:
    assert people.share(part, whole) == text


def test_many_names_are_cut() -> None:
    assert people.names(["a", "b"]) == "a, b"
    assert people.names([str(number) for number in range(100)], 2) == "0, 1 and 98 more"


def test_names_cannot_break_a_line() -> None:
    assert "\n" not in people.names(["a\nb", "\x1b[2J", "\u202e"])
    assert "\x1b" not in people.names(["\x1b[2J"])


def test_tables_are_aligned() -> None:
    lines = list(people.table(("name", "bytes"), [("a", "1"), ("longer", "1,000")], frozenset({1})))
    assert [line.text for line in lines] == ["  name    bytes", "  a           1", "  longer  1,000"]


def test_off_a_terminal_lines_are_as_they_are() -> None:
    lines = [people.Line("[red]" + "x" * 500, "bold red")]
    assert people.render(lines, io.StringIO()) == "[red]" + "x" * 500 + "\n"


def test_documents_are_ascii_and_whole() -> None:
    @dataclass
    class Result:
        state: State
        path: Path
        rows: tuple[tuple[str, int], ...]
        names: dict[str, int]

    result = Result(State(b"\1" * 32, b"\2" * 32), Path("/a"), (("h\u00e4\udcff", 1),), {"x": 2**63})
    text = documents.to_text(documents.of_result(result))
    assert text.isascii() and text.count("\n") == 1
    assert json.loads(text) == {
        "state": {"content": "blake3:" + "01" * 32, "files": "blake3:" + "02" * 32},
        "path": "/a",
        "rows": [["h\u00e4\udcff", 1]],
        "names": {"x": 2**63},
    }
    assert "rows" not in documents.of_result(result, leave_out=("rows",))


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    times = itertools.count(0.0, 0.1)
    with Progress(clock=lambda: next(times)) as progress:
        for done in range(10):
            progress("diff", done, 10)
    assert capsys.readouterr() == ("", "")


def test_long_work_off_a_terminal_shows_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = itertools.count(0.0, 1.0)
    with Progress(clock=lambda: next(times)) as progress:
        for done in range(30):
            progress("diff", done * 10**6, 3 * 10**7)
    out, err = capsys.readouterr()
    assert out == "" and 3 <= err.count("\n") <= 8
    assert all(line.startswith("diff: ") and " of 30 MB (" in line for line in err.splitlines())
    assert "\r" not in err and "\x1b" not in err


def test_progress_can_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    times = itertools.count(0.0, 100.0)
    with Progress(shown=False, clock=lambda: next(times)) as progress:
        progress("diff", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_that_nobody_can_read_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    times = itertools.count(0.0, 100.0)
    with Progress(clock=lambda: next(times)) as progress:
        progress("diff", 1, 2)
        progress("diff", 2, 2)
