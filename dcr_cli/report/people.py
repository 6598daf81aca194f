"""Results as lines for people.

Each function yields the lines of one result. Styles show only on a terminal; elsewhere a line is its plain text, never
wrapped. Names from files are escaped where they would break a line.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dcr_cli.errors import one_line

if TYPE_CHECKING:
    from dcr_cli.apply import ApplyResult
    from dcr_cli.diff import DiffResult
    from dcr_cli.inspect import InspectResult
    from dcr_cli.show import ShowResult
    from dcr_cli.verify import Difference, VerifyResult

MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    style: str = ""


def render(lines: Iterable[Line], stream: IO[str] | None) -> str:
    """Write lines as text for `stream`: with styles if it is a terminal that has them."""
    if stream is None or not stream.isatty():
        return "".join(f"{line.text}\n" for line in lines)
    from rich.console import Console
    from rich.text import Text

    page = io.StringIO()
    console = Console(file=page, force_terminal=True, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(line.text, style=line.style))
    return page.getvalue()


def size(count_bytes: int) -> str:
    """Write a number of bytes with three significant digits."""
    number, unit = float(count_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    return f"{count_bytes} B" if unit == "B" else f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def share(part: int, whole: int) -> str:
    """Write part / whole in percent; what is not nothing never reads as 0, what is not all never as 100."""
    if whole == 0 or part == 0:
        return "0 %"
    percent = 100 * part / whole
    if part < whole and percent > 99.99:
        return "99.99 %"
    return f"{max(percent, 0.0001):.2g} %" if percent < 10 else f"{percent:.4g} %"


def amount(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def columns(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> Iterator[Line]:
    """Align rows of cells under the first one, their heading; columns in `numbers` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for place, row in enumerate(rows):
        cells = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield Line("  ".join(cells).rstrip(), "bold" if place == 0 else "")
