"""How a web server is asked: the address that requests begin with, and the headers that say who asks and by what right.

They are made of a remote's address and of storage options. No error repeats an option's value: it may be a secret.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from dcr_cli.arguments import is_visible
from dcr_cli.errors import LocalError, UsageError, hint_of
from dcr_cli.store.location import Location

_OPTIONS = ("username", "password", "token", "token_file", "headers")
_MOST_TOKEN_FILE_BYTES = 16 << 10
# What a path that is given as an address may have as it is, % for what is written so already.
_IN_PATHS = "/%:@!$&'()*+,;=~"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_TOKEN = "visible characters of ASCII without blanks are expected"
_CALLERS = {"receiver": "Dcr-Receiver", "relay": "Dcr-Relay"}


class Caller(NamedTuple):
    """Who asks, for what a relay tells of its children (FORMAT 15.4)."""

    kind: Literal["receiver", "relay"]
    name: str


def address_of(location: Location) -> str:
    """The root as requests have it: a character that an address cannot have is written as one can."""
    host: bytes | None = b""
    try:
        host = location.host.encode("idna") if location.host else b""
    except UnicodeError:
        host = None
    if not host or not location.host.isprintable() or " " in location.host:
        raise UsageError(f"{location.protocol}://", "names no host")
    port = f":{location.port}" if location.port is not None else ""
    return f"{location.protocol}://{host.decode('ascii')}{port}{quote(location.path, safe=_IN_PATHS)}"


def headers_of(location: Location, options: Mapping[str, object], caller: Caller | None) -> dict[str, str]:
    """The headers that all requests have. Options: `username` and `password`, or `token`, or `token_file`, a file whose
    first line is one; `headers` to send along, as a mapping or as one "Name: value"."""
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(location.shown, f"storage option {unknown[0]} is not one of {', '.join(_OPTIONS)}")
    # What was not there, or was another object, a moment ago may be there now: a cache on the way is to ask, too.
    headers = {"Accept-Encoding": "identity", "Cache-Control": "no-cache", "User-Agent": "dcr"}
    if caller is not None:
        kind, name = caller
        headers[_CALLERS[kind]] = name
    given = options.get("headers", {})
    if isinstance(given, str):
        name, colon, value = given.partition(":")
        given = {name.strip(): value.strip()} if colon else None
    if not isinstance(given, Mapping):
        raise UsageError(location.shown, 'the storage option headers is not like "Name: value"')
    if not all(_HEADER_NAME.fullmatch(str(name)) for name in given):
        raise UsageError(location.shown, "the storage option headers has a name that no header can have")
    headers |= {str(name): str(value) for name, value in given.items()}
    right = _right(location, options)
    if right is not None:
        headers["Authorization"] = right
    if any(not ((name + value).isprintable() and (name + value).isascii()) for name, value in headers.items()):
        raise UsageError(location.shown, "a storage option has a character that no header can have, as a line break")
    return headers


def _right(location: Location, options: Mapping[str, object]) -> str | None:
    if "token" in options and "token_file" in options:
        raise UsageError(location.shown, "the storage options token and token_file exclude each other")
    if "token_file" in options:
        return f"Bearer {_token_in(str(options['token_file']))}"
    if "token" in options:
        if not is_visible(token := str(options["token"])):
            raise UsageError(location.shown, f"the storage option token is none: {_NO_TOKEN}")
        return f"Bearer {token}"
    user = options.get("username", location.user)
    if user is None:
        return None
    password = options.get("password", location.password)
    pair = f"{user}:{password if password is not None else ''}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def _token_in(name: str) -> str:
    """The first line of a file."""
    if not name:
        raise UsageError("token_file", "an empty path")
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MOST_TOKEN_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        hint = hint_of(error) if isinstance(error, OSError) else None
        raise LocalError(name, f"the token in it cannot be read: {reason}", hint=hint) from None
    if len(data) > _MOST_TOKEN_FILE_BYTES:
        raise UsageError(
            name, f"is larger than the {_MOST_TOKEN_FILE_BYTES} bytes that a file with a token has at most"
        )
    lines = data.splitlines()
    token = lines[0].strip() if lines else b""
    # Not even what is wrong with it is said in more detail: of what the file is, nothing is known.
    if not is_visible(text := token.decode("ascii", "replace")):
        raise UsageError(name, f"its first line is no token: {_NO_TOKEN}")
    return text
