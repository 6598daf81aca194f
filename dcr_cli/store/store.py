"""The store: the narrow contract that everything above reads and writes a remote through.

It is one for all kinds of backends: what it asks of them is tried again while that may help, what comes is measured
against what was announced and expected, and what goes wrong becomes an error that names the object and no secret.
It knows nothing of what the objects mean, caches nothing, and lists only when it is asked to. A store is used by any
number of threads, not by a process made by fork after it was opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from dcr_cli.checkpoint.names import path_fault, safe_path
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UnsupportedError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    Backend,
    DeniedError,
    Entry,
    FaultError,
    OutsideError,
    Status,
    TransientError,
    is_leftover,
)
from dcr_cli.store.body import body
from dcr_cli.store.calls import Calls
from dcr_cli.store.creation import ONE_WRITER_HINT, Creation
from dcr_cli.store.retry import Attempts, Patience
from dcr_cli.store.source import SentStream
from dcr_cli.store.traffic import Meter, Metered, Traffic

# What is created exclusively goes out in one request, which all backends take up to this size.
MOST_CREATED_BYTES = 1 << 20


class Store:
    """The objects below one root; a context manager.

    Every method may raise TransportError when the remote does not answer or refuses, and LocalError when it is a local
    folder. A key is a safe relative path, else DamagedError. `is_single_writer` says that nothing else writes there:
    then an exclusive create may be a look and a write. `folder` is the root, where that is a local one.

    Where several backends lead to the remote, one may be behind the others: what `is_seen`, by whoever asks or by what
    it has read, is absent only if none has it, and what comes next is asked of one that has it.
    """

    def __init__(
        self,
        backend: Backend,
        shown: str,
        *,
        patience: Patience | None = None,
        is_single_writer: bool = False,
        meter: Meter | None = None,
        folder: Path | None = None,
    ) -> None:
        self.shown = shown
        self.folder = folder
        self._meter = meter or Meter()
        self._backend = Metered(backend, self._meter)
        self._is_single_writer = is_single_writer
        # How often what is asked was turned to another backend, because one was behind.
        self.turns = 0
        self._calls = Calls(shown, patience or Patience())

    def __repr__(self) -> str:
        return f"Store({self.shown!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._backend.close()

    @property
    def missing_folder(self) -> Path | None:
        """The local folder that the root would be, if it would be one and is not there."""
        return self.folder if self.folder is not None and not os.path.lexists(self.folder) else None

    @property
    def traffic(self) -> Traffic:
        """What was asked for and moved since the store was opened."""
        return self._meter.traffic

    # Reading

    def get(
        self,
        key: str,
        *,
        most_bytes: int,
        size: int | None = None,
        is_denied_absent: bool = False,
        is_seen: bool = False,
    ) -> bytes | None:
        """Return a whole object; None if it is proven absent, or access is denied and that is said to mean absent.

        One of more than `most_bytes`, or of another size than `size`, is DamagedError.
        """

        def attempt() -> bytes:
            with self._backend.read(key, 0, None) as answer:
                self._check_size(key, answer.total, size, most_bytes)
                data = bytearray()
                for chunk in body(answer, 0, size if answer.total is None else answer.total):
                    data += chunk
                    self._check_size(key, None, None, most_bytes, read_bytes=len(data))
            self._check_size(key, len(data), size, most_bytes)
            return bytes(data)

        data = self._calls.run_or_none(key, attempt, is_denied_absent)
        if data is None and is_seen and self._turn_to(key):
            data = self._calls.run_or_none(key, attempt, is_denied_absent)
        return data

    def get_range(self, key: str, begin: int, size: int, *, is_seen: bool = False) -> bytes:
        """Return `size` bytes from `begin` on; an object that ends before that is DamagedError, none NotFoundError."""
        if begin < 0 or size < 0:
            raise ValueError(f"there are no {size} bytes from {begin} on")

        def attempt() -> bytes:
            with self._backend.read(key, begin, size) as answer:
                self._check_end(key, answer.total, begin + size)
                data = bytearray()
                for chunk in body(answer, begin, begin + size):
                    data += chunk
            return bytes(data)

        if size == 0:
            safe_path(key, self.shown)
            return b""
        try:
            return self._calls.run(key, attempt)
        except NotFoundError:
            if not is_seen or not self._turn_to(key):
                raise
        return self._calls.run(key, attempt)

    def stream(
        self,
        key: str,
        *,
        begin: int = 0,
        end: int | None = None,
        size: int | None = None,
        is_seen: bool = False,
        told: Callable[[int], None] | None = None,
    ) -> Iterator[bytes]:
        """Yield what an object holds from `begin` to `end`, or to its own end, in parts of a few MiB at most.

        A body that breaks off is gone on with from there. `size` is that of the whole object; another one, or one below
        `end`, is DamagedError, an object that is replaced meanwhile ConflictError, none NotFoundError. `told` is called
        with the size of the object before each body that tells it. The bytes are to be checked against a digest: no
        backend promises that two requests are answered from one object.
        """
        self._calls.check(key)
        attempts = Attempts(self._calls.patience)
        seen: Answer | None = None
        at = begin
        while True:
            fault: FaultError | None = None
            try:
                with self._backend.read(key, at, None if end is None else end - at) as answer:
                    self._check_size(key, answer.total, size)
                    if seen is not None and _is_of_another(seen, answer):
                        raise ConflictError(self._calls.name(key), "was replaced while it was read")
                    seen = seen or answer
                    total = size if answer.total is None else answer.total
                    if end is not None:
                        self._check_end(key, total, end)
                    if told is not None and total is not None:
                        told(total)
                    for chunk in body(answer, at, total if end is None else end):
                        at += len(chunk)
                        attempts.progressed()
                        yield chunk
            except TransientError as error:
                fault = attempts.failed(error)
                if fault is None:
                    continue
            except FaultError as error:
                fault = error
            if isinstance(fault, AbsentError) and is_seen and self._turn_to(key):
                is_seen = False
                continue
            if isinstance(fault, OutsideError) and at == (size if end is None else end):
                # Where nothing is left, a range has nothing to begin with.
                return
            if fault is not None:
                raise self._calls.error(key, fault)
            if end is None:
                self._check_size(key, at, size)
            return

    def stat(self, key: str, *, is_denied_absent: bool = False) -> Status | None:
        """Return size and time of an object; None as for `get`."""

        def attempt() -> Status:
            status = self._backend.status(key)
            if status is None:
                raise AbsentError
            return status

        return self._calls.run_or_none(key, attempt, is_denied_absent)

    @property
    def may_be_relay(self) -> bool:
        """Whether what is behind is of a kind that may be a relay."""
        return self._backend.can_wait

    def wait(self, key: str, seconds: int) -> bool:
        """Have the remote wait until an object is there, or until it has other news, for `seconds` at most.

        False, and at once, where it does not wait. True says nothing of the object, and it may have been at once too:
        whoever waits looks then, and does not ask again at once and for ever. It is not tried again.
        """
        return self._calls.run_once(key, lambda: self._backend.wait(key, seconds))

    # Writing

    def put(self, key: str, data: bytes | BinaryIO) -> None:
        """Write an object over whatever has the key; seen whole or not at all.

        A stream is one that can be sought in; it is written from where it stands to its end, in parts, and again from
        there where that has to be tried again. The size of what it became is read back. One that cannot be read is
        LocalError, one that shrinks meanwhile ConflictError, and nothing is written then.
        """
        source = data if isinstance(data, bytes) else SentStream(data)
        size = source.size if isinstance(source, SentStream) else len(source)

        def attempt() -> None:
            if isinstance(source, SentStream):
                source.rewind()
            try:
                self._backend.write(key, source, size)
            except AbsentError:
                # An upload in parts that the store has forgotten, or a folder that somebody removed.
                raise TransientError("went away while it was written") from None

        self._calls.run(key, attempt)
        if isinstance(source, SentStream):
            self._calls.run(key, lambda: self._check_written(key, size))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken: whether what is there is ours.

        Ours is what has our bytes, so they are to hold something that nobody else writes. After a refusal, an error or
        an answer that was lost the object is read back. UnsupportedError where the backend has no exclusive create.
        """
        return self._calls.run(key, self._creation(key, data).attempt)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken: whether this call made it, as the backend says.

        It is not read back: where an answer was lost, False may be said of what this very call has made.
        """
        creation = self._creation(key, data)

        def attempt() -> bool:
            try:
                return creation.create()
            except AbsentError:
                raise TransientError("went away while it was written") from None

        return self._calls.run(key, attempt)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        self._calls.run_or_none(key, lambda: self._backend.remove(key), False)

    def prove_exclusive(self, key: str) -> None:
        """Create an object that is there a second time, with its own bytes; UnsupportedError if that is not refused.

        The key is that of an object of at most 1 MiB. Without effect for a single writer.
        """
        if self._is_single_writer:
            return
        data = self.get(key, most_bytes=MOST_CREATED_BYTES)
        if data is None:
            raise NotFoundError(self._calls.name(key), "is not there, so that creating it twice cannot be tried")
        if self._calls.run(key, self._creation(key, data).create):
            raise UnsupportedError(
                self.shown,
                f"an object that was there ({key}) could be created again, so that two publishers could overwrite each "
                "other",
                hint=f"{ONE_WRITER_HINT}; a bucket with versions may ignore the condition where one without does not",
            )

    # Of the keys: this name hides the built-in type in what follows it here.
    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Return all objects whose keys start with `prefix`, which is empty or ends in a slash, by key.

        What is there may be missing from a listing for a while, and what is gone be in it.
        """
        if prefix:
            safe_path(prefix.removesuffix("/"), self.shown)

        def attempt() -> tuple[Entry, ...]:
            # Markers of folders, and what else has a name that no object of ours can have.
            found = [entry for entry in self._backend.entries(prefix) if path_fault(entry.key) is None]
            return tuple(sorted(found, key=lambda entry: entry.key))

        return self._calls.guarded(prefix or "/", attempt)

    # What killed writers left

    def leftovers(self, prefix: str = "") -> tuple[Entry, ...]:
        """Return what writers began below `prefix`, as for `list`, and may still be writing: judge it by its age.

        Object stores show none; what is left of uploads in parts there is a bucket's own rules' to remove.
        """
        if prefix:
            safe_path(prefix.removesuffix("/"), self.shown)

        def attempt() -> tuple[Entry, ...]:
            return tuple(sorted(self._backend.leftovers(prefix), key=lambda entry: entry.key))

        return self._calls.guarded(prefix or "/", attempt)

    def delete_leftover(self, key: str) -> None:
        """Remove what `leftovers` named, if it is there; ValueError for any other name."""
        if not is_leftover(key):
            raise ValueError("that is no name of a leftover")

        def attempt() -> None:
            try:
                self._backend.remove(key)
            except AbsentError:
                return

        self._calls.guarded(key, attempt)

    def _turn_to(self, key: str) -> bool:
        """Have one be asked from now on that has an object which is not there; an error that may pass if one that may
        have it does not answer."""
        is_there = self._calls.run_once(key, lambda: self._backend.turn_to(key))
        self.turns += is_there
        return is_there

    # One attempt's parts

    def _check_size(
        self, key: str, total: int | None, size: int | None, most_bytes: int | None = None, *, read_bytes: int = 0
    ) -> None:
        has = read_bytes if total is None else total
        if most_bytes is not None and has > most_bytes:
            raise DamagedError(self._calls.name(key), f"has {has} bytes or more, at most {most_bytes} expected")
        if size is not None and total is not None and total != size:
            raise DamagedError(self._calls.name(key), f"has {total} bytes, {size} expected")

    def _check_end(self, key: str, total: int | None, end: int) -> None:
        if total is not None and total < end:
            raise DamagedError(self._calls.name(key), f"has {total} bytes, at least {end} expected")

    def _creation(self, key: str, data: bytes) -> Creation:
        if len(data) > MOST_CREATED_BYTES:
            raise ValueError(f"{len(data)} bytes cannot be created in one request")
        return Creation(self._backend, key, data, shown=self.shown, is_single_writer=self._is_single_writer)

    def _check_written(self, key: str, size: int) -> None:
        try:
            status = self._backend.status(key)
        except DeniedError:
            # Who may only write is not shown what came of it.
            return
        if status is None or status.size != size:
            has = "nothing" if status is None else f"{status.size} bytes"
            raise TransientError(f"holds {has} after {size} bytes were written")


def _is_of_another(first: Answer, second: Answer) -> bool:
    """Whether two answers say that they are of different objects, by size or by what their content is known by."""
    pairs = ((first.total, second.total), (first.tag, second.tag))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)
