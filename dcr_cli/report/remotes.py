"""What a remote holds, how it is, and what was removed from it, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from dcr_cli.errors import size
from dcr_cli.report.durations import duration
from dcr_cli.report.people import KEY_DIGITS, MOST_LISTED, Line, amount, facts, made, names, state, table, version_facts
from dcr_cli.report.relays import relay_lines

if TYPE_CHECKING:
    from dcr_cli.log import LoggedVersion, LogResult
    from dcr_cli.prune import PruneResult
    from dcr_cli.show_result import ShowAnchorResult
    from dcr_cli.status import ReceiverStatus, StatusResult
    from dcr_cli.verify_remote import VerifyRemoteResult


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers, those that follow each other as a range."""
    if not numbers:
        return "none"
    ends = [first for first, second in pairwise(numbers) if second > first + 1] + [numbers[-1]]
    begins = [numbers[0]] + [second for first, second in pairwise(numbers) if second > first + 1]
    texts = [str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)]
    return names(texts)


def log_lines(result: LogResult) -> Iterator[Line]:
    """The versions, one a line."""
    if not result.versions:
        yield Line(f"{result.remote} has no versions yet", "bold")
        return
    yield Line(f"{result.remote}: version {result.head} is the newest", "bold")
    has_signers = result.versions[0].signers is not None
    heading = ("version", "kind", "id", "bytes", "anchor", "time", "publisher")
    rows = [_log_cells(each, has_signers) for each in result.versions]
    yield from table((*heading, "signed by") if has_signers else heading, rows, frozenset({0, 3}))
    oldest = result.versions[-1].version
    if oldest > 1:
        yield Line(f"  and {amount(oldest - 1, 'older version')}; --all lists all")


def _log_cells(each: LoggedVersion, has_signers: bool) -> tuple[str, ...]:
    anchor = "?" if each.has_anchor is None else "yes" if each.has_anchor else "-"
    cells = (
        str(each.version),
        each.kind,
        each.id[:8],
        f"{each.bytes:,}",
        anchor,
        *_words(each.created, each.publisher),
    )
    return (*cells, _keys(each.signers or ()) or "nobody trusted") if has_signers else cells


def _words(*texts: str) -> tuple[str, ...]:
    """What a publisher says of itself, on one line each."""
    return tuple(names([text]) if text else "-" for text in texts)


def _keys(keys: Sequence[str]) -> str:
    return ", ".join(key[:KEY_DIGITS] for key in keys)


def status_lines(result: StatusResult) -> Iterator[Line]:
    """The newest version, what is being made, what lies there, and the receivers."""
    head = f"version {result.head} is the newest" if result.head else "no versions yet"
    yield Line(f"{result.remote}: {head}", "bold")
    yield from facts(_status_facts(result))
    if result.receivers:
        yield Line("")
        heading = ("receiver", "version", "stage", "behind", "age", "signed by")
        yield from table(heading, [_receiver_cells(each) for each in result.receivers], frozenset({1, 3, 4}))
    if result.relay is not None:
        yield Line("")
        yield from relay_lines(result.relay)


def _status_facts(result: StatusResult) -> Iterator[tuple[str, str]]:
    yield "history", f"{result.history}, encodings {', '.join(result.encodings)}"
    if result.target is not None:
        yield "newest", f"{result.kind}{made(result.created or '', result.publisher or '')}"
        yield "state", state(result.target)
    if result.signers is not None:
        yield "signed by", _keys(result.signers) or "nobody trusted"
    if result.making is not None:
        making = result.making
        staged = "" if making.staged is None else f", staged by {amount(making.staged, 'receiver')}"
        how = "prepared" if making.is_prepared else making.state
        yield "making", f"version {making.version} ({making.id[:8]}): {how}{staged}"
    if result.deltas is not None:
        yield "deltas", f"of versions {ranges(result.deltas)}" if result.deltas else "none"
    if result.anchors is not None:
        yield "anchors", f"of versions {ranges(result.anchors)}" if result.anchors else "none"
    for stored in result.stored:
        yield "stored", f"{stored.kind}: {amount(stored.objects, 'object')}, {size(stored.bytes)}"
    if result.receivers == ():
        yield "receivers", "none has said anything"
    if result.unknown:
        yield "unknown", f"{amount(len(result.unknown), 'object')}: {names(result.unknown)}"
    if result.not_listed:
        yield "not told", f"what lies below {', '.join(result.not_listed)}: the remote does not list it"


def _receiver_cells(each: ReceiverStatus) -> tuple[str, ...]:
    age = duration(each.age_seconds) if each.age_seconds is not None else "?"
    stage = f"{each.stage}, built" if each.is_built else each.stage
    return each.receiver, str(each.version), stage, str(each.lag), age, _keys(each.signers) or "-"


def prune_lines(result: PruneResult, *, verbose: bool) -> Iterator[Line]:
    """What was removed, or would be, and what stays."""
    if not result.outlived_objects:
        yield Line(f"nothing to prune in {result.remote}", "bold green")
    elif result.dry_run:
        what = f"{amount(result.outlived_objects, 'object')} ({size(result.outlived_bytes)})"
        yield Line(f"would remove {what} from {result.remote}; nothing was removed", "bold")
    else:
        what = f"{amount(result.deleted_objects, 'object')} ({size(result.freed_bytes)})"
        yield Line(f"removed {what} from {result.remote}", "bold green")
    yield from facts(_prune_facts(result))
    if verbose and result.outlived:
        yield Line("")
        rows = [(e.what, str(e.version), e.id[:8], f"{e.objects:,}", f"{e.bytes:,}") for e in result.outlived]
        yield from table(("what", "version", "id", "objects", "bytes"), rows, frozenset({1, 3, 4}))


def _prune_facts(result: PruneResult) -> Iterator[tuple[str, str]]:
    for what, noun in (("version", "deltas"), ("anchor", "anchors"), ("orphan", "orphans")):
        numbers = sorted({each.version for each in result.outlived if each.what == what})
        if numbers:
            yield "goes" if result.dry_run else "gone", f"{noun} of versions {ranges(numbers)}"
    yield "kept", f"deltas of versions {ranges(result.kept)}" if result.kept else "no deltas"
    yield "", f"anchors of versions {ranges(result.anchors)}" if result.anchors else "no anchors"
    if result.receivers:
        told = [f"{each.receiver} at {each.version}" for each in result.receivers]
        yield "receivers", names(told)
    if not result.is_head_reachable:
        yield "note", f"no anchor that is there leads to version {result.head}; so nothing that was published goes"
    if result.in_doubt:
        yield "note", f"anchors that lack objects stay and count for nothing: of versions {ranges(result.in_doubt)}"
    if result.unknown:
        yield "unknown", f"{amount(len(result.unknown), 'object')} left alone: {names(result.unknown)}"


def verify_lines(result: VerifyRemoteResult) -> Iterator[Line]:
    """Whether a remote is whole, or what is damaged."""
    if result.matches:
        yield Line(f"whole: {result.remote}, newest version {result.head}", "bold green")
    else:
        yield Line(f"damaged: {result.remote}, {amount(len(result.damages), 'fault')}", "bold red")
        for damage in result.damages[:MOST_LISTED]:
            yield Line(f"  {damage.what}: {damage.facts}")
        if len(result.damages) > MOST_LISTED:
            yield Line(f"  and {amount(len(result.damages) - MOST_LISTED, 'more fault')}; --json lists all")
    how = f"every byte, {size(result.checked_bytes)}" if result.is_deep else "by size; --deep fetches and checks all"
    checked = f"{amount(result.checked_deltas, 'delta')}, {amount(result.checked_anchors, 'anchor')}"
    pruned = f", {result.pruned:,} of them pruned" if result.pruned else ""
    yield from facts([("commits", f"{result.checked_commits:,}{pruned}"), ("checked", f"{checked}: {how}")])
    if result.unnamed_objects and result.unnamed_bytes is not None:
        what = f"{amount(result.unnamed_objects, 'object')}, {size(result.unnamed_bytes)}"
        yield from facts([("unnamed", f"{what}: no commit, anchor or next.json names them, as of what was stopped")])


def show_anchor_lines(result: ShowAnchorResult) -> Iterator[Line]:
    """A version that is its files as they are."""
    checked = "valid" if result.is_deep else "its document is valid"
    yield Line(f"anchor {names([result.anchor])}: {checked}", "bold")
    yield from facts(version_facts(result.version))
    rows = [("target", state(result.target)), ("anchor", f"{size(result.anchor_bytes)}, the files as they are")]
    if not result.is_only_way:
        rows.append(("delta", "removed"))
    if result.skipped:
        rows.append(("skipped", names(result.skipped)))
    yield from facts(rows)
    yield Line("")
    files = [(names([file.path]), file.kind, f"{file.bytes:,}") for file in result.files]
    yield from table(("file", "what", "bytes"), files, frozenset({2}))
