"""The log of commits (FORMAT 13.4): which versions there are, each proven to follow the one before.

It is read by get alone. What is in a version is not its business.
"""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import DamagedError, NotFoundError, TransportError, UnsupportedError, WrongBaseError
from dcr_cli.remote.history import check_folder, read_history
from dcr_cli.remote.keys import MOST_VERSION, commit_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import COMMIT_KIND, Published, check_follows, decode_version
from dcr_cli.store.store import Store

# So many commits are asked for at once.
_AT_ONCE = 16
# One of so many of the newest versions may be what a folder is at that nobody has said anything of.
ADOPTED_VERSIONS = 64
_REMOVED = "the log was tampered with: no commit is ever removed"


@dataclass(frozen=True, slots=True)
class Known:
    """The newest version that somebody has seen of a history, and the blake3 of its commit."""

    history: str
    version: int
    blake3: bytes


def no_versions(store: Store) -> NotFoundError:
    """The error that a history has no versions yet."""
    hint = f"dcr push CHECKPOINT {shlex.quote(store.shown)} makes the first one"
    return NotFoundError(store.shown, "holds no versions yet", hint=hint)


class Log:
    """The commits of one history in a store."""

    def __init__(self, store: Store, history: str, trust: Trust | None = None) -> None:
        self._store = store
        self._history = history
        self._trust = trust or Trust()

    @property
    def history(self) -> str:
        return self._history

    def read(self, version: int, *, is_denied_absent: bool = False, is_seen: bool = False) -> Published | None:
        """Read a commit; None if there is none, or if access is denied and that is said to mean so. `is_seen` says that
        it was there before.

        DamagedError if it is malformed, WrongBaseError if it is another history's or not signed as it has to be.
        """
        key = commit_key(version)
        data = self._store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=is_denied_absent, is_seen=is_seen)
        if data is None:
            return None
        what = f"{self._store.shown}/{key}"
        published = decode_version(data, version, what)
        if published.version.history != self._history:
            facts = f"is of history {published.version.history}, {self._history} expected"
            raise WrongBaseError(what, facts, hint="another history was begun there; use another address for it")
        self._trust.check(published.signed, COMMIT_KIND, what)
        return published

    def require(self, version: int) -> Published:
        """Read a commit that has to be there; NotFoundError if it is not."""
        published = self.read(version)
        if published is None:
            raise NotFoundError(f"{self._store.shown}/{commit_key(version)}", f"there is no version {version}")
        return published

    def find(self, version: int) -> Published:
        """Read a commit that somebody asks for; NotFoundError if there is none, 0 being the newest where none is."""
        if not version:
            raise no_versions(self._store)
        published = self.read(version, is_denied_absent=True)
        if published is None:
            facts, hint = f"there is no version {version}", f"dcr log {shlex.quote(self._store.shown)}"
            raise NotFoundError(self._store.shown, facts, hint=hint)
        return published

    def newest(self, known: int) -> int:
        """The number of the newest version, `known` or later; 0 if there is none. Version `known` is not looked at.

        Access denied means that there is no such commit; so whoever calls has to have read something of this remote.
        """
        first = known + 1
        if first > MOST_VERSION or not self._has(first):
            return known
        step = 1
        while first + step <= MOST_VERSION and self._has(first + step):
            first, step = first + step, step * 2
        absent = min(first + step, MOST_VERSION + 1)
        while absent - first > 1:
            middle = (first + absent) // 2
            if self._has(middle):
                first = middle
            else:
                absent = middle
        return first

    def has(self, known: Known) -> bool:
        """Whether the log has the commit that somebody has seen, byte for byte."""
        key = commit_key(known.version)
        data = self._store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True, is_seen=True)
        return known.history == self._history and data is not None and object_digest(data) == known.blake3

    def check_known(self, known: Known, seen_at: str) -> Published:
        """Read the commit that somebody has seen; WrongBaseError if the log has it no more, or another one."""
        self._check_history(known, self._history, seen_at)
        published = self.read(known.version, is_denied_absent=True) or self._read_seen(known, seen_at)
        if published is None:
            # Where not even this can be read, access denied says nothing of one commit.
            held = read_history(self._store)
            if held is None:
                check_folder(self._store)
            self._check_history(known, held.id if held is not None else self._history, seen_at)
            facts = f"its log ends below version {known.version}, which {seen_at} has seen"
            raise WrongBaseError(self._store.shown, facts, hint="give --version N to go back")
        if published.blake3 != known.blake3:
            facts = f"its version {known.version} is another than the one that {seen_at} has seen"
            raise WrongBaseError(self._store.shown, facts, hint="give --version N to go back")
        return published

    def find_state(self, state: State, newest: int) -> Published | None:
        """The newest of the last 64 versions that is this state; None if none is."""
        for version in range(newest, max(0, newest - ADOPTED_VERSIONS), -1):
            published = self.require(version)
            if published.version.target == state:
                return published
        return None

    def find_content(self, content: bytes, newest: int) -> int | None:
        """The newest of the last 64 versions that has the tensors of this content digest; None if none is known to.

        A version that cannot be understood, or is signed by nobody who is trusted, is not known.
        """
        numbers = range(newest, max(0, newest - ADOPTED_VERSIONS), -1)
        with ThreadPoolExecutor(_AT_ONCE, "dcr-log") as pool:
            found = zip(numbers, pool.map(self._content_of, numbers), strict=True)
            return next((number for number, known in found if known == content), None)

    def _content_of(self, version: int) -> bytes | None:
        try:
            published = self.read(version, is_denied_absent=True)
        except (DamagedError, UnsupportedError, WrongBaseError):
            return None
        return published.version.target.content if published is not None else None

    def following(self, published: Published, last: int) -> list[Published]:
        """The versions after `published` up to `last`, each of which names the commit before it.

        The last one is known to be there, so that one that is missing before it is DamagedError.
        """
        found = [published]
        with ThreadPoolExecutor(_AT_ONCE, "dcr-log") as pool:
            # Some at a time: what a remote says is its last version can be any number.
            for first in range(published.version.number + 1, last + 1, _AT_ONCE):
                numbers = range(first, min(first + _AT_ONCE, last + 1))
                for number, following in zip(numbers, pool.map(self.read, numbers), strict=True):
                    what = f"{self._store.shown}/{commit_key(number)}"
                    if following is None:
                        raise DamagedError(what, f"is not there, although version {last} is", hint=_REMOVED)
                    check_follows(found[-1], following.version, what)
                    found.append(following)
        return found[1:]

    def _read_seen(self, known: Known, seen_at: str) -> Published | None:
        """Read a commit that what answers first lacks. WrongBaseError if nothing that answers has it, and it is another
        history that does."""
        try:
            return self.read(known.version, is_denied_absent=True, is_seen=True)
        except TransportError:
            # What does not answer may have it; but what answers need not be behind it for that.
            held = read_history(self._store)
            if held is not None:
                self._check_history(known, held.id, seen_at)
            raise

    def _check_history(self, known: Known, history: str, seen_at: str) -> None:
        if known.history != history:
            facts = f"{seen_at} follows history {known.history}, the remote holds {history}"
            raise WrongBaseError(
                self._store.shown,
                facts,
                hint="check the address; dcr pull --repair, or another --baseline, goes over to it",
            )

    def _has(self, version: int) -> bool:
        return self._store.get(commit_key(version), most_bytes=COMMIT_LIMIT, is_denied_absent=True) is not None
