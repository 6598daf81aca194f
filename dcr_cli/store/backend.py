"""The contract between the store and one kind of backend, and the faults that backends tell of.

A backend does one thing at a time, once: it neither retries nor checks what came. What its library raises it
translates into these faults, or into a DcrError where no retry and no other reading could help. A fault's reason is
written by us, from status codes, error codes and messages of plain words: other texts of libraries and servers hold
addresses, queries and headers, and with them secrets.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from dcr_cli.checkpoint.names import path_fault

# How much of a body is handed on at a time, at most.
CHUNK_BYTES = 1 << 20
_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.new")


class FaultError(Exception):
    """What one attempt of a backend came to, other than an answer."""

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        self.reason = reason
        self.hint = hint
        super().__init__(reason)


class AbsentError(FaultError):
    """The backend says that the object is not there."""

    def __init__(self) -> None:
        super().__init__("is not there")


class DeniedError(FaultError):
    """The backend says that this may not be done; some say so of objects that are not there."""


class TransientError(FaultError):
    """It may work when it is tried again. What was asked for may have been done all the same.

    `after_seconds` is how long the backend asks to be left alone.
    """

    def __init__(self, reason: str, *, after_seconds: float = 0.0) -> None:
        self.after_seconds = after_seconds
        super().__init__(reason)


class PermanentError(FaultError):
    """Trying again does not help."""


class OutsideError(FaultError):
    """The object ends before the range that was asked for begins, or within it."""


class MissingRootError(FaultError):
    """What the objects lie in, a bucket, is not there; that says nothing of an object."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of an object. `modified` is the backend's own time of it, in seconds since 1970, if it tells."""

    size: int
    modified: float | None


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing."""

    key: str
    size: int
    modified: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a read, a context manager that lets go of its connection.

    The body starts at `begin` of the object, which need not be where it was asked to. `announced` is the size of the
    body, `total` the size of the object, `tag` what the object's content is known by, each as the backend says, None
    where it does not.
    """

    begin: int
    announced: int | None
    total: int | None
    chunks: Iterator[bytes]
    tag: str | None = None
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Readable(Protocol):
    """What a body is read from."""

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes; fewer at the end, none after it."""


class Backend(Protocol):
    """One kind of store. Keys are safe relative paths; several threads may use it at once."""

    @property
    def can_create(self) -> bool:
        """Whether `create` is one step that fails if the key is taken."""

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        """Read `size` bytes from `begin` on, or all from there on."""

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        """Write an object of `size` bytes over whatever has the key; nobody sees a part of it under the key."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken; False if it is."""

    def status(self, key: str) -> Status | None:
        """What is known of an object; None if it is not there."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """All objects whose keys start with `prefix`, which is empty or ends in a slash, in any order."""

    def remove(self, key: str) -> None:
        """Remove an object, or what `leftovers` named; what is not there may be AbsentError."""

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        """What writers that were killed left below `prefix`, as `new_name` called it; `entries` leaves it out."""

    def close(self) -> None:
        """Let go of connections."""


@runtime_checkable
class Waiter(Protocol):
    """What a backend is too that may be able to wait for news."""

    def wait(self, key: str, seconds: int) -> bool:
        """Return once an object is there, or there is other news, or after `seconds`: whether that was waited for."""


@runtime_checkable
class Chooser(Protocol):
    """What a backend is too that has several to choose from."""

    def turn_to(self, key: str) -> bool:
        """Be served from now on by one that has an object which somebody has seen: whether any has it."""


def new_name(key: str) -> str:
    """A name, beside that of `key`, for what is being written; no key is such a name."""
    above, slash, _ = key.rpartition("/")
    return f"{above}{slash}.{secrets.token_hex(8)}.new"


def is_leftover(key: str) -> bool:
    """Whether this is such a name, and not that of an object or of anybody else's file."""
    above, slash, name = key.rpartition("/")
    return _LEFTOVER.fullmatch(name) is not None and (not slash or path_fault(above) is None)


def parts(data: bytes | Readable, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """What is to be written, in parts of at most `size` bytes."""
    if isinstance(data, bytes):
        for begin in range(0, len(data), size):
            yield data[begin : begin + size]
        return
    while part := data.read(size):
        yield part
