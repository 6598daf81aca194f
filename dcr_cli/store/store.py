"""The store: the narrow contract that everything above reads and writes a remote through.

It is one for all kinds of backends: what it asks of them is tried again while that may help, what comes is measured
against what was announced and expected, and what goes wrong becomes an error that names the object and no secret.
It knows nothing of what the objects mean, caches nothing, and lists only when it is asked to. A store is used by any
number of threads, not by a process made by fork after it was opened.
"""

from __future__ import annotations

from typing import BinaryIO

from dcr_cli.checkpoint.names import path_fault, safe_path
from dcr_cli.errors import NotFoundError, UnsupportedError
from dcr_cli.store.backend import (
    AbsentError,
    DeniedError,
    Entry,
    TransientError,
    is_leftover,
)
from dcr_cli.store.creation import ONE_WRITER_HINT, Creation
from dcr_cli.store.reading import Reading
from dcr_cli.store.source import SentStream

# What is created exclusively goes out in one request, which all backends take up to this size.
MOST_CREATED_BYTES = 1 << 20


class Store(Reading):
    """The objects below one root; a context manager.

    Every method may raise TransportError when the remote does not answer or refuses, and LocalError when it is a local
    folder. A key is a safe relative path, else DamagedError. `is_single_writer` says that nothing else writes there:
    then an exclusive create may be a look and a write. `folder` is the root, where that is a local one.

    Where several backends lead to the remote, one may be behind the others: what `is_seen`, by whoever asks or by what
    it has read, is absent only if none has it, and what comes next is asked of one that has it.
    """

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

    # One attempt's parts

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
