"""What a pull has done, or would do, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.engine.engines import Reloaded
from dcr_cli.errors import DcrError
from dcr_cli.fetch.way import Way


@dataclass(frozen=True, slots=True)
class PullResult:
    """What was done to `checkpoint`, which is now at `version` (or would be, if `dry_run`).

    `version` is in place, whatever became of the next one: `staging_error` says why that, which is prepared, could not
    be staged.

    `from_version` is the one it was at, None if that was none, or none that is known. `applied` are the versions that
    it went through, `way` whence their bytes came. `already`: it was there, nothing of it was written. `recovered`: a
    change that had been stopped was finished first. `adopted`: nothing said which version it was; its bytes did.
    `downloaded_bytes` came from the remote, all requests together; `reused_bytes` of payloads were there already,
    `fetched_before_commit_bytes` of them since before the version was committed. `staged`: a version that is prepared,
    which the receiver is ready for. `damaged` says of each object of the remote that is damaged, and was gone around,
    what is wrong with it. `unreadable` files could not be read, and what they lacked was fetched. `foreign`
    files are no part of the checkpoint and were left. `previous` is the folder that a link pointed at before, if it is
    left there. `reloaded` are the engines that have loaded it. `published_changes` are the
    folders, by their names, in which what these versions change was left, decoded.
    """

    checkpoint: str
    remote: str
    mode: str
    from_version: int | None
    version: int
    target: State
    applied: tuple[int, ...]
    changed: bool
    already: bool
    recovered: bool
    adopted: bool
    dry_run: bool
    way: Way | None
    downloaded_bytes: int
    reused_bytes: int = 0
    staged: int | None = None
    staging_error: DcrError | None = None
    fetched_before_commit_bytes: int = 0
    damaged: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    previous: str | None = None
    reloaded: tuple[Reloaded, ...] = ()
    published_changes: tuple[str, ...] = ()
