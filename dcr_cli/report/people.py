"""Results as lines for people.

Each function yields the lines of one result. Styles show only on a terminal; elsewhere a line is its plain text, never
wrapped. Names from files are escaped where they would break a line.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from dcr_cli.errors import size

if TYPE_CHECKING:
    from dcr_cli.checkpoint.digest import State
    from dcr_cli.inspect import InspectResult
    from dcr_cli.receiver.apply_result import ApplyResult
    from dcr_cli.show_result import ShownVersion, ShowResult
    from dcr_cli.verify import TensorDifference, VerifyResult

MOST_LISTED = 20
KEY_DIGITS = 16


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


def share(part: int, whole: int) -> str:
    """Write part / whole in percent; what is not nothing never reads as 0, what is not all never as 100."""
    if whole == 0 or part == 0:
        return "0 %"
    percent = 100 * part / whole
    if part < whole and percent > 99.99:
        return "99.99 %"
    return f"{percent:.2f} %" if percent >= 0.1 else f"{max(percent, 0.0001):.2g} %"


def amount(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def names(given: Sequence[str], most: int = MOST_LISTED) -> str:
    """List names on one line, only so many of them."""
    from dcr_cli.checkpoint.names import listed

    return listed(given, most)


def facts(rows: Iterable[tuple[str, str]]) -> Iterator[Line]:
    """Two columns: what, and how much."""
    for what, value in rows:
        yield Line(f"  {what:<10} {value}")


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[Line]:
    """Align cells under their heading; the columns in `right` to the right."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    for row in (heading, *rows):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield Line("  " + "  ".join(cells).rstrip(), "bold" if row is heading else "")


def state(state: State) -> str:
    """The beginnings of both digests of a state; the JSON has all of them."""
    return f"content {state.content.hex()[:16]}, files {state.files.hex()[:16]}"


def shape(dimensions: Sequence[int]) -> str:
    return "x".join(str(d) for d in dimensions) or "scalar"


def not_read_facts(not_read: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Which tensors a layout skips, if it does: they are in no shard, and nobody knows whether they changed."""
    if not_read:
        yield "not read", f"taken as the base's: {amount(len(not_read), 'tensor')}: {names(not_read)}"


def apply_lines(result: ApplyResult) -> Iterator[Line]:
    """What was done, or would be."""
    where = names([result.checkpoint])
    if result.already:
        yield Line(f"already there: {where} is at the target", "bold green")
    elif result.dry_run:
        yield Line(f"would bring {where} to the target; nothing was changed", "bold")
    else:
        finished = "; a change that had been stopped was finished" if result.recovered else ""
        yield Line(f"done: {where} is at the target{finished}", "bold green")
    yield from facts(_apply_facts(result))


def _apply_facts(result: ApplyResult) -> Iterator[tuple[str, str]]:
    if not result.already:
        counts = (
            ("patched in place", result.patched_shards),
            ("rewritten", result.rewritten_shards),
            ("kept", result.kept_shards),
        )
        yield "tensors", f"{result.changed_tensors:,} changed"
        yield "shards", ", ".join(f"{count:,} {what}" for what, count in counts if count) or "none"
        if result.files_changed:
            yield "files", f"{len(result.files_changed):,}: {names(result.files_changed)}"
        if not result.dry_run:
            yield "written", size(result.bytes_written)
        elif result.room_bytes:
            yield "room", f"{size(result.room_bytes)} needed"
    yield "target", state(result.target)
    if not result.exact:
        yield "note", "it holds the target's tensors and files in shards of its own"
    if result.mode == "in-place" and result.rewritten_shards:
        what = f"{amount(result.rewritten_shards, 'shard')} could not be patched in place"
        yield "note", f"{what}: a link, a file with another name, or one in which tensors move is replaced"
    if result.foreign:
        yield "left alone", f"{amount(len(result.foreign), 'file')} that dcr does not know: {names(result.foreign)}"
    if result.previous is not None:
        yield "previous", f"kept: {names([result.previous])}"
    elif result.mode == "aside" and not result.already:
        yield "previous", "would be removed" if result.dry_run else "removed"
    if result.not_carried:
        what = f"{amount(len(result.not_carried), 'file')} that could not be carried over"
        yield "kept", f"{what}, with their folders: {names(result.not_carried)}"


def verify_lines(result: VerifyResult) -> Iterator[Line]:
    """Yes, or what differs."""
    if result.matches:
        what = f"{amount(result.checked_tensors, 'tensor')} ({size(result.checked_bytes)})"
        sidecars = amount(result.checked_sidecars, "sidecar")
        yield Line(f"match: {what} and {sidecars} equal {names([result.reference])}", "bold green")
        return
    if not result.checked_tensors and not (result.differences or result.extra or result.missing or result.sidecars):
        yield Line("no match: nothing was compared", "bold red")
        return
    yield Line(f"no match: {names([result.checkpoint])} differs from {names([result.reference])}", "bold red")
    for difference in result.differences[:MOST_LISTED]:
        what = names([difference.tensor]) if difference.kind != "content" else "its tensors together"
        yield Line(f"  {what}: {_difference(difference)}")
    if len(result.differences) > MOST_LISTED:
        yield Line(f"  and {amount(len(result.differences) - MOST_LISTED, 'more tensor')}; --json lists all")
    if result.missing:
        yield Line(f"  missing tensors: {names(result.missing)}")
    if result.extra:
        yield Line(f"  extra tensors: {names(result.extra)}")
    for sidecar in result.sidecars[:MOST_LISTED]:
        yield Line(f"  {names([sidecar.path])}: {'its bytes differ' if sidecar.kind == 'bytes' else sidecar.kind}")


def _difference(difference: TensorDifference) -> str:
    bits = f"{difference.expected} expected, {difference.found} found"
    if difference.kind != "bits":
        return f"{difference.kind} {bits}"
    index = ", ".join(str(i) for i in difference.first_index or ())
    where = f"first at element {difference.first_flat} [{index}]"
    differ = "differs" if difference.count == 1 else "differ"
    return f"{amount(difference.count or 0, 'element')} {differ}, {where}: {bits}"


def show_lines(result: ShowResult, *, verbose: bool) -> Iterator[Line]:
    """What the delta leads from and to, what it takes, and the tensors that take most."""
    checked = "valid" if result.is_deep else "its documents are valid; --deep fetches and checks its payloads too"
    yield Line(f"delta {names([result.delta])}: {checked}", "bold")
    yield from facts(_show_facts(result))
    rows = result.rows if verbose else result.rows[:10]
    if rows:
        yield Line("")
        yield from table(
            ("tensor", "dtype", "shape", "encoding", "changed", "share", "bytes"),
            [
                (
                    names([row.name]),
                    row.dtype,
                    shape(row.shape),
                    row.encoding,
                    f"{_at_most(row.changed_elements if row.is_whole else 0)}{row.changed_elements:,}",
                    share(row.changed_elements, row.elements),
                    f"{row.bytes:,}",
                )
                for row in rows
            ],
            frozenset({4, 5, 6}),
        )
    if len(rows) < len(result.rows):
        yield Line(f"  and {amount(len(result.rows) - len(rows), 'more tensor')}; -v lists all")


def _at_most(bound_elements: int) -> str:
    """What to write before a count in which there are so many elements of which fewer may count."""
    return "at most " if bound_elements else ""


def _show_facts(result: ShowResult) -> Iterator[tuple[str, str]]:
    if result.version is not None:
        yield from version_facts(result.version)
    yield "base", state(result.base)
    yield "target", state(result.target)
    takes = f"{size(result.delta_bytes)}, {share(result.delta_bytes, result.dense_bytes)} of a full copy"
    yield "delta", f"{takes} ({size(result.dense_bytes)}), {amount(result.payloads, 'payload')}"
    yield "tensors", f"{result.tensors:,}, {result.changed_tensors:,} changed"
    changed = f"{result.changed_elements:,} changed ({share(result.changed_elements, result.elements)})"
    yield "elements", f"{result.elements:,}, {_at_most(result.whole_elements)}{changed}"
    for encoding in result.encodings:
        each = f"{amount(encoding.pieces, 'piece')}, {size(encoding.bytes)}"
        yield encoding.encoding, f"{each}, {8 * encoding.bytes / max(encoding.changed_elements, 1):.2f} bits a change"
    if result.new:
        yield "new", f"{len(result.new):,} added or replaced: {names(result.new)}"
    if result.removed:
        yield "removed", f"{len(result.removed):,}: {names(result.removed)}"
    if result.renamed:
        yield "renamed", f"{len(result.renamed):,}: {names([f'{old} to {new}' for old, new in result.renamed])}"
    sent = f": {names(result.sent_files)}" if result.sent_files else ""
    yield "files", f"{result.files:,}, {len(result.sent_files):,} sent{sent}"
    if result.removed_files:
        yield "", f"{len(result.removed_files):,} removed: {names(result.removed_files)}"
    if result.skipped:
        yield "skipped", names(result.skipped)


def version_facts(version: ShownVersion) -> Iterator[tuple[str, str]]:
    """Which version of a remote it is."""
    yield "version", f"{version.version}, id {version.id}{made(version.created, version.publisher)}"
    if version.signers:
        yield "signed by", ", ".join(key[:KEY_DIGITS] for key in version.signers)


def made(created: str, publisher: str) -> str:
    """What a version says of when and by whom it was made, where it says so."""
    when = f", made {names([created])}" if created else ""
    return f"{when} by {names([publisher])}" if publisher else when


def inspect_lines(result: InspectResult) -> Iterator[Line]:
    """Sums, then shards and sidecars, then tensors if the result has them."""
    yield Line(f"checkpoint {names([result.checkpoint])}", "bold")
    rows = [("tensors", f"{result.tensors:,}, {amount(result.elements, 'element')}, {size(result.dense_bytes)}")]
    rows += [
        (row.dtype, f"{amount(row.tensors, 'tensor')}, {amount(row.elements, 'element')}, {size(row.bytes)}")
        for row in result.dtypes
    ]
    if result.laid is not None:
        told = amount(result.laid.local_tensors, "local tensor")
        rows.append(("ranks", f"{amount(len(result.shards), 'shard')}, {told}, by {names([result.laid.layout])}"))
    if result.state is not None:
        rows.append(("state", state(result.state)))
    if result.skipped:
        rows.append(("skipped", names(result.skipped)))
    yield from facts(rows)
    yield Line("")
    files = [(names([shard.path]), "shard", f"{shard.size:,}", f"{shard.tensors:,}") for shard in result.shards]
    files += [(names([file.path]), file.kind, f"{file.size:,}", "-") for file in result.sidecars]
    yield from table(("file", "what", "bytes", "tensors"), files, frozenset({2, 3}))
    if result.rows:
        yield Line("")
        cells = [
            (names([row.name]), row.dtype, shape(row.shape), f"{row.bytes:,}", names([row.shard]), row.digest or "-")
            for row in result.rows
        ]
        yield from table(("tensor", "dtype", "shape", "bytes", "shard", "digest"), cells, frozenset({3}))
