"""fsspec's `memory://`: objects that live as long as this process, for tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from fsspec.implementations.memory import MemoryFileSystem

from dcr_cli.store.backend import AbsentError, Answer, Entry, OutsideError, Readable, Status, parts

# One for all: fsspec's objects are the process's, and its files know nothing of threads.
_lock = threading.Lock()


class MemoryBackend:
    """The objects below a path of the process's memory."""

    can_create = True

    def __init__(self, root: str) -> None:
        self._files = MemoryFileSystem()
        self._root = f"/{root.strip('/')}".rstrip("/")

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        with _lock:
            file = self._files.store.get(self._path(key))
            if file is None:
                raise AbsentError
            data = bytes(file.getbuffer())
        if begin > len(data):
            raise OutsideError(f"has {len(data)} bytes, at least {begin} expected")
        body = data[begin:] if size is None else data[begin : begin + size]
        return Answer(begin, len(body), len(data), parts(body), str(id(file)))

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        whole = b"".join(parts(data))
        with _lock:
            self._files.pipe_file(self._path(key), whole)

    def create(self, key: str, data: bytes) -> bool:
        with _lock:
            if self._path(key) in self._files.store:
                return False
            self._files.pipe_file(self._path(key), data)
            return True

    def status(self, key: str) -> Status | None:
        with _lock:
            file = self._files.store.get(self._path(key))
            return None if file is None else Status(file.size, file.modified.timestamp())

    def entries(self, prefix: str) -> Iterator[Entry]:
        start = self._path(prefix)
        with _lock:
            found = [(path, file.size, file.modified) for path, file in self._files.store.items()]
        for path, size, modified in found:
            if path.startswith(start):
                yield Entry(path[len(self._root) + 1 :], size, modified.timestamp())

    def remove(self, key: str) -> None:
        with _lock:
            self._files.store.pop(self._path(key), None)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"
