"""A live receiver as one of those that a remote's versions are committed for together: it stages what is prepared, says
so, waits for the commit, applies, and says that.

What dies between staged and applied leaves nothing behind that would have to be repaired: the next engine loads its
checkpoint, which is at some version, and its member goes from there, version by version, to the newest one. What the
dead one said by the same name, the new one would say again. How staging and applying are done is receiver.py's matter,
what several versions ahead have to be is way.py's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.errors import ConflictError, UsageError, WrongBaseError
from dcr_cli.fetch.prepared import find_prepared
from dcr_cli.fetch.source import Source, open_source
from dcr_cli.fetch.words import Speaker, Word, say
from dcr_cli.live.offer import Offer, fetch_offer, find_offer
from dcr_cli.live.ready import Staged
from dcr_cli.live.receiver import Receiver
from dcr_cli.live.stated import check_stated, find_stated
from dcr_cli.live.way import TO_COMMIT, Way, check_following
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, read_hint
from dcr_cli.remote.keys import APPLIED, STAGED, check_receiver
from dcr_cli.remote.log import Known
from dcr_cli.remote.signing import load_signing_key, trust_in
from dcr_cli.remote.version import Published, check_follows, is_next
from dcr_cli.stopping import pause
from dcr_cli.store.http_headers import Caller
from dcr_cli.store.opening import open_store
from dcr_cli.work import threads

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 2.0


class Fate(Enum):
    """What has become of a version that is staged."""

    OPEN = "prepared"
    COMMITTED = "committed"
    GIVEN_UP = "given up"


class Member:
    """A live receiver of `remote` whose module is at `version`: the one that its checkpoint was at when it was loaded.

    With a `name` it says what it has staged and applied, signed with `receiver_key`; then the receiver has to know what
    its module is at (`Receiver.content`). Each rank has a name of its own; a quorum counts names, those of ranks and
    those of pulls alike. A context manager, for one thread at a time. Whatever it raises, it may be called again: what
    was done and could not be said is said first by whichever call comes next.

    `changes` is the folder in which a pull of the same remote on this host leaves what versions change, decoded (FORMAT
    12.1), what is prepared too: from there it takes them, and of the remote only its commits, so that `context` serves.
    It goes no further than the pull has come, and waits for nothing: `awaited_version` says what it lacks. Who may
    write there decides what a rank holds that sees slices alone.
    """

    def __init__(
        self,
        receiver: Receiver,
        remote: str | os.PathLike[str],
        *,
        version: int,
        name: str | None = None,
        receiver_key: str | os.PathLike[str] | None = None,
        trusted_keys: Sequence[str] = (),
        changes: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        jobs: int | None = None,
    ) -> None:
        if changes is not None and not Path(changes).is_dir():
            hint = "give the one that dcr pull --publish-changes has on this host"
            raise UsageError("changes", f"{os.fspath(changes)} is no folder", hint=hint)
        if receiver_key is not None and name is None:
            raise UsageError("receiver_key", "signs what a receiver says, and needs its name")
        key = load_signing_key(receiver_key, "receiver_key") if receiver_key is not None else None
        self._speaker = Speaker(check_receiver(name), key) if name is not None else None
        self._receiver = receiver
        self._changes = Path(changes) if changes is not None else None
        self._jobs = threads(jobs)
        self._exit = ExitStack()
        # A relay shows who asks it.
        caller = Caller("receiver", name) if name is not None else None
        store = self._exit.enter_context(open_store(remote, storage_options, caller=caller))
        try:
            self._source: Source = open_source(store, trust_in(trusted_keys), None)
            self._own = find_stated(self._source, version)
            self._check_state()
        except BaseException:
            self._exit.close()
            raise
        self._staged: Published | None = None
        self._awaited: Published | None = None
        # What was done, and could not be said.
        self._unsaid: list[tuple[Published, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def version(self) -> int:
        """The version that the module is at, or, while an apply is to be finished, the one that it was at."""
        return (self._unnoted or self._own).version.number

    @property
    def staged_version(self) -> int | None:
        """The version that is staged, or that an apply is to bring the module to that is to be finished."""
        # Others may have it staged, or given up.
        is_ready = self._receiver.staged is not None or self._receiver.is_partial
        return self._staged.version.number if self._staged is not None and is_ready and self._unnoted is None else None

    @property
    def is_all_said(self) -> bool:
        """Whether everything was said that is to be said of what was done."""
        return not self._unsaid and self._unnoted is None

    @property
    def awaited_version(self) -> int | None:
        """The version that `stage_next` found in the remote when it was called last, and could not stage as the pull
        has not left in `changes` what it changes; None if there was none."""
        return self._awaited.version.number if self._awaited is not None else None

    def announce(self) -> None:
        """Say that the version that the module was loaded at is applied, as one that was brought there would. Without a
        name nobody is told; it is seen all the same that the module is at it.

        WrongBaseError if it is not that version's state, UsageError if the receiver has no checkpoint to show it.
        """
        self.speak()
        self._receiver.learn()
        self._check_state()
        if self._receiver.content is None:
            raise self._not_shown()
        self._note(self._own, APPLIED)
        self.speak()

    def speak(self) -> None:
        """Say what was done and could not be said. TransportError or ConflictError if it still cannot."""
        self._settle()
        while self._unsaid:
            if self._speaker is not None:
                published, stage = self._unsaid[0]
                version = published.version
                word = Word(version.history, version.place, version.target, stage)
                say(self._source.store, self._speaker, word, time.time())
            self._unsaid.pop(0)

    def stage_next(self) -> Staged | None:
        """Stage the version after the module's own, be it committed or prepared, and say that it is staged: what is
        staged, also if it was before; None as long as there is none, or it is not in `changes` yet.

        What was staged, and turns out to have been given up, is forgotten, and what came in its place is staged.
        Raises what `Receiver.stage` raises, UsageError, and nothing is staged, if it has a name and nothing shows that
        the module is at its version, and TransportError or ConflictError if it cannot be said; the version is staged
        then, and the next call says it. With `changes`, NotFoundError if what the version changes is there no more,
        WrongBaseError if that folder is of another history.
        """
        self.speak()
        self._awaited = None
        if self._staged is not None:
            if (ready := self._receiver.staged) is not None and self.fate() is not Fate.GIVEN_UP:
                return ready
            self._receiver.give_up()
            self._staged = None
        published = self._next()
        if published is None:
            return None
        offer = self._offer(published)
        if offer is None:
            self._awaited = published
            return None
        try:
            staged = self._receiver.stage_offer(offer)
        except WrongBaseError:
            # Whoever is at another version is told that, and not what of the next one does not fit.
            self._check_state()
            raise
        if self._speaker is not None and self._receiver.content is None:
            self._receiver.give_up()
            raise self._not_shown()
        self._note(published, STAGED)
        self._staged = published
        self.speak()
        return staged

    def check_way(self, version: int) -> None:
        """See that every version after the module's own up to `version` can be applied, the first of which is staged:
        before one of several is.

        ConflictError if one is not committed, or not in `changes` yet; UsageError if the first one is not staged; what
        `way.check_following` raises.
        """
        self._settle()
        if version <= self.version:
            return
        staged = self._require_staged()
        self._check_committed(staged)
        ready = self._receiver.staged
        if ready is not None and version > staged.version.number:
            check_following(Way(self._source, self._changes, self._jobs, ready.shares), staged, version)

    def fate(self) -> Fate:
        """What has become of the version that is staged. UsageError if none is."""
        staged = self._require_staged()
        committed = self._source.log.read(staged.version.number, is_denied_absent=True)
        if committed is not None:
            return Fate.COMMITTED if committed.version == staged.version else Fate.GIVEN_UP
        hint, place = read_hint(self._source.store), staged.version.place
        if hint is None or (hint.history, hint.place.version) != (staged.version.history, place.version):
            return Fate.OPEN
        # A hint may be wrong: then the version is staged once more, when it is committed all the same.
        is_given_up = hint.state == GIVEN_UP if hint.place == place else hint.state == PREPARED
        return Fate.GIVEN_UP if is_given_up else Fate.OPEN

    def wait(self, seconds: float, sleep: Callable[[float], None] = pause) -> Fate:
        """Wait until it is known what becomes of the version that is staged, at most so many seconds; OPEN then."""
        end, step = time.monotonic() + seconds, _SHORTEST_SECONDS
        while (fate := self.fate()) is Fate.OPEN and (left := end - time.monotonic()) > 0:
            sleep(min(step, left))
            step = min(2 * step, _LONGEST_SECONDS)
        return fate

    def apply(self) -> int:
        """Apply the version that is staged and committed, and say that it is applied: its number. If none is staged, as
        one was applied and that could not be said, say it.

        The module must not serve meanwhile. ConflictError if it is not committed, TransportError or ConflictError if
        something of before cannot be said; then nothing was changed, and `version` is what it was. What
        `Receiver.apply` raises leaves it to the next call to finish it, and nothing is said.
        """
        is_all_said = self.is_all_said
        self._settle()
        if not self._receiver.is_partial:
            # A mixture must not last because a remote does not answer.
            self.speak()
            if self._staged is None and not is_all_said:
                return self.version
            self._check_committed(self._require_staged())
        self._require_staged()
        self._receiver.apply()
        self.speak()
        return self.version

    def catch_up(self) -> tuple[int, ...]:
        """Apply every committed version after the module's own, with `changes` as far as the pull has come, one after
        the other: which ones. What is prepared after them is staged, and said to be, as by `stage_next`.

        The module must not serve meanwhile. Raises what `stage_next` and `apply` raise.
        """
        applied: list[int] = []
        while True:
            if not self._receiver.is_partial:
                self.stage_next()
                if self._staged is None or self.fate() is not Fate.COMMITTED:
                    return tuple(applied)
            applied.append(self.apply())

    def _next(self) -> Published | None:
        own = self._own
        number = own.version.number + 1
        committed = self._source.log.read(number, is_denied_absent=True)
        if committed is not None:
            check_follows(own, committed.version, f"{self._source.shown}, version {number}")
            return committed
        return find_prepared(self._source, Known(own.version.history, own.version.number, own.blake3))

    def _offer(self, published: Published) -> Offer | None:
        """What the version after the module's own changes; None if the pull that is to say so has not come to it."""
        if self._changes is None:
            return fetch_offer(self._source.store, published, self._jobs)
        return find_offer(self._changes, self._own, published, self._source.shown)

    def _require_staged(self) -> Published:
        if self._staged is None:
            raise UsageError("member", "no version is staged", hint="call stage_next first")
        return self._staged

    def _check_state(self) -> None:
        check_stated(self._source, (self._unnoted or self._own).version, self._receiver.content)

    def _not_shown(self) -> UsageError:
        facts = "nothing shows that the module is at this version"
        return UsageError(f"version {self.version}", facts, hint="Receiver(..., checkpoint=FOLDER) compares them")

    def _check_committed(self, staged: Published) -> None:
        if (fate := self.fate()) is not Fate.COMMITTED:
            what = f"version {staged.version.number} of {self._source.shown}"
            hint = TO_COMMIT if fate is Fate.OPEN else "stage_next forgets it, and stages what comes in its place"
            raise ConflictError(what, f"is {fate.value}, not committed", hint=hint)

    @property
    def _unnoted(self) -> Published | None:
        """The version that the receiver has come to and that was not noted here, as a stop came between."""
        published = self._receiver.published
        return published if published is not None and is_next(self._own, published.version) else None

    def _settle(self) -> None:
        """Note what was applied."""
        if (applied := self._unnoted) is not None:
            # In this order: whatever stops it, the next call does it again.
            self._note(applied, APPLIED)
            self._staged, self._own = None, applied

    def _note(self, published: Published, stage: str) -> None:
        """Note what is to be said. Of what is applied, that it is staged need not be said any more."""
        others = [each for each in self._unsaid if each[0] != published]
        self._unsaid = [*others, (published, stage)]
