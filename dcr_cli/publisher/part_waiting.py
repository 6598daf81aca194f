"""Waiting for what other ranks put: their parts, or what came of all of them. No rank is asked; the remote is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import ConflictError
from dcr_cli.publisher.part_reading import ReadPart, lacking, read_part
from dcr_cli.remote.keys import prepared_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.part import Attempt, PartTable, unchanged_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published, decode_version
from dcr_cli.stopping import pause
from dcr_cli.store.store import Store
from dcr_cli.waiting import tell

Found = TypeVar("Found")

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait; `clock` and `sleep` are there for tests."""

    timeout_seconds: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = pause

    def wait(self, look: Callable[[], Found | None], missing: Callable[[], ConflictError]) -> Found:
        """Look again and again until something is found; the error that `missing` makes if time is up before."""
        began, wait = self.clock(), _FIRST_WAIT_SECONDS
        while True:
            found = look()
            if found is not None:
                return found
            waited = self.clock() - began
            left = self.timeout_seconds - waited
            error = missing()
            if left <= 0:
                error.facts = f"{error.facts}, and time is up"
                error.args = (f"{error.what}: {error.facts}",)
                raise error
            tell(error.what, error.facts, waited_seconds=waited, left_seconds=left)
            self.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of an attempt: `kind` is delta, prepared, or same (nothing changed, so that no version comes)."""

    kind: str
    published: Published | None = None


def wait_for_parts(store: Store, attempt: Attempt, trust: Trust, patience: Patience) -> list[PartTable]:
    """The tables of all ranks, in order, all of whose payloads are there; ConflictError if they are not in time.

    A rank whose payloads a prune has taken, with all ranks stopped, may be making them again.
    """
    found: dict[int, ReadPart] = {}

    def look() -> list[PartTable] | None:
        for rank in range(attempt.ranks):
            part = None if rank in found else read_part(store, attempt, rank, trust)
            if part is not None:
                found[rank] = part
        if len(found) < attempt.ranks:
            return None
        for rank in lacking(store, attempt, found):
            del found[rank]
        return [found[rank].table for rank in range(attempt.ranks)] if len(found) == attempt.ranks else None

    def missing() -> ConflictError:
        ranks = [str(rank) for rank in range(attempt.ranks) if rank not in found]
        more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
        facts = f"{len(found)} of {attempt.ranks} parts are there with all payloads"
        return too_late(store, f"{facts}, not those of ranks {', '.join(ranks[:10])}{more}")

    return patience.wait(look, missing)


def wait_for_end(store: Store, log: Log, attempt: Attempt, patience: Patience) -> Ended:
    """What rank 0 makes of the parts; ConflictError if nothing in time, or if another version was faster."""
    place = attempt.place

    def look() -> Ended | None:
        published = log.read(place.version, is_denied_absent=True)
        if published is not None and published.version.place != place:
            facts = f"version {place.version} was taken by {published.version.place.id}"
            raise ConflictError(store.shown, facts, hint="run the same command again, on all ranks")
        if published is not None:
            return Ended("delta", published)
        if store.get(unchanged_key(place), most_bytes=COMMIT_LIMIT, is_denied_absent=True) is not None:
            return Ended("same")
        key = prepared_key(place)
        data = store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True)
        return Ended("prepared", decode_version(data, place.version, f"{store.shown}/{key}")) if data else None

    return patience.wait(look, lambda: too_late(store, "rank 0 has not committed the version"))


def too_late(store: Store, facts: str) -> ConflictError:
    hint = "start all ranks again; they have to see the same files of CHECKPOINT and have the same --attempt"
    error = ConflictError(store.shown, facts, hint=hint)
    error.details = {"committed": False}
    return error
