"""Results about layouts as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcr_cli.report.people import Line, amount, facts, names, shape, table

if TYPE_CHECKING:
    from dcr_cli.layouts import BoxFacts, CheckLayoutResult, LayoutResult, LocalFacts

_REACHED = ("shapes", "as far as these shards reach; --base CHECKPOINT says how large tensors are")


def layout_lines(result: LayoutResult) -> Iterator[Line]:
    """Sums, then local tensors and their boxes if the result has them."""
    yield Line(names([result.layout]), "bold")
    rows = [
        ("tensors", f"{result.tensors:,}, {amount(result.elements, 'element')}"),
        ("shards", f"{result.shards:,}, {amount(result.local_tensors, 'local tensor')}"),
        ("boxes", f"{result.boxes:,}, {amount(result.placed_elements, 'element')}"),
        ("padding", amount(result.padding, "element")),
    ]
    rows += [(kind, f"makes {amount(count, 'tensor')}") for kind, count in sorted(result.rules.items())]
    if result.skipped:
        rows.append(("skipped", names(result.skipped)))
    if not result.has_known_shapes:
        rows.append(_REACHED)
    if result.output is not None:
        rows.append(("written", names([result.output])))
    yield from facts(rows)
    if result.rows:
        yield Line("")
        heading = ("shard", "local tensor", "dtype", "shape", "from", "elements", "box")
        cells = [cell for row in result.rows for cell in _cells(row)]
        yield from table(heading, cells, frozenset({5}))


def _cells(row: LocalFacts) -> Iterator[tuple[str, ...]]:
    begin = (names([row.shard]), names([row.name]), row.dtype, shape(row.shape))
    for box in row.boxes:
        yield *begin, names([box.tensor]), f"{box.elements:,}", _box(box)
        begin = ("", "", "", "")
    if row.padding:
        yield *begin, "-", f"{row.padding:,}", "zeros" if row.fill == "zero" else "kept"


def _box(box: BoxFacts) -> str:
    axes = ", ".join(f"{count} x {canonical}:{local}" for count, canonical, local in box.axes)
    return f"{box.canonical_offset}:{box.local_offset}" + (f" + {axes}" if axes else "")


def check_lines(result: CheckLayoutResult) -> Iterator[Line]:
    """That a layout is right, and what was checked."""
    yield Line(f"right: {names([result.layout])}", "bold green")
    rows = [("tensors", f"{result.tensors:,}, {amount(result.elements, 'element')}, each owned once")]
    told = "read, and equal" if result.is_deep else "not read"
    rows.append(("replicas", f"{amount(result.replica_elements, 'element')}, {told}"))
    rows.append(
        (
            "shards",
            amount(result.shards, "file") + (f", those of {names([result.checkpoint])}" if result.checkpoint else ""),
        )
    )
    if not result.has_known_shapes:
        rows.append(_REACHED)
    if result.base is not None:
        rows.append(("base", f"{names([result.base])} has the same tensors"))
    yield from facts(rows)
