"""Brings a baseline to the newest version before the next one is made from it."""

from __future__ import annotations

from dataclasses import replace

from dcr_cli.advance import advance
from dcr_cli.fetch.position import position_at
from dcr_cli.fetch.source import signers_of
from dcr_cli.fetch.wish import make_wish
from dcr_cli.finishing import finish
from dcr_cli.publisher.baseline import Baseline, KeptBaseline
from dcr_cli.receiver.change import IN_PLACE
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


def find_recorded(baseline: KeptBaseline, log: Log, head: Published) -> Published | None:
    """The version that a baseline which has lost its note is at, by its record; None if that says none."""
    state = baseline.recorded_state()
    return log.find_state(state, head.version.number) if state is not None else None


def knows_its_version(baseline: Baseline, log: Log, head: Published, remote: str, trust: Trust) -> bool:
    """Whether the baseline is at a version; one that has lost its note of which may be found by its record.

    That need not be read to be trusted: whatever starts from it compares its digests with the version's.
    """
    if baseline.position() is not None:
        return True
    published = find_recorded(baseline, log, head)
    if published is not None:
        baseline.move_to(position_at(published, remote, signers_of(trust, published)))
    return published is not None


def catch_up(store: Store, baseline: Baseline, head: Published, effort: Effort, trust: Trust) -> None:
    """Bring the baseline to the newest version, as any receiver; an empty one becomes a copy of it.

    What an earlier run was stopped in is finished first, with what it had fetched. WrongBaseError unless what comes is
    signed as `trust` asks.
    """
    wish = replace(make_wish(effort, version=head.version.number, mode=IN_PLACE), trust=trust)
    finish(baseline.path, wish)
    advance(store, baseline.path, wish)
    baseline.make_whole()
