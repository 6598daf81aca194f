"""A relay that begins, and one that runs, its parents, and the tree of what is below it, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcr_cli.errors import size
from dcr_cli.report.durations import duration
from dcr_cli.report.people import Line, amount, names, table

if TYPE_CHECKING:
    from dcr_cli.relay.relay import RelayResult
    from dcr_cli.remote.relay import RelayChild, RelayParent, RelayStatus

_INDENT = "  "


def started_lines(result: RelayResult) -> Iterator[Line]:
    """Where a relay listens, and what it hands on."""
    yield Line(f"{result.address}: relay {result.name} of {', then '.join(result.parents)}", "bold green")
    yield Line(f"keeps at most {size(result.spool_limit)} in {names([result.spool])}")


def relay_lines(relay: RelayStatus) -> Iterator[Line]:
    """The relay, one line for each of its parents, and a table of its children, each below the relay that it asks."""
    yield Line(f"relay {names([relay.relay])}, started {names([relay.started])}", "bold")
    for parent in relay.parents:
        yield Line(f"{_INDENT}parent {names([parent.shown])}: {_parent_words(parent)}")
    yield Line(f"{_INDENT}{_own_words(relay)}")
    if not relay.children:
        yield Line(f"{_INDENT}no children")
        return
    heading = ("child", "kind", "address", "version", "behind", "sent", "seen")
    yield from table(heading, list(_rows(relay, "")), frozenset({3, 4, 5, 6}))


def _rows(relay: RelayStatus, indent: str) -> Iterator[tuple[str, ...]]:
    for child in relay.children:
        yield _cells(child, indent)
        if child.status is not None:
            yield from _rows(child.status, indent + _INDENT)


def _cells(child: RelayChild, indent: str) -> tuple[str, ...]:
    version, lag = ("?" if number is None else str(number) for number in (child.version, child.lag))
    texts = tuple(names([text]) if text else "-" for text in (child.name, child.address))
    seen = f"{duration(child.seen_seconds)} ago{', gone' if child.is_gone else ''}"
    return f"{indent}{texts[0]}", child.kind, texts[1], version, lag, size(child.sent_bytes), seen


def _parent_words(parent: RelayParent) -> str:
    used = "used" if parent.is_used else "not used"
    return used if parent.is_answering else f"{used}, does not answer"


def _own_words(relay: RelayStatus) -> str:
    spool = relay.spool
    limit = f" of {size(spool.limit)}" if spool.limit is not None else ""
    kept = f"spool {amount(spool.objects, 'object')}, {size(spool.bytes)}{limit}"
    return f"version {relay.head}; received {size(relay.received_bytes)}, sent {size(relay.sent_bytes)}; {kept}"
