"""Requests to web servers and what becomes of them: redirects, refusals, and connections that break.

What a request is for, and what an answer to it says, is not its business. Credentials, and whatever else we are asked
to send along, go to no other server that one redirects to; and nothing that is to be written is redirected.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from typing import IO
from urllib.parse import urlsplit

from dcr_cli.store.backend import (
    AbsentError,
    DeniedError,
    FaultError,
    OutsideError,
    PermanentError,
    TransientError,
)
from dcr_cli.store.connections import Connections
from dcr_cli.store.sockets import Body, SilentError
from dcr_cli.store.told import plain_words, told_in

TIMEOUT_SECONDS = 30.0
# Of the page that comes with an error or a redirect, how much is read.
_MOST_READ_BYTES = 64 << 10
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
_SHOW_TOKEN = (
    "--storage-option token_file=FILE shows it the token in a file, username=NAME and password=TEXT a user; "
    "where one was given, it is not one that it knows"
)
_PROXY = "check the credentials of the proxy that the environment names"
_PLAIN_HEADERS = frozenset(("range", "accept-encoding", "cache-control"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is no success."""

    status: int
    headers: Message
    page: bytes

    @property
    def is_in_plain_words(self) -> bool:
        """Whether it says why as a relay does, in plain text, and not as a page or in XML."""
        return self.headers.get_content_type() == "text/plain" and "Content-Type" in self.headers

    @property
    def fault(self) -> FaultError:
        """What it means for one attempt."""
        text = self.page.decode(errors="replace")
        return _fault_of(self.status, self.headers, plain_words(text) if self.is_in_plain_words else told_in(text))


class Client:
    """Asks web servers, over connections that are kept; `headers` go along with every request."""

    def __init__(self, connections: Connections, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._opener = _opener(connections)

    def ask(
        self,
        url: str,
        method: str,
        headers: Mapping[str, str],
        *,
        body: Body | None = None,
        seconds: float = TIMEOUT_SECONDS,
    ) -> http.client.HTTPResponse | Refusal:
        """Ask, and return the answer, which has to be closed. Nothing may happen for `seconds` at most.

        A fault where there is no answer.
        """
        request = urllib.request.Request(url, method=method, headers={**self._headers, **headers})
        if body is not None:
            # Connections sends it. It comes before its headers: urllib removes those of what it takes for other data.
            request.data = body  # type: ignore[assignment]
            request.add_header("Content-Length", str(body.size))
            request.add_header("Content-Type", "application/octet-stream")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=seconds)
            return response
        except urllib.error.HTTPError as error:
            return Refusal(error.code, error.headers, _page_in(error))
        except (OSError, http.client.HTTPException) as error:
            fault = broken(error)
        except ValueError:
            fault = PermanentError("redirects to what is no address")
        # Outside the handler, so that no text of a library comes along as this fault's context.
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
        if req.data is not None:
            raise PermanentError("redirects what is to be written", hint="name the address that it redirects to")
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


def _fault_of(status: int, headers: Message, told: str) -> FaultError:
    """What a status other than success means; `told` is what the page with it says, empty where that is not known."""
    if status in (404, 410):
        return AbsentError()
    reason = f"status {status} {told}".rstrip()
    if status == 403:
        return DeniedError(reason)
    if status in (401, 407):
        return PermanentError(f"asks who we are ({reason})", hint=_SHOW_TOKEN if status == 401 else _PROXY)
    if status == 416:
        return OutsideError("ends before the range that was asked for")
    if status in _TRANSIENT:
        after = headers.get("Retry-After") or ""
        return TransientError(f"answers with {reason}", after_seconds=float(after) if after.isdecimal() else 0.0)
    if status in (301, 302, 303, 307, 308):
        return PermanentError("redirects too often, or to nowhere")
    return PermanentError(f"answers with {reason}")


def broken(error: OSError | http.client.HTTPException) -> FaultError:
    """What a broken connection is: all of it may pass, but a certificate that is not trusted."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        hint = "SSL_CERT_FILE=FILE names one with the certificates that are to be trusted"
        return PermanentError("its certificate is not to be trusted", hint=hint)
    if isinstance(reason, http.client.InvalidURL):
        return PermanentError("redirects to what is no address")
    if isinstance(reason, TimeoutError):
        seconds = reason.seconds if isinstance(reason, SilentError) else TIMEOUT_SECONDS
        return TransientError(f"did not answer in {seconds:.0f} s")
    if isinstance(reason, socket.gaierror):
        return TransientError("its host name is not known")
    if isinstance(reason, OSError) and reason.strerror:
        return TransientError(reason.strerror)
    return TransientError("the connection broke")
