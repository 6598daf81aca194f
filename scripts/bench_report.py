"""What a benchmark says: rows with goals, as tables for people and members of one JSON line. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

PARTS = ("wire", "codec", "commands", "layouts", "live", "memory", "tiny", "startup", "relay")
# A goal that is beaten by this factor is met with ease, and asks to be raised.
EASE = 1.25


class BenchError(Exception):
    """A result that is not what it should be, or something that is needed and missing: the run ends."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The number to reach: `at_most` or at least `limit`."""

    limit: float
    at_most: bool

    def is_met(self, value: float, *, factor: float = 1.0) -> bool:
        """Whether `value` reaches the goal, `factor` times over."""
        return value * factor <= self.limit if self.at_most else value >= self.limit * factor


def at_most(limit: float) -> Goal:
    return Goal(limit, True)


def at_least(limit: float) -> Goal:
    return Goal(limit, False)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number: `value` in `unit`, of `what` in the case of its section."""

    part: str
    case: str
    what: str
    value: float
    unit: str
    goal: Goal | None
    note: str

    @property
    def verdict(self) -> str:
        """Whether the goal is met: yes, with ease, NO; nothing where there is none."""
        if self.goal is None:
            return ""
        if not self.goal.is_met(self.value):
            return "NO"
        return "with ease" if self.goal.is_met(self.value, factor=EASE) else "yes"

    def document(self) -> dict[str, Any]:
        """The row as plain values."""
        goal = None if self.goal is None else {"limit": self.goal.limit, "at_most": self.goal.at_most}
        met = None if self.goal is None else self.goal.is_met(self.value)
        return {
            "part": self.part,
            "case": self.case,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": goal,
            "met": met,
            "note": self.note,
        }


@dataclass(slots=True)
class Report:
    """Collects rows and prints each section's table to `stream` when the section ends."""

    stream: IO[str]
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _part: str = ""
    _case: str = ""
    _open: list[Row] = field(default_factory=list)

    def begin(self, part: str, case: str) -> None:
        """Begin a section; the one before ends."""
        self.end()
        self._part, self._case = part, case

    def add(self, what: str, value: float, unit: str, goal: Goal | None = None, note: str = "") -> None:
        """Add a row to the section."""
        self._open.append(Row(self._part, self._case, what, float(value), unit, goal, note))

    def end(self) -> None:
        """Print the section's table."""
        if self._open:
            print(f"\n{self._part}: {self._case}", file=self.stream)
            for line in table(self._open):
                print(f"  {line}", file=self.stream, flush=True)
        self.rows += self._open
        self._open = []

    def leave_out(self, what: str) -> None:
        """Say what was not measured, and why."""
        self.left_out.append(what)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines that show `rows`, aligned, under a heading."""
    cells = [("what", "measured", "goal", "met", "note")]
    for row in rows:
        goal = ""
        if row.goal is not None:
            goal = f"{'<=' if row.goal.at_most else '>='} {number(row.goal.limit, row.unit)}"
        cells.append((row.what, number(row.value, row.unit), goal, row.verdict, row.note))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        f"{what:<{widths[0]}}  {value:>{widths[1]}}  {goal:>{widths[2]}}  {verdict:<{widths[3]}}  {note}".rstrip()
        for what, value, goal, verdict, note in cells
    ]


def number(value: float, unit: str) -> str:
    """Write a number so that its last digit still means something."""
    places = (
        0 if value >= 1000 or unit == "MiB" else 1 if unit == "%" else 3 if value < 10 and unit in ("x", "s") else 2
    )
    return f"{value:,.{places}f} {unit}"
