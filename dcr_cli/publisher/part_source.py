"""What the ranks of a version publish together, and the share of each: one checkpoint that all of them see, or shards
of ranks, of which each may see no more than its own.

Where they start from is part_base.py's matter, comparing part_making.py's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.in_progress import LAYOUT_NOTE
from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.layout.exchanged import check_places
from dcr_cli.layout.laid import lay_part
from dcr_cli.layout.layout import Layout
from dcr_cli.layout.opening import Given, layout_given, look_at
from dcr_cli.layout.shards import RankShards
from dcr_cli.publisher.part_result import Rank
from dcr_cli.publisher.rank_shares import cut_by_layout, shards_of
from dcr_cli.publisher.shares import Slice, cut


class PartSource:
    """What a rank was given to publish.

    UsageError, NotFoundError or DamagedError if it cannot be looked at.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        rank: Rank,
        *,
        layout: str | os.PathLike[str] | None = None,
        functions: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> None:
        self.given = look_at(root, layout=layout_given(layout, functions), skip=skip)
        self._rank = rank
        self._file = Path(layout) if layout is not None else Path(root) / LAYOUT_NOTE
        # Of shards that say themselves what they hold, all are needed to know what a tensor is.
        self._sees_all = self.given.layout is None or all(
            path in self.given.identities for path in self.given.layout.shards
        )
        if not self._sees_all and not rank.names_checkpoint:
            facts = f"{self.root} has not all shards of the layout: only a name tells which step these are of"
            hint = "give --attempt TEXT, which all ranks share, and no other checkpoint has"
            raise UsageError("--attempt", facts, hint=hint)

    @property
    def root(self) -> Path:
        return self.given.root

    @property
    def skipped(self) -> tuple[str, ...]:
        return self.given.skipped

    @property
    def not_read(self) -> tuple[str, ...]:
        """The tensors that its layout skips."""
        return tuple(sorted(self.given.layout.skipped)) if self.given.layout is not None else ()

    @property
    def tensors(self) -> Sequence[Tensor] | None:
        """The tensors that are published, if that is known by now."""
        return self.given.opened.tensors if isinstance(self.given.opened, Checkpoint) else None

    def digest(self) -> bytes:
        """What tells what is published from another checkpoint, without reading it (FORMAT 13.9)."""
        lines = []
        if self._sees_all:
            lines += [f"{path}\n{one.size}\n{one.mtime_ns}\n" for path, one in self.given.identities.items()]
        if self.given.layout is not None:
            lines.append(f"{object_digest(self._file.read_bytes()).hex()}\n")
        return object_digest("".join(lines).encode())

    def open(self, base: Checkpoint) -> tuple[Checkpoint, list[tuple[Slice, ...]]]:
        """The checkpoint, as far as this rank reads it, and the share of each rank."""
        shards = self.given.opened
        if not isinstance(shards, RankShards):
            return shards, cut(base, shards, self._rank.count)
        layout = self.given.layout_like(base)
        own = shards_of(layout, self._rank.number, self._rank.count)
        self._check_own(shards, layout, own)
        part = lay_part(shards, layout, base, own)
        check_places(part, base, own)
        return part, cut_by_layout(base, layout, self._rank.count)

    def base_like(self, given: Given, describe: Callable[[], Checkpoint]) -> Checkpoint:
        """What a rank was given to start from, as a checkpoint at a version: of shards of ranks those that are there,
        if shards are published too; else all, for any element of theirs may be in a rank's share.

        `describe` tells of the version as the remote does, and is asked of shards alone: that may take rights of its
        own.
        """
        if not isinstance(given.opened, RankShards):
            return given.like(None)
        version = describe()
        if not self.given.is_sharded:
            return given.like(version)
        return lay_part(given.opened, given.layout_like(version), version, given.opened.shards)

    def _check_own(self, shards: RankShards, layout: Layout, own: Sequence[str]) -> None:
        missing = [path for path in own if path not in shards.shards]
        if missing:
            facts = f"the shards of rank {self._rank.number} of {self._rank.count} are not all there: {listed(missing)}"
            hint = f"the {len(layout.shards)} shards of the layout are shared out in its order"
            raise DamagedError(str(shards.root), facts, hint=hint)
