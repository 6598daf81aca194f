"""The errors of dcr: what went wrong, what to do next, and the exit code.

    DcrError
        UsageError            2   the command cannot be understood
        NotFoundError         3   no such checkpoint, delta, remote or version
        DamagedError          4   malformed, unsafe, or not the digest it should have
            IncompleteError   4   a change of this checkpoint was stopped and must be finished
        WrongBaseError        5   another base, history or state than the one asked for
        ConflictError         6   somebody else holds or changed it; try again
        TransportError        7   a remote did not answer
        UnsupportedError      8   a format version, feature, capability or package that is not there
        LocalError            9   the local disk or memory refused
        HookError            10   a hook or engine failed after the bytes were in place

Printing them is not this module's work.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

# The hint for an argument that is empty.
NOT_SET = "perhaps a variable of the shell is not set"


class DcrError(Exception):
    """An error that a user can act on.

    `what` names the file, tensor or argument; `facts` says what was expected and what was found. The message is one
    line, `what: facts`, with control characters escaped. `hint` is the next thing to do.
    """

    exit_code = 70
    retryable = False
    # What programs are told besides, as members of the JSON document.
    details: Mapping[str, bool | int] = {}

    def __init__(self, what: str, facts: str, *, hint: str | None = None) -> None:
        self.what = one_line(what)
        self.facts = one_line(facts)
        self.hint = one_line(hint) if hint is not None else None
        super().__init__(f"{self.what}: {self.facts}")

    @property
    def class_name(self) -> str:
        """The class that programs know it by: the nearest in this module's tree."""
        return next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__)


class UsageError(DcrError):
    exit_code = 2


class NotFoundError(DcrError):
    exit_code = 3


class DamagedError(DcrError):
    exit_code = 4


class IncompleteError(DamagedError):
    """A change of a checkpoint was stopped between its first and last step."""


class WrongBaseError(DcrError):
    exit_code = 5


class ConflictError(DcrError):
    exit_code = 6
    retryable = True


class TransportError(DcrError):
    exit_code = 7
    retryable = True


class UnsupportedError(DcrError):
    exit_code = 8


class LocalError(DcrError):
    exit_code = 9


class HookError(DcrError):
    exit_code = 10


# The hint for what the system forbids.
MAY_NOT = "run as a user who may, or have its mode changed"
# The hint for links that lead nowhere.
IN_A_CIRCLE = "readlink shows where a link leads; have it lead to what is meant"


def install_hint(extra: str) -> str:
    """The hint for a package that is not there: which extra of dcr brings it."""
    return f"pip install 'dcr-cli[{extra}]'"


def hint_of(error: OSError) -> str | None:
    """What to do about what the system refuses, where that is not plain from its own words."""
    return _HINTS.get(error.errno or 0)


_HINTS = {
    errno.EACCES: MAY_NOT,
    errno.EPERM: MAY_NOT,
    errno.ELOOP: IN_A_CIRCLE,
    errno.EROFS: "its file system is mounted read-only; choose another place",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.EIO: "the disk fails; see the system's log",
    errno.ESTALE: "its network mount has lost it; try again",
}


def size(count_bytes: int) -> str:
    """Write a number of bytes with three significant digits."""
    number, unit = float(count_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    return f"{count_bytes} B" if unit == "B" else f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def one_line(text: str) -> str:
    """Escape what would break a line, move a cursor or fail to encode; everything printable stays."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
