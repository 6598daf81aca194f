"""One rank of an engine, and the three things that it is told: what it is a receiver of, which version comes next, and
that this is to be written now.

Ranks agree before and after each step: none begins one while another is not ready, and all fail alike. How an engine
tells them is the business of vllm.py and sglang.py, how they hear each other agreeing.py's, what goes on meanwhile
ahead.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import ConflictError, DcrError, IncompleteError, UsageError
from dcr_cli.live import Member, Receiver
from dcr_cli.serving.agreeing import Answer, Answers, Rank, ask_all, check_all, fault_of, is_one_version, standing
from dcr_cli.serving.ahead import Ahead
from dcr_cli.serving.outside import check_nothing_outside
from dcr_cli.serving.settings import Settings, settings_of, version_of

__all__ = ["Rank", "Session", "Settings", "begin"]

_UPDATE = "make the update again, then finish it"
_BEHIND = f"see that dcr pull --publish-changes runs there; then {_UPDATE}"
_NOT_HEARD = "the ranks did not hear each other"
_AGAIN = "finish it again: what was written is written again; until then the engine must not serve"
_FINISH = "finish the update again: it writes the rest"
_CLOSING_SECONDS = 5.0


class Session:
    """A served module as a receiver; `load_weights` is its own loader.

    Making it learns where that places what, which disturbs the module and puts it back, unless `layouts` has it, and
    compares all bits with the checkpoint, which nobody may have moved to another version since it was loaded: what
    lies elsewhere, or as something else, than the loader would place it, is refused. For one thread, as an engine
    calls it between its steps; `update` and `finish` are called on all ranks at the same time, which `begin` has made
    sessions of.
    """

    def __init__(self, module: Any, load_weights: Callable[[Any], Any], settings: Settings, rank: Rank) -> None:
        if settings.checkpoint is None:
            hint = "the folder that it has loaded its weights from, at this version"
            raise UsageError("checkpoint", "is needed, to see that the engine holds what its loader places", hint=hint)
        if settings.layouts is not None and not Path(settings.layouts).is_dir():
            raise UsageError("layouts", f"{shown(settings.layouts)} is no folder")
        check_nothing_outside(module)
        key = f"{rank.key}, {settings.key}" if settings.key else rank.key
        kept = Path(settings.layouts) / _file_name(key) if settings.layouts is not None else None
        receiver = Receiver(
            module,
            load_weights,
            layout=kept if kept is not None and kept.exists() else None,
            key=key,
            checkpoint=settings.checkpoint,
            may_lack=settings.may_lack,
            trusted_keys=settings.trusted_keys,
            storage_options=settings.storage_options,
            jobs=settings.jobs,
        )
        self._rank = rank
        self._receiver = receiver
        self._member = Member(
            receiver,
            settings.remote,
            version=settings.version,
            name=f"{settings.name}.rank-{rank.number}" if settings.name is not None else None,
            receiver_key=settings.receiver_key,
            trusted_keys=settings.trusted_keys,
            changes=settings.changes,
            storage_options=settings.storage_options,
            jobs=settings.jobs,
        )
        self._ahead = Ahead(self._member)
        self._changes = settings.changes
        self._wanted = settings.version
        # Why the update that was asked for last was not taken.
        self._refused: str | None = None
        try:
            self._member.announce()
            if kept is not None and not kept.exists():
                receiver.save_layout(kept)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The version that the module is at, or, while an update is to be finished, the one that it was at."""
        return self._member.version

    @property
    def is_partial(self) -> bool:
        """Whether the module holds a mixture, until `finish` has ended."""
        return self._receiver.is_partial

    def update(self, version: int) -> None:
        """Begin to stage what comes after the module's version, and return at once; `finish` brings it to `version`.

        What is prepared is staged as what is committed is, and said by the name that it has; with `changes`, as soon as
        the pull has decoded it. UsageError for a version that the module has left, and IncompleteError for another one
        than that which is being written, on any rank.
        """
        self.update_as({"version": version})

    def update_as(self, info: Mapping[str, object]) -> None:
        """The same, by the members of a message."""
        call, found = f"update {info!r}", [self._wanted]
        error = _error_of(lambda: found.append(self._taken(info)))
        before, self._refused = self._refused, _NOT_HEARD
        answers = self._ask(call, error)
        try:
            check_all(answers)
        except DcrError as first:
            # A mixture is finished, whatever else was asked for meanwhile.
            self._refused = before if any(each.is_partial for each in answers) else str(first)
            raise first from error
        self._refused, self._wanted = None, found[-1]
        if not self.is_partial:
            self._ahead.ask(self._wanted)

    def finish(self) -> int:
        """Wait until all is staged, and write it, on all ranks or on none; the module must not serve meanwhile: the
        version that it is at then, also if it was there before.

        What could not be said is said first, and a mixture is finished. Then ConflictError if a version up to the one
        that is wanted is not committed, or the pull has not come to it, which nobody waits for here, NotFoundError or
        UnsupportedError if one cannot be had: nothing was changed then. UsageError if the update was not taken. What
        fails later, on any rank, says at which version each is; the next call finishes it.
        """
        answers = self._together("finish", self._begin_to_finish)
        if any(each.is_partial for each in answers):
            self._together("finish what is partly written", self._complete)
        answers = self._together(f"finish version {self._wanted}", self._look)
        # Ranks may be at different versions if one has failed. None is a version ahead of another while all go well.
        for number in range(min(each.version or 0 for each in answers) + 1, self._wanted + 1):
            self._together(f"stage version {number}", partial(self._stage, number))
            self._together(f"write version {number}", partial(self._write, number))
        return self._member.version

    def rest(self) -> None:
        """Wait until nothing is being staged."""
        self._ahead.end()

    def close(self) -> None:
        """Let go of the remote; what is being staged is waited for, but not long."""
        self._ahead.end(_CLOSING_SECONDS)
        self._member.__exit__(None, None, None)

    # What ranks do, each for itself, before they hear of each other

    def _taken(self, info: Mapping[str, object]) -> int:
        version = version_of(info)
        if self.is_partial and version != self._wanted:
            facts = f"holds a mixture: bringing it to version {self._wanted} was stopped, and {version} is another one"
            raise IncompleteError(self._rank.what, facts, hint=_AGAIN)
        if version < self._member.version:
            facts = f"it is at version {self._member.version}, and {version} lies before it"
            raise UsageError(self._rank.what, facts, hint="start it on a checkpoint of that version")
        return version

    def _begin_to_finish(self) -> None:
        self._rank.settle()
        error = self._ahead.end()
        if self.is_partial:
            return
        if self._refused is not None:
            facts = f"the update that was asked for last was not taken: {self._refused}"
            raise UsageError(self._rank.what, facts, hint=_UPDATE)
        if error is not None and self._member.staged_version is None and self._member.version < self._wanted:
            raise error
        self._member.speak()

    def _complete(self) -> None:
        if self.is_partial:
            self._member.apply()
            self._rank.settle()

    def _look(self) -> None:
        """See that the module can be brought to the version that is wanted."""
        if self._member.version < self._wanted:
            self._stage(self._member.version + 1)
            self._member.check_way(self._wanted)

    def _stage(self, number: int) -> None:
        """See that a version is staged, unless the module is at it."""
        member = self._member
        if member.version >= number or member.staged_version is not None or member.stage_next() is not None:
            return
        if member.awaited_version is not None:
            facts = f"what version {member.awaited_version} changes is not in {self._changes} yet"
            raise ConflictError(self._rank.what, facts, hint=_BEHIND)
        raise ConflictError(self._rank.what, f"version {number} is not there", hint=_UPDATE)

    def _write(self, number: int) -> None:
        if self._member.version < number:
            self._member.apply()
            self._rank.settle()

    # How they hear of each other

    def _ask(self, call: str, error: BaseException | None) -> Answers:
        fault = fault_of(error) if error is not None else None
        return ask_all(self._rank, Answer(self._rank.number, call, self.version, self.is_partial, fault))

    def _together(self, call: str, work: Callable[[], object]) -> Answers:
        """Do a part of what is to be finished, and go on if all ranks have done theirs; raise what is wrong on the
        first one that has not, and where all stand."""
        error = _error_of(work)
        answers = self._ask(call, error)
        _raise_stop(error)
        is_mixed = not is_one_version(answers)
        try:
            check_all(answers, where=standing(answers), hint=_AGAIN if is_mixed else None)
        except DcrError as first:
            raise first from error
        return answers


def begin(
    rank: Rank, old: Session | None, info: Callable[[], Mapping[str, object]], make: Callable[[Settings], Session]
) -> Session:
    """Make a session by the members of a message, on all ranks, or on none.

    `old` is the one that the rank has: it is closed, or, if no new one is made, goes on. IncompleteError while an
    update is to be finished on any rank.
    """
    found: list[Settings] = []
    made: list[Session] = []

    def read() -> None:
        if old is not None and old.is_partial:
            raise IncompleteError(rank.what, "holds a mixture: an update was stopped", hint=_FINISH)
        found.append(settings_of(info()))
        rank.settle()

    def learn() -> None:
        if old is not None:
            # It may be reading the module.
            old.rest()
        made.append(make(found[0]))

    for call, work in (("init", read), ("begin", learn)):
        error = _error_of(work)
        try:
            answers = ask_all(rank, Answer(rank.number, call, fault=fault_of(error) if error is not None else None))
            _raise_stop(error)
            check_all(answers)
        except BaseException as first:
            for session in made:
                session.close()
            if isinstance(first, DcrError):
                raise first from error
            raise
    if old is not None:
        old.close()
    return made[0]


def _error_of(work: Callable[[], object]) -> BaseException | None:
    """Do something that others are to hear of: what went wrong, or has stopped it."""
    try:
        work()
    except BaseException as error:
        return error
    return None


def _raise_stop(error: BaseException | None) -> None:
    """Raise what has stopped something, such as KeyboardInterrupt, now that the others have heard of it."""
    if error is not None and not isinstance(error, Exception):
        raise error


def _file_name(key: str) -> str:
    return f"placement-{object_digest(key.encode()).hex()[:32]}.json"
