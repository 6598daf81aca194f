"""The checkpoint that a push publishes: read, and made a baseline of. What of it changed is not its business."""

from __future__ import annotations

from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.content import Workers, read_state
from dcr_cli.publisher.baseline import Baseline
from dcr_cli.receiver.install.gather import Effort


class Source:
    """A checkpoint that is published. With `is_linked` a baseline is second names of its files, which never change."""

    def __init__(self, checkpoint: Checkpoint, effort: Effort, *, is_linked: bool) -> None:
        self.checkpoint = checkpoint
        self.is_linked = is_linked
        self._effort = effort

    @property
    def root(self) -> Path:
        return self.checkpoint.root

    @property
    def bytes(self) -> int:
        return sum(identity.size for identity in self.checkpoint.identities.values())

    def read(self) -> State:
        """Read all of it: the state that it is in."""
        with Workers(self._effort.jobs, "read", self._effort.progress) as workers, self.checkpoint.reader() as reader:
            return read_state(workers, self.checkpoint, reader)[0]

    def check_room(self, baseline: Baseline) -> None:
        """Raise LocalError if a baseline that is made of it would not fit."""
        if not self.is_linked and not baseline.can_clone(self.checkpoint):
            baseline.check_room(self.bytes, len(self.checkpoint.identities))

    def fill(self, baseline: Baseline) -> State:
        """Make a baseline of it: the state that both are in."""
        if not self.is_linked:
            return baseline.fill(self.checkpoint, jobs=self._effort.jobs, progress=self._effort.progress)
        state = baseline.link(self.checkpoint, jobs=self._effort.jobs, progress=self._effort.progress)
        # The new names have changed the times of its files.
        self.checkpoint = open_checkpoint(self.root, skip=self.checkpoint.skipped)
        return state
