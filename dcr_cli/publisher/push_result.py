"""What a push came to, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import State
from dcr_cli.diff_result import DiffResult
from dcr_cli.remote.keys import Place
from dcr_cli.remote.version import ANCHOR, Published
from dcr_cli.stages import Account

SAME, PREPARED = "same", "prepared"


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push came to.

    `kind` is delta, anchor (a version that has only its files as they are), prepared (complete, but not committed), or
    same: the newest version is this very state, and nothing was published. `version` is the one that was published, or
    that is the same, None if none would be for a dry run. `delta_bytes` is what the version takes, `uploaded_bytes`
    what this run sent, an anchor that was due included. `anchor` is the newest version that has an anchor, and
    `applied` are the receivers that were waited for. `recovered`: what a stopped push had published was taken over.
    `not_read` are tensors that the layout of CHECKPOINT skips, which were published as the version before has them.
    `weights_of` is an earlier version, not the one before, that had these very tensors, if one is known. `gave_up`:
    another state had been prepared as this version. `added` to `files_removed` are, as `dcr diff` has them,
    what has another form than in the version before. `device` is where checkpoints were compared, as `dcr diff` has it,
    if they were, and `account` how.
    """

    remote: str
    checkpoint: str
    history: str
    version: int | None
    id: str | None
    kind: str
    base_version: int | None
    base: State | None
    target: State
    tensors: int
    changed_tensors: int
    elements: int
    changed_elements: int
    dense_bytes: int
    delta_bytes: int
    uploaded_bytes: int
    anchor: int | None
    recovered: bool
    dry_run: bool
    applied: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    weights_of: int | None = None
    gave_up: bool = False
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    files_removed: tuple[str, ...] = ()
    device: str | None = None
    account: Account | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is published, and where; `not_read` of the tensors are not there, but as the version before has them."""

    remote: str
    history: str
    checkpoint: str
    tensors: Sequence[Tensor]
    not_read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of it: `head` is the version before, `place` that of the version that was published or is the same,
    `changed` how many tensors and elements changed, `found` what else comparing two checkpoints found,
    `weights_of` which earlier version had these tensors."""

    kind: str
    head: Published | None
    place: Place | None
    target: State
    changed: tuple[int, int] = (0, 0)
    found: DiffResult | None = None
    weights_of: int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the version takes, and what was sent."""

    delta_bytes: int = 0
    uploaded_bytes: int = 0


def push_result(
    subject: Subject,
    ending: Ending,
    *,
    sizes: Sizes,
    anchor: int | None = None,
    recovered: bool = False,
    dry_run: bool = False,
) -> PushResult:
    """Put together what a push came to."""
    head, place, found = ending.head, ending.place, ending.found
    starts_from = head.version if head is not None and ending.kind != ANCHOR else None
    return PushResult(
        remote=subject.remote,
        checkpoint=subject.checkpoint,
        history=subject.history,
        version=place.version if place is not None else None,
        id=place.id if place is not None else None,
        kind=ending.kind,
        base_version=starts_from.number if starts_from is not None and ending.kind != SAME else None,
        base=starts_from.target if starts_from is not None else None,
        target=ending.target,
        tensors=len(subject.tensors),
        changed_tensors=ending.changed[0],
        elements=sum(tensor.elements for tensor in subject.tensors),
        changed_elements=ending.changed[1],
        dense_bytes=sum(tensor.bytes for tensor in subject.tensors),
        delta_bytes=sizes.delta_bytes,
        uploaded_bytes=sizes.uploaded_bytes,
        anchor=anchor,
        recovered=recovered,
        dry_run=dry_run,
        not_read=subject.not_read,
        weights_of=ending.weights_of,
        added=found.added if found is not None else (),
        removed=found.removed if found is not None else (),
        renamed=found.renamed if found is not None else (),
        reshaped=found.reshaped if found is not None else (),
        files_removed=found.files_removed if found is not None else (),
        device=found.device if found is not None else None,
        account=found.account if found is not None else None,
    )
