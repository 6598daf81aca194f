"""The store: the narrow contract that everything above reads and writes a remote through.

It is one for all kinds of backends: what it asks of them is tried again while that may help, what comes is measured
against what was announced and expected, and what goes wrong becomes an error that names the object and no secret.
It knows nothing of what the objects mean, caches nothing, and lists only when it is asked to. A store is used by any
number of threads, not by a process made by fork after it was opened.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

from dcr_cli.checkpoint.names import safe_path
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, TransportError, UnsupportedError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    Backend,
    DeniedError,
    Entry,
    FaultError,
    MissingRootError,
    OutsideError,
    PermanentError,
    Status,
    TransientError,
)
from dcr_cli.store.retry import Attempts, OutOfPatienceError, Patience, retrying

T = TypeVar("T")

# Of a body that does not start where it was asked to, how much is read and thrown away.
MOST_SKIPPED_BYTES = 64 << 20
# What is created exclusively goes out in one request, which all backends take up to this size.
MOST_CREATED_BYTES = 1 << 20
_ONE_WRITER_HINT = "if nothing else ever writes there, say --single-writer"


class RefusedError(TransportError):
    """A remote answered, and trying again will not change the answer."""

    retryable = False


class Store:
    """The objects below one root; a context manager.

    Every method may raise TransportError when the remote does not answer or refuses, and LocalError when it is a local
    folder. A key is a safe relative path, else DamagedError. `is_single_writer` says that nothing else writes there:
    then an exclusive create may be a look and a write.
    """

    def __init__(
        self, backend: Backend, shown: str, *, patience: Patience | None = None, is_single_writer: bool = False
    ) -> None:
        self.shown = shown
        self._backend = backend
        self._patience = patience or Patience()
        self._is_single_writer = is_single_writer

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

    # Reading

    def get(
        self, key: str, *, most_bytes: int, size: int | None = None, is_denied_absent: bool = False
    ) -> bytes | None:
        """Return a whole object; None if it is proven absent, or access is denied and that is said to mean absent.

        One of more than `most_bytes`, or of another size than `size`, is DamagedError.
        """

        def attempt() -> bytes:
            with self._backend.read(key, 0, None) as answer:
                self._check_size(key, answer.total, size, most_bytes)
                data = bytearray()
                for chunk in self._body(answer, 0, size if answer.total is None else answer.total):
                    data += chunk
                    self._check_size(key, None, None, most_bytes, read_bytes=len(data))
            self._check_size(key, len(data), size, most_bytes)
            return bytes(data)

        return self._or_none(key, attempt, is_denied_absent)

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on; an object that ends before that is DamagedError, none NotFoundError."""

        def attempt() -> bytes:
            with self._backend.read(key, begin, size) as answer:
                self._check_end(key, answer.total, begin + size)
                data = bytearray()
                for chunk in self._body(answer, begin, begin + size):
                    data += chunk
            return bytes(data)

        return self._run(key, attempt) if size else b""

    def stream(self, key: str, *, begin: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Yield what an object holds from `begin` on, in parts of a few MiB at most.

        A body that breaks off is gone on with from there. `size` is that of the whole object; another one is
        DamagedError, an object that is replaced meanwhile ConflictError, none NotFoundError. The bytes are to be
        checked against a digest: no backend promises that two requests are answered from one object.
        """
        safe_path(key, self.shown)
        attempts = Attempts(self._patience)
        seen: tuple[int | None, str | None] | None = None
        at = begin
        while True:
            fault: FaultError | None = None
            try:
                with self._backend.read(key, at, None) as answer:
                    self._check_size(key, answer.total, size)
                    if seen not in (None, (answer.total, answer.tag)):
                        raise ConflictError(self._name(key), "was replaced while it was read")
                    seen = (answer.total, answer.tag)
                    for chunk in self._body(answer, at, size if answer.total is None else answer.total):
                        at += len(chunk)
                        attempts.progressed()
                        yield chunk
            except TransientError as error:
                fault = attempts.failed(error)
                if fault is None:
                    continue
            except FaultError as error:
                fault = error
            if isinstance(fault, OutsideError) and at == size:
                # Where nothing is left, a range has nothing to begin with.
                return
            if fault is not None:
                raise self._error(key, fault)
            self._check_size(key, at, size)
            return

    def stat(self, key: str, *, is_denied_absent: bool = False) -> Status | None:
        """Return size and time of an object; None as for `get`."""

        def attempt() -> Status:
            status = self._backend.status(key)
            if status is None:
                raise AbsentError
            return status

        return self._or_none(key, attempt, is_denied_absent)

    # Writing

    def put(self, key: str, data: bytes | BinaryIO) -> None:
        """Write an object over whatever has the key; seen whole or not at all.

        A stream is one that can be sought in; it is written from where it stands to its end, in parts, and again from
        there where that has to be tried again. The size of what it became is read back.
        """
        begin, size = (0, len(data)) if isinstance(data, bytes) else _extent(data)

        def attempt() -> None:
            if not isinstance(data, bytes):
                data.seek(begin)
            self._backend.write(key, data, size)

        self._run(key, attempt)
        if not isinstance(data, bytes):
            self._run(key, lambda: self._check_written(key, size))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken: whether what is there is ours.

        Ours is what has our bytes, so they are to hold something that nobody else writes. After a refusal, an error or
        an answer that was lost the object is read back. UnsupportedError where the backend has no exclusive create.
        """
        if len(data) > MOST_CREATED_BYTES:
            raise ValueError(f"{len(data)} bytes cannot be created in one request")
        is_tried = False

        def attempt() -> bool:
            nonlocal is_tried
            if is_tried and (is_ours := self._is_there(key, data)) is not None:
                return is_ours
            is_tried = True
            try:
                if self._create(key, data):
                    return True
            except PermanentError:
                # An answer that cannot be understood says nothing of what was done.
                if not self._is_there(key, data):
                    raise
                return True
            is_ours = self._is_there(key, data)
            if is_ours is None:
                raise TransientError("is said to be taken, but is not there")
            return is_ours

        return self._run(key, attempt)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        self._or_none(key, lambda: self._backend.remove(key), False)

    def prove_exclusive(self, key: str) -> None:
        """Create an object that is there a second time, with its own bytes; UnsupportedError if that is not refused.

        The key is that of an object of at most 1 MiB. Without effect for a single writer.
        """
        if self._is_single_writer:
            return
        data = self.get(key, most_bytes=MOST_CREATED_BYTES)
        if data is None:
            raise NotFoundError(self._name(key), "is not there, so that creating it twice cannot be tried")
        if self._run(key, lambda: self._create(key, data)):
            raise UnsupportedError(
                self.shown,
                f"an object that was there ({key}) could be created again, so that two publishers could overwrite each "
                "other",
                hint=f"{_ONE_WRITER_HINT}; a bucket with versions may ignore the condition where one without does not",
            )

    # Of the keys: this name hides the built-in type in what follows it here.
    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """Return all objects whose keys start with `prefix`, which is empty or ends in a slash, by key.

        What is there may be missing from a listing for a while, and what is gone be in it.
        """
        if prefix:
            safe_path(prefix.removesuffix("/"), self.shown)

        def attempt() -> tuple[Entry, ...]:
            return tuple(sorted(self._backend.entries(prefix), key=lambda entry: entry.key))

        return self._guarded(prefix or "/", attempt)

    # One attempt's parts

    def _body(self, answer: Answer, begin: int, end: int | None) -> Iterator[bytes]:
        """The bytes from `begin` to `end` of the object, or to the end of the body where nobody knows it."""
        skip = begin - answer.begin
        if skip < 0:
            raise PermanentError(f"bytes from {begin} on were asked for, the answer starts at {answer.begin}")
        if skip > MOST_SKIPPED_BYTES:
            raise PermanentError(f"the remote ignores ranges, and {begin} bytes are too many to read for nothing")
        if end is None and answer.announced is None:
            raise PermanentError("the answer does not say how long it is")
        at, body_bytes = answer.begin, 0
        for chunk in answer.chunks:
            body_bytes += len(chunk)
            first = min(max(begin - at, 0), len(chunk))
            last = len(chunk) if end is None else min(max(end - at, 0), len(chunk))
            at += len(chunk)
            if first < last:
                yield chunk[first:last]
            if end is not None and at >= end:
                return
        announced = answer.announced if end is None else end - answer.begin
        if announced is not None and body_bytes < announced:
            raise TransientError(f"the answer ended after {body_bytes} of {announced} bytes")

    def _check_size(
        self, key: str, total: int | None, size: int | None, most_bytes: int | None = None, *, read_bytes: int = 0
    ) -> None:
        has = read_bytes if total is None else total
        if most_bytes is not None and has > most_bytes:
            raise DamagedError(self._name(key), f"has {has} bytes or more, at most {most_bytes} expected")
        if size is not None and total is not None and total != size:
            raise DamagedError(self._name(key), f"has {total} bytes, {size} expected")

    def _check_end(self, key: str, total: int | None, end: int) -> None:
        if total is not None and total < end:
            raise DamagedError(self._name(key), f"has {total} bytes, at least {end} expected")

    def _check_written(self, key: str, size: int) -> None:
        try:
            status = self._backend.status(key)
        except DeniedError:
            # Who may only write is not shown what came of it.
            return
        if status is None or status.size != size:
            has = "nothing" if status is None else f"{status.size} bytes"
            raise TransientError(f"holds {has} after {size} bytes were written")

    def _create(self, key: str, data: bytes) -> bool:
        if self._backend.can_create:
            return self._backend.create(key, data)
        if not self._is_single_writer:
            raise UnsupportedError(
                self.shown, "has no way to create an object only if it is not there", hint=_ONE_WRITER_HINT
            )
        if self._backend.status(key) is not None:
            return False
        self._backend.write(key, data, len(data))
        return True

    def _is_there(self, key: str, data: bytes) -> bool | None:
        """Whether what has the key has these bytes; None if nothing has it."""
        found = bytearray()
        try:
            with self._backend.read(key, 0, None) as answer:
                if answer.total is not None and answer.total != len(data):
                    return False
                for chunk in self._body(answer, 0, len(data)):
                    found += chunk
        except AbsentError:
            return None
        return found == data

    # From faults to errors

    def _run(self, key: str, attempt: Callable[[], T]) -> T:
        safe_path(key, self.shown)
        return self._guarded(key, attempt)

    def _guarded(self, key: str, attempt: Callable[[], T]) -> T:
        try:
            return retrying(attempt, self._patience)
        except FaultError as error:
            fault = error
        # Outside the handler, so that no text of a library comes along as this error's context.
        raise self._error(key, fault)

    def _or_none(self, key: str, attempt: Callable[[], T], is_denied_absent: bool) -> T | None:
        safe_path(key, self.shown)

        def absent_is_none() -> T | None:
            try:
                return attempt()
            except AbsentError:
                return None
            except DeniedError:
                if not is_denied_absent:
                    raise
                return None

        return self._guarded(key, absent_is_none)

    def _error(self, key: str, fault: FaultError) -> NotFoundError | DamagedError | TransportError:
        name = self._name(key)
        if isinstance(fault, AbsentError):
            return NotFoundError(name, fault.reason)
        if isinstance(fault, MissingRootError):
            return NotFoundError(self.shown, fault.reason)
        if isinstance(fault, OutsideError):
            return DamagedError(name, fault.reason)
        if isinstance(fault, DeniedError):
            hint = fault.hint or "check the credentials and what they may do; without the right to list, some remotes "
            hint += "" if fault.hint else "say so of what is not there"
            return RefusedError(name, f"access is denied: {fault.reason}", hint=hint)
        if isinstance(fault, OutOfPatienceError):
            return TransportError(name, fault.reason, hint=fault.hint or "run the same command again later")
        return RefusedError(name, fault.reason, hint=fault.hint)

    def _name(self, key: str) -> str:
        return f"{self.shown.rstrip('/')}/{key.lstrip('/')}"


def _extent(stream: BinaryIO) -> tuple[int, int]:
    begin = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    stream.seek(begin, os.SEEK_SET)
    return begin, end - begin
