"""What comes after a commit: bringing the publisher's baseline to the version, and adding its anchor.

The version exists by then. Whatever goes wrong here says so, and what to do, so that nobody takes it for not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dcr_cli.apply import ApplyWay, apply_chain
from dcr_cli.delta.delta import Delta, open_delta
from dcr_cli.errors import DcrError
from dcr_cli.fetch.position import Position, position_at
from dcr_cli.fetch.source import signers_of
from dcr_cli.publisher.baseline import Baseline
from dcr_cli.publisher.committing import Author
from dcr_cli.publisher.outgoing import drop_outgoing, outgoing_path
from dcr_cli.receiver.change import IN_PLACE
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published

Bring = Callable[[Delta], None]

_MOVES = "the same command again brings the baseline to it"
ADDS = "dcr anchor adds its anchor"


def by_applying(path: Path, jobs: int) -> Bring:
    """Bring the checkpoint at `path` to the target of a delta by applying it."""
    return partial(_apply, path, jobs)


def _apply(path: Path, jobs: int, delta: Delta) -> None:
    apply_chain([delta], path, ApplyWay(mode=IN_PLACE), jobs=jobs)


def move_baseline(baseline: Baseline, published: Published, position: Position, bring: Bring | None) -> None:
    """Bring the baseline to a version that this publisher has just made, or had made when it was stopped.

    `bring` takes the delta that was sent; None where no checkpoint is kept: one that lies there all the same is not
    moved on, and stays at its version.
    """
    with telling_published(published):
        if bring is not None and published.version.delta is not None:
            bring(open_delta(outgoing_path(baseline.home)))
        if bring is not None or not baseline.has_checkpoint:
            baseline.move_to(position)
        drop_outgoing(baseline.home)


def position_of(published: Published, remote: str, author: Author, trust: Trust) -> Position:
    """The position of a baseline that is at a version which this publisher has compared with it: those of the keys that
    it trusts, its own among them, which have signed that stand for it."""
    own = frozenset({author.key.public}) if author.key is not None else frozenset()
    return position_at(published, remote, signers_of(Trust(trust.keys | own), published))


@contextmanager
def telling_published(published: Published, mend: str = _MOVES) -> Iterator[None]:
    """Have what goes wrong meanwhile say that the version is published, and what to do about the rest."""
    try:
        yield
    except DcrError as error:
        number = published.version.number
        error.facts = f"{error.facts}; version {number} is published all the same"
        error.args = (f"{error.what}: {error.facts}",)
        error.hint = f"{error.hint}; then {mend}" if error.hint is not None else mend
        error.details = {**error.details, "committed": True, "version": number}
        raise
