"""The step that makes a version exist: creating its commit, and what came of it (FORMAT 13.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum

from dcr_cli.delta.commit import Commit
from dcr_cli.errors import ConflictError
from dcr_cli.remote.keys import Place, anchor_key, commit_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import SigningKey, Trust
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, Published, Version, decode_version, encode_version
from dcr_cli.store.store import Store


@dataclass(frozen=True, slots=True)
class Author:
    """Who publishes, for people, the key that signs, if one does, and the clock, which tests may set."""

    publisher: str
    key: SigningKey | None = None
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def now(self) -> str:
        """The time, as documents tell it."""
        return self.clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Outcome(Enum):
    """What became of a commit. SAME: another publisher has made the very same version."""

    WON = "won"
    SAME = "same"


def make_commit(
    history: str, place: Place, head: Published | None, parts: Commit | AnchorParts, *, anchor: int, author: Author
) -> bytes:
    """Encode the commit of a version that follows `head`, signed if there is a key."""
    created = author.now()
    if isinstance(parts, Commit):
        parts = replace(parts, created=created, publisher=author.publisher)
    version = Version(
        history=history,
        place=place,
        previous=head.blake3 if head is not None else None,
        anchor=anchor,
        parts=parts,
        created=created,
        publisher=author.publisher,
    )
    line = encode_version(version)
    return author.key.sign(line, COMMIT_KIND) if author.key is not None else line


def is_same_commit(kept: bytes, made: bytes, number: int, what: str) -> bool:
    """Whether a commit that is there is of the state and objects that one is which was made now, and as much signed;
    when it was made, and what its publisher knew of anchors then, may differ."""
    ours, theirs = (decode_version(data, number, what) for data in (made, kept))
    keys = frozenset(key for key, _ in ours.signed.signatures)
    is_signed = frozenset(Trust(keys).signers(theirs.signed, COMMIT_KIND)) == keys
    return is_signed and _facts_of(theirs.version) == _facts_of(ours.version)


def _facts_of(version: Version) -> Version:
    parts = version.parts
    if isinstance(parts, Commit):
        parts = replace(parts, created="", publisher="")
    return replace(version, parts=parts, anchor=0, created="", publisher="")


def newest_anchor(store: Store, head: Published) -> int:
    """The newest version up to `head` that is known to have an anchor: its own, or the one that its commit names."""
    if head.version.anchor == head.version.number:
        return head.version.number
    has_own = store.stat(anchor_key(head.version.place), is_denied_absent=True) is not None
    return head.version.number if has_own else head.version.anchor


def create_commit(store: Store, log: Log, data: bytes, number: int) -> tuple[Outcome, Published]:
    """Create the commit of version `number`; from then on it exists: what became of it, and the commit that is there.

    ConflictError if another one was faster with another state. Nothing that anyone reads was changed then.
    """
    ours = decode_version(data, number, "commit")
    if store.put_if_absent(commit_key(number), data):
        return Outcome.WON, ours
    theirs = log.require(number)
    if theirs.version.place == ours.version.place:
        # An earlier try, whose answer was lost, has made it, at another moment.
        return Outcome.WON, theirs
    if theirs.version.target == ours.version.target:
        return Outcome.SAME, theirs
    facts = f"version {number} was taken by {theirs.version.place.id}"
    if theirs.version.publisher:
        facts += f" of {theirs.version.publisher}"
    raise ConflictError(store.shown, facts, hint="run the same command again: it will publish the version after it")
