"""One operation of a store: tried while that may help, and its fault turned into the error that people get.

The error says which object, what happened, and what to do about it; of what a library or server said no more than the
fault does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dcr_cli.checkpoint.names import safe_path
from dcr_cli.errors import DamagedError, NotFoundError, TransportError
from dcr_cli.store.backend import (
    AbsentError,
    DeniedError,
    FaultError,
    MissingRootError,
    OutsideError,
    TransientError,
)
from dcr_cli.store.retry import OutOfPatienceError, Patience, retrying

T = TypeVar("T")

_DENIED_HINT = (
    "check the credentials and what they may do; without the right to list, some remotes say so of what is not there"
)


class RefusedError(TransportError):
    """A remote answered, and trying again will not change the answer."""

    retryable = False


class Calls:
    """The operations on the remote that is shown as `shown`, by the process that opened it."""

    def __init__(self, shown: str, patience: Patience) -> None:
        self.shown = shown
        self.patience = replace(patience, what=shown)
        self._process = os.getpid()

    def name(self, key: str) -> str:
        """How an object is named to people."""
        return f"{self.shown.rstrip('/')}/{key.lstrip('/')}"

    def check(self, key: str) -> None:
        """Raise DamagedError unless the key is a safe path, RuntimeError in another process than the store's."""
        safe_path(key, self.shown)
        self.check_process()

    def check_process(self) -> None:
        if os.getpid() != self._process:
            # Its locks, threads and connections are the other process's.
            raise RuntimeError("a store is of no use to a process that was made by fork after it was opened")

    def run(self, key: str, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns, for a key."""
        self.check(key)
        return self.guarded(key, attempt)

    def run_or_none(self, key: str, attempt: Callable[[], T], is_denied_absent: bool) -> T | None:
        """The same, but None if the object is not there, or denied and that is said to mean the same."""

        def absent_is_none() -> T | None:
            try:
                return attempt()
            except AbsentError:
                return None
            except DeniedError:
                if not is_denied_absent:
                    raise
                return None

        return self.run(key, absent_is_none)

    def guarded(self, key: str, attempt: Callable[[], T]) -> T:
        """The same for any name of what it is about."""
        self.check_process()
        try:
            return retrying(attempt, self.patience)
        except FaultError as error:
            fault = error
        # Outside the handler, so that no text of a library comes along as this error's context.
        raise self.error(key, fault)

    def run_once(self, key: str, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns, for a key; whoever asks tries again if that helps."""
        self.check(key)
        fault: FaultError
        try:
            return attempt()
        except TransientError as error:
            fault = OutOfPatienceError(error.reason)
        except FaultError as error:
            fault = error
        raise self.error(key, fault)

    def error(self, key: str, fault: FaultError) -> NotFoundError | DamagedError | TransportError:
        """The error that a fault is."""
        return _error_of(self.shown, self.name(key), fault)


def _error_of(root: str, name: str, fault: FaultError) -> NotFoundError | DamagedError | TransportError:
    if isinstance(fault, AbsentError):
        return NotFoundError(name, fault.reason)
    if isinstance(fault, MissingRootError):
        return NotFoundError(root, fault.reason)
    if isinstance(fault, OutsideError):
        return DamagedError(name, fault.reason)
    if isinstance(fault, DeniedError):
        return RefusedError(name, f"access is denied: {fault.reason}", hint=fault.hint or _DENIED_HINT)
    if isinstance(fault, OutOfPatienceError):
        return TransportError(name, fault.reason, hint=fault.hint or "run the same command again later")
    return RefusedError(name, fault.reason, hint=fault.hint)
