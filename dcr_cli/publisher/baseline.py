"""The baseline: the publisher's own receiver, from which the next delta starts, and what a push keeps beside it.

It is a checkpoint that nobody else uses, locked while a push runs. Which version it is at, its position says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.arguments import check_apart
from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.content import Progress, Workers, read_state
from dcr_cli.delta.delta import Delta
from dcr_cli.durable import PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, Folder, open_folder
from dcr_cli.errors import ConflictError, DamagedError, LocalError, UnsupportedError, UsageError
from dcr_cli.fetch.position import POSITION_NAME, Position, read_position, write_position
from dcr_cli.locking import lock_folder
from dcr_cli.receiver.places import check_room, with_slack
from dcr_cli.receiver.record import TensorRecord, read_record, write_record
from dcr_cli.receiver.sidecars import identities_now
from dcr_cli.remote.version import Published
from dcr_cli.store.location import folder_of

BASELINES = ".dcr-baseline"
_LOCK, _MARK = "push-lock", "baseline"
# Says that what lies there is at no version yet; and, until it says whole, that it is not all of a checkpoint.
_FILLING = "filling"
_WHOLE = b"whole\n"
_ELSEWHERE = "give --baseline DIR, a place for it"


def default_baseline(checkpoint: str | os.PathLike[str], history: str) -> Path:
    """Where the baseline of a history is kept, if nothing else is said: beside the checkpoint."""
    return Path(os.path.abspath(checkpoint)).parent / BASELINES / history


def check_places(
    checkpoint: str | os.PathLike[str], remote: str | os.PathLike[str], baseline: str | os.PathLike[str] | None
) -> None:
    """Raise UsageError if what is published, where it goes and what is kept of it do not lie apart, or if it goes where
    a checkpoint lies."""
    folder = folder_of(remote)
    check_apart({"checkpoint": checkpoint, "baseline": baseline, "remote": folder})
    if folder is not None and any(path.is_file() for path in Path(folder).glob(f"*{SHARD_SUFFIX}")):
        hint = "dcr push CHECKPOINT REMOTE; dcr diff compares two checkpoints"
        raise UsageError(str(folder), "holds a checkpoint, and is no remote", hint=hint)


class KeptBaseline:
    """A baseline as it lies there, looked at and not changed; a context manager. One that is not there holds nothing.

    Without a lock: whoever changes it meanwhile may be seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root: Folder | None = None
        self._home: Folder | None = None
        with ExitStack() as stack:
            if path.exists():
                self._root = stack.enter_context(open_folder(path))
                self._home = self._root.find_folder(STATE_FOLDER)
            if self._home is not None:
                stack.enter_context(self._home)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint lies in it, all of it; without, it only keeps what is being sent."""
        if self._root is None or self._home is None:
            return False
        is_filled = self._home.read(_FILLING, len(_WHOLE)) == _WHOLE
        return self._root.names() != [STATE_FOLDER] and (not self.is_begun or is_filled)

    @property
    def is_begun(self) -> bool:
        """Whether it was begun and has not come to a version, as what it was made from was not published."""
        return self._home is not None and self._home.status(_FILLING) is not None

    def position(self) -> Position | None:
        return read_position(self._home) if self._home is not None else None

    def recorded_state(self) -> State | None:
        """The state that its record says it is in."""
        record = read_record(self._home) if self._home is not None else None
        return record.state if record is not None else None


class Baseline(KeptBaseline):
    """The folder of a baseline, made if it is not there, and locked; a context manager.

    LocalError where it cannot be made, ConflictError if another push has it, or if it holds something else.
    """

    def __init__(self, path: Path) -> None:
        with ExitStack() as stack:
            self._made = _make(path)
            self.root = stack.enter_context(_open(path))
            others = [name for name in self.root.names() if name != STATE_FOLDER]
            if others and self.root.status(f"{STATE_FOLDER}/{_MARK}") is None:
                facts = f"is no baseline: it holds {others[0]}, which no push has put there"
                raise ConflictError(str(path), facts, hint="give --baseline DIR, an empty folder")
            locked = lock_folder(self.root, STATE_FOLDER, _LOCK, PRIVATE_FOLDER_MODE)
            self._has_made_home = locked.was_made
            self.home = stack.enter_context(locked.folder)
            stack.enter_context(locked.lock)
            if self.home.status(_MARK) is None:
                # What a push empties and fills is nobody else's checkpoint.
                self.home.replace_file(_MARK, b"")
            self._stack = stack.pop_all()
        self.path = self.root.path
        self._root, self._home = self.root, self.home

    def discard(self) -> None:
        """Remove what was made for it, as far as nothing else has come there; it is not used any more then."""
        if self._has_made_home:
            for name in (_MARK, _LOCK):
                self.home.remove(name, missing_ok=True)
            self.root.remove_folder(STATE_FOLDER, used_ok=True)
        for path in reversed(self._made):
            with open_folder(path.parent) as parent:
                parent.remove_folder(path.name, used_ok=True)

    def move_to(self, position: Position) -> None:
        """Say, durably, which version it is at."""
        write_position(self.home, position)
        if self.is_begun:
            self.make_whole()

    def fill(self, source: Checkpoint, *, jobs: int, progress: Progress | None = None) -> State:
        """Make it a copy of `source`, which shares its bytes where the file system can: the state that it is then in.

        What it held goes first, and with it its position. ConflictError if `source` changes meanwhile.
        """
        self.empty()
        with open_folder(source.root) as folder:
            self._copy_all(folder, source)
        with source.reader() as reader:
            reader.check_unchanged()
        return self._read_anew(source, jobs, progress)

    def link(self, source: Checkpoint, *, jobs: int, progress: Progress | None = None) -> State:
        """Make its files second names of those of `source`: the state that it is then in."""
        self.empty()
        self._link_all(source)
        return self._read_anew(source, jobs, progress)

    def relink(self, source: Checkpoint, delta: Delta) -> None:
        """Make its files second names of those of `source`, which is at the target of `delta` and was just read."""
        self.empty()
        self._link_all(source)
        tensors = [TensorRecord(row.name, row.dtype, row.shape, digest) for row, digest in delta.tensors()]
        files = [FileDigest(row.path, row.kind, row.size, row.blake3) for row in delta.manifest.files]
        self._record(delta.commit.target.content, tensors, files, source.skipped)

    def empty(self) -> None:
        """Remove the checkpoint that it holds, and say, durably, that it holds none until it is whole again."""
        self.home.replace_file(_FILLING, b"")
        self.home.remove(POSITION_NAME, missing_ok=True)
        for name in self.root.names():
            if name != STATE_FOLDER:
                self.root.remove_tree(name)

    def _read_anew(self, source: Checkpoint, jobs: int, progress: Progress | None) -> State:
        copy = open_checkpoint(self.path, skip=source.skipped, what="baseline")
        with Workers(jobs, "baseline", progress) as workers, copy.reader() as reader:
            state, digests = read_state(workers, copy, reader)
            files = copy.files_digest(reader)
        tensors = [TensorRecord(t.name, t.dtype.name, t.shape, digests[t.name]) for t in copy.tensors]
        self._record(state.content, tensors, files, source.skipped)
        return state

    def _record(
        self, content: bytes, tensors: Sequence[TensorRecord], files: Sequence[FileDigest], skipped: Sequence[str]
    ) -> None:
        identities = identities_now(self.root, [file.path for file in files])
        write_record(self.home, content, tensors, files, identities, skipped, mode=PRIVATE_FILE_MODE)
        self.home.replace_file(_FILLING, _WHOLE)

    def make_whole(self) -> None:
        """Say that all of a checkpoint lies in it, which is at the version that its position says."""
        self.home.remove(_FILLING, missing_ok=True)
        self.home.sync()

    def check_room(self, needed_bytes: int, files: int) -> None:
        """Raise LocalError if a copy of so many bytes would not fit."""
        try:
            check_room(self.root, with_slack(needed_bytes, files))
        except LocalError as error:
            raise LocalError(error.what, error.facts, hint=f"make room, or {_ELSEWHERE}") from error

    def can_clone(self, source: Checkpoint) -> bool:
        """Whether its file system shares the bytes of files with that of `source`."""
        name = f"{STATE_FOLDER}/clone"
        # One that was stopped here has left it.
        self.root.remove(name, missing_ok=True)
        with open_folder(source.root) as folder, self.root.create_file(name, PRIVATE_FILE_MODE) as file:
            try:
                with folder.open_linked(source.shards[0].path) as shard:
                    return file.clone_from(shard)
            finally:
                self.root.remove(name)

    def _copy_all(self, folder: Folder, source: Checkpoint) -> None:
        for path in source.identities:
            self.root.make_parents(path)
            with folder.open_linked(path) as file, self.root.create_file(path, PRIVATE_FILE_MODE) as copy:
                if not copy.clone_from(file):
                    copy.copy_from(file)
                copy.sync()
        self._sync(source)

    def _link_all(self, source: Checkpoint) -> None:
        with open_folder(source.root) as folder:
            for path, identity in source.identities.items():
                self.root.make_parents(path)
                if not self.root.link_file(folder, path, path):
                    facts = f"a hard link to {path} cannot be made there"
                    raise UnsupportedError(str(self.path), facts, hint=f"leave out --baseline-link, or {_ELSEWHERE}")
                now = identities_now(self.root, [path]).get(path)
                # A new name changes the ctime, and nothing else.
                if now is None or now._replace(ctime_ns=0) != identity._replace(ctime_ns=0):
                    facts = "changed while it was linked"
                    raise ConflictError(str(source.root / path), facts, hint="try again when nothing writes there")
        self._sync(source)

    def _sync(self, source: Checkpoint) -> None:
        for path in {path.rpartition("/")[0] for path in source.identities}:
            self.root.sync(path)


def open_baseline(path: Path, skip: Sequence[str], head: Published) -> Checkpoint:
    """Open a baseline that is at `head`, but for what was left out of the source, which must not be part of it."""
    found = open_checkpoint(path, what="baseline")
    left_out = open_checkpoint(path, skip=skip, what="baseline")
    gone = found.identities.keys() - left_out.identities.keys()
    if gone:
        facts = f"leaves out {min(gone)}, which version {head.version.number} has"
        raise UsageError("--skip", facts, hint="--no-delta publishes a version that starts from nothing")
    return left_out


def _make(path: Path) -> tuple[Path, ...]:
    """Make what is not there of the folder at `path`, but for more than two folders: those that were made."""
    if path.exists():
        return ()
    above = path.parent
    wanted = [above, path] if not above.exists() and above.name == BASELINES else [path]
    with _named(path):
        return tuple(each for each in wanted if _make_folder(each))


def _make_folder(path: Path) -> bool:
    with open_folder(path.parent) as parent:
        was_made = parent.make_folder(path.name, PRIVATE_FOLDER_MODE, exist_ok=True)
        parent.sync()
    return was_made


def _open(path: Path) -> Folder:
    with _named(path):
        return open_folder(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say of what cannot be made or opened that it is a baseline."""
    try:
        yield
    except (LocalError, DamagedError) as error:
        raise LocalError(f"baseline {path}", error.facts, hint=_ELSEWHERE) from error
