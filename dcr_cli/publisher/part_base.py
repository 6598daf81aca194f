"""Where the part of a rank starts from: a baseline, which all ranks share or each has, or a checkpoint that is there.

A baseline that is shared is rank 0's to lock and to move; others wait until it is where they need it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.device.wish import Wish
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import ConflictError, IncompleteError, WrongBaseError
from dcr_cli.fetch.position import Position, read_position
from dcr_cli.layout.opening import Given
from dcr_cli.publisher.baseline import Baseline, default_baseline, open_baseline
from dcr_cli.publisher.catching_up import catch_up, knows_its_version
from dcr_cli.publisher.committing import Author
from dcr_cli.publisher.likeness import version_like
from dcr_cli.publisher.moving import position_of
from dcr_cli.publisher.part_source import PartSource
from dcr_cli.publisher.part_waiting import Patience, too_late
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store

_FIRST = "dcr push without --part publishes the first version, and makes the baseline"


@dataclass(frozen=True, slots=True)
class PartOptions:
    """How to publish a part, but for what and where. `base` is at the newest version; then no baseline is kept."""

    base: Given | None
    baseline: Path | None
    encoding: str
    prepare: bool
    wait: bool
    patience: Patience
    author: Author
    effort: Effort
    trust: Trust
    wish: Wish


class PartBase:
    """What a rank starts from; a context manager's, by `stack`, as long as a baseline is locked."""

    def __init__(self, store: Store, log: Log, source: PartSource, options: PartOptions) -> None:
        self._store = store
        self._log = log
        self._source = source
        self._options = options
        self._path = options.baseline or default_baseline(source.root, log.history)
        self._baseline: Baseline | None = None

    def lock(self, stack: ExitStack, rank: int) -> None:
        """Lock the baseline, if it is this rank's to move, or to keep in it what rank 0 has to remember."""
        if rank == 0 or (self._options.baseline is not None and self._options.base is None):
            self._baseline = stack.enter_context(Baseline(self._path))

    @property
    def home(self) -> Folder:
        """Where rank 0 keeps what it has to remember."""
        assert self._baseline is not None
        return self._baseline.home

    def find_head(self) -> Published:
        """The newest version; a baseline of this rank's own, or that of rank 0, is brought to it."""
        position = self._position()
        if self._options.base is not None:
            return self._follow(position)
        if self._baseline is not None and position is None:
            newest = self._log.newest(0)
            if newest and self._baseline.has_checkpoint:
                head = self._log.require(newest)
                knows_its_version(self._baseline, self._log, head, self._store.shown, self._options.trust)
            position = self._baseline.position()
        if position is None:
            facts = f"is no baseline that is at a version of {self._store.shown}"
            raise WrongBaseError(str(self._path), facts, hint=_FIRST)
        head = self._follow(position)
        if head.version.number > position.version:
            self.bring(head)
        return head

    def _follow(self, position: Position | None) -> Published:
        """Read where the log stands, which follows what was seen of it."""
        newest = self._log.newest(position.version if position is not None else 0)
        if position is None:
            if not newest:
                facts = f"holds no version of history {self._log.history} yet"
                raise WrongBaseError(self._store.shown, facts, hint=_FIRST)
            return self._log.require(newest)
        at = self._log.check_known(position.known, f"the baseline {self._path}")
        return [at, *self._log.following(at, newest)][-1]

    def _position(self) -> Position | None:
        """The version at which the baseline is, as it says."""
        if self._baseline is not None:
            return self._baseline.position()
        if not (self._path / STATE_FOLDER).is_dir():
            return None
        with open_folder(self._path / STATE_FOLDER) as home:
            return read_position(home)

    def open(self, head: Published) -> Checkpoint:
        """What is at the newest version; rank 0 brings a baseline there, if it is shared, and the others wait for that.

        Of shards of ranks, those that are there.
        """
        if self._options.base is not None:
            return self._source.base_like(
                self._options.base, partial(version_like, self._store, head, self._source.skipped)
            )

        def look() -> Checkpoint | None:
            try:
                return open_baseline(self._path, self._source.skipped, head) if self._is_at(head.blake3) else None
            except IncompleteError:
                return None

        facts = f"the baseline {self._path} is not at version {head.version.number}"
        return self._options.patience.wait(look, lambda: too_late(self._store, facts))

    def check_unmoved(self, commit: bytes) -> None:
        """Raise ConflictError if a baseline is not at the version of a commit any more."""
        if self._options.base is None and not self._is_at(commit):
            raise ConflictError(str(self._path), "was moved while it was compared", hint="run the same command again")

    def bring(self, head: Published) -> None:
        """Bring the baseline to a version, if it is this rank's to move; where none is kept, note what was seen."""
        baseline, options = self._baseline, self._options
        if baseline is None:
            return
        if options.base is None:
            catch_up(self._store, baseline, head, options.effort, options.trust)
        elif not baseline.has_checkpoint:
            baseline.move_to(position_of(head, self._store.shown, options.author, options.trust))

    def mend(self) -> str:
        """What helps where it is not at the newest version."""
        is_given = self._options.base is not None
        return "give another --base" if is_given else "remove the baseline; dcr push makes it anew"

    def _is_at(self, commit: bytes) -> bool:
        position = self._position()
        return position is not None and position.commit == commit
