"""What a live receiver is offered: the documents and payloads of a delta, from a folder or fetched from a remote, or
what a pull has decoded of it.

Payloads of a remote are kept in memory: they are as large as the changes, and nothing is written. What they say of a
module is staging.py's matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from dcr_cli.changes.folder import Changes, has_changes, hint_beside, read_changes
from dcr_cli.changes.places import find, holds_versions, is_ahead
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.delta import Delta, open_delta
from dcr_cli.delta.documents import Documents
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.delta.output import COMMIT_NAME
from dcr_cli.delta.payload import PayloadFacts, States, check_payload_start
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.durable import open_folder
from dcr_cli.errors import DamagedError, DcrError, NotFoundError, UnsupportedError, WrongBaseError
from dcr_cli.pool import run_all
from dcr_cli.remote.documents import fetch_documents
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import Place, payload_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust, split_signed
from dcr_cli.remote.version import COMMIT_KIND, PUBLISHED_NAME, Published, decode_version
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

_ADDRESS = re.compile(r"(.+)@([1-9][0-9]{0,9})", re.DOTALL)
_TRIES = 2

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Offer:
    """A delta, all bytes of which were checked. `published` is the version of a remote that it makes, if it is one, and
    `prepared` the number of one that is not known to be committed.

    With `changes` there are no payloads: what they say was decoded already.
    """

    name: str
    documents: Documents
    payloads: ChainPayloads
    published: Published | None = None
    changes: Changes | None = None
    prepared: int | None = None

    @property
    def version(self) -> int | None:
        return self.published.version.number if self.published is not None else self.prepared


class FetchedPayloads:
    """The payloads of a version, in memory."""

    def __init__(self, place: Place, payloads: Sequence[bytes]) -> None:
        self.folder = Path(str(place))
        self.count = len(payloads)
        self._payloads = payloads
        self._facts = [_facts(index, data) for index, data in enumerate(payloads)]

    def states(self, index: int) -> States:
        """The starting states of payload `index`."""
        return self._facts[index].states

    def runs_bytes(self, index: int) -> int:
        """How many bytes the runs of payload `index` have together."""
        return self._facts[index].runs_bytes

    def run_bytes(self, run: Run, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes `start` to `stop` of a run, all of them if not told otherwise."""
        facts = self._facts[run.payload]
        if run.offset + run.bytes > facts.runs_bytes:
            end = run.offset + run.bytes
            raise DamagedError(f"payload {run.payload}", f"has {facts.runs_bytes} bytes of runs, one ends at {end}")
        begin = facts.runs_start + run.offset
        return memoryview(self._payloads[run.payload])[begin + start : begin + min(run.bytes, stop or run.bytes)]


def _facts(index: int, data: bytes) -> PayloadFacts:
    return check_payload_start(memoryview(data), len(data), index, None, f"payload {index}")


@contextmanager
def offer_of(
    delta: str | os.PathLike[str], trust: Trust, storage_options: Mapping[str, object] | None, jobs: int
) -> Iterator[Offer]:
    """Open a delta: the folder of one, or of what one changes, or version N of a remote, given as REMOTE@N, unless a
    folder has this name.

    Raises what opening and fetching raise; UnsupportedError for a version that has no delta; WrongBaseError if it has
    to be signed, and is not: the folder of one is if it has the commit of a version, with its signatures.
    """
    match = _ADDRESS.fullmatch(delta) if isinstance(delta, str) and not os.path.lexists(delta) else None
    if match is not None:
        with open_store(match[1], storage_options) as store:
            published = Log(store, require_history(store).id, trust).find(int(match[2]))
            yield fetch_offer(store, published, jobs)
        return
    opened = _open(delta)
    own = _published_in(opened, trust)
    if has_changes(opened.folder):
        offer = Offer(str(delta), opened, ChainPayloads([]), own, read_changes(opened))
        if own is not None and is_ahead(opened.folder):
            offer = replace(offer, published=None, prepared=own.version.number)
        yield offer
        return
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        payloads.verify_all(jobs)
        yield Offer(str(delta), opened, ChainPayloads([payloads]), own)


def _open(delta: str | os.PathLike[str]) -> Delta:
    try:
        return open_delta(delta, if_checkpoint="a live receiver is given deltas, or REMOTE@N")
    except DcrError as error:
        path = Path(delta)
        if not path.exists() and path.parent.is_dir() and holds_versions(path.parent):
            raise NotFoundError(str(path), "is not there", hint=hint_beside(path.parent)) from error
        if not isinstance(error, NotFoundError) or not path.is_dir() or not holds_versions(path):
            raise
        facts = "holds the changes of versions, each in a folder of its own"
        raise NotFoundError(str(delta), facts, hint="stage one of them, or use Member(..., changes=FOLDER)") from error


def _published_in(opened: Delta, trust: Trust) -> Published | None:
    """The version that a delta in a folder makes, by the commit that lies beside it; None if none does. WrongBaseError
    if it has to be signed, and is not by who is trusted."""
    what = str(opened.folder / PUBLISHED_NAME)
    with open_folder(opened.folder) as root:
        data = root.read(PUBLISHED_NAME, COMMIT_LIMIT)
    if data is None:
        if not trust.is_asked_for:
            return None
        facts = f"is not signed: it has no {PUBLISHED_NAME}, the commit of a version with its signatures"
        hint = "stage REMOTE@N, or what dcr pull --publish-changes leaves, where trusted_keys are given"
        raise WrongBaseError(str(opened.folder), facts, hint=hint)
    signed = split_signed(data, what)
    if object_digest(signed.line) != opened.commit_blake3:
        raise DamagedError(what, f"is not the commit that {COMMIT_NAME} is")
    trust.check(signed, COMMIT_KIND, what)
    return decode_version(data, None, what)


def find_offer(folder: Path, before: Published, published: Published, shown: str) -> Offer | None:
    """Open what a pull has decoded of a version of the remote `shown`, which follows `before`; None if it has not come
    to it yet.

    It counts if it says of itself that it is of this very version, byte for byte of its commit. Raises what finding and
    reading it raise.
    """
    return _find(folder, before, published, shown, lambda found: _offer_of(found, published))


def find_documents(folder: Path, before: Published, published: Published, shown: str) -> Documents | None:
    """Open the documents alone of what `find_offer` finds."""
    return _find(folder, before, published, shown, lambda found: found)


def _offer_of(found: Delta, published: Published) -> Offer:
    return Offer(str(found.folder), found, ChainPayloads([]), published, read_changes(found))


def _find(
    folder: Path, before: Published, published: Published, shown: str, take: Callable[[Delta], Taken]
) -> Taken | None:
    name = _require_delta(shown, published)
    for _ in range(_TRIES):
        path = find(folder, before.version.place, published.version.place)
        if path is None:
            return None
        try:
            opened = open_delta(path)
            if opened.commit_blake3 != object_digest(published.signed.line):
                facts = f"says by {COMMIT_NAME} that it is of another version than {name}"
                raise WrongBaseError(str(path), facts, hint="let nobody write there but one dcr pull --publish-changes")
            return take(opened)
        except DcrError:
            # It may have got its name meanwhile, or have gone.
            if path.exists():
                raise
    return None


def _require_delta(shown: str, published: Published) -> str:
    """What a version of a remote is called; UnsupportedError if it has no delta."""
    name = f"{shown}@{published.version.number}"
    if published.version.delta is None:
        facts = "has only an anchor: nothing of it says what changes"
        raise UnsupportedError(name, facts, hint="load the module anew, from its checkpoint at this version")
    return name


def fetch_offer(store: Store, published: Published, jobs: int) -> Offer:
    """Fetch all of a version into memory, and check it."""
    place, name = published.version.place, _require_delta(store.shown, published)
    documents = fetch_documents(store, published)
    if documents is None:
        raise NotFoundError(name, "its delta is there no more", hint="load the module anew, at a newer version")
    rows = documents.manifest.payloads
    fetched: list[bytes] = [b""] * len(rows)

    def fetch() -> Callable[[int], None]:
        def one(index: int) -> None:
            fetched[index] = _fetch(store, place, index, rows[index])

        return one

    run_all(range(len(rows)), fetch, jobs)
    return Offer(name, documents, ChainPayloads([FetchedPayloads(place, fetched)]), published)


def _fetch(store: Store, place: Place, index: int, row: PayloadRow) -> bytes:
    key = payload_key(place, index)
    for _ in range(_TRIES):
        # What comes damaged may have been damaged on its way.
        data = store.get(key, most_bytes=row.bytes, size=row.bytes, is_denied_absent=True)
        if data is None:
            raise NotFoundError(f"{store.shown}/{key}", "is there no more", hint="a newer version may be there")
        if object_digest(data) == row.blake3:
            return data
    raise DamagedError(f"{store.shown}/{key}", "is not the payload that the manifest lists: its blake3 differs")
