"""What is read through a store: whole objects, parts of them, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.names import safe_path
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError
from dcr_cli.store.backend import AbsentError, Answer, Backend, FaultError, OutsideError, Status, TransientError
from dcr_cli.store.body import body
from dcr_cli.store.calls import Calls
from dcr_cli.store.retry import Attempts, Patience
from dcr_cli.store.traffic import Meter, Metered, Traffic


class Reading:
    """The half of a store that changes nothing, and its lifetime: what it says of errors holds for all of it."""

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
    def patience(self) -> Patience:
        """How long what may pass is tried again: what is asked of the remote, and what it is to hold soon."""
        return self._calls.patience

    @property
    def traffic(self) -> Traffic:
        """What was asked for and moved since the store was opened."""
        return self._meter.traffic

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


def _is_of_another(first: Answer, second: Answer) -> bool:
    """Whether two answers say that they are of different objects, by size or by what their content is known by."""
    pairs = ((first.total, second.total), (first.tag, second.tag))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)
