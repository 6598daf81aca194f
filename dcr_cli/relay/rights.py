"""Who may do what at a relay (FORMAT 15.5): by which token a request shows itself (pure)."""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass, field
from enum import IntEnum

from dcr_cli.relay.kinds import Kind, Named


class Right(IntEnum):
    """What a request may do; each includes the ones before."""

    NOTHING = 0
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Rights:
    """The tokens of a relay; None where none is needed to read, and nobody may write, unless it `is_open`, to all who
    can reach it."""

    read_token: str | None = field(default=None, repr=False)
    write_token: str | None = field(default=None, repr=False)
    is_open: bool = False

    def of(self, authorization: str | None) -> Right:
        """What the header of a request lets it do."""
        shown = _token_in(authorization or "")
        # Both are compared, each in constant time, whatever the other one says.
        is_write = _is_same(shown, self.write_token)
        is_read = _is_same(shown, self.read_token)
        if is_write:
            return Right.WRITE
        if is_read or self.read_token is None:
            return Right.WRITE if self.is_open else Right.READ
        return Right.NOTHING


def needed_to_put(asked: Named) -> Right:
    """What putting an object needs: to say how far one is, no more than to read."""
    return Right.READ if asked.kind is Kind.ACKNOWLEDGEMENT else Right.WRITE


def _is_same(shown: str, token: str | None) -> bool:
    # Of a token that is not there, something of its kind is compared.
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), (token or "-").encode()) and token is not None


def _token_in(authorization: str) -> str:
    """The token that a header shows: as a bearer's, or as the password of a user."""
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
