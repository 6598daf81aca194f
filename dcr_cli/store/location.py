"""The address of a remote: what its parts mean, and what of it may be shown.

Passwords, queries and most user names may be secrets, so they are shown nowhere: not in errors, not by repr.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from dcr_cli.errors import NOT_SET, UsageError

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^?#]*)?::[A-Za-z]")
_ONE_SLASH = re.compile(r"(file|local|memory|https?|s3a?|gc?s|az|abfss?|sftp|ssh):/?(?!/)", re.IGNORECASE)
# No path that is meant as one begins so: USER@HOST:PATH as scp and git have it, or a user and a password.
_WITHOUT_SCHEME = re.compile(r"[^/\s]*@[^/]*:|[^/\s]*:.*@", re.DOTALL)
_LOGIN = "sftp://user@host/path; a folder of such a name: ./NAME"
# Protocols of fsspec by which one looks into something else, or at what is kept of it.
_INTO_A_FILE = frozenset(("zip", "tar", "libarchive"))
_KEPT = frozenset(("simplecache", "filecache", "blockcache", "cached"))
_WITH_QUERY = frozenset(("http", "https"))
# Where a user name is part of what the address means: an account there, or a container.
_WITH_USER = frozenset(("sftp", "ssh", "abfs", "abfss"))


@dataclass(frozen=True, slots=True)
class Location:
    """A remote's address. `path` has no slash at its end; `shown` is all of it that people get to see."""

    protocol: str
    host: str
    port: int | None
    path: str
    shown: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    query: str = field(default="", repr=False)


def is_url(text: str) -> bool:
    """Whether a text is an address and no path."""
    return _PROTOCOL.match(text) is not None


def is_login(text: str) -> bool:
    """Whether a text is an address with a user or a password and no protocol, and no path below what is there."""
    first = text.partition("/")[0]
    # Behind the last @ a version may stand: REMOTE@N.
    return _WITHOUT_SCHEME.match(text) is not None and not any(map(os.path.lexists, (first, first.rpartition("@")[0])))


def folder_of(url: str | os.PathLike[str]) -> str | None:
    """The local folder that a remote is; None if it is elsewhere."""
    location = locate(url)
    return location.path if location.protocol == "file" else None


def locate(url: str | os.PathLike[str]) -> Location:
    """Take an address apart; a path is one without a protocol."""
    text = os.fspath(url)
    if not text:
        raise UsageError("remote", "is an empty address", hint=NOT_SET)
    if _CHAIN.match(text):
        raise UsageError(
            "remote", "an address made of several, with ::, is none of a remote", hint="give the last one, by itself"
        )
    match = _PROTOCOL.match(text)
    if match is None and (missed := _ONE_SLASH.match(text)):
        raise UsageError(
            "remote", f"an address of {missed[1]} begins with {missed[1]}://", hint=f"a folder: ./{missed[1]}:"
        )
    if match is None:
        if isinstance(url, str) and is_login(url):
            raise UsageError("remote", "an address with a user has its protocol in front", hint=_LOGIN)
        return _folder(text, text)
    protocol = match.group(1).lower()
    if protocol in ("file", "local"):
        rest = text[match.end() :]
        if not rest.startswith("/"):
            raise UsageError(f"{protocol}://", "a folder's address has three slashes: file:///path")
        return _folder(rest, text)
    if protocol in _INTO_A_FILE:
        facts = "looks into a file, which no remote is: its objects are put one by one"
        raise UsageError(f"{protocol}://", facts, hint="unpack it, and give the folder that comes of it")
    if protocol in _KEPT:
        facts = "keeps what it has seen, and so would hide new versions"
        raise UsageError(f"{protocol}://", facts, hint="give the address of what is kept by it")
    return _split(protocol, text)


def _folder(path: str, shown: str) -> Location:
    if "\0" in path:
        raise UsageError("remote", "its path has a zero byte")
    return Location("file", "", None, os.path.abspath(path), shown)


def _split(protocol: str, text: str) -> Location:
    parts = None
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        # Its text would show the address.
        parts = None
    if parts is None:
        raise UsageError(f"{protocol}://", "the address cannot be understood: its host or port is not one")
    if protocol not in _WITH_QUERY and parts.query:
        raise UsageError(f"{protocol}://", "has a query; give what it says as storage options")
    if parts.fragment:
        written = "write # as %23" if protocol in _WITH_QUERY else "no # can be part of it"
        raise UsageError(f"{protocol}://", f"has a fragment: {written}")
    # Buckets have names with capitals and underscores, which `hostname` would change.
    host = parts.netloc.rpartition("@")[2]
    if (port is not None or host.endswith(":")) and "@" in parts.path:
        # It may be a password with a slash in it, most of which would be shown as the path.
        facts = "has an @ in its path behind a port, so that a part of a password may be taken for a path"
        hint = "write / in a password as %2F, and over HTTP @ in a path as %40"
        raise UsageError(f"{protocol}://", facts, hint=hint)
    host = host[: -len(f":{port}")] if port is not None else host.removesuffix(":")
    path = parts.path.rstrip("/")
    if any(component in (".", "..") for component in unquote(path).split("/")):
        raise UsageError(f"{protocol}://{host}{path}", "its path has a component . or ..")
    user = unquote(parts.username) if parts.username is not None else None
    place = f"{host}:{port}" if port is not None else host
    if user is not None and protocol in _WITH_USER:
        place = f"{parts.username}@{place}"
    return Location(
        protocol,
        host,
        port,
        path,
        f"{protocol}://{place}{path}",
        user=user,
        password=unquote(parts.password) if parts.password is not None else None,
        query=parts.query,
    )
