"""What a push publishes: a checkpoint, or shards of ranks, read, and made a baseline of. What of it changed is not its
business."""

from __future__ import annotations

import shlex
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.content import Workers, read_state
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.exchanged import check_places
from dcr_cli.layout.opening import Given
from dcr_cli.publisher.baseline import Baseline
from dcr_cli.receiver.install.gather import Effort


class Source:
    """What is published. With `is_linked` a baseline is second names of its files, which never change.

    Shards of ranks are a checkpoint only in the files of what they are compared with, by `see_like`.
    """

    def __init__(self, given: Given, effort: Effort, *, is_linked: bool = False) -> None:
        self.is_sharded = given.is_sharded
        self.is_linked = is_linked
        self._given = given
        self._seen = given.opened if isinstance(given.opened, Checkpoint) else None
        self._effort = effort

    @property
    def root(self) -> Path:
        return self._given.root

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._given.skipped

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it is; of shards of ranks, as it was seen last."""
        assert self._seen is not None
        return self._seen

    @property
    def bytes(self) -> int:
        return sum(identity.size for identity in self._given.identities.values())

    def see_like(self, base: Checkpoint) -> Checkpoint:
        """The checkpoint that it is, to be compared with `base`. DamagedError if shards of ranks do not make up one, or
        one holds what belongs to another."""
        if self.is_sharded:
            self._seen = self._given.like(base)
            check_places(self._seen, base)
        return self.checkpoint

    def check_files(self, remote: str) -> None:
        """Raise UnsupportedError if its files cannot be published as they are."""
        if self.is_sharded:
            facts = "holds shards of ranks, and a version that starts from nothing is a checkpoint in canonical form"
            hint = f"dcr push CHECKPOINT {shlex.quote(remote)} publishes one, such as the one that training began with"
            raise UnsupportedError(str(self.root), facts, hint=hint)

    def read(self) -> State:
        """Read all of it: the state that it is in."""
        with Workers(self._effort.jobs, "read", self._effort.progress) as workers, self.checkpoint.reader() as reader:
            return read_state(workers, self.checkpoint, reader)[0]

    def check_room(self, baseline: Baseline) -> None:
        """Raise LocalError if a baseline that is made of it would not fit."""
        if not self.is_linked and not baseline.can_clone(self.checkpoint):
            baseline.check_room(self.bytes, len(self._given.identities))

    def fill(self, baseline: Baseline) -> State:
        """Make a baseline of it: the state that both are in."""
        if not self.is_linked:
            return baseline.fill(self.checkpoint, jobs=self._effort.jobs, progress=self._effort.progress)
        state = baseline.link(self.checkpoint, jobs=self._effort.jobs, progress=self._effort.progress)
        # The new names have changed the times of its files.
        self._seen = open_checkpoint(self.root, skip=self.skipped)
        return state
