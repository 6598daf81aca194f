"""One rank of an engine, and the three things that it is told: what it is a receiver of, which version comes next, and
that this is to be written now.

Staging goes on in a thread of its own while the engine serves. Ranks agree, one bit at a time, before and after they
write: none begins while another one is not ready. How an engine tells them is the business of vllm.py and sglang.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import ConflictError, HookError, UsageError
from dcr_cli.live import Fate, Member, Receiver
from dcr_cli.serving.outside import check_nothing_outside

_NOTHING_WRITTEN = "nothing was changed: make the update again, then finish it"
_BEHIND = "see that dcr pull --publish-changes runs there; then make the update again, and finish it"
_AGAIN = "finish it again: what was written is written again; until then the engine must not serve"

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rank is a receiver of: the version of `remote` that the engine has loaded, and its folder `checkpoint`.

    With a `name`, rank 3 says as NAME.rank-3 what it has staged and applied. `layouts` is a folder for what was
    learnt, and `key` is added to what that is kept by. `changes` is a folder, one on each host of the engine, in which
    a pull of the same remote leaves what versions change, decoded; without it ranks fetch and decode them. The others
    are as for `Receiver` and `Member`.
    """

    # An address, and options, may have a password in them.
    remote: str = field(repr=False)
    version: int
    checkpoint: str | None = None
    name: str | None = None
    layouts: str | None = None
    changes: str | None = None
    key: str = ""
    may_lack: Sequence[str] = ()
    trusted_keys: Sequence[str] = ()
    receiver_key: str | None = None
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank among those of its engine: its number, in words what its placement is one of, and how it agrees with the
    others: whether what is given is true on all of them, who are asked at the same time."""

    number: int
    key: str
    agree: Callable[[bool], bool] = field(repr=False)


class Session:
    """A served module as a receiver; `load_weights` is its own loader.

    Making it learns where that places what, which disturbs the module and puts it back, unless `layouts` has it, and
    compares all bits with the checkpoint, which nobody may have moved to another version since it was loaded: what
    lies elsewhere, or as something else, than the loader would place it, is refused. For one thread, as an engine
    calls it between its steps.
    """

    def __init__(self, module: Any, load_weights: Callable[[Any], Any], settings: Settings, rank: Rank) -> None:
        if settings.checkpoint is None:
            hint = "the folder that it has loaded its weights from, at this version"
            raise UsageError("checkpoint", "is needed, to see that the engine holds what its loader places", hint=hint)
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
        self._what = f"rank {rank.number} of the engine"
        self._agree = rank.agree
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
        self._changes = settings.changes
        self._wanted = settings.version
        self._thread: Thread | None = None
        # Whether nobody lets the thread wait any more for what a pull has not decoded yet.
        self._is_over = Event()
        self._error: Exception | None = None
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
        the pull has decoded it. UsageError for a version that the module has left.
        """
        self._join()
        self._is_over.clear()
        if version < self._member.version:
            facts = f"it is at version {self._member.version}, and {version} lies before it"
            raise UsageError(self._what, facts, hint="start it on a checkpoint of that version")
        self._wanted = version
        if version > self._member.version:
            self._thread = Thread(target=self._stage, name="dcr stage")
            self._thread.start()

    def finish(self) -> int:
        """Wait until all is staged, and write it, on all ranks or on none; the module must not serve meanwhile: the
        version that it is at then, also if it was there before.

        ConflictError if the version is not committed, another rank is not ready, or the pull has not come to it, which
        nobody waits for here; what staging raised is raised here. Nothing was changed then. What fails later, here or
        on another rank, leaves it to the next call to finish it: HookError, or what `Member.apply` raises.
        """
        self._decide(self._join() or self._unready(), ConflictError(self._what, "another rank is not ready"))
        self._decide(self._apply(), HookError(self._what, "another rank has failed", hint=_AGAIN))
        return self._member.version

    def close(self) -> None:
        """Wait for what is being staged, and let go of the remote."""
        self._join()
        self._member.__exit__(None, None, None)

    def _stage(self) -> None:
        step = _SHORTEST_SECONDS
        try:
            while True:
                # Who lets nobody wait any more is told of what has come until then.
                is_last = self._is_over.is_set()
                if self._member.stage_next() is not None or self._member.awaited_version is None or is_last:
                    return
                self._is_over.wait(step)
                step = min(2 * step, _LONGEST_SECONDS)
        except Exception as error:
            # Raised where it is waited for.
            self._error = error

    def _join(self) -> Exception | None:
        """Wait until nothing is being staged, but for no pull: what that raised since it was last asked."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _unready(self) -> Exception | None:
        """Why the module cannot be brought to the version that is wanted, if it cannot."""
        if self._member.version == self._wanted or self.is_partial:
            return None
        number = self._member.version + 1
        try:
            if self._member.staged_version is None:
                return self._lacking() or ConflictError(
                    self._what, f"version {number} is not staged", hint=_NOTHING_WRITTEN
                )
            if (fate := self._member.fate()) is not Fate.COMMITTED:
                facts = f"version {number} is {fate.value}, not committed"
                return ConflictError(self._what, facts, hint="dcr commit makes it a version")
        except Exception as error:
            return error
        return None

    def _apply(self) -> Exception | None:
        """Bring the module to the version that is wanted: what failed, if something did."""
        try:
            while self._member.version < self._wanted:
                if self._member.staged_version is None and self._member.stage_next() is None:
                    facts = f"version {self._member.version + 1} is not there"
                    hint = f"{self._what} is at {self._member.version}"
                    return self._lacking() or ConflictError(self._what, facts, hint=hint)
                self._member.apply()
        except Exception as error:
            return error
        return None

    def _lacking(self) -> ConflictError | None:
        """What to say if a version is there, and its changes are not."""
        if self._member.awaited_version is None:
            return None
        facts = f"what version {self._member.awaited_version} changes is not in {self._changes} yet"
        return ConflictError(self._what, facts, hint=_BEHIND)

    def _decide(self, error: Exception | None, other: Exception) -> None:
        """Raise what is wrong here, or `other` if something is on another rank."""
        is_right_everywhere = self._agree(error is None)
        if error is not None:
            raise error
        if not is_right_everywhere:
            raise other


def _file_name(key: str) -> str:
    return f"placement-{object_digest(key.encode()).hex()[:32]}.json"
