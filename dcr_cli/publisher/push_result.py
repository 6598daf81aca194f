"""What a push came to, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push came to.

    `kind` is delta, anchor (a version that has only its files as they are), prepared (complete, but not committed), or
    same: the newest version is this very state, and nothing was published. `version` is the one that was published, or
    that is the same, None if none would be for a dry run. `delta_bytes` is what the version takes, `uploaded_bytes`
    what this run sent, an anchor that was due included. `anchor` is the newest version that has an anchor, and
    `applied` are the receivers that were waited for. `recovered`: what a stopped push had published was taken over.
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
