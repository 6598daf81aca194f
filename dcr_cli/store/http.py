"""A web server as a backend: read only, by GET and HEAD, with nothing but the standard library.

What a server may get wrong and is seen here: pages instead of objects, encoded bodies, ranges that are ignored or
other than asked for. Caches between are asked to look again, for what is there and for what is not. What it asks us to
keep from others, credentials, is sent to no other server that it redirects to.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import io
import re
import socket
import ssl
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.message import Message
from typing import IO
from urllib.parse import quote, urlsplit

from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.store.backend import (
    CHUNK_BYTES,
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    FaultError,
    OutsideError,
    PermanentError,
    Readable,
    Status,
    TransientError,
)
from dcr_cli.store.connections import Connections
from dcr_cli.store.location import Location
from dcr_cli.store.told import told_in

TIMEOUT_SECONDS = 30.0
# Of the page that comes with an error or a redirect, how much is read.
_MOST_READ_BYTES = 64 << 10
_OPTIONS = ("username", "password", "token", "headers")
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
# Longer numbers are none that an object has, and Python does not read all of them.
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)
# What a path that is given as an address may have as it is, % for what is written so already.
_IN_PATHS = "/%:@!$&'()*+,;=~"
_PLAIN_HEADERS = frozenset(("range", "accept-encoding", "cache-control"))
_PAGE_NAMES = (".html", ".htm", ".xhtml")


class HttpBackend:
    """The objects below an address. Options: `username` and `password`, or `token`; `headers` to send along,
    as a mapping or as one "Name: value"."""

    # Not that it could: `create` says that nothing can be written, which to be the only writer does not change.
    can_create = True

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        self._connections = Connections()
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise UsageError(location.shown, f"storage option {unknown[0]} is not one of {', '.join(_OPTIONS)}")
        self._shown = location.shown
        self._root = _address_of(location)
        self._query = f"?{location.query}" if location.query else ""
        self._headers = _headers_of(location, options)
        self._opener = _opener(self._connections)
        # At the latest with this object, or at exit: urllib's parts know each other in a circle.
        weakref.finalize(self, self._connections.close_idle)

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        is_ranged = begin > 0 or size is not None
        end = "" if size is None else begin + size - 1
        response = self._open(key, "GET", {"Range": f"bytes={begin}-{end}"} if is_ranged else {})
        try:
            return _answer(response, key, begin if is_ranged else None)
        except FaultError:
            response.close()
            raise

    def status(self, key: str) -> Status | None:
        try:
            with self._open(key, "HEAD", {}) as response:
                _check_kind(response, key)
                size, modified = _length(response), _modified(response)
        except AbsentError:
            return None
        except (PermanentError, DeniedError):
            # Not every server knows HEAD, and a signature may be one for GET alone.
            try:
                with self._open(key, "GET", {"Range": "bytes=0-0"}) as response:
                    size, modified = _answer(response, key, 0).total, _modified(response)
            except AbsentError:
                return None
            except OutsideError:
                # Of an empty object there is no first byte.
                size, modified = 0, None
        if size is None:
            raise PermanentError("the answer does not say how long it is")
        return Status(size, modified)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        raise self._read_only()

    def create(self, key: str, data: bytes) -> bool:
        raise self._read_only()

    def entries(self, prefix: str) -> Iterator[Entry]:
        raise UnsupportedError(self._shown, "a web server lists nothing")

    def remove(self, key: str) -> None:
        raise self._read_only()

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        raise UnsupportedError(self._shown, "a web server lists nothing")

    def close(self) -> None:
        self._connections.close_idle()

    def _read_only(self) -> UnsupportedError:
        return UnsupportedError(self._shown, "over HTTP a remote can only be read", hint="name it by where it lies")

    def _open(self, key: str, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = f"{self._root}/{quote(key)}{self._query}"
        request = urllib.request.Request(url, method=method, headers={**self._headers, **headers})
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_SECONDS)
            return response
        except urllib.error.HTTPError as error:
            fault = _fault_of(error.code, error.headers, told_in(_page_in(error).decode(errors="replace")))
        except (OSError, http.client.HTTPException) as error:
            fault = _broken(error)
        except ValueError:
            fault = PermanentError("redirects to what is no address")
        raise fault


def _opener(connections: Connections) -> urllib.request.OpenerDirector:
    """What follows redirects and uses the proxies that the environment names, for http and https and nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        connections,
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, without credentials to another server, and never from https to http."""

    max_redirections = 5

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> IO[bytes] | None:
        # Closed here: urllib would read all of it, however much that is.
        page = io.BytesIO(_page_in(fp))
        answer: IO[bytes] | None = super().http_error_302(req, page, code, msg, headers)
        if answer is None:
            # It leads nowhere; other handlers would be given what is closed.
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, page)
        return answer

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise PermanentError("redirects to an address that is not a safe one")
        if new.username is not None or new.password is not None:
            raise PermanentError("redirects to an address with a user name")
        request = urllib.request.Request(newurl, method=req.get_method(), unverifiable=True)
        kept = req.headers if (old.scheme, old.netloc) == (new.scheme, new.netloc) else _plain(req.headers)
        for name, value in kept.items():
            request.add_header(name, value)
        return request


def _page_in(response: IO[bytes]) -> bytes:
    """As much of the page that comes with an error or a redirect as is read; its answer is closed."""
    # What is read to its end leaves a connection that serves again: most often asked is what is not there.
    with response, suppress(OSError, http.client.HTTPException):
        return response.read(_MOST_READ_BYTES)
    return b""


def _plain(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that say nothing about us."""
    return {name: value for name, value in headers.items() if name.lower() in _PLAIN_HEADERS}


def _address_of(location: Location) -> str:
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


def _headers_of(location: Location, options: Mapping[str, object]) -> dict[str, str]:
    # What was not there, or was another object, a moment ago may be there now: a cache on the way is to ask, too.
    headers = {"Accept-Encoding": "identity", "Cache-Control": "no-cache", "User-Agent": "dcr"}
    given = options.get("headers", {})
    if isinstance(given, str):
        name, colon, value = given.partition(":")
        given = {name.strip(): value.strip()} if colon else None
    if not isinstance(given, Mapping):
        raise UsageError(location.shown, 'the storage option headers is not like "Name: value"')
    headers |= {str(name): str(value) for name, value in given.items()}
    user = options.get("username", location.user)
    password = options.get("password", location.password)
    if "token" in options:
        headers["Authorization"] = f"Bearer {options['token']}"
    elif user is not None:
        pair = f"{user}:{password if password is not None else ''}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
    if any(not ((name + value).isprintable() and (name + value).isascii()) for name, value in headers.items()):
        raise UsageError(location.shown, "a storage option has a character that no header can have, as a line break")
    return headers


def _answer(response: http.client.HTTPResponse, key: str, begin: int | None) -> Answer:
    """The answer to a GET, of a range that starts at `begin` unless that is None."""
    _check_kind(response, key)
    length, total, start = _length(response), None, 0
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
        if match is None or begin is None:
            raise PermanentError("answers with a part without saying which, or unasked")
        start, last = int(match[1]), int(match[2])
        total = None if match[3] == "*" else int(match[3])
        if start != begin or last < start or length not in (None, last - start + 1):
            raise PermanentError(f"bytes from {begin} on were asked for, the answer says that it has {start} to {last}")
        length = last - start + 1
    elif response.status == 200:
        total = length
    else:
        raise PermanentError(f"answers with status {response.status}")
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    return Answer(start, length, total, _chunks(response), tag, response.close)


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        fault: FaultError
        try:
            # Not all there is, but all that came: a slow server's bytes are not lost when it breaks off.
            chunk = response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            fault = _broken(error)
        else:
            if not chunk:
                return
            yield chunk
            continue
        raise fault


def _check_kind(response: http.client.HTTPResponse, key: str) -> None:
    encoding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise PermanentError("sends the object encoded, though asked not to")
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml") and not key.endswith(_PAGE_NAMES):
        raise PermanentError(
            "answers with a web page, not with the object", hint="is it the right address, and is a login in between?"
        )


def _length(response: http.client.HTTPResponse) -> int | None:
    text = response.headers.get("Content-Length")
    return int(text) if text is not None and _LENGTH.fullmatch(text.strip()) else None


def _modified(response: http.client.HTTPResponse) -> float | None:
    text = response.headers.get("Last-Modified")
    try:
        return None if text is None else email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _fault_of(status: int, headers: Message, told: str) -> FaultError:
    """What a status other than success means; `told` is what the page with it says, empty where that is not known."""
    if status in (404, 410):
        return AbsentError()
    reason = f"status {status} {told}".rstrip()
    if status == 403:
        return DeniedError(reason)
    if status in (401, 407):
        return PermanentError(f"asks who we are ({reason})", hint="check the credentials")
    if status == 416:
        return OutsideError("ends before the range that was asked for")
    if status in _TRANSIENT:
        after = headers.get("Retry-After") or ""
        return TransientError(f"answers with {reason}", after_seconds=float(after) if after.isdecimal() else 0.0)
    if status in (301, 302, 303, 307, 308):
        return PermanentError("redirects too often, or to nowhere")
    return PermanentError(f"answers with {reason}")


def _broken(error: OSError | http.client.HTTPException) -> FaultError:
    """What a broken connection is: all of it may pass, but a certificate that is not trusted."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return PermanentError("its certificate is not to be trusted")
    if isinstance(reason, http.client.InvalidURL):
        return PermanentError("redirects to what is no address")
    if isinstance(reason, TimeoutError):
        return TransientError(f"did not answer in {TIMEOUT_SECONDS:.0f} s")
    if isinstance(reason, socket.gaierror):
        return TransientError("its host name is not known")
    if isinstance(reason, OSError) and reason.strerror:
        return TransientError(reason.strerror)
    return TransientError("the connection broke")
