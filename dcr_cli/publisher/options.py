"""How a push publishes, but for what and where; what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.errors import UsageError
from dcr_cli.remote.signing import Trust


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to publish. `base` is a checkpoint at the newest version, without which a baseline is kept."""

    base: Checkpoint | None = None
    baseline: Path | None = None
    baseline_link: bool = False
    encodings: tuple[str, ...] | None = None
    encoding: str = "auto"
    no_delta: bool = False
    anchor_every: int | None = None
    prepare: bool = False
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        """Raise UsageError if they contradict each other."""
        if self.base is not None and (self.baseline_link or self.no_delta):
            raise UsageError("push", "--base excludes --baseline-link and --no-delta", hint="dcr push --help")
        check_anchor_every(self.anchor_every)

    @property
    def keeps_baseline(self) -> bool:
        return self.base is None

    def check_anchor(self) -> None:
        """Raise UsageError if a version that is an anchor is to be prepared."""
        if self.prepare:
            raise UsageError("--prepare", "a version that is an anchor cannot be prepared", hint="leave it out")


def check_anchor_every(versions: int | None) -> None:
    """Raise UsageError if nothing happens every so many versions."""
    if versions is not None and versions < 1:
        raise UsageError("--anchor-every", f"a number from 1 on expected, found {versions}")
