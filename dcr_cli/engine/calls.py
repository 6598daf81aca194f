"""Requests to an engine's HTTP server, by nothing but the standard library: what may be sent twice is tried again,
everything else is sent once.

No proxy is used and no redirect followed: engines are near. What is called, and in which order, is routes.py's.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.json_text import load_json, plain_object
from dcr_cli.errors import DamagedError, HookError, one_line
from dcr_cli.stopping import pause

# How long what takes an engine no time may take it.
SHORT_SECONDS = 60.0
_TRIES, _WAIT_SECONDS = 4, 0.5
_PASSING = frozenset((408, 425, 429, 502, 503, 504))
_MOST_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Server:
    """An engine's server. `what` names it in messages; `token` is shown to it and to nobody else."""

    what: str
    url: str
    token: str | None = None
    sleep: Callable[[float], None] = pause

    def get(self, path: str) -> dict[str, Any]:
        """Ask for a document, and again if that fails in passing. HookError if there is none."""
        return self._again("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send what does no harm if it is sent twice, and again if it fails in passing; HookError if it fails."""
        return self._again("POST", path, body)

    def post_once(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send something once, and wait so long for its answer. HookError if it fails, or nobody knows whether it
        has."""
        try:
            return self._send("POST", path, body, seconds)
        except _PassingError as error:
            raise self._failed(path, str(error)) from error

    def _again(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        end = time.monotonic() + SHORT_SECONDS
        for number in range(_TRIES):
            try:
                return self._send(method, path, body, SHORT_SECONDS)
            except _PassingError as error:
                if number + 1 == _TRIES or time.monotonic() > end:
                    raise self._failed(path, str(error)) from error
            self.sleep(_WAIT_SECONDS * 2**number)
        raise AssertionError

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with _OPENER.open(request, timeout=seconds) as response:
                answer = response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                facts = f"HTTP {error.code}: {_shown(error.read(_MOST_BYTES))}"
            if error.code in _PASSING:
                raise _PassingError(facts) from error
            raise self._failed(path, facts, code=error.code) from error
        except TimeoutError as error:
            raise _PassingError(f"no answer within {seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"{type(error).__name__}: {one_line(str(error))}") from error
        return self._decoded(path, answer)

    def _decoded(self, path: str, answer: bytes) -> dict[str, Any]:
        """The JSON object that is the answer; some routes answer with text alone, which is one without members."""
        try:
            document = load_json(answer, self.what, plain_object)
        except DamagedError:
            return {}
        if not isinstance(document, dict):
            raise self._failed(path, f"answered {_shown(answer)}, which is no object")
        return document

    def _failed(self, path: str, facts: str, *, code: int | None = None) -> CallError:
        return CallError(self.what, f"{path.partition('?')[0]} failed: {facts}", code)


class CallError(HookError):
    """A request that failed; `code` is the status that it was answered with, None without an answer."""

    def __init__(self, what: str, facts: str, code: int | None) -> None:
        super().__init__(what, facts)
        self.code = code


class _PassingError(Exception):
    """What may be different the next time."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What redirects has no such route."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def _shown(answer: bytes) -> str:
    text = one_line(answer.decode(errors="replace").strip())
    return text[:_SHOWN_CHARACTERS] or "no text"
