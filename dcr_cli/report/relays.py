"""What a relay says when it begins."""

from __future__ import annotations

from collections.abc import Iterator

from dcr_cli.errors import size
from dcr_cli.relay.relay import RelayResult
from dcr_cli.report.people import Line


def relay_lines(result: RelayResult) -> Iterator[Line]:
    """Where it listens, and what it hands on."""
    yield Line(f"{result.address}: relay {result.name} of {', then '.join(result.parents)}", "bold green")
    yield Line(f"keeps at most {size(result.spool_limit)} in {result.spool}")
