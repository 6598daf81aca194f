"""What an engine's requests say to a rank, as values of the right types: what it is a receiver of, and which version is
next.

Whoever sends them is told which member is wrong, before anything is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields

from dcr_cli.checkpoint.names import listed
from dcr_cli.errors import UsageError
from dcr_cli.remote.keys import MOST_VERSION, is_receiver

# No machine has more for one rank.
_MOST_JOBS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rank is a receiver of: the version of `remote` that the engine has loaded, and its folder `checkpoint`.

    With a `name`, rank 3 says as NAME.rank-3 what it has staged and applied. `layouts` is a folder for what was
    learnt, and `key` is added to what that is kept by. `changes` is a folder, one on each host of the engine, in which
    a pull of the same remote leaves what versions change, decoded; without it ranks fetch and decode them. The others
    are as for `Receiver` and `Member`. UsageError for a value of another type.
    """

    # An address, and options, may have a password in them.
    remote: str = field(repr=False)
    version: int
    checkpoint: str | None = None
    name: str | None = None
    layouts: str | None = None
    changes: str | None = None
    key: str = ""
    may_lack: Sequence[str] = ()
    trusted_keys: Sequence[str] = ()
    receiver_key: str | None = None
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)
    jobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            kind.check(name, getattr(self, name))


def settings_of(info: Mapping[str, object]) -> Settings:
    """Read the members of a message. UsageError if one of them is unknown, missing or of another type."""
    known = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(Settings)}
    _check_names("init", info, known)
    return Settings(**info)  # type: ignore[arg-type]


def version_of(info: Mapping[str, object]) -> int:
    """Read the members of a message that asks for a version: which one."""
    _check_names("update", info, {"version": True})
    version = info["version"]
    _VERSION.check("version", version)
    assert isinstance(version, int)
    return version


@dataclass(frozen=True, slots=True)
class _Kind:
    """What values are expected: in words, and whether one is such a one. Values are not shown, as some are secret."""

    expected: str
    fits: Callable[[object], bool]

    def check(self, name: str, value: object) -> None:
        if not self.fits(value):
            found = f", not {value}" if type(value) is int else f", not one of type {type(value).__name__}"
            raise UsageError(name, f"has to be {self.expected}{found}")

    @property
    def or_none(self) -> _Kind:
        return _Kind(self.expected, lambda value: value is None or self.fits(value))


def _is_text(value: object) -> bool:
    return type(value) is str


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


_TEXT = _Kind("a text", _is_text)
_TEXTS = _Kind("a list of texts", _are_texts)
# Ranks add their numbers to it.
_NAME = _Kind(
    "a name of letters, digits, _ . and -, at most 100 of them, the first no . or -",
    lambda value: isinstance(value, str) and is_receiver(value) and len(value) <= 100,
)
_VERSION = _Kind("a number from 1 on", lambda value: type(value) is int and 1 <= value <= MOST_VERSION)
_JOBS = _Kind(f"a number from 1 to {_MOST_JOBS:,}", lambda value: type(value) is int and 1 <= value <= _MOST_JOBS)
_KINDS: Mapping[str, _Kind] = {
    "remote": _TEXT,
    "version": _VERSION,
    "checkpoint": _TEXT.or_none,
    "name": _NAME.or_none,
    "layouts": _TEXT.or_none,
    "changes": _TEXT.or_none,
    "key": _TEXT,
    "may_lack": _TEXTS,
    "trusted_keys": _TEXTS,
    "receiver_key": _TEXT.or_none,
    "storage_options": _Kind("a mapping of texts", _is_mapping).or_none,
    "jobs": _JOBS.or_none,
}


def _check_names(call: str, info: Mapping[str, object], known: Mapping[str, bool]) -> None:
    """Raise UsageError unless these are the members of a call, and all that are needed; `known` says which are."""
    if not _is_mapping(info):
        raise UsageError(f"message {call}", "has to have members by their names")
    if unknown := sorted(set(info) - set(known)):
        raise UsageError(f"message {call}", f"has {listed(unknown)}, unknown to this dcr")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in info]:
        raise UsageError(f"message {call}", f"lacks {listed(missing)}")
