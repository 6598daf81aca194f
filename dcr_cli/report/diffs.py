"""What comparing two checkpoints has found, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcr_cli.errors import size
from dcr_cli.report.notes import form_note
from dcr_cli.report.people import Line, amount, facts, names, not_read_facts, shape, share, state, table

if TYPE_CHECKING:
    from dcr_cli.diff import DiffResult


def diff_lines(result: DiffResult, *, stat: bool) -> Iterator[Line]:
    """The changes, what the delta takes, and with `stat` every tensor that is not the same."""
    yield Line("same state" if result.same else "different states", "bold")
    yield from form_note(result)
    yield from facts(_diff_facts(result))
    rows = [row for row in result.rows if row.kind != "same"]
    if stat and rows:
        heading = ("tensor", "dtype", "shape", "what", "changed", "share", "encoding", "bytes")
        yield Line("")
        yield from table(
            heading,
            [
                (
                    names([row.name]),
                    row.dtype,
                    shape(row.shape),
                    row.kind,
                    f"{row.changed_elements:,}",
                    share(row.changed_elements, row.elements),
                    row.encoding or "-",
                    f"{row.delta_bytes:,}",
                )
                for row in rows
            ],
            frozenset({4, 5, 7}),
        )


def _diff_facts(result: DiffResult) -> Iterator[tuple[str, str]]:
    changes = [("changed", result.changed_tensors), ("added", len(result.added)), ("removed", len(result.removed))]
    changes += [
        ("replaced", len(result.replaced)),
        ("renamed", len(result.renamed)),
        ("in another shard", len(result.moved)),
    ]
    told = "".join(f", {count:,} {what}" for what, count in changes if count or what == "changed")
    yield "tensors", f"{result.tensors:,}{told}"
    changed = f"{result.changed_elements:,} changed ({share(result.changed_elements, result.elements)})"
    yield "elements", f"{result.elements:,}, {changed}"
    yield from not_read_facts(result.not_read)
    if result.files_changed:
        yield "files", f"{len(result.files_changed):,} changed: {names(result.files_changed)}"
    takes = f"{size(result.delta_bytes)}, {share(result.delta_bytes, result.dense_bytes)} of a full copy"
    yield "delta", f"{takes} ({size(result.dense_bytes)})"
    if result.encodings and result.dry_run:
        for label, count in sorted(result.encodings.items()):
            yield label, f"{amount(count, 'tensor')}, {size(result.encoding_bytes[label])}"
    elif result.encodings:
        yield "encodings", ", ".join(f"{label} {count:,}" for label, count in sorted(result.encodings.items()))
    yield "base", state(result.base)
    yield "target", state(result.target)
    if result.dry_run:
        where = f"to {names([result.output])} " if result.output is not None else ""
        yield "dry run", f"{size(result.delta_bytes)} {where}would be written; nothing was"
    elif result.output is not None:
        yield "written to", names([result.output])
