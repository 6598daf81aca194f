"""Backends that go wrong in one way each, by name, around any backend: in this process, or in one of the command.

In this process, around one backend or around every one that is opened meanwhile:

    Store(FailsCall(LocalBackend(folder), 3), "test://remote")
    with wrapping(lambda backend: KillsAtCall(backend, 7)):
        push(checkpoint, remote)                            # whatever calls `open_store`

In a process of its own, written as what is to be put in the place of BACKEND, a Python expression; it may nest them:

    run_dcr("KillsAtCall(BACKEND, 7, when='after', signal=9)", "push", checkpoint, remote)

which runs the command `dcr` with that around every backend, and returns what it came to: `returncode` -9 if it was
killed. `run_python` does the same with a program instead of arguments. To kill at every call, count up from 0 until
`returncode` is not -9. `when` says whether a call is killed before it is passed on, "within" (when the last part of a
body is to go up, or the second to come down; else as before), or "after" it was done but nobody was told.

A call is one of the backend's methods but `close`, in the order in which they are made; threads share the count.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO
from unittest import mock

from dcr_cli.store import opening
from dcr_cli.store.backend import Answer, Backend, DeniedError, Entry, FaultError, Readable, Status, TransientError
from faults import StoppedError

_DCR = "import sys\nfrom dcr_cli.__main__ import main\nsys.exit(main())"


class Wrapped:
    """A backend that does what another does. `called` hears of each call before it is passed on, `done` after it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def called(self, name: str, key: str) -> None:
        """For what goes wrong with calls of any kind."""

    def done(self, name: str, key: str) -> None:
        """As `called`."""

    @property
    def can_create(self) -> bool:
        return self.backend.can_create

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        self.called("read", key)
        answer = self.backend.read(key, begin, size)
        self.done("read", key)
        return answer

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        self.called("write", key)
        self.backend.write(key, data, size)
        self.done("write", key)

    def create(self, key: str, data: bytes) -> bool:
        self.called("create", key)
        is_ours = self.backend.create(key, data)
        self.done("create", key)
        return is_ours

    def status(self, key: str) -> Status | None:
        self.called("status", key)
        status = self.backend.status(key)
        self.done("status", key)
        return status

    def entries(self, prefix: str) -> Iterator[Entry]:
        self.called("entries", prefix)
        yield from self.backend.entries(prefix)
        self.done("entries", prefix)

    def remove(self, key: str) -> None:
        self.called("remove", key)
        self.backend.remove(key)
        self.done("remove", key)

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        self.called("leftovers", prefix)
        yield from self.backend.leftovers(prefix)
        self.done("leftovers", prefix)

    def close(self) -> None:
        self.backend.close()


class Records(Wrapped):
    """Keeps the calls, as (method, key)."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.calls: list[tuple[str, str]] = []

    def called(self, name: str, key: str) -> None:
        self.calls.append((name, key))


class Allows(Wrapped):
    """Denies what it is not told to allow: patterns of keys for each right, where * is any text.

    As on S3, who may get may ask for the status, who may put may create, and who may not list what is at a key is
    denied what is not there. A pattern of `list` is one of prefixes, or of keys in what may be listed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        get: Sequence[str] = (),
        put: Sequence[str] = (),
        create: Sequence[str] | None = None,
        list: Sequence[str] = (),  # noqa: A002
        delete: Sequence[str] = (),
        stat: Sequence[str] | None = None,
    ) -> None:
        super().__init__(backend)
        self.rights = {
            "read": get,
            "write": put,
            "create": put if create is None else create,
            "entries": list,
            "remove": delete,
            "leftovers": list,
            "status": get if stat is None else stat,
        }

    def called(self, name: str, key: str) -> None:
        is_allowed = self._may(name, key)
        if is_allowed and name in ("read", "status") and not self._may("entries", key):
            is_allowed = self.backend.status(key) is not None
        if not is_allowed:
            raise DeniedError("status 403")

    def _may(self, name: str, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.rights[name])


class FailsCalls(Wrapped):
    """The first `count` calls of each kind come to nothing."""

    def __init__(self, backend: Backend, count: int, after_seconds: float = 0.0) -> None:
        super().__init__(backend)
        self.counts: dict[str, int] = {}
        self.count = count
        self.after_seconds = after_seconds

    def called(self, name: str, key: str) -> None:
        if name not in ("entries", "leftovers"):
            self._call(name)

    def done(self, name: str, key: str) -> None:
        if name in ("entries", "leftovers"):
            self._call(name)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        if not isinstance(data, bytes) and self.counts.get("write", 0) < self.count:
            data.read(3)
        super().write(key, data, size)

    def _call(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.counts[name] <= self.count:
            raise TransientError("answers with status 503", after_seconds=self.after_seconds)


class FailsByChance(Wrapped):
    """One call of so many comes to nothing."""

    def __init__(self, backend: Backend, among: int, seed: int = 0) -> None:
        super().__init__(backend)
        self.among = among
        self.dice = random.Random(seed)

    def called(self, name: str, key: str) -> None:
        if not self.dice.randrange(self.among):
            raise TransientError("answers with status 503")


class _Counts(Wrapped):
    def __init__(self, backend: Backend, number: int) -> None:
        super().__init__(backend)
        self.number = number
        self.count = 0
        self.lock = threading.Lock()

    def next_call(self) -> int:
        """How many calls there were before this one."""
        with self.lock:
            self.count += 1
            return self.count - 1


class FailsCall(_Counts):
    """Call `number`, from 0, comes to a fault, by default one that may pass, and only that one."""

    def __init__(self, backend: Backend, number: int, fault: FaultError | None = None) -> None:
        super().__init__(backend, number)
        self.fault = fault or TransientError("answers with status 503")

    def called(self, name: str, key: str) -> None:
        if self.next_call() == self.number:
            raise self.fault


class KillsAtCall(_Counts):
    """Call `number`, from 0, is the end: of this process by `signal`, or by StoppedError for it and all that follow."""

    def __init__(self, backend: Backend, number: int, *, when: str = "before", signal: int = 0) -> None:
        super().__init__(backend, number)
        self.when = when
        self.signal = signal
        self.is_over = False
        self.is_next = threading.local()

    def called(self, name: str, key: str) -> None:
        if self.is_over:
            raise StoppedError
        self.is_next.value = self.next_call() == self.number
        is_body = name in ("read", "write")
        if self.is_next.value and (self.when == "before" or (self.when == "within" and not is_body)):
            self._end()

    def done(self, name: str, key: str) -> None:
        if self.is_next.value and self.when == "after":
            self._end()

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if self.is_next.value and self.when == "within":
            return replace(answer, chunks=self._ending(answer.chunks))
        return answer

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        self.called("write", key)
        is_cut = self.is_next.value and self.when == "within"
        self.backend.write(key, _Ending(data, size, self._end) if is_cut else data, size)
        self.done("write", key)

    def _ending(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(chunks, b"")[:1]
        self._end()

    def _end(self) -> None:
        self.is_over = True
        if self.signal:
            os.kill(os.getpid(), self.signal)
        raise StoppedError


class _Ending:
    """A body on its way up, but for its last part."""

    def __init__(self, data: bytes | Readable, size: int, end: Callable[[], None]) -> None:
        self.data = io.BytesIO(data) if isinstance(data, bytes) else data
        self.left_bytes = size
        self.end = end

    def read(self, size: int, /) -> bytes:
        self.left_bytes -= size
        if self.left_bytes <= 0:
            self.end()
        return self.data.read(size)


class LosesTheAnswer(Wrapped):
    """The first write or create takes effect, but nobody is told; `then` happens before the next call."""

    def __init__(self, backend: Backend, then: Callable[[], object] = lambda: None) -> None:
        super().__init__(backend)
        self.is_lost = False
        self.then = then

    def done(self, name: str, key: str) -> None:
        if name in ("write", "create") and not self.is_lost:
            self.is_lost = True
            self.then()
            raise TransientError("did not answer in 30 s")


class Truncates(Wrapped):
    """The first `count` bodies end after `size` bytes, whatever was announced."""

    def __init__(self, backend: Backend, count: int, size: int) -> None:
        super().__init__(backend)
        self.count = count
        self.size = size

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if self.count == 0:
            return answer
        self.count -= 1
        data = b"".join(answer.chunks)[: self.size]
        return replace(answer, chunks=iter((data,)))


class FlipsAByte(Wrapped):
    """In objects whose keys match a pattern, the byte at an offset is another one, of the last if there are fewer."""

    def __init__(self, backend: Backend, pattern: str, offset: int) -> None:
        super().__init__(backend)
        self.pattern = pattern
        self.offset = offset

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if not fnmatchcase(key, self.pattern):
            return answer
        offset = self.offset if answer.total is None else min(self.offset, answer.total - 1)
        return replace(answer, chunks=self._flipped(answer.chunks, answer.begin, offset))

    @staticmethod
    def _flipped(chunks: Iterator[bytes], at: int, offset: int) -> Iterator[bytes]:
        for chunk in chunks:
            if at <= offset < at + len(chunk):
                changed = bytearray(chunk)
                changed[offset - at] ^= 0x20
                yield bytes(changed)
            else:
                yield chunk
            at += len(chunk)


class Slow(Wrapped):
    """Each call takes some seconds longer."""

    def __init__(self, backend: Backend, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(backend)
        self.seconds = seconds
        self.sleep = sleep

    def called(self, name: str, key: str) -> None:
        self.sleep(self.seconds)


class IgnoresRanges(Wrapped):
    def read(self, key: str, begin: int, size: int | None) -> Answer:
        return super().read(key, 0, None)


class IgnoresTheCondition(Wrapped):
    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data, len(data))
        return True


class ListsLate(Wrapped):
    """Nothing that was written through it is listed, until `catch_up`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.late: set[str] = set()

    def called(self, name: str, key: str) -> None:
        if name in ("write", "create"):
            self.late.add(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return (entry for entry in super().entries(prefix) if entry.key not in self.late)

    def catch_up(self) -> None:
        self.late.clear()


class DeniesTheAbsent(Allows):
    """As an object store whose user may do anything but list."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, get=["*"], put=["*"], delete=["*"])


@contextmanager
def wrapping(wrap: Callable[[Backend], Backend]) -> Iterator[None]:
    """Meanwhile every store that is opened in this process has its backend wrapped."""
    plain = opening._import_and_open
    with mock.patch.object(opening, "_import_and_open", lambda *asked: wrap(plain(*asked))):
        yield


@contextmanager
def recording() -> Iterator[list[tuple[str, str]]]:
    """Meanwhile all calls of all stores that are opened are kept, in one list."""
    calls: list[tuple[str, str]] = []

    def record(backend: Backend) -> Records:
        wrapped = Records(backend)
        wrapped.calls = calls
        return wrapped

    with wrapping(record):
        yield calls


@contextmanager
def interrupting(number: int, what: Callable[[], object]) -> Iterator[None]:
    """Meanwhile `what` happens once, before call `number`, from 0; its own calls do not count."""
    left = number

    class Interrupted(Wrapped):
        def called(self, name: str, key: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                what()

    with wrapping(Interrupted):
        yield


def run_dcr(wrapper: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `dcr` with a wrapper, such as "FailsCall(BACKEND, 3)", around every backend."""
    return run_python(wrapper, _DCR, *arguments)


def run_python(wrapper: str, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program, which may open stores, with a wrapper around every backend; `arguments` are its sys.argv[1:]."""
    command, environment = _program(wrapper, program, arguments)
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def start_dcr(wrapper: str, *arguments: str | Path, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """As `run_dcr`, but without waiting for its end."""
    command, environment = _program(wrapper, _DCR, arguments)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)


def _program(wrapper: str, program: str, arguments: Sequence[str | Path]) -> tuple[list[str], dict[str, str]]:
    """A command, and its environment, that runs a program with a wrapper around every backend."""
    prologue = f"from store_wrappers import *\nwith wrapping(lambda BACKEND: {wrapper}):\n"
    indented = "".join(f"    {line}\n" for line in program.splitlines())
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", prologue + indented, *map(str, arguments)]
    return command, {**os.environ, "PYTHONPATH": path}
