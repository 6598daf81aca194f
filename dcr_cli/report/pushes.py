"""What a publisher has done, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcr_cli.errors import size
from dcr_cli.report.notes import form_note, note
from dcr_cli.report.people import Line, facts, names, not_read_facts, share, state

if TYPE_CHECKING:
    from dcr_cli.anchor import AnchorResult
    from dcr_cli.commit import CommitResult
    from dcr_cli.publisher.push_result import PushResult
    from dcr_cli.push_part import PartResult


def push_lines(result: PushResult) -> Iterator[Line]:
    """Which version was published, and what it takes."""
    yield Line(_headline(result), "bold")
    if result.kind == "anchor" and (result.version == 1 or not result.history):
        yield note(f"{'would begin' if result.dry_run else 'begins'} a new history in {result.remote}")
    if result.weights_of is not None:
        yield note(f"these are the weights of version {result.weights_of}")
    if result.gave_up:
        yield note(f"gives up the prepared version {result.version}, which was another state")
    yield from form_note(result)
    yield from facts(_push_facts(result))


def _headline(result: PushResult) -> str:
    if result.kind == "same":
        at = f"version {result.version}" if result.version is not None else "the newest version"
        return f"nothing to publish: {result.remote} is at this state, {at}"
    if result.dry_run:
        return f"would publish to {result.remote}"
    if result.kind == "prepared":
        return f"prepared: version {result.version} of {result.remote}; dcr commit makes it exist"
    return f"published: version {result.version} of {result.remote}"


def _push_facts(result: PushResult) -> Iterator[tuple[str, str]]:
    if result.kind == "anchor":
        yield "anchor", f"{size(result.delta_bytes)}, the files as they are"
    elif result.kind != "same":
        changed = f"{result.changed_elements:,} changed ({share(result.changed_elements, result.elements)})"
        yield "elements", f"{result.elements:,}, {changed}"
        takes = f"{size(result.delta_bytes)}, {share(result.delta_bytes, result.dense_bytes)} of a full copy"
        yield "delta", f"{takes} ({size(result.dense_bytes)}), from version {result.base_version}"
    yield from not_read_facts(result.not_read)
    if result.uploaded_bytes:
        yield "sent", size(result.uploaded_bytes)
    if result.kind != "same":
        yield "state", state(result.target)


def part_lines(result: PartResult) -> Iterator[Line]:
    """Which part was published, and what came of all of them."""
    part = f"part {result.rank} of {result.ranks}"
    if result.kind == "same":
        yield Line(f"nothing to publish: {result.remote} is at this state, version {result.version}", "bold")
    elif result.kind == "part":
        yield Line(f"sent: {part} of version {result.version} of {result.remote}; part 0 commits it", "bold")
    elif result.kind == "prepared":
        yield Line(f"prepared: version {result.version} of {result.remote}, {part}; dcr commit makes it exist", "bold")
    else:
        yield Line(f"published: version {result.version} of {result.remote}, {part}", "bold")
    yield from facts(_part_facts(result))


def _part_facts(result: PartResult) -> Iterator[tuple[str, str]]:
    if result.changed_elements is not None:
        changed = f"{result.changed_elements:,} changed ({share(result.changed_elements, result.elements)})"
        yield "elements", f"{result.elements:,}, {changed}"
    if result.delta_bytes is not None:
        takes = f"{size(result.delta_bytes)}, {share(result.delta_bytes, result.dense_bytes)} of a full copy"
        yield "delta", f"{takes} ({size(result.dense_bytes)}), from version {result.base_version}"
    yield from not_read_facts(result.not_read)
    if result.uploaded_bytes:
        yield "sent", size(result.uploaded_bytes)
    if result.target is not None:
        yield "state", state(result.target)


def commit_lines(result: CommitResult, *, is_abort: bool) -> Iterator[Line]:
    """What became of a prepared version, or would become of it."""
    if result.dry_run and not result.committed:
        verb = "give up" if is_abort else "commit"
        yield Line(f"would {verb} version {result.version} of {result.remote}; nothing was changed", "bold")
    elif not result.committed:
        yield Line(f"given up: version {result.version} of {result.remote}", "bold")
    elif result.already:
        yield Line(f"already there: version {result.version} of {result.remote}", "bold")
    else:
        yield Line(f"committed: version {result.version} of {result.remote}", "bold")
    if result.staged:
        yield from facts([("staged", names(result.staged))])


def anchor_lines(result: AnchorResult) -> Iterator[Line]:
    """Which anchor was published, or would be."""
    if result.dry_run and not result.already:
        yield Line(f"would add an anchor: version {result.version} of {result.remote}; nothing was sent", "bold")
    else:
        verb = "has one already" if result.already else "added"
        yield Line(f"anchor {verb}: version {result.version} of {result.remote}", "bold")
    yield from facts([("files", size(result.anchor_bytes)), ("sent", size(result.uploaded_bytes))])
