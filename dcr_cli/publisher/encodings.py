"""Which encodings a publisher may use: what a remote allows, and of that what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from dcr_cli.delta.choice import ALLOWED, Allowed
from dcr_cli.errors import UsageError
from dcr_cli.remote.history import ENCODINGS, History

_KINDS = {ENCODINGS: "auto", ("context", "whole"): "context", ("gap", "whole"): "gap", ("whole",): "whole"}


def chosen_encodings(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The encodings that a new remote is to allow, in their order; None if that was not said."""
    if given is None:
        return None
    chosen = tuple(name for name in ENCODINGS if name in given)
    if set(given) - set(ENCODINGS) or chosen not in _KINDS:
        facts = f"whole and any of context and gap expected, found {','.join(given)}"
        hint = "such as context,gap,whole, which is the default, or gap,whole: each needs whole beside it"
        raise UsageError("--encodings", facts, hint=hint)
    return chosen


def allowed_in(history: History, encoding: str, name: str = "encoding") -> Allowed:
    """What a delta may use: what the remote allows, and of that what was asked for by the argument `name`."""
    if encoding not in ALLOWED:
        raise UsageError(name, f"one of {', '.join(ALLOWED)} expected, found {encoding!r}")
    if encoding == "auto":
        return ALLOWED[_KINDS[tuple(name for name in ENCODINGS if name in history.encodings)]]
    if encoding not in history.encodings:
        facts = f"the remote allows {','.join(history.encodings)} alone, not {encoding}"
        raise UsageError(name, facts, hint="leave it out")
    return ALLOWED[encoding]
