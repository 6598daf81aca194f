"""Publishers that push again and again, each in a process or a thread of its own, told what by this one.

    with Publisher.in_process(remote, options) as publisher:
        publisher.begin(checkpoint, baseline=folder)
        outcome = publisher.end()

Starting a process for each push would leave races to chance. Those that are told to meet wait for each other before
they create their commits, so that all of them have the same version before.
"""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

from dcr_cli.errors import DcrError
from dcr_cli.push import push
from dcr_cli.remote.keys import COMMITS
from dcr_cli.store.backend import Backend
from store_wrappers import Wrapped, wrapping

SPAWNING = multiprocessing.get_context("spawn")
_MEET_SECONDS = 300.0
_turn = threading.local()


class Meeting(Protocol):
    """A barrier of threads, or one of processes."""

    def wait(self, timeout: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a push came to: an exit code, 70 for what is no error of dcr, and what the result or the error says."""

    code: int
    version: int | None = None
    id: str | None = None
    kind: str = ""
    said: str = ""

    @property
    def is_published(self) -> bool:
        return self.code == 0 and self.kind != "same"


class Meets(Wrapped):
    """A push that is to meet others waits for them before it creates its commit."""

    def __init__(self, backend: Backend, meeting: Meeting) -> None:
        super().__init__(backend)
        self.meeting = meeting

    def called(self, name: str, key: str) -> None:
        if name == "create" and key.startswith(COMMITS) and getattr(_turn, "is_meeting", False):
            _turn.is_meeting = False
            self.meeting.wait(_MEET_SECONDS)


class Worker(Protocol):
    """What pushes: a process or a thread."""

    def start(self) -> None: ...
    def join(self) -> None: ...


@dataclass(slots=True)
class Publisher:
    """One of them; a context manager."""

    worker: Worker
    connection: Connection

    @classmethod
    def in_process(cls, remote: str, options: dict[str, object], meeting: Meeting | None = None) -> Publisher:
        ours, theirs = SPAWNING.Pipe()
        publisher = cls(SPAWNING.Process(target=_run, args=(theirs, remote, options, meeting), daemon=True), ours)
        publisher.worker.start()
        theirs.close()
        return publisher

    @classmethod
    def in_thread(cls, remote: str) -> Publisher:
        """Whoever starts it wraps the stores in Meets, if it is to meet others."""
        ours, theirs = SPAWNING.Pipe()
        publisher = cls(threading.Thread(target=_serve, args=(theirs, remote, {}), daemon=True), ours)
        publisher.worker.start()
        return publisher

    def begin(self, checkpoint: Path, *, is_meeting: bool = False, **options: Any) -> None:
        self.connection.send((str(checkpoint), options, is_meeting))

    def end(self) -> Outcome:
        """What has become of the push; EOFError if its process is gone."""
        outcome: Outcome = self.connection.recv()
        return outcome

    def has_ended(self, seconds: float) -> bool:
        """Whether the push ends within so many seconds."""
        return self.connection.poll(seconds)

    def kill(self) -> None:
        """Let SIGKILL end its process."""
        assert isinstance(self.worker, SPAWNING.Process)
        self.worker.kill()
        self.worker.join()
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.connection.close()
        self.worker.join()


def _run(connection: Connection, remote: str, options: dict[str, object], meeting: Meeting | None) -> None:
    if meeting is None:
        _serve(connection, remote, options)
        return
    with wrapping(lambda backend: Meets(backend, meeting)):
        _serve(connection, remote, options)


def _serve(connection: Connection, remote: str, storage_options: dict[str, object]) -> None:
    """Push what is asked for, until nobody asks any more."""
    with connection:
        while True:
            try:
                checkpoint, options, _turn.is_meeting = connection.recv()
            except (EOFError, OSError):
                return
            connection.send(_push(checkpoint, remote, {**options, "storage_options": storage_options}))


def _push(checkpoint: str, remote: str, options: dict[str, Any]) -> Outcome:
    try:
        result = push(checkpoint, remote, **options)
    except DcrError as error:
        return Outcome(error.exit_code, said=str(error))
    except Exception:
        return Outcome(70, said=traceback.format_exc())
    return Outcome(0, result.version, result.id, result.kind)
