"""How a push publishes, but for what and where; what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.device.wish import AUTO, Wish
from dcr_cli.errors import UsageError
from dcr_cli.layout.opening import Given
from dcr_cli.remote.signing import Trust


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to publish. `base` is a checkpoint at the newest version, without which a baseline is kept."""

    base: Given | None = None
    baseline: Path | None = None
    baseline_link: bool = False
    encodings: tuple[str, ...] | None = None
    encoding: str = "auto"
    no_delta: bool = False
    anchor_every: int | None = None
    prepare: bool = False
    trust: Trust = field(default_factory=Trust)
    wish: Wish = field(default_factory=lambda: Wish(AUTO))

    def __post_init__(self) -> None:
        """Raise UsageError if they contradict each other."""
        if self.base is not None and (self.baseline_link or self.no_delta):
            raise UsageError("push", "--base excludes --baseline-link and --no-delta", hint="dcr push --help")
        check_anchor_every(self.anchor_every, "--anchor-every")

    def check_sharded(self) -> None:
        """Raise UsageError if what is asked for needs a checkpoint's own files, and shards of ranks are published."""
        if self.baseline_link:
            facts = "a baseline is a checkpoint in canonical form, and no second name of shards of ranks"
            raise UsageError("--baseline-link", facts, hint="leave it out")
        if self.anchor_every is not None and self.base is not None:
            facts = "an anchor is made of a baseline, and with --base and shards of ranks there is none"
            raise UsageError("--anchor-every", facts, hint="leave it out; dcr anchor adds the files of a checkpoint")

    @property
    def keeps_baseline(self) -> bool:
        return self.base is None

    def check_anchor(self) -> None:
        """Raise UsageError if a version that is an anchor is to be prepared."""
        if self.prepare:
            raise UsageError("--prepare", "a version that is an anchor cannot be prepared", hint="leave it out")


def check_anchor_every(versions: int | None, name: str = "anchor_every") -> None:
    """Raise UsageError about the argument `name` if nothing happens every so many versions."""
    if versions is not None and versions < 1:
        raise UsageError(name, f"a number from 1 on expected, found {versions}")
