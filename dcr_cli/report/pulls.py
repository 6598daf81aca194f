"""What a receiver has done, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dcr_cli.errors import size
from dcr_cli.report.people import Line, amount, facts, names, share, state

if TYPE_CHECKING:
    from dcr_cli.engine.engines import Reloaded
    from dcr_cli.fetch.pull_result import PullResult
    from dcr_cli.fetch.way import Way
    from dcr_cli.follow import Arrival
    from dcr_cli.reload import ReloadResult


def pull_lines(result: PullResult) -> Iterator[Line]:
    """At which version the checkpoint is, and what that took, or would."""
    yield Line(_headline(result), "bold" if result.dry_run else "bold green")
    yield from facts(_pull_facts(result))


def arrival_lines(arrival: Arrival) -> Iterator[Line]:
    """One line for each version that a follower has come to."""
    result = arrival.result
    told = [f"{arrival.at} version {result.version}", f"{size(result.downloaded_bytes)} fetched"]
    if arrival.within_seconds is not None:
        told.append(f"at most {arrival.within_seconds:.1f} s after its commit")
    if result.fetched_before_commit_bytes:
        payloads = max(arrival.payload_bytes, result.fetched_before_commit_bytes)
        told.append(f"{share(result.fetched_before_commit_bytes, payloads)} of its payloads before it")
    if result.published_changes:
        told.append(f"changes of {amount(len(result.published_changes), 'version')} published")
    told += [f"{names([each.engine])} paused for {each.pause_seconds:.2f} s" for each in result.reloaded]
    yield Line(", ".join(told))


def reload_lines(result: ReloadResult) -> Iterator[Line]:
    """Which engines serve from the folder now."""
    yield Line(f"done: {amount(len(result.reloaded), 'engine')} at {names([result.label])}", "bold green")
    yield from facts(_reload_facts(result.reloaded))


def _reload_facts(reloaded: Sequence[Reloaded]) -> Iterator[tuple[str, str]]:
    for each in reloaded:
        loading = f"{each.load_seconds:.2f} s of them loading"
        yield "reloaded", f"{names([each.engine])}, paused for {each.pause_seconds:.2f} s, {loading}"


def _headline(result: PullResult) -> str:
    where = names([result.checkpoint])
    if result.already:
        return f"already there: {where} is at version {result.version}"
    if result.dry_run:
        return f"would bring {where} to version {result.version}; nothing was changed"
    return f"done: {where} is at version {result.version}"


def _pull_facts(result: PullResult) -> Iterator[tuple[str, str]]:
    if not result.already:
        yield from _way_facts(result)
    if result.published_changes:
        of = amount(len(result.published_changes), "version")
        yield "changes", f"of {of} published: {names(result.published_changes)}"
    if result.staged is not None:
        yield "staged", f"version {result.staged}, which is prepared"
    if result.staging_error is not None:
        yield "not staged", "what is prepared; the version that it is at is not concerned"
    yield from _reload_facts(result.reloaded)
    if result.unreadable:
        lost = amount(len(result.unreadable), "file")
        yield "note", f"the disk did not give all of {lost}, fetched instead: {names(result.unreadable)}"
    if result.recovered:
        yield "note", "a change that had been stopped was finished first"
    if result.foreign:
        yield "left alone", f"{amount(len(result.foreign), 'file')} that dcr does not know: {names(result.foreign)}"
    if result.previous is not None:
        yield "previous", f"kept: {names([result.previous])}"


def _way_facts(result: PullResult) -> Iterator[tuple[str, str]]:
    """What it took; without news there is one line to read, which cron sends or a log keeps."""
    yield "remote", names([result.remote])
    if result.from_version is not None:
        yield "from", f"version {result.from_version}{', found by its bytes' if result.adopted else ''}"
    if result.way is not None:
        yield "way", f"{_way(result.way)}, {size(result.way.bytes)}"
    if result.downloaded_bytes and not result.dry_run:
        yield "fetched", size(result.downloaded_bytes)
    if result.reused_bytes:
        yield "reused", f"{size(result.reused_bytes)} of payloads that were there"
    yield "state", state(result.target)


def _way(way: Way) -> str:
    deltas = f"{amount(len(way.deltas), 'delta')}" if way.deltas else ""
    if way.anchor is None:
        return deltas
    anchor = f"the anchor of version {way.anchor}"
    return f"{anchor}, then {deltas}" if deltas else anchor
